"""Choice of pools for each query of a packed batch. Nothing is read on the host, lengths or not.

Queries are laid out in chunks of one row each, and a chunk meets the pools of its row in steps of equal size, so that
a score is the same sum whatever else is in the batch and however long the bound on the context is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.chunks import chunk_grid, chunk_size
from ..common.pages import STEP_BYTES, gather_pages, packed_tokens

# Most queries of a chunk, and pools of a step.
QUERIES, POOLS = 16, 128


def pool_scores(
    query: Tensor, weight: Tensor, pool_cache: Tensor, block_offsets: Tensor, rows: Tensor, pages: int
) -> Tensor:
    """Return the scores of chunks of queries for the pools in the first pages of their rows, divided by Di^-0.5.

    The factor is the same for all and does not change which are the largest.

    Args:
        query: fp32 [G, C, Hi, Di].
        weight: fp32 [G, C, Hi].
        pool_cache: [B, E, Di].
        block_offsets: int [N, M].
        rows: int64 [G].
        pages: how many; rounded up to whole steps.

    Returns:
        fp32 [G · C, pages · E].
    """
    (chunks, size, heads, dim), entries = query.shape, pool_cache.shape[1]
    step = max(1, POOLS // entries)
    parts = []
    for page in range(0, pages, step):
        keys = gather_pages(pool_cache, block_offsets, rows, range(page, page + step))
        products = torch.bmm(query.view(chunks, size * heads, dim), keys.transpose(1, 2)).relu_()
        products = products.view(chunks * size, heads, step * entries)
        parts.append(torch.bmm(weight.view(chunks * size, 1, heads), products)[:, 0])
    return torch.cat(parts, 1)


def best_pools(scores: Tensor, complete: Tensor, most: int) -> Tensor:
    """Return the numbers of the `most` best pools of each query in rising order, int64 [K, most].

    Of equal scores the earlier pool is taken; a NaN counts as the least. If a query has fewer than `most` pools, those
    come first and what follows them means nothing.

    Args:
        scores: fp32 [K, pools], overwritten; pools > most >= 1.
        complete: int64 [K], how many of the pools the query may choose from.
        most: how many.
    """
    pools = torch.arange(scores.shape[1], device=scores.device)
    candidate = pools < complete[:, None]
    scores.masked_fill_(~candidate | scores.isnan(), -torch.inf)
    # Only the value of the least score taken comes from topk: which of several equal ones it lists is not defined.
    least = scores.topk(most, 1, sorted=False).values.amin(1, keepdim=True)
    above, equal = scores > least, (scores == least) & candidate
    room = most - above.sum(1, keepdim=True)
    taken = above | (equal & (equal.cumsum(1) <= room))
    ranks = torch.arange(1, most + 1, device=scores.device).expand(scores.shape[0], most).contiguous()
    return torch.searchsorted(taken.cumsum(1), ranks)


def token_positions(chosen: Tensor | None, visible: Tensor, most: int, pool: int, width: int) -> Tensor:
    """Return int32 [K, width]: the tokens of the chosen pools, then those of the open one, then -1.

    Args:
        chosen: as of `best_pools`; None: every query has at most `most` pools and takes them all.
        visible: int64 [K], tokens that the query sees.
        most: how many pools a query takes.
        pool: P.
        width: of the result.
    """
    index = torch.arange(width, device=visible.device)
    seen = visible[:, None]
    if chosen is None:
        return torch.where(index < seen, index, -1).int()
    complete = seen // pool
    selected = complete.clamp(max=most) * pool
    expanded = (chosen[:, :, None] * pool + torch.arange(pool, device=visible.device)).flatten(1)
    expanded = torch.nn.functional.pad(expanded, (0, width - expanded.shape[1]))
    opened = complete * pool + index - selected
    return torch.where(index < selected, expanded, torch.where(opened < seen, opened, -1)).int()


def kpool_select(
    q: Tensor,
    weights: Tensor,
    pool_cache: Tensor,
    cu_seqlens: Tensor,
    block_offsets: Tensor,
    history_lens: Tensor,
    topk: int,
    kpool: int,
    max_kv_len: int,
    host_lengths: list[int] | None,
) -> Tensor:
    """Batched form of `dlinfer_ext.ops.kpool_indexer.kpool_select`."""
    (tokens, heads, dim), (blocks, entries, _) = q.shape, pool_cache.shape
    most, width = topk // kpool, topk + kpool - 1
    if 0 in (tokens, blocks, *block_offsets.shape) or not any(host_lengths or [tokens]):
        return q.new_full((tokens, width), -1, dtype=torch.int32)
    at = packed_tokens(cu_seqlens, history_lens, tokens)
    visible = at.visible
    pools = min(max_kv_len // kpool, block_offsets.shape[1] * entries)
    if pools <= most:
        return token_positions(None, visible, most, kpool, width)
    if most == 0:
        return token_positions(visible.new_zeros(tokens, 0), visible, 0, kpool, width)

    pages = -(-pools // entries)
    size = chunk_size(history_lens.shape[0], tokens, QUERIES, host_lengths)
    grid = chunk_grid(cu_seqlens, tokens, size, host_lengths)
    chunks = grid.valid.shape[0]
    selected = q.new_full((chunks * size + 1, width), -1, dtype=torch.int32)
    per_chunk = 4 * size * (heads * POOLS + 6 * pages * entries + 4 * width) + 4 * POOLS * dim
    group = max(1, STEP_BYTES // per_chunk)
    for first in range(0, chunks, group):
        part = slice(first * size, min(first + group, chunks) * size)
        token = grid.token[part]
        query, weight = (x.index_select(0, token).float().unflatten(0, (-1, size)) for x in (q, weights))
        rows = at.owner[token[::size]]
        scores = pool_scores(query, weight, pool_cache, block_offsets, rows, pages)
        seen = visible[token]
        chosen = best_pools(scores, seen // kpool, most)
        selected[part] = token_positions(chosen, seen, most, kpool, width)
    return selected.index_select(0, grid.place_of(history_lens >= 0))
