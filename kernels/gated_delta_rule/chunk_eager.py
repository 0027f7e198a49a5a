"""Gated delta rule in chunks: prefill of a packed batch. No host read when the row lengths are given.

The scan is that of all delta rules (`common.delta_chunks`); here are the terms of a decay per head, with c_i the sum of
the gates up to token i: the decay D_ij = exp(c_i - c_j) is a number, so it multiplies results and not operands.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.delta_chunks import ChunkTerms, ValueTerms, scan_chunks, unit_lower_inverse
from ..common.delta_inputs import Options, Tokens
from ..common.state_pool import flatten_pool

CHUNK = 32


def segment_decay(g: Tensor) -> Tensor:
    """Return [..., C, C] with exp(g_{j+1} + ... + g_i) at (i, j) for j <= i, and 0 above the diagonal.

    The gates are summed directly: a difference of two running sums loses the small gates that follow a large one, and
    is inf - inf after a gate of -inf. Above the diagonal the sum is empty, so the exponential cannot overflow there.
    """
    size = g.shape[-1]
    sums = g[..., :, None].expand(*g.shape, size).tril(-1).cumsum(-2)
    return sums.exp_().tril_()


def head_terms(qk: Tensor) -> ValueTerms:
    """Return what makes the terms of a value head; see `common.delta_chunks.HeadTerms`. The gates are [NC, h, C]."""
    read, keys = qk.flatten(2, 3), qk[..., 1, :]
    qk_keys, kk = (read @ keys.transpose(-1, -2)).unflatten(2, (-1, 2)).unbind(3)

    def value_terms(gate: Tensor, beta: Tensor, bv: Tensor) -> ChunkTerms:
        decay = segment_decay(gate)
        start = torch.exp(gate.cumsum(-1))[..., None]
        t = unit_lower_inverse((kk * decay).mul_(beta))
        end, p = decay[:, :, -1, :, None], decay.mul(qk_keys)
        return ChunkTerms(read, keys, t, p, bv, beta * start, start[:, :, -1:], start, end)

    return value_terms


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    state_indices: Tensor | None,
    history_lens: Tensor | None,
    scale: float,
    use_qk_l2norm: bool,
    state_v_first: bool,
    pad_slot_id: int,
    host_lengths: list[int] | None,
) -> Tensor:
    """Batched form of `dlinfer_ext.ops.gated_delta_rule.gated_delta_rule`."""
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist() if host_lengths is None else host_lengths
    x, options = Tokens(q, k, v, g, beta), Options(scale, use_qk_l2norm, state_v_first, pad_slot_id)
    return scan_chunks(
        x, flatten_pool(state), cu_seqlens, state_indices, history_lens, tuple(lengths), CHUNK, options, head_terms
    )
