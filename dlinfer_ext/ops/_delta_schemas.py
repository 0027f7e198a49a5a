"""What torch.library is told of the delta rules, whichever gate they take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import Tensor

RULE_SCHEMA: Final = (
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, Tensor cu_seqlens, Tensor? state_indices,"
    " Tensor? history_lens, float scale, bool use_qk_l2norm, bool state_v_first, int pad_slot_id, int[]? host_lengths)"
    " -> Tensor"
)
UPDATE_SCHEMA: Final = (
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, Tensor? state_indices,"
    " Tensor? history_lens, Tensor? num_accepted_tokens, Tensor? cu_seqlens, float scale, bool use_qk_l2norm,"
    " bool state_v_first, int pad_slot_id) -> Tensor"
)


def fake_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    state_indices: Tensor | None,
    history_lens: Tensor | None,
    scale: float,
    use_qk_l2norm: bool,
    state_v_first: bool,
    pad_slot_id: int,
    host_lengths: Sequence[int] | None,
) -> Tensor:
    return v.new_empty(v.shape)


def fake_update(
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
    return v.new_empty(v.shape)
