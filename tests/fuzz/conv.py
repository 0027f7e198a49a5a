"""The causal convolution in its three layouts. Inputs and weights are small integers, so results are exact."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from dlinfer_ext.kernels.causal_conv1d import reference
from dlinfer_ext.ops import causal_conv1d, causal_conv1d_columns, causal_conv1d_update

from .world import DENSE, NO_HISTORY, OTHER, PAD_SLOT, SEATS, UNKNOWN, Batch, Request, Row, Step, World

CHANNELS = 4
BLOCKS = 2  # slots of a seat
PAD_ID = 1  # a slot that no seat has


class Conv(World):
    """A pool [S, L, D]. The other way of a verify step: read one slot, write another, by a table of blocks."""

    def build(self) -> None:
        self.columns = max(self.width - 1 + (self.drafts if self.rewinds else 0) + self.spare, 1)
        self.state = self.pool("conv_state", (2 + BLOCKS * SEATS, self.columns, CHANNELS))
        self.weight = torch.randint(-3, 4, (self.width, CHANNELS), generator=self.generator).float()
        self.bias = torch.randint(-3, 4, (CHANNELS,), generator=self.generator).float()

    def draw(self, count: int) -> Tensor:
        return torch.randint(-8, 9, (count, CHANNELS), generator=self.generator).float()

    def slots_of(self, seat: int) -> list[int]:
        """Return the slots of a seat, in another order than the seats; slots 0 and 1 belong to none."""
        return [2 + (3 * seat) % SEATS + SEATS * block for block in range(BLOCKS)]

    def slots(self, row: Row, *, update: bool) -> list[int]:
        if row.seat >= 0:
            return self.slots_of(row.seat)
        if row.seat == NO_HISTORY and (not update or self.begins_anywhere):
            return self.slots_of(0)
        return [PAD_ID if row.seat == PAD_SLOT else -1] * BLOCKS

    def source(self, row: Row) -> int:
        return 0 if row.request is None else row.request.column

    def target(self, batch: Batch, row: Row, *, update: bool) -> int:
        """Return which of its slots a row writes."""
        return (self.source(row) + (update and bool(batch.form & OTHER))) % BLOCKS

    def after(self, batch: Batch, row: Row, request: Request, *, update: bool) -> None:
        super().after(batch, row, request, update=update)
        request.column = self.target(batch, row, update=update)

    def run(self, batch: Batch, *, update: bool) -> list[Tensor]:
        where = batch.ints([self.slots(row, update=update)[self.source(row)] for row in batch.rows])
        return [self.run_update(batch, where) if update else self.run_prefill(batch, where)]

    def run_prefill(self, batch: Batch, where: Tensor) -> Tensor:
        self.calls["causal_conv1d"] += 1
        return causal_conv1d(
            batch.packed, self.weight, self.bias, self.state, cu_seqlens=batch.cu_seqlens, state_indices=where,
            history_lens=batch.histories, layout="ring" if isinstance(self, Ring) else "linear", pad_slot_id=PAD_ID,
            max_query_len=None if batch.form & UNKNOWN else max(batch.lengths),
        )  # fmt: skip

    def run_update(self, batch: Batch, where: Tensor) -> Tensor:
        self.calls["causal_conv1d_update"] += 1
        x, given = batch.packed, self.past(batch)
        if batch.form & DENSE:
            x = x.view(len(batch.rows), -1, CHANNELS)
            x = x[:, 0] if x.shape[1] == 1 else x
        else:
            given["query_start_loc"] = batch.cu_seqlens
        if batch.form & OTHER:
            where = batch.ints([self.slots(row, update=True) for row in batch.rows])
            given["initial_state_idx"] = batch.ints([self.source(row) for row in batch.rows])
            targets = [self.target(batch, row, update=True) for row in batch.rows]
            given["block_idx_last_scheduled_token"] = batch.ints(targets)
        out = causal_conv1d_update(
            x, self.state, self.weight, self.bias, None, where, max_query_len=max(batch.lengths), pad_slot_id=PAD_ID,
            **given,
        )  # fmt: skip
        return out.view(-1, CHANNELS)

    def past(self, batch: Batch) -> dict[str, Any]:
        """Return what tells a verify step where the history lies."""
        return {}

    def define(self, batch: Batch, *, update: bool) -> Step:
        outputs = [torch.zeros(0, CHANNELS)]
        written: dict[tuple[int, ...], Tensor] = {}
        for row in batch.rows:
            if row.live is None:
                outputs.append(torch.zeros(len(row.new), CHANNELS))
                continue
            whole = row.whole
            all_of_it = torch.tensor([0, len(whole)])
            outputs.append(reference.causal_conv1d(whole, self.weight, self.bias, None, all_of_it, None, None))
            outputs[-1] = outputs[-1][row.history :]
            slot = self.slots(row, update=update)[self.target(batch, row, update=update)]
            for column, position in self.stored(batch, row, update=update).items():
                written[slot, column] = whole[position] if position >= 0 else torch.zeros(CHANNELS)
        outputs.append(torch.zeros(len(batch.outside), CHANNELS))
        return Step([torch.cat(outputs)], {"conv_state": written})

    @abstractmethod
    def stored(self, batch: Batch, row: Row, *, update: bool) -> dict[int, int]:
        """Return the position that each column written holds; a negative one is before the start."""


class Linear(Conv):
    """The last W - 1 inputs, oldest first; nothing can be rejected."""

    rewinds = begins_anywhere = False

    def stored(self, batch: Batch, row: Row, *, update: bool) -> dict[int, int]:
        first = row.history + len(row.new) - (self.width - 1)
        return {i: first + i for i in range(self.width - 1)}


class Rewind(Conv):
    """The window before a step and the step's own inputs behind it."""

    begins_anywhere = False

    def may_prefill(self, request: Request | None) -> bool:
        """Prefill is linear: it goes on from column 0."""
        return request is None or request.accepted == 1

    def past(self, batch: Batch) -> dict[str, Any]:
        counts = [1 if row.request is None else row.request.accepted for row in batch.rows]
        return {"num_accepted_tokens": batch.ints(counts)}

    def stored(self, batch: Batch, row: Row, *, update: bool) -> dict[int, int]:
        first = row.history + 1 - (self.width - 1)
        if not update:
            first, count = row.history + len(row.new) - (self.width - 1), self.width - 1
        else:
            count = self.width - 2 + len(row.new)
        return {i: first + i for i in range(count)}


