"""Launcher of Kimi Delta Attention's gates."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.tiling import MIN_ROWS, SoC, cdiv, core_grid, fit_block, next_power_of_2
from .gate_kernel import kda_gate_kernel

# Of one element in fp32: x, its mask and its fp32 form, the result and the terms of the logarithm.
_COPIES = 20
# The rest is left to what the compiler adds.
_UB_SHARE = 0.9
_MOST_TOKENS = 64


def kda_gate(x: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None, *, soc: SoC) -> Tensor:
    """Kernel form of `dlinfer_ext.ops.kda.kda_gate`, for the chip `soc`."""
    g = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return g
    heads, keys = x.shape[-2:]
    # A view wherever the leading dimensions have one step between tokens, as in a slice of a projection.
    packed = x.reshape(-1, heads, keys)
    tokens, lanes = packed.shape[0], next_power_of_2(keys)
    block = fit_block(min(tokens, _MOST_TOKENS), lanes * 4 * _COPIES, int(soc.ub_bytes * _UB_SHARE), least=MIN_ROWS)
    kda_gate_kernel[(core_grid(cdiv(tokens, block) * heads, soc.vector_cores),)](
        packed, A_log, dt_bias, g, tokens, heads, 0.0 if lower_bound is None else lower_bound,
        packed.stride(0), packed.stride(1), A_log.stride(0), dt_bias.stride(0),
        X_INNER=packed.stride(2), BIAS_INNER=dt_bias.stride(1), K=keys, BT=block, BK=lanes,
        BOUNDED=lower_bound is not None,
    )  # fmt: skip
    return g
