"""bf16: near ties make tokens differ, so logits are compared along the tokens that the engine chose.

The scale is transformers' own rounding: its bf16 logits against its fp32 logits of the same tokens. The engine rounds
in other places, so it may be off by as much again, and not by more than twice that.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from dlinfer_ext.testing import rms_error
from tests.e2e import engine
from tests.e2e.checkpoints import checkpoint, random_qwen3_5, transformers_logits  # noqa: F401

pytestmark = [pytest.mark.lmdeploy]
LIMIT = 2.0  # times transformers' own error in bf16


@pytest.mark.parametrize("state", ["bfloat16", "float32"], ids=["bf16-state", "fp32-state"])
def test_logits_of_generated_tokens(state: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:  # noqa: F811
    model = checkpoint(random_qwen3_5, dtype="bfloat16")
    prompts = ["hello world", "The quick brown fox jumps over the lazy dog. " * 3, "ab"]
    result = engine.run(
        model,
        [prompts],
        tokens=24,
        max_prefill_token_num=64,
        logits=tmp_path / "logits.safetensors",
        env={"DLINFER_EXT_CPU_DTYPE": "auto", "LMDEPLOY_FP32_MAMBA_SSM_DTYPE": "1" if state == "float32" else "0"},
    )
    assert result["counters"]["prefill_rows_with_history"] > 0
    logits = load_file(tmp_path / "logits.safetensors")
    tokenizer = AutoTokenizer.from_pretrained(model)
    ours, theirs = [], []
    for i, prompt in enumerate(prompts):
        ids = tokenizer(prompt).input_ids
        generated = result["tokens"][i]
        rows = slice(len(ids) - 1, len(ids) - 1 + len(generated))
        exact = transformers_logits(model, ids + generated, "float32")[rows]
        rounded = transformers_logits(model, ids + generated, "bfloat16")[rows]
        got = logits[str(i)].float()[: len(generated)]
        seen = torch.isfinite(got)  # the end token is masked with -inf
        ours.append(rms_error(got[seen], exact[seen]))
        theirs.append(rms_error(rounded[seen], exact[seen]))
    assert max(theirs) > 0
    worst = max(o / t for o, t in zip(ours, theirs, strict=True))
    assert worst <= LIMIT, f"error over transformers' own by prompt: {ours} / {theirs}"
