"""Cases of the decode and verify steps of delta rules, with gates given or computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ...kernels.gated_delta_rule import reference as gdn
from ...kernels.kda import reference as kda
from ...targets import Model
from . import Case, launcher

# A step reads q and k once for each block of value channels, and so a decay per channel; all else once.
_BYTES_LIMIT = 1.03
_DEFINITIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "gated_delta_rule_update": gdn.gated_delta_rule_update,
    "sigmoid_gating_delta_rule_update": gdn.sigmoid_gating_delta_rule_update,
    "kda_update": kda.kda_update,
}


class Sizes(NamedTuple):
    """What one rank has of a layer."""

    heads: int
    value_heads: int
    keys: int
    values: int


def _gates(operator: str, rows: int, steps: int, sizes: Sizes, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what an operator takes for decay and write strength."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    heads = sizes.value_heads
    beta = draw(rows, steps, heads)
    if operator == "kda_update":
        return {"g": -5 * draw(rows, steps, heads, sizes.keys).sigmoid(), "beta": beta.sigmoid()}
    decay = draw(rows, steps, heads)
    if operator == "gated_delta_rule_update":
        return {"g": -torch.nn.functional.softplus(decay), "beta": beta.sigmoid()}
    return {
        "a": decay.to(dtype),
        "b": beta.to(dtype),
        "neg_exp_A": -torch.rand(heads, generator=generator) * 8,
        "dt_bias": draw(heads).to(dtype),
    }


def _arguments(
    operator: str, rows: int, steps: int, ring: int | None, sizes: Sizes, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the arguments of a step: q, k and v are views of one projection, as in the models."""
    heads, value_heads, keys, values = sizes
    generator = torch.Generator().manual_seed(0)
    widths = [heads * keys, heads * keys, value_heads * values]
    q, k, v = torch.randn(rows, steps, sum(widths), generator=generator).to(dtype).split(widths, -1)
    entries = () if ring is None else (ring,)
    step = {
        "q": q.unflatten(-1, (heads, keys)),
        "k": k.unflatten(-1, (heads, keys)),
        "v": v.unflatten(-1, (value_heads, values)),
        **_gates(operator, rows, steps, sizes, dtype),
        "state": torch.randn(rows, *entries, value_heads, values, keys, generator=generator),
        "state_indices": torch.randperm(rows, generator=generator),
        "history_lens": torch.arange(rows, dtype=torch.int32) * 3 + 5,
        "num_accepted_tokens": None,
        "cu_seqlens": None,
        "scale": keys**-0.5,
        "use_qk_l2norm": True,
        "state_v_first": True,
        "pad_slot_id": -1,
    }
    if operator == "sigmoid_gating_delta_rule_update":
        step |= {"softplus_beta": 1.0, "softplus_threshold": 20.0}
    return step


def _step(operator: str, rows: int, steps: int, ring: int | None, sizes: Sizes, dtype: torch.dtype) -> Case:
    heads, value_heads, keys, values = sizes
    tokens, row = rows * steps, value_heads * keys * values * 4
    inputs = tokens * (2 * heads * keys + value_heads * values) * dtype.itemsize
    gates = sum(gate.nbytes for gate in _gates(operator, rows, steps, sizes, dtype).values())
    # A ring keeps the state after every token, a plain pool the last one.
    states = rows if ring is None else tokens
    phase = f"decode-{rows}" if steps == 1 else f"verify-{rows}x{steps}"
    return Case(
        operator,
        phase if ring is None else f"{phase}-ring",
        "kda" if operator == "kda_update" else "delta_rule",
        partial(_arguments, operator, rows, steps, ring, sizes, dtype),
        launcher(operator),
        _DEFINITIONS[operator],
        read_bytes=inputs + gates + rows * (row + 8 + 4),
        written_bytes=tokens * value_heads * values * dtype.itemsize + states * row,
        mutated=("state",),
        bytes_limit=_BYTES_LIMIT,
        blocks_limit=_BYTES_LIMIT,
    )


def cases(model: Model, tp: int, dtype: torch.dtype) -> Iterator[Case]:
    """Return the steps of a model's rule on one of `tp` ranks."""
    sizes = Sizes(model.heads // tp, model.value_heads // tp, model.key_dim, model.value_dim)
    entries = 1 + model.drafts
    if model.rule == "kda":
        for rows in (1, 32):
            yield _step("kda_update", rows, 1, None, sizes, dtype)
        yield _step("kda_update", 8, 1, entries, sizes, dtype)
        yield _step("kda_update", 8, entries, entries, sizes, dtype)
        return
    for operator, rows in (("gated_delta_rule_update", 8), ("sigmoid_gating_delta_rule_update", 32)):
        yield _step(operator, rows, 1, None, sizes, dtype)
        yield _step(operator, 8, 1, entries, sizes, dtype)
        yield _step(operator, 8, entries, entries, sizes, dtype)
