"""GLM-5.3-Flash through stock LMDeploy in fp32: token for token transformers' greedy text, whatever the batch.

Engines of one group run in one process, one after the other, and two groups run beside each other.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from tests.e2e import engine
from tests.e2e.checkpoints import checkpoint  # noqa: F401
from tests.e2e.engine import PROMPTS, accepted
from tests.e2e.glm_checkpoints import random_glm5_next
from tests.e2e.glm_reference import assert_greedy, prompt_ids

pytestmark = [pytest.mark.lmdeploy]

KPOOL: Final = 4
SELECT: Final = ("kpool_select", "sparse_latent_attention")
HISTORY: Final = "prefill_rows_with_history"
VERIFY: Final = ("verify_steps", "rejection_sample_greedy")


def text(seed: int, *lengths: int) -> tuple[str, ...]:
    """Return prompts of random characters, as many tokens long."""
    draw = random.Random(seed)
    alphabet = string.ascii_lowercase + string.digits + " .,"
    return tuple("".join(draw.choice(alphabet) for _ in range(n)) for n in lengths)


FOX: Final = "The quick brown fox jumps over the lazy dog. " * 3  # 135 tokens: in the middle of a block and of a pool
LONG_FOX: Final = "The quick brown fox jumps over the lazy dog. " * 10


@dataclass(frozen=True)
class Case:
    """One engine.

    Attributes:
        model: options of the checkpoint.
        engine: fields of LMDeploy's PytorchEngineConfig.
        drafts: of a step; 0 is without MTP.
        tokens: to generate for each prompt.
        rounds: batches of prompts.
        ran: counters that must not be zero, besides those of every case.
        idle: counters that must be zero.
    """

    model: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    drafts: int = 0
    tokens: int = 40
    rounds: tuple[tuple[str, ...], ...] = (PROMPTS,)
    ran: tuple[str, ...] = SELECT
    idle: tuple[str, ...] = ()

    def job(self, model: Path) -> dict[str, Any]:
        rounds = [[{"text": p, "new": self.tokens} for p in batch] for batch in self.rounds]
        config = {"num_gpu_blocks": 64, "max_batch_size": 4} | self.engine
        return {"model": str(model), "drafts": self.drafts, "engine": config, "rounds": rounds}


CHUNKS: Final = {"max_prefill_token_num": 32}
PREFIX: Final = {"enable_prefix_caching": True, "prefix_cache_state_budget": 8}
DENSE: Final = {"index_topk": 2048}
GROUPS: Final[dict[str, dict[str, Case]]] = {
    "one": {
        "a batch": Case(),
        "chunks": Case(engine=CHUNKS, ran=(*SELECT, HISTORY)),
        "drafts": Case(drafts=3, ran=(*SELECT, *VERIFY, "shared_choice")),
        "one draft": Case(drafts=1, ran=(*SELECT, *VERIFY), idle=("shared_choice",)),
        "seven drafts": Case(drafts=7, ran=(*SELECT, *VERIFY, "shared_choice")),
        "four drafts and chunks": Case(
            drafts=4, engine={"max_prefill_token_num": 48}, ran=(*SELECT, *VERIFY, "shared_choice", HISTORY)
        ),
        "slots used again": Case(
            drafts=3, engine=CHUNKS, rounds=(PROMPTS, PROMPTS), ran=(*SELECT, *VERIFY, "shared_choice", HISTORY)
        ),
        "few small blocks": Case(
            drafts=3,
            engine={"max_prefill_token_num": 48, "block_size": 16, "kernel_block_size": 16, "num_gpu_blocks": 20},
            ran=(*SELECT, *VERIFY, "shared_choice", HISTORY),
        ),
        "graphs asked for": Case(engine={"eager_mode": False}, idle=("captures", "padded_steps")),
        "graphs asked for, drafts": Case(drafts=3, engine={"eager_mode": False}, idle=("captures", "padded_steps")),
    },
    "two": {
        "everything is chosen": Case(model=DENSE, ran=("latent_attention",), idle=SELECT),
        "everything is chosen, chunks and drafts": Case(
            model=DENSE, drafts=3, engine=CHUNKS, ran=("latent_attention", *VERIFY, HISTORY), idle=SELECT
        ),
        "released heads": Case(
            model={"kv_lora_rank": 512, "linear_head_dim": 128, "index_head_dim": 128},
            drafts=2, engine=CHUNKS, tokens=24, ran=(*SELECT, *VERIFY, "shared_choice", HISTORY),
        ),
        "softplus gate, long prompts": Case(
            model={"lower_bound": None, "index_topk": 64},
            drafts=3, engine={"max_prefill_token_num": 100}, rounds=(text(6, 700, 415, 30),),
            ran=(*SELECT, *VERIFY, "shared_choice", HISTORY, "latent_attention"),
        ),
        "fourteen prompts": Case(
            model={"index_topk": 32}, engine={"max_batch_size": 8, "block_size": 32, "num_gpu_blocks": 40},
            rounds=(text(5, 1, 3, 4, 5, 16, 17, 31, 33, 64, 65, 97, 130, 201, 7),),
        ),
        "fourteen prompts, chunks and drafts": Case(
            model={"index_topk": 32}, drafts=3, engine={"max_batch_size": 8, "max_prefill_token_num": 33},
            rounds=(text(5, 1, 3, 4, 5, 16, 17, 31, 33, 64, 65, 97, 130, 201, 7),),
            ran=(*SELECT, *VERIFY, "shared_choice", HISTORY),
        ),
        "shared choice": Case(
            model={"shared_choice": True}, drafts=3, engine=CHUNKS, ran=(*SELECT, *VERIFY, "shared_choice", HISTORY),
        ),
        "prefix cache": Case(
            engine=PREFIX | {"max_prefill_token_num": 256}, tokens=24,
            rounds=tuple((p,) for p in (
                FOX, FOX + " And then?", FOX + " And then what happened next to the fox?", FOX, FOX[:100] + "zzz",
                FOX[:66],
            )),
        ),
        "prefix cache, chunks and drafts": Case(
            engine=PREFIX | {"max_prefill_token_num": 64}, drafts=3, tokens=24,
            rounds=tuple((p,) for p in (LONG_FOX, LONG_FOX + " And then?", LONG_FOX[:400] + "zzz", LONG_FOX)),
            ran=(*SELECT, *VERIFY, "shared_choice", HISTORY),
        ),
    },
    "ranks": {
        "two ranks": Case(engine={"tp": 2, "distributed_executor_backend": "mp"}, tokens=24),
        "two ranks, chunks and drafts": Case(
            engine={"tp": 2, "distributed_executor_backend": "mp", "max_prefill_token_num": 64},
            drafts=3, tokens=24, ran=(*SELECT, *VERIFY, "shared_choice", HISTORY),
        ),
    },
}  # fmt: skip
CASES: Final = {name: (group, case) for group, cases in GROUPS.items() for name, case in cases.items()}
Result = tuple[Case, Path, dict[str, Any]]


@pytest.fixture(scope="module")
def outcome(checkpoint: Callable[..., Path]) -> Callable[[str], Result]:  # noqa: F811
    """Run the group of a case once and give what the case's engine did."""
    done: dict[str, Result] = {}

    def get(name: str) -> Result:
        if name not in done:
            cases = GROUPS[CASES[name][0]]
            models = [checkpoint(random_glm5_next, **case.model) for case in cases.values()]
            jobs = [case.job(model) for case, model in zip(cases.values(), models, strict=True)]
            results = engine.run_many(jobs, timeout_s=400)
            done.update(zip(cases, zip(cases.values(), models, results, strict=True), strict=True))
        return done[name]

    return get


