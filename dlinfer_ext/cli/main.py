"""The command line: one parser, one module per command."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Protocol, cast

from ..version import __version__

COMMANDS = {
    "env": "versions, vendor, settings, routes and LMDeploy's seams on this machine, and what does not go together",
    "ops": "table of operators: routes, dtypes, what serves here",
    "verify": "run every operator that serves here against its definition",
    "bench": "time operators against public formulations of the same work, as ratios in one run",
    "e2e": "run scenarios through stock LMDeploy, speculative decoding included, and judge every token",
    "plan": "memory of each card for a config.json: weights, states, cache blocks, and what still fits",
    "explain-state": "what each request row of a dumped call (DLINFER_EXT_DUMP) read and wrote, and what cannot be",
    "demo": "serve the trained tiny Qwen3.5 through stock LMDeploy on this CPU, ask it, and check it",
    "completion": "a script with which bash, zsh or fish completes dlinfer-ext",
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dlinfer_ext",
        description="Gated DeltaNet and KDA operators for LMDeploy on Huawei Ascend, checkable on a CPU.",
        epilog="Every command exits 0 only if what it checks holds. Variables: `env` lists DLINFER_EXT_*.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        sub.add_argument("--json", action="store_true", help="print one JSON value, and nothing else on stdout")
        _module(name).add_arguments(sub)
    return parser


class _Command(Protocol):
    """What a command's module holds; torch and LMDeploy are imported in `run`, so that --help stays quick."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def _module(name: str) -> _Command:
    return cast(_Command, importlib.import_module(f"dlinfer_ext.cli.{name.replace('-', '_')}"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = build_parser().parse_args(argv)
    return _module(args.command).run(args)
