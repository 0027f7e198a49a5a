"""`bench ops`: operators against public formulations of the same work, ratios in one run."""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise

FAMILIES = ("conv", "delta_rule", "kda", "norm", "reject", "sparse")
# A median needs three.
LEAST_RUNS = 3


@dataclass(frozen=True)
class Result:
    """What one case measured; times in milliseconds (median of `runs`), the rest are ratios of this run."""

    name: str
    growth: str | None
    runs: int
    ms: float
    spread: float
    baseline_ms: float | None
    speedup: float | None
    target: float | None
    copy_ratio: float
    extra_memory: float | None
    memory_limit: float | None

    @property
    def held(self) -> bool:
        fast = self.target is None or (self.speedup is not None and self.speedup >= self.target)
        small = self.memory_limit is None or (self.extra_memory is not None and self.extra_memory <= self.memory_limit)
        return fast and small


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("ops",), help="what to time")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains TEXT")
    parser.add_argument("--family", choices=FAMILIES, help="only one operator family")
    parser.add_argument("--repeats", type=int, default=20, help="most runs per case and side (default 20)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help=f"time after which a case ends, with {LEAST_RUNS} runs or more (default 20)",
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    parser.epilog = (
        "Operator and baseline run in turn, so that both see the same machine; medians are compared. "
        "Exit code 1: a case misses its target or its memory limit."
    )


def run(args: argparse.Namespace) -> int:
    import torch
    from rich.progress import track

    torch.set_num_threads(args.threads)
    families = (args.family,) if args.family else FAMILIES
    results = []
    with torch.inference_mode():
        for family in families:
            module = importlib.import_module(f"dlinfer_ext.cli.bench_cases.{family}")
            cases = [c for c in module.cases() if args.only in c.name]
            for case in track(cases, description=family, transient=True, disable=args.json):
                results.append(_measure(case, args.repeats, args.seconds))
    if args.json:
        print(json.dumps([asdict(r) | {"held": r.held} for r in results], indent=2))
    else:
        _print(results)
    return 0 if results and all(r.held for r in results) else 1


def _milliseconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def _measure(case: object, repeats: int, seconds: float) -> Result:
    from .bench_cases import Case

    assert isinstance(case, Case)
    sides = [case.run, case.copy] + ([case.baseline] if case.baseline else [])
    for side in sides:
        side()
    times: list[list[float]] = []
    end = time.monotonic() + seconds
    while len(times) < repeats and (len(times) < LEAST_RUNS or time.monotonic() < end):
        times.append([_milliseconds(side) for side in sides])
    columns = [sorted(column) for column in zip(*times, strict=True)]
    ms, copy_ms, *rest = (statistics.median(c) for c in columns)
    quarter = max(1, len(times) // 4)
    return Result(
        name=case.name,
        growth=case.growth,
        runs=len(times),
        ms=ms,
        spread=(columns[0][-quarter] - columns[0][quarter - 1]) / ms,
        baseline_ms=rest[0] if rest else None,
        speedup=rest[0] / ms if rest else None,
        target=case.target,
        copy_ratio=ms / copy_ms,
        extra_memory=case.extra_memory() if case.extra_memory else None,
        memory_limit=case.memory_limit,
    )


def _print(results: list[Result]) -> None:
    from .tables import show

    def ratio(value: float | None, limit: float | None, sign: str) -> str:
        if value is None:
            return ""
        return f"{value:.2f}" + (f" ({sign} {limit:g})" if limit is not None else "")

    show(
        ("case", "runs", "ms", "spread", "baseline ms", "times faster", "× copy", "extra memory", "held"),
        (
            (
                r.name,
                str(r.runs),
                f"{r.ms:.3f}",
                f"{r.spread:.0%}",
                "" if r.baseline_ms is None else f"{r.baseline_ms:.3f}",
                ratio(r.speedup, r.target, "≥"),
                f"{r.copy_ratio:.1f}",
                ratio(r.extra_memory, r.memory_limit, "≤"),
                "yes" if r.held else "NO",
            )
            for r in results
        ),
    )
    curves: dict[str, list[Result]] = {}
    for r in results:
        if r.growth:
            curves.setdefault(r.growth, []).append(r)
    show(
        ("growth", "ms, point by point", "times from point to point"),
        (
            (
                name,
                " → ".join(f"{p.ms:.2f}" for p in points),
                " ".join(f"{b.ms / a.ms:.2f}" for a, b in pairwise(points)),
            )
            for name, points in curves.items()
        ),
    )
