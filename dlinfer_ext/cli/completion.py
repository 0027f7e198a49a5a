"""`completion`: a script with which a shell completes `dlinfer-ext`.

The script is made by shtab, which reads the very parser that runs. shtab is needed to make a script and never to use
one, and no command needs it to run, so it is an extra (`cli`) and its absence is said plainly.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

PROGRAM: Final = "dlinfer-ext"  # the console script; a shell completes a program, not `python -m`
SHELLS: Final = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS)
    parser.epilog = (
        f"It completes the program {PROGRAM}, which runs what `python -m dlinfer_ext` runs. "
        'bash: eval "$(dlinfer-ext completion bash)". zsh: the same with zsh, `> DIR/_dlinfer-ext`, DIR of $fpath. '
        "fish: dlinfer-ext completion fish > ~/.config/fish/completions/dlinfer-ext.fish. "
        "Exit code 1: shtab, which makes the script, is not installed."
    )


def run(args: argparse.Namespace) -> int:
    try:
        import shtab
    except ModuleNotFoundError:
        print("completion: shtab is not installed: pip install shtab (no other command needs it)", file=sys.stderr)
        return 1
    from .main import build_parser

    parser = build_parser()
    _rename(parser)
    _add_values(parser, shtab)
    script = shtab.complete(parser, shell=args.shell)
    if args.json:
        print(json.dumps({"shell": args.shell, "program": PROGRAM, "script": script}, indent=2))
    else:
        print(script)
    return 0


def _scenarios() -> Iterable[str]:
    from ..e2e import scenario

    return [file.stem for file in scenario.shipped()]


def _chips() -> Iterable[str]:
    from ..targets import soc_names

    return soc_names()


def _models() -> Iterable[str]:
    from ..targets import model_names

    return model_names()


# Options that take any text, whose usual values are known: (command, option) → values.
VALUES: Final[dict[tuple[str, str], Callable[[], Iterable[str]]]] = {
    ("e2e", "--config"): _scenarios,
    ("verify", "--soc"): _chips,
    ("verify", "--model"): _models,
}


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command."""
    (action,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def _rename(parser: argparse.ArgumentParser) -> None:
    old = parser.prog
    parser.prog = PROGRAM
    for sub in subparsers(parser).values():
        sub.prog = sub.prog.replace(old, PROGRAM)


def _add_values(parser: argparse.ArgumentParser, shtab: Any) -> None:
    """Let options of type Path complete to files or folders, and those of VALUES to the usual values."""
    for command, sub in subparsers(parser).items():
        for action in sub._actions:
            for option in action.option_strings:
                if (command, option) in VALUES:
                    action.choices = tuple(VALUES[command, option]())
            if action.type is Path:
                folder = action.metavar in ("DIR", "PATH")
                action.complete = shtab.DIRECTORY if folder else shtab.FILE  # type: ignore[attr-defined]
