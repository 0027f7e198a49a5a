"""Definition of the clamped gated unit and of a mixture of experts of it, in the precision of `compute`."""

from __future__ import annotations

import torch
from torch import Tensor


def clamped_silu_and_mul(x: Tensor, limit: float, *, compute: torch.dtype = torch.float64) -> Tensor:
    """Return silu(min(g, limit)) · min(max(u, -limit), limit) of x = [g, u], unrounded.

    Args:
        x: [.., 2F].
        limit: of both, before the activation; g has none from below.
        compute: the dtype of all arithmetic and of the result.

    Returns:
        [.., F] in `compute`.
    """
    half = x.shape[-1] // 2
    gate, up = x[..., :half].to(compute), x[..., half:].to(compute)
    gate = torch.where(gate > limit, limit, gate)
    up = torch.where(up > limit, limit, torch.where(up < -limit, -limit, up))
    return gate / (1 + torch.exp(-gate)) * up


def clamped_moe(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    limit: float,
    first_expert: int = 0,
    *,
    compute: torch.dtype = torch.float64,
) -> Tensor:
    """Return the weighted sum of the chosen experts' outputs, token by token and choice by choice, unrounded.

    Args:
        x: [T, D].
        gate_up: [E, 2F, D].
        down: [E, D, F].
        topk_weights: [T, k].
        topk_ids: int [T, k]; an id outside [first_expert, first_expert + E) adds nothing.
        limit: as of `clamped_silu_and_mul`.
        first_expert: the id of gate_up[0].
        compute: the dtype of all arithmetic and of the result.

    Returns:
        [T, D] in `compute`.
    """
    out = torch.zeros(x.shape, dtype=compute)
    for token, choices in enumerate(topk_ids.tolist()):
        for choice, identity in enumerate(choices):
            expert = identity - first_expert
            if 0 <= expert < gate_up.shape[0]:
                hidden = clamped_silu_and_mul(gate_up[expert].to(compute) @ x[token].to(compute), limit)
                weight = topk_weights[token, choice].to(compute)
                out[token] += weight * (down[expert].to(compute) @ hidden)
    return out
