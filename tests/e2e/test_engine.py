"""Stock LMDeploy through our operators, in fp32, against transformers' greedy generation: token for token.

More of the same, with the trained checkpoint, are the scenarios of configs/e2e (test_scenarios.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import engine
from tests.e2e.checkpoints import checkpoint, random_qwen3_5, random_qwen3_5_moe, random_qwen3_next  # noqa: F401
from tests.e2e.engine import PROMPTS, accepted, assert_identical, expected

pytestmark = [pytest.mark.lmdeploy]

TRAINED = engine.ROOT / "examples" / "checkpoints" / "tiny_qwen3_5"
PYTHON = (
    "import os\n\n\ndef read_file(path):\n",
    "class Server:\n    def __init__(self, host, port):\n        self.host = host\n",
    "x",
    "if ",
    "    def close(self):\n        if self._file is not None:\n            self._file.close()\n" * 3,
)
Checkpoint = Callable[..., Path]


def test_batch(checkpoint: Checkpoint) -> None:  # noqa: F811
    model = checkpoint(random_qwen3_5)
    result = engine.run(model, [list(PROMPTS)], tokens=96)
    assert_identical(result, expected(model, PROMPTS, 96))
    assert result["counters"]["decode_steps"] > 0


def test_chunked_prefill(checkpoint: Checkpoint) -> None:  # noqa: F811
    model = checkpoint(random_qwen3_5)
    result = engine.run(model, [list(PROMPTS)], max_prefill_token_num=32)
    assert_identical(result, expected(model, PROMPTS, 48))
    assert result["counters"]["prefill_rows_with_history"] > 0


def test_speculative_decoding(checkpoint: Checkpoint) -> None:  # noqa: F811
    model = checkpoint(random_qwen3_5)
    result = engine.run(model, [list(PROMPTS)], tokens=64, drafts=3)
    assert_identical(result, expected(model, PROMPTS, 64))
    assert result["counters"]["verify_steps"] > 0
    assert accepted(result) > 0, result["accepted"]
    assert "0" in result["accepted"], "no verify step rejected every draft, so no rewind ran"


def test_speculative_decoding_with_chunks(checkpoint: Checkpoint) -> None:  # noqa: F811
    model = checkpoint(random_qwen3_5)
    result = engine.run(model, [list(PROMPTS)], drafts=3, max_prefill_token_num=32)
    assert_identical(result, expected(model, PROMPTS, 48))
    assert result["counters"]["prefill_rows_with_history"] > 0
    assert accepted(result) > 0


SHAPES: dict[str, dict[str, Any]] = {
    "head_dim256-gdn128": {"head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "K-differs-from-V": {"linear_key_head_dim": 32, "linear_value_head_dim": 16},
    "HV-equals-H": {"linear_num_key_heads": 4, "linear_num_value_heads": 4},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_other_shapes(shape: dict[str, Any], checkpoint: Checkpoint) -> None:  # noqa: F811
    model = checkpoint(random_qwen3_5, **shape)
    result = engine.run(model, [list(PROMPTS)], tokens=32, drafts=3, max_prefill_token_num=32)
    assert_identical(result, expected(model, PROMPTS, 32))
    assert result["counters"]["verify_steps"] > 0


@pytest.mark.parametrize("chunk", [32, 512], ids=["chunked", "one-shot"])
@pytest.mark.parametrize("writer", [random_qwen3_5_moe, random_qwen3_next], ids=["qwen3_5_moe", "qwen3_next"])
def test_mixture_of_experts(writer: Callable[..., Path], chunk: int, checkpoint: Checkpoint) -> None:  # noqa: F811
    model = checkpoint(writer)
    result = engine.run(model, [list(PROMPTS)], max_prefill_token_num=chunk)
    assert_identical(result, expected(model, PROMPTS, 48))
    assert (result["counters"].get("prefill_rows_with_history", 0) > 0) == (chunk == 32)
