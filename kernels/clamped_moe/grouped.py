"""Product of rows that are sorted by group with the matrix of each group."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

_ALIGNMENT: Final = 16  # bytes that strides and the first address have to be multiples of in torch's grouped_mm
# Elsewhere PyTorch may fall back to a loop that reads the ends on the host, which no graph can hold.
_GROUPED: Final = ("cpu",)
_GATHERED: Final = 1 << 24  # elements of the matrices that are gathered at one time


def _aligned(matrix: Tensor) -> bool:
    size = matrix.element_size()
    return (
        matrix.stride(-1) == 1
        and matrix.data_ptr() % _ALIGNMENT == 0
        and all(step * size % _ALIGNMENT == 0 for step in matrix.stride()[:-1])
    )


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return rows[p] · matrices[g]^T for each row p of each group g, in the dtype of rows.

    Args:
        rows: [P, I], sorted by group.
        matrices: [G, O, I], rows' dtype.
        ends: int64 [G], the end of each group's rows, not falling; a group may have none.

    Returns:
        [P, O]. What stands in rows from ends[-1] on is undefined.
    """
    if rows.device.type in _GROUPED and _aligned(rows) and _aligned(matrices):
        return F.grouped_mm(rows, matrices.transpose(1, 2), offs=ends.int())
    return blocked_product(rows, matrices, ends)


def blocked_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return the same by products of blocks of rows, each with a copy of its group's matrix.

    How many blocks there are at most is known on the host, so that nothing is read from the device; sizes and strides
    may be any.
    """
    count, groups = rows.shape[0], matrices.shape[0]
    block = 1
    while block * groups < count:
        block *= 2
    blocks = count if block == 1 else count // block + min(groups, count)
    starts = torch.cat((ends.new_zeros(1), ends[:-1]))
    needed = (ends - starts + block - 1).div(block, rounding_mode="floor")
    last = needed.cumsum(0)
    number = torch.arange(blocks, device=rows.device)
    group = torch.searchsorted(last, number, right=True).clamp_(max=groups - 1)
    first = starts[group] + (number - last[group] + needed[group]) * block
    # A block may end past its group, or past the rows: what it holds there is not taken.
    source = (first[:, None] + torch.arange(block, device=rows.device)).clamp_(max=count - 1)
    out = torch.empty(blocks, block, matrices.shape[1], dtype=rows.dtype, device=rows.device)
    step = max(1, _GATHERED // max(1, matrices[0].numel()))
    for start in range(0, blocks, step):
        part = slice(start, start + step)
        torch.bmm(rows[source[part]], matrices[group[part]].transpose(1, 2), out=out[part])
    place = torch.arange(count, device=rows.device)
    owner = torch.searchsorted(ends, place, right=True).clamp_(max=groups - 1)
    place = place - starts[owner] + (last[owner] - needed[owner]) * block
    return out.flatten(0, 1)[place.clamp_(max=blocks * block - 1)]
