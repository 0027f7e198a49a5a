"""Cases of delta rules over packed prompts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ...kernels.gated_delta_rule import reference as gdn
from ...kernels.kda import reference as kda
from ...targets import Model
from . import Case, launcher

# Few tokens, since a token and head costs the counting build tens of milliseconds.
_LENGTHS = (19, 13)
_LONG = (2048,)
# Beyond the lower bound a kernel may move this share of the tokens' bytes, q and k once more for each value head above
# all. States do not enlarge it, so that a prompt of any length stays below 1.6 times its lower bound.
_EXTRA = 0.6
# With as many heads of q and k as value heads, whole heads fit and nothing is read twice.
_LITTLE = 0.03


def _define_gdn(host_lengths: list[int], **arguments: Any) -> Any:
    return gdn.gated_delta_rule(**arguments)


def _define_kda(host_lengths: list[int], **arguments: Any) -> Any:
    return kda.kda(**arguments)


def _arguments(
    sizes: tuple[int, int, int, int], channels: bool, dtype: torch.dtype, lengths: tuple[int, ...]
) -> dict[str, Any]:
    """Return rows that go on or are fresh in turn; q, k and v are views of one projection, as in the models."""
    heads, value_heads, keys, values = sizes
    generator = torch.Generator().manual_seed(0)
    tokens, rows = sum(lengths), len(lengths)
    widths = [heads * keys, heads * keys, value_heads * values]
    q, k, v = torch.randn(tokens, sum(widths), generator=generator).to(dtype).split(widths, -1)
    first, second = torch.randn(2, tokens, value_heads, generator=generator)
    g = -torch.nn.functional.softplus(first)
    if channels:
        g = -5 * torch.randn(tokens, value_heads, keys, generator=generator).sigmoid()
    return {
        "q": q.unflatten(-1, (heads, keys)),
        "k": k.unflatten(-1, (heads, keys)),
        "v": v.unflatten(-1, (value_heads, values)),
        "g": g,
        "beta": second.sigmoid(),
        "state": torch.randn(rows + 1, value_heads, values, keys, generator=generator),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
        "state_indices": torch.arange(rows, 0, -1),
        "history_lens": 5 * (torch.arange(1, rows + 1, dtype=torch.int32) % 2),
        "scale": keys**-0.5,
        "use_qk_l2norm": True,
        "state_v_first": True,
        "pad_slot_id": -1,
        "host_lengths": list(lengths),
    }


def cases(model: Model, tp: int, dtype: torch.dtype) -> Iterator[Case]:
    """Return the prefill of a model's rule on one of `tp` ranks.

    With heads divided over ranks, states are cut in blocks to fill the cores and q and k are read for each: no bound.
    """
    channels = model.rule == "kda"
    operator, define = ("kda", _define_kda) if channels else ("gated_delta_rule", _define_gdn)
    sizes = model.heads // tp, model.value_heads // tp, model.key_dim, model.value_dim
    heads, value_heads, keys, values = sizes
    for lengths, counted in ((_LENGTHS, True), (_LONG, False)):
        tokens, rows = sum(lengths), len(lengths)
        state = value_heads * keys * values * 4
        out = tokens * value_heads * values * dtype.itemsize
        gates = tokens * value_heads * ((keys if channels else 1) + 1) * 4
        inputs = tokens * (2 * heads * keys + value_heads * values) * dtype.itemsize + gates
        # Only rows that go on read their state.
        read, written = inputs + (rows + 1) // 2 * state + 4 * (rows + 1) + (8 + 4) * rows, out + rows * state
        limit = 1 + (_EXTRA if value_heads > heads else _LITTLE) * (inputs + out) / (read + written)
        yield Case(
            operator,
            "prefill-" + "+".join(map(str, lengths)),
            "kda" if channels else "delta_rule",
            partial(_arguments, sizes, channels, dtype, lengths),
            launcher(operator),
            define,
            read_bytes=read,
            written_bytes=written,
            mutated=("state",),
            bytes_limit=limit if tp == 1 and counted else None,
            counted=counted,
        )
