"""Attention over latents (MLA in its absorbed form, without positions): writing the cache, and attending to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ._checks import (
    FLOATS,
    INTS,
    require,
    require_dtype,
    require_inference,
    require_real,
    require_same_device,
    require_shape,
)
from ._page_checks import require_cache, require_positions, require_rows
from ._registry import Operator

_WRITE: Final = "latent_write"
_ATTENTION: Final = "latent_attention"


def _fake_write(c: Tensor, cache: Tensor, cu_seqlens: Tensor, block_offsets: Tensor, history_lens: Tensor) -> None:
    return None


def _fake_attention(
    q: Tensor,
    cache: Tensor,
    cu_seqlens: Tensor,
    block_offsets: Tensor,
    history_lens: Tensor,
    value_dim: int,
    scale: float,
    max_kv_len: int,
    indices: Tensor | None,
    host_lengths: Sequence[int] | None,
) -> Tensor:
    return q.new_empty(*q.shape[:2], value_dim)


WRITE: Final = Operator.define(
    _WRITE,
    "(Tensor c, Tensor(a!) cache, Tensor cu_seqlens, Tensor block_offsets, Tensor history_lens) -> ()",
    _fake_write,
    summary="latents of a packed batch into the blocks of a cache",
    dtypes=FLOATS,
)
ATTENTION: Final = Operator.define(
    _ATTENTION,
    "(Tensor q, Tensor cache, Tensor cu_seqlens, Tensor block_offsets, Tensor history_lens, int value_dim, float scale,"
    " int max_kv_len, Tensor? indices, int[]? host_lengths) -> Tensor",
    _fake_attention,
    summary="absorbed latent attention, over the whole context or over selected tokens",
    dtypes=FLOATS,
)


def latent_write(c: Tensor, cache: Tensor, *, cu_seqlens: Tensor, block_offsets: Tensor, history_lens: Tensor) -> None:
    """Write the latents of a packed batch into the blocks of their rows. Nothing is read from the device.

    Args:
        c: [T, C] fp32, bf16 or fp16; any strides.
        cache: [B, block size, C], any float dtype and strides. Mutated: the entry of each token, rounded once.
        cu_seqlens: int [N + 1], cumulative row lengths that start at 0. Tokens beyond the last are left out.
        block_offsets: int [N, M], the blocks of each row in the order of its positions; columns not reached by history
            and row may hold anything.
        history_lens: int [N], tokens before this call; a negative one marks a PAD row, which writes nothing.

    Raises:
        TypeError: not a tensor, or an unsupported dtype.
        ValueError: shapes or devices that do not fit, an input that requires a gradient, or, under
            DLINFER_EXT_CHECK=1, rows beyond their blocks or blocks beyond the cache.
    """
    require_shape(_WRITE, "c", c, ["T", "C"])
    require_dtype(_WRITE, "c", c, FLOATS)
    require(c.shape[1] >= 1, _WRITE, "c", f"of shape {list(c.shape)}", "[T, C >= 1]")
    require_cache(_WRITE, "cache", cache, c.shape[1])
    require_same_device(_WRITE, "c", c, cache=cache)
    require_inference(_WRITE, c=c)
    require_rows(_WRITE, "c", c, cu_seqlens, block_offsets, history_lens)
    torch.ops.dlinfer_ext.latent_write(c, cache, cu_seqlens, block_offsets, history_lens)


def latent_attention(
    q: Tensor,
    cache: Tensor,
    *,
    cu_seqlens: Tensor,
    block_offsets: Tensor,
    history_lens: Tensor,
    value_dim: int,
    scale: float,
    max_kv_len: int,
    indices: Tensor | None = None,
    host_lengths: Sequence[int] | None = None,
) -> Tensor:
    """Attend to latents that are key and value of all heads at once. Nothing is read from the device.

    Per head o = softmax(scale · q · c_j) · c_j[:value_dim] over the tokens j of the request: all up to the query's own,
    or those of them that `indices` names. `latent_write` is called before with the latents of the same tokens.

    Maths: the absorbed form of multi-head latent attention (arXiv 2405.04434) without rotary part;
    Glm5NextTextAttention of transformers 5.24 (GLM-5.3-Flash). In fp32, rounded once.

    Args:
        q: [T, H, C] fp32, bf16 or fp16, with the key's up-projection absorbed; any strides.
        cache: [B, block size, C], any float dtype and strides.
        cu_seqlens: int [N + 1], cumulative row lengths that start at 0.
        block_offsets: int [N, M], the blocks of each row; columns not reached may hold anything.
        history_lens: int [N], tokens before this call; a negative one marks a PAD row.
        value_dim: how many of the first channels are the value, 1 to C.
        scale: of the scores.
        max_kv_len: no row's history and length are more than this.
        indices: int32 or int64 [T, W] as of `kpool_select`: positions in the query's request, each at most once, then
            -1. One that the query does not see takes no part; without any the output is zero. None: the whole context.
        host_lengths: the row lengths, or more, as Python ints. They keep the work to what the rows need: without them
            it is laid out for the worst that T tokens in N rows can be.

    Returns:
        [T, H, value_dim], a fresh tensor of q's dtype; zero for PAD rows and tokens of no row.

    Raises:
        TypeError: not a tensor, or an unsupported dtype.
        ValueError: shapes, devices, numbers or lengths that do not fit, an input that requires a gradient, or, under
            DLINFER_EXT_CHECK=1, rows beyond their blocks or `max_kv_len`, or blocks beyond the cache.
    """
    require_shape(_ATTENTION, "q", q, ["T", "H", "C"])
    require_dtype(_ATTENTION, "q", q, FLOATS)
    require(min(q.shape[1:]) >= 1, _ATTENTION, "q", f"of shape {list(q.shape)}", "H >= 1 and C >= 1")
    require_cache(_ATTENTION, "cache", cache, q.shape[2])
    require_real(_ATTENTION, "scale", scale)
    require_positions(_ATTENTION, "value_dim", value_dim, 1, q.shape[2])
    require_positions(_ATTENTION, "max_kv_len", max_kv_len, 0)
    if indices is not None:
        require_shape(_ATTENTION, "indices", indices, [q.shape[0], "W"])
        require_dtype(_ATTENTION, "indices", indices, INTS)
    require_same_device(_ATTENTION, "q", q, cache=cache, indices=indices)
    require_inference(_ATTENTION, q=q)
    lengths = require_rows(
        _ATTENTION, "q", q, cu_seqlens, block_offsets, history_lens, host_lengths
    )  # fmt: skip
    return torch.ops.dlinfer_ext.latent_attention(  # type: ignore[no-any-return]
        q, cache, cu_seqlens, block_offsets, history_lens, value_dim, scale, max_kv_len, indices, lengths
    )
