"""Launcher of the gated delta rule over packed prompts. Nothing is read on the host, with or without host lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.tiling import SoC, cdiv, core_grid, next_power_of_2
from . import chunk_kernel


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
    tokens, heads, keys = q.shape
    value_heads, values = v.shape[1:]
    rows = cu_seqlens.shape[0] - 1
    if tokens == 0 or rows < 1 or state.shape[0] == 0:
        return torch.zeros_like(v, memory_format=torch.contiguous_format)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    strides = state.stride()
    entry, ring = (strides[1], state.shape[1]) if state.dim() == 5 else (0, 1)
    bk = next_power_of_2(keys)
    bv = min(next_power_of_2(values), soc.tile("gated_delta_rule", "bv", 64))
    tasks = (rows + 1) * value_heads * cdiv(values, bv)
    chunk_kernel.gdr_scan_kernel[(core_grid(tasks, soc.vector_cores),)](
        q, k, v, g, beta, out, state, cu_seqlens,
        cu_seqlens if state_indices is None else state_indices, cu_seqlens if history_lens is None else history_lens,
        rows, tokens, scale, pad_slot_id, ring,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        *g.stride(), *beta.stride(), strides[0], entry, strides[-3],
        Q_INNER=q.stride(2), K_INNER=k.stride(2), V_INNER=v.stride(2),
        STATE_V=strides[-2 if state_v_first else -1], STATE_K=strides[-1 if state_v_first else -2],
        HV=value_heads, GROUP=value_heads // heads, K=keys, V=values, BK=bk, BV=bv, BT=16,
        HAS_SLOTS=state_indices is not None, HAS_HISTORY=history_lens is not None, L2NORM=use_qk_l2norm,
        V_FIRST=state_v_first,
    )  # fmt: skip
    return out
