"""Launchers of the recurrent kernels: decode, verify, and the gates. Nothing is read from the device."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.tiling import SoC, cdiv, core_grid, fit_block, next_power_of_2
from .recurrent_kernel import gate_kernel, update_kernel

_UPDATE = "gated_delta_rule_update"
_GATE = "gated_delta_gate"
# What one element of the state takes in the unified buffer: the tile, what is loaded ahead of it, what is still being
# stored, and products with it. As the compiler plans it: 20.5 bytes with an fp32 pool, 22.5 with one of 16 bits.
_STATE_BYTES = {torch.float32: 21, torch.bfloat16: 23, torch.float16: 23}
# Of one element of a gate: a, b, their masks and fp32 forms, the results and the terms of the logarithm.
_GATE_COPIES = 20
# The rest is left to what the compiler adds.
_UB_SHARE = 0.9
# A block of fewer channels reads q and k too often.
_LEAST_CHANNELS = 16
_MOST_TOKENS = 2**31 - 1
_PLAIN, _RING, _TABLE = range(3)


def _strides(x: Tensor, packed: bool) -> tuple[int, int, int]:
    """Return the strides of x [T, heads, ..] or [N, Q, heads, ..]: row, token, head."""
    return (0, x.stride(0), x.stride(1)) if packed else (x.stride(0), x.stride(1), x.stride(2))


def _block(rows: int, heads: int, keys: int, values: int, pool: torch.dtype, soc: SoC) -> int:
    """Return the value channels of a task: as many as fit, and a quarter of it if that leaves cores without a task."""
    block = fit_block(values, next_power_of_2(keys) * _STATE_BYTES[pool], int(soc.ub_bytes * _UB_SHARE), least=8)
    block = min(block, soc.tile(_UPDATE, "block_v", block))
    if rows * heads * cdiv(values, block) < soc.vector_cores:
        block = max(min(block, _LEAST_CHANNELS), block // 4)
    return block


def _update(
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
    gates: tuple[Tensor, Tensor, float, float] | None,
    soc: SoC,
) -> Tensor:
    """Launch the update; with gates = (neg_exp_A, dt_bias, softplus_beta, softplus_threshold), g is a and beta is b."""
    packed = cu_seqlens is not None
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if v.numel() == 0 or state.shape[0] == 0 or rows == 0:
        return torch.zeros_like(v, memory_format=torch.contiguous_format)
    # The kernel writes every element: those of PAD rows and of tokens outside every row as zeros.
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    heads, values, keys = v.shape[-2], v.shape[-1], q.shape[-1]
    slot_stride, *entry, head_stride, first, second = state.stride()
    stride_v, stride_k = (first, second) if state_v_first else (second, first)
    form, entries, limit = _PLAIN, 1, _MOST_TOKENS
    if entry:
        form, entries, limit = _RING, state.shape[1], state.shape[1]
    elif state_indices is not None and state_indices.dim() == 2:
        form, entries, limit = _TABLE, state_indices.shape[1], state_indices.shape[1]
    block = _block(rows, heads, keys, values, state.dtype, soc)
    rate, dt_bias, softplus_beta, softplus_threshold = gates or (g, g, 1.0, 20.0)
    # An argument that is absent still needs a pointer; the kernel does not follow it.
    slots, history, accepted, cu = (x if x is not None else q for x in (
        state_indices, history_lens, num_accepted_tokens, cu_seqlens
    ))  # fmt: skip
    update_kernel[(core_grid((rows + packed) * heads * cdiv(values, block), soc.vector_cores),)](
        q, k, v, g, beta, rate, dt_bias, state, o, slots, history, accepted, cu,
        rows, q.shape[0] if packed else q.shape[1], heads, limit, scale, pad_slot_id, softplus_beta,
        1.0 / softplus_beta, softplus_threshold,
        *_strides(q, packed), *_strides(k, packed), *_strides(v, packed), *_strides(g, packed), *_strides(beta, packed),
        rate.stride(0), dt_bias.stride(0), slot_stride, entry[0] if entry else 0, head_stride, entries,
        slots.stride(0), slots.stride(1) if form == _TABLE else 0, history.stride(0), accepted.stride(0), cu.stride(0),
        RATIO=heads // q.shape[-2], K=keys, V=values, BK=next_power_of_2(keys), BV=block,
        Q_INNER=q.stride(-1), K_INNER=k.stride(-1), V_INNER=v.stride(-1), STATE_K=stride_k, STATE_V=stride_v,
        V_OUTER=stride_v >= stride_k, FORM=form, PACKED=packed, HAS_SLOTS=state_indices is not None,
        HAS_HISTORY=history_lens is not None, HAS_ACCEPTED=num_accepted_tokens is not None, GATED=gates is not None,
        NORMALISE=use_qk_l2norm,
    )  # fmt: skip
    return o


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
    return _update(
        q, k, v, g, beta, state, state_indices, history_lens, num_accepted_tokens, cu_seqlens, scale, use_qk_l2norm,
        state_v_first, pad_slot_id, None, soc,
    )  # fmt: skip


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
    return _update(
        q, k, v, a, b, state, state_indices, history_lens, num_accepted_tokens, cu_seqlens, scale, use_qk_l2norm,
        state_v_first, pad_slot_id, (neg_exp_A, dt_bias, softplus_beta, softplus_threshold), soc,
    )  # fmt: skip


def gated_delta_gate(
    a: Tensor,
    b: Tensor,
    neg_exp_A: Tensor,
    dt_bias: Tensor,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    *,
    soc: SoC,
) -> tuple[Tensor, Tensor]:
    """Kernel form of `dlinfer_ext.ops.gated_delta_rule.gated_delta_gate`, for the chip `soc`."""
    g, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
    if a.numel() == 0:
        return g, beta
    heads = a.shape[-1]
    # A view wherever the leading dimensions have one step between tokens, as in a slice of a projection.
    a2, b2 = a.reshape(-1, heads), b.reshape(-1, heads)
    block_h = next_power_of_2(heads)
    block_t = fit_block(64, block_h * 4 * _GATE_COPIES, int(soc.ub_bytes * _UB_SHARE), least=8)
    tokens = a2.shape[0]
    gate_kernel[(core_grid(cdiv(tokens, block_t), soc.vector_cores),)](
        a2, b2, neg_exp_A, dt_bias, g, beta, tokens, a2.stride(0), b2.stride(0), softplus_beta, 1.0 / softplus_beta,
        softplus_threshold,
        HEADS=heads, A_HEAD=a2.stride(1), B_HEAD=b2.stride(1), RATE_HEAD=neg_exp_A.stride(0), DT_HEAD=dt_bias.stride(0),
        BT=block_t, BH=block_h,
    )  # fmt: skip
    return g, beta
