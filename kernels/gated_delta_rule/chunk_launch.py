"""Launcher of the gated delta rule over packed prompts. Nothing is read on the host, with or without host lengths.

Two forms. The scan keeps states in the unified buffer and takes token after token: vector work alone, and no byte more
than the lower bound but for q and k. The dot form takes chunks of tokens with matrix products; where cube and vector
cores exchange tiles through a workspace in global memory, that alone is many times the bytes of its inputs; where they
do not, q and k are read for each block of V that leaves the buffer its tenth of slack. So the scan is taken unless a
chip's tiles say "dot".
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.tiling import SoC, cdiv, core_grid, next_power_of_2
from . import chunk_kernel

_NAME = "gated_delta_rule"
# Elements of a state that one program of the scan holds, so that no more than 90 % of a unified buffer of 192 KiB is
# used: a tile is fetched into two buffers, and a pool of 16 bits needs a third in fp32.
_HELD = 128 * 128
_LEAST_BLOCK = 32


def scan_block(keys: int, values: int, heads: int, v_first: bool, wide_pool: bool, cores: int) -> int:
    """Return the columns of V that one program of the scan takes.

    As many as fit, since q and k are read again for each block; fewer, as long as that keeps idle cores busy.

    Args:
        keys: K, padded to a power of two.
        values: V.
        heads: value heads of all rows together.
        v_first: orientation of the pool.
        wide_pool: whether the pool is fp32.
        cores: vector cores.
    """
    held = _HELD if wide_pool and v_first and keys <= 128 else _HELD // 2
    block = max(_LEAST_BLOCK, min(held // keys, next_power_of_2(values)))
    while block > _LEAST_BLOCK and 2 * heads * cdiv(values, block) <= cores:
        block //= 2
    return block


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
    bk = max(next_power_of_2(keys), 16)
    if soc.tile(_NAME, "dot", 0):
        kernel, cores = chunk_kernel.gdr_dot_kernel, soc.cube_cores
        bv = min(max(next_power_of_2(values), 16), soc.tile(_NAME, "dot_values", 64))
        chunk = soc.tile(_NAME, "dot_chunk", 16)
    else:
        kernel, cores, chunk = chunk_kernel.gdr_scan_kernel, soc.vector_cores, 1
        wide = state.dtype == torch.float32
        bv = scan_block(bk, values, rows * value_heads, state_v_first, wide, soc.vector_cores)
    tasks = (rows + 1) * value_heads * cdiv(values, bv)
    kernel[(core_grid(tasks, cores),)](
        q, k, v, g, beta, out, state, cu_seqlens,
        cu_seqlens if state_indices is None else state_indices, cu_seqlens if history_lens is None else history_lens,
        rows, tokens, scale, pad_slot_id, ring,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        *g.stride(), *beta.stride(), strides[0], entry, strides[-3],
        *(1 if x is None else x.stride(0) for x in (cu_seqlens, state_indices, history_lens)),
        value_heads, value_heads // heads,
        Q_INNER=q.stride(2), K_INNER=k.stride(2), V_INNER=v.stride(2),
        STATE_V=strides[-2 if state_v_first else -1], STATE_K=strides[-1 if state_v_first else -2],
        K=keys, V=values, BK=bk, BV=bv, BT=chunk,
        HAS_SLOTS=state_indices is not None, HAS_HISTORY=history_lens is not None, L2NORM=use_qk_l2norm,
        V_FIRST=state_v_first,
    )  # fmt: skip
    return out
