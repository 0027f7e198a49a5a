"""Batched PyTorch form of the gated RMS norm: fp32 arithmetic, one rounding at the store."""

from __future__ import annotations

import torch
from torch import Tensor


def gate_factor(gate: Tensor, activation: str) -> Tensor:
    """Return act(gate) in fp32, a fresh tensor."""
    g = gate.float()
    return torch.nn.functional.silu(g) if activation == "silu" else torch.sigmoid(g)


def normalise(y: Tensor, eps: float, group_size: int) -> Tensor:
    """Return y / sqrt(mean y² + eps) over groups of channels, in fp32, a fresh tensor."""
    grouped = y.unflatten(-1, (y.shape[-1] // group_size, group_size))
    norm = torch.linalg.vector_norm(grouped, dim=-1, keepdim=True, dtype=torch.float32)
    rstd = torch.rsqrt(norm.square_().mul_(1.0 / group_size).add_(eps))
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
    factor = None if gate is None else gate_factor(gate, activation)
    source = x if factor is None or norm_before_gate else factor.mul_(x)
    y = normalise(source, eps, group_size).mul_(weight)
    if bias is not None:
        y.add_(bias)
    if factor is not None and norm_before_gate:
        y.mul_(factor)
    return y.to(x.dtype)
