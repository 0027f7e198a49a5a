"""Faults of GLM-5.3-Flash: its blocks, the indexer's caches, and what its draft layer is fed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from tests.engine_faults.plant import instead

MODEL: Final = "dlinfer_ext.framework.lmdeploy.models.glm5_next"
ops: Any = importlib.import_module("dlinfer_ext.ops")


def _part(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"{MODEL}.{module}"), name)


def swiglu_not_clamped() -> None:
    """Leave the clamp out of every MLP and expert (LMDeploy's mixture of experts ignores the activation)."""

    def unit(original: Any, x: Tensor, limit: float) -> Tensor:
        out: Tensor = original(x, 1e30)
        return out

    def experts(original: Any, *args: Any, limit: float, **more: Any) -> Tensor:
        out: Tensor = original(*args, limit=1e30, **more)
        return out

    instead(ops, "clamped_silu_and_mul", unit)
    instead(ops, "clamped_moe", experts)


def kda_state_a_hundredth_too_small() -> None:
    """Let the recurrent states decay by another hundredth in each step."""

    def decay(original: Any, *args: Any, **more: Any) -> Tensor:
        out: Tensor = original(*args, **more)
        args[5].mul_(0.99)
        return out

    for rule in ("kda", "kda_update"):
        instead(ops, rule, decay)


def kda_state_of_a_prompt_transposed() -> None:
    """Leave keys and values of a prompt's states in the other order; both have one width in this model."""

    def prefill(original: Any, *args: Any, **more: Any) -> Tensor:
        out: Tensor = original(*args, **more)
        state, slots = args[5], more["state_indices"]
        state[slots] = state[slots].transpose(-1, -2)
        return out

    instead(ops, "kda", prefill)


def kda_chunk_drops_convolution_history() -> None:
    """Convolve a later chunk of a prompt as if nothing came before it."""
    conv: Any = importlib.import_module("dlinfer_ext.kernels.causal_conv1d.eager")
    prefill: list[bool] = []

    def forward(original: Any, self: Any, x: Tensor, caches: Any, meta: Any) -> Tensor:
        prefill.append(not meta.is_decoding)
        out: Tensor = original(self, x, caches, meta)
        prefill.pop()
        return out

    def moves(original: Any, *args: Any, **more: Any) -> Any:
        found = original(*args, **more)
        return found._replace(read_columns=torch.full_like(found.read_columns, -1)) if prefill[-1] else found

    instead(_part("kda", "KimiDeltaAttention"), "forward", forward)
    for layout in ("ring_moves", "linear_moves"):
        instead(conv, layout, moves)


def streams_mixed_by_the_transpose() -> None:
    """Mix the residual streams by the matrix as it lies, rows to rows."""

    def post(original: Any, x: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        out: Tensor = original(x, streams, post, comb.transpose(-1, -2))
        return out

    instead(ops, "hyper_connection_post", post)


def open_pool_forgotten() -> None:
    """Lose the raw keys of the open pool between steps."""

    def update(original: Any, *args: Any, **more: Any) -> None:
        original(*args, **more)
        args[4].zero_()

    instead(ops, "kpool_update", update)


def selection_ignored() -> None:
    """Attend to every token, whatever the indexer chose."""

    def forward(original: Any, *args: Any) -> None:
        original(*args)

    instead(_part("indexer", "KPoolIndexer"), "forward", forward)


def tail_without_room_for_drafts() -> None:
    """Give the open pool's ring one entry for each of its tokens and none for the drafts."""

    def requests(original: Any, self: Any, context: Any) -> list[Any]:
        drafts, self.drafts = self.drafts, 0
        found: list[Any] = original(self, context)
        self.drafts = drafts
        return found

    instead(_part("indexer", "KPoolIndexer"), "get_block_cache_requests", requests)


def tail_left_behind_by_a_copied_block() -> None:
    """Copy a block for another request without the open pool in it."""
    engine: Any = importlib.import_module("lmdeploy.pytorch.engine.cache_engine.engine")

    def copy(original: Any, self: Any, plan: Tensor) -> None:
        original(self, plan)
        self.block_caches[_part("indexer", "TAIL")][:, plan[1]] = 0

    instead(engine.CacheEngine, "copy_logical_blocks", copy)


def draft_hidden_before_the_final_norm() -> None:
    """Feed the draft layer the model's hidden state from before its final norm.

    The layer norms what it is given, so that all the norm does to it is its weight, which is taken out again.
    """
    weight: list[Tensor] = []

    def trunk(original: Any, self: Any, *args: Any, **more: Any) -> Tensor:
        weight[:] = [self.model.norm.weight]
        out: Tensor = original(self, *args, **more)
        return out

    def draft(original: Any, self: Any, *args: Any, target_hidden_states: Tensor, skip_topk: bool, **more: Any) -> Any:
        if not skip_topk and weight:
            target_hidden_states = target_hidden_states / weight[0]
        return original(self, *args, target_hidden_states=target_hidden_states, skip_topk=skip_topk, **more)

    instead(_part("modeling", "Glm5NextForConditionalGeneration"), "forward", trunk)
    instead(_part("mtp", "Glm5NextMTPModel"), "forward", draft)


def draft_chooses_anew() -> None:
    """Let every draft of a round choose its own tokens instead of going on with the first one's."""

    def draft(original: Any, self: Any, *args: Any, skip_topk: bool, **more: Any) -> Any:
        return original(self, *args, skip_topk=False, **more)

    instead(_part("mtp", "Glm5NextMTPModel"), "forward", draft)


def draft_goes_by_the_last_rows_choice() -> None:
    """Let every request of a batch draft by the tokens that the last one's first draft chose."""

    def compact(original: Any, self: Any, queries: Tensor) -> None:
        original(self, queries[-1:].expand_as(queries))

    instead(_part("mtp", "SharedChoice"), "compact", compact)


FAULTS: Final[tuple[Callable[[], None], ...]] = (
    swiglu_not_clamped,
    kda_state_a_hundredth_too_small,
    kda_state_of_a_prompt_transposed,
    kda_chunk_drops_convolution_history,
    streams_mixed_by_the_transpose,
    open_pool_forgotten,
    selection_ignored,
    tail_without_room_for_drafts,
    tail_left_behind_by_a_copied_block,
    draft_hidden_before_the_final_norm,
    draft_chooses_anew,
    draft_goes_by_the_last_rows_choice,
)
