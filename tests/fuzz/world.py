"""Requests that share the slots of pools, driven one batch at a time, each batch against the definition.

The oracle keeps every token of every request and computes what a step gives from the first of them on: it never reads a
state. What a step may write is told by the layout's table in docs/en/operators.md; every other byte of the pools, guard
rows included, has to stay as it was.

Rows are named by seats: the state of the request in seat i lies always in the same slots, which are left as they are
when it ends, for the next request to find. A negative seat is a PAD row, of one of three kinds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from dlinfer_ext.ops import copy_slots
from dlinfer_ext.testing import guarded_pool, rms_error

SEATS: Final = 5
LONGEST: Final = 32  # tokens of a request; the oracle starts from the first at every step
NAN: Final = float("nan")
# Kinds of PAD rows: a slot of -1; `pad_slot_id`, a slot of the pool; a history of -1 in the slot of a seat.
NO_SLOT, PAD_SLOT, NO_HISTORY = -1, -2, -3
# How a step is made: as [N, Q, ..]; with int32; without lengths on the host; with tokens outside every row; in the
# layout's other way (see there).
DENSE, NARROW, UNKNOWN, TAIL, OTHER = 1, 2, 4, 8, 16
FORMS: Final = 32


class Different(AssertionError):
    """A step did not do what the definition says."""


@dataclass
class Request:
    """A request and all its tokens.

    Attributes:
        tokens: fp32 [n, F], what each token gives to the operators.
        accepted: tokens accepted of its last verify step; 1 before the first.
        column: which of its slots holds the state, in layouts with several.
    """

    tokens: Tensor
    accepted: int = 1
    column: int = 0


class Row(NamedTuple):
    """A row of a batch.

    Attributes:
        seat: negative for a PAD row.
        request: None for a PAD row.
        new: fp32 [q, F]; NaN for a PAD row.
        accepted: how many of them stand afterwards.
    """

    seat: int
    request: Request | None
    new: Tensor
    accepted: int

    @property
    def live(self) -> Request | None:
        return self.request if len(self.new) else None

    @property
    def history(self) -> int:
        return len(self.request.tokens) if self.request is not None else 0

    @property
    def whole(self) -> Tensor:
        """All tokens of the request, those of this step included."""
        assert self.request is not None
        return torch.cat((self.request.tokens, self.new))


@dataclass
class Batch:
    """Rows and how their step is made."""

    rows: list[Row]
    form: int
    outside: Tensor

    @property
    def lengths(self) -> list[int]:
        return [len(row.new) for row in self.rows]

    @property
    def dense(self) -> bool:
        return bool(self.form & DENSE)

    @property
    def packed(self) -> Tensor:
        return torch.cat([*(row.new for row in self.rows), self.outside])

    def ints(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32 if self.form & NARROW else torch.int64)

    @property
    def cu_seqlens(self) -> Tensor:
        return self.ints([sum(self.lengths[:i]) for i in range(len(self.rows) + 1)])

    @property
    def histories(self) -> Tensor:
        return self.ints([-1 if row.seat == NO_HISTORY else row.history for row in self.rows])


class Step(NamedTuple):
    """What the definition says of a step.

    Attributes:
        outputs: for each output of the step the values [T, ..], in fp64; of tokens of PAD rows and of no row zero.
        written: for each pool the entries that are written, by index.
    """

    outputs: list[Tensor]
    written: dict[str, dict[tuple[int, ...], Tensor]]


@dataclass
class World(ABC):
    """Pools, and the requests in them.

    Attributes:
        width: of the convolution, 1 to 4; other layouts take their sizes from it.
        drafts: of a verify step.
        spare: 0 or 1, room beyond the least that a layout needs.
        flip: the other orientation or way of attention, in layouts that have one.
        requests: by seat.
        pools: each a view and the storage around it.
        calls: of operators.
        seen: what the steps held.
        used: seats that had a request.
    """

    width: int = 4
    drafts: int = 3
    spare: int = 0
    flip: bool = False
    requests: dict[int, Request] = field(default_factory=dict, init=False)
    pools: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False)
    calls: Counter[str] = field(default_factory=Counter, init=False)
    seen: Counter[str] = field(default_factory=Counter, init=False)
    used: set[int] = field(default_factory=set, init=False)

    # Of outputs and states; 0 where the definition's result is a number of fp32.
    limit = 0.0
    # Tokens of a verify step may be rejected.
    rewinds = True
    # A request may begin with a verify step.
    begins_anywhere = True

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.build()

    @abstractmethod
    def build(self) -> None:
        """Make the pools."""

    @abstractmethod
    def draw(self, count: int) -> Tensor:
        """Return what `count` new tokens give to the operators, [count, F]."""

    @abstractmethod
    def run(self, batch: Batch, *, update: bool) -> list[Tensor]:
        """Make a step by the operators; return its outputs, each [T, ..]."""

    @abstractmethod
    def define(self, batch: Batch, *, update: bool) -> Step:
        """Say what the step gives and writes, from the whole histories of its rows."""

    @abstractmethod
    def slots_of(self, seat: int) -> list[int]:
        """Return the slots (or blocks) that a seat may write."""

    def after(self, batch: Batch, row: Row, request: Request, *, update: bool) -> None:
        """Take note of where a step left the state of a request."""
        if update:
            request.accepted = row.accepted

    def may_prefill(self, request: Request | None) -> bool:
        return True

    def pool(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return a new pool full of NaN among guard rows."""
        view, storage = guarded_pool(shape, torch.float32)
        self.pools[name] = view.fill_(NAN), storage
        return view

    # --- what is asked of it ------------------------------------------------------------------------------------------

    def prefill(self, rows: Iterable[tuple[int, int]], form: int = 0) -> None:
        """Give each seat q tokens that stand; a free seat begins a request."""
        self.step([(seat, q, q) for seat, q in rows], form & ~DENSE, update=False)

    def verify(self, rows: Iterable[tuple[int, int, int]], form: int = 0) -> None:
        """Give each seat q tokens, of which a stand: (seat, q, a)."""
        self.step(list(rows), form, update=True)

    def decode(self, seats: Iterable[int], form: int = 0) -> None:
        """Give each seat one token."""
        self.step([(seat, 1, 1) for seat in seats], form, update=True)

    def finish(self, seat: int) -> None:
        """End a request and leave its slots as they are."""
        del self.requests[seat]

    def dirty(self, seat: int, value: float) -> None:
        """Fill the slots of a free seat."""
        assert seat not in self.requests
        for view, _ in self.pools.values():
            view[self.slots_of(seat)] = value

    def copy(self, source: int, target: int) -> None:
        """Let a free seat go on from where another one stands, as after a hit of a prefix cache."""
        i, j = (torch.tensor(self.slots_of(seat)) for seat in (source, target))
        for name, (view, _) in self.pools.items():
            want, entries = self.remember(name)
            entries[j] = entries[i]
            copy_slots(view, i, j)
            self.compare_bytes(name, want)
        self.calls["copy_slots"] += 1
        self.requests[target] = replace(self.requests[source])

    def step(self, asked: list[tuple[int, int, int]], form: int, *, update: bool) -> None:
        batch = self.batch(asked, form, update=update)
        want = self.define(batch, update=update)
        before = {name: self.remember(name) for name in self.pools}
        got = self.run(batch, update=update)
        self.compare_outputs(batch, got, want.outputs)
        for name in self.pools:
            storage, entries = before[name]
            for index, value in want.written.get(name, {}).items():
                entries[index] = self.pools[name][0][index]
                self.compare(f"{name}{list(index)}", entries[index], value)
            self.compare_bytes(name, storage)
        for row in batch.rows:
            self.seen["PAD rows" if row.request is None else "rows" if row.live else "empty rows"] += 1
            if row.live is not None:
                self.seen["rejected tokens"] += len(row.new) - row.accepted
                self.seen["requests in a used slot"] += row.seat not in self.requests and row.seat in self.used
                self.used.add(row.seat)
                self.after(batch, row, row.live, update=update)
                row.live.tokens = row.whole[: row.history + row.accepted]
                self.requests[row.seat] = row.live

    def batch(self, asked: list[tuple[int, int, int]], form: int, *, update: bool) -> Batch:
        if asked[0][1] == 0:
            form &= ~DENSE
        if update:
            asked = [(seat, min(q, self.drafts + 1), a) for seat, q, a in asked]
        seats = [seat for seat, _, _ in asked if seat >= 0]
        assert len(seats) == len(set(seats)), "a seat was given two rows"
        rows = []
        for seat, q, accepted in asked:
            if form & DENSE:
                q = asked[0][1]
            if seat < 0 or not self.possible(seat, q, update=update):
                seat = min(seat, NO_SLOT)
                rows.append(Row(seat, None, self.nothing(q), 0))
            else:
                new = self.draw(q)
                request = self.requests.get(seat) or Request(new[:0])
                stands = min(max(accepted, 1), q) if self.rewinds and update else q
                rows.append(Row(seat, request, new, stands))
        outside = 2 if form & TAIL and not form & DENSE else 0
        return Batch(rows, form, self.nothing(outside))

    def nothing(self, count: int) -> Tensor:
        """Return NaN for tokens of PAD rows and of no row."""
        none = self.draw(0)
        return none.new_full((count, none.shape[1]), NAN)

    def possible(self, seat: int, q: int, *, update: bool) -> bool:
        """Tell whether a seat can have such a row; if not it has a PAD row instead."""
        request = self.requests.get(seat)
        if (0 if request is None else len(request.tokens)) + q > LONGEST:
            return False
        if update:
            return request is not None or self.begins_anywhere
        return self.may_prefill(request)

    # --- the comparison -----------------------------------------------------------------------------------------------

    def compare_outputs(self, batch: Batch, got: list[Tensor], want: list[Tensor]) -> None:
        for number, (g, w) in enumerate(zip(got, want, strict=True)):
            if g.shape != w.shape:
                raise Different(f"output {number} has shape {list(g.shape)}, wanted {list(w.shape)}")
            self.compare(f"output {number} of rows {[row.seat for row in batch.rows]}", g, w)

    def remember(self, name: str) -> tuple[Tensor, Tensor]:
        """Return a copy of what a pool's storage holds, and the pool in it."""
        view, storage = self.pools[name]
        copy = storage.clone()
        return copy, copy.as_strided(view.size(), view.stride(), view.storage_offset())

    def compare_bytes(self, name: str, want: Tensor) -> None:
        """Compare all of a pool's storage bit for bit."""
        got, want = (storage.view(torch.int32) for storage in (self.pools[name][1], want))
        if not torch.equal(got, want):
            raise Different(f"{name} was written where the step has no business: {(got != want).nonzero()[0].tolist()}")

    def compare(self, what: str, got: Tensor, want: Tensor) -> None:
        if not self.limit or not want.is_floating_point():
            if not torch.equal(got.to(want.dtype), want):
                raise Different(f"{what} is\n{got.tolist()}, wanted\n{want.tolist()}")
            return
        error = rms_error(got, want)
        if not error <= self.limit:
            raise Different(f"{what}: RMS error {error:.3g}\n{got.tolist()}, wanted\n{want.tolist()}")
