"""Negative controls of the tests of GLM-5.3-Flash in the engine: with a fault planted, the named case fails.

`python -m tests.mutate` holds the same faults to the scenarios of configs/e2e.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.e2e import engine, test_glm_bf16, test_glm_drafts, test_glm_engine
from tests.e2e.checkpoints import checkpoint  # noqa: F401
from tests.e2e.glm_checkpoints import random_glm5_next
from tests.e2e.glm_reference import assert_greedy
from tests.engine_faults import glm, plant

pytestmark = [pytest.mark.lmdeploy]
PLANT: Final = "tests.engine_faults.plant"
# Fault -> the case of test_glm_engine.py whose tokens it changes.
TOKENS: Final = {
    "swiglu_not_clamped": "a batch",
    "kda_state_a_hundredth_too_small": "a batch",
    "kda_state_of_a_prompt_transposed": "a batch",
    "kda_chunk_drops_convolution_history": "chunks",
    "streams_mixed_by_the_transpose": "a batch",
    "open_pool_forgotten": "a batch",
    "selection_ignored": "a batch",
    "tail_without_room_for_drafts": "drafts",
    "tail_left_behind_by_a_copied_block": "prefix cache",
}
DRAFTS: Final = ("draft_hidden_before_the_final_norm", "draft_chooses_anew", "draft_goes_by_the_last_rows_choice")


def test_every_fault_of_the_model_has_a_control() -> None:
    assert {*TOKENS, *DRAFTS} == {fault.__name__ for fault in glm.FAULTS}


@pytest.mark.long
@pytest.mark.parametrize("fault", ["", *TOKENS])
def test_fault_shows_in_the_tokens(fault: str, checkpoint: Callable[..., Path]) -> None:  # noqa: F811
    _, case = test_glm_engine.CASES[TOKENS.get(fault, "prefix cache")]
    model = checkpoint(random_glm5_next, **case.model)
    (result,) = engine.run_many([case.job(model)], plugins=(PLANT,), env={plant.VARIABLE: fault})
    rounds = [list(batch) for batch in case.rounds]
    if not fault:
        assert_greedy(model, rounds, result, case.tokens)
        return
    assert result["counters"][f"fault.{fault}"] > 0
    with pytest.raises(AssertionError, match="first differing token"):
        assert_greedy(model, rounds, result, case.tokens)


@pytest.mark.long
@pytest.mark.parametrize("fault", ["", *DRAFTS])
def test_fault_shows_in_the_drafts_alone(fault: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:  # noqa: F811
    name, log = "random layer", tmp_path / "drafts.json"
    model = test_glm_drafts.random_layer(checkpoint)
    plugins = (PLANT, "tests.e2e.draft_log")
    env = {plant.VARIABLE: fault, "E2E_DRAFTS": str(log)}
    (result,) = engine.run_many([test_glm_drafts.job(name, model)], plugins=plugins, env=env)
    assert_greedy(model, test_glm_drafts.ROUNDS, result, test_glm_drafts.TOKENS)
    (drafts,) = json.loads(log.read_text(encoding="utf-8"))
    compared, wrong = test_glm_drafts.compare(name, (model, result, drafts))
    assert compared > 0
    assert bool(wrong) == bool(fault)
    if fault:
        assert result["counters"][f"fault.{fault}"] > 0


@pytest.mark.long
@pytest.mark.parametrize("fault", ["swiglu_not_clamped", "kda_state_of_a_prompt_transposed", "open_pool_forgotten"])
def test_fault_shows_in_bf16(fault: str, checkpoint: Callable[..., Path]) -> None:  # noqa: F811
    model = test_glm_bf16.tame(checkpoint)
    for result in test_glm_bf16.run(model, plugins=(PLANT,), env={plant.VARIABLE: fault}):
        ours, theirs, _ = test_glm_bf16.measure(model, result)
        assert ours > test_glm_bf16.LIMIT * theirs, f"RMS error {ours:.4f}, transformers' own {theirs:.4f}"
