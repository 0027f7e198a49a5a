"""Measure a benchmark case: operator, copy and baselines in turn, so that all see the same machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterable

from .bench_cases import Case, Form, MissingBaseline
from .bench_counts import measure as count
from .bench_record import Baseline, Result

# A median needs three.
LEAST_ROUNDS = 3


def milliseconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def quartiles(values: Iterable[float]) -> tuple[float, float]:
    """Return the values a quarter from below and from above, the outermost of fewer than eight."""
    order = sorted(values)
    quarter = max(1, len(order) // 4)
    return order[quarter - 1], order[-quarter]


def spread(values: Collection[float]) -> float:
    low, high = quartiles(values)
    return (high - low) / statistics.median(values)


def beside(own: Collection[float], other: Collection[float]) -> Baseline:
    """Return a baseline from its times and the case's of the same rounds."""
    low, high = quartiles(b / a for a, b in zip(own, other, strict=True))
    ms = statistics.median(other)
    return Baseline(ms=ms, speedup=ms / statistics.median(own), low=low, high=high)


def measure(
    case: Case,
    family: str,
    rounds: int,
    seconds: float,
    compare: Collection[str] | None = None,
    *,
    kernel_bytes: bool = False,
) -> Result:
    """Time a case and its baselines, and count what each of them calls.

    Args:
        case: what to measure.
        family: of the result.
        rounds: most rounds; each runs every side once.
        seconds: no round starts after that time, but for the first `LEAST_ROUNDS`.
        compare: names of the baselines, None for all that the case has.
        kernel_bytes: see `bench_counts.measure`.
    """
    missing: dict[str, str] = {}
    others: dict[str, Form] = {}
    case.run()  # also makes what is made on first use, and so do the counted runs below
    case.copy()
    for name, form in case.baselines.items():
        if compare is not None and name not in compare:
            continue
        try:
            form()
        except MissingBaseline as error:
            missing[name] = str(error)
        else:
            others[name] = form
    sides = [case.run, case.copy, *others.values()]
    times: list[list[float]] = []
    end = time.monotonic() + seconds
    while len(times) < rounds and (len(times) < LEAST_ROUNDS or time.monotonic() < end):
        times.append([milliseconds(side) for side in sides])
    own, copy, *rest = zip(*times, strict=True)
    ms = statistics.median(own)
    baselines = {
        name: beside(own, column).model_copy(update={"counts": count(form)})
        for (name, form), column in zip(others.items(), rest, strict=True)
    }
    return Result(
        name=case.name,
        family=family,
        growth=case.growth,
        point=case.point,
        runs=len(times),
        tokens=case.tokens,
        ms=ms,
        spread=spread(own),
        counts=count(case.run, kernel_bytes=kernel_bytes),
        baselines=baselines,
        missing=missing,
        target=case.target if not case.baselines or next(iter(case.baselines)) in others else None,
        copy_ratio=ms / statistics.median(copy),
        extra_memory=case.extra_memory() if case.extra_memory else None,
        memory_limit=case.memory_limit,
    )
