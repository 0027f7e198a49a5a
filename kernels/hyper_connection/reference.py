"""Definition of manifold-constrained hyper-connections: one token at a time, in the precision of `compute`."""

from __future__ import annotations

import torch
from torch import Tensor


def _sinkhorn(matrix: Tensor, eps: float, iters: int) -> Tensor:
    """Return softmax over each row, plus eps, made doubly stochastic: one column step, then row and column in turn."""
    positive = torch.exp(matrix - matrix.max(dim=1, keepdim=True).values)
    positive = positive / positive.sum(dim=1, keepdim=True) + eps
    for step in range(iters):
        if step > 0:
            positive = positive / (positive.sum(dim=1, keepdim=True) + eps)
        positive = positive / (positive.sum(dim=0, keepdim=True) + eps)
    return positive


def hyper_connection_pre(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_eps: float,
    eps: float,
    sinkhorn_iters: int,
    *,
    compute: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x, post, comb) of each token, unrounded; see `dlinfer_ext.ops.hyper_connection`.

    Args:
        streams: [T, n, D].
        fn: [n(2 + n), n·D].
        scale: [3].
        base: [n(2 + n)].
        norm_eps: inside the root of the norm.
        eps: added to the input weights, to the softmax and to each sum that is divided by.
        sinkhorn_iters: column steps.
        compute: the dtype of all arithmetic and of the results.

    Returns:
        x [T, D], post [T, n], comb [T, n, n].
    """
    tokens, n, hidden = streams.shape
    fn, scale, base = fn.to(compute), scale.to(compute), base.to(compute)
    x = torch.empty(tokens, hidden, dtype=compute)
    post = torch.empty(tokens, n, dtype=compute)
    comb = torch.empty(tokens, n, n, dtype=compute)
    for t in range(tokens):
        token = streams[t].to(compute)
        flat = token.flatten()
        mixed = fn @ (flat / torch.sqrt((flat * flat).mean() + norm_eps))
        pre = 1 / (1 + torch.exp(-(mixed[:n] * scale[0] + base[:n]))) + eps
        post[t] = 2 / (1 + torch.exp(-(mixed[n : 2 * n] * scale[1] + base[n : 2 * n])))
        comb[t] = _sinkhorn((mixed[2 * n :] * scale[2] + base[2 * n :]).view(n, n), eps, sinkhorn_iters)
        x[t] = sum(pre[i] * token[i] for i in range(n))
    return x, post, comb


def hyper_connection_post(
    x: Tensor, streams: Tensor, post: Tensor, comb: Tensor, *, compute: torch.dtype = torch.float64
) -> Tensor:
    """Return post_j · x + sum_i comb[i, j] · streams_i for each token and stream j, unrounded.

    Args:
        x: [T, D].
        streams: [T, n, D].
        post: [T, n].
        comb: [T, n, n], from the stream of the first index to that of the second.
        compute: the dtype of all arithmetic and of the result.

    Returns:
        [T, n, D] in `compute`.
    """
    tokens, n, _ = streams.shape
    x, streams, post, comb = (a.to(compute) for a in (x, streams, post, comb))
    out = torch.empty(streams.shape, dtype=compute)
    for t in range(tokens):
        for j in range(n):
            out[t, j] = post[t, j] * x[t]
            for i in range(n):
                out[t, j] += comb[t, i, j] * streams[t, i]
    return out
