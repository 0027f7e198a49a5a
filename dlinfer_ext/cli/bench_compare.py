"""Compare two records of `bench`: what got slower beside its baselines, asks for more, or is gone.

Milliseconds of two runs are never compared: each run saw its own machine. A case's ratio to a baseline that was timed
in turn with it is compared, and its counts, which do not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from .bench_record import Record, Result

COUNTED = ("calls", "host_reads", "launches", "bytes")


@dataclass
class Comparison:
    """What differs, in lines for a reader.

    Attributes:
        slower: cases whose ratio to a baseline fell by more than the limit, quartiles apart.
        unclear: the same with quartiles that overlap, and targets missed within them: noise until it is measured again.
        more: cases that make more calls, host reads or launches, or move more bytes, by more than the limit; any host
            read where there was none.
        vanished: cases, and baselines of cases, that the new record lacks.
        failing: cases of the new record that do not hold and did in the old one.
        appeared: cases that the old record lacks.
        differ: versions, threads and routes that differ; so do, by their nature, ratios then.
        compared: ratios compared.
        untimed: cases of both records without a baseline in common, of which only counts were compared.
    """

    slower: list[str] = field(default_factory=list)
    unclear: list[str] = field(default_factory=list)
    more: list[str] = field(default_factory=list)
    vanished: list[str] = field(default_factory=list)
    failing: list[str] = field(default_factory=list)
    appeared: list[str] = field(default_factory=list)
    differ: list[str] = field(default_factory=list)
    compared: int = 0
    untimed: int = 0

    @property
    def held(self) -> bool:
        return not (self.slower or self.more or self.vanished or self.failing)

    def as_dict(self) -> dict[str, object]:
        return asdict(self) | {"held": self.held}


def compare(old: Record, new: Record, limit: float = 1.25) -> Comparison:
    """Compare two records.

    Args:
        old: what was.
        new: what is.
        limit: how many times lower a ratio, or higher a count, may be.

    Raises:
        ValueError: the limit is below 1, or one record is of operators and the other of the engine.
    """
    if limit < 1:
        raise ValueError(f"--limit {limit:g}: wanted 1 or more, the factor by which a case may get slower")
    if old.what != new.what:
        raise ValueError(
            f"the first file is of `bench {old.what}`, the second of `bench {new.what}`; wanted two of one"
        )
    found = Comparison(differ=list(_differ(old, new)))
    after = {case.name: case for case in new.cases}
    for case in old.cases:
        now = after.pop(case.name, None)
        if now is None:
            found.vanished.append(case.name)
            continue
        _times(case, now, limit, found)
        found.more += _counts(case, now, limit)
        if case.held and not now.held:
            side = next(iter(now.baselines.values()), None)
            noise = now.model_copy(update={"target": None}).held and side and side.high >= (now.target or 0)
            why = "; ".join(now.problems) or "misses its target or memory limit"
            (found.unclear if noise else found.failing).append(f"{case.name}: {why}")
    found.appeared = list(after)
    return found


def _differ(old: Record, new: Record) -> Iterator[str]:
    for name in sorted({*old.versions, *new.versions}):
        was, now = old.versions.get(name, "none"), new.versions.get(name, "none")
        if was != now:
            yield f"{name}: {was} → {now}"
    for name in ("commit", "cpu", "threads", "route"):
        was, now = getattr(old, name), getattr(new, name)
        if was != now:
            yield f"{name}: {was} → {now}"


def _times(case: Result, now: Result, limit: float, found: Comparison) -> None:
    both = 0
    for name, before in case.baselines.items():
        beside = now.baselines.get(name)
        if beside is None:
            found.vanished.append(f"{case.name}, beside {name}: {now.missing.get(name, 'not measured')}")
            continue
        both += 1
        if before.speedup > beside.speedup * limit:
            apart = beside.high < before.low
            (found.slower if apart else found.unclear).append(
                f"{case.name}, beside {name}: {before.speedup:.2f} → {beside.speedup:.2f} times as fast "
                f"({before.speedup / beside.speedup:.2f} > {limit:g}; quartiles {before.low:.2f}-{before.high:.2f} → "
                f"{beside.low:.2f}-{beside.high:.2f})"
            )
    found.compared += both
    found.untimed += not both


def _counts(case: Result, now: Result, limit: float) -> Iterator[str]:
    if case.counts is None or now.counts is None:
        return
    for name in COUNTED:
        was, value = getattr(case.counts, name), getattr(now.counts, name)
        if was is not None and value is not None and value > was * limit:
            yield f"{case.name}: {name.replace('_', ' ')} {was:g} → {value:g}"
