"""`e2e`: scenarios of configs/e2e through stock LMDeploy, on this CPU or on a card."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from .. import envs

# What the caller may set for the engine's processes; the other variables are the runner's.
PASSED_ON = (envs.ROUTE, envs.CHECK, envs.CPU_MEMORY, envs.TOOLCHAIN)
CHECKPOINT = Path("examples/checkpoints/tiny_qwen3_5")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        action="append",
        metavar="NAME",
        help="a scenario of configs/e2e by name, or a YAML file; again for more",
    )
    parser.add_argument("--list", action="store_true", help="list the scenarios and stop")
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="checkpoint folder (default: the trained one)")
    parser.add_argument("--vendor", choices=("cpu", "ascend"), default="cpu", help="cpu (default) or ascend")
    parser.add_argument(
        "--reference",
        choices=("transformers", "plain"),
        help="compared with transformers on this CPU (default with --vendor cpu) or with LMDeploy itself, one "
        "request at a time without drafts, chunks and prefix cache (default with --vendor ascend)",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16"),
        default="bfloat16",
        help="of the engine on a card (default bfloat16)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        metavar="TIMES",
        help="times the scenarios' time limits (default 1, and 10 with --vendor ascend)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write report.json, report.md, plots and every process's record there"
    )
    parser.epilog = "Exit code 1: a scenario does not hold, or none could be run. 2: a setting that cannot be used."


def run(args: argparse.Namespace) -> int:
    from ..e2e import model_folder, report, runner, scenario
    from ..e2e import target as targets

    try:
        files = [scenario.find(n) for n in args.config] if args.config else scenario.shipped()
        scenarios = [s for f in files if not (s := scenario.load(f)).by_name or args.config or args.list]
    except scenario.ScenarioError as error:
        print(f"e2e: {error}", file=sys.stderr)
        return 2
    if args.list:
        rows = [{"name": s.name, "what": s.what, "where": s.where} for s in scenarios]
        lines = [f"{r['name']:22}{', '.join(r['where']):12}{r['what']}" for r in rows]
        print(json.dumps(rows, indent=2) if args.json else "\n".join(lines))
        return 0
    try:
        model_folder.check(args.model)
    except model_folder.ModelFolderError as error:
        print(f"e2e: {error}", file=sys.stderr)
        return 2
    target = targets.Target(
        model=args.model.resolve(),
        vendor=args.vendor,
        reference=args.reference or ("transformers" if args.vendor == "cpu" else "plain"),
        dtype=args.dtype,
        env={v.name: os.environ[v.name] for v in PASSED_ON if v.name in os.environ},
        patience=args.patience or (1.0 if args.vendor == "cpu" else 10.0),
    )

    def say(line: str) -> None:
        if not args.json:
            print(line, file=sys.stderr, flush=True)

    reports, skipped = [], {}
    for one in scenarios:
        why = targets.cannot_run(one, target)
        if why is not None:
            skipped[one.name] = why
            say(f"{one.name}: skipped, {why}")
            continue
        done = runner.run_scenario(one, target, say)
        reports.append(done)
        say(f"{one.name}: {'holds' if not done.failures else 'FAILS'} ({done.seconds:.1f} s)")
    summary = report.summary(reports, skipped, target, report.command_line(args))
    if args.out:
        report.write(summary, args.out)
        report.write_records(reports, args.out)
    print(json.dumps(summary, indent=2) if args.json else report.text(summary))
    return 0 if reports and not any(r.failures for r in reports) else 1
