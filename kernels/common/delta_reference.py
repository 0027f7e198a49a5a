"""The delta rules: the definition, one request and one token at a time, in fp64.

The gated delta rule has one decay for a head, KDA one for each key channel; all else is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

L2_EPS = 1e-6


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Advance one head by one token.

    S <- exp(g) S; u = beta (v - S^T k); S <- S + k u^T; o = S^T q (Yang et al., arXiv 2412.06464).

    Args:
        q: [K], scaled.
        k: [K].
        v: [V].
        g: log decay, a scalar, or [K] for one decay per key channel.
        beta: scalar.
        state: [K, V].

    Returns:
        (o [V], the state after the token [K, V]).
    """
    state = torch.exp(g).reshape(-1, 1) * state
    u = beta * (v - state.T @ k)
    state = state + torch.outer(k, u)
    return state.T @ q, state


def run_row(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    scale: float | None,
    use_qk_l2norm: bool,
    after: Callable[[int, Tensor], None],
) -> Tensor:
    """Run one request: q, k [T, H, K], v [T, HV, V], g [T, HV] or [T, HV, K], beta [T, HV], state [HV, K, V].

    `after(t, state)` is called with the state after each token. Returns o [T, HV, V]. All in fp64.
    """
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    if use_qk_l2norm:
        q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    heads = v.shape[1]
    group = heads // q.shape[1]
    o = torch.zeros_like(v)
    for t in range(q.shape[0]):
        new = []
        for h in range(heads):
            o[t, h], s = recurrence(q[t, h // group], k[t, h // group], v[t, h], g[t, h], beta[t, h], state[h])
            new.append(s)
        state = torch.stack(new)
        after(t, state)
    return o


def _is_pad(slot: int, pad_slot_id: int) -> bool:
    return slot < 0 or slot == pad_slot_id


def _load(entry: Tensor, history: int | None, v_first: bool) -> Tensor:
    state = entry.double().transpose(-1, -2) if v_first else entry.double()
    return torch.zeros_like(state) if history == 0 else state


def _store(entry: Tensor, state: Tensor, v_first: bool) -> None:
    entry.copy_(state.transpose(-1, -2) if v_first else state)


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    cu_seqlens: Tensor,
    state_indices: Tensor | None = None,
    history_lens: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    state_v_first: bool = True,
    pad_slot_id: int = -1,
) -> Tensor:
    """Definition of a delta rule over packed prompts; returns o in fp64, mutates `state`."""
    o = torch.zeros(v.shape, dtype=torch.float64)
    offsets = cu_seqlens.tolist()
    for row, (lo, hi) in enumerate(pairwise(offsets)):
        slot = row if state_indices is None else int(state_indices[row])
        history = None if history_lens is None else int(history_lens[row])
        if hi == lo or _is_pad(slot, pad_slot_id) or (history is not None and history < 0):
            continue
        source = target = state[slot]
        if state.dim() == 5 and history is not None:
            source, target = state[slot, history % state.shape[1]], state[slot, (history + hi - lo) % state.shape[1]]

        def keep_last(t: int, s: Tensor, last: int = hi - lo - 1, target: Tensor = target) -> None:
            if t == last:
                _store(target, s, state_v_first)

        part = slice(lo, hi)
        first = _load(source, history, state_v_first)
        o[part] = run_row(q[part], k[part], v[part], g[part], beta[part], first, scale, use_qk_l2norm, keep_last)
    return o


def update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    state_indices: Tensor | None = None,
    history_lens: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    state_v_first: bool = True,
    pad_slot_id: int = -1,
) -> Tensor:
    """Definition of a delta rule in a decode or verify step; returns o in fp64, mutates `state`."""
    if cu_seqlens is None:
        rows, steps = q.shape[:2]
        packed = [x.flatten(0, 1) for x in (q, k, v, g, beta)]
        offsets = [steps * i for i in range(rows + 1)]
    else:
        packed, offsets = [q, k, v, g, beta], cu_seqlens.tolist()
    o = torch.zeros(packed[2].shape, dtype=torch.float64)
    for row, (lo, hi) in enumerate(pairwise(offsets)):
        history = None if history_lens is None else int(history_lens[row])
        ids = [row] if state_indices is None else state_indices[row].reshape(-1).tolist()
        column, targets = 0, [ids[0]] * (hi - lo)
        if state_indices is not None and state_indices.dim() == 2:
            accepted = 1 if num_accepted_tokens is None else int(num_accepted_tokens[row])
            column, targets = min(max(accepted, 1), len(ids)) - 1, ids[: hi - lo]
        needed = [ids[column], *targets]
        if hi == lo or any(_is_pad(i, pad_slot_id) for i in needed) or (history is not None and history < 0):
            continue
        ring = state.dim() == 5
        source = state[ids[column]]
        if ring and history is not None:
            source = source[history % state.shape[1]]

        def store(t: int, s: Tensor, targets: list[int] = targets, history: int | None = history) -> None:
            entry = state[targets[t]]
            if entry.dim() == 4 and history is not None:
                entry = entry[(history + t + 1) % entry.shape[0]]
            _store(entry, s, state_v_first)

        part = slice(lo, hi)
        first = _load(source, history, state_v_first)
        pq, pk, pv, pg, pb = (x[part] for x in packed)
        o[part] = run_row(pq, pk, pv, pg, pb, first, scale, use_qk_l2norm, store)
    return o.view(v.shape)
