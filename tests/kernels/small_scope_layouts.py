"""The layouts of `small_scope`: a world of the fuzzer, with a pool of any number of slots and wide batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlinfer_ext.ops import causal_conv1d, causal_conv1d_update
from tests.fuzz.conv import Conv, Linear, Rewind, Ring
from tests.fuzz.delta import Delta
from tests.fuzz.world import Batch, Request, World
from tests.fuzz.world import Row as WorldRow


@dataclass
class Rows:
    """The rows of one call; those with a slot of -1 are PAD rows.

    Attributes:
        slots: int64 [N].
        histories: int64 [N].
        accepted: int64 [N], tokens accepted of the verify step before.
        lengths: int64 [N].
        dense: given as [N, Q, ..], which has to be of one length.
    """

    slots: Tensor
    histories: Tensor
    accepted: Tensor
    lengths: Tensor
    dense: bool

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.cat((self.lengths.new_zeros(1), self.lengths.cumsum(0)))


@dataclass
class Layout(ABC):
    """A world, whose own seats are not used; what a slot holds is seen as E entries."""

    world: World

    @abstractmethod
    def new_pool(self, slots: int) -> Tensor:
        """Give the world a pool full of NaN among guard rows; return it as [slots, E, ..]."""

    @abstractmethod
    def view(self, pool: Tensor) -> Tensor:
        """Return a tensor of the pool's shape as [slots, E, ..]."""

    @abstractmethod
    def entry(self, index: tuple[int, ...]) -> int:
        """Return which entry of seat 0 an index of the world's pool is."""

    @abstractmethod
    def prefill(self, x: Tensor, rows: Rows) -> Tensor:
        """Return the operator's output [T, ..]."""

    @abstractmethod
    def update(self, x: Tensor, rows: Rows) -> Tensor:
        """Return the operator's output [T, ..]."""

    @property
    def name(self) -> str:
        return next(iter(self.world.pools))

    def defined(self, request: Request, new: Tensor, stands: int, *, update: bool) -> tuple[Tensor, dict[int, Tensor]]:
        """Return the outputs of a step by the definition, and what it writes into which entries."""
        batch = Batch([WorldRow(0, request, new, stands)], 0, new[:0])
        step = self.world.define(batch, update=update)
        (written,) = step.written.values()
        return step.outputs[0], {self.entry(index): value for index, value in written.items()}


class ConvLayout(Layout):
    world: Conv

    def new_pool(self, slots: int) -> Tensor:
        self.world.state = self.world.pool(self.name, (slots, *self.world.state.shape[1:]))
        return self.world.state

    def view(self, pool: Tensor) -> Tensor:
        return pool

    def entry(self, index: tuple[int, ...]) -> int:
        return index[1]

    def prefill(self, x: Tensor, rows: Rows) -> Tensor:
        w = self.world
        return causal_conv1d(
            x, w.weight, w.bias, w.state, cu_seqlens=rows.cu_seqlens, state_indices=rows.slots,
            history_lens=rows.histories, layout="ring" if isinstance(w, Ring) else "linear",
            max_query_len=int(rows.lengths.max()),
        )  # fmt: skip

    def update(self, x: Tensor, rows: Rows) -> Tensor:
        w, given = self.world, dict[str, Any]()
        if isinstance(w, Ring):
            given["cache_seqlens"] = rows.histories
        elif isinstance(w, Rewind):
            given["num_accepted_tokens"] = rows.accepted
        if rows.dense:
            x = x.unflatten(0, (len(rows.slots), -1))
        else:
            given |= {"query_start_loc": rows.cu_seqlens, "max_query_len": int(rows.lengths.max())}
        return causal_conv1d_update(x, w.state, w.weight, w.bias, None, rows.slots, **given).view(-1, x.shape[-1])


class Definition:
    """The definition of a rule, asked once for a request whatever the layout of its states."""

    def __init__(self, of: Callable[[Tensor], tuple[Tensor, list[Tensor]]]) -> None:
        self.of = of
        self.known: dict[bytes, tuple[Tensor, list[Tensor]]] = {}

    def __call__(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        key = tokens.numpy().tobytes()
        if key not in self.known:
            self.known[key] = self.of(tokens)
        return self.known[key]


class DeltaLayout(Layout):
    world: Delta

    def new_pool(self, slots: int) -> Tensor:
        count = slots * (1 if self.world.layout == "ring" else self.world.length)
        self.world.state = self.world.pool(self.name, (count, *self.world.state.shape[1:]))
        return self.view(self.world.state)

    def view(self, pool: Tensor) -> Tensor:
        return pool if self.world.layout == "ring" else pool.unflatten(0, (-1, self.world.length))

    def entry(self, index: tuple[int, ...]) -> int:
        return index[1] if self.world.layout == "ring" else self.world.slots_of(0).index(index[0])

    def places(self, rows: Rows, columns: Tensor) -> Tensor:
        """Return the slots [N, ..] of the world's pool that a row has in columns of a table."""
        if self.world.layout == "ring":
            return rows.slots[:, None]
        return torch.where(rows.slots[:, None] < 0, -1, rows.slots[:, None] * self.world.length + columns)

    def prefill(self, x: Tensor, rows: Rows) -> Tensor:
        w = self.world
        column = rows.accepted - 1 if w.layout == "table" else torch.zeros_like(rows.accepted)
        return w.of.prefill(
            *w.split(x), w.state, cu_seqlens=rows.cu_seqlens, state_indices=self.places(rows, column[:, None])[:, 0],
            history_lens=rows.histories, use_qk_l2norm=True, host_lengths=rows.lengths.tolist(),
        )  # fmt: skip

    def update(self, x: Tensor, rows: Rows) -> Tensor:
        w, given = self.world, dict[str, Any]()
        where = self.places(rows, torch.arange(w.length))
        if w.layout == "table":
            given["num_accepted_tokens"] = rows.accepted
        else:
            where = where[:, 0]
        if rows.dense:
            x = x.unflatten(0, (len(rows.slots), -1))
        else:
            given["cu_seqlens"] = rows.cu_seqlens
        out = w.of.update(
            *w.split(x), w.state, state_indices=where, history_lens=rows.histories, use_qk_l2norm=True, **given
        )
        return out.reshape(-1, *out.shape[-2:])


def conv_layouts(width: int, drafts: int) -> dict[str, Layout]:
    """Return linear, rewind and ring of equal weights."""
    return {kind.__name__.lower(): ConvLayout(kind(width=width, drafts=drafts)) for kind in (Linear, Rewind, Ring)}


def delta_layouts(rule: str, drafts: int) -> dict[str, Layout]:
    """Return a slot, a ring and a table of a rule."""
    worlds = {kind: Delta(drafts=drafts, rule=rule, layout=kind) for kind in ("plain", "ring", "table")}
    definition = Definition(worlds["plain"].from_the_first)
    for world in worlds.values():
        world.from_the_first = definition  # type: ignore[method-assign]
    return {kind: DeltaLayout(world) for kind, world in worlds.items()}
