"""`explain-state`: what each request row of a dumped call read and wrote in its slots, and what of it cannot be."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ..ops._access import Row
    from .state_file import Dump
    from .state_values import Finding

# What a row of the drawing says of an entry that it does not know: older than what the layout still needs.
UNKNOWN: Final = "·"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dump", type=Path, nargs="+", metavar="DUMP.safetensors", help="files of DLINFER_EXT_DUMP")
    parser.add_argument("--row", type=int, metavar="N", help="only this request row, and what is wrong with no one row")
    parser.add_argument("--quiet", action="store_true", help="one line for a dump about which nothing is wrong")
    parser.epilog = (
        "A column for each entry of a slot: p9 is the input of position 9, s9 the state after 9 tokens, k2 key pool 2, "
        "x0 a row's first new token where the history is not told. Every call is made anew by its definition on the "
        "slots as they were. Exit code 1: something cannot be; 2: a file is not a dump. Lines with ? may be right. How "
        "to make dumps: docs/en/debugging.md."
    )


def run(args: argparse.Namespace) -> int:
    from .state_file import NotADump, load
    from .state_judge import judge

    reports, faulty = [], False
    for path in args.dump:
        try:
            dump = load(path)
        except NotADump as error:
            print(error, file=sys.stderr)
            return 2
        numbers = [row.number for row in dump.plan.rows]
        if args.row is not None and args.row not in numbers:
            print(f"{path} has {len(numbers)} rows; wanted --row from 0 to {len(numbers) - 1}", file=sys.stderr)
            return 2
        shown = [row for row in dump.plan.rows if args.row in (None, row.number)]
        findings = [f for f in judge(dump) if args.row is None or f.row in (None, args.row)]
        held = not any(f.fault for f in findings)
        faulty |= not held
        if args.json:
            reports.append(report(dump, shown, findings))
        elif args.quiet and held:
            print(f"{path.name}: nothing is wrong")
        else:
            draw(dump, shown, findings)
    if args.json:
        print(json.dumps({"held": not faulty, "dumps": reports}, indent=2))
    return int(faulty)


def report(dump: Dump, rows: Iterable[Row], findings: Iterable[Finding]) -> dict[str, Any]:
    """Return all that is drawn, for --json."""
    found = list(findings)
    return {
        "file": str(dump.path),
        **{name: value for name, value in dump.header.items() if name != "arguments"},
        "held": not any(f.fault for f in found),
        "rows": [describe(dump, row) for row in rows],
        "findings": [{"row": f.row, "text": f.text, "fault": f.fault} for f in found],
    }


def describe(dump: Dump, row: Row) -> dict[str, Any]:
    """Return a row with its slots: of each entry its index, what it held, whether it is read, and what it holds now."""
    pools: dict[str, list[dict[str, Any]]] = {}
    for pool in dump.pools:
        pools[pool] = [entry for slot in own_slots(dump, row, pool) for entry in entries_of(dump, row, pool, slot)]
    return {
        "row": row.number,
        "live": row.live,
        "slots": list(row.slots),
        "history": row.history,
        "tokens": len(row.tokens),
        "accepted": row.accepted,
        "pools": {name: entries for name, entries in pools.items() if entries},
    }


def own_slots(dump: Dump, row: Row, pool: str) -> list[int]:
    """Return the slots to draw: those written, and of those read only what a state is, as a context may be long."""
    parts = (row.writes, row.reads if dump.plan.layout != "pages" or row.writes else {})
    slots = dict.fromkeys(slot for part in parts if pool in part for slot in part[pool].slots())
    kept = dump.slots(pool)
    return [slot for slot in slots if slot in kept]


def entries_of(dump: Dump, row: Row, pool: str, slot: int) -> list[dict[str, Any]]:
    """Describe the entries of a slot in order; those read next are told for the case that all new tokens stand."""
    reads, writes = (_of_slot(part, pool, slot) for part in (row.reads, row.writes))
    rank = max((len(index) for index in (*reads, *writes)), default=1)
    size = dump.arguments[pool].shape[1] if rank == 2 else 1
    upcoming = _next(dump, row, pool, writes, reads)
    found = []
    for i in range(size):
        index = (slot, i)[:rank]
        before = symbol(dump, row, pool, reads[index]) if index in reads else UNKNOWN
        after = symbol(dump, row, pool, writes[index]) if index in writes else before
        entry = {
            "entry": list(index),
            "before": before + _marks(dump, "before", pool, index),
            "read": index in reads,
            "written": index in writes,
        }
        if dump.ran:
            entry |= {"after": after + _marks(dump, "after", pool, index), "next": index in upcoming}
        found.append(entry)
    return found


def symbol(dump: Dump, row: Row, pool: str, position: int) -> str:
    """Return a short name of what an entry holds."""
    if pool == "pool_cache":
        return f"k{position}"
    if pool == "pool":
        return "slot"
    kind = "s" if pool == "state" else "p"
    if row.history is None:
        return f"{kind}{position:+}" if kind == "s" else f"x{position}" if position >= 0 else f"h{position}"
    number = row.history + position
    return "0" if number < 0 else f"{kind}{number}"


def _next(
    dump: Dump, row: Row, pool: str, writes: dict[tuple[int, ...], int], reads: dict[tuple[int, ...], int]
) -> set[tuple[int, ...]]:
    """Return the entries of a slot that the next step reads if all new tokens stand; key pools and pages: none."""
    count = len(row.tokens)
    if not row.live or pool not in ("conv_state", "state"):
        return set()
    newest = {count} if pool == "state" else set(range(count - dump.arguments["weight"].shape[0] + 1, count))
    held = reads | writes
    # A state that is not a ring is read where it was written, whatever else the slot was read for.
    return {index for index, position in held.items() if position in newest and writes.get(index, position) == position}


def _of_slot(part: Any, pool: str, slot: int) -> dict[tuple[int, ...], int]:
    if pool not in part:
        return {}
    pairs = zip(part[pool].index.tolist(), part[pool].positions.tolist(), strict=True)
    return {tuple(index): position for index, position in pairs if index[0] == slot}


def _marks(dump: Dump, when: str, pool: str, index: tuple[int, ...]) -> str:
    """Say of an entry's values what no name of it tells."""
    value = dump.tensors[f"{when}.{pool}"][(dump.slots(pool)[index[0]], *index[1:])]
    if not value.is_floating_point():
        return ""
    if bool(value.isnan().any()):
        return " NaN"
    return " inf" if bool(value.isinf().any()) else " =0" if not bool(value.any()) else ""


