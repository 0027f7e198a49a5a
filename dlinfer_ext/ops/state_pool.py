"""Clearing and copying the slots of a state pool: what an engine does for a new request and for a shared prefix."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ._checks import (
    FLOATS,
    INTS,
    require,
    require_dtype,
    require_inference,
    require_same_device,
    require_shape,
    require_tensor,
)
from ._registry import Operator

_ZERO: Final = "zero_slots"
_COPY: Final = "copy_slots"
_DTYPES: Final = (*FLOATS, torch.float64, torch.int8, torch.uint8, torch.int16, *INTS)


def _fake_zero(pool: Tensor, slots: Tensor) -> None:
    return None


def _fake_copy(pool: Tensor, source: Tensor, target: Tensor) -> None:
    return None


ZERO_OPERATOR: Final = Operator.define(
    _ZERO,
    "(Tensor(a!) pool, Tensor slots) -> ()",
    _fake_zero,
    summary="clear slots of a state pool",
    dtypes=_DTYPES,
)
COPY_OPERATOR: Final = Operator.define(
    _COPY,
    "(Tensor(a!) pool, Tensor source, Tensor target) -> ()",
    _fake_copy,
    summary="copy slots of a state pool",
    dtypes=_DTYPES,
)


def zero_slots(pool: Tensor, slots: Tensor) -> None:
    """Set every element of the given slots of a pool to zero.

    Only those slots are touched, however many the pool has; which they are is not read on the host.

    Args:
        pool: [S, ..] of any float or integer dtype and any strides, such as one layer's part of a shared pool; mutated.
        slots: int32 or int64 [N]; a negative one names no slot, and one named twice is cleared once. One at or above S
            is the caller's fault, checked under DLINFER_EXT_CHECK=1.

    Raises:
        TypeError: not a tensor, or an unsupported dtype.
        ValueError: a shape or device that does not fit, or, under DLINFER_EXT_CHECK=1, a slot beyond the pool.
    """
    _check_pool(_ZERO, pool)
    _check_slots(_ZERO, "slots", slots, pool, "N")
    torch.ops.dlinfer_ext.zero_slots(pool, slots)


def copy_slots(pool: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy slot source[i] of a pool to slot target[i], bit for bit.

    The caller sees to it that no target is named twice and that none is the source of another pair: then the order of
    the pairs has no bearing. DLINFER_EXT_CHECK=1 checks it.

    Args:
        pool: [S, ..] as in `zero_slots`; mutated.
        source: int32 or int64 [N].
        target: int32 or int64 [N]; a pair with a negative number is left out.

    Raises:
        TypeError: not a tensor, or an unsupported dtype.
        ValueError: a shape or device that does not fit, or, under DLINFER_EXT_CHECK=1, a slot beyond the pool, a target
            named twice, or a target that is a source of another pair.
    """
    _check_pool(_COPY, pool)
    _check_slots(_COPY, "source", source, pool, "N")
    _check_slots(_COPY, "target", target, pool, source.shape[0])
    torch.ops.dlinfer_ext.copy_slots(pool, source, target)


def _check_pool(op: str, pool: Tensor) -> None:
    require_tensor(op, "pool", pool)
    require_dtype(op, "pool", pool, _DTYPES)
    require(pool.dim() >= 1, op, "pool", f"of shape {list(pool.shape)}", "[S, ..]")
    require_inference(op, pool=pool)


def _check_slots(op: str, name: str, slots: Tensor, pool: Tensor, rows: int | str) -> None:
    require_shape(op, name, slots, [rows])
    require_dtype(op, name, slots, INTS)
    require_same_device(op, "pool", pool, **{name: slots})
