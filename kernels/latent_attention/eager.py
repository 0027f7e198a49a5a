"""Attention over latents, batched PyTorch form: the routes that `dlinfer_ext.ops` binds."""

from __future__ import annotations

from torch import Tensor

from ..common.pages import block_at, packed_tokens, write_entries
from ..common.state_pool import flatten_pool
from .dense_eager import attend_causal
from .sparse_eager import attend_selected

__all__ = ["latent_attention", "latent_write"]


def latent_write(c: Tensor, cache: Tensor, cu_seqlens: Tensor, block_offsets: Tensor, history_lens: Tensor) -> None:
    """Batched form of `dlinfer_ext.ops.latent_attention.latent_write`."""
    blocks, size, _ = cache.shape
    if 0 in (c.shape[0], blocks, *block_offsets.shape):
        return
    at, flat = packed_tokens(cu_seqlens, history_lens, c.shape[0]), flatten_pool(cache)
    block = block_at(block_offsets, at.owner, at.position // size, blocks)
    write_entries(flat, flat.at(block, at.position % size), c, at.live)


def latent_attention(
    q: Tensor,
    cache: Tensor,
    cu_seqlens: Tensor,
    block_offsets: Tensor,
    history_lens: Tensor,
    value_dim: int,
    scale: float,
    max_kv_len: int,
    indices: Tensor | None,
    host_lengths: list[int] | None,
) -> Tensor:
    """Batched form of `dlinfer_ext.ops.latent_attention.latent_attention`."""
    bound = min(max_kv_len, block_offsets.shape[1] * cache.shape[1])
    if 0 in (q.shape[0], cache.shape[0], block_offsets.shape[0], bound) or not any(host_lengths or [bound]):
        return q.new_zeros(*q.shape[:2], value_dim)
    if indices is None:
        return attend_causal(q, cache, cu_seqlens, block_offsets, history_lens, value_dim, scale, bound, host_lengths)
    if indices.shape[1] == 0:
        return q.new_zeros(*q.shape[:2], value_dim)
    at = packed_tokens(cu_seqlens, history_lens, q.shape[0])
    return attend_selected(q, cache, at, block_offsets, value_dim, scale, indices[:, :bound])
