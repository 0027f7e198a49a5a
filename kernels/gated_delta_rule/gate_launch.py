"""Launcher of the gated delta rule's gates."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.tiling import SoC, cdiv, core_grid, fit_block, next_power_of_2
from .gate_kernel import gate_kernel

# Of one element of a gate: a, b, their masks and fp32 forms, the results and the terms of the logarithm.
_GATE_COPIES = 20
# The rest is left to what the compiler adds.
_UB_SHARE = 0.9


def gated_delta_gate(
    a: Tensor,
    b: Tensor,
    neg_exp_A: Tensor,
    dt_bias: Tensor,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    *,
    soc: SoC,
) -> tuple[Tensor, Tensor]:
    """Kernel form of `dlinfer_ext.ops.gated_delta_rule.gated_delta_gate`, for the chip `soc`."""
    g, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
    if a.numel() == 0:
        return g, beta
    heads = a.shape[-1]
    # A view wherever the leading dimensions have one step between tokens, as in a slice of a projection.
    a2, b2 = a.reshape(-1, heads), b.reshape(-1, heads)
    block_h = next_power_of_2(heads)
    block_t = fit_block(64, block_h * 4 * _GATE_COPIES, int(soc.ub_bytes * _UB_SHARE), least=8)
    tokens = a2.shape[0]
    gate_kernel[(core_grid(cdiv(tokens, block_t), soc.vector_cores),)](
        a2, b2, neg_exp_A, dt_bias, g, beta, tokens, a2.stride(0), b2.stride(0), softplus_beta, 1.0 / softplus_beta,
        softplus_threshold,
        HEADS=heads, A_HEAD=a2.stride(1), B_HEAD=b2.stride(1), RATE_HEAD=neg_exp_A.stride(0), DT_HEAD=dt_bias.stride(0),
        BT=block_t, BH=block_h,
    )  # fmt: skip
    return g, beta
