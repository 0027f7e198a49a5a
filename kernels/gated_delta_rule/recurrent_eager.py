"""Gated delta rule of a decode or verify step, and with its gates. The steps are those of `common.delta_steps`."""

from __future__ import annotations

from torch import Tensor

from ..common.delta_inputs import Options, Tokens
from ..common.delta_steps import update
from .chunk_eager import head_terms
from .gate_eager import gated_delta_gate


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
) -> Tensor:
    """Batched form of `dlinfer_ext.ops.gated_delta_rule.gated_delta_rule_update`."""
    x, options = Tokens(q, k, v, g, beta), Options(scale, use_qk_l2norm, state_v_first, pad_slot_id)
    return update(x, state, state_indices, history_lens, num_accepted_tokens, cu_seqlens, options, head_terms)


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
) -> Tensor:
    """Batched form of `dlinfer_ext.ops.gated_delta_rule.sigmoid_gating_delta_rule_update`: the gates, then the step."""
    g, beta = gated_delta_gate(a, b, neg_exp_A, dt_bias, softplus_beta, softplus_threshold)
    return gated_delta_rule_update(
        q, k, v, g, beta, state, state_indices, history_lens, num_accepted_tokens, cu_seqlens, scale, use_qk_l2norm,
        state_v_first, pad_slot_id,
    )  # fmt: skip
