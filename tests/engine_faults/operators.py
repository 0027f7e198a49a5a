"""Faults of the batched operators, as the engine uses them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from tests.engine_faults.plant import instead

# Patched by attribute, so their types do not apply.
conv: Any = importlib.import_module("dlinfer_ext.kernels.causal_conv1d.eager")
rule: Any = importlib.import_module("dlinfer_ext.kernels.gated_delta_rule.eager")
chunk_eager: Any = importlib.import_module("dlinfer_ext.kernels.gated_delta_rule.chunk_eager")
chunks: Any = importlib.import_module("dlinfer_ext.kernels.common.delta_chunks")
steps: Any = importlib.import_module("dlinfer_ext.kernels.common.delta_steps")


def positions_before_the_prompt_taken_modulo() -> None:
    """Read the history of a young row from whatever its ring holds (dlinfer `causal_conv1d_fn`, read offsets)."""

    def moves(
        original: Any, live: Tensor, source: Tensor, target: Tensor, lengths: Tensor, history: Tensor, width: int,
        columns: int, *rest: Any, **more: Any,
    ) -> Any:  # fmt: skip
        found = original(live, source, target, lengths, history, width, columns, *rest, **more)
        read = (history[:, None] + torch.arange(1 - width, 0)) % columns
        return found._replace(read_columns=torch.where(live[:, None], read, -1))

    instead(conv, "ring_moves", moves)


def recurrent_state_not_zeroed_on_reuse() -> None:
    """Let a fresh prompt go on from the state that its slot was left with."""

    def places(original: Any, *args: Any) -> Any:
        read, write, _, live = original(*args)
        return read, write, None, live

    instead(chunks, "state_places", places)


def one_token_prompt_taken_for_decode() -> None:
    """Decide by the number of tokens that a row decodes, so that a prompt of one token starts from an old state."""

    def places(original: Any, pool: Any, cu_seqlens: Tensor, *rest: Any) -> Any:
        read, write, fresh, live = original(pool, cu_seqlens, *rest)
        return read, write, None if fresh is None else fresh & (cu_seqlens.diff() > 1), live

    instead(chunks, "state_places", places)


def fresh_state_reset_by_a_gate() -> None:
    """Reset a fresh row by a gate of -1e6 on its first token, and take decays from running sums (LMDeploy 0.18).

    The pools hold NaN at the start, as memory may: right code gives the same text on them, which is a control.
    """
    from tests.engine_faults.plant import pools_full_of_nan

    def prefill(original: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, *rest: Any) -> Tensor:
        cu_seqlens, history = rest[2], rest[4]
        first = cu_seqlens[:-1][(cu_seqlens.diff() > 0) & (history == 0)].long()
        g = g.clone()
        g[first] = -1e6
        out: Tensor = original(q, k, v, g, *rest)
        return out

    def places(original: Any, *args: Any) -> Any:
        read, write, _, live = original(*args)
        return read, write, None, live

    def decay(_: Any, g: Tensor) -> Tensor:
        total = g.cumsum(-1)
        return (total[..., :, None] - total[..., None, :]).tril().exp().tril()

    pools_full_of_nan()
    instead(rule, "gated_delta_rule", prefill)
    instead(chunks, "state_places", places)
    instead(chunk_eager, "segment_decay", decay)


def recurrent_ring_one_entry_short() -> None:
    """Count the ring of states as one per draft, without the one for the token before them."""

    def slot(original: Any, history: Tensor, offset: Any, ring: int) -> Tensor:
        found: Tensor = original(history, offset, ring - 1)
        return found

    instead(chunks, "ring_slot", slot)
    instead(steps, "ring_slot", slot)


def convolution_ring_as_long_as_the_layers_are_many() -> None:
    """Take the number of delta layers for the length of a convolution's ring (LMDeploy 0.18 `update_step_context`)."""

    def moves(original: Any, *args: Any, **more: Any) -> Any:
        layers = 3
        return original(*args[:6], layers, *args[7:], **more)

    instead(conv, "ring_moves", moves)


def convolution_history_one_column_late() -> None:
    """Read a ring's history one column further on (sglang issue 25587: reader and writer anchor it differently)."""

    def moves(original: Any, *args: Any, **more: Any) -> Any:
        found, columns = original(*args, **more), args[6]
        return found._replace(read_columns=torch.where(found.read_columns >= 0, (found.read_columns + 1) % columns, -1))

    instead(conv, "ring_moves", moves)


FAULTS: Final[tuple[Callable[[], None], ...]] = (
    positions_before_the_prompt_taken_modulo,
    recurrent_state_not_zeroed_on_reuse,
    one_token_prompt_taken_for_decode,
    fresh_state_reset_by_a_gate,
    recurrent_ring_one_entry_short,
    convolution_ring_as_long_as_the_layers_are_many,
    convolution_history_one_column_late,
)
