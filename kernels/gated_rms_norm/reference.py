"""Definition of the gated RMS norm: one row at a time, in the precision of `compute`."""

from __future__ import annotations

import torch
from torch import Tensor


def gated_rms_norm(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    activation: str,
    norm_before_gate: bool,
    group_size: int,
    *,
    compute: torch.dtype = torch.float64,
) -> Tensor:
    """Return the gated RMS norm of each row of x, unrounded.

    With norm_before_gate, y = (x / rms(x) · weight + bias) · act(gate); without it, the gate multiplies x first and the
    norm is taken of the product. rms is over groups of `group_size` channels: sqrt(mean x² + eps).

    Maths: RMSNorm, https://arxiv.org/abs/1910.07467; the gate as in Mamba-2, https://arxiv.org/abs/2405.21060, and
    Gated DeltaNet, https://arxiv.org/abs/2412.06464.

    Args:
        x: [.., hidden].
        gate: [.., hidden] or None.
        weight: [hidden].
        bias: [hidden] or None.
        eps: inside the root.
        activation: "silu" or "sigmoid".
        norm_before_gate: the order of norm and gate.
        group_size: channels that share one root mean square.
        compute: the dtype of all arithmetic and of the result.

    Returns:
        [.., hidden] in `compute`.
    """
    hidden = x.shape[-1]
    rows = x.to(compute).reshape(-1, hidden)
    gates = None if gate is None else gate.to(compute).reshape(-1, hidden)
    out = torch.empty(rows.shape, dtype=compute, device=x.device)
    for i, row in enumerate(rows):
        factor = torch.ones_like(row)
        if gates is not None:
            factor = 1 / (1 + torch.exp(-gates[i]))
            if activation == "silu":
                factor = factor * gates[i]
        y = row if norm_before_gate else row * factor
        groups = [part / torch.sqrt((part * part).mean() + eps) for part in y.split(group_size)]
        y = torch.cat(groups) * weight.to(compute)
        if bias is not None:
            y = y + bias.to(compute)
        out[i] = y * factor if norm_before_gate else y
    return out.reshape(x.shape)