def named(*names: str) -> list[Any]:
    """Return cases as parameters, those of a group for one worker; ranks find each other at a port."""
    workers = {name: "ports" if group == "ranks" else f"glm-{group}" for name, (group, _) in CASES.items()}
    return [pytest.param(n, marks=pytest.mark.xdist_group(workers[n]), id=n) for n in names]


def with_drafts() -> list[Any]:
    return named(*(name for name, (_, case) in CASES.items() if case.drafts))


@pytest.mark.parametrize("name", named(*CASES))
def test_tokens_are_those_of_transformers(name: str, outcome: Callable[[str], Result]) -> None:
    case, model, result = outcome(name)
    assert_greedy(model, [list(batch) for batch in case.rounds], result, case.tokens)
    wanted = {"kda", "causal_conv1d", "kpool_update", *case.ran}
    if case.drafts == 0 or case.tokens > case.drafts + 1:
        wanted.add("kda_update")
    for worker in result["workers"]:
        counters = worker["counters"]
        lacking = {w for w in wanted if not counters.get(w)} - (
            {"rejection_sample_greedy"} if worker["rank"] else set()
        )
        assert not lacking, counters
        assert not {i for i in case.idle if counters.get(i)}, counters


@pytest.mark.parametrize("name", with_drafts())
def test_drafts_are_accepted_and_rejected(name: str, outcome: Callable[[str], Result]) -> None:
    _, _, result = outcome(name)
    assert accepted(result) > 0, result["accepted"]
    assert "0" in result["accepted"], "no verify step rejected every draft, so no rewind ran"


