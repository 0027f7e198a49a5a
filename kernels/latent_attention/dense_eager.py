"""Attention of a packed batch over the whole context. Nothing is read on the host, lengths or not.

Queries are laid out in chunks of one row each, and a chunk meets its row's pages in steps, with the running softmax of
Milakov and Gimelshein (arXiv 1805.02867). Fresh memory besides the output is bounded by STEP_BYTES, or by what one
chunk takes if that is more: about 4 · (256 · 2 · C + 16 · H · (C + 2 · V + 2 · 256)) bytes, 12 MiB for 64 heads and
latents of 512, however long prompt and context are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.chunks import chunk_grid, chunk_size
from ..common.pages import STEP_BYTES, clear_absent, gather_pages, packed_tokens

# Most queries of a chunk, and tokens of the context in a step.
QUERIES, KEYS = 16, 256


class RunningSoftmax:
    """A softmax-weighted sum over values that come in parts: fp32 rows [G, K] of values [V]."""

    def __init__(self, like: Tensor, width: int) -> None:
        lead = like.shape[:2]
        self.peak = like.new_full(lead, -torch.inf)
        self.total = like.new_zeros(lead)
        self.sum = like.new_zeros(*lead, width)

    def add(self, scores: Tensor, values: Tensor) -> None:
        """Add values [G, S, V] with scores [G, K, S], overwritten; -inf takes no part."""
        peak = torch.maximum(self.peak, scores.amax(-1))
        # A row that has seen nothing yet must not become -inf - -inf.
        base = peak.masked_fill(peak == -torch.inf, 0.0)
        weight = scores.sub_(base[..., None]).exp_()
        kept = torch.exp(self.peak - base)
        self.total.mul_(kept).add_(weight.sum(-1))
        self.sum.mul_(kept[..., None]).baddbmm_(weight, values)
        self.peak = peak

    def result(self) -> Tensor:
        """Return [G, K, V]; zero for a row that nothing took part in."""
        return (self.sum / self.total[..., None]).masked_fill_((self.total == 0)[..., None], 0.0)


def attend_causal(
    q: Tensor,
    cache: Tensor,
    cu_seqlens: Tensor,
    block_offsets: Tensor,
    history_lens: Tensor,
    value_dim: int,
    scale: float,
    bound: int,
    host_lengths: list[int] | None,
) -> Tensor:
    """Attend over every token up to the query's own; `bound` >= 1 tokens of a row's pages hold its whole context."""
    (tokens, heads, dim), block_size = q.shape, cache.shape[1]
    at = packed_tokens(cu_seqlens, history_lens, tokens)
    visible = at.visible
    size = chunk_size(history_lens.shape[0], tokens, QUERIES, host_lengths)
    grid = chunk_grid(cu_seqlens, tokens, size, host_lengths)
    chunks = grid.valid.shape[0]
    out = q.new_zeros(chunks * size + 1, heads, value_dim)
    step = max(1, KEYS // block_size)
    keys = step * block_size
    per_chunk = 4 * (2 * keys * dim + size * heads * (dim + 2 * value_dim + 2 * keys))
    group = max(1, STEP_BYTES // per_chunk)
    for first in range(0, chunks, group):
        part = slice(first * size, min(first + group, chunks) * size)
        token = grid.token[part]
        rows = at.owner[token[::size]]
        query = q.index_select(0, token).float().mul_(scale).view(-1, size * heads, dim)
        seen, end = visible[token].view(-1, size), at.end[rows]
        running = RunningSoftmax(query, value_dim)
        for page in range(0, -(-bound // block_size), step):
            position = torch.arange(page * block_size, (page + step) * block_size, device=q.device)
            held = gather_pages(cache, block_offsets, rows, range(page, page + step))
            clear_absent(held, position >= end[:, None])
            scores = torch.bmm(query, held.transpose(1, 2))
            hidden = position >= seen[..., None]
            scores.view(-1, size, heads, keys).masked_fill_(hidden[:, :, None], -torch.inf)
            running.add(scores, held[..., :value_dim])
        out[part] = running.result().view(-1, heads, value_dim)
    return out.index_select(0, grid.place_of(history_lens >= 0))
