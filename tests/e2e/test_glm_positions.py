"""GLM-5.3-Flash has no rotary positions: nothing of them, nor of LMDeploy's attention, runs while it serves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e import engine
from tests.e2e.checkpoints import TRAINED, checkpoint  # noqa: F401
from tests.e2e.engine import PROMPTS
from tests.e2e.glm_checkpoints import random_glm5_next

pytestmark = [pytest.mark.lmdeploy]


def test_no_rotary_positions_and_none_of_the_hosts_attention(checkpoint: Callable[..., Path]) -> None:  # noqa: F811
    """Qwen3.5 in the same process is the control: there the same watch sees all of it."""
    models = (checkpoint(random_glm5_next), TRAINED)
    rounds = [[{"text": p, "new": 12} for p in PROMPTS]]
    jobs = [
        {"model": str(m), "drafts": n, "engine": {"num_gpu_blocks": 64, "max_prefill_token_num": 64}, "rounds": rounds}
        for m in models
        for n in (0, 2)
    ]
    results = engine.run_many(jobs, plugins=("tests.e2e.rotary_watch",))
    seen = [{k for k, n in r["counters"].items() if k.startswith("watched.") and n} for r in results]
    assert seen[:2] == [set(), set()]
    for result in results[:2]:
        counters = result["counters"]
        assert counters["prefill_rows_with_history"] > 0
        assert counters["sparse_latent_attention"] > 0
    wanted = {"apply_rotary_pos_emb", "fill_kv_cache", "prefill_attention", "paged_prefill_attention", "Attention"}
    wanted |= {"ApplyRotaryEmb", "RotaryEmbeddingBuildSpec", "PagedAttentionBuildSpec", "ApplyRotaryEmbBuildSpec"}
    assert {f"watched.{name}" for name in wanted} <= seen[2] & seen[3]
    assert "watched.paged_decode_attention" in seen[2]
