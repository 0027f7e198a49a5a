"""Stock LMDeploy through our operators, in fp32, against transformers' greedy generation: token for token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import engine
from tests.e2e.checkpoints import checkpoint, random_qwen3_5, random_qwen3_5_moe, random_qwen3_next  # noqa: F401
from tests.e2e.engine import PROMPTS, SHORT, accepted, assert_identical, expected

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


def both(name: str, checkpoint: Checkpoint) -> tuple[Path, tuple[str, ...]]:  # noqa: F811
    """Return the model and prompts of "trained" or "random"."""
    return (TRAINED, PYTHON) if name == "trained" else (checkpoint(random_qwen3_5), PROMPTS)


models = pytest.mark.parametrize("name", ["trained", "random"])


@models
def test_batch(name: str, checkpoint: Checkpoint) -> None:  # noqa: F811
    model, prompts = both(name, checkpoint)
    result = engine.run(model, [list(prompts)], tokens=96)
    assert_identical(result, expected(model, prompts, 96))
    assert result["counters"]["decode_steps"] > 0


@models
def test_chunked_prefill(name: str, checkpoint: Checkpoint) -> None:  # noqa: F811
    model, prompts = both(name, checkpoint)
    result = engine.run(model, [list(prompts)], max_prefill_token_num=32)
    assert_identical(result, expected(model, prompts, 48))
    assert result["counters"]["prefill_rows_with_history"] > 0


@pytest.mark.parametrize("tail", [1, 2])
@pytest.mark.parametrize("drafts", [0, 4])
def test_last_chunk_shorter_than_the_window(tail: int, drafts: int, checkpoint: Checkpoint) -> None:  # noqa: F811
    """A long prompt whose last chunk is one or two tokens: the chunk keeps the history it continues."""
    model = checkpoint(random_qwen3_5)
    prompts = ("abcdefgh" * 8 + "z" * tail,)  # byte-level: 64 + tail tokens
    result = engine.run(model, [list(prompts)], drafts=drafts, max_prefill_token_num=64)
    assert_identical(result, expected(model, prompts, 48))
    assert result["counters"]["prefill_rows_with_history"] == 1


@pytest.mark.parametrize("drafts", [0, 4])
def test_prompts_of_one_and_two_tokens_beside_a_long_one(drafts: int, checkpoint: Checkpoint) -> None:  # noqa: F811
    model = checkpoint(random_qwen3_5)
    prompts = (PROMPTS[2], *SHORT)
    result = engine.run(model, [list(prompts)], drafts=drafts)
    assert_identical(result, expected(model, prompts, 48))


@models
@pytest.mark.parametrize("drafts", [1, 3, 4])
def test_speculative_decoding(name: str, drafts: int, checkpoint: Checkpoint) -> None:  # noqa: F811
    model, prompts = both(name, checkpoint)
    result = engine.run(model, [list(prompts)], tokens=64, drafts=drafts)
    assert_identical(result, expected(model, prompts, 64))
    assert result["counters"]["verify_steps"] > 0
    assert accepted(result) > 0, result["accepted"]
    assert "0" in result["accepted"], "no verify step rejected every draft, so no rewind ran"


@models
def test_speculative_decoding_with_chunks(name: str, checkpoint: Checkpoint) -> None:  # noqa: F811
    model, prompts = both(name, checkpoint)
    result = engine.run(model, [list(prompts)], drafts=3, max_prefill_token_num=32)
    assert_identical(result, expected(model, prompts, 48))
    assert result["counters"]["prefill_rows_with_history"] > 0
    assert accepted(result) > 0


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("chunk", [32, 256])
def test_prefix_caching(drafts: int, chunk: int, checkpoint: Checkpoint) -> None:  # noqa: F811
    model = checkpoint(random_qwen3_5)
    base = "The quick brown fox jumps over the lazy dog. " * 8  # longer than a chunk and the overlap MTP recomputes
    prompts = (base, base + " And then?", base + " And then what happened next?", base, base[:100] + "zzz")
    result = engine.run(
        model,
        [[p] for p in prompts],
        drafts=drafts,
        max_prefill_token_num=chunk,
        enable_prefix_caching=True,
        prefix_cache_state_budget=8,
    )
    assert_identical(result, expected(model, prompts, 48))
    assert sum(result["cached_tokens"]) > 0, "no prefix was found in the cache"
    assert result["counters"]["prefill_rows_with_history"] > 0


# LMDeploy picks a free port before it takes it, so tests that need ports run one after the other.
@pytest.mark.xdist_group("ports")
@pytest.mark.parametrize(("drafts", "chunk"), [(0, 256), (3, 32)], ids=["plain", "speculative-chunked"])
def test_two_ranks(drafts: int, chunk: int, checkpoint: Checkpoint) -> None:  # noqa: F811
    model = checkpoint(random_qwen3_5)
    result = engine.run(
        model,
        [list(PROMPTS)],
        drafts=drafts,
        max_prefill_token_num=chunk,
        tp=2,
        distributed_executor_backend="mp",
    )
    assert_identical(result, expected(model, PROMPTS, 48))
    first, second = result["workers"]
    assert not drafts or accepted(result) > 0
    assert ("rejection_sample_greedy" in first["counters"], first["rank"]) == (drafts > 0, 0)
    assert "rejection_sample_greedy" not in second["counters"], "only the first rank samples"


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


def test_acceptance_histogram_is_the_one_simulated_in_plain_torch() -> None:
    """Exact: a recycled position, norm or cache that is a little off changes counts long before it changes tokens.

    The simulation (examples/train_tiny_qwen3_5.py) drafts over transformers' hidden states and knows nothing of
    LMDeploy; TRAINING.json holds its histogram of accepted drafts per verify step, the last extra step included.
    """
    held_out = json.loads((engine.ROOT / "tests/e2e/data/heldout_prompts.json").read_text(encoding="utf-8"))
    simulated = json.loads((TRAINED / "TRAINING.json").read_text(encoding="utf-8"))["head"]["histogram"]
    text = held_out["text"]
    result = engine.run(TRAINED, [text[:8], text[8:]], tokens=128, drafts=4)
    assert_identical(result, held_out["greedy"])
    assert [result["accepted"].get(str(n), 0) for n in range(5)] == simulated
