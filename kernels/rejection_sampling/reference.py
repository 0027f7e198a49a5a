"""Definition of rejection sampling for speculative decoding: one request and one draft at a time, in fp64.

Leviathan et al., https://arxiv.org/abs/2211.17192, and Chen et al., https://arxiv.org/abs/2302.01318: draft x is
accepted with probability min(1, p(x) / q(x)); at the first rejection the token is drawn from max(p - q, 0) normalised,
so that every emitted token is distributed as the target p. A draft without a distribution has q = 1 at its own id.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

PLACEHOLDER = -1
_WORD = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the four words of Philox4x32-10 in Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _WORD, (p0 >> 32) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def draws(seed: int, position: int) -> tuple[float, float]:
    """Return the two uniforms of one position: for the acceptance, and for the token drawn at a rejection."""
    words = philox((position & _WORD, (position >> 32) & _WORD, 0, 0), (seed & _WORD, (seed >> 32) & _WORD))
    return ((words[0] >> 9) + 0.5) / 2**23, ((words[1] >> 9) + 0.5) / 2**23


def greedy_token(logits: Tensor) -> tuple[int, bool]:
    """Return (first id of the largest logit, True), or (0, False) if a logit is NaN or +inf, or none is above -inf."""
    values: list[float] = logits.double().tolist()
    if any(math.isnan(v) for v in values) or math.isinf(max(values)):
        return 0, False
    return values.index(max(values)), True


def target_distribution(logits: Tensor) -> list[float] | None:
    """Return softmax(logits) in fp64, or None where it is undefined (a NaN or +inf, or no logit above -inf)."""
    p = torch.softmax(logits.double(), -1)
    return p.tolist() if bool(torch.isfinite(p).all()) else None


def pick(weights: list[float], v: float) -> int:
    """Return the first id at which the running sum of `weights` exceeds v · total."""
    threshold, running = v * math.fsum(weights), 0.0
    for token, weight in enumerate(weights):
        running += weight
        if weight > 0 and running > threshold:
            return token
    return max(token for token, weight in enumerate(weights) if weight > 0)


def verify_random(logits: Tensor, draft: int, draft_probs: Tensor | None, u: float, v: float) -> tuple[int, bool]:
    """Return (token, accepted) of one position of a request that samples.

    Args:
        logits: [V] of the target.
        draft: an id; outside the vocabulary it means that nothing was proposed.
        draft_probs: [V], or None if the draft was not sampled.
        u: uniform for the acceptance.
        v: uniform for the token drawn at a rejection.
    """
    p = target_distribution(logits)
    if p is None:
        return 0, False
    if not 0 <= draft < len(p):
        return pick(p, v), False
    q = [float(token == draft) for token in range(len(p))] if draft_probs is None else draft_probs.double().tolist()
    if q[draft] > 0 and p[draft] > u * q[draft]:
        return draft, True
    rest = [max(a - b, 0.0) if not math.isnan(b) else math.nan for a, b in zip(p, q, strict=True)]
    total = math.fsum(rest) if not any(map(math.isnan, rest)) else math.nan
    return (pick(rest, v) if total > 0 and math.isfinite(total) else pick(p, v)), False


def rejection_sample(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    bonus_token_ids: Tensor,
    uniform: Tensor | None,
    is_greedy: Tensor | None,
    draft_probs: Tensor | None,
    vocab_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (output_token_ids, num_rejected, last_token_ids) of a verify step.

    Args:
        target_logits: [B, N, >= vocab_size], processed (temperature, top-k, top-p) logits at the draft positions.
        draft_token_ids: int [B, N].
        bonus_token_ids: int [B], the target's token after the last draft; emitted if every draft is accepted.
        uniform: [B, N, 2], the draws u and v of each position, or None if every request is greedy.
        is_greedy: bool [B], or None if all are alike (greedy without `uniform`, sampling with it).
        draft_probs: [B, N, >= vocab_size], or None if the drafts were not sampled.
        vocab_size: ids at or above it are never emitted; columns at or above it are not read.

    Returns:
        output_token_ids: int64 [B, N + 1], the emitted tokens, then -1.
        num_rejected: int64 [B], drafts not emitted as accepted ones (N + 1 - number of emitted tokens).
        last_token_ids: int64 [B], the last emitted token.
    """
    batch, num_drafts = draft_token_ids.shape
    out = torch.full((batch, num_drafts + 1), PLACEHOLDER, dtype=torch.int64)
    rejected, last = torch.zeros(batch, dtype=torch.int64), torch.zeros(batch, dtype=torch.int64)
    for b in range(batch):
        bonus = int(bonus_token_ids[b])
        tokens: list[int] = []
        accepted = True
        for n in range(num_drafts):
            logits, draft = target_logits[b, n, :vocab_size], int(draft_token_ids[b, n])
            if uniform is None or (is_greedy is not None and bool(is_greedy[b])):
                token, usable = greedy_token(logits)
                accepted = usable and token == draft
            else:
                q = None if draft_probs is None else draft_probs[b, n, :vocab_size]
                token, accepted = verify_random(logits, draft, q, float(uniform[b, n, 0]), float(uniform[b, n, 1]))
            tokens.append(token)
            if not accepted:
                break
        if accepted:
            tokens.append(bonus if 0 <= bonus < vocab_size else 0)
        out[b, : len(tokens)] = torch.tensor(tokens)
        rejected[b], last[b] = num_drafts + 1 - len(tokens), tokens[-1]
    return out, rejected, last
