"""`ops`: the table operator × vendor × route × dtypes."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass

from ..targets import soc_names


@dataclass(frozen=True)
class Row:
    """One operator on one vendor.

    Attributes:
        serves: the route that serves on this machine, or why none can.
        bound: every route bound, best first.
    """

    operator: str
    vendor: str
    serves: str
    able: bool
    bound: tuple[str, ...]
    dtypes: tuple[str, ...]
    summary: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vendor", choices=("ascend", "cpu"), help="only this vendor")
    parser.add_argument("--soc", choices=soc_names(), help="the routes of a chip instead, whatever this machine is")
    parser.epilog = "Exit code 1: an operator has no route that can serve."


def serving(vendor: str) -> list[Row]:
    """Return one row per operator."""
    from ..ops import _registry

    rows = []
    for operator in _registry.OPERATORS.values():
        try:
            choice, able = _registry.choose(operator.name, vendor).route.name, True
        except (RuntimeError, ValueError) as error:
            choice, able = str(error), False
        rows.append(
            Row(
                operator.name,
                vendor,
                choice,
                able,
                tuple(r.name for r in _registry.routes(operator.name, vendor)),
                tuple(str(d).removeprefix("torch.") for d in operator.dtypes),
                operator.summary,
            )
        )
    return rows


def run_for_soc(args: argparse.Namespace) -> int:
    from ..vendor.ascend.table import route_table

    entries = [entry for entries in route_table(args.soc).values() for entry in entries]
    if args.json:
        print(json.dumps([asdict(e) for e in entries], indent=2))
    else:
        from .tables import show

        header = ("operator", f"route on {args.soc}", "able", "note")
        show(header, ((e.operator, e.route, "yes" if e.able else "no", e.note) for e in entries))
    return 0


def run(args: argparse.Namespace) -> int:
    if args.soc:
        return run_for_soc(args)
    vendors = (args.vendor,) if args.vendor else ("ascend", "cpu")
    rows = [row for vendor in vendors for row in serving(vendor)]
    if args.json:
        print(json.dumps([asdict(r) for r in rows], indent=2))
    else:
        from .tables import show

        show(
            ("operator", "vendor", "serves", "routes bound", "dtypes", "what it is"),
            ((r.operator, r.vendor, r.serves, ", ".join(r.bound), ", ".join(r.dtypes), r.summary) for r in rows),
        )
    return 0 if all(r.able for r in rows) else 1
