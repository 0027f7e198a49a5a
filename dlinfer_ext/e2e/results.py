"""What came of a scenario: its engine runs, how each was judged, and what it counted."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from .compare import Verdict
from .simulation import Acceptance


@dataclass
class RunReport:
    """One engine run and how it was judged."""

    label: str
    drafts: int
    verdicts: list[Verdict]
    failures: list[str]
    counters: dict[str, int]
    acceptance: Acceptance | None
    seconds: float
    tokens: int
    steps: int
    executor: str
    records: list[dict[str, Any]]
    soak: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "drafts": self.drafts,
            "failures": self.failures,
            "rules": [{"rule": v.rule, **v.facts} for v in self.verdicts],
            "counters": self.counters,
            "acceptance": asdict(self.acceptance) if self.acceptance else None,
            "seconds": round(self.seconds, 2),
            "tokens": self.tokens,
            "steps": self.steps,
            "tokens_per_step": round(self.tokens / self.steps, 2) if self.steps else None,
            "tokens_per_second": round(self.tokens / self.seconds, 1) if self.seconds else 0.0,
            "executor": self.executor,
            "soak": self.soak,
        }


@dataclass
class ScenarioReport:
    """One scenario on one target."""

    name: str
    what: str
    reference: str
    dtype: str
    seconds: float = 0.0
    runs: list[RunReport] = field(default_factory=list)
    error: str | None = None

    @property
    def failures(self) -> list[str]:
        lines = [f"{r.label}: {f}" for r in self.runs for f in r.failures]
        return lines if self.error is None else [*lines, self.error]

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "what": self.what,
            "reference": self.reference,
            "dtype": self.dtype,
            "holds": not self.failures,
            "seconds": round(self.seconds, 1),
            "error": self.error,
            "runs": [r.as_dict() for r in self.runs],
        }
