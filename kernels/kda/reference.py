"""Kimi Delta Attention: the definition, in fp64. Over tokens it is that of all delta rules, here with g [.., K]."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.delta_reference import prefill as kda
from ..common.delta_reference import update as kda_update

__all__ = ["kda", "kda_gate", "kda_update"]


def kda_gate(x: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None = None) -> Tensor:
    """Definition of `dlinfer_ext.ops.kda.kda_gate`, in fp64: x [.., HV, K], A_log [HV], dt_bias [HV, K] or [HV · K]."""
    z = x.double() + dt_bias.double().view(x.shape[-2:])
    rate = torch.exp(A_log.double())[:, None]
    if lower_bound is not None:
        return lower_bound / (1 + torch.exp(-rate * z))
    return -rate * torch.where(z > 20, z, torch.log1p(torch.exp(z)))
