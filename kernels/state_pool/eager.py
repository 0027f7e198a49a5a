"""Batched PyTorch form of clearing and copying slots: no host read, and no pass over more than the addressed slots.

A slot number that is negative must touch nothing, but only the device knows which are. Such an entry repeats a live
one; where none is live, every entry writes slot 0 back as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.state_pool import donor_rows

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(pool: Tensor) -> Tensor:
    """Return the pool viewed as integers of its width, so that no move changes a NaN."""
    return pool.view(_BITS[pool.element_size()])


def zero_slots(pool: Tensor, slots: Tensor) -> None:
    """Set every element of the given slots to zero; arguments as in `reference.zero_slots`."""
    if pool.numel() == 0 or slots.shape[0] == 0:
        return
    bits = as_bits(pool)
    live = slots >= 0
    index = slots.long()[donor_rows(live, live.shape[0])].clamp_min_(0)
    none_live = (~live.any()).to(bits.dtype).neg_()
    bits.index_copy_(0, index, bits.index_select(0, index).bitwise_and_(none_live))


def copy_slots(pool: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy slot source[i] to slot target[i]; arguments as in `reference.copy_slots`."""
    if pool.numel() == 0 or source.shape[0] == 0:
        return
    bits = as_bits(pool)
    live = (source >= 0) & (target >= 0)
    donor, any_live = donor_rows(live, live.shape[0]), live.any()
    taken, given = (torch.where(any_live, slots.long()[donor], 0) for slots in (source, target))
    bits.index_copy_(0, given, bits.index_select(0, taken))
