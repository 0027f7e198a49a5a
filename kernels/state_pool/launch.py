"""Launchers that clear and copy slots of a state pool."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from ..common.tiling import MIN_ROWS, SoC, cdiv, core_grid, next_power_of_2, prev_power_of_2
from .eager import as_bits
from .kernel import move_slots_kernel

_SHARES: Final = 4  # of the unified buffer: two tiles under way, and room to spare
_TILES: Final = 8  # of a slot at least, so that a few slots occupy the cores
_LEAST: Final = 1024  # elements of a tile, even so


def zero_slots(pool: Tensor, slots: Tensor, *, soc: SoC) -> None:
    """Set every element of the given slots to zero.

    Args:
        pool: [S, ..], any dtype and strides; mutated.
        slots: int [N]; a negative one names no slot.
        soc: the chip that tiles are chosen for.
    """
    _move(pool, slots, slots, False, soc)


def copy_slots(pool: Tensor, source: Tensor, target: Tensor, *, soc: SoC) -> None:
    """Copy slot source[i] to slot target[i], bit for bit.

    Args:
        pool: [S, ..], any dtype and strides; mutated.
        source: int [N].
        target: int [N], none named twice or a source of another pair; a pair with a negative number is left out.
        soc: the chip that tiles are chosen for.
    """
    _move(pool, source, target, True, soc)


def _move(pool: Tensor, source: Tensor, target: Tensor, copy: bool, soc: SoC) -> None:
    if pool.numel() == 0 or target.shape[0] == 0:
        return
    bits = as_bits(pool)
    levels = _levels(bits)
    if len(levels) > 3:
        widest = max(range(1, bits.dim()), key=lambda d: (bits.shape[d] > 1, bits.stride(d)))
        for part in bits.unbind(widest):
            _move(part, source, target, copy, soc)
        return
    (slabs, slab), (rows, row), (columns, column) = [(1, 0)] * (3 - len(levels)) + levels
    row_tile, column_tile = _tile(rows, columns, soc.ub_bytes // _SHARES // bits.element_size())
    tasks = target.shape[0] * slabs * cdiv(rows, row_tile) * cdiv(columns, column_tile)
    move_slots_kernel[(core_grid(tasks, soc.vector_cores),)](
        bits, source, target, target.shape[0], slabs, rows, columns, source.stride(0), target.stride(0),
        bits.stride(0), slab, row, column, ROWS=row_tile, COLUMNS=column_tile, COPY=copy,
    )  # fmt: skip


def _levels(pool: Tensor) -> list[tuple[int, int]]:
    """Return (extent, stride) of a slot from the widest stride to the least, as few as there can be, at least one."""
    dims = sorted((d for d in zip(pool.shape[1:], pool.stride()[1:], strict=True) if d[0] > 1), key=lambda d: d[1])
    levels: list[tuple[int, int]] = []
    for extent, stride in dims:
        if levels and stride == levels[-1][0] * levels[-1][1]:
            levels[-1] = (extent * levels[-1][0], levels[-1][1])
        else:
            levels.append((extent, stride))
    return levels[::-1] or [(1, 1)]


def _tile(rows: int, columns: int, budget: int) -> tuple[int, int]:
    most = prev_power_of_2(budget)
    if rows == 1:
        return 1, min(most, max(_LEAST, next_power_of_2(cdiv(columns, _TILES))))
    column_tile = min(most // MIN_ROWS, next_power_of_2(columns))
    return max(MIN_ROWS, min(most // column_tile, next_power_of_2(cdiv(rows, _TILES)))), column_tile
