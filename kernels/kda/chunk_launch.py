"""Launcher of Kimi Delta Attention over packed prompts. Nothing is read on the host, with or without host lengths.

A row is taken token by token: `gated_delta_rule/chunk_launch.py` says what speaks against chunks, and with a decay for
each key channel they would need products of queries and keys split in factors on top of that (see chunk_eager.py).
"""

from __future__ import annotations

from torch import Tensor

from ..common.delta_inputs import Options, Tokens
from ..common.delta_scan_launch import scan
from ..common.tiling import SoC


def kda(
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
    host_lengths: list[int] | None,
    *,
    soc: SoC,
) -> Tensor:
    """Kernel form of `dlinfer_ext.ops.kda.kda`; arguments and mutation as there."""
    x, options = Tokens(q, k, v, g, beta), Options(scale, use_qk_l2norm, state_v_first, pad_slot_id)
    return scan(x, state, cu_seqlens, state_indices, history_lens, options, soc)
