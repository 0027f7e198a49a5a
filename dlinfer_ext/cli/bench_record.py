"""What `bench` measured, where and with what: one record, written as JSON or CSV and read again by `bench compare`."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from .. import envs
from ..version import __version__

PACKAGES: Final = ("torch", "lmdeploy", "transformers")
SUFFIXES: Final = (".json", ".csv", ".md")


class RecordError(ValueError):
    """A file that cannot be written or read as a record; the message says what is wanted."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Counts(_Model):
    """What one run of a side dispatched; see bench_counts.py for what each number is.

    Attributes:
        calls: PyTorch calls that compute or move something.
        host_reads: reads of a tensor's value by the host.
        launches: launches of Triton kernels.
        bytes: bytes of the tensors that the calls took and gave, views aside; None where kernels moved some uncounted.
    """

    calls: float
    host_reads: float
    launches: float = 0
    bytes: float | None = None


class Baseline(_Model):
    """Another formulation of a case's work, timed in turn with it.

    Attributes:
        ms: median milliseconds.
        speedup: its median over the case's.
        low, high: quartiles of the ratios of single rounds, each of which ran both one after the other.
        counts: of one run.
    """

    ms: float
    speedup: float
    low: float
    high: float
    counts: Counts | None = None


class Engine(_Model):
    """What an engine case shows beside times.

    Attributes:
        tokens_per_second: of the median round; of this machine at that time, so nothing to compare with other runs.
        steps: decode or verify steps of the first round.
        tokens_per_step: new tokens per row of a decode or verify step.
        accepted: drafts accepted per row of a verify step, mean; None without drafts.
        identical: every round of every side gave the same tokens.
    """

    tokens_per_second: float
    steps: int
    tokens_per_step: float
    accepted: float | None = None
    identical: bool = True


class Result(_Model):
    """One case.

    Attributes:
        name, family: which; names are unique in a record.
        growth, point: the growth curve that it is a point of, and where on it.
        runs: rounds measured.
        tokens: tokens of one run.
        ms, spread: median milliseconds and the distance of the outer quartiles over it.
        counts: of one run, or per step of an engine.
        baselines: by name.
        missing: baselines asked for that could not run, with why.
        target: how many times faster than the first baseline it has to be.
        copy_ratio: times a plain copy of the bytes that the work must move.
        extra_memory, memory_limit: peak of fresh bytes as a multiple of what the limit is stated in.
        engine: of a case of `bench engine`.
    """

    name: str
    family: str
    growth: str | None = None
    point: int | None = None
    runs: int
    tokens: int | None = None
    ms: float
    spread: float
    counts: Counts | None = None
    baselines: dict[str, Baseline] = {}
    missing: dict[str, str] = {}
    target: float | None = None
    copy_ratio: float | None = None
    extra_memory: float | None = None
    memory_limit: float | None = None
    engine: Engine | None = None

    @property
    def speedup(self) -> float | None:
        """Against the first baseline, which the target is about."""
        return next((b.speedup for b in self.baselines.values()), None)

    @property
    def held(self) -> bool:
        fast = self.target is None or (self.speedup is not None and self.speedup >= self.target)
        small = self.memory_limit is None or (self.extra_memory is not None and self.extra_memory <= self.memory_limit)
        return fast and small and not self.problems

    @property
    def problems(self) -> list[str]:
        """What an engine case must show and does not: a path that did not run is not fast."""
        if self.engine is None:
            return []
        found = [] if self.engine.identical else ["tokens differ between the sides or rounds"]
        if self.engine.steps == 0:
            found.append("no decode or verify step was counted")
        if self.engine.accepted == 0:
            found.append("no draft was accepted")
        return found

    def bytes_per_token(self, counts: Counts | None) -> float | None:
        return counts.bytes / self.tokens if counts and counts.bytes is not None and self.tokens else None


class Record(_Model):
    """A run of `bench ops` or `bench engine`."""

    format: Literal[1] = 1
    what: Literal["ops", "engine"]
    command: str
    date: str
    commit: str
    cpu: str
    threads: int
    route: str
    versions: dict[str, str]
    cases: list[Result]


