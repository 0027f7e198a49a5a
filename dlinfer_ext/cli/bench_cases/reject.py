"""Rejection sampling against the usual batched formulation, and transformers' for one request, called for each.

The usual formulation draws one exponential number per vocabulary entry and request.
"""

from __future__ import annotations

import torch

from dlinfer_ext.ops import verify, verify_greedy

from . import Case, peak_bytes, public

MEMORY_LIMIT = 2.5  # times the fp32 bytes of the target logits


class Verify:
    """A verify step of a batch that samples; with `probs`, from drafts that were sampled too."""

    def __init__(self, batch: int, num_drafts: int, vocab: int, probs: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (batch, num_drafts, vocab)
        self.logits = torch.randn(shape, generator=generator) * 2
        self.probs = torch.softmax(torch.randn(shape, generator=generator), -1) if probs else None
        self.draft = torch.randint(0, vocab, shape[:2], generator=generator)
        self.bonus = torch.randint(0, vocab, shape[:1], generator=generator)
        self.seeds = torch.arange(batch)

    def run(self) -> object:
        return verify(self.logits, self.draft, self.bonus, draft_probs=self.probs, seeds=self.seeds, offsets=self.seeds)

    def loop(self) -> object:
        """Sample each request with transformers' function for one; it takes logits of the drafts and of the bonus."""
        form = public("generation.utils", "_speculative_sampling")
        found, count = [], self.draft.shape[1]
        for logits, draft in zip(self.logits, self.draft, strict=True):
            drafted = torch.zeros_like(logits).scatter_(1, draft[:, None], 1.0).log()
            found.append(form(draft[None], drafted[None], count, torch.cat([logits, logits[-1:]])[None]))
        return found

    def loop_of_probs(self) -> object:
        form = public("generation.utils", "_speculative_sampling")
        found, count = [], self.draft.shape[1]
        assert self.probs is not None
        for logits, probs, draft in zip(self.logits, self.probs, self.draft, strict=True):
            found.append(form(draft[None], probs.log()[None], count, torch.cat([logits, logits[-1:]])[None]))
        return found

    def plain(self) -> object:
        p = self.logits.softmax(-1, dtype=torch.float32)
        at = self.draft[..., None]
        q = self.probs if self.probs is not None else torch.zeros_like(p).scatter_(-1, at, 1.0)
        uniform = torch.rand(self.draft.shape, dtype=torch.float64)
        accepted = (p.gather(-1, at) / q.gather(-1, at)).squeeze(-1) > uniform
        noise = torch.empty(p.shape[0], 1, p.shape[2]).exponential_()
        recovered = ((p - q).clamp_min_(0) / noise).argmax(-1)
        count = accepted.long().cumprod(-1).sum(-1)
        tokens = torch.where(accepted, self.draft, recovered)
        column = torch.arange(tokens.shape[1] + 1)
        out = torch.cat([tokens, self.bonus[:, None]], 1).masked_fill(column > count[:, None], -1)
        return out, tokens.shape[1] - count, out.gather(1, count[:, None])

    def copy(self) -> object:
        return self.logits.clone(), None if self.probs is None else self.probs.clone()

    def extra_memory(self) -> float:
        return peak_bytes(self.run) / self.logits.nbytes


class Greedy:
    """A verify step of a greedy batch, from ids."""

    def __init__(self, batch: int, num_drafts: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.target = torch.randint(0, 3, (batch, num_drafts + 1), generator=generator)
        self.draft = torch.randint(0, 3, (batch, num_drafts), generator=generator)

    def run(self) -> object:
        return verify_greedy(self.target, self.draft)

    def copy(self) -> object:
        return self.target.clone(), self.draft.clone()


def _growth(curve: str, size: int, work: Verify | Greedy, tokens: int) -> Case:
    return Case(f"{curve}={size}", work.run, {}, work.copy, growth=curve, point=size, tokens=tokens)


def cases() -> list[Case]:
    """Return the cases; each owns its tensors."""
    found = []
    for batch, num_drafts, vocab in ((4, 3, 151936), (64, 4, 32000)):
        for probs in (False, True):
            work = Verify(batch, num_drafts, vocab, probs)
            found.append(
                Case(
                    f"rejection_sample {batch}x{num_drafts}x{vocab}{' draft probs' if probs else ''}",
                    work.run,
                    {"plain": work.plain, "loop": work.loop_of_probs if probs else work.loop},
                    work.copy,
                    target=2.0,
                    extra_memory=work.extra_memory,
                    memory_limit=MEMORY_LIMIT,
                    tokens=batch * num_drafts,
                )
            )
    for batch in (8, 16, 32, 64):
        work = Verify(batch, 3, 16000, False)
        found.append(_growth("reject rows", batch, work, work.draft.numel()))
    for num_drafts in (1, 2, 4, 8):
        work = Verify(8, num_drafts, 16000, False)
        found.append(_growth("reject drafts", num_drafts, work, work.draft.numel()))
    for batch in (16, 64, 256):
        greedy = Greedy(batch, 4)
        found.append(_growth("reject greedy rows", batch, greedy, greedy.draft.numel()))
    return found
