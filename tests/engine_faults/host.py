"""Faults between the host and the states: prefix cache, order of rows, ranks."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

from tests.engine_faults.plant import instead

PYTORCH: Final = "lmdeploy.pytorch"


def _module(name: str) -> Any:
    return importlib.import_module(f"{PYTORCH}.{name}")


def prefix_state_saved_before_the_step() -> None:
    """Copy a state into the prefix cache before the step that it is to be the result of."""
    agent = _module("engine.model_agent.agent")
    save = agent._save_cache_checkpoint

    def restore(original: Any, *args: Any) -> None:
        original(*args)
        save(*args)

    instead(agent, "_restore_cache_checkpoint", restore)
    instead(agent, "_save_cache_checkpoint", lambda original, *args: None)


def prefix_state_under_an_earlier_boundary() -> None:
    """Publish a state as that of one block earlier (vLLM PR 54076)."""

    def reserve(original: Any, self: Any, seq: Any, step: Any = None, is_decode: bool = False) -> Any:
        step = seq.num_valid_ids if step is None else step
        return original(self, seq, max(step - self._block_size, 0), is_decode)

    instead(_module("paging.block_trie.checkpoint_lifecycle").StateCheckpointLifecycle, "reserve_save", reserve)


def prefix_hit_without_its_state() -> None:
    """Reuse the attention's blocks of a prefix and leave the state as it is (modular issue 6681)."""

    def restore(original: Any, inputs: Any, cache_inputs: Any, cache_engine: Any, states: Any) -> None:
        if cache_inputs is not None:
            cache_inputs = dataclasses.replace(cache_inputs, state_restore_plan=None)
        original(inputs, cache_inputs, cache_engine, states)

    instead(_module("engine.model_agent.agent"), "_restore_cache_checkpoint", restore)


def _copy_keeps(part: Callable[[Any], Tensor]) -> None:
    """Let copies of slots leave out what `part(engine)` selects: a view that has its slots first."""

    def copy(original: Any, self: Any, source: Any, target: Any) -> None:
        view = part(self)
        kept = [(slot, view[slot].clone()) for slot in self._normalize_slot_ids(target)]
        original(self, source, target)
        for slot, value in kept:
            view[slot] = value

    instead(_module("engine.cache_engine.state").StateCacheEngine, "copy_slots", copy)


def prefix_copy_misses_the_convolution() -> None:
    """Copy the recurrent states of a prefix only (sglang PR 34043: zero convolution state after a hit)."""
    _copy_keeps(lambda engine: engine.state_caches[0])


def prefix_copy_misses_a_layer() -> None:
    """Copy one layer too few of a prefix's recurrent states."""
    _copy_keeps(lambda engine: engine.state_caches[1][:, 0])


def preempted_state_kept() -> None:
    """Let a preempted sequence keep a state that is a token ahead of where it goes on (LMDeploy 0.18 as it is)."""
    instead(_module("paging.scheduler").Scheduler, "preempt_seqs", lambda original, *args: original.__wrapped__(*args))


def histories_in_the_order_of_the_step_before() -> None:
    """Do not reorder what the last step accepted when a request leaves the batch (vllm-backport PR 63)."""

    def reindex(original: Any, inputs: Any, delta: Any, drafts: int) -> Any:
        found = original(inputs, delta, drafts)
        found.history_lengths = inputs.history_lengths[: found.history_lengths.numel()]
        return found

    instead(_module("strategies.ar_spec.step_inputs"), "_reindex_model_inputs_arspec", reindex)


def convolution_split_in_one_piece() -> None:
    """Split the convolution's channels over the ranks as they lie, not q, k and v apart."""
    gated_delta = _module("nn.gated_delta")

    def load(original: Any, self: Any, param: Any, loaded_weight: Tensor) -> None:
        gated_delta.default_weight_loader(param, loaded_weight.chunk(self.tp, 0)[self.rank])

    instead(gated_delta.CausalConv1d, "weight_loader", load)


FAULTS: Final[tuple[Callable[[], None], ...]] = (
    prefix_state_saved_before_the_step,
    prefix_state_under_an_earlier_boundary,
    prefix_hit_without_its_state,
    prefix_copy_misses_the_convolution,
    prefix_copy_misses_a_layer,
    preempted_state_kept,
    histories_in_the_order_of_the_step_before,
    convolution_split_in_one_piece,
)
