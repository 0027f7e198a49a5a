"""Launcher of Kimi Delta Attention of a decode or verify step."""

from __future__ import annotations

from torch import Tensor

from ..common.delta_inputs import Options, Tokens
from ..common.delta_update_launch import update
from ..common.tiling import SoC

_NAME = "kda_update"


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
    *,
    soc: SoC,
) -> Tensor:
    """Kernel form of `dlinfer_ext.ops.kda.kda_update`, for the chip `soc`."""
    x, options = Tokens(q, k, v, g, beta), Options(scale, use_qk_l2norm, state_v_first, pad_slot_id)
    return update(_NAME, x, state, state_indices, history_lens, num_accepted_tokens, cu_seqlens, options, soc)
