"""`plan` beside a running engine: the bytes that LMDeploy allocated for the tiny models, counted in their storages."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dlinfer_ext.framework.lmdeploy.plan import Card

from .checkpoints import TRAINED
from .engine import run_many
from .glm_checkpoints import TRAINED_GLM
from .plan_process import planned

BATCH, FREE = 5, 96 << 20  # small, so that LMDeploy's division of what is left has to halve nothing

CASES = {
    "qwen3.5": (TRAINED, 0),
    "qwen3.5, drafts": (TRAINED, 3),
    "glm": (TRAINED_GLM, 0),
    "glm, drafts": (TRAINED_GLM, 3),
}


@cache
def held(case: str) -> dict[str, Any]:
    """Start an engine that takes its blocks from FREE bytes; return what pool_log.py saw."""
    model, drafts = CASES[case]
    with tempfile.TemporaryDirectory(prefix="dlinfer_ext_plan_") as folder:
        out = Path(folder) / "pools.json"
        engine = {"num_gpu_blocks": 0, "max_batch_size": BATCH, "max_prefill_token_num": 256}
        job = {
            "model": str(model),
            "drafts": drafts,
            "engine": engine,
            "rounds": [[{"text": "hello", "new": 4}]],
            "top_logits": 0,
            "lose_worker": False,
        }
        env = {"E2E_POOLS": str(out), "DLINFER_EXT_CPU_MEMORY": str(FREE)}
        run_many([job], plugins=("tests.e2e.pool_log",), env=env)
        report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return report


@cache
def card(case: str) -> Card:
    model, drafts = CASES[case]
    settings = {"drafts": drafts, "batch": BATCH, "dtype": "float32", "max_prefill_tokens": 256}
    first = planned(model, memory=1 << 40, **settings)
    # The CPU vendor reports FREE bytes whatever the weights take.
    return planned(model, memory=FREE + first.weights + first.draft_weights, **settings)


@pytest.mark.parametrize("case", CASES)
def test_the_plan_is_what_the_engine_allocates(case: str) -> None:
    seen, plan = held(case), card(case)
    drafts = CASES[case][1]
    assert seen["weights"] == [[plan.weights, plan.draft_weights]]
    assert seen["states"] == [[plan.slots, plan.slots * plan.slot]]
    blocks = [plan.block, plan.draft_block] if drafts else [plan.block]
    assert seen["caches"] == [[plan.blocks, plan.blocks * size] for size in blocks]
    assert plan.blocks > 16
    assert sum(pool.bytes for pool in plan.states) <= plan.slot < sum(pool.bytes for pool in plan.states) + 256 * 8


@pytest.mark.parametrize("without", ["the draft layer's blocks", "the ring", "fp32 of the state", "the spare slots"])
def test_a_plan_without_a_part_is_not_what_the_engine_allocates(without: str) -> None:
    """What each figure would be if the count left something out: none of them may pass for the engine's."""
    seen, plan = held("glm, drafts"), card("glm, drafts")
    ring = next(pool.bytes for pool in plan.states if "recurrent" in pool.name)
    wrong = {
        "the draft layer's blocks": (seen["caches"][0][0], plan.blocks * (plan.block + plan.draft_block) // plan.block),
        "the ring": (seen["states"][0][1], plan.slots * (plan.slot - ring + ring // 4)),
        "fp32 of the state": (seen["states"][0][1], plan.slots * (plan.slot - ring // 2)),
        "the spare slots": (seen["states"][0][1], (plan.slots - 2) * plan.slot),
    }[without]
    assert wrong[0] != wrong[1]
