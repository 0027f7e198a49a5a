"""Attention of a packed batch over selected tokens. No host read.

Each query has a selection of its own, so its latents are gathered for it alone, in steps of queries: fresh memory
besides the output is bounded by STEP_BYTES, or by what one query takes if that is more: about 4 · W · (2 · C + 2 · H)
bytes, 9 MiB for 64 heads, latents of 512 and 2051 selected tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.pages import STEP_BYTES, PackedTokens, block_at, clear_absent
from ..common.state_pool import flatten_pool


def attend_selected(
    q: Tensor, cache: Tensor, at: PackedTokens, block_offsets: Tensor, value_dim: int, scale: float, indices: Tensor
) -> Tensor:
    """Attend over the tokens at `indices` int [T, W] of each query's request; one < 0 or not visible takes no part."""
    (tokens, heads, dim), (blocks, block_size, _), width = q.shape, cache.shape, indices.shape[1]
    flat, visible = flatten_pool(cache), at.visible
    out = q.new_zeros(tokens, heads, value_dim)
    step = max(1, STEP_BYTES // (4 * (2 * width * dim + 2 * heads * width + heads * (dim + value_dim)) + 1))
    for first in range(0, tokens, step):
        part = slice(first, first + step)
        position = indices[part].long()
        absent = (position < 0) | (position >= visible[part, None])
        block = block_at(block_offsets, at.owner[part, None], position // block_size, blocks)
        places = flat.at(block, position % block_size)
        held = flat.view.index_select(0, places.flatten()).view(-1, width, dim).float()
        clear_absent(held, absent)
        scores = torch.bmm(q[part].float() * scale, held.transpose(1, 2))
        weight = scores.masked_fill_(absent[:, None], -torch.inf).softmax(-1)
        # A query without any token has no softmax.
        weight.masked_fill_(absent.all(-1)[:, None, None], 0.0)
        out[part] = torch.bmm(weight, held[..., :value_dim])
    return out
