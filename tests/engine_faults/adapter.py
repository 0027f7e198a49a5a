"""Faults of an adapter: metadata of a step, and what its operators are handed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

from tests.engine_faults.plant import instead


def _adapter() -> Any:
    return importlib.import_module("dlinfer_ext.framework.lmdeploy.gated_delta")


def _after_metadata(change: Callable[[Any], None]) -> None:
    """Let `change` alter the metadata of every step."""

    def init(original: Any, self: Any, *args: Any) -> None:
        original(self, *args)
        change(self)

    instead(_adapter().GatedDeltaMetadata, "__init__", init)


def verify_rows_left_unconvolved() -> None:
    """Convolve as many rows of a verify step as the step before accepted (vllm-ascend PR 15885)."""
    seen: dict[int, int] = {}

    def count(meta: Any) -> None:
        rows = list(zip(meta.state_indices.tolist(), meta.history_lens.tolist(), strict=True))
        meta.accepted_before = torch.tensor([max(1, n - seen.get(slot, n)) for slot, n in rows])
        seen.update(rows)

    def forward(original: Any, self: Any, *args: Any, **more: Any) -> Tensor:
        out: Tensor = original(self, *args, **more)
        x, meta = args[0], args[4]
        if meta.is_decoding:
            rows, accepted = meta.state_indices.numel(), meta.accepted_before
            left = (torch.arange(x.size(1) // rows) >= accepted[:, None]).flatten()
            out = torch.where(left[None, :, None], x, out)
        return out

    _after_metadata(count)
    instead(_adapter().CausalConv1d, "forward", forward)


def verify_step_run_as_prefill() -> None:
    """Take a verify step for prefill, which keeps the last state only (on Ascend it has is_decoding False)."""

    def change(meta: Any) -> None:
        if meta.num_spec_tokens:
            meta.is_decoding = False

    _after_metadata(change)


def chunk_drops_convolution_history() -> None:
    """Convolve a later chunk as if nothing came before it (LMDeploy's Dao variant: sequence ids win over states)."""
    conv: Any = importlib.import_module("dlinfer_ext.kernels.causal_conv1d.eager")
    prefill: list[bool] = []

    def forward(original: Any, self: Any, *args: Any, **more: Any) -> Tensor:
        prefill.append(not args[4].is_decoding)
        out: Tensor = original(self, *args, **more)
        prefill.pop()
        return out

    def moves(original: Any, *args: Any, **more: Any) -> Any:
        found = original(*args, **more)
        return found._replace(read_columns=torch.full_like(found.read_columns, -1)) if prefill[-1] else found

    instead(_adapter().CausalConv1d, "forward", forward)
    for layout in ("ring_moves", "linear_moves"):
        instead(conv, layout, moves)


def chunk_starts_from_a_zero_state() -> None:
    """Start every chunk of a prompt from a zero state (qwen38-27b-rtx3090 PR 43: off whenever q > 1)."""
    chunks: Any = importlib.import_module("dlinfer_ext.kernels.common.delta_chunks")

    def places(original: Any, *args: Any) -> Any:
        read, write, _, live = original(*args)
        return read, write, live, live

    instead(chunks, "state_places", places)


def ring_lengths_of_prefill_and_verify_differ() -> None:
    """Address a convolution's ring modulo one column fewer in a verify step than in prefill (sglang issue 25587)."""

    def forward(original: Any, self: Any, *args: Any, **more: Any) -> Tensor:
        *inputs, state, meta = args
        out: Tensor = original(self, *inputs, state[:, :-1] if meta.is_decoding else state, meta, **more)
        return out

    instead(_adapter().CausalConv1d, "forward", forward)


def activation_left_out_in_verify() -> None:
    """Leave the convolution's SiLU out in decode and verify steps."""

    def forward(original: Any, self: Any, *args: Any, activation: Any) -> Tensor:
        out: Tensor = original(self, *args, activation=None if args[4].is_decoding else activation)
        return out

    instead(_adapter().CausalConv1d, "forward", forward)


def qk_norm_left_out_in_verify() -> None:
    """Normalise q and k in prefill only."""

    def forward(original: Any, self: Any, *args: Any) -> Tensor:
        *rest, meta, ratio, norm = args
        out: Tensor = original(self, *rest, meta, ratio, norm and not meta.is_decoding)
        return out

    instead(_adapter().GatedDeltaRule, "forward", forward)


def _with_rule_inputs(change: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]) -> None:
    """Let `change` alter (query, key, value, b, a) of the rule."""

    def forward(original: Any, self: Any, *args: Any) -> Tensor:
        out: Tensor = original(self, *change(*args[:5]), *args[5:])
        return out

    instead(_adapter().GatedDeltaRule, "forward", forward)


