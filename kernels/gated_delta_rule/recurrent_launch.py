"""Launchers of the gated delta rule of a decode or verify step."""

from __future__ import annotations

from torch import Tensor

from ..common.delta_inputs import Options, Tokens
from ..common.delta_update_launch import update
from ..common.tiling import SoC

_UPDATE = "gated_delta_rule_update"


def gated_delta_rule_update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    state_indices: Tensor | None,
    history_lens: Tensor | None,
    num_accepted_tokens: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    use_qk_l2norm: bool,
    state_v_first: bool,
    pad_slot_id: int,
    *,
    soc: SoC,
) -> Tensor:
    """Kernel form of `dlinfer_ext.ops.gated_delta_rule.gated_delta_rule_update`, for the chip `soc`."""
    x, options = Tokens(q, k, v, g, beta), Options(scale, use_qk_l2norm, state_v_first, pad_slot_id)
    return update(_UPDATE, x, state, state_indices, history_lens, num_accepted_tokens, cu_seqlens, options, soc)


def sigmoid_gating_delta_rule_update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    neg_exp_A: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    state_indices: Tensor | None,
    history_lens: Tensor | None,
    num_accepted_tokens: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    use_qk_l2norm: bool,
    state_v_first: bool,
    pad_slot_id: int,
    softplus_beta: float,
    softplus_threshold: float,
    *,
    soc: SoC,
) -> Tensor:
    """Kernel form of `dlinfer_ext.ops.gated_delta_rule.sigmoid_gating_delta_rule_update`, for the chip `soc`."""
    gates = neg_exp_A, dt_bias, softplus_beta, softplus_threshold
    x, options = Tokens(q, k, v, a, b), Options(scale, use_qk_l2norm, state_v_first, pad_slot_id)
    return update(_UPDATE, x, state, state_indices, history_lens, num_accepted_tokens, cu_seqlens, options, soc, gates)
