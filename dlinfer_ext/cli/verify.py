"""`verify`: operators and kernels against their definitions, and kernels through the checks that need no card."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..toolchain.matrix import Row
    from ..toolchain.run_cases import CountCheck, Result

Records = list[dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--install", action="store_true", help="bring the Ascend compiler wheels into their own folder")
    parser.add_argument("--interpret", action="store_true", help="the Triton kernels on the mended interpreter")
    parser.add_argument("--native", action="store_true", help="the Triton kernels compiled for this CPU, at real sizes")
    parser.add_argument("--time", action="store_true", help="time native kernels and eager forms, in turn in one run")
    parser.add_argument("--count", action="store_true", help="bytes, strays, leaks and conflicts of native kernels")
    parser.add_argument("--soc", type=_names, default=(), metavar="A2,A3,A5", help="compile to HIVM for these chips")
    parser.add_argument("--model", type=_names, default=("qwen3_5-9b",), help="of configs/models, comma-separated")
    parser.add_argument("--tp", type=_numbers, default=(1,), help="ranks, comma-separated (default: 1)")
    parser.add_argument("--dtype", type=_names, default=("bfloat16",), help="of the activations (default: bfloat16)")
    parser.add_argument("--operator", default="", help="only cases of this operator (--native, --time, --count)")
    parser.add_argument("--cache", type=Path, help="folder of compiler output (default: the user's cache)")
    parser.add_argument("--chart", type=Path, metavar="FILE.png", help="draw what --soc found (needs matplotlib)")
    parser.epilog = (
        "Without options it runs the route that serves (see `ops`) on CPU tensors and compares output and state with "
        "reference.py in fp64: it says that the operators match the reference here, and nothing of a card. What the "
        "other checks prove and cannot prove: docs/en/verification.md. --native, --time and --count build for the "
        "first chip of --soc, or a2. Exit code 1: something does not hold; 2: the compiler wheels, or gcc, are missing."
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.lower().split(",")))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def run(args: argparse.Namespace) -> int:
    kernels = args.interpret or args.native or args.time or args.count or args.soc
    if args.install or kernels:
        from ..toolchain import install, native

        needed = native.missing if args.native or args.time or args.count else install.missing
        try:
            if args.install:
                where = install.install()
                print(f"compiler wheels in {where}", file=sys.stderr)
            if kernels and (why := needed()) is not None:
                print(f"verify: {why}", file=sys.stderr)
                return 2
        except RuntimeError as error:
            print(f"verify: {error}", file=sys.stderr)
            return 2
        if not kernels:
            return 0
    try:
        records = _run(args)
    except (RuntimeError, ValueError) as error:
        print(f"verify: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(records, indent=2))
    held = sum(r["held"] for r in records)
    print(f"{held} of {len(records)} checks hold", file=sys.stderr)
    # A check that looked at nothing has not held.
    return 0 if records and held == len(records) else 1


def _run(args: argparse.Namespace) -> Records:
    show = _silent if args.json else _show
    records: Records = []
    if args.interpret:
        records += _interpreted(show)
    elif not (args.native or args.time or args.count or args.soc):
        records += _operators(show)
    if args.native:
        records += _native("check", args, show)
    if args.time:
        records += _native("time", args, show)
    counted: dict[tuple[str, int, str, str, str], CountCheck] = {}
    if args.count:
        records += _native("count", args, show, counted)
    if args.soc:
        records += _compiled(args, show, counted)
    return records


Show = Callable[[str, Sequence[str], Iterable[Sequence[str]]], None]


def _show(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from .tables import show

    print(title)
    show(headings, rows)


def _silent(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print nothing: JSON was asked for."""


def _yes(held: bool) -> str:
    return "yes" if held else "NO"


def _operators(show: Show) -> Records:
    from .verify_operators import checks

    records = [{"check": "operators", **asdict(c), "held": c.held} for c in checks()]
    _show_operators("operators against their definitions", records, show)
    return records


def _show_operators(title: str, records: Records, show: Show) -> None:
    names = ("operator", "case", "dtype", "route")
    rows = ((*(r[n] for n in names), f"{r['error']:.1e}", f"{r['limit']:.0e}", _yes(r["held"])) for r in records)
    show(title, (*names, "error", "limit", "held"), rows)


def _interpreted(show: Show) -> Records:
    """Run the operators' checks in a process whose Triton is the interpreter."""
    env = os.environ | {"DLINFER_EXT_ROUTE": "interpret", "DLINFER_EXT_STRICT": "1"}
    root = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (root, env.get("PYTHONPATH"))))
    line = [sys.executable, "-m", "dlinfer_ext", "verify", "--json"]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=900)
    if not done.stdout.strip():
        raise RuntimeError(f"the interpreted run failed ({done.returncode}): {done.stderr.strip()[-2000:]}")
    records: Records = [{**r, "check": "interpret"} for r in json.loads(done.stdout)]
    _show_operators("kernels on the mended interpreter", records, show)
    return records


