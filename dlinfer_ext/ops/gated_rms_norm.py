"""Gated RMS norm: the output norm of Gated DeltaNet (SiLU gate) and Kimi Delta Attention (sigmoid gate)."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from ._checks import (
    FLOATS,
    require,
    require_choice,
    require_dtype,
    require_flag,
    require_inference,
    require_int,
    require_real,
    require_same_device,
    require_shape,
    require_tensor,
)
from ._registry import Operator

_NAME: Final = "gated_rms_norm"
_MOST_CHANNELS: Final = 1 << 24
_ACTIVATIONS: Final = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}


def _fake(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    activation: str,
    norm_before_gate: bool,
    group_size: int,
) -> Tensor:
    return x.new_empty(x.shape)


OPERATOR: Final = Operator.define(
    _NAME,
    "(Tensor x, Tensor? gate, Tensor weight, Tensor? bias, float eps, str activation, bool norm_before_gate,"
    " int group_size) -> Tensor",
    _fake,
    summary="RMS norm with a SiLU or sigmoid gate, before or after it",
    dtypes=FLOATS,
)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
) -> Tensor:
    """Return the gated RMS norm of x.

    With norm_before_gate (Qwen3.5, GLM-5.3-Flash), y = (x / sqrt(mean x² + eps) · weight + bias) · act(gate); without
    it (Mamba-2) the norm is taken of x · act(gate). All arithmetic is fp32 and the result is rounded once.
    transformers' Qwen3_5RMSNormGated rounds the norm to the input dtype before the weight and the gate, so 16-bit
    results may differ from it by that rounding; LMDeploy and flash-linear-attention round once, as here.

    Maths: https://arxiv.org/abs/1910.07467 (RMSNorm), https://arxiv.org/abs/2405.21060 (the gate).

    Args:
        x: [.., hidden] fp32, bf16 or fp16, any strides.
        gate: x's shape, any float dtype and strides, or None for a plain RMS norm.
        weight: [hidden], any float dtype.
        bias: [hidden] or None.
        eps: inside the root.
        activation: "silu" ("swish" is the same) or "sigmoid".
        norm_before_gate: the order of norm and gate.
        group_size: channels that share one root mean square; None means hidden.

    Returns:
        A fresh tensor of x's shape and dtype. Nothing is mutated.

    Raises:
        TypeError: not a tensor, or an unsupported dtype.
        ValueError: a shape, device, activation or group size that does not fit, or an input that requires a gradient.
    """
    require_tensor(_NAME, "x", x)
    require_dtype(_NAME, "x", x, FLOATS)
    require(x.dim() >= 1 and x.shape[-1] >= 1, _NAME, "x", f"of shape {list(x.shape)}", "[.., hidden] with hidden >= 1")
    hidden = x.shape[-1]
    if gate is not None:
        require_shape(_NAME, "gate", gate, x.shape)
        require_dtype(_NAME, "gate", gate, FLOATS)
    require_shape(_NAME, "weight", weight, [hidden])
    require_dtype(_NAME, "weight", weight, FLOATS)
    if bias is not None:
        require_shape(_NAME, "bias", bias, [hidden])
        require_dtype(_NAME, "bias", bias, FLOATS)
    require_same_device(_NAME, "x", x, gate=gate, weight=weight, bias=bias)
    require_inference(_NAME, x=x, gate=gate, weight=weight, bias=bias)
    group = _require_settings(_NAME, hidden, eps, activation, norm_before_gate, group_size)
    return torch.ops.dlinfer_ext.gated_rms_norm(  # type: ignore[no-any-return]
        x, gate, weight, bias, eps, _ACTIVATIONS[activation], norm_before_gate, group
    )


def _require_settings(
    op: str, hidden: int, eps: float, activation: str, norm_before_gate: bool, group_size: int | None
) -> int:
    """Check the settings of a norm; return the channels of a group."""
    require_real(op, "eps", eps)
    require_flag(op, "norm_before_gate", norm_before_gate)
    require_int(op, "group_size", group_size, optional=True)
    require_choice(op, "activation", activation, tuple(_ACTIVATIONS), "'silu', 'swish' or 'sigmoid'")
    group = hidden if group_size is None else group_size
    require(group >= 1 and hidden % group == 0, op, "group_size", str(group_size), f"None or a divisor of {hidden}")
    return group


def _is_device(device: object) -> bool:
    if not isinstance(device, str):
        return device is None or isinstance(device, torch.device)
    try:
        torch.device(device)
    except RuntimeError:
        return False
    return True


def rmsnorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    upcast: bool = True,
    activation: str = "silu",
) -> Tensor:
    """Return `gated_rms_norm` under the argument names of mamba_ssm and flash-linear-attention.

    Args:
        x: [.., hidden].
        weight: [hidden].
        bias: [hidden] or None.
        z: the gate, x's shape, or None.
        eps: inside the root.
        group_size: channels that share one root mean square; None means hidden.
        norm_before_gate: the order of norm and gate.
        upcast: arithmetic in fp32; False is refused, as no route computes in a 16-bit type.
        activation: of the gate.

    Returns:
        A fresh tensor of x's shape and dtype.

    Raises:
        TypeError: as `gated_rms_norm`.
        ValueError: as `gated_rms_norm`, or upcast is False.
    """
    require_flag("rmsnorm_fn", "upcast", upcast)
    require(upcast, "rmsnorm_fn", "upcast", "False", "True: arithmetic is fp32 on every route")
    return gated_rms_norm(
        x, z, weight, bias, eps=eps, activation=activation, norm_before_gate=norm_before_gate, group_size=group_size
    )


class RMSNormGated(nn.Module):
    """Gated RMS norm with a weight of its own, in the dtype asked for and not trained.

    Args:
        hidden_size: channels.
        eps: inside the root.
        group_size: channels that share one root mean square; None means hidden_size.
        norm_before_gate: True is what Qwen3.5 and GLM-5.3-Flash need.
        device: of the weight.
        dtype: of the weight; None means torch's default.
        activation: of the gate, "silu", "swish" or "sigmoid".

    Raises:
        TypeError: a setting of another type.
        ValueError: a size, activation, dtype or device that does not serve.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        activation: str = "silu",
    ) -> None:
        super().__init__()
        op = "RMSNormGated"
        require_int(op, "hidden_size", hidden_size)
        require(1 <= hidden_size <= _MOST_CHANNELS, op, "hidden_size", hidden_size, f"1 to {_MOST_CHANNELS}")
        _require_settings(op, hidden_size, eps, activation, norm_before_gate, group_size)
        require(dtype is None or dtype in FLOATS, op, "dtype", dtype, "None, float32, bfloat16 or float16")
        require(_is_device(device), op, "device", repr(device), "None or a device that torch.device takes")
        self.eps = eps
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate
        self.activation = activation
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype), requires_grad=False)
        self.register_parameter("bias", None)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Return the gated norm of x [.., hidden] with the gate z of the same shape."""
        return gated_rms_norm(
            x,
            z,
            self.weight,
            eps=self.eps,
            activation=self.activation,
            norm_before_gate=self.norm_before_gate,
            group_size=self.group_size,
        )
