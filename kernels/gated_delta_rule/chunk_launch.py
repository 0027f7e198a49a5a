"""Launcher of the gated delta rule over packed prompts. Nothing is read on the host, with or without host lengths.

Two forms. The scan keeps states in the unified buffer and takes token after token: vector work alone, and no byte more
than the lower bound but for q and k. The dot form takes chunks of tokens with matrix products; where cube and vector
cores exchange tiles through a workspace in global memory, that alone is many times the bytes of its inputs; where they
do not, q and k are read for each block of V that leaves the buffer its tenth of slack. So the scan is taken unless a
chip's tiles say "dot".
"""

from __future__ import annotations

from torch import Tensor

from ..common.delta_inputs import Options, Tokens
from ..common.delta_scan_launch import launch_prompts, scan
from ..common.tiling import SoC, next_power_of_2
from .chunk_kernel import gdr_dot_kernel

_NAME = "gated_delta_rule"


def gated_delta_rule(
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
    """Kernel form of `dlinfer_ext.ops.gated_delta_rule.gated_delta_rule`; arguments and mutation as there."""
    x, options = Tokens(q, k, v, g, beta), Options(scale, use_qk_l2norm, state_v_first, pad_slot_id)
    if not soc.tile(_NAME, "dot", 0):
        return scan(x, state, cu_seqlens, state_indices, history_lens, options, soc)
    block = min(max(next_power_of_2(v.shape[-1]), 16), soc.tile(_NAME, "dot_values", 64))
    return launch_prompts(
        gdr_dot_kernel, x, state, cu_seqlens, state_indices, history_lens, options, block, soc.cube_cores,
        BT=soc.tile(_NAME, "dot_chunk", 16),
    )  # fmt: skip
