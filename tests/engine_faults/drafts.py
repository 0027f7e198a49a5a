"""Faults of drafting: what the draft layer is fed. Tokens stay right, as verification sees to that; acceptance falls.

(Those that Qwen3.5's and DeepSeek's MTP layers invite; the shares of accepted drafts change by little for some, which
is why the exact histogram is compared.)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from tests.engine_faults.plant import instead

PYTORCH: Final = "lmdeploy.pytorch"


def _agent() -> Any:
    return importlib.import_module(f"{PYTORCH}.spec_decode.spec_agent").SpecModelAgent


def _proposer() -> Any:
    return importlib.import_module(f"{PYTORCH}.spec_decode.proposers.base").BaseSpecProposer


def _layer() -> Any:
    return importlib.import_module(f"{PYTORCH}.models.qwen3_5_mtp").Qwen3_5MultiTokenPredictor


def draft_hidden_shifted_by_one() -> None:
    """Pair each draft input with the hidden state of the token before."""

    def prepare(original: Any, self: Any, inputs: Any, extra: Any) -> Any:
        hidden = extra.target_hidden_states
        shifted = torch.cat([hidden[:, :1], hidden[:, :-1]], 1)
        return original(self, inputs, extra.clone(target_hidden_states=shifted))

    instead(_agent(), "_prepare_inputs_from_main", prepare)


def draft_tokens_not_shifted() -> None:
    """Pair each hidden state with the token that gave it instead of the next one."""

    def shift(
        original: Any, tokens: Tensor, lengths: Tensor, following: Tensor, replacement_indices: Any = None
    ) -> Tensor:
        out = tokens.clone()
        out[:, lengths.cumsum(0) - 1 if replacement_indices is None else replacement_indices] = following
        return out

    instead(_agent(), "_shift_packed_prefill_inputs", shift)


def draft_position_not_advanced() -> None:
    """Draft every token of a chain after the first two at one position."""

    def step(original: Any, self: Any, *args: Any) -> Any:
        out = original(self, *args)
        if out.target_position_ids is not None:
            out.target_position_ids = out.target_position_ids - 1
            if out.mrope_pos_ids is not None:
                out.mrope_pos_ids = out.mrope_pos_ids - 1
        return out

    instead(importlib.import_module(f"{PYTORCH}.model_inputs").ModelInputs, "step", step)


def draft_keys_of_the_prompt_lost() -> None:
    """Leave the draft layer's keys and values of the prompt out of its cache."""
    base: Any = importlib.import_module(f"{PYTORCH}.spec_decode.proposers.base")

    def forward(original: Any, model: Any, inputs: Any, cache_engine: Any, **more: Any) -> Any:
        out = original(model, inputs, cache_engine=cache_engine, **more)
        if not inputs.is_decoding:
            for layer in cache_engine.gpu_cache:
                for cache in layer:
                    cache[inputs.block_offsets.flatten()] = 0
        return out

    instead(base, "draft_model_forward", forward)


def recycled_hidden_before_the_norm() -> None:
    """Feed a chain its own hidden state from before the final norm."""
    mtp: Any = importlib.import_module(f"{PYTORCH}.spec_decode.proposers.deepseek_mtp").DeepseekMTP
    held: list[Tensor] = []

    def forward(original: Any, self: Any, *args: Any, **more: Any) -> Tensor:
        def hold(_: Any, given: tuple[Tensor, Tensor]) -> None:
            held[:] = [given[0] + given[1]]

        hook = self.norm.register_forward_pre_hook(hold)
        out: Tensor = original(self, *args, **more)
        hook.remove()
        return out

    async def outputs(original: Any, self: Any, model_outputs: Any, inputs: Any, extra: Any = None, **more: Any) -> Any:
        ids, metas, _ = await original(self, model_outputs, inputs, extra, **more)
        return ids, metas, held[0] if extra is None else held[0][:, extra.last_token_indices]

    instead(_layer(), "forward", forward)
    instead(mtp, "get_outputs", outputs)


def trunk_hidden_instead_of_the_recycled() -> None:
    """Feed every step of a chain the trunk's hidden state."""
    mtp: Any = importlib.import_module(f"{PYTORCH}.spec_decode.proposers.deepseek_mtp").DeepseekMTP
    trunk: list[Tensor] = []

    async def outputs(original: Any, self: Any, model_outputs: Any, inputs: Any, extra: Any = None, **more: Any) -> Any:
        if extra is not None:
            trunk[:] = [inputs.target_hidden_states[:, extra.last_token_indices]]
        ids, metas, _ = await original(self, model_outputs, inputs, extra, **more)
        return ids, metas, trunk[0]

    instead(mtp, "get_outputs", outputs)


def drafts_begin_at_the_last_row() -> None:
    """Draft after the last row of a verify step instead of the last accepted one."""

    async def sample(original: Any, self: Any, inputs: Any, *rest: Any) -> Any:
        extra = await original(self, inputs, *rest)
        return extra.clone(last_token_indices=inputs.seq_length.cumsum(0) - 1)

    instead(_agent(), "_rejection_sampling", sample)


def draft_history_not_rewound() -> None:
    """Leave rejected tokens in the history of the draft layer."""

    def update(original: Any, self: Any, inputs: Any, extra: Any, *rest: Any) -> Any:
        return original(self, inputs, extra.clone(num_rejected_tokens=None), *rest)

    instead(_proposer(), "update_inputs_decoding", update)


def draft_projection_halves_swapped() -> None:
    """Join hidden state and embedding in the other order."""

    def forward(original: Any, self: Any, *args: Any, **more: Any) -> Tensor:
        def swap(_: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (torch.cat(given[0].chunk(2, -1)[::-1], -1), *given[1:])

        hook = self.fc.register_forward_pre_hook(swap)
        out: Tensor = original(self, *args, **more)
        hook.remove()
        return out

    instead(_layer(), "forward", forward)


def draft_carry_between_chunks_lost() -> None:
    """Begin each chunk's draft inputs without the hidden state that the chunk before ended with."""

    def prepend(original: Any, self: Any, key: str, tensor: Tensor, save_last: bool = True) -> Tensor:
        if key == "hidden_states":
            self._prev_chunk_last[key] = torch.zeros_like(self._prev_chunk_last[key])
        out: Tensor = original(self, key, tensor, save_last)
        return out

    instead(_agent(), "_prepare_long_context_chunk_prepend_saved", prepend)


FAULTS: Final[tuple[Callable[[], None], ...]] = (
    draft_hidden_shifted_by_one,
    draft_tokens_not_shifted,
    draft_position_not_advanced,
    draft_keys_of_the_prompt_lost,
    recycled_hidden_before_the_norm,
    trunk_hidden_instead_of_the_recycled,
    drafts_begin_at_the_last_row,
    draft_history_not_rewound,
    draft_projection_halves_swapped,
    draft_carry_between_chunks_lost,
)
