"""Batched PyTorch form of rejection sampling: no host read, no 64-bit float, one distribution in memory.

The token drawn at a rejection comes from the inverse of the cumulative distribution, only for the one position of each
request that needs it, so a request consumes two uniforms per position instead of a random number per vocabulary entry.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ..common.random import philox, split_words, to_uniform

PLACEHOLDER: Final = -1
_BLOCK: Final = 512  # about the root of a large vocabulary: running sums stay short, and so does their fp32 error


def draws(seeds: Tensor, offsets: Tensor, num_drafts: int) -> Tensor:
    """Return fp32 [B, N, 2]: two uniforms for each of the positions offsets[b] to offsets[b] + N - 1 of seeds[b]."""
    positions = offsets.long()[:, None] + torch.arange(num_drafts, device=offsets.device)
    zero = torch.zeros_like(positions)
    key_low, key_high = split_words(seeds[:, None].expand_as(positions))
    words = philox((*split_words(positions), zero, zero), (key_low, key_high))
    return torch.stack((to_uniform(words[0]), to_uniform(words[1])), dim=-1)


def greedy_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return (ids int64, usable bool) over the last dimension: the first largest logit, or 0 where it is not finite."""
    values, ids = logits.max(-1)
    usable = torch.isfinite(values)
    return torch.where(usable, ids, 0), usable


def accept_sampled(p: Tensor, q: Tensor | None, u: Tensor) -> Tensor:
    """Return bool: u < p / q. Strict, so that p = 0 is refused even for u = 0; a NaN is refused."""
    return p > u if q is None else (q > 0) & (p > u * q)


def rest_distribution(p: Tensor, q: Tensor | None, draft: Tensor, proposed: Tensor) -> Tensor:
    """Return weights [B, V] of the token drawn at a rejection: max(p - q, 0), or p where that is degenerate.

    Args:
        p: fp32 [B, V], the target distribution.
        q: [B, V], the draft distribution, or None for a draft that was not sampled (1 at its own id).
        draft: int64 [B], inside the vocabulary.
        proposed: bool [B], false where no draft was proposed.
    """
    rest = p.scatter(-1, draft[:, None], 0.0) if q is None else (p - q).clamp_min_(0)
    total = rest.sum(-1)
    sound = proposed & torch.isfinite(total) & (total > 0)
    return torch.where(sound[:, None], rest, p)