def gates_swapped() -> None:
    """Take a for b and b for a."""
    _with_rule_inputs(lambda q, k, v, b, a: (q, k, v, a, b))


def gates_read_as_dense() -> None:
    """Read the views that a split left as if their rows were dense (sglang PRs 22312 and 12335)."""

    def dense(x: Tensor) -> Tensor:
        strides = (x[0].numel(), x.size(-1), 1)
        return x.as_strided(x.shape, strides, x.storage_offset())

    _with_rule_inputs(lambda q, k, v, b, a: (q, k, v, dense(b), dense(a)))


def value_heads_share_keys_in_turn() -> None:
    """Give value head h the key head h modulo H instead of h divided by the ratio."""

    def change(q: Tensor, k: Tensor, v: Tensor, b: Tensor, a: Tensor) -> tuple[Tensor, ...]:
        ratio = v.size(-2) // q.size(-2)
        return q.repeat(1, 1, ratio, 1), k.repeat(1, 1, ratio, 1), v, b, a

    _with_rule_inputs(change)


def rows_one_token_short() -> None:
    """Let each row of a packed prompt batch end one token early, so that the next one begins with it."""

    def change(meta: Any) -> None:
        if not meta.is_decoding and meta.cu_seqlens.numel() > 2:
            ends = meta.cu_seqlens.clone()
            ends[1:-1] -= 1
            meta.cu_seqlens = ends
            meta.host_lengths = tuple(b - a for a, b in pairwise(ends.tolist()))

    _after_metadata(change)


def multiple_of_the_ring_taken_for_fresh() -> None:
    """Look at the position in the ring, not in the text, to see whether a row has a history."""

    def change(meta: Any) -> None:
        if meta.is_decoding and meta.num_spec_tokens:
            meta.history_lens = meta.history_lens % (meta.num_spec_tokens + 1)

    _after_metadata(change)


def slots_in_the_order_of_the_step_before() -> None:
    """Keep the table of slots when a request leaves the batch and others move up (vLLM PRs 49757 and 37728)."""
    last: list[Tensor] = []

    def change(meta: Any) -> None:
        if not meta.is_decoding:
            return
        now = meta.state_indices
        if last and now.numel() < last[0].numel() and set(now.tolist()) <= set(last[0].tolist()):
            meta.state_indices = last[0][: now.numel()]
        last[:] = [now]

    _after_metadata(change)


def two_slots_for_one() -> None:
    """Address slots by half their distance, so that two requests share a state (vLLM PR 35275: a wrapped product)."""

    def change(meta: Any) -> None:
        meta.state_indices = torch.where(meta.state_indices > 0, (meta.state_indices + 1) // 2, meta.state_indices)

    _after_metadata(change)


def padded_rows_in_a_live_slot() -> None:
    """Let the rows that pad a step write to the slot of a request (vllm-ascend PR 7506, vLLM PR 37728)."""

    def change(meta: Any) -> None:
        meta.state_indices = torch.where(meta.state_indices < 0, meta.state_indices[0], meta.state_indices)

    _after_metadata(change)


FAULTS: Final[tuple[Callable[[], None], ...]] = (
    verify_rows_left_unconvolved,
    verify_step_run_as_prefill,
    chunk_drops_convolution_history,
    chunk_starts_from_a_zero_state,
    ring_lengths_of_prefill_and_verify_differ,
    activation_left_out_in_verify,
    qk_norm_left_out_in_verify,
    gates_swapped,
    gates_read_as_dense,
    value_heads_share_keys_in_turn,
    rows_one_token_short,
    multiple_of_the_ring_taken_for_fresh,
    slots_in_the_order_of_the_step_before,
    two_slots_for_one,
    padded_rows_in_a_live_slot,
)
