"""Known faults, put back by name: a suite that stays green with one of them planted proves nothing.

`plant(name)` patches the batched operators in this process. As a pytest plugin (`-p tests.faults`) this module plants
the fault named by the variable PLANT before any test is collected.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

# Patched by attribute, so their types do not apply.
conv: Any = importlib.import_module("dlinfer_ext.kernels.causal_conv1d.eager")
rule: Any = importlib.import_module("dlinfer_ext.kernels.gated_delta_rule.eager")
chunks: Any = importlib.import_module("dlinfer_ext.kernels.common.delta_chunks")
steps: Any = importlib.import_module("dlinfer_ext.kernels.common.delta_steps")


def ring_gather_from_packed_batch() -> None:
    """Store a row's last inputs by gathering from the packed batch, clamped at 0 only (dlinfer `causal_conv1d_fn`)."""
    original = conv.Stores.build.__func__

    def build(cls: Any, cu_seqlens: Tensor, moves: Any, flat: Any, num_tokens: int) -> Any:
        stores = original(cls, cu_seqlens, moves, flat, num_tokens)
        history = moves.read_columns.numel()
        packed = history + torch.arange(stores.values.shape[0])
        return stores._replace(values=torch.where(stores.values < history, packed, stores.values))

    def ring_moves(*args: Any, keep_history: bool) -> Any:
        return moves(*args, keep_history=True)

    moves = conv.ring_moves
    conv.Stores.build = classmethod(build)
    conv.ring_moves = ring_moves


def recurrent_ring_slot_one_behind() -> None:
    """Write the state after token t where the state before it lives."""
    original: Callable[..., Tensor] = steps.ring_slot

    def ring_slot(history: Tensor, offset: int | Tensor, ring: int) -> Tensor:
        return original(history, offset - 1 if isinstance(offset, Tensor) else offset, ring)

    steps.ring_slot = ring_slot


def accepted_count_taken_as_row_count() -> None:
    """Convolve as many rows of this step as the last step accepted (the torch path of vllm-ascend PR 15885)."""
    original: Callable[..., Tensor] = conv.causal_conv1d_update

    def update(x: Tensor, *args: Any) -> Tensor:
        out = original(x, *args)
        accepted = args[5]
        if accepted is not None and x.dim() == 3:
            rest = torch.arange(x.shape[1])[None, :, None] >= accepted[:, None, None]
            out = torch.where(rest, x, out)
        return out

    conv.causal_conv1d_update = update


def rewind_ignores_accepted_count() -> None:
    """Read the history of a verify step from column 0 whatever was accepted."""
    original = conv.rewind_moves

    def moves(live: Tensor, source: Tensor, target: Tensor, lengths: Tensor, accepted: Tensor, *rest: int) -> Any:
        return original(live, source, target, lengths, torch.ones_like(accepted), *rest)

    conv.rewind_moves = moves


def history_not_zeroed_on_reuse() -> None:
    """Read what a reused slot holds as the history of a fresh row."""

    def read_history(state: Tensor, reads: Any) -> Tensor:
        return state.index_select(0, reads.places)

    def row_mask(keep: Tensor, dtype: torch.dtype) -> Tensor:
        return original(torch.ones_like(keep), dtype)

    original: Callable[..., Tensor] = chunks.row_mask
    conv.read_history = read_history
    chunks.row_mask = steps.row_mask = row_mask


def state_stored_transposed() -> None:
    """Prefill stores [K, V] where decode reads [V, K] (hidden by K = V)."""
    original: Callable[..., Tensor] = rule.gated_delta_rule

    def prefill(*args: Any) -> Tensor:
        flags = [i for i, a in enumerate(args) if isinstance(a, bool)]
        flipped = list(args)
        flipped[flags[-1]] = not flipped[flags[-1]]
        return original(*flipped)

    rule.gated_delta_rule = prefill


def pad_row_written() -> None:
    """Take slot -1 for the last slot."""
    run: Callable[..., Tensor] = conv.run

    def rows_with_tokens(state_indices: Tensor, cu_seqlens: Tensor, pad_slot_id: int) -> Tensor:
        return cu_seqlens[1:] > cu_seqlens[:-1]

    def faulty(
        x: Tensor, weight: Tensor, bias: Any, pool: Any, cu_seqlens: Tensor, moves: Any, activation: Any
    ) -> Tensor:
        if pool is not None and pool.shape[0]:
            slots = {k: getattr(moves, k).remainder(pool.shape[0]) for k in ("read_slots", "write_slots")}
            moves = moves._replace(**slots)
        return run(x, weight, bias, pool, cu_seqlens, moves, activation)

    conv.live_rows = rows_with_tokens
    conv.run = faulty


def taps_in_reverse_order() -> None:
    """Pair the newest weight with the oldest input."""
    run: Callable[..., Tensor] = conv.run

    def faulty(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        return run(x, weight.flip(0), *rest)

    conv.run = faulty


def operands_through_fp16() -> None:
    """Cast inputs to fp16 on the way (dlinfer's and vllm-ascend's update kernels)."""
    run: Callable[..., Tensor] = conv.run

    def faulty(x: Tensor, *rest: Any) -> Tensor:
        return run(x.half().to(x.dtype), *rest)

    conv.run = faulty


FAULTS: Final[dict[str, Callable[[], None]]] = {
    f.__name__: f
    for f in (
        ring_gather_from_packed_batch,
        recurrent_ring_slot_one_behind,
        accepted_count_taken_as_row_count,
        rewind_ignores_accepted_count,
        history_not_zeroed_on_reuse,
        state_stored_transposed,
        pad_row_written,
        taps_in_reverse_order,
        operands_through_fp16,
    )
}


def plant(name: str) -> None:
    """Put a fault back, in this process, for good."""
    FAULTS[name]()


def pytest_configure() -> None:
    if "PLANT" in os.environ:
        plant(os.environ["PLANT"])
