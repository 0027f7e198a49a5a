"""Batched PyTorch form of manifold-constrained hyper-connections: fp32 arithmetic, in blocks of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

_BLOCK: Final = 1 << 20  # elements of the streams whose fp32 copy is held at one time


def _blocks(streams: Tensor) -> Iterator[slice]:
    step = max(1, _BLOCK // max(1, streams[:1].numel()))
    return (slice(start, start + step) for start in range(0, streams.shape[0], step))


def combination(logits: Tensor, eps: float, iters: int) -> Tensor:
    """Return the doubly stochastic matrices [T, n, n] of logits [n, n, T].

    Tokens come last, so that each sum over so few streams is one over whole rows of memory.
    """
    comb = torch.softmax(logits, dim=1) + eps
    comb /= comb.sum(dim=0, keepdim=True) + eps
    for _ in range(iters - 1):
        comb /= comb.sum(dim=1, keepdim=True) + eps
        comb /= comb.sum(dim=0, keepdim=True) + eps
    return comb.permute(2, 0, 1)


def hyper_connection_pre(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_eps: float, eps: float, sinkhorn_iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x, post, comb); see `dlinfer_ext.ops.hyper_connection.hyper_connection_pre`."""
    tokens, n, hidden = streams.shape
    x = torch.empty(tokens, hidden, dtype=streams.dtype, device=streams.device)
    mixed = torch.empty(tokens, fn.shape[0], dtype=torch.float32, device=streams.device)
    weight = fn.float().t()
    gate_scale, gate_base = scale.float(), base.float()
    for block in _blocks(streams):
        part = streams[block].float()
        flat = part.reshape(part.shape[0], n * hidden)
        mean = torch.linalg.vector_norm(flat, dim=1, keepdim=True).square_().mul_(1.0 / (n * hidden))
        # The norm has no weight, so that it can follow the product: a number for each token.
        torch.mm(flat, weight, out=mixed[block]).mul_(mean.add_(norm_eps).rsqrt_())
        pre = torch.sigmoid(mixed[block, :n] * gate_scale[0] + gate_base[:n]).add_(eps)
        x[block] = torch.bmm(pre[:, None], part)[:, 0]
    post = torch.sigmoid(mixed[:, n : 2 * n] * gate_scale[1] + gate_base[n : 2 * n]).mul_(2.0)
    logits = (mixed[:, 2 * n :] * gate_scale[2] + gate_base[2 * n :]).t().reshape(n, n, tokens)
    comb = combination(logits, eps, sinkhorn_iters)
    return x, post, comb.contiguous()


def hyper_connection_post(x: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Return the new streams; see `dlinfer_ext.ops.hyper_connection.hyper_connection_post`."""
    out = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    mix, gain = comb.float().transpose(1, 2), post.float()[:, :, None]
    for block in _blocks(streams):
        written = gain[block] * x[block, None].float()
        out[block] = written.baddbmm_(mix[block], streams[block].float())
    return out