class Ring(Conv):
    """Position p in column p mod L. The other way of a prefill: the columns of the last W inputs given."""

    def past(self, batch: Batch) -> dict[str, Any]:
        return {"cache_seqlens": batch.histories}

    def run_prefill(self, batch: Batch, where: Tensor) -> Tensor:
        if not batch.form & OTHER:
            return super().run_prefill(batch, where)
        self.calls["causal_conv1d_columns"] += 1
        where = torch.where(batch.histories < 0, -1, where)
        reads = [range(row.history - self.width + 1, row.history) for row in batch.rows]
        ends = [row.history + len(row.new) for row in batch.rows]
        writes = [range(end - self.width, end) for end in ends]
        return causal_conv1d_columns(
            batch.packed, self.weight, self.bias, self.state, cu_seqlens=batch.cu_seqlens, state_indices=where,
            read_columns=self.columns_of(batch, reads), write_columns=self.columns_of(batch, writes),
            has_history=batch.histories > 0, pad_slot_id=PAD_ID,
        )  # fmt: skip

    def columns_of(self, batch: Batch, positions: list[range]) -> Tensor:
        columns = [[p % self.columns if p >= 0 else -1 for p in row] for row in positions]
        return batch.ints(columns).view(len(positions), -1)

    def stored(self, batch: Batch, row: Row, *, update: bool) -> dict[int, int]:
        end, first = row.history + len(row.new), row.history
        if batch.form & OTHER:
            # A block that starts to be written gets the history too; columns given take the last W of both.
            first = row.history - (self.width - 1) if update else end - self.width
        return {p % self.columns: p for p in range(max(first, end - self.columns, 0), end)}
