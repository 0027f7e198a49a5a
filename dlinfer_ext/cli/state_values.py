"""Names of what entries hold, and their values in a dump: what the judges share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops._access import Entries, Row
from .state_file import Dump


@dataclass(frozen=True)
class Finding:
    """What is wrong, or with `fault` False what may be.

    Attributes:
        row: None if it is of no one row.
        text: what came and what is wanted.
        fault: it cannot be.
        at: "before" or "after", the pool and the index of the entry that it is about, or None.
    """

    row: int | None
    text: str
    fault: bool = True
    at: tuple[str, str, tuple[int, ...]] | None = None


def about(row: int | None, when: str, pool: str, index: list[int], text: str) -> Finding:
    """Return a finding about one entry of a pool before or after the call, which its text begins with."""
    return Finding(row, f"{pool}{index} {text}", at=(when, pool, tuple(index)))


def held_by(row: Row, pool: str, position: int) -> str:
    """Say what an entry of a pool holds by its position, which is counted from the row's first new token."""
    if pool == "pool_cache":
        return f"key pool {position}"
    number = (row.history or 0) + position
    if pool == "state":
        which = f"{number} tokens" if row.history is not None else f"{position} of its tokens"
        return f"the state after {which}"
    what = "the input" if pool == "conv_state" else "the entry"
    if row.history is not None:
        return f"{what} of position {number}"
    return f"{what} of its token {position}" if position >= 0 else f"{what} {-position} before its first token"


def live_rows(dump: Dump) -> list[Row]:
    return [row for row in dump.plan.rows if row.live]


def values_of(dump: Dump, when: str, pool: str, entries: Entries | None) -> list[tuple[list[int], int, Tensor]]:
    """Return (index, position, value) of the entries that were kept."""
    if pool not in dump.pools or entries is None:
        return []
    where, values = dump.slots(pool), dump.tensors[f"{when}.{pool}"]
    pairs = zip(entries.index.tolist(), entries.positions.tolist(), strict=True)
    return [(i, p, values[(where[i[0]], *i[1:])]) for i, p in pairs if i[0] in where]


def indices_and_positions(entries: Entries | None) -> tuple[Tensor, Tensor]:
    return (torch.zeros(0, 1), torch.zeros(0)) if entries is None else (entries.index, entries.positions)
