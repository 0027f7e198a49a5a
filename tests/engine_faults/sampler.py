"""Faults of rejection sampling: which drafts are kept, and what follows them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from tests.engine_faults.plant import instead

ops: Any = importlib.import_module("dlinfer_ext.ops")
eager: Any = importlib.import_module("dlinfer_ext.kernels.rejection_sampling.eager")


def _greedy(faulty: Callable[[Callable[[Tensor, Tensor], Any], Tensor, Tensor], Any]) -> None:
    instead(ops, "verify_greedy", faulty)


def every_draft_accepted() -> None:
    """Accept whatever was drafted."""
    _greedy(lambda original, target, draft: original(torch.cat([draft, target[:, -1:]], 1), draft))


def no_draft_accepted() -> None:
    """Accept nothing: every token is right, and drafts only cost (what vllm-ascend issues 9290, 10495 saw)."""
    _greedy(lambda original, target, draft: original(target, torch.full_like(draft, -1)))


def rejected_draft_emitted() -> None:
    """Emit the first rejected draft in place of the target's token (vLLM PR 41834)."""

    def faulty(original: Any, target: Tensor, draft: Tensor) -> Any:
        out, rejected, last = original(target, draft)
        count = draft.size(1) - rejected
        padded = torch.cat([draft, target[:, -1:]], 1)
        last = padded.gather(1, count[:, None])[:, 0].to(last.dtype)
        return out.scatter(1, count[:, None], last[:, None]), rejected, last

    _greedy(faulty)


def bonus_token_of_the_row_before() -> None:
    """Take the bonus token from the last draft's row."""
    _greedy(lambda original, target, draft: original(torch.cat([target[:, :-1], target[:, -2:-1]], 1), draft))


def bonus_token_missing() -> None:
    """Emit no token after drafts that were all accepted, and go on from the last of them."""

    def faulty(original: Any, target: Tensor, draft: Tensor) -> Any:
        out, rejected, last = original(target, draft)
        whole = rejected == 0
        out = torch.where(whole[:, None] & (torch.arange(out.size(1)) == draft.size(1)), -1, out)
        last = torch.where(whole, draft[:, -1].to(last.dtype), last)
        return out, torch.where(whole, 1, rejected), last

    _greedy(faulty)


def acceptance_drawn_at_zero() -> None:
    """Compare with a draw that is always 0, so that a sampled batch rejects nothing (vllm-ascend issue 13730)."""

    def accept(_: Any, p: Tensor, q: Any, u: Tensor) -> Tensor:
        return p > torch.zeros_like(u)

    instead(eager, "accept_sampled", accept)


def rejected_draft_drawn_again() -> None:
    """Draw the token after a rejection from the target's law itself, the rejected draft included."""

    def rest(_: Any, p: Tensor, *unused: Any) -> Tensor:
        return p

    instead(eager, "rest_distribution", rest)


def top_k_for_the_bonus_token_only() -> None:
    """Let top_k, top_p and min_p hold for the bonus token only (LMDeploy 0.18 as it is)."""
    seeds = importlib.import_module("dlinfer_ext.framework.lmdeploy.seeds")
    instead(seeds, "within_policy", lambda original, target_logits, inputs: target_logits)


FAULTS: Final[tuple[Callable[[], None], ...]] = (
    every_draft_accepted,
    no_draft_accepted,
    rejected_draft_emitted,
    bonus_token_of_the_row_before,
    bonus_token_missing,
    acceptance_drawn_at_zero,
    rejected_draft_drawn_again,
    top_k_for_the_bonus_token_only,
)
