"""What `zero_slots` and `copy_slots` read and write."""

from __future__ import annotations

from .plan import Arguments, Entries, Plan, Row
from .rows import Slots


def _slot_rows(plan: Plan, pairs: list[tuple[int | None, int]], good: list[bool]) -> None:
    plan.layout = "slots"
    for row, (source, target) in enumerate(pairs):
        reads, writes = (
            Entries.of([((slot,), 0)] if good[row] and slot is not None else (), 1) for slot in (source, target)
        )
        given = (target,) if source is None else (source, target)
        plan.rows.append(Row(row, range(0), None, given, good[row], None, {"pool": reads}, {"pool": writes}))


def zero(plan: Plan, args: Arguments) -> None:
    size, slots = args["pool"].shape[0], args["slots"].tolist()
    wanted = f"below {size}, the slots of the pool"
    good = [s >= 0 and not plan.refuse(s >= size, "slots", s, wanted, row) for row, s in enumerate(slots)]
    _slot_rows(plan, [(None, s) for s in slots], good)


def copy(plan: Plan, args: Arguments) -> None:
    size = args["pool"].shape[0]
    pairs = list(zip(args["source"].tolist(), args["target"].tolist(), strict=True))
    targets = Slots(plan, "target", size)
    wanted, good = f"below {size}, the slots of the pool", []
    for row, (source, target) in enumerate(pairs):
        live = min(source, target) >= 0
        # Of a pair that is left out each number has to be possible all the same.
        fits = not plan.refuse(source >= size, "source", source, wanted, row)
        fits &= targets.take(row, [target]) if live else not plan.refuse(target >= size, "target", target, wanted, row)
        good.append(live and fits)
    read = {s: row for row, (s, t) in enumerate(pairs) if good[row] and s != t}
    for row, (_, target) in enumerate(pairs):
        if good[row] and target in read:
            wanted = "no slot that is a source of another pair"
            good[row] = not plan.clash("target", target, row, read[target], wanted)
    _slot_rows(plan, pairs, good)
