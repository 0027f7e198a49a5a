"""Operators of an engine step as loops over its requests: what `bench engine` puts in the place of ours.

Each request is taken from the packed batch with sizes, slots and histories that the host reads, and is given to the
public expressions: `F.conv1d` for the convolution, transformers' PyTorch forms for the delta rules. States are read
from and written to the same pools, so that the engine gives the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .bench_cases import delta_rule, kda

Form = Callable[..., Any]


def _rows(cu_seqlens: Tensor, slots: Tensor, histories: Tensor) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first token, end, slot, history) of every request that is not padded; reads the host thrice."""
    for (lo, hi), slot, past in zip(pairwise(cu_seqlens.tolist()), slots.tolist(), histories.tolist(), strict=True):
        if slot >= 0 and hi > lo:
            yield lo, hi, slot, past


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    cu_seqlens: Tensor,
    state_indices: Tensor,
    history_lens: Tensor,
    layout: str,
    activation: str | None,
    pad_slot_id: int,
    max_query_len: int | None,
) -> Tensor:
    """Convolve packed requests, x [T, C], weight [W, C], conv_state [S, L, C], which is mutated; returns [T, C]."""
    out, width, columns = torch.zeros_like(x), weight.shape[0], conv_state.shape[1]
    kernel = weight.t()[:, None].to(x.dtype)
    for lo, hi, slot, past in _rows(cu_seqlens, state_indices, history_lens):
        pool = conv_state[slot]
        if layout == "ring":
            window = pool[[(past + i) % columns for i in range(1 - width, 0)]]
            window[: max(0, width - 1 - past)] = 0
        else:
            window = pool[: width - 1] if past else torch.zeros_like(pool[: width - 1])
        full = torch.cat([window.to(x.dtype), x[lo:hi]])
        found = F.conv1d(full.t()[None], kernel, bias, groups=x.shape[1])[0].t()
        out[lo:hi] = found if activation is None else F.silu(found)
        if layout == "ring":
            for t in range(max(lo, hi - columns), hi):
                pool[(past + t - lo) % columns] = x[t]
        else:
            pool[: width - 1] = full[1 - width :]
    return out


def _place(state: Tensor, slot: int, tokens: int) -> Tensor:
    """Return where the state of a request after so many tokens is kept: in a ring of them, or in its slot."""
    return state[slot] if state.dim() == 4 else state[slot, tokens % state.shape[1]]


def _rule(form: Form) -> Form:
    """Return a rule over packed prompts of transformers' form for one prompt; state [S, (R,) HV, V, K]."""

    def rule(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor,
        cu_seqlens: Tensor,
        state_indices: Tensor,
        history_lens: Tensor,
        scale: float,
        use_qk_l2norm: bool,
        state_v_first: bool,
        pad_slot_id: int,
        host_lengths: Sequence[int] | None,
    ) -> Tensor:
        out = torch.zeros_like(v)
        for lo, hi, slot, past in _rows(cu_seqlens, state_indices, history_lens):
            before = _place(state, slot, past).transpose(-1, -2)[None] if past else None
            o, after = form(
                *(x[None, lo:hi] for x in (q, k, v, g, beta)),
                initial_state=before,
                output_final_state=True,
                use_qk_l2norm_in_kernel=use_qk_l2norm,
            )
            out[lo:hi] = o[0]
            _place(state, slot, past + hi - lo).copy_(after[0].transpose(-1, -2))
        return out

    return rule


def _update(form: Form) -> Form:
    """Return a decode or verify step of transformers' form for one step: every token of every request for itself."""

    def update(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor,
        state_indices: Tensor,
        history_lens: Tensor,
        num_accepted_tokens: Tensor | None,
        cu_seqlens: Tensor | None,
        scale: float,
        use_qk_l2norm: bool,
        state_v_first: bool,
        pad_slot_id: int,
    ) -> Tensor:
        out = torch.zeros_like(v)
        for row, (slot, past) in enumerate(zip(state_indices.tolist(), history_lens.tolist(), strict=True)):
            for t in range(q.shape[1]) if slot >= 0 else ():
                o, after = form(
                    *(x[row : row + 1, t : t + 1] for x in (q, k, v, g, beta)),
                    initial_state=_place(state, slot, past + t).transpose(-1, -2)[None],
                    output_final_state=True,
                    use_qk_l2norm_in_kernel=use_qk_l2norm,
                )
                out[row, t] = o[0, 0]
                _place(state, slot, past + t + 1).copy_(after[0].transpose(-1, -2))
        return out

    return update


def _gating_update(update: Form) -> Form:
    """Return `update` with the gates of Gated DeltaNet made from a and b [N, q, HV]."""

    def gating(
        q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, neg_exp_A: Tensor, dt_bias: Tensor, *rest: Any
    ) -> Tensor:
        *step, softplus_beta, softplus_threshold = rest
        g = neg_exp_A.float() * F.softplus(a.float() + dt_bias.float(), softplus_beta, softplus_threshold)
        out: Tensor = update(q, k, v, g, b.float().sigmoid(), *step)
        return out

    return gating


def forms() -> dict[str, Form]:
    """Return the loop of each operator that has one, with the arguments of the operator's schema."""
    prompt, step = delta_rule.RULE.public()
    kda_prompt, kda_step = kda.RULE.public()
    return {
        "causal_conv1d": causal_conv1d,
        "gated_delta_rule": _rule(prompt),
        "gated_delta_rule_update": _update(step),
        "sigmoid_gating_delta_rule_update": _gating_update(_update(step)),
        "kda": _rule(kda_prompt),
        "kda_update": _update(kda_step),
    }
