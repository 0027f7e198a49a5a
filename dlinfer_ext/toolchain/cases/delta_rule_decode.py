"""Cases of the gated delta rule's decode and verify steps, with gates given or computed, and of its gates."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...kernels.gated_delta_rule import reference
from ...targets import Model
from . import Case, launcher

# A step reads q and k once for each block of value channels; all else once.
_BYTES_LIMIT = 1.03
_PREFILL_TOKENS = 2048


def _arguments(
    rows: int, steps: int, ring: int | None, fused: bool, sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> dict[str, Any]:
    """Return the arguments of a step: q, k and v are views of one projection, as in the models."""
    heads, value_heads, keys, values = sizes
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    widths = [heads * keys, heads * keys, value_heads * values]
    q, k, v = draw(rows, steps, sum(widths)).to(dtype).split(widths, -1)
    first, second = draw(rows, steps, value_heads), draw(rows, steps, value_heads)
    gates: dict[str, Tensor]
    if fused:
        gates = {
            "a": first.to(dtype),
            "b": second.to(dtype),
            "neg_exp_A": -torch.rand(value_heads, generator=generator) * 8,
            "dt_bias": draw(value_heads).to(dtype),
        }
    else:
        gates = {"g": -torch.nn.functional.softplus(first), "beta": second.sigmoid()}
    entries = () if ring is None else (ring,)
    step = {
        "q": q.unflatten(-1, (heads, keys)),
        "k": k.unflatten(-1, (heads, keys)),
        "v": v.unflatten(-1, (value_heads, values)),
        **gates,
        "state": draw(rows, *entries, value_heads, values, keys),
        "state_indices": torch.randperm(rows, generator=generator),
        "history_lens": torch.arange(rows, dtype=torch.int32) * 3 + 5,
        "num_accepted_tokens": None,
        "cu_seqlens": None,
        "scale": keys**-0.5,
        "use_qk_l2norm": True,
        "state_v_first": True,
        "pad_slot_id": -1,
    }
    return {**step, "softplus_beta": 1.0, "softplus_threshold": 20.0} if fused else step


def _step(
    rows: int, steps: int, ring: int | None, fused: bool, sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> Case:
    heads, value_heads, keys, values = sizes
    operator = "sigmoid_gating_delta_rule_update" if fused else "gated_delta_rule_update"
    tokens, row = rows * steps, value_heads * keys * values * 4
    inputs = tokens * (2 * heads * keys + value_heads * values) * dtype.itemsize
    gates = tokens * 2 * value_heads * 4
    if fused:
        gates = tokens * 2 * value_heads * dtype.itemsize + value_heads * (4 + dtype.itemsize)
    # A ring keeps the state after every token, a plain pool the last one.
    states = rows if ring is None else tokens
    phase = f"decode-{rows}" if steps == 1 else f"verify-{rows}x{steps}"
    return Case(
        operator,
        phase if ring is None else f"{phase}-ring",
        "delta_rule",
        partial(_arguments, rows, steps, ring, fused, sizes, dtype),
        launcher(operator),
        getattr(reference, operator),
        read_bytes=inputs + gates + rows * (row + 8 + 4),
        written_bytes=tokens * value_heads * values * dtype.itemsize + states * row,
        mutated=("state",),
        bytes_limit=_BYTES_LIMIT,
        blocks_limit=_BYTES_LIMIT,
    )


def _gate_arguments(tokens: int, heads: int, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, tokens, heads, generator=generator).to(dtype)
    return {
        "a": a,
        "b": b,
        "neg_exp_A": -torch.rand(heads, generator=generator) * 8,
        "dt_bias": torch.randn(heads, generator=generator).to(dtype),
        "softplus_beta": 1.0,
        "softplus_threshold": 20.0,
    }


def _gate(tokens: int, phase: str, heads: int, dtype: torch.dtype) -> Case:
    return Case(
        "gated_delta_gate",
        phase,
        "delta_rule",
        partial(_gate_arguments, tokens, heads, dtype),
        launcher("gated_delta_gate"),
        reference.gated_delta_gate,
        read_bytes=2 * tokens * heads * dtype.itemsize + heads * (4 + dtype.itemsize),
        written_bytes=2 * tokens * heads * 4,
        bytes_limit=1.1,
    )


def cases(model: Model, tp: int, dtype: torch.dtype) -> Iterator[Case]:
    """Return the steps and gates of a gated delta rule model on one of `tp` ranks."""
    sizes = (model.heads // tp, model.value_heads // tp, model.key_dim, model.value_dim)
    entries = 1 + model.drafts
    for fused in (False, True):
        yield _step(32 if fused else 8, 1, None, fused, sizes, dtype)
        yield _step(8, 1, entries, fused, sizes, dtype)
        yield _step(8, entries, entries, fused, sizes, dtype)
    yield _gate(32, "decode-32", model.value_heads // tp, dtype)
    yield _gate(_PREFILL_TOKENS, f"prefill-{_PREFILL_TOKENS}", model.value_heads // tp, dtype)
