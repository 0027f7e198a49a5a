"""The requests of a scenario: their prompts, and what the reference answers to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from . import engines, prompts, soak
from .engines import Logits
from .prompts import Prompt
from .scenario import Request, Run, Scenario
from .target import Target

Ids = tuple[int, ...]
KEPT_LOGITS: Final = 64  # of the reference's


@dataclass(frozen=True)
class Answer:
    """What the reference gives: tokens, and logits at their places where those are compared."""

    tokens: Ids
    logits: tuple[Logits, ...] = ()


@dataclass(frozen=True)
class Asked:
    """A request with its prompt, what is expected of it, and its name in reports."""

    request: Request
    prompt: Prompt
    name: str
    new: int
    want: tuple[int, ...]
    want_logits: tuple[Logits, ...]
    stop: int | None

    def body(self) -> dict[str, Any]:
        return {
            "text": self.prompt.text,
            "new": self.new,
            "stop_token_ids": [self.stop] if self.stop is not None else None,
            "cancel_after": self.request.cancel_after,
            "give_up_after": self.request.give_up_after,
            "wait": self.request.wait,
        }


def tokenizer_of(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, trust_remote_code=False)


def ask_for(scenario: Scenario, target: Target, deadline: float) -> list[list[Asked]]:
    """Build the prompts and what the reference answers to them."""
    tokenizer = tokenizer_of(target.model)
    rounds = [list(r) for r in scenario.rounds] if scenario.soak is None else [soak.drawn(scenario.soak)[0]]
    flat = [r for requests in rounds for r in requests]
    built = [prompts.build(tokenizer, r, number) for number, r in enumerate(flat)]
    lengths = [r.new or scenario.tokens for r in flat]
    unique: dict[Ids, int] = {}
    for prompt, new in zip(built, lengths, strict=True):
        unique[prompt.ids] = max(new, unique.get(prompt.ids, 0))
    if scenario.lose_worker:
        answers = {ids: Answer(tuple(range(new))) for ids, new in unique.items()}  # nothing is compared
    elif target.reference == "transformers":
        answers = _by_transformers(scenario, target, unique)
    else:
        answers = _by_plain_run(scenario, target, built, unique, deadline)
    asked = []
    for number, (request, prompt, new) in enumerate(zip(flat, built, lengths, strict=True)):
        answer, stop = answers[prompt.ids].tokens[:new], None
        if request.stop_at is not None:
            stop = answer[request.stop_at - 1]
            answer = answer[: answer.index(stop)]  # LMDeploy leaves the stop token out
        name = f"request {number} ({request.tokens} tokens)"
        asked.append(Asked(request, prompt, name, new, answer, answers[prompt.ids].logits, stop))
    cut = iter(asked)
    return [[next(cut) for _ in requests] for requests in rounds]


def _by_transformers(scenario: Scenario, target: Target, unique: dict[Ids, int]) -> dict[Ids, Answer]:
    from . import reference

    dtype = target.dtype_of(scenario)
    answers: dict[Ids, Answer] = {}
    for new in set(unique.values()):
        prompts_ids = [ids for ids, n in unique.items() if n == new]
        got = reference.greedy(target.model, prompts_ids, new, dtype)
        answers |= {ids: Answer(tuple(tokens)) for ids, tokens in zip(prompts_ids, got, strict=True)}
    if dtype == "float32":
        return answers
    for ids, answer in answers.items():
        table = reference.logits(target.model, [*ids, *answer.tokens], dtype)[len(ids) - 1 : -1]
        values, tokens = (t.tolist() for t in table.topk(min(KEPT_LOGITS, table.size(1))))
        answers[ids] = Answer(
            answer.tokens, tuple(dict(zip(*row, strict=True)) for row in zip(tokens, values, strict=True))
        )
    return answers


def _by_plain_run(
    scenario: Scenario, target: Target, built: Sequence[Prompt], unique: dict[Ids, int], deadline: float
) -> dict[Ids, Answer]:
    """Let LMDeploy itself answer: one request at a time, no drafts, prompts in one piece."""
    texts = {p.ids: p.text for p in built}
    kept = {k: v for k, v in scenario.engine.items() if k in ("tp", "session_len", "distributed_executor_backend")}
    rounds = [[{"text": texts[ids], "new": new}] for ids, new in unique.items()]
    run = Run(label="plain", drafts=0, engine=kept)
    outputs = engines.session(scenario, target, [engines.job(run, target, scenario, rounds)], deadline)[0]["outputs"]
    return {ids: Answer(tuple(o["tokens"]), engines.logits_of(o)) for ids, o in zip(unique, outputs, strict=True)}
