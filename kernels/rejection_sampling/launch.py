"""Launchers of rejection sampling's kernels: statistics of every position, decisions, and what is left to draw."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ..common.tiling import MIN_ROWS, SoC, cdiv, core_grid, next_power_of_2
from .kernel import block_sums_kernel, decide_kernel, draw_kernel, greedy_ids_kernel, logit_statistics_kernel

# Ids travel in fp32 records.
_MOST_IDS: Final = 1 << 24
_RECORD: Final = 8  # fp32 numbers that a program writes at once: 32 bytes
_LOGITS: Final = 2048  # logits of a block when they are only looked through
_PART_BLOCKS: Final = 8  # such blocks in a part of the vocabulary, the share of one task
_DRAWN: Final = 1024  # ids of a block when one is drawn: about the root of a large vocabulary
_LEAST: Final = 256  # of either, where the vocabulary is smaller
Verified = tuple[Tensor, Tensor, Tensor]


def _outputs(draft: Tensor) -> Verified:
    batch, num_drafts = draft.shape
    return (
        draft.new_empty((batch, num_drafts + 1), dtype=torch.int64),
        draft.new_empty((batch,), dtype=torch.int64),
        draft.new_empty((batch,), dtype=torch.int64),
    )


def _block(vocab_size: int, most: int) -> int:
    return min(most, next_power_of_2(max(vocab_size, _LEAST)))


def rejection_sample(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    bonus_token_ids: Tensor,
    uniform: Tensor | None,
    is_greedy: Tensor | None,
    draft_probs: Tensor | None,
    vocab_size: int,
    *,
    soc: SoC,
) -> Verified:
    """Return (output_token_ids, num_rejected, last_token_ids) of a verify step.

    The vocabulary of each position is shared out to several programs, so that a small batch keeps all cores busy; the
    shares depend on the vocabulary alone, and so a request's tokens do not depend on the batch it is in. Each logit is
    read once, and those of the position to draw from once more with their draft probabilities.

    Args:
        target_logits: [B, N, >= vocab_size], any strides.
        draft_token_ids: int [B, N].
        bonus_token_ids: int [B].
        uniform: fp32 [B, N, 2], or None if every request is greedy.
        is_greedy: bool [B] or None.
        draft_probs: [B, N, >= vocab_size] or None.
        vocab_size: ids at or above it are never emitted.
        soc: the chip that grids are chosen for.

    Raises:
        ValueError: a vocabulary of more than 2^24 ids.
    """
    if vocab_size > _MOST_IDS:
        raise ValueError(f"rejection_sample: argument 'vocab_size' is {vocab_size}; wanted at most {_MOST_IDS}")
    requests, drafts = draft_token_ids.shape
    outputs = _outputs(draft_token_ids)
    if requests == 0:
        return outputs
    cores, device = soc.vector_cores, target_logits.device
    sampled = uniform is not None and drafts > 0
    block = _block(vocab_size, soc.tile("rejection_sample", "logits", _LOGITS))
    parts = cdiv(vocab_size, block * _PART_BLOCKS)
    records = torch.empty((requests * drafts * parts, _RECORD), dtype=torch.float32, device=device)
    if drafts:
        logit_statistics_kernel[(core_grid(requests * drafts * parts, cores),)](
            target_logits, records, requests * drafts, drafts, vocab_size, parts, _PART_BLOCKS,
            *target_logits.stride(), BLOCK=block, SUM=sampled,
        )  # fmt: skip
    decisions = torch.empty((requests if sampled else 0, _RECORD), dtype=torch.float32, device=device)
    # An argument that is None is never read: another stands in for it.
    draws = target_logits if uniform is None else uniform
    greedy = draft_token_ids if is_greedy is None else is_greedy.view(torch.int8)
    q = target_logits if draft_probs is None else draft_probs
    q_strides = (0, 0, 1) if draft_probs is None else draft_probs.stride()
    decide_kernel[(core_grid(requests, cores),)](
        target_logits, draft_token_ids, bonus_token_ids, draws, greedy, q, records, decisions, *outputs,
        requests, drafts, vocab_size, parts, *target_logits.stride(), *draft_token_ids.stride(),
        bonus_token_ids.stride(0), *draws.stride(), greedy.stride(0), *q_strides,
        POSITIONS=next_power_of_2(max(MIN_ROWS, drafts + 1)), PARTS=next_power_of_2(max(MIN_ROWS, parts)),
        SAMPLED=sampled, MIXED=sampled and is_greedy is not None, HAS_Q=draft_probs is not None,
    )  # fmt: skip
    if not sampled:
        return outputs
    block = _block(vocab_size, _DRAWN)
    groups = cdiv(vocab_size, block * _RECORD)
    sums = torch.empty(
        (requests, 1 if draft_probs is None else 2, groups * _RECORD), dtype=torch.float32, device=device
    )
    block_sums_kernel[(core_grid(requests * groups, cores),)](
        target_logits, q, decisions, sums, requests, vocab_size, groups, *target_logits.stride(), *q_strides,
        BLOCK=block, HAS_Q=draft_probs is not None,
    )  # fmt: skip
    draw_kernel[(core_grid(requests, cores),)](
        target_logits, q, decisions, sums, outputs[0], outputs[2], requests, drafts, vocab_size, groups,
        *target_logits.stride(), *q_strides, BLOCK=block, BLOCKS=next_power_of_2(groups * _RECORD),
        HAS_Q=draft_probs is not None,
    )  # fmt: skip
    return outputs


def rejection_sample_greedy(target_token_ids: Tensor, draft_token_ids: Tensor, *, soc: SoC) -> Verified:
    """Return (output_token_ids, num_rejected, last_token_ids) for target ids [B, N + 1], the bonus token last.

    Args:
        target_token_ids: int [B, N + 1]; a negative id stands for no token: 0 is emitted.
        draft_token_ids: int [B, N].
        soc: the chip that grids are chosen for.
    """
    requests, drafts = draft_token_ids.shape
    outputs = _outputs(draft_token_ids)
    if requests:
        greedy_ids_kernel[(core_grid(requests, soc.vector_cores),)](
            target_token_ids, draft_token_ids, *outputs, requests, drafts, *target_token_ids.stride(),
            *draft_token_ids.stride(), COLUMNS=next_power_of_2(max(MIN_ROWS, drafts + 1)),
        )  # fmt: skip
    return outputs
