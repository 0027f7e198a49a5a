"""Indexer of sparse attention over pools of keys: the pools a request has, and those that each query attends to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ._checks import FLOATS, require, require_dtype, require_inference, require_same_device, require_shape
from ._page_checks import require_cache, require_positions, require_rows
from ._registry import Operator

_UPDATE: Final = "kpool_update"
_SELECT: Final = "kpool_select"


def _fake_update(
    k: Tensor,
    gate: Tensor,
    ape: Tensor,
    pool_cache: Tensor,
    tail_cache: Tensor,
    cu_seqlens: Tensor,
    block_offsets: Tensor,
    history_lens: Tensor,
    host_lengths: Sequence[int] | None,
) -> None:
    return None


def _fake_select(
    q: Tensor,
    weights: Tensor,
    pool_cache: Tensor,
    cu_seqlens: Tensor,
    block_offsets: Tensor,
    history_lens: Tensor,
    topk: int,
    kpool: int,
    max_kv_len: int,
    host_lengths: Sequence[int] | None,
) -> Tensor:
    return q.new_empty(q.shape[0], topk + kpool - 1, dtype=torch.int32)


UPDATE: Final = Operator.define(
    _UPDATE,
    "(Tensor k, Tensor gate, Tensor ape, Tensor(a!) pool_cache, Tensor(b!) tail_cache, Tensor cu_seqlens,"
    " Tensor block_offsets, Tensor history_lens, int[]? host_lengths) -> ()",
    _fake_update,
    summary="pooled keys of the indexer, and the raw tokens of the open pool",
    dtypes=FLOATS,
)
SELECT: Final = Operator.define(
    _SELECT,
    "(Tensor q, Tensor weights, Tensor pool_cache, Tensor cu_seqlens, Tensor block_offsets, Tensor history_lens,"
    " int topk, int kpool, int max_kv_len, int[]? host_lengths) -> Tensor",
    _fake_select,
    summary="the tokens that each query of sparse attention attends to, chosen by pools",
    dtypes=FLOATS,
)


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
    """Take the tokens of a packed batch into the indexer's caches. Nothing is read from the device.

    Positions 0 to P - 1 of a request are its pool 0, the next P its pool 1, and so on. A pool is written when its last
    token comes: in each channel sum_i softmax_i(gate_i + ape_i) · k_i over its P tokens. Until then the raw (k, gate)
    of a token at position p waits in entry p mod R of the tail of its own block. Block size is P times the entries of a
    block of `pool_cache`, so an open pool lies in one block and moves with it.

    A verify step may write tokens that are rejected afterwards. They are never read again: the next call's history ends
    before them, positions from there on come from that call, and it writes their entries and pools anew. For that the
    ring must hold the open pool beside the drafts: R >= P + drafts.

    Maths: Glm5NextTextIndexer of transformers 5.24 (GLM-5.3-Flash). All in fp32, rounded once.

    Args:
        k: [T, Di] fp32, bf16 or fp16, keys after their norm; any strides.
        gate: [T, Di], any float dtype; any strides.
        ape: [P, Di], any float dtype, added to the gates of the pool's tokens in turn.
        pool_cache: [B, block size / P, Di], any float dtype and strides. Mutated: the pools completed.
        tail_cache: [B, R, 2 · Di] fp32, (k, gate); any strides. Mutated: the entries of the tokens given, of those that
            share an entry the last.
        cu_seqlens: int [N + 1], cumulative row lengths that start at 0. Tokens beyond the last are left out.
        block_offsets: int [N, M], the blocks of each row in the order of its positions; columns not reached by history
            and row may hold anything.
        history_lens: int [N], accepted tokens before this call; a negative one marks a PAD row, which reads and writes
            nothing.
        host_lengths: the row lengths, or more, as Python ints.

    Raises:
        TypeError: not a tensor, or an unsupported dtype.
        ValueError: shapes, devices or lengths that do not fit, R < P, an input that requires a gradient, or, under
            DLINFER_EXT_CHECK=1, rows beyond their blocks or blocks beyond the cache.
    """
    require_shape(_UPDATE, "k", k, ["T", "Di"])
    require_dtype(_UPDATE, "k", k, FLOATS)
    require_shape(_UPDATE, "gate", gate, k.shape)
    require_dtype(_UPDATE, "gate", gate, FLOATS)
    require_shape(_UPDATE, "ape", ape, ["P", k.shape[1]])
    require_dtype(_UPDATE, "ape", ape, FLOATS)
    pool = ape.shape[0]
    require(pool >= 1 and k.shape[1] >= 1, _UPDATE, "ape", f"of shape {list(ape.shape)}", "P >= 1 and Di >= 1")
    require_cache(_UPDATE, "pool_cache", pool_cache, k.shape[1])
    blocks = pool_cache.shape[0]
    require_shape(_UPDATE, "tail_cache", tail_cache, [blocks, "R", 2 * k.shape[1]])
    require_dtype(_UPDATE, "tail_cache", tail_cache, [torch.float32])
    require(
        tail_cache.shape[1] >= pool,
        _UPDATE,
        "tail_cache",
        f"of shape {list(tail_cache.shape)}",
        f"R >= {pool} entries, those of a pool (and one for each draft)",
    )
    require_same_device(_UPDATE, "k", k, gate=gate, ape=ape, pool_cache=pool_cache, tail_cache=tail_cache)
    require_inference(_UPDATE, k=k, gate=gate, ape=ape, tail_cache=tail_cache)
    lengths = require_rows(
        _UPDATE, "k", k, cu_seqlens, block_offsets, history_lens, host_lengths
    )  # fmt: skip
    torch.ops.dlinfer_ext.kpool_update(
        k, gate, ape, pool_cache, tail_cache, cu_seqlens, block_offsets, history_lens, lengths
    )


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
    """Choose the tokens that each query attends to. Nothing is read from the device.

    A query at position p may choose among the (p + 1) // P complete pools up to its own token. With the score
    sum_h weights_h · relu(Di^-0.5 · q_h · key), the topk // P pools of the largest score are taken, of equal scores the
    earlier pool (equal ones are common, as the relu makes zeros), and a NaN counts as the least. With them come the
    tokens of the query's own open pool, which has no key yet. Which pools are candidates is told by position alone: one
    that a rejected draft completed lies past the history, and is written anew before a query can see it.

    The choice of a query does not depend on the other rows, nor on how far `max_kv_len` is above the true length.

    Maths: Glm5NextTextIndexer of transformers 5.24 (GLM-5.3-Flash); the scores of arXiv 2512.02556 (DeepSeek-V3.2). In
    fp32.

    Args:
        q: [T, Hi, Di] fp32, bf16 or fp16; any strides.
        weights: [T, Hi], any float dtype, with the factor Hi^-0.5 in them.
        pool_cache: [B, block size / P, Di] as `kpool_update` leaves it, which is called before with the same tokens.
        cu_seqlens: int [N + 1], cumulative row lengths that start at 0.
        block_offsets: int [N, M], the blocks of each row; columns not reached may hold anything.
        history_lens: int [N], accepted tokens before this call; a negative one marks a PAD row.
        topk: the most tokens taken from pools, at least 1.
        kpool: P, tokens of a pool.
        max_kv_len: no row's history and length are more than this. Up to topk + P - 1 every pool is taken without a
            score.
        host_lengths: the row lengths, or more, as Python ints. They keep the work to what the rows need: without them
            it is laid out for the worst that T tokens in N rows can be.

    Returns:
        int32 [T, topk + P - 1], fresh: positions in the query's request, the tokens of the chosen pools in rising
        order, then those of the open pool, then -1. Tokens of PAD rows and of no row have -1 alone.

    Raises:
        TypeError: not a tensor, or an unsupported dtype.
        ValueError: shapes, devices, numbers or lengths that do not fit, an input that requires a gradient, or, under
            DLINFER_EXT_CHECK=1, rows beyond their blocks or `max_kv_len`, or blocks beyond the cache.
    """
    require_shape(_SELECT, "q", q, ["T", "Hi", "Di"])
    require_dtype(_SELECT, "q", q, FLOATS)
    require(min(q.shape[1:]) >= 1, _SELECT, "q", f"of shape {list(q.shape)}", "Hi >= 1 and Di >= 1")
    require_shape(_SELECT, "weights", weights, q.shape[:2])
    require_dtype(_SELECT, "weights", weights, FLOATS)
    require_cache(_SELECT, "pool_cache", pool_cache, q.shape[2])
    for name, value, least in (("topk", topk, 1), ("kpool", kpool, 1), ("max_kv_len", max_kv_len, 0)):
        require_positions(_SELECT, name, value, least)
    require_same_device(_SELECT, "q", q, weights=weights, pool_cache=pool_cache)
    require_inference(_SELECT, q=q, weights=weights)
    lengths = require_rows(
        _SELECT, "q", q, cu_seqlens, block_offsets, history_lens, host_lengths
    )  # fmt: skip
    return torch.ops.dlinfer_ext.kpool_select(  # type: ignore[no-any-return]
        q, weights, pool_cache, cu_seqlens, block_offsets, history_lens, topk, kpool, max_kv_len, lengths
    )
