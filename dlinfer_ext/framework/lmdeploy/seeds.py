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

import torch
from lmdeploy.pytorch.backends.multinomial_sampling import MultinomialSamplingImpl
from lmdeploy.pytorch.engine import logits_process
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


def within_policy(target_logits: Tensor, inputs: Any) -> Tensor:
    """Return the logits with what the request's top_k, top_p and min_p exclude at -inf, at the draft positions.

    LMDeploy applies the three where it draws a token, so to the bonus token only: without this, a token that a
    request excludes is emitted wherever a draft is rejected, and drafts are accepted by a flatter law.

    Args:
        target_logits: [B, N + 1, V], the bonus position last; it is left as it is, LMDeploy filters it itself.
        inputs: LMDeploy's sampling inputs, one row per position.
    """
    rows = target_logits.flatten(0, 1)
    if inputs.max_top_k > 0:
        scores, indices = logits_process._torch_topk(rows, inputs.max_top_k, dim=1)
    elif inputs.top_k is None and inputs.top_p is None and inputs.min_p is None:
        return target_logits
    else:
        scores, indices = rows.sort(1, descending=True)
    if inputs.top_k is not None:
        top_k = inputs.top_k.masked_fill(inputs.top_k <= 0, scores.size(1))
        scores = logits_process._filter_topk_sorted_(scores, top_k)
    if inputs.top_p is not None:
        scores = logits_process._filter_topp_sorted_(scores, inputs.top_p)
    if inputs.min_p is not None:
        scores = logits_process._filter_minp_sorted_(scores, inputs.min_p)
    kept = torch.full_like(rows, -torch.inf).scatter_(1, indices, scores).view_as(target_logits)
    kept[:, -1] = target_logits[:, -1]
    return kept


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
        if inputs.max_top_k != 1:
            target_logits = within_policy(target_logits, inputs)
        if not isinstance(self._impl, RejectionSampling) or inputs.random_seeds is None:
            return forward(self, target_logits, draft_token_ids, inputs, draft_probs)
        with self._impl.seeded(inputs.random_seeds[::step], inputs.random_offsets[::step]):
            return forward(self, target_logits, draft_token_ids, inputs, draft_probs)

    agent._rejection_sampling = at_positions
    sampler.forward = seeded
    return "SpecModelAgent and RejectionSampler hand seeds, positions and the sampling policy to the sampler"
