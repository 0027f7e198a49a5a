"""Launches of the delta rules over packed prompts. Nothing is read on the host, with or without host lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .delta_inputs import Options, Tokens
from .delta_scan_kernel import delta_scan_kernel
from .tiling import SoC, cdiv, core_grid, next_power_of_2

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


def block_keys(keys: int) -> int:
    """Return the lanes that hold K."""
    return max(next_power_of_2(keys), 16)


def launch_prompts(
    kernel: Any,
    x: Tokens,
    state: Tensor,
    cu_seqlens: Tensor,
    state_indices: Tensor | None,
    history_lens: Tensor | None,
    options: Options,
    block: int,
    cores: int,
    **constants: Any,
) -> Tensor:
    """Launch a kernel whose task is one row, one value head and `block` columns of V; state is mutated.

    Args:
        kernel: with the arguments of `delta_scan_kernel`, and `constants` beside them.
        x: packed inputs, g [T, HV] or [T, HV, K].
        state: a pool as in `dlinfer_ext.ops.gated_delta_rule.gated_delta_rule`, and so are the rest.
        cu_seqlens: int [N + 1].
        state_indices: int [N] or None.
        history_lens: int [N] or None.
        options: scale, norm, orientation and PAD.
        block: columns of V of a task.
        cores: of the kind that the kernel runs on.
        constants: what this kernel alone wants.

    Returns:
        o [T, HV, V].
    """
    (tokens, heads, keys), (_, value_heads, values) = x.q.shape, x.v.shape
    rows = cu_seqlens.shape[0] - 1
    if tokens == 0 or rows < 1 or state.shape[0] == 0:
        return torch.zeros_like(x.v, memory_format=torch.contiguous_format)
    out = torch.empty(x.v.shape, dtype=x.v.dtype, device=x.v.device)
    strides, v_first = state.stride(), options.state_v_first
    entry, ring = (strides[1], state.shape[1]) if state.dim() == 5 else (0, 1)
    kernel[(core_grid((rows + 1) * value_heads * cdiv(values, block), cores),)](
        x.q, x.k, x.v, x.g, x.beta, out, state, cu_seqlens,
        cu_seqlens if state_indices is None else state_indices, cu_seqlens if history_lens is None else history_lens,
        rows, tokens, options.scale, options.pad_slot_id, ring,
        *(step for y in (x.q, x.k, x.v, x.g, x.beta) for step in y.stride()[:2]), strides[0], entry, strides[-3],
        *(1 if y is None else y.stride(0) for y in (cu_seqlens, state_indices, history_lens)),
        value_heads, value_heads // heads,
        Q_INNER=x.q.stride(2), K_INNER=x.k.stride(2), V_INNER=x.v.stride(2),
        STATE_V=strides[-2 if v_first else -1], STATE_K=strides[-1 if v_first else -2],
        K=keys, V=values, BK=block_keys(keys), BV=block,
        HAS_SLOTS=state_indices is not None, HAS_HISTORY=history_lens is not None, L2NORM=options.use_qk_l2norm,
        V_FIRST=v_first, **constants,
    )  # fmt: skip
    return out


def scan(
    x: Tokens,
    state: Tensor,
    cu_seqlens: Tensor,
    state_indices: Tensor | None,
    history_lens: Tensor | None,
    options: Options,
    soc: SoC,
) -> Tensor:
    """Launch the form that takes a row token by token; arguments and mutation as of `launch_prompts`."""
    (_, value_heads, values), rows = x.v.shape, cu_seqlens.shape[0] - 1
    wide = state.dtype == torch.float32
    keys = block_keys(x.q.shape[-1])
    block = scan_block(keys, values, rows * value_heads, options.state_v_first, wide, soc.vector_cores)
    return launch_prompts(
        delta_scan_kernel, x, state, cu_seqlens, state_indices, history_lens, options, block, soc.vector_cores,
        G_INNER=x.g.stride(2) if x.g.dim() == 3 else 0, CHANNELS=x.g.dim() == 3,
    )  # fmt: skip
