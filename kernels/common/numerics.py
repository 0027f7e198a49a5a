"""Arithmetic shared by the delta rules."""

from __future__ import annotations

import torch
from torch import Tensor

L2_EPS = 1e-6


def l2norm(x: Tensor) -> Tensor:
    """Return x / sqrt(sum x² + 1e-6) over the last dimension (the epsilon is inside the root, everywhere)."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """Return log(1 + exp(beta·x)) / beta without underflow for very negative x; x itself above `threshold`."""
    bx = x * beta
    return torch.where(bx > threshold, x, torch.log1p(torch.exp(bx.clamp(max=threshold))) / beta)
