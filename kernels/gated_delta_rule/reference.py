"""Gated delta rule: the definition, in fp64. The rule over tokens is that of all delta rules, here with g [.., HV]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..common.delta_reference import prefill as gated_delta_rule
from ..common.delta_reference import run_row
from ..common.delta_reference import update as gated_delta_rule_update

__all__ = [
    "gated_delta_gate",
    "gated_delta_rule",
    "gated_delta_rule_update",
    "run_row",
    "sigmoid_gating_delta_rule_update",
]


def gated_delta_gate(
    a: Tensor,
    b: Tensor,
    neg_exp_A: Tensor,
    dt_bias: Tensor,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
) -> tuple[Tensor, Tensor]:
    """Definition of `dlinfer_ext.ops.gated_delta_rule.gated_delta_gate`, in fp64."""
    x = a.double() + dt_bias.double()
    soft = torch.where(
        x * softplus_beta > softplus_threshold, x, torch.log1p(torch.exp(x * softplus_beta)) / softplus_beta
    )
    return neg_exp_A.double() * soft, 1 / (1 + torch.exp(-b.double()))


def sigmoid_gating_delta_rule_update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    neg_exp_A: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    *,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    **options: Any,
) -> Tensor:
    """Definition of `dlinfer_ext.ops.gated_delta_rule.sigmoid_gating_delta_rule_update`; as the update's."""
    g, beta = gated_delta_gate(a, b, neg_exp_A, dt_bias, softplus_beta, softplus_threshold)
    return gated_delta_rule_update(q, k, v, g, beta, state, **options)
