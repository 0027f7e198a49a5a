"""Definition of the indexer over pools of keys, in fp64: one token at a time, one query at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def kpool_update(
    k: Tensor,
    gate: Tensor,
    ape: Tensor,
    pool_cache: Tensor,
    tail_cache: Tensor,
    *,
    cu_seqlens: Tensor,
    block_offsets: Tensor,
    history_lens: Tensor,
    host_lengths: Sequence[int] | None = None,
) -> None:
    """Definition of `dlinfer_ext.ops.kpool_indexer.kpool_update`."""
    pool, dim, ring = ape.shape[0], k.shape[1], tail_cache.shape[1]
    block_size = pool_cache.shape[1] * pool
    starts = cu_seqlens.tolist()
    for row, history in enumerate(history_lens.tolist()):
        if history < 0:
            continue
        for t in range(starts[row], starts[row + 1]):
            position = history + t - starts[row]
            block = int(block_offsets[row, position // block_size])
            tail_cache[block, position % ring, :dim] = k[t]
            tail_cache[block, position % ring, dim:] = gate[t]
            if (position + 1) % pool == 0:
                open_pool = [tail_cache[block, p % ring] for p in range(position + 1 - pool, position + 1)]
                keys, logits = torch.stack(open_pool).double().split(dim, 1)
                weight = torch.softmax(logits + ape.double(), 0)
                pool_cache[block, position % block_size // pool] = (weight * keys).sum(0)


def pool_scores(q: Tensor, weights: Tensor, keys: Tensor) -> list[float]:
    """Return the score of a query [Hi, Di] with weights [Hi] for each key [pools, Di]; a NaN counts as the least."""
    products = keys.double() @ q.double().T * q.shape[-1] ** -0.5
    scores = (weights.double() * products.clamp(min=0)).sum(-1).tolist()
    return [-math.inf if math.isnan(s) else s for s in scores]


def kpool_select(
    q: Tensor,
    weights: Tensor,
    pool_cache: Tensor,
    *,
    cu_seqlens: Tensor,
    block_offsets: Tensor,
    history_lens: Tensor,
    topk: int,
    kpool: int,
    max_kv_len: int,
    host_lengths: Sequence[int] | None = None,
) -> Tensor:
    """Definition of `dlinfer_ext.ops.kpool_indexer.kpool_select`."""
    selected = torch.full((q.shape[0], topk + kpool - 1), -1, dtype=torch.int32)
    entries = pool_cache.shape[1]
    starts = cu_seqlens.tolist()
    for row, history in enumerate(history_lens.tolist()):
        if history < 0:
            continue
        for t in range(starts[row], starts[row + 1]):
            visible = history + t - starts[row] + 1
            complete = visible // kpool
            places = [(int(block_offsets[row, p // entries]), p % entries) for p in range(complete)]
            keys = [pool_cache[place] for place in places]
            scores = pool_scores(q[t], weights[t], torch.stack(keys)) if keys else []
            # Of equal scores the earlier pool.
            best = sorted(range(complete), key=lambda p: (-scores[p], p))[: topk // kpool]
            tokens = [p * kpool + i for p in sorted(best) for i in range(kpool)]
            tokens += range(complete * kpool, visible)
            selected[t, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    return selected
