"""GLM-5.3-Flash's raw logits in stock LMDeploy in fp32 against those of transformers in fp64, for the same tokens.

transformers' own fp32 is up to 2e-4 off on these texts, so it could not be the judge at this limit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from tests.e2e import engine
from tests.e2e.checkpoints import checkpoint  # noqa: F401
from tests.e2e.engine import PROMPTS, accepted
from tests.e2e.glm_checkpoints import random_glm5_next
from tests.e2e.glm_reference import exact_logits_of
from tests.e2e.test_glm_engine import text

pytestmark = [pytest.mark.lmdeploy, pytest.mark.xdist_group("glm-logits")]

LIMIT: Final = 5e-5
TOKENS: Final = 16
TOP: Final = 10
ONE, OTHER = text(1, 75, 75)
# A batch; a prompt in chunks of 2, 1, 3 and 69 tokens, another in 20, 13 and 42, and the first whole, in used slots.
ROUNDS: Final = (PROMPTS, (ONE,), (OTHER,), (ONE,))
CHUNKS: Final = "2,1,3 20,13 1000"
SIZES: Final = (2, 1, 3, 69, 20, 13, 42)
# (tokens that may be chosen, drafts): most contexts are longer than 16; those of 75 tokens become longer than 80.
RUNS: Final = ((16, 0), (80, 0), (80, 3))


@pytest.fixture(scope="module")
def results(checkpoint: Callable[..., Path]) -> dict[tuple[int, int], tuple[Path, dict[str, Any]]]:  # noqa: F811
    """What each run did, with the cuts of the plugin."""
    rounds = [[{"text": p, "new": TOKENS} for p in batch] for batch in ROUNDS]
    models = [checkpoint(random_glm5_next, index_topk=topk) for topk, _ in RUNS]
    jobs = [
        {"model": str(m), "drafts": n, "engine": {"num_gpu_blocks": 64}, "rounds": rounds, "top_logits": TOP}
        for m, (_, n) in zip(models, RUNS, strict=True)
    ]
    done = engine.run_many(jobs, env={"E2E_CHUNKS": CHUNKS}, plugins=("tests.e2e.uneven_chunks",))
    return dict(zip(RUNS, zip(models, done, strict=True), strict=True))


def largest_difference(model: Path, result: dict[str, Any]) -> dict[int, float]:
    """Return how far the engine's largest logits are from transformers', by prompt."""
    found = {}
    prompts = [p for batch in ROUNDS for p in batch]
    for i, (prompt, tokens, tops) in enumerate(zip(prompts, result["tokens"], result["top_logits"], strict=True)):
        assert len(tops) == len(tokens) == TOKENS
        assert {len(top) for top in tops} == {TOP}
        want = exact_logits_of(model, prompt, tokens)
        found[i] = max(abs(float(row[int(token)]) - value) for row, top in zip(want, tops, strict=True)
                       for token, value in top.items())  # fmt: skip
    return found


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_logits(run: tuple[int, int], results: dict[tuple[int, int], tuple[Path, dict[str, Any]]]) -> None:
    model, result = results[run]
    found = largest_difference(model, result)
    assert max(found.values()) <= LIMIT, found
    counters = result["counters"]
    assert [counters.get(f"chunk_of_{size}") for size in SIZES] == [1] * len(SIZES), counters
    assert counters["latent_attention"] > 0
    assert counters["sparse_latent_attention"] > 0
    if run[1]:
        assert accepted(result) > 0


def test_a_logit_that_is_a_little_off_is_told(results: dict[tuple[int, int], tuple[Path, dict[str, Any]]]) -> None:
    model, result = results[RUNS[0]]
    tops = result["top_logits"][2]
    token = next(iter(tops[5]))
    result = result | {"top_logits": [*result["top_logits"]]}
    result["top_logits"][2] = [*tops[:5], tops[5] | {token: tops[5][token] + 2 * LIMIT}, *tops[6:]]
    found = largest_difference(model, result)
    assert [i for i, difference in found.items() if difference > LIMIT] == [2]
