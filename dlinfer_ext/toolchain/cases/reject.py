"""Rejection sampling of a model's usual number of drafts over its whole vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...kernels.rejection_sampling import reference
from ...targets import Model
from . import Case, launcher

BATCH = 32
LIVE = 50
# Partial results and ids, beside the logits.
LIMIT = 1.02


def cases(model: Model, tp: int, dtype: torch.dtype) -> Iterator[Case]:
    """Return the cases of a model. Logits are gathered before sampling, so that those of one rank stand for all."""
    if tp > 1:
        return
    shape = (BATCH, model.drafts, model.vocab)
    yield _case("greedy", shape, dtype)
    yield _case("sampled", shape, dtype)
    yield _case("mixed", shape, dtype)
    yield _from_ids(model)


def _ids(generator: torch.Generator, drafts: int, vocab: int) -> tuple[Tensor, Tensor]:
    draft = torch.randint(0, vocab, (BATCH, drafts), generator=generator)
    return draft, torch.randint(0, vocab, (BATCH,), generator=generator)


def _case(kind: str, shape: tuple[int, int, int], dtype: torch.dtype) -> Case:
    """Return the case of `rejection_sample`: about three of four drafts are accepted.

    "greedy", "sampled" without draft probabilities, or "mixed": with them, and half of the requests greedy.
    """
    _, drafts, vocab = shape
    sampled, mixed = kind != "greedy", kind == "mixed"

    def arguments() -> dict[str, Any]:
        generator = torch.Generator().manual_seed(drafts)
        draft, bonus = _ids(generator, drafts, vocab)
        logits = torch.randn(shape, generator=generator)
        if sampled:
            # As top-k leaves them. A token drawn from a flat vocabulary would depend on the last bits of fp32 sums.
            logits.masked_fill_(torch.rand(shape, generator=generator) > LIVE / vocab, float("-inf"))
        # Outweighs the other live ids threefold.
        likely = torch.randint(0, vocab, (BATCH, drafts), generator=generator)
        wanted = draft if kind == "sampled" else torch.where(likely % 4 > 0, draft, likely)
        logits.scatter_(-1, wanted[..., None], 5.5 if sampled else 14.0)
        return {
            "target_logits": logits.to(dtype),
            "draft_token_ids": draft,
            "bonus_token_ids": bonus,
            "uniform": torch.rand(BATCH, drafts, 2, generator=generator) if sampled else None,
            "is_greedy": torch.arange(BATCH) % 2 == 0 if mixed else None,
            "draft_probs": torch.softmax(logits * 0.75, -1) if mixed else None,
            "vocab_size": vocab,
        }

    # A request that draws a token needs the logits there once more, as their sum is known only after the first time,
    # and the draft probabilities (fp32) there. How many requests do is not known beforehand.
    again = (1 + (4 / dtype.itemsize if mixed else 0)) / drafts if sampled else 0.0
    return Case(
        operator="rejection_sample",
        phase=f"{kind}-{BATCH}x{drafts}",
        tolerance=None,
        arguments=arguments,
        launch=launcher("rejection_sample"),
        definition=reference.rejection_sample,
        read_bytes=BATCH * (drafts * (vocab * dtype.itemsize + (16 if sampled else 8)) + 8),
        written_bytes=8 * BATCH * (drafts + 3),
        bytes_limit=LIMIT + again,
        blocks_limit=LIMIT + again,
    )


def _from_ids(model: Model) -> Case:
    def arguments() -> dict[str, Any]:
        generator = torch.Generator().manual_seed(0)
        draft, bonus = _ids(generator, model.drafts, model.vocab)
        target = torch.where(torch.rand(draft.shape, generator=generator) < 0.75, draft, 0)
        return {"target_token_ids": torch.cat([target, bonus[:, None]], 1), "draft_token_ids": draft}

    return Case(
        operator="rejection_sample_greedy",
        phase=f"greedy-ids-{BATCH}x{model.drafts}",
        tolerance=None,
        arguments=arguments,
        launch=launcher("rejection_sample_greedy"),
        definition=_first_difference,
        read_bytes=8 * BATCH * (2 * model.drafts + 1),
        written_bytes=8 * BATCH * (model.drafts + 3),
        bytes_limit=LIMIT,
    )


def _first_difference(target_token_ids: Tensor, draft_token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Accept drafts up to the first that differs from the target's token, then emit that token, then -1."""
    rows, counts = [], []
    for wanted, given in zip(target_token_ids.tolist(), draft_token_ids.tolist(), strict=True):
        count = next((n for n, token in enumerate(given) if token != wanted[n]), len(given))
        rows.append([*wanted[: count + 1], *[reference.PLACEHOLDER] * (len(given) - count)])
        counts.append(count)
    out, accepted = torch.tensor(rows), torch.tensor(counts)
    return out, draft_token_ids.shape[1] - accepted, out.gather(1, accepted[:, None]).squeeze(1)
