"""The calling forms that peers' functions of both delta rules share: prompts with states of their own, and steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dlinfer_ext.ops._checks import (
    FLOATS,
    require,
    require_dtype,
    require_flag,
    require_int,
    require_shape,
    require_tensor,
)


def require_batches(op: str, **tensors: Tensor) -> None:
    """Check that there is a dimension for batches, one for tokens and one for heads."""
    for name, t in tensors.items():
        require_tensor(op, name, t)
        require(t.dim() >= 3, op, name, f"of shape {list(t.shape)}", "[B, T, heads, ...]")


def require_lead(op: str, q: Tensor, v: Tensor, cu_seqlens: Tensor | None, **others: Tensor) -> tuple[int, int]:
    """Check [B, T, heads, dim] of q and v, and [B, T, ..] of others.

    Return the rows and the tokens of a row (0 if cu_seqlens says).
    """
    require_shape(op, "q", q, ["B", "T", "H", "K"])
    require_shape(op, "v", v, [*q.shape[:2], "HV", "V"])
    for name, t in others.items():
        require_tensor(op, name, t)
        fits = t.shape[:2] == q.shape[:2]
        require(fits, op, name, f"of shape {list(t.shape)}", f"[{q.shape[0]}, {q.shape[1]}, heads, ...]")
    if cu_seqlens is None:
        return q.shape[0], q.shape[1]
    require_shape(op, "cu_seqlens", cu_seqlens, ["N + 1"])
    require(q.shape[0] == 1, op, "q", f"of shape {list(q.shape)}", "B = 1 when cu_seqlens is given")
    return cu_seqlens.shape[0] - 1, 0


def prompts(
    op: str,
    rule: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    use_qk_l2norm: bool,
    state_v_first: bool,
) -> tuple[Tensor, Tensor]:
    """Apply `rule`, a prefill operator of `dlinfer_ext.ops`, to [B, T, ...] from states that are not mutated.

    Returns:
        (o [B, T, HV, V] in v's dtype, final states in fp32, [N, HV, V, K] or [N, HV, K, V]).

    Raises:
        TypeError: not a tensor, or an unsupported dtype.
        ValueError: shapes that do not fit; `op` is the function that is named.
    """
    require_batches(op, q=q, k=k, v=v, g=g, beta=beta)
    rows, length = require_lead(op, q, v, cu_seqlens)
    heads, values, keys = v.shape[2], v.shape[3], q.shape[3]
    inner = (heads, values, keys) if state_v_first else (heads, keys, values)
    if initial_state is None:
        state = torch.zeros(rows, *inner, dtype=torch.float32, device=q.device)
    else:
        require_shape(op, "initial_state", initial_state, [rows, *inner])
        require_dtype(op, "initial_state", initial_state, FLOATS)
        state = initial_state.to(torch.float32, copy=True)
    offsets = torch.arange(rows + 1, device=q.device) * length if cu_seqlens is None else cu_seqlens
    o = rule(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        g.flatten(0, 1),
        beta.flatten(0, 1),
        state,
        cu_seqlens=offsets,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
        state_v_first=state_v_first,
        host_lengths=[length] * rows if cu_seqlens is None else None,
    )
    return o.view(v.shape), state


def steps(
    op: str,
    update: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    inplace_final_state: bool,
    cu_seqlens: Tensor | None,
    ssm_state_indices: Tensor | None,
    num_accepted_tokens: Tensor | None,
    cache_seqlens_rb: Tensor | None,
    state_ids_rb: Tensor | None,
    num_state: int,
    use_qk_l2norm: bool,
    state_v_first: bool,
) -> tuple[Tensor, Tensor]:
    """Apply `update`, a decode operator of `dlinfer_ext.ops`; nothing is read from the device.

    The state is the row's own (no indices), a slot (`ssm_state_indices` [N]), a table of slots, one per token (the
    indices [N, W], with `num_accepted_tokens`), or a ring (the `_rb` arguments): the state after n tokens lives in
    entry id · num_state + n mod num_state, and every token stores its own.

    Returns:
        (o [B, T, HV, V] in v's dtype, `initial_state` itself or new final states in fp32).

    Raises:
        TypeError: not a tensor, or an unsupported dtype.
        ValueError: shapes that do not fit, or arguments of two forms at once; `op` is the function that is named.
    """
    rows, _ = require_lead(op, q, v, cu_seqlens, k=k, g=g, beta=beta)
    require_flag(op, "inplace_final_state", inplace_final_state)
    require_int(op, "num_state", num_state)
    for name, t in (("initial_state", initial_state), ("ssm_state_indices", ssm_state_indices)):
        if t is not None:
            require_tensor(op, name, t)
    heads, values, keys = v.shape[2], v.shape[3], q.shape[3]
    inner = (heads, values, keys) if state_v_first else (heads, keys, values)
    ring = state_ids_rb is not None or cache_seqlens_rb is not None
    table = ssm_state_indices is not None and ssm_state_indices.dim() == 2
    indices = ssm_state_indices
    if ring:
        require(ssm_state_indices is None, op, "ssm_state_indices", "given with state_ids_rb", "one of the two")
        require(state_ids_rb is not None, op, "state_ids_rb", "None", "int [N] with cache_seqlens_rb")
        require(cache_seqlens_rb is not None, op, "cache_seqlens_rb", "None", "int [N] with state_ids_rb")
        indices = state_ids_rb
    if initial_state is None:
        require(indices is None, op, "initial_state", "None", "a pool, as slots are given")
        pool = torch.zeros(rows, *inner, dtype=torch.float32, device=q.device)
    elif inplace_final_state:
        pool = initial_state
    else:
        require(not (ring or table), op, "inplace_final_state", "False", "True: every token stores a state of its own")
        require_shape(op, "initial_state", initial_state, ["S", *inner])
        pool, indices = _own_states(initial_state, indices, rows)
    if ring and pool.dim() == 4:
        require(
            num_state >= 1 and pool.shape[0] % num_state == 0,
            op,
            "num_state",
            f"{num_state} with initial_state of shape {list(pool.shape)}",
            "a divisor of its first dimension",
        )
        target = pool.unflatten(0, (-1, num_state))
    else:
        target = pool
        shape = "HV, V, K" if state_v_first else "HV, K, V"
        require(
            not ring or (pool.dim() == 5 and pool.shape[1] == num_state),
            op,
            "initial_state",
            f"of shape {list(pool.shape)}",
            f"[ids, {num_state}, {shape}] or [ids · {num_state}, {shape}]",
        )
    if cu_seqlens is not None:
        q, k, v, g, beta = q[0], k[0], v[0], g[0], beta[0]
    o = update(
        q,
        k,
        v,
        g,
        beta,
        target,
        state_indices=indices,
        history_lens=cache_seqlens_rb,
        num_accepted_tokens=num_accepted_tokens,
        cu_seqlens=cu_seqlens,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
        state_v_first=state_v_first,
    )
    return o if cu_seqlens is None else o[None], pool


def _own_states(initial_state: Tensor, indices: Tensor | None, rows: int) -> tuple[Tensor, Tensor | None]:
    """Return fp32 copies of the N states addressed, zero for PAD rows, and the indices into them."""
    if indices is None:
        return initial_state[:rows].to(torch.float32, copy=True), None
    live = indices >= 0
    states = initial_state.index_select(0, torch.where(live, indices, 0)).float()
    own = torch.arange(rows, device=indices.device)
    return torch.where(live[:, None, None, None], states, 0.0), torch.where(live, own, -1)