# --- the drawing ------------------------------------------------------------------------------------------------------


def draw(dump: Dump, rows: Iterable[Row], findings: Iterable[Finding]) -> None:
    h, found = dump.header, list(findings)
    versions = ", ".join(f"{name} {version}" for name, version in h["versions"].items())
    print(f"{dump.path.name}: {h['operator']}, {h['layout']}, step {h['step']} of pool {h['pool']}")
    print(f"rank {h['rank']}, pid {h['pid']}, {versions}")
    for row in rows:
        _draw_row(dump, row, {f.at for f in found if f.fault})
        for finding in (f for f in found if f.row == row.number):
            print(f"  {'!' if finding.fault else '?'} row {row.number}: {finding.text}")
    for finding in (f for f in found if f.row is None):
        print(f"{'!' if finding.fault else '?'} {finding.text}")
    faults = sum(f.fault for f in found)
    print(f"{faults} thing{'' if faults == 1 else 's'} cannot be\n" if faults else "nothing is wrong\n")


def _draw_row(dump: Dump, row: Row, wrong: set[Any]) -> None:
    from .tables import show

    history = "history not told" if row.history is None else f"history {row.history}"
    accepted = "" if row.accepted is None else f", accepted {row.accepted} of the step before"
    kind = "" if row.live else ", PAD or empty"
    noun = "blocks" if dump.plan.layout == "pages" else "slot" if len(row.slots) == 1 else "slots"
    given = ", ".join(map(str, row.slots[:16])) + (", …" if len(row.slots) > 16 else "")
    print(f"row {row.number}: {noun} {given}; {history}, {len(row.tokens)} new{accepted}{kind}")
    for pool in dump.pools:
        slots = own_slots(dump, row, pool)
        drawn = [(f"{pool}[{slot}]", entries_of(dump, row, pool, slot)) for slot in slots]
        if drawn and all(len(entries) == 1 for _, entries in drawn):
            # Slots of one entry are drawn side by side, in the order of the row's tokens.
            drawn = [(pool, [entries[0] for _, entries in drawn])]
        for name, entries in drawn:
            for entry in entries:
                for when in ("before", "after"):
                    entry[when] = entry.get(when, "") + " !" * ((when, pool, tuple(entry["entry"])) in wrong)
            show((name, *(str(e["entry"][-1]) for e in entries)), _lines(dump, entries))


def _lines(dump: Dump, entries: list[dict[str, Any]]) -> list[list[str]]:
    def marks(name: str, mark: str) -> list[str]:
        return [mark if e[name] else "" for e in entries]

    lines = [["before", *(e["before"] for e in entries)], ["read", *marks("read", "^")]]
    if dump.ran:
        lines += [["written", *marks("written", "*")], ["after", *(e["after"] for e in entries)]]
        if any(e["next"] for e in entries):
            lines.append(["next read", *marks("next", "^")])
    return lines
