"""Random interleavings of what an engine does with the slots of its requests, each step against the definition.

    python -m tests.fuzz [--steps 10000] [--seed N] [--seconds 110] [--layout conv-ring]

Prints the seed, the steps of each rule and layout, and the calls of each operator. Exit code 1 if a step differs (a
script that replays the least example found is printed), or if fewer steps were made than were asked for.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence

import torch

from .layouts import LAYOUTS
from .machine import RULES, Tally, fuzz


def table(tally: Tally) -> str:
    """Return the steps by layout and rule, with sums."""
    lines = [f"{'layout':14}" + "".join(f"{name:>9}" for name in (*RULES, "steps"))]
    for layout, done in (*tally.steps.items(), ("all", tally.rules)):
        lines.append(f"{layout:14}" + "".join(f"{n:9}" for n in (*(done[name] for name in RULES), done.total())))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=10_000, help="that have to be made (default 10000)")
    parser.add_argument("--seed", type=int, help="default: a new one")
    parser.add_argument(
        "--seconds", type=float, default=110, help="after which no further example begins (default 110)"
    )
    parser.add_argument("--layout", action="append", choices=sorted(LAYOUTS), metavar="NAME", help="only this one")
    args = parser.parse_args(argv)
    number, begun = random.randrange(10**6) if args.seed is None else args.seed, time.monotonic()
    sys.stdout.write(f"seed {number}\n")
    sys.stdout.flush()
    # Memory that is not written shows as NaN, as in the tests.
    torch.use_deterministic_algorithms(True, warn_only=True)
    tally, script = fuzz(args.layout or list(LAYOUTS), args.steps, number, args.seconds)
    sys.stdout.write(f"{table(tally)}\n\n")
    for name, counts in (("calls", tally.calls), ("seen", tally.seen)):
        sys.stdout.write(f"{name}: {', '.join(f'{k} {n}' for k, n in sorted(counts.items()))}\n")
    if script:
        sys.stdout.write(f"a step differs from the definition; this replays it:\n\n{script}\n")
        return 1
    short = tally.total < args.steps or any(not done.total() for done in tally.steps.values())
    said = "TOO FEW, wanted" if short else "no difference in"
    sys.stdout.write(f"{said} {args.steps if short else tally.total} steps, {time.monotonic() - begun:.0f} s\n")
    return int(short)


if __name__ == "__main__":
    sys.exit(main())
