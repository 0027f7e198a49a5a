"""transformers as the judge of GLM-5.3-Flash's tokens: each has to be its best after the tokens before it.

By induction that is its greedy text, at one forward for a text instead of one for each token.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from dlinfer_ext.e2e import reference

GAP: float = 1e-4  # a best token that is no further ahead than rounding is no reference


@cache
def tokenizer(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


@cache
def _logits(model: Path, ids: tuple[int, ...]) -> Tensor:
    return reference.logits(model, ids)


def prompt_ids(model: Path, prompt: str) -> list[int]:
    ids: list[int] = tokenizer(model)(prompt).input_ids
    return ids


def logits_of(model: Path, prompt: str, generated: list[int]) -> Tensor:
    """Return the logits that each generated token was to be chosen by, fp32 [len(generated), vocabulary]."""
    ids = prompt_ids(model, prompt)
    return _logits(model, (*ids, *generated))[len(ids) - 1 : -1]


def exact_logits_of(model: Path, prompt: str, generated: list[int]) -> Tensor:
    """Return the same from transformers in fp64, rounded to fp32."""
    reference.load(model, "float64").set_experts_implementation("eager")  # its default has no fp64 form
    ids = prompt_ids(model, prompt)
    return reference.logits(model, (*ids, *generated), "float64")[len(ids) - 1 : -1]


def first_wrong(model: Path, prompt: str, generated: list[int]) -> tuple[int | None, float]:
    """Return the first token that transformers would not have chosen, and how clear its choice was up to there.

    The end token is never chosen, which is what LMDeploy's ``ignore_eos`` does.
    """
    logits = logits_of(model, prompt, generated).clone()
    logits[:, tokenizer(model).eos_token_id] = -torch.inf
    best = logits.topk(2)
    wrong = (best.indices[:, 0] != torch.tensor(generated)).nonzero()
    at = int(wrong[0, 0]) if len(wrong) else None
    gaps = (best.values[:, 0] - best.values[:, 1])[: None if at is None else at + 1]
    return at, float(gaps.min())


def assert_greedy(model: Path, rounds: list[list[str]], result: dict[str, Any], tokens: int) -> None:
    """Fail unless every text is transformers' greedy one, `tokens` long, with none of its choices near a tie."""
    prompts = [prompt for batch in rounds for prompt in batch]
    assert [len(t) for t in result["tokens"]] == [tokens] * len(prompts)
    judged = [first_wrong(model, p, t) for p, t in zip(prompts, result["tokens"], strict=True)]
    wrong = {i: at for i, (at, _) in enumerate(judged) if at is not None}
    assert not wrong, f"prompt: first differing token = {wrong}; counters {result['counters']}"
    assert min(gap for _, gap in judged) > GAP, "transformers' own choice is a near tie; take other prompts"
