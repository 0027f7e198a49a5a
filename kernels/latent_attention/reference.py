"""Definition of attention over latents, in fp64: one query at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def latent_write(c: Tensor, cache: Tensor, *, cu_seqlens: Tensor, block_offsets: Tensor, history_lens: Tensor) -> None:
    """Definition of `dlinfer_ext.ops.latent_attention.latent_write`."""
    starts, block_size = cu_seqlens.tolist(), cache.shape[1]
    for row, history in enumerate(history_lens.tolist()):
        if history < 0:
            continue
        for t in range(starts[row], starts[row + 1]):
            position = history + t - starts[row]
            cache[int(block_offsets[row, position // block_size]), position % block_size] = c[t]


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
    """Definition of `dlinfer_ext.ops.latent_attention.latent_attention`; returns fp64."""
    out = torch.zeros(q.shape[0], q.shape[1], value_dim, dtype=torch.float64)
    starts, block_size = cu_seqlens.tolist(), cache.shape[1]
    for row, history in enumerate(history_lens.tolist()):
        if history < 0:
            continue
        for t in range(starts[row], starts[row + 1]):
            visible = history + t - starts[row] + 1
            chosen = range(visible) if indices is None else indices[t].tolist()
            chosen = [p for p in chosen if 0 <= p < visible]
            if not chosen:
                continue
            latents = [cache[int(block_offsets[row, p // block_size]), p % block_size] for p in chosen]
            keys = torch.stack(latents).double()
            probability = torch.softmax(q[t].double() @ keys.T * scale, -1)
            out[t] = probability @ keys[:, :value_dim]
    return out
