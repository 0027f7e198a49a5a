"""`bench`: operators and the engine against public formulations of the same work, and two such runs compared."""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .bench_record import Record, Result

FAMILIES = ("conv", "delta_rule", "kda", "norm", "reject", "sparse")
MODELS = ("qwen", "glm")
RESULTS = (
    "With --out FILE.json, FILE.csv or FILE.md the run is written with its commit, versions of torch, lmdeploy, "
    "transformers and python, CPU, threads, date and command; with --plots DIR it is drawn as PNG (needs matplotlib: "
    "pip install -r requirements/report.txt)."
)
TIMES = "Times are ratios of one run on this machine, between sides that ran in turn; they say nothing about a card. "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="what", required=True, metavar="(ops | engine | compare)")
    parser.epilog = (
        "`bench ops`: every operator beside the baselines of --compare (all that are there; one that is missing is "
        "named), growth curves over tokens, batch, drafts and dimension, calls, host reads, kernel launches and bytes "
        "per token. `bench engine`: the tiny trained checkpoints through stock LMDeploy on the CPU vendor, beside the "
        "same engine with a per-request loop in the place of our operators, and beside itself without drafts. "
        f"`bench compare OLD.json NEW.json [--limit 1.25]`: what got slower. {TIMES}{RESULTS} "
        "Exit code 1: a case misses its target, its memory limit or a check of its tokens; or, with compare, got "
        "slower or vanished. 2: a setting or file that cannot be used. `bench ops --help` and so on tell the rest."
    )

    def kind(name: str, summary: str, epilog: str) -> argparse.ArgumentParser:
        sub = kinds.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".", epilog=epilog)
        sub.add_argument(
            "--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON object instead of text"
        )
        return sub

    ops = kind(
        "ops",
        "time operators against public formulations of the same work",
        f"Operator, copy and baselines run in turn; medians are compared, quartiles are of the ratios of single "
        f"rounds. Calls, host reads and bytes are counted as PyTorch dispatches them, in a run of their own: a call's "
        f"bytes are those of the tensors that it takes and gives. {TIMES}{RESULTS} "
        "Exit code 1: a case misses its target or its memory limit.",
    )
    ops.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains TEXT")
    ops.add_argument("--family", choices=FAMILIES, help="only one operator family")
    ops.add_argument(
        "--compare",
        metavar="NAMES",
        help="baselines, separated by commas: loop (the public expressions once per request), plain (the plain batched "
        "expression), transformers (its PyTorch form, all requests in one call), fla-naive (flash-linear-attention's "
        "naive recurrence); default all",
    )
    ops.add_argument("--repeats", type=int, default=20, help="most rounds per case (default 20)")
    ops.add_argument("--seconds", type=float, default=20.0, help="time after which a case ends, with 3 rounds or more")
    ops.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    ops.add_argument(
        "--kernel-bytes",
        action="store_true",
        help="with DLINFER_EXT_ROUTE=native, count the bytes of kernels too (each access, 10 to 135 times slower)",
    )
    engine = kind(
        "engine",
        "time the tiny trained checkpoints through stock LMDeploy on this CPU",
        "An engine per number of drafts runs in a process of its own; all are kept, and asked in turn: each round with "
        "our operators, then with a per-request loop of the public expressions in their place. Calls and host reads "
        "are those of the operators, per engine step (drafting included). Every side has to give the same tokens. "
        f"{TIMES}{RESULTS} Exit code 1: tokens differ, or a path that was to run did not (no verify step, no draft "
        "accepted).",
    )
    engine.add_argument("--model", choices=MODELS, help="only one of the checkpoints (default both)")
    engine.add_argument("--drafts", type=_numbers, default=(0, 1, 3), metavar="N,N", help="default 0,1,3")
    engine.add_argument("--batch", type=_numbers, default=(1, 4, 16), metavar="N,N", help="default 1,4,16")
    engine.add_argument("--prompt", type=_numbers, default=(16,), metavar="N,N", help="tokens (default 16)")
    engine.add_argument("--new", type=int, default=16, help="new tokens of each request (default 16)")
    engine.add_argument("--repeats", type=int, default=5, help="most rounds per case (default 5)")
    engine.add_argument(
        "--seconds",
        type=float,
        default=120.0,
        help="for everything, starts included (default 120); a case that has begun ends with 3 rounds or more, one "
        "that no time is left for is named",
    )
    for sub in (ops, engine):
        sub.add_argument(
            "--out",
            type=Path,
            action="append",
            metavar="FILE",
            help="write the results there (.json, .csv, or tables for a page as .md); again for more",
        )
        sub.add_argument("--plots", type=Path, metavar="DIR", help="draw the results there as PNG")
    both = kind(
        "compare",
        "compare two files of results: what got slower beside its baselines, asks for more, or is gone",
        "Ratios to baselines are compared, never milliseconds; and counts of calls, host reads, launches and bytes, "
        "which are the same on any machine. A ratio that fell while its quartiles overlap is named as unclear and is "
        "no failure. Versions that differ are named. Exit code 1: a case got slower, asks for "
        "more, no longer holds, or vanished; it is named.",
    )
    both.add_argument("old", type=Path, metavar="OLD.json")
    both.add_argument("new", type=Path, metavar="NEW.json")
    both.add_argument("--limit", type=float, default=1.25, help="factor by which a ratio may fall (default 1.25)")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(n) for n in text.split(",")}))


