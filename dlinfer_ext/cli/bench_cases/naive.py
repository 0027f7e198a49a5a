"""The naive recurrence of the delta rules, as flash-linear-attention states it, on a CPU without its package.

The formula, and no line of its code, is that of `naive_recurrent_kda` in
https://github.com/fla-org/flash-linear-attention/blob/main/fla/ops/kda/naive.py (MIT); a gate per head in the place of
one per key channel makes it that of Gated DeltaNet. The package itself cannot be imported without Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs and the last state, one token after the other in fp32.

    S <- exp(g) S;  S <- S + beta k (v - k S)^T;  o = q S / sqrt(K), q and k divided by their norms if asked for.

    Args:
        q: [B, T, H, K].
        k: as q.
        v: [B, T, HV, V], HV a multiple of H.
        g: log decays, [B, T, HV] or [B, T, HV, K].
        beta: [B, T, HV].
        initial_state: [B, HV, K, V], zero if None.
        output_final_state: return the last state too.
        use_qk_l2norm_in_kernel: divide q and k by their norms.
    """
    dtype, heads = v.dtype, v.shape[2] // q.shape[2]
    q, k, v, g, beta = (x.float() for x in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(heads, 2) for x in (q * q.shape[-1] ** -0.5, k))
    decay = (g if g.dim() == 4 else g[..., None]).exp()[..., None]
    state = q.new_zeros(*k[:, 0].shape, v.shape[-1])
    if initial_state is not None:
        state = state + initial_state
    outputs = []
    for t in range(q.shape[1]):
        state = state * decay[:, t]
        change = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], change)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1).to(dtype), state if output_final_state else None
