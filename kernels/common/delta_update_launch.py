"""Launch of the delta rules of a decode or verify step. Nothing is read from the device."""

from __future__ import annotations

import torch
from torch import Tensor

from .delta_inputs import Options, Tokens
from .delta_update_kernel import delta_update_kernel
from .tiling import SoC, cdiv, core_grid, fit_block, next_power_of_2

# What one element of the state takes in the unified buffer: the tile, what is loaded ahead of it, what is still being
# stored, and products with it. As the compiler plans it: 20.5 bytes with an fp32 pool, 22.5 with one of 16 bits.
_STATE_BYTES = {torch.float32: 21, torch.bfloat16: 23, torch.float16: 23}
# The rest is left to what the compiler adds.
_UB_SHARE = 0.9
# A block of fewer channels reads q and k too often.
_LEAST_CHANNELS = 16
_MOST_TOKENS = 2**31 - 1
_PLAIN, _RING, _TABLE = range(3)


def _strides(x: Tensor, packed: bool) -> tuple[int, int, int]:
    """Return the strides of x [T, heads, ..] or [N, Q, heads, ..]: row, token, head."""
    return (0, x.stride(0), x.stride(1)) if packed else (x.stride(0), x.stride(1), x.stride(2))


def _block(operator: str, rows: int, heads: int, keys: int, values: int, pool: torch.dtype, soc: SoC) -> int:
    """Return the value channels of a task: as many as fit, and a quarter of it if that leaves cores without a task."""
    block = fit_block(values, next_power_of_2(keys) * _STATE_BYTES[pool], int(soc.ub_bytes * _UB_SHARE), least=8)
    block = min(block, soc.tile(operator, "block_v", block))
    if rows * heads * cdiv(values, block) < soc.vector_cores:
        block = max(min(block, _LEAST_CHANNELS), block // 4)
    return block


def update(
    operator: str,
    x: Tokens,
    state: Tensor,
    state_indices: Tensor | None,
    history_lens: Tensor | None,
    num_accepted_tokens: Tensor | None,
    cu_seqlens: Tensor | None,
    options: Options,
    soc: SoC,
    gates: tuple[Tensor, Tensor, float, float] | None = None,
) -> Tensor:
    """Launch the update.

    Args:
        operator: whose measured tiles are taken.
        x: inputs, g [.., HV] or [.., HV, K]; with `gates`, a and b in the places of g and beta.
        state: a pool as in `dlinfer_ext.ops.gated_delta_rule.gated_delta_rule_update`; mutated.
        state_indices: as there, and so are the rest.
        history_lens: int [N] or None.
        num_accepted_tokens: int [N] or None.
        cu_seqlens: int [N + 1] or None.
        options: scale, norm, orientation and PAD.
        soc: the chip.
        gates: (neg_exp_A, dt_bias, softplus_beta, softplus_threshold) of a rule with a decay per head.

    Returns:
        o of v's shape.
    """
    q, k, v, g, beta = x.q, x.k, x.v, x.g, x.beta
    packed = cu_seqlens is not None
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if v.numel() == 0 or state.shape[0] == 0 or rows == 0:
        return torch.zeros_like(v, memory_format=torch.contiguous_format)
    # The kernel writes every element: those of PAD rows and of tokens outside every row as zeros.
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    heads, values, keys = v.shape[-2], v.shape[-1], q.shape[-1]
    slot_stride, *entry, head_stride, first, second = state.stride()
    stride_v, stride_k = (first, second) if options.state_v_first else (second, first)
    form, entries, limit = _PLAIN, 1, _MOST_TOKENS
    if entry:
        form, entries, limit = _RING, state.shape[1], state.shape[1]
    elif state_indices is not None and state_indices.dim() == 2:
        form, entries, limit = _TABLE, state_indices.shape[1], state_indices.shape[1]
    block = _block(operator, rows, heads, keys, values, state.dtype, soc)
    channels = g.dim() == q.dim()
    rate, dt_bias, softplus_beta, softplus_threshold = gates or (g, g, 1.0, 20.0)
    # An argument that is absent still needs a pointer; the kernel does not follow it.
    slots, history, accepted, cu = (x if x is not None else q for x in (
        state_indices, history_lens, num_accepted_tokens, cu_seqlens
    ))  # fmt: skip
    delta_update_kernel[(core_grid((rows + packed) * heads * cdiv(values, block), soc.vector_cores),)](
        q, k, v, g, beta, rate, dt_bias, state, o, slots, history, accepted, cu,
        rows, q.shape[0] if packed else q.shape[1], heads, limit, options.scale, options.pad_slot_id, softplus_beta,
        1.0 / softplus_beta, softplus_threshold,
        *_strides(q, packed), *_strides(k, packed), *_strides(v, packed), *_strides(g, packed), *_strides(beta, packed),
        rate.stride(0), dt_bias.stride(0), slot_stride, entry[0] if entry else 0, head_stride, entries,
        slots.stride(0), slots.stride(1) if form == _TABLE else 0, history.stride(0), accepted.stride(0), cu.stride(0),
        RATIO=heads // q.shape[-2], K=keys, V=values, BK=next_power_of_2(keys), BV=block,
        Q_INNER=q.stride(-1), K_INNER=k.stride(-1), V_INNER=v.stride(-1), STATE_K=stride_k, STATE_V=stride_v,
        V_OUTER=stride_v >= stride_k, FORM=form, PACKED=packed, HAS_SLOTS=state_indices is not None,
        HAS_HISTORY=history_lens is not None, HAS_ACCEPTED=num_accepted_tokens is not None, GATED=gates is not None,
        NORMALISE=options.use_qk_l2norm, G_INNER=g.stride(-1) if channels else 0, CHANNELS=channels,
    )  # fmt: skip
    return o