def _groups(args: argparse.Namespace) -> Iterator[tuple[str, int, str, str]]:
    soc = args.soc[0] if args.soc else "a2"
    for model in args.model:
        for tp in args.tp:
            for dtype in args.dtype:
                yield model, tp, dtype, soc


def _native(
    kind: str,
    args: argparse.Namespace,
    show: Show,
    counted: dict[tuple[str, int, str, str, str], CountCheck] | None = None,
) -> Records:
    from ..toolchain.run_cases import CountCheck, results

    records: Records = []
    for model, tp, dtype, soc in _groups(args):
        found = []
        for result in results(kind, model, tp, dtype, soc, operator=args.operator):
            found.append(result)
            if isinstance(result, CountCheck) and counted is not None:
                counted[model, tp, dtype, result.operator, result.phase] = result
        what = {"check": "native against the definition", "time": "native and eager, median ms", "count": "bytes"}[kind]
        show(f"{what}: {model} tp {tp} {dtype}, tiles for {soc}", _HEADINGS[kind], map(_ROWS[kind], found))
        key = {"model": model, "tp": tp, "dtype": dtype, "soc": soc}
        name = {"check": "native", "time": "time", "count": "count"}[kind]
        records += [{"check": name, **key, **asdict(r), "held": r.held} for r in found]
    return records


_HEADINGS = {
    "check": ("operator", "phase", "error", "limit", "ms", "held"),
    "time": ("operator", "phase", "native", "eager", "eager / native", "ran"),
    "count": (
        "operator",
        "phase",
        "× bound (limit)",
        "× in 32-byte blocks (limit)",
        "strays",
        "leaks",
        "unwritten",
        "conflicts",
        "held",
    ),
}


def _check_row(r: Any) -> tuple[str, ...]:
    numbers = (f"{r.error:.1e}", f"{r.limit:.0e}", f"{r.seconds * 1e3:.1f}")
    return r.operator, r.phase, *numbers, r.failure or _yes(r.held)


def _time_row(r: Any) -> tuple[str, ...]:
    ratio = f"{r.eager_s / r.native_s:.2f}" if r.native_s else "-"
    return r.operator, r.phase, f"{r.native_s * 1e3:.2f}", f"{r.eager_s * 1e3:.2f}", ratio, r.failure or "yes"


def _count_row(r: Any) -> tuple[str, ...]:
    def ratio(value: float, limit: float | None) -> str:
        return f"{value:.3f}" + (f" ({limit:.2f})" if limit is not None else "")

    sizes = (ratio(r.bytes_ratio, r.bytes_limit), ratio(r.blocks_ratio, r.blocks_limit))
    faults = (str(n) for n in (r.strays, r.leaks, r.unwritten, r.conflicts))
    return r.operator, r.phase, *sizes, *faults, r.failure or _yes(r.held)


_ROWS: dict[str, Callable[[Result], tuple[str, ...]]] = {
    "check": _check_row,
    "time": _time_row,
    "count": _count_row,
}


def _compiled(
    args: argparse.Namespace, show: Show, counted: dict[tuple[str, int, str, str, str], CountCheck]
) -> Records:
    from ..toolchain.matrix import COLUMNS, run_matrix

    start, done = time.monotonic(), 0

    def report(row: Row) -> None:
        nonlocal done
        done += 1
        if not row.held or done % 50 == 0:
            status = "; ".join(row.faults) or "holds"
            at = f"{done} kernels, {time.monotonic() - start:.0f} s"
            print(f"[{at}] {row.operator} {row.phase} {row.kernel} {row.soc}: {status}", file=sys.stderr)

    def bytes_of(row: Row) -> tuple[int, int] | None:
        """Return what the counting build counted for the row's case on this chip, if --count ran it.

        What a kernel exchanges through a workspace is added for one trip of each program, the least it can be.
        """
        found = counted.get((row.model, row.tp, row.dtype, row.operator, row.phase))
        if found is None or row.soc != args.soc[0] or not row.lower_bound:
            return None
        exchange = sum(row.build.facts.exchange) * row.programs if row.build.facts else 0
        counts = (found.bytes_ratio, found.blocks_ratio)
        moved, blocks = (round(ratio * row.lower_bound) + exchange for ratio in counts)
        return moved, blocks

    rows = run_matrix(args.soc, args.model, args.tp, args.dtype, args.cache, report, bytes_of=bytes_of)
    show(f"compiled to HIVM in {time.monotonic() - start:.0f} s", COLUMNS, (r.as_texts() for r in rows))
    if args.chart:
        from ..toolchain.chart import draw

        draw(rows, args.chart)
    return [{"check": "compile", **row.as_json()} for row in rows]
