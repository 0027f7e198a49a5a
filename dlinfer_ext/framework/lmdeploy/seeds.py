"""Sampling that depends on a request's seed and positions alone, not on the batch that the request shares.

LMDeploy gives every request a seed (a random one if the user names none) and hands seeds and offsets to whoever draws a
token; its portable form draws from torch's generator instead, and the rejection sampler is handed neither. Its offsets
count steps: with drafts a step may emit several tokens, so that two positions of a request would share a draw, and the
second be accepted too often. Here the offset of a draw is the position of the token it decides.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from lmdeploy.pytorch.backends.multinomial_sampling import MultinomialSamplingImpl
from torch import Tensor

from ... import ops
from . import counters
from .rejection_sampling import RejectionSampling


class MultinomialSampling(MultinomialSamplingImpl):  # type: ignore[misc]
    """MultinomialSamplingBuildSpec: one token per row, from the draw that the row's seed has for its offset."""

    def forward(self, scores: Tensor, seeds: Tensor | None, offsets: Tensor | None, indices: Tensor) -> Tensor:
        """Draw one token per row.

        Args:
            scores: float [B, K], probabilities of the candidates.
            seeds: int [B], or None: torch's generator of the device.
            offsets: int [B], position of the token in its request.
            indices: int [B, K], token id of each candidate.

        Returns:
            int64 [B], the ids drawn.
        """
        counters.add("multinomial_sampling")
        # Where no draft was proposed, verification draws the token from the target itself.
        nothing = indices.new_full((scores.size(0), 1), -1)
        _, _, drawn = ops.verify(
            scores.log()[:, None],
            nothing,
            nothing[:, 0],
            seeds=seeds,
            offsets=None if seeds is None else offsets,
        )
        return indices.gather(1, drawn[:, None]).flatten().long()


def patch_spec_agent(module: Any) -> str:
    """Hand seeds and positions to our sampler: the spec's interface has no room for them.

    The bonus token is drawn by LMDeploy from the same inputs, so it gets its own position too.
    """
    agent, sampler = module.SpecModelAgent, module.RejectionSampler
    sample, forward = agent._rejection_sampling, sampler.forward

    @functools.wraps(sample)
    async def at_positions(self: Any, model_inputs: Any, extra_inputs: Any, sampling_inputs: Any) -> Any:
        if model_inputs.is_decoding and sampling_inputs is not None and sampling_inputs.random_seeds is not None:
            # The step's first input stands at the end of the history; the first token it decides comes after.
            first = model_inputs.history_lengths + 1
            sampling_inputs = dataclasses.replace(sampling_inputs, random_offsets=first)
        return await sample(self, model_inputs, extra_inputs, sampling_inputs)

    @functools.wraps(forward)
    def seeded(
        self: Any,
        target_logits: Tensor,
        draft_token_ids: Tensor,
        expanded_sampling_inputs: Any,
        draft_probs: Any = None,
    ) -> Any:
        inputs, step = expanded_sampling_inputs, target_logits.size(1)
        if not isinstance(self._impl, RejectionSampling) or inputs.random_seeds is None:
            return forward(self, target_logits, draft_token_ids, inputs, draft_probs)
        with self._impl.seeded(inputs.random_seeds[::step], inputs.random_offsets[::step]):
            return forward(self, target_logits, draft_token_ids, inputs, draft_probs)

    agent._rejection_sampling = at_positions
    sampler.forward = seeded
    return "SpecModelAgent and RejectionSampler hand seeds and positions to the sampler"
