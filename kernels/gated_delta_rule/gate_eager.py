"""Gates of the gated delta rule."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.numerics import softplus


def gated_delta_gate(
    a: Tensor,
    b: Tensor,
    neg_exp_A: Tensor,
    dt_bias: Tensor,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
) -> tuple[Tensor, Tensor]:
    """Return (g, beta) in fp32; see `dlinfer_ext.ops.gated_delta_rule.gated_delta_gate`."""
    g = neg_exp_A.float() * softplus(a.float() + dt_bias.float(), softplus_beta, softplus_threshold)
    return g, torch.sigmoid(b.float())
