"""Every draft of GLM-5.3-Flash in stock LMDeploy against the draft layer made of transformers' modules.

Counts of accepted drafts see little of a chain after its first wrong draft; here each draft of each chain counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from transformers import DynamicCache

from dlinfer_ext.e2e import reference
from dlinfer_ext.e2e.simulation import hidden_states, load_head
from tests.e2e import engine
from tests.e2e.checkpoints import checkpoint  # noqa: F401
from tests.e2e.engine import accepted
from tests.e2e.glm_checkpoints import TRAINED_GLM, changed, random_glm5_next
from tests.e2e.glm_reference import assert_greedy, prompt_ids

pytestmark = [pytest.mark.lmdeploy, pytest.mark.xdist_group("glm-drafts")]
TOKENS: Final = 32
SHORT: Final = "def read("
LONG: Final = "class Server:\n    def __init__(self, host, port):\n        self.host = host\n        self.port = port\n"
# Each alone, then beside each other: a draft may depend on its own request only.
ROUNDS: Final = [[SHORT], [LONG], [SHORT, LONG, "import os\n"]]


@dataclass(frozen=True)
class Case:
    """One engine: what may be chosen decides whether contexts are shorter (2048) or longer, or become longer."""

    model: str
    topk: int
    drafts: int
    engine: dict[str, Any] = field(default_factory=dict)


CASES: Final = {
    "all chosen": Case("trained", 2048, 3),
    "selection": Case("trained", 32, 4),
    "selection, chunks": Case("trained", 32, 3, {"max_prefill_token_num": 33}),
    # Hardly a draft of this one is accepted, and it goes by its hidden states as much as by its tokens.
    "random layer": Case("random", 16, 3),
}
Result = tuple[Path, dict[str, Any], list[dict[str, Any]]]


def random_layer(write: Callable[..., Path]) -> Path:
    """Write the checkpoint whose draft layer is drawn like every other."""
    return write(random_glm5_next, index_topk=CASES["random layer"].topk, good_mtp=False)


def job(name: str, model: Path) -> dict[str, Any]:
    """Return a case as a job of an engine."""
    case = CASES[name]
    rounds = [[{"text": p, "new": TOKENS} for p in batch] for batch in ROUNDS]
    config = {"num_gpu_blocks": 64} | case.engine
    return {"model": str(model), "drafts": case.drafts, "engine": config, "rounds": rounds}


@pytest.fixture(scope="module")
def results(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:  # noqa: F811
    folder = tmp_path_factory.mktemp("drafts")

    def model(case: Case) -> Path:
        if case.model == "random":
            return random_layer(checkpoint)
        return TRAINED_GLM if case.topk == 32 else changed(TRAINED_GLM, folder / "model", index_topk=case.topk)

    models = [model(case) for case in CASES.values()]
    jobs = [job(name, m) for name, m in zip(CASES, models, strict=True)]
    log = folder / "drafts.json"
    done = engine.run_many(jobs, env={"E2E_DRAFTS": str(log)}, plugins=("tests.e2e.draft_log",))
    logs = json.loads(log.read_text(encoding="utf-8"))
    return dict(zip(CASES, zip(models, done, logs, strict=True), strict=True))


@cache
def head_of(model: Path) -> Any:
    return load_head(reference.load(model), model)


@torch.no_grad()
def chains(model: Path, tokens: list[int], given: dict[int, list[int]], drafts: int) -> list[list[int]]:
    """Return the draft layer's drafts from every position of a text but the last, by base.

    Args:
        model: the checkpoint.
        tokens: of the text.
        given: by base, drafts that each next step is fed; a base without any is fed zeros.
        drafts: how many from each base.
    """
    trunk, head = reference.load(model), head_of(model)
    bases, topk = len(tokens) - 1, head.config.index_topk
    ids, cache = torch.tensor([tokens]), DynamicCache(config=head.config)
    state, chosen, base, out = hidden_states(trunk, ids)[:, :-1], None, torch.arange(bases), []
    fed = ids[:, 1:]
    for k in range(1, drafts + 1):
        state, chosen = head(trunk, fed, state, chosen, cache)
        out.append(trunk.lm_head(state)[0].argmax(-1))
        fed = torch.tensor([[given[i][k - 1] if i in given else 0 for i in range(bases)]])
        # Where all was chosen a step goes on to see the ones before it, and itself.
        own = torch.where(base < topk, k * bases + base, -1).to(chosen.dtype)
        chosen = torch.cat([chosen, own[None, :, None]], -1)
    return torch.stack(out, 1).tolist()


def wrong_drafts(model: Path, text: list[int], request: dict[str, Any], drafts: int) -> tuple[int, list[str]]:
    """Return how many drafts of one request were compared, and which are not the draft layer's."""
    given = {base: rest for base, *rest in request["drafts"]}
    assert len(given) == len(request["drafts"]), "two rounds of drafts from one position"
    right = chains(model, text, given, drafts)
    known = {base: rest for base, rest in given.items() if base < len(right)}
    wrong = [f"base {b}: {d}; wanted {right[b]}" for b, d in known.items() if d != right[b]]
    return drafts * len(known), wrong


def compare(name: str, result: Result) -> tuple[int, dict[int, list[str]]]:
    """Return the number of drafts compared, and what is wrong by request."""
    model, ran, log = result
    prompts = [p for batch in ROUNDS for p in batch]
    texts = [prompt_ids(model, p) + t for p, t in zip(prompts, ran["tokens"], strict=True)]
    assert len(log) == len(texts)
    compared, wrong = 0, {}
    for number, request in enumerate(log):
        text = next(t for t in texts if t[1 : 1 + len(request["begin"])] == request["begin"])
        count, found = wrong_drafts(model, text, request, CASES[name].drafts)
        compared += count
        if found:
            wrong[number] = found
    return compared, wrong


@pytest.mark.parametrize("name", CASES)
def test_every_draft_is_the_draft_layers(name: str, results: dict[str, Result]) -> None:
    model, ran, _ = results[name]
    compared, wrong = compare(name, results[name])
    assert not wrong
    assert compared >= 50 * CASES[name].drafts, compared
    assert_greedy(model, ROUNDS, ran, TOKENS)
    counters = ran["counters"]
    assert counters["shared_choice"] > 0
    assert (counters.get("kpool_select", 0) > 0) == (CASES[name].topk != 2048)
    assert (accepted(ran) > 20) == (CASES[name].model == "trained")
    assert (counters["prefill_rows_with_history"] > 0) == ("chunks" in name)


def test_one_other_draft_is_told(results: dict[str, Result]) -> None:
    model, ran, log = results["selection"]
    changed_log = json.loads(json.dumps(log))
    row = changed_log[1]["drafts"][2]
    row[-1] = (row[-1] + 1) % 256
    _, wrong = compare("selection", (model, ran, changed_log))
    assert list(wrong) == [1]
    assert len(wrong[1]) == 1
