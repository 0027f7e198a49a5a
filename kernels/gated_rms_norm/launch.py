"""Launcher of the gated RMS norm's kernel."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ..common.tiling import MIN_ROWS, SoC, cdiv, core_grid, next_power_of_2, prev_power_of_2
from .kernel import gated_rms_norm_kernel, gated_rms_norm_wide_kernel

# Bytes of the unified buffer that one element of a tile takes in all: inputs twice (the next tile is loaded while this
# one is computed), fp32 intermediates and the result.
_TILE_BYTES: Final = 32
_FEWEST: Final = 16
_LEAST_BLOCK: Final = 16
_WIDE_BLOCK: Final = 256  # channels of a tile where a whole group is too long for one


def gated_rms_norm(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    activation: str,
    norm_before_gate: bool,
    group_size: int,
    *,
    soc: SoC,
) -> Tensor:
    """Return the gated RMS norm of x; arguments as in `reference.gated_rms_norm`, result in x's dtype.

    Args:
        x: [.., hidden], any strides.
        gate: x's shape or None, any strides.
        weight: [hidden].
        bias: [hidden] or None.
        eps: inside the root.
        activation: "silu" or "sigmoid".
        norm_before_gate: the order of norm and gate.
        group_size: channels that share one root mean square.
        soc: the chip that tiles are chosen for.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    flags = {
        "GATED": gate is not None,
        "BIASED": bias is not None,
        "SIGMOID": activation == "sigmoid",
        "NORM_FIRST": norm_before_gate,
    }
    # An argument that is None is never read: another stands in for it.
    z, b = x if gate is None else gate, weight if bias is None else bias
    steps = (weight.stride(0), b.stride(0))
    block = next_power_of_2(max(group_size, _LEAST_BLOCK))
    budget = soc.ub_bytes * 9 // 10 // _TILE_BYTES  # elements of a tile
    if block * MIN_ROWS > budget:
        hidden = x.shape[-1]
        wide_x, wide_z = x.reshape(-1, hidden), z.reshape(-1, hidden)
        rows, groups = wide_x.shape[0], hidden // group_size
        gated_rms_norm_wide_kernel[(core_grid(groups * cdiv(rows, MIN_ROWS), soc.vector_cores),)](
            wide_x, wide_z, weight, b, out, rows, group_size, *wide_x.stride(), *wide_z.stride(), *steps, eps, groups,
            ROWS=MIN_ROWS, BLOCK=_WIDE_BLOCK, **flags,
        )  # fmt: skip
        return out

    x, z, extents, x_strides, z_strides = _levels(x, z, group_size)
    slabs, rows, parts = extents
    most = soc.tile("gated_rms_norm", "lines", prev_power_of_2(budget // block))
    row_tile, part_tile = _tile(parts, slabs * rows * parts, most, soc.vector_cores)
    tasks = slabs * cdiv(rows, row_tile) * cdiv(parts, part_tile)
    gated_rms_norm_kernel[(core_grid(tasks, soc.vector_cores),)](
        x, z, weight, b, out, slabs, rows, parts, *x_strides, *z_strides, *steps, eps,
        CHANNELS=group_size, ROWS=row_tile, PARTS=part_tile, BLOCK=block, GROUPED=group_size < out.shape[-1], **flags,
    )  # fmt: skip
    return out


def _levels(
    x: Tensor, z: Tensor, group_size: int
) -> tuple[Tensor, Tensor, tuple[int, int, int], tuple[int, ...], tuple[int, ...]]:
    """Return x, z, (slabs, rows, parts), and the strides of these and of the channels for x and for z.

    Dimensions that both tensors step through evenly are one level. Tensors that need more than three are copied, which
    happens to no view of a projection.
    """
    levels = [s for s in zip(x.shape[:-1], x.stride()[:-1], z.stride()[:-1], strict=True) if s[0] > 1]
    merged: list[tuple[int, int, int]] = []
    for extent, x_stride, z_stride in reversed(levels):
        if merged and all(
            s == merged[-1][0] * inner for s, inner in zip((x_stride, z_stride), merged[-1][1:], strict=True)
        ):
            merged[-1] = (extent * merged[-1][0], *merged[-1][1:])
        else:
            merged.append((extent, x_stride, z_stride))
    merged.reverse()
    if group_size < x.shape[-1]:
        part = (x.shape[-1] // group_size, group_size * x.stride(-1), group_size * z.stride(-1))
        lead, last = merged, [part]
    else:
        # Rows that are one level make tiles of rows; the parts are then single.
        lead, last = (merged, [(1, 0, 0)]) if len(merged) < 2 else (merged[:-1], merged[-1:])
    if len(lead) > 2:
        hidden = x.shape[-1]
        flat = x.reshape(-1, hidden)
        return _levels(flat, flat if z is x else z.reshape(-1, hidden), group_size)
    slabs, rows, parts = [(1, 0, 0)] * (2 - len(lead)) + lead + last
    extents = (slabs[0], rows[0], parts[0])
    x_strides, z_strides = ((slabs[i], rows[i], parts[i], t.stride(-1)) for i, t in ((1, x), (2, z)))
    return x, z, extents, x_strides, z_strides


def _tile(parts: int, total: int, most: int, cores: int) -> tuple[int, int]:
    """Return the rows and parts of a tile: enough tiles for every core, but at least 16 lines in each if `most` allows.

    Each program reads the weight once, so that tiles of few lines would read it more often than the rows are worth.
    """
    lines = min(most, max(_FEWEST, next_power_of_2(cdiv(total, cores))))
    part_tile = min(lines, next_power_of_2(parts))
    return lines // part_tile, part_tile
