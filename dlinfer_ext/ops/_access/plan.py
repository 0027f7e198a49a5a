"""What is said of a call: its rows, the entries that each reads and writes, and what cannot be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

Arguments = Mapping[str, Any]


class Problem(NamedTuple):
    """An argument that cannot be: in the form of the operators' errors, and the request row, None if of no one row."""

    argument: str
    got: str
    wanted: str
    row: int | None


@dataclass(frozen=True)
class Entries:
    """Entries of one pool.

    Attributes:
        index: int64 [n, r] on the CPU, the first r indices into the pool, the slot (or block) first; none twice.
        positions: int64 [n], what an entry holds, counted from the row's first new token: of an input that of position
            history + p, of a state that after history + p tokens; of a key pool its number in the request.
    """

    index: Tensor
    positions: Tensor

    @classmethod
    def of(cls, pairs: Iterable[tuple[Sequence[int], int]], rank: int) -> Entries:
        """Take (index, position) pairs; of those with one index the last counts, as it is written last."""
        held = {tuple(index): position for index, position in pairs}
        return cls(
            torch.tensor(list(held), dtype=torch.int64).view(len(held), rank),
            torch.tensor(list(held.values()), dtype=torch.int64),
        )

    def slots(self) -> list[int]:
        return list(dict.fromkeys(self.index[:, 0].tolist()))

    def take(self, pool: Tensor) -> Tensor:
        """Return the entries' values [n, ..] from the pool."""
        return pool[tuple(self.index.to(pool.device).unbind(1))]


@dataclass(frozen=True)
class Row:
    """A row of a call.

    Attributes:
        number: in the batch.
        tokens: which of the packed tokens are its own.
        history: tokens of the request before the call; None where the call does not say.
        slots: as given.
        live: it is no PAD row, has tokens, and nothing is wrong with its place.
        accepted: tokens accepted of the step before, in layouts that take them.
        reads: by pool.
        writes: by pool.
        witnesses: by pool, slots of a PAD row that code which takes it for a row would touch.
    """

    number: int
    tokens: range
    history: int | None
    slots: tuple[int, ...]
    live: bool
    accepted: int | None = None
    reads: Mapping[str, Entries] = field(default_factory=dict)
    writes: Mapping[str, Entries] = field(default_factory=dict)
    witnesses: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass
class Plan:
    """What a call does.

    Attributes:
        operator: its name.
        layout: linear, rewind, ring or columns; plain, ring or table; pages; slots.
        rows: those of the batch.
        problems: what is wrong with its arguments, of the first row first.
    """

    operator: str
    layout: str = ""
    rows: list[Row] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def refuse(self, bad: bool, argument: str, got: object, wanted: str, row: int | None = None) -> bool:
        """Note a problem if `bad`; return `bad`."""
        if bad:
            self.problems.append(Problem(argument, f"{got}" + ("" if row is None else f" at row {row}"), wanted, row))
        return bad

    def clash(self, argument: str, number: int, row: int, other: int, wanted: str) -> bool:
        """Note that a row's slot or block is that of another row too; return True."""
        self.problems.append(Problem(argument, f"{number} at row {row} and at row {other}", wanted, row))
        return True
