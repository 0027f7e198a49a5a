"""Access to pools of recurrent states by slot, for the delta rules. No host read, no copy of a pool.

A pool is [S, HV, A, B] (one state per slot) or a ring [S, R, HV, A, B] (R states per slot: the state after n tokens
lives in entry n mod R). Any strides are honoured. Rows are addressed in a flat view by one int64 number each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FlatPool:
    """A pool with one leading dimension.

    Attributes:
        view: [X, HV, A, B], a view of the pool; entries may overlap when the strides have no common step.
        slot_step: how far one slot is in the leading dimension of `view`.
        ring_step: how far one ring entry is.
        ring: R, or None for a plain pool.
    """

    view: Tensor
    slot_step: int
    ring_step: int
    ring: int | None

    def at(self, slots: Tensor, entries: Tensor | None = None) -> Tensor:
        """Return the flat numbers (int64) of slots, and of ring entries in them."""
        flat = slots.long() if self.slot_step == 1 else slots.long() * self.slot_step
        return flat if entries is None else flat + entries.long() * self.ring_step


def flatten_pool(pool: Tensor) -> FlatPool:
    """Return the flat form of a plain (4-D) or ring (5-D) pool, or of a cache [B, E, X] of B blocks of E entries."""
    if pool.dim() == 4:
        return FlatPool(pool, 1, 0, None)
    slots, ring, *inner = pool.shape
    slot_stride, ring_stride, *inner_strides = pool.stride()
    # Slot and entry strides need not divide one another; the greatest common divisor reaches every entry of every slot.
    step = math.gcd(slot_stride, ring_stride) or 1
    last = (slots - 1) * slot_stride + (ring - 1) * ring_stride
    view = pool.as_strided((last // step + 1 if slots else 0, *inner), (step, *inner_strides))
    return FlatPool(view, slot_stride // step, ring_stride // step, ring)


def ring_slot(history: Tensor, offset: int | Tensor, ring: int) -> Tensor:
    """Return the ring entry that holds the state after `history + offset` tokens."""
    return torch.remainder(history.long() + offset, ring)


def live_slots(slots: Tensor, pad_slot_id: int) -> Tensor:
    """Return where a slot number names a state: not negative and not `pad_slot_id`."""
    live = slots >= 0
    return live if pad_slot_id < 0 else live & (slots != pad_slot_id)


def donor_rows(live: Tensor, block: int) -> Tensor:
    """Return for each row the row whose work it repeats: itself if live, else the first live row of its block.

    A row without a state must not write, but only the device knows which rows those are. Such a row repeats a live one,
    so that the same state goes to the same place twice. In a block of rows without a live one all repeat its first row.

    Args:
        live: bool [N].
        block: rows per block; only rows of one block may stand in for one another.

    Returns:
        int64 [N].
    """
    rows = torch.arange(live.shape[0], device=live.device)
    if block >= live.shape[0]:
        return torch.where(live, rows, live.int().argmax()) if live.shape[0] else rows
    blocks = torch.nn.functional.pad(live.int(), (0, -live.shape[0] % block)).view(-1, block)
    first = blocks.argmax(1, keepdim=True) + torch.arange(0, live.shape[0], block, device=live.device)[:, None]
    return torch.where(live, rows, first.expand(-1, block).flatten()[: live.shape[0]])


_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def row_mask(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [N, 1, 1, 1] with all bits set where `rows` (bool [N]) is true and none elsewhere, as wide as `dtype`.

    Rows of states are cleared and chosen by bit operations: several times faster on a CPU than masked_fill_ and where,
    and every NaN stays as it is.
    """
    return rows.to(_BITS[dtype]).neg_().view(-1, 1, 1, 1)


def read_stored(view: Tensor, index: Tensor, mask: Tensor | None) -> Tensor:
    """Return copies of the addressed states in the pool's dtype.

    Args:
        view: [X, HV, A, B].
        index: int64 [N].
        mask: `row_mask` [N, 1, 1, 1], zero for the rows to read as zero whatever they hold; None if there is none.
    """
    stored = view.index_select(0, index)
    if mask is not None:
        stored.view(mask.dtype).bitwise_and_(mask)
    return stored


def copy_states_(view: Tensor, index: Tensor, states: Tensor) -> None:
    """Copy states [N, HV, A, B] to the addressed places of a view of the same dtype."""
    ratio = torch.complex128.itemsize // view.dtype.itemsize
    spans = (view.storage_offset(), view.shape[-1], *view.stride()[:-1])
    if view.is_cpu and view.stride(-1) == 1 and all(n % ratio == 0 for n in spans):
        # On a CPU index_copy_ moves one element at a time: 16 bytes at once take half to a fifth of the time.
        view, states = view.view(torch.complex128), states.contiguous().view(torch.complex128)
    view.index_copy_(0, index, states)


def write_state(view: Tensor, index: Tensor, states: Tensor, stored: Tensor, keep: Tensor | None) -> None:
    """Store states at the addressed places, rounded once to the pool's dtype.

    Args:
        view: [X, HV, A, B], mutated.
        index: int64 [N].
        states: [N, HV, A, B]; as `stored`, it may be overwritten if `keep` is given.
        stored: [N, HV, A, B], what the places hold, in the pool's dtype.
        keep: `row_mask` [N, 1, 1, 1] of rows to write back as `stored`, bit for bit (rounding would change a NaN).
    """
    states = states.to(view.dtype)
    if keep is not None:
        states.view(keep.dtype).bitwise_and_(~keep).bitwise_or_(stored.view(keep.dtype) & keep)
    copy_states_(view, index, states)


def write_live_state(view: Tensor, index: Tensor, states: Tensor, live: Tensor) -> None:
    """Store the states of live rows only; `index` of the others may be anything within the pool."""
    donor = donor_rows(live, live.shape[0])
    index, states = index[donor], states.index_select(0, donor).to(view.dtype)
    none_live = row_mask(~live.any().expand_as(live), view.dtype)
    write_state(view, index, states, read_stored(view, index, None), none_live)
