"""Kimi Delta Attention of a decode or verify step. The steps are those of `common.delta_steps`."""

from __future__ import annotations

from torch import Tensor

from ..common.delta_inputs import Options, Tokens
from ..common.delta_steps import update
from .chunk_eager import head_terms


def kda_update(
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
    """Batched form of `dlinfer_ext.ops.kda.kda_update`."""
    x, options = Tokens(q, k, v, g, beta), Options(scale, use_qk_l2norm, state_v_first, pad_slot_id)
    return update(x, state, state_indices, history_lens, num_accepted_tokens, cu_seqlens, options, head_terms)
