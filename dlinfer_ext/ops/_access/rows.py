"""What the layouts share: the tokens of each row, and slots that no two rows may take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from .plan import Plan


def ints(tensor: Tensor | None) -> list[Any] | None:
    return None if tensor is None else tensor.tolist()


def row_spans(
    plan: Plan,
    argument: str,
    cu_seqlens: Tensor,
    tokens: int,
    longest: tuple[int, str] | None = None,
    host_lengths: Sequence[int] | None = None,
    *,
    exact: bool = True,
) -> list[range]:
    """Return the tokens of each row; an impossible row is noted and has none.

    Args:
        plan: notes what is wrong.
        argument: the name of `cu_seqlens`.
        cu_seqlens: int [N + 1].
        tokens: T.
        longest: the most tokens of a row, and what says so.
        host_lengths: as given.
        exact: they are the lengths, and not bounds of them.
    """
    ends = cu_seqlens.tolist()
    plan.refuse(ends[0] != 0, argument, ends[0], "0", 0 if len(ends) > 1 else None)
    spans = []
    for row, (start, end) in enumerate(pairwise(ends)):
        n = end - start
        bad = plan.refuse(n < 0, argument, f"falling by {-n}", "offsets that do not fall", row)
        bad = bad or plan.refuse(end > tokens, argument, end, f"at most {tokens}, the tokens given", row)
        if longest is not None and n > longest[0]:
            bad = plan.refuse(True, argument, f"{n} tokens", f"at most {longest[0]}, {longest[1]}", row)
        if host_lengths is not None:
            given = host_lengths[row]
            wrong = given != n if exact else given < n
            plan.refuse(wrong, "host_lengths", given, f"{'' if exact else 'at least '}{n}, as {argument}", row)
        spans.append(range(0) if bad or start < 0 else range(start, end))
    return spans


class Slots:
    """Slots of a pool that rows take: each within the pool, and none taken by two rows."""

    def __init__(self, plan: Plan, argument: str, size: int) -> None:
        self.plan, self.argument, self.size = plan, argument, size
        self.owners: dict[int, int] = {}

    def take(self, row: int, slots: Iterable[int]) -> bool:
        """Note what is wrong with a row's slots, none of which is PAD; return whether they can be used."""
        good, seen = True, set[int]()
        for slot in slots:
            if self.plan.refuse(
                slot >= self.size, self.argument, slot, f"below {self.size}, the slots of the pool", row
            ):
                good = False
                continue
            owner = self.owners.setdefault(slot, row)
            if owner != row or slot in seen:
                good = not self.plan.clash(self.argument, slot, row, owner, "a slot of its own for each row")
            seen.add(slot)
        return good


def witness(slot: int, size: int) -> tuple[int, ...]:
    """Return the slot that a PAD row's number reaches where it is taken for a slot."""
    return (slot % size,) if size else ()
