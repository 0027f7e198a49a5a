"""LMDeploy's rejection sampling spec over our operators: which drafts of a verify step are kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lmdeploy.pytorch.backends.rejection_sampling import RejectionSamplingImpl
from torch import Tensor

from ... import ops
from . import counters

Verified = tuple[Tensor, Tensor, Tensor]


class RejectionSampling(RejectionSamplingImpl):  # type: ignore[misc]
    """RejectionSamplingBuildSpec: as LMDeploy's own forms, but a draft of probability 0 is never accepted.

    Both methods return (output_token_ids int64 [B, N + 1], accepted drafts, then one token, then -1; num_rejected
    int64 [B]; last_token_ids int64 [B]) and change no argument.

    LMDeploy's interface hands over no seeds. `seeds.py` brings them in through `seeded`, so that a request's draws do
    not depend on its batch; without, they come from torch's generator of the device.
    """

    def __init__(self) -> None:
        self._seeds: tuple[Tensor, Tensor] | None = None

    @contextmanager
    def seeded(self, seeds: Tensor, offsets: Tensor) -> Iterator[None]:
        """Draw by these inside the block: int [B] seeds, and int [B] position of each request's first draft."""
        self._seeds = (seeds, offsets)
        try:
            yield
        finally:
            self._seeds = None

    def forward_greedy(self, target_token_ids: Tensor, draft_token_ids: Tensor) -> Verified:
        """Verify a greedy batch: target_token_ids [B, N + 1], the bonus token last, and draft_token_ids [B, N]."""
        counters.add("rejection_sample_greedy")
        result = ops.verify_greedy(target_token_ids, draft_token_ids)
        counters.verified(draft_token_ids.size(1), *result[1:])
        return result

    def forward(
        self,
        target_logits: Tensor,
        draft_token_ids: Tensor,
        bonus_token_ids: Tensor,
        *,
        is_greedy: Tensor | None,
        draft_probs: Tensor | None = None,
    ) -> Verified:
        """Verify a batch in which some request samples.

        Args:
            target_logits: [B, N, V] after LMDeploy's processing, at the draft positions.
            draft_token_ids: int [B, N].
            bonus_token_ids: int [B], drawn by LMDeploy.
            is_greedy: bool [B], or None if every request samples.
            draft_probs: [B, N, V], or None (MTP's drafts are the draft layer's argmax, not sampled).
        """
        counters.add("rejection_sample")
        seeds, offsets = self._seeds or (None, None)
        result = ops.verify(
            target_logits,
            draft_token_ids,
            bonus_token_ids,
            is_greedy=is_greedy,
            draft_probs=draft_probs,
            seeds=seeds,
            offsets=offsets,
        )
        counters.verified(draft_token_ids.size(1), *result[1:])
        return result