def run(args: argparse.Namespace) -> int:
    from .bench_record import RecordError

    try:
        return {"ops": _ops, "engine": _engine, "compare": _compare}[args.what](args)
    except (RecordError, _SettingError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


class _SettingError(ValueError):
    """A setting that cannot be used."""


def _prepare(args: argparse.Namespace) -> str:
    """Find out now what would fail after the measurement; return the commit, which may be another one by then."""
    from . import bench_plots, bench_record

    for file in args.out or ():
        bench_record.check_name(file)
    if args.plots:
        try:
            bench_plots.check()
        except RuntimeError as error:
            raise _SettingError(str(error)) from None
    return bench_record.commit()


def _baselines(names: str | None) -> tuple[str, ...] | None:
    from .bench_cases import BASELINES

    if names is None:
        return None
    given = tuple(n.strip() for n in names.split(",") if n.strip())
    unknown = [n for n in given if n not in BASELINES]
    if unknown or not given:
        raise _SettingError(f"--compare {names}: wanted some of {', '.join(BASELINES)}, separated by commas")
    return given


def _ops(args: argparse.Namespace) -> int:
    import torch
    from rich.progress import track

    from .bench_measure import measure
    from .bench_record import record

    commit = _prepare(args)
    compare = _baselines(args.compare)
    torch.set_num_threads(args.threads)
    results: list[Result] = []
    unserved: list[str] = []
    with torch.inference_mode():
        for family in (args.family,) if args.family else FAMILIES:
            module = importlib.import_module(f"dlinfer_ext.cli.bench_cases.{family}")
            cases = [c for c in module.cases() if args.only in c.name]
            for case in track(cases, description=family, transient=True, disable=args.json):
                results.append(
                    measure(case, family, args.repeats, args.seconds, compare, kernel_bytes=args.kernel_bytes)
                )
            offered = {name for case in cases for name in case.baselines}
            unserved += [f"missing: {family}: no case has a baseline {n}" for n in compare or () if n not in offered]
    return _finish(args, record("ops", _command(args), args.threads, results, commit), unserved)


def _engine(args: argparse.Namespace) -> int:
    from .bench_engine import EngineFailed, measure
    from .bench_record import record

    commit = _prepare(args)
    if min(*args.batch, *args.prompt, args.new) < 1 or min(args.drafts) < 0:
        raise _SettingError("--batch, --prompt and --new: wanted 1 or more, --drafts 0 or more")
    models = (args.model,) if args.model else MODELS
    results: list[Result] = []
    skipped: list[str] = []
    try:
        for model in models:
            found, left = measure(
                model,
                args.drafts,
                args.batch,
                args.prompt,
                args.new,
                args.repeats,
                args.seconds / len(models),
                quiet=args.json,
            )
            results += found
            skipped += [f"not measured, --seconds {args.seconds:g} were over: {name}" for name in left]
    except EngineFailed as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return _finish(args, record("engine", _command(args), 1, results, commit), skipped)


def _compare(args: argparse.Namespace) -> int:
    from . import bench_compare, bench_record, bench_text

    try:
        found = bench_compare.compare(bench_record.read(args.old), bench_record.read(args.new), args.limit)
    except bench_record.RecordError:
        raise
    except ValueError as error:
        raise _SettingError(f"compare: {error}") from None
    print(json.dumps(found.as_dict(), indent=2) if args.json else "\n".join(bench_text.lines(found, args.limit)))
    return 0 if found.held else 1


def _command(args: argparse.Namespace) -> str:
    """Return the command line without paths of this machine: files and folders by their last name."""
    words = ["python", "-m", "dlinfer_ext", "bench", args.what]
    for name, value in vars(args).items():
        if name in ("command", "what", "json") or value in (None, "", False):
            continue
        option = f"--{name.replace('_', '-')}"
        for one in value if isinstance(value, list) else [value]:
            text = one.name if isinstance(one, Path) else one
            text = ",".join(map(str, text)) if isinstance(text, tuple) else str(text)
            words += [option] if value is True else [option, text]
    return shlex.join(words)


def _finish(args: argparse.Namespace, found: Record, unserved: list[str]) -> int:
    from . import bench_plots, bench_record, bench_text
    from .tables import show

    for file in args.out or ():
        bench_text.write(found, file) if file.suffix == ".md" else bench_record.write(found, file)
    if args.plots:
        bench_plots.draw(found, args.plots)
    if args.json:
        cases = [c | {"held": r.held} for c, r in zip(found.model_dump()["cases"], found.cases, strict=True)]
        print(json.dumps(found.model_dump() | {"cases": cases}, indent=2))
    else:
        for headings, rows in bench_text.tables(found):
            show(headings, rows)
        for line in (*unserved, *bench_text.missing(found.cases)):
            print(line)
    for line in unserved if args.json else ():
        print(line, file=sys.stderr)
    return 0 if found.cases and all(c.held for c in found.cases) else 1
