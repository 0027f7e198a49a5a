"""Definition of clearing and copying the slots of a state pool: one slot at a time, bits unchanged."""

from __future__ import annotations

from torch import Tensor


def zero_slots(pool: Tensor, slots: Tensor) -> None:
    """Set every element of the given slots to zero.

    Args:
        pool: [S, ..], any dtype and strides; mutated.
        slots: int [N]; a negative one names no slot.
    """
    for slot in slots.tolist():
        if slot >= 0:
            pool[slot].zero_()


def copy_slots(pool: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy slot source[i] to slot target[i], bit for bit.

    No target is named twice, and none is a source of another pair: the order of the pairs then has no bearing.

    Args:
        pool: [S, ..], any dtype and strides; mutated.
        source: int [N].
        target: int [N]; a pair with a negative number is left out.
    """
    for i, j in zip(source.tolist(), target.tolist(), strict=True):
        if i >= 0 and j >= 0:
            pool[j].copy_(pool[i])
