"""GLM-5.3-Flash in bf16: the engine's logits and tokens against transformers', along the tokens that it chose.

The measure is transformers' own rounding, as in test_engine_bf16.py. The model is tamer than the others: with random
layers as strong as those, a rounding that turns a choice of experts or tokens is an error of fifteen percent.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from dlinfer_ext.e2e import reference
from dlinfer_ext.testing import rms_error
from tests.e2e import engine
from tests.e2e.checkpoints import checkpoint  # noqa: F401
from tests.e2e.engine import PROMPTS, accepted
from tests.e2e.glm_checkpoints import random_glm5_next
from tests.e2e.glm_reference import prompt_ids, tokenizer

pytestmark = [pytest.mark.lmdeploy, pytest.mark.xdist_group("glm-logits")]

LIMIT: Final = 1.5  # times transformers' own error in bf16; measured 0.9
GAP: Final = 0.75  # logits that a chosen token may be below transformers' best in fp32; measured 0.3
TOKENS: Final = 24


def tame(write: Callable[..., Path]) -> Path:
    return write(random_glm5_next, dtype="bfloat16", residual=0.4)


def run(model: Path, **more: Any) -> list[dict[str, Any]]:
    rounds = [[{"text": p, "new": TOKENS} for p in PROMPTS]]
    config = {"num_gpu_blocks": 64, "max_prefill_token_num": 64}
    jobs = [{"model": str(model), "drafts": n, "engine": config, "rounds": rounds, "top_logits": 10} for n in (0, 3)]
    return engine.run_many(jobs, env={"DLINFER_EXT_CPU_DTYPE": "auto"} | more.pop("env", {}), **more)


def measure(model: Path, result: dict[str, Any]) -> tuple[float, float, float]:
    """Return the engine's RMS error, transformers' own, and how far a chosen token is below the best, in fp32."""
    ours, theirs, wanted, below = [], [], [], 0.0
    for prompt, tokens, tops in zip(PROMPTS, result["tokens"], result["top_logits"], strict=True):
        assert len(tops) == len(tokens) == TOKENS
        ids = prompt_ids(model, prompt)
        exact, rounded = (
            reference.logits(model, ids + tokens, dtype)[len(ids) - 1 : -1] for dtype in ("float32", "bfloat16")
        )
        places = [(t, int(token)) for t, top in enumerate(tops) for token in top]
        rows, columns = (torch.tensor(x) for x in zip(*places, strict=True))
        ours.append(torch.tensor([tops[t][str(token)] for t, token in places]))
        theirs.append(rounded[rows, columns])
        wanted.append(exact[rows, columns])
        exact[:, tokenizer(model).eos_token_id] = -torch.inf
        chosen = exact.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        below = max(below, float((exact.max(-1).values - chosen).max()))
    want = torch.cat(wanted)
    return rms_error(torch.cat(ours), want), rms_error(torch.cat(theirs), want), below


def test_logits_and_tokens(checkpoint: Callable[..., Path]) -> None:  # noqa: F811
    model = tame(checkpoint)
    plain, drafts = run(model)
    for result in (plain, drafts):
        assert result["counters"]["prefill_rows_with_history"] > 0
        assert result["counters"]["sparse_latent_attention"] > 0
        ours, theirs, below = measure(model, result)
        assert 0 < theirs < 0.1
        assert ours <= LIMIT * theirs, f"RMS error {ours:.4f}, transformers' own {theirs:.4f}"
        assert below <= GAP
    assert accepted(drafts) > 0
