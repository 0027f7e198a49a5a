"""Clamped SwiGLU, and a mixture of experts of it."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ._checks import (
    FLOATS,
    INTS,
    require,
    require_dtype,
    require_inference,
    require_int,
    require_real,
    require_same_device,
    require_shape,
    require_tensor,
)
from ._registry import Operator

_UNIT: Final = "clamped_silu_and_mul"
_MOE: Final = "clamped_moe"


def _fake_unit(x: Tensor, limit: float) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _fake_moe(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    limit: float,
    first_expert: int,
) -> Tensor:
    return x.new_empty(x.shape)


UNIT: Final = Operator.define(
    _UNIT, "(Tensor x, float limit) -> Tensor", _fake_unit, summary="SwiGLU, clamped before SiLU", dtypes=FLOATS
)
MOE: Final = Operator.define(
    _MOE,
    "(Tensor x, Tensor gate_up, Tensor down, Tensor topk_weights, Tensor topk_ids, float limit, int first_expert)"
    " -> Tensor",
    _fake_moe,
    summary="mixture of experts of clamped SwiGLU",
    dtypes=FLOATS,
)


def clamped_silu_and_mul(x: Tensor, limit: float) -> Tensor:
    """Return silu(min(g, limit)) · clip(u, -limit, limit) of x = [g, u].

    Both are clamped before SiLU; g from above only. All arithmetic is fp32 and the result is rounded once.

    Maths: https://arxiv.org/abs/2002.05202 (SwiGLU); the clamp is that of transformers' `glm5_next`, `swiglu_limit`.

    Args:
        x: [.., 2F] fp32, bf16 or fp16, any strides; gate first.
        limit: above 0.

    Returns:
        [.., F], a fresh tensor of x's dtype. Nothing is mutated.

    Raises:
        TypeError: not a tensor, or an unsupported dtype.
        ValueError: an odd last dimension, a limit that is not above 0, or x requires a gradient.
    """
    require_tensor(_UNIT, "x", x)
    require_dtype(_UNIT, "x", x, FLOATS)
    even = x.dim() >= 1 and x.shape[-1] % 2 == 0
    require(even, _UNIT, "x", f"of shape {list(x.shape)}", "[.., 2F]")
    require_real(_UNIT, "limit", limit)
    require(limit > 0, _UNIT, "limit", limit, "a number above 0")
    require_inference(_UNIT, x=x)
    return torch.ops.dlinfer_ext.clamped_silu_and_mul(x, limit)  # type: ignore[no-any-return]


def clamped_moe(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    limit: float,
    first_expert: int = 0,
) -> Tensor:
    """Return sum_e w_e · down_e(clamped_silu_and_mul(gate_up_e x)) over the experts chosen for each token.

    Operands and results of the two products are in x's dtype, as of any linear layer; clamp, SiLU and the sum over
    experts are fp32, and the sum is rounded once. No host read. Router, shared experts and the sum over ranks are the
    caller's.

    Maths: https://arxiv.org/abs/1701.06538 (mixture of experts); `clamped_silu_and_mul` for the unit.

    Args:
        x: [T, D] fp32, bf16 or fp16, any strides.
        gate_up: [E, 2F, D], x's dtype, gate rows first. Where D and F are multiples of 16 bytes and strides are too,
            as of a weight, it is not copied.
        down: [E, D, F], x's dtype.
        topk_weights: [T, k], any float dtype.
        topk_ids: int [T, k]; an id outside [first_expert, first_expert + E) adds nothing, such as an expert that
            another rank holds, or -1.
        limit: above 0.
        first_expert: the id of gate_up[0], 0 or more.

    Returns:
        [T, D], a fresh tensor of x's dtype. Nothing is mutated.

    Raises:
        TypeError: not a tensor, or an unsupported dtype.
        ValueError: shapes, devices or numbers that do not fit, or an input that requires a gradient.
    """
    require_shape(_MOE, "x", x, ["T", "D"])
    require_dtype(_MOE, "x", x, FLOATS)
    tokens, hidden = x.shape
    require_shape(_MOE, "gate_up", gate_up, ["E", "2F", hidden])
    require_dtype(_MOE, "gate_up", gate_up, (x.dtype,))
    experts, width = gate_up.shape[:2]
    require(experts >= 1 and width % 2 == 0, _MOE, "gate_up", f"of shape {list(gate_up.shape)}", "[E >= 1, 2F, D]")
    require_shape(_MOE, "down", down, [experts, hidden, width // 2])
    require_dtype(_MOE, "down", down, (x.dtype,))
    require_shape(_MOE, "topk_ids", topk_ids, [tokens, "k"])
    require_dtype(_MOE, "topk_ids", topk_ids, INTS)
    require_shape(_MOE, "topk_weights", topk_weights, [tokens, topk_ids.shape[1]])
    require_dtype(_MOE, "topk_weights", topk_weights, FLOATS)
    require_same_device(_MOE, "x", x, gate_up=gate_up, down=down, topk_weights=topk_weights, topk_ids=topk_ids)
    require_inference(_MOE, x=x, gate_up=gate_up, down=down, topk_weights=topk_weights)
    require_real(_MOE, "limit", limit)
    require_int(_MOE, "first_expert", first_expert)
    require(limit > 0, _MOE, "limit", limit, "a number above 0")
    require(first_expert >= 0, _MOE, "first_expert", first_expert, "0 or more")
    return torch.ops.dlinfer_ext.clamped_moe(  # type: ignore[no-any-return]
        x, gate_up, down, topk_weights, topk_ids, limit, first_expert
    )
