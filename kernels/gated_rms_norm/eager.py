"""Batched PyTorch form of the gated RMS norm: fp32 arithmetic, one rounding at the store, in blocks of the cache."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_BLOCK: Final = 1 << 16  # elements: the fp32 intermediates of one block fit a core's cache


def gate_factor(gate: Tensor, activation: str) -> Tensor:
    """Return act(gate) in fp32, a fresh tensor."""
    g = gate.float()
    return torch.nn.functional.silu(g) if activation == "silu" else torch.sigmoid(g)


def normalise(y: Tensor, eps: float, group_size: int) -> Tensor:
    """Return y / sqrt(mean y² + eps) over groups of channels, in fp32, a fresh tensor."""
    grouped = y.unflatten(-1, (y.shape[-1] // group_size, group_size))
    norm = torch.linalg.vector_norm(grouped, dim=-1, keepdim=True, dtype=torch.float32)
    rstd = norm.square_().mul_(1.0 / group_size).add_(eps).rsqrt_()
    return torch.mul(grouped, rstd).flatten(-2)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    activation: str,
    norm_before_gate: bool,
    group_size: int,
) -> Tensor:
    """Return the gated RMS norm of x; arguments as in `reference.gated_rms_norm`, result in x's dtype."""
    hidden = x.shape[-1]
    rows = x.reshape(-1, hidden)
    gates = None if gate is None else gate.reshape(-1, hidden)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    step = max(1, _BLOCK // hidden)
    for start in range(0, rows.shape[0], step):
        block = slice(start, start + step)
        factor = None if gates is None else gate_factor(gates[block], activation)
        source = rows[block] if factor is None or norm_before_gate else factor.mul_(rows[block])
        y = normalise(source, eps, group_size).mul_(weight)
        if bias is not None:
            y.add_(bias)
        if factor is not None and norm_before_gate:
            y.mul_(factor)
        out[block] = y
    return out.view(x.shape)
