"""Manifold-constrained hyper-connections (mHC): residual streams read by a block and written by its output."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ._checks import (
    FLOATS,
    require,
    require_dtype,
    require_inference,
    require_int,
    require_real,
    require_same_device,
    require_shape,
    require_tensor,
)
from ._registry import Operator

MOST_ITERS: Final = 1000
_PRE: Final = "hyper_connection_pre"
_POST: Final = "hyper_connection_post"


def _fake_pre(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_eps: float, eps: float, sinkhorn_iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, n, hidden = streams.shape
    return (
        streams.new_empty(tokens, hidden),
        streams.new_empty(tokens, n, dtype=torch.float32),
        streams.new_empty(tokens, n, n, dtype=torch.float32),
    )


def _fake_post(x: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return streams.new_empty(streams.shape)


PRE: Final = Operator.define(
    _PRE,
    "(Tensor streams, Tensor fn, Tensor scale, Tensor base, float norm_eps, float eps, int sinkhorn_iters)"
    " -> (Tensor, Tensor, Tensor)",
    _fake_pre,
    summary="residual streams into a block's input, and the weights of its output (mHC)",
    dtypes=FLOATS,
)
POST: Final = Operator.define(
    _POST,
    "(Tensor x, Tensor streams, Tensor post, Tensor comb) -> Tensor",
    _fake_post,
    summary="a block's output and its residual streams into new streams (mHC)",
    dtypes=FLOATS,
)


def _require_streams(op: str, streams: Tensor) -> None:
    require_tensor(op, "streams", streams)
    require_dtype(op, "streams", streams, FLOATS)
    require(
        streams.dim() == 3 and min(streams.shape[1:]) >= 1,
        op,
        "streams",
        f"of shape {list(streams.shape)}",
        "[T, n, D] with n and D of 1 or more",
    )


def hyper_connection_pre(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, norm_eps: float, eps: float, sinkhorn_iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a block's input and the weights that its output is written back with.

    With r = flatten(streams) / sqrt(mean flatten(streams)² + norm_eps) and m = fn r, split n | n | n·n:
    pre = sigmoid(m_pre · scale[0] + base) + eps, post = 2 · sigmoid(m_post · scale[1] + base), x = sum_i pre_i
    streams_i, and comb is softmax over the rows of m_comb · scale[2] + base, plus eps, its columns normalised, then
    sinkhorn_iters - 1 times its rows and its columns, each divided by its sum + eps. All arithmetic is fp32.

    The two epsilons are different numbers in GLM-5.3-Flash (1e-5 and 1e-6), and its embeddings have root mean squares
    below the root of the first, so that either in the other's place changes the result.

    Maths: https://arxiv.org/abs/2512.24880 (mHC), https://arxiv.org/abs/2409.19606 (hyper-connections).

    Args:
        streams: [T, n, D] fp32, bf16 or fp16, any strides.
        fn: [n(2 + n), n·D], any float dtype; rows are pre, post and comb, the last [from, to].
        scale: [3], any float dtype: of pre, post and comb.
        base: [n(2 + n)], any float dtype.
        norm_eps: inside the root of the norm.
        eps: added to pre, to the softmax and to each sum that is divided by.
        sinkhorn_iters: column steps, 1 to 1000 (GLM-5.3-Flash has 20; a mistake may not take a process for hours).

    Returns:
        x [T, D] in the dtype of streams, post [T, n] and comb [T, n, n] in fp32, all fresh. Nothing is mutated.

    Raises:
        TypeError: not a tensor, or an unsupported dtype.
        ValueError: shapes, devices or numbers that do not fit, or an input that requires a gradient.
    """
    _require_streams(_PRE, streams)
    n, hidden = streams.shape[1:]
    weights = {"fn": (fn, [n * (2 + n), n * hidden]), "scale": (scale, [3]), "base": (base, [n * (2 + n)])}
    for name, (weight, shape) in weights.items():
        require_shape(_PRE, name, weight, shape)
        require_dtype(_PRE, name, weight, FLOATS)
    require_same_device(_PRE, "streams", streams, fn=fn, scale=scale, base=base)
    require_inference(_PRE, streams=streams, fn=fn, scale=scale, base=base)
    require_real(_PRE, "norm_eps", norm_eps)
    require_real(_PRE, "eps", eps)
    require_int(_PRE, "sinkhorn_iters", sinkhorn_iters)
    require(norm_eps > 0, _PRE, "norm_eps", norm_eps, "a number above 0")
    require(eps >= 0, _PRE, "eps", eps, "a number of 0 or more")
    require(1 <= sinkhorn_iters <= MOST_ITERS, _PRE, "sinkhorn_iters", sinkhorn_iters, f"1 to {MOST_ITERS}")
    return torch.ops.dlinfer_ext.hyper_connection_pre(  # type: ignore[no-any-return]
        streams, fn, scale, base, norm_eps, eps, sinkhorn_iters
    )


def hyper_connection_post(x: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Return the streams after a block: out_j = post_j · x + sum_i comb[i, j] · streams_i.

    The sum is over the first index of comb, as that is the stream read from. All arithmetic is fp32 and the result is
    rounded once; transformers rounds post and comb to the dtype of streams first.

    Maths: https://arxiv.org/abs/2512.24880 (mHC).

    Args:
        x: [T, D], the block's output, in the dtype of streams.
        streams: [T, n, D] fp32, bf16 or fp16, what `hyper_connection_pre` was given; any strides.
        post: [T, n], any float dtype.
        comb: [T, n, n], any float dtype.

    Returns:
        [T, n, D], a fresh tensor in the dtype of streams. Nothing is mutated.

    Raises:
        TypeError: not a tensor, or an unsupported dtype.
        ValueError: shapes or devices that do not fit, or an input that requires a gradient.
    """
    require_tensor(_POST, "x", x)
    _require_streams(_POST, streams)
    tokens, n, hidden = streams.shape
    require_shape(_POST, "x", x, [tokens, hidden])
    require_dtype(_POST, "x", x, (streams.dtype,))
    for name, weight, shape in (("post", post, [tokens, n]), ("comb", comb, [tokens, n, n])):
        require_shape(_POST, name, weight, shape)
        require_dtype(_POST, name, weight, FLOATS)
    require_same_device(_POST, "x", x, streams=streams, post=post, comb=comb)
    require_inference(_POST, x=x, streams=streams, post=post, comb=comb)
    return torch.ops.dlinfer_ext.hyper_connection_post(x, streams, post, comb)  # type: ignore[no-any-return]