def pick(weights: Tensor, v: Tensor) -> Tensor:
    """Return int64 [B]: the first id at which the running sum of weights [B, V] exceeds v · total.

    Two levels, blocks and then ids inside the block. An id of weight 0 is never taken; a row of NaN gives 0.
    """
    batch, vocab = weights.shape
    blocks = -(-vocab // _BLOCK)
    if blocks * _BLOCK != vocab:
        weights = torch.nn.functional.pad(weights, (0, blocks * _BLOCK - vocab))
    grid = weights.view(batch, blocks, _BLOCK)
    sums = grid.sum(-1)
    running = sums.cumsum(-1)
    threshold = v * running[:, -1]
    block = first_above(running, threshold, sums)
    before = (running - sums).gather(-1, block[:, None]).squeeze(-1)
    inside = grid.gather(1, block[:, None, None].expand(-1, 1, _BLOCK)).squeeze(1)
    return block * _BLOCK + first_above(inside.cumsum(-1), threshold - before, inside)


def first_above(running: Tensor, threshold: Tensor, weights: Tensor) -> Tensor:
    """Return int64 [B]: the first index of positive weight with a running sum above the threshold, else the last."""
    positive = weights > 0
    above = positive & (running > threshold[:, None])
    # Rounding may leave no running sum above the threshold; the last index of positive weight is then the one meant.
    index = torch.arange(running.shape[-1], device=running.device)
    last = torch.where(positive, index, 0).amax(-1)
    return torch.where(above, index, last[:, None]).amin(-1)


def emit(draft: Tensor, accepted: Tensor, replacement: Tensor, bonus: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (output_token_ids [B, N + 1], num_rejected [B], last_token_ids [B]), all int64.

    Args:
        draft: int64 [B, N].
        accepted: bool [B, N].
        replacement: int64 [B, N] or [B, 1]: the token in place of the first rejected draft.
        bonus: int64 [B], emitted if every draft is accepted.
    """
    num_drafts = draft.shape[1]
    count = leading(accepted)
    at = count.clamp(max=replacement.shape[1] - 1)[:, None]
    last = torch.where(count == num_drafts, bonus, replacement.gather(1, at).squeeze(1))
    column = torch.arange(num_drafts + 1, device=draft.device)
    padded = torch.nn.functional.pad(draft, (0, 1))
    out = torch.where(column < count[:, None], padded, PLACEHOLDER)
    out = torch.where(column == count[:, None], last[:, None], out)
    return out, num_drafts - count, last


def leading(accepted: Tensor) -> Tensor:
    """Return int64 [B]: the number of accepted drafts before the first rejected one."""
    return accepted.long().cumprod(-1).sum(-1)


def in_vocabulary(ids: Tensor, vocab_size: int) -> Tensor:
    return (ids >= 0) & (ids < vocab_size)


def rejection_sample(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    bonus_token_ids: Tensor,
    uniform: Tensor | None,
    is_greedy: Tensor | None,
    draft_probs: Tensor | None,
    vocab_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (output_token_ids, num_rejected, last_token_ids); arguments as in `reference.rejection_sample`."""
    logits, draft, bonus = target_logits[..., :vocab_size], draft_token_ids.long(), bonus_token_ids.long()
    proposed = in_vocabulary(draft, vocab_size)
    bonus = torch.where(in_vocabulary(bonus, vocab_size), bonus, 0)
    if draft.shape[1] == 0 or draft.shape[0] == 0:
        return emit(draft, proposed, bonus[:, None], bonus)
    if uniform is None:
        best, usable = greedy_tokens(logits)
        return emit(draft, usable & (draft == best), best, bonus)

    index = draft.clamp(0, vocab_size - 1)
    probs = torch.softmax(logits, -1, dtype=torch.float32)
    q_draft = None
    if draft_probs is not None:
        q_draft = draft_probs.gather(-1, index[..., None]).squeeze(-1).float()
    p_draft = probs.gather(-1, index[..., None]).squeeze(-1)
    accepted = proposed & accept_sampled(p_draft, q_draft, uniform[..., 0])
    first = leading(accepted).clamp(max=draft.shape[1] - 1)[:, None]
    row = torch.arange(draft.shape[0], device=draft.device)[:, None]
    p = probs[row, first].squeeze(1)
    q = None if draft_probs is None else draft_probs[row, first, :vocab_size].squeeze(1)
    at_first = (index.gather(1, first).squeeze(1), proposed.gather(1, first).squeeze(1))
    replacement = pick(rest_distribution(p, q, *at_first), uniform[..., 1].gather(1, first).squeeze(1))[:, None]
    if is_greedy is not None:
        best, usable = greedy_tokens(logits)
        greedy = is_greedy[:, None]
        accepted = torch.where(greedy, usable & (draft == best), accepted)
        replacement = torch.where(greedy, best, replacement)
    return emit(draft, accepted, replacement, bonus)


def rejection_sample_greedy(target_token_ids: Tensor, draft_token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (output_token_ids, num_rejected, last_token_ids) for target ids [B, N + 1], the bonus token last.

    A negative target id stands for no token: the draft is rejected and 0 is emitted.
    """
    target, draft = target_token_ids.long(), draft_token_ids.long()
    usable = target >= 0
    target = torch.where(usable, target, 0)
    best = target[:, :-1] if draft.shape[1] else target
    return emit(draft, usable[:, :-1] & (draft == target[:, :-1]), best, target[:, -1])
