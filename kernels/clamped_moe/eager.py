"""Batched PyTorch form of the clamped gated unit and of a mixture of experts of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .grouped import grouped_product


def clamped_silu_and_mul(x: Tensor, limit: float) -> Tensor:
    """Return silu(min(g, limit)) · clip(u, -limit, limit) of x = [g, u], in fp32, rounded once to x's dtype."""
    gate, up = x.float().chunk(2, dim=-1)
    return F.silu(gate.clamp(max=limit)).mul_(up.clamp(-limit, limit)).to(x.dtype)


def clamped_moe(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    limit: float,
    first_expert: int,
) -> Tensor:
    """Return the mixture; see `dlinfer_ext.ops.clamped_moe.clamped_moe`."""
    (tokens, choices), experts = topk_ids.shape, gate_up.shape[0]
    pairs = tokens * choices
    if pairs == 0:
        return torch.zeros_like(x)
    ids = topk_ids.long() - first_expert
    held = (ids >= 0) & (ids < experts)
    # Pairs of a token and an expert, by expert; those of experts held elsewhere come last and belong to no group.
    expert, order = torch.where(held, ids, experts).flatten().sort(stable=True)
    numbers = torch.arange(max(pairs, experts), device=x.device)
    ends = torch.searchsorted(expert, numbers[:experts], right=True)
    rows = x[order.div(choices, rounding_mode="floor")]
    hidden = clamped_silu_and_mul(grouped_product(rows, gate_up, ends), limit)
    results = grouped_product(hidden, down, ends)
    place = torch.empty_like(order).scatter_(0, order, numbers[:pairs])
    results = results[place].view(tokens, choices, x.shape[1])
    # Chosen, not multiplied by 0: what stands in the place of a pair of no group is undefined.
    weighted = torch.where(held[..., None], results.float() * topk_weights.float()[..., None], 0.0)
    return weighted.sum(dim=1).to(x.dtype)
