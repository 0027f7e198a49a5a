"""Cases of the gates of delta rules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ...kernels.gated_delta_rule import reference as gdn
from ...kernels.kda import reference as kda
from ...targets import Model
from . import Case, launcher

_PREFILL_TOKENS = 2048
_LOWER_BOUND = -5.0


def _head_arguments(tokens: int, heads: int, dtype: torch.dtype) -> dict[str, Any]:
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


def _heads(tokens: int, phase: str, heads: int, dtype: torch.dtype) -> Case:
    return Case(
        "gated_delta_gate",
        phase,
        "delta_rule",
        partial(_head_arguments, tokens, heads, dtype),
        launcher("gated_delta_gate"),
        gdn.gated_delta_gate,
        read_bytes=2 * tokens * heads * dtype.itemsize + heads * (4 + dtype.itemsize),
        written_bytes=2 * tokens * heads * 4,
        bytes_limit=1.1,
    )


def _channel_arguments(tokens: int, heads: int, keys: int, bound: float | None, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(tokens, heads, keys, generator=generator).to(dtype),
        "A_log": torch.randn(heads, generator=generator),
        "dt_bias": torch.randn(heads, keys, generator=generator),
        "lower_bound": bound,
    }


def _channels(tokens: int, phase: str, sizes: tuple[int, int], bound: float | None, dtype: torch.dtype) -> Case:
    heads, keys = sizes
    elements = tokens * heads * keys
    return Case(
        "kda_gate",
        phase if bound is not None else f"{phase}-softplus",
        "kda",
        partial(_channel_arguments, tokens, heads, keys, bound, dtype),
        launcher("kda_gate"),
        kda.kda_gate,
        read_bytes=elements * dtype.itemsize + heads * (1 + keys) * 4,
        written_bytes=elements * 4,
        # The biases are read once for each block of tokens.
        bytes_limit=1.03,
        blocks_limit=1.03,
        counted=tokens < _PREFILL_TOKENS,
    )


def cases(model: Model, tp: int, dtype: torch.dtype) -> Iterator[Case]:
    """Return the gates of a model's rule on one of `tp` ranks: of the heads, or of each key channel."""
    heads = model.value_heads // tp
    for tokens, phase in ((32, "decode-32"), (_PREFILL_TOKENS, f"prefill-{_PREFILL_TOKENS}")):
        if model.rule == "gdn":
            yield _heads(tokens, phase, heads, dtype)
        else:
            yield _channels(tokens, phase, (heads, model.key_dim), _LOWER_BOUND, dtype)
            # The other published gate, which this model does not have.
            yield _channels(tokens, phase, (heads, model.key_dim), None, dtype)