def commit() -> str:
    """Return the commit of the checkout that this package runs from, "+" for local changes, or its version."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return f"version {__version__}"

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return f"version {__version__}"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def record(
    what: Literal["ops", "engine"], command: str, threads: int, cases: Sequence[Result], of: str | None = None
) -> Record:
    """Return the record of a run that ends now, on this machine; `of` is the commit at its start (default: now's)."""
    return Record(
        what=what,
        command=command,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        commit=of or commit(),
        cpu=_cpu(),
        threads=threads,
        route=envs.ROUTE.get(),
        versions={"dlinfer_ext": __version__, "python": platform.python_version()}
        | {package: _version(package) for package in PACKAGES},
        cases=list(cases),
    )


def check_name(path: Path) -> None:
    """Refuse a results file before minutes are spent on what it is to hold.

    Raises:
        RecordError: the suffix is not one of `SUFFIXES`, or the folder does not exist.
    """
    if path.suffix not in SUFFIXES:
        raise RecordError(f"--out: {path} ends in {path.suffix!r}; wanted {' or '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise RecordError(f"--out: there is no folder {path.parent}; make it first")


def write(found: Record, path: Path) -> None:
    """Write a record: JSON whole, CSV with one row per case and side. For Markdown see bench_text.py.

    Raises:
        RecordError: see `check_name`.
    """
    check_name(path)
    if path.suffix == ".json":
        path.write_text(found.model_dump_json(indent=1, exclude_none=True) + "\n", encoding="utf-8")
        return
    with path.open("w", encoding="utf-8", newline="") as stream:
        rows = csv.DictWriter(stream, COLUMNS)
        rows.writeheader()
        rows.writerows(_rows(found))


COLUMNS: Final = (
    "what", "commit", "date", "cpu", "threads", "route",
    *(f"version_{p}" for p in ("dlinfer_ext", "python", *PACKAGES)),
    "family", "case", "growth", "point", "side", "runs", "tokens", "ms", "spread", "speedup", "low", "high", "target",
    "held", "copy_ratio", "extra_memory", "memory_limit", "calls", "host_reads", "launches", "bytes_per_token",
    "tokens_per_second", "steps", "tokens_per_step", "accepted", "missing",
)  # fmt: skip


def _rows(found: Record) -> list[dict[str, object]]:
    run: dict[str, object] = {"what": found.what, "commit": found.commit, "date": found.date, "cpu": found.cpu}
    run |= {"threads": found.threads, "route": found.route}
    run |= {f"version_{name}": version for name, version in found.versions.items()}
    rows: list[dict[str, object]] = []
    for case in found.cases:
        which = run | {"family": case.family, "case": case.name, "growth": case.growth, "point": case.point}
        which |= {"runs": case.runs, "tokens": case.tokens}

        def counted(counts: Counts | None, of: Result = case) -> dict[str, object]:
            if counts is None:
                return {}
            return counts.model_dump(exclude={"bytes"}) | {"bytes_per_token": of.bytes_per_token(counts)}

        own = case.model_dump(
            include={"ms", "spread", "speedup", "target", "copy_ratio", "extra_memory", "memory_limit"}
        )
        if case.engine:
            own |= case.engine.model_dump(exclude={"identical"})
        rows.append(which | {"side": "ours", "held": case.held} | own | counted(case.counts))
        for name, side in case.baselines.items():
            rows.append(which | {"side": name} | side.model_dump(exclude={"counts"}) | counted(side.counts))
        rows += [which | {"side": name, "missing": why} for name, why in case.missing.items()]
    return rows


def read(path: Path) -> Record:
    """Read the JSON of a record.

    Raises:
        RecordError: there is no such file, or it is not the record of a `bench` of this version.
    """
    try:
        return Record.model_validate_json(path.read_bytes())
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}; wanted a file that `bench ops --out` wrote") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise RecordError(
            f"{path}: {where}: {first['msg']}; wanted the JSON that `bench ops --out FILE.json` writes"
        ) from None
