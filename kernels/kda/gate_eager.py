"""Gates of Kimi Delta Attention."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.numerics import softplus


def kda_gate(x: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """Return g in fp32; see `dlinfer_ext.ops.kda.kda_gate`."""
    z = x.float() + dt_bias.float()
    rate = torch.exp(A_log.float())[:, None]
    if lower_bound is not None:
        return torch.sigmoid_(z.mul_(rate)).mul_(lower_bound)
    return softplus(z).mul_(-rate)