def pools_completed_by_rejected_drafts(result: dict[str, Any], drafts: int) -> int:
    """Count the pools whose last token was a draft that was not kept: they were written, and have to be again."""
    rows = [row for worker in result["workers"] for row in worker["verify_rows"]]
    rejected = [(history + kept + 1, history + drafts + 1) for _, history, kept, _ in rows]
    return sum(end // KPOOL - first // KPOOL for first, end in rejected)


@pytest.mark.parametrize("name", with_drafts())
def test_rejected_drafts_complete_pools(name: str, outcome: Callable[[str], Result]) -> None:
    case, _, result = outcome(name)
    assert pools_completed_by_rejected_drafts(result, case.drafts) > 0


def test_counting_of_completed_pools() -> None:
    """Tokens 6 and 7 of a row are drafts: the second ends a pool, and counts if it was not kept."""
    for kept, pools in ((0, 1), (1, 1), (2, 0)):
        result = {"workers": [{"verify_rows": [[1, 5, kept, 9]]}]}
        assert pools_completed_by_rejected_drafts(result, 2) == pools
    assert pools_completed_by_rejected_drafts({"workers": [{"verify_rows": [[1, 4, 0, 9]]}]}, 2) == 0


@pytest.mark.parametrize("name", named("slots used again"))
def test_slots_are_used_again(name: str, outcome: Callable[[str], Result]) -> None:
    _, _, result = outcome(name)
    slots = {row[0] for row in result["workers"][0]["verify_rows"]}
    assert 0 < len(slots) < len(result["tokens"])


@pytest.mark.parametrize("name", named("prefix cache", "prefix cache, chunks and drafts"))
def test_prefixes_are_found(name: str, outcome: Callable[[str], Result]) -> None:
    _, _, result = outcome(name)
    assert sum(hit > 0 for hit in result["cached_tokens"]) >= 2, result["cached_tokens"]


@pytest.mark.parametrize("name", named("prefix cache"))
def test_a_prefix_ends_within_a_block_and_a_pool(name: str, outcome: Callable[[str], Result]) -> None:
    _, model, result = outcome(name)
    assert len(prompt_ids(model, FOX)) == 135
    assert any(hit % 64 and hit % KPOOL for hit in result["cached_tokens"]), result["cached_tokens"]


@pytest.mark.parametrize("name", named("everything is chosen", "softplus gate, long prompts"))
def test_contexts_lie_on_both_sides_of_the_limit(name: str, outcome: Callable[[str], Result]) -> None:
    """The one never has as many tokens as may be chosen, the other begins with fewer and ends with more."""
    case, model, _ = outcome(name)
    lengths = [len(prompt_ids(model, p)) for batch in case.rounds for p in batch]
    limit = case.model["index_topk"]
    assert min(lengths) < limit
    assert (max(lengths) + case.tokens > limit) == ("sparse_latent_attention" in case.ran)


@pytest.mark.parametrize("name", named(*GROUPS["ranks"]))
def test_each_rank_ran_the_model(name: str, outcome: Callable[[str], Result]) -> None:
    _, _, result = outcome(name)
    assert len({worker["pid"] for worker in result["workers"]} - {result["own"]["pid"]}) == 2
    # All ranks choose the same tokens by themselves, as often.
    choices = [worker["counters"]["kpool_select"] for worker in result["workers"]]
    assert choices[0] == choices[1]
