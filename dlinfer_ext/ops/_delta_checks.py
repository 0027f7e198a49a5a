"""Checks of the arguments that the delta rules share, whichever gate they take."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ._checks import (
    FLOATS,
    INTS,
    require,
    require_dtype,
    require_flag,
    require_inference,
    require_int,
    require_lengths,
    require_real,
    require_same_device,
    require_shape,
    require_tensor,
)


def require_options(op: str, scale: float | None, use_qk_l2norm: bool, state_v_first: bool, pad_slot_id: int) -> None:
    require_real(op, "scale", scale, optional=True)
    require_flag(op, "use_qk_l2norm", use_qk_l2norm)
    require_flag(op, "state_v_first", state_v_first)
    require_int(op, "pad_slot_id", pad_slot_id)


def require_inputs(
    op: str,
    lead: list[int | str],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    channel_gates: dict[str, Tensor] | None = None,
    **gates: Tensor,
) -> None:
    """Check q, k, v and the gates against each other; `lead` names the leading dimensions of q.

    Gates are [.., HV], those in `channel_gates` [.., HV, K].
    """
    channel_gates = channel_gates or {}
    require_shape(op, "q", q, [*lead, "H", "K"])
    require_dtype(op, "q", q, FLOATS)
    require_shape(op, "k", k, q.shape)
    require_dtype(op, "k", k, [q.dtype])
    tokens, heads = q.shape[:-2], q.shape[-2]
    require_shape(op, "v", v, [*tokens, "HV", "V"])
    require_dtype(op, "v", v, [q.dtype])
    value_heads = v.shape[-2]
    require(
        heads >= 1 and q.shape[-1] >= 1 and v.shape[-1] >= 1 and value_heads >= 1 and value_heads % heads == 0,
        op,
        "v",
        f"of shape {list(v.shape)} with q of shape {list(q.shape)}",
        "HV a positive multiple of H, and K, V >= 1",
    )
    for name, gate in (channel_gates | gates).items():
        require_shape(op, name, gate, [*tokens, value_heads, *(q.shape[-1:] if name in channel_gates else ())])
        require_dtype(op, name, gate, FLOATS)
    gates = channel_gates | gates
    require_same_device(op, "q", q, k=k, v=v, **gates)
    require_inference(op, q=q, k=k, v=v, **gates)


def require_pool(op: str, state: Tensor, q: Tensor, v: Tensor, v_first: bool, history: Tensor | None) -> bool:
    """Check the pool against q and v; return whether it is a ring."""
    require_tensor(op, "state", state)
    require_dtype(op, "state", state, FLOATS)
    keys, (heads, values) = q.shape[-1], v.shape[-2:]
    inner = [heads, values, keys] if v_first else [heads, keys, values]
    require(
        state.dim() in (4, 5) and list(state.shape[-3:]) == inner and (state.dim() == 4 or state.shape[1] >= 1),
        op,
        "state",
        f"of shape {list(state.shape)}",
        f"[S, {', '.join(map(str, inner))}] or a ring [S, R, {', '.join(map(str, inner))}] (state_v_first={v_first})",
    )
    ring = state.dim() == 5
    require(
        not ring or history is not None, op, "history_lens", "None", "int [N]: a ring pool is addressed by the history"
    )
    require_same_device(op, "q", q, state=state)
    require_inference(op, state=state)
    return ring


def require_rows(op: str, rows: int, q: Tensor, **tensors: Tensor | None) -> None:
    for name, t in tensors.items():
        if t is not None:
            require_shape(op, name, t, [rows])
            require_dtype(op, name, t, INTS)
    require_same_device(op, "q", q, **tensors)


def require_default_slots(op: str, rows: int, state: Tensor, state_indices: Tensor | None) -> None:
    require(
        state_indices is not None or state.shape[0] >= rows,
        op,
        "state",
        f"of {state.shape[0]} slots",
        f"at least {rows} slots: without state_indices row i uses slot i",
    )


def require_cu_seqlens(op: str, cu_seqlens: Tensor, q: Tensor) -> int:
    """Check the packed offsets; return N."""
    require_shape(op, "cu_seqlens", cu_seqlens, ["N + 1"])
    require_dtype(op, "cu_seqlens", cu_seqlens, INTS)
    require(cu_seqlens.shape[0] >= 1, op, "cu_seqlens", "empty", "[N + 1] offsets that start at 0")
    require_same_device(op, "q", q, cu_seqlens=cu_seqlens)
    return cu_seqlens.shape[0] - 1


def require_update(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    state_indices: Tensor | None,
    history_lens: Tensor | None,
    num_accepted_tokens: Tensor | None,
    cu_seqlens: Tensor | None,
    state_v_first: bool,
    channel_gates: dict[str, Tensor] | None = None,
    **gates: Tensor,
) -> None:
    """Check the arguments of a decode or verify step; gates as in `require_inputs`."""
    packed = cu_seqlens is not None
    require_inputs(op, ["T"] if packed else ["N", "Q"], q, k, v, channel_gates, **gates)
    ring = require_pool(op, state, q, v, state_v_first, history_lens)
    rows = require_cu_seqlens(op, cu_seqlens, q) if cu_seqlens is not None else q.shape[0]
    if state_indices is not None:
        require_tensor(op, "state_indices", state_indices)
        require(
            state_indices.dim() in (1, 2), op, "state_indices", f"of shape {list(state_indices.shape)}", "[N] or [N, W]"
        )
    table = state_indices is not None and state_indices.dim() == 2
    require(
        num_accepted_tokens is None or table,
        op,
        "num_accepted_tokens",
        "given without a table",
        "None, or state_indices of shape [N, W]",
    )
    row_limit: int | None = None
    if state_indices is not None and table:
        require(not ring, op, "state_indices", f"of shape {list(state_indices.shape)}", "[N] for a ring pool")
        require_shape(op, "state_indices", state_indices, [rows, "W"])
        require_dtype(op, "state_indices", state_indices, INTS)
        require_same_device(op, "q", q, state_indices=state_indices)
        row_limit = state_indices.shape[1]
        require(row_limit >= 1, op, "state_indices", f"of shape {list(state_indices.shape)}", "W >= 1")
        require_rows(op, rows, q, history_lens=history_lens, num_accepted_tokens=num_accepted_tokens)
    else:
        row_limit = state.shape[1] if ring else None
        require_rows(op, rows, q, state_indices=state_indices, history_lens=history_lens)
        require_default_slots(op, rows, state, state_indices)
    if row_limit is not None and not packed:
        require(
            q.shape[1] <= row_limit,
            op,
            "q",
            f"of {q.shape[1]} tokens per row",
            f"at most {row_limit}, the {'entries of the ring' if ring else 'columns of state_indices'}",
        )


def require_prompts(
    op: str,
    q: Tensor,
    v: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    state_indices: Tensor | None,
    history_lens: Tensor | None,
    state_v_first: bool,
    host_lengths: Sequence[int] | None,
) -> list[int] | None:
    """Check what packed prompts take besides their inputs; return the row lengths as ints, or None."""
    require_pool(op, state, q, v, state_v_first, history_lens)
    rows = require_cu_seqlens(op, cu_seqlens, q)
    require_rows(op, rows, q, state_indices=state_indices, history_lens=history_lens)
    require_default_slots(op, rows, state, state_indices)
    return require_lengths(op, host_lengths, rows, q.shape[0])
