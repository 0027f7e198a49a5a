"""Feed-forward blocks: SwiGLU with clamped factors, dense or as a mixture of experts routed by sigmoids.

LMDeploy's mixture of experts is not used: its form for Ascend ignores the activation it is given, so the clamp would
vanish without an error.
"""

from __future__ import annotations

from typing import Any

import lmdeploy.pytorch.distributed as dist
import torch
from torch import Tensor, nn
from torch.nn import functional

from ..... import ops
from .parameters import Share, merged_linear, parameter, row_linear


class ClampedMLP(nn.Module):
    """x [1, T, hidden] to [1, T, hidden]; without `all_reduce` to a rank's part of the sum."""

    def __init__(
        self, config: Any, width: int, dtype: torch.dtype | None, device: Any, *, all_reduce: bool = True
    ) -> None:
        super().__init__()
        self.limit: float = config.swiglu_limit
        self.gate_up_proj = merged_linear(config.hidden_size, [width, width], dtype, device)
        self.down_proj = row_linear(width, config.hidden_size, dtype, device, all_reduce=all_reduce)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ops.clamped_silu_and_mul(self.gate_up_proj(x), self.limit))  # type: ignore[no-any-return]


class Router(nn.Module):
    """Sigmoid scores in fp32; a bias has a say in the choice, none in the weights (DeepSeek-V3, arXiv 2412.19437)."""

    def __init__(self, config: Any, device: Any) -> None:
        super().__init__()
        fp32: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.topk, self.factor = config.num_experts_per_tok, config.routed_scaling_factor
        self.normalise: bool = config.norm_topk_prob
        self.weight = parameter(config.n_routed_experts, config.hidden_size, **fp32)
        self.e_score_correction_bias = parameter(config.n_routed_experts, **fp32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights fp32 [T, topk] and experts int64 [T, topk] for x [T, hidden]."""
        scores = functional.linear(x.float(), self.weight).sigmoid()
        experts = torch.topk(scores + self.e_score_correction_bias, self.topk, -1, sorted=False).indices
        weights = scores.gather(1, experts)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.factor, experts


class Experts(nn.Module):
    """The routed experts, each split among the ranks."""

    def __init__(self, config: Any, ranks: int, dtype: torch.dtype | None, device: Any) -> None:
        super().__init__()
        count, width, hidden = config.n_routed_experts, config.moe_intermediate_size // ranks, config.hidden_size
        self.limit: float = config.swiglu_limit
        self.gate_up = parameter(
            count, 2 * width, hidden, dtype=dtype, device=device, share=Share(parts=2, experts=count)
        )
        self.down = parameter(count, hidden, width, dtype=dtype, device=device, share=Share(dim=1, experts=count))

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        return ops.clamped_moe(x, self.gate_up, self.down, weights, experts, limit=self.limit)


class MixtureOfExperts(nn.Module):
    """x [1, T, hidden] to [1, T, hidden]: the chosen experts' weighted sum, and the shared expert."""

    def __init__(self, config: Any, ranks: int, dtype: torch.dtype | None, device: Any) -> None:
        super().__init__()
        self.ranks = ranks
        self.gate = Router(config, device)
        self.experts = Experts(config, ranks, dtype, device)
        width = config.moe_intermediate_size * config.n_shared_experts
        self.shared_experts = ClampedMLP(config, width, dtype, device, all_reduce=False)

    def forward(self, x: Tensor) -> Tensor:
        weights, experts = self.gate(x[0])
        out: Tensor = self.experts(x[0], weights, experts)[None] + self.shared_experts(x)
        if self.ranks > 1:
            dist.all_reduce(out)
        return out
