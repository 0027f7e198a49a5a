"""Pools of keys and the raw tokens of the open pool, of a packed batch. Nothing is read on the host, lengths or not."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.pages import block_at, packed_tokens, write_entries
from ..common.state_pool import FlatPool, flatten_pool


def write_pools(
    k: Tensor,
    gate: Tensor,
    ape: Tensor,
    pool_cache: Tensor,
    tails: FlatPool,
    ring: int,
    cu: Tensor,
    block_offsets: Tensor,
    history: Tensor,
) -> None:
    """Write the pools whose last token is one of this call.

    A row of L tokens completes at most L // P + 1 pools, so of T tokens in N rows at most T // P + N: each row has its
    own run of that many places, whatever its history.
    """
    (blocks, entries, dim), pool = pool_cache.shape, ape.shape[0]
    tokens, rows = k.shape[0], history.shape[0]
    start = cu[:-1]
    first = start // pool + torch.arange(rows, device=cu.device)
    slot = torch.arange(tokens // pool + rows, device=cu.device)
    row = torch.searchsorted(first, slot, right=True) - 1
    past = history[row]
    number = (past // pool + slot - first[row]).clamp(min=0)
    position = number[:, None] * pool + torch.arange(pool, device=cu.device)
    done = (past >= 0) & (position[:, -1] < past + cu.diff()[row])

    token = (start[row, None] + position - past[:, None]).clamp(0, tokens - 1).flatten()
    keys, logits = (x.index_select(0, token).float().view(-1, pool, dim) for x in (k, gate))
    # What came before this call can only be in the first pool of a row.
    begun = position[first]
    block = block_at(block_offsets, torch.arange(rows, device=cu.device), number[first] // entries, blocks)
    held = tails.view.index_select(0, tails.at(block[:, None], begun % ring).flatten()).view(rows, pool, 2, dim)
    earlier = (begun < history[:, None])[..., None]
    for new, old in ((keys, held[:, :, 0]), (logits, held[:, :, 1])):
        new.index_copy_(0, first, torch.where(earlier, old, new[first]))

    pooled = (torch.softmax(logits + ape.float(), 1) * keys).sum(1)
    pools = flatten_pool(pool_cache)
    places = pools.at(block_at(block_offsets, row, number // entries, blocks), number % entries)
    write_entries(pools, places, pooled, done)


def kpool_update(
    k: Tensor,
    gate: Tensor,
    ape: Tensor,
    pool_cache: Tensor,
    tail_cache: Tensor,
    cu_seqlens: Tensor,
    block_offsets: Tensor,
    history_lens: Tensor,
    host_lengths: list[int] | None,
) -> None:
    """Batched form of `dlinfer_ext.ops.kpool_indexer.kpool_update`."""
    tokens, blocks, ring = k.shape[0], pool_cache.shape[0], tail_cache.shape[1]
    if 0 in (tokens, blocks, *block_offsets.shape):
        return
    block_size, tails = pool_cache.shape[1] * ape.shape[0], flatten_pool(tail_cache)
    # First the pools: the tokens of this call may take the places of those that the open pool still needs.
    write_pools(k, gate, ape, pool_cache, tails, ring, cu_seqlens.long(), block_offsets, history_lens.long())
    at = packed_tokens(cu_seqlens, history_lens, tokens)
    page = at.position // block_size
    # Of the tokens that share an entry, those of one block and R positions apart, the last.
    last = torch.minimum(at.end[at.owner], (page + 1) * block_size) - ring
    places = tails.at(block_at(block_offsets, at.owner, page, blocks), at.position % ring)
    write_entries(tails, places, torch.cat((k, gate), 1).float(), at.live & (at.position >= last))
