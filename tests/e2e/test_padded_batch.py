"""Steps in the shape of a captured graph: padded rows change no token and write nowhere, and steps can be replayed.

With eager_mode=False decode and verify steps run on static buffers, padded to a bucket: 3 rows to 4, 5 to 8
(dlinfer_ext/framework/lmdeploy/cpu_graphs.py). The draft model's steps are padded too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.checkpoints import checkpoint, random_qwen3_5  # noqa: F401
from tests.e2e.engine import PROMPTS, ROOT, assert_identical, expected, first_difference

pytestmark = [pytest.mark.lmdeploy]

TOKENS = 32
Checkpoint = Callable[..., Path]


def run(model: Path, tmp_path: Path, rows: int, **scenario: Any) -> dict[str, Any]:
    """Run one scenario of `padded_pipeline.py` in a process of its own."""
    file = tmp_path / "scenario.json"
    base = {"model": str(model), "batches": [PROMPTS[:rows]], "tokens": TOKENS}
    file.write_text(json.dumps(base | scenario), encoding="utf-8")
    env = {k: v for k, v in os.environ.items() if not k.startswith("DLINFER_EXT_")} | {
        "DLINFER_EXT_VENDOR": "cpu",
        "DLINFER_EXT_CPU_DTYPE": "float32",
        "DLINFER_EXT_STRICT": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    line = [sys.executable, "-m", "tests.e2e.padded_pipeline", str(file)]
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    results = [text for text in done.stdout.splitlines() if text.startswith("RESULT ")]
    assert results, f"no result, exit code {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    result: dict[str, Any] = json.loads(results[-1].removeprefix("RESULT "))
    return result


def want(model: Path, rows: int) -> list[list[int]]:
    return expected(model, PROMPTS, TOKENS)[:rows]


def assert_padded(result: dict[str, Any], drafts: int) -> None:
    """Fail unless steps of every kind were padded: the model's own, and with drafts both kinds of the draft layer's."""
    assert result["counters"]["padded_rows"] >= result["counters"]["padded_steps"] > 0
    kinds = {f"Qwen3_5ForConditionalGeneration {1 + drafts}"}
    if drafts:
        kinds |= {f"Qwen3_5MTPModel {1 + drafts}", "Qwen3_5MTPModel 1"}
    padded = result["memory"]["padded"]
    assert {kind for kind, rows in padded.items() if rows > 0} == kinds, padded


@pytest.mark.parametrize(
    ("rows", "drafts", "pad_slot"), [(3, 0, -1), (3, 4, -1), (5, 0, -1), (5, 4, -1), (3, 4, 0), (5, 0, 0)]
)
def test_padded_rows_change_no_token_and_write_nowhere(
    rows: int,
    drafts: int,
    pad_slot: int,
    checkpoint: Checkpoint,  # noqa: F811
    tmp_path: Path,
) -> None:
    model = checkpoint(random_qwen3_5)
    result = run(model, tmp_path, rows, drafts=drafts, pad_slot=pad_slot, guard=True)
    assert_identical(result, want(model, rows))
    assert_padded(result, drafts)
    slots, blocks = result["memory"]["slots"], result["memory"]["blocks"]
    assert slots["pools"] == 2, "the convolution's pool and the rule's"
    assert blocks["pools"] >= (4 if drafts else 2), "keys and values, of the draft layer too"
    # The check sees something: what requests hold has changed, and there is more than that.
    assert slots["held_changed"] == slots["held"] == rows < slots["size"] - 1
    assert rows <= blocks["held_changed"] == blocks["held"] < blocks["size"] - 1
    assert not slots["stray"]
    assert not blocks["stray"]
    # LMDeploy's reserved slot is written only where padded rows are given it; its block 0 is theirs always.
    assert slots["reserved_changed"] == (pad_slot == 0)
    assert blocks["reserved_changed"]
    guard = result["guard"]
    assert guard["compared"] > 10
    assert not guard["problems"], guard


def test_prefill_is_never_padded_and_eager_mode_never_pads(checkpoint: Checkpoint, tmp_path: Path) -> None:  # noqa: F811
    result = run(checkpoint(random_qwen3_5), tmp_path, 3, engine={"eager_mode": True})
    assert result["counters"]["decode_steps"] > 0
    assert "padded_steps" not in result["counters"]
    graph = run(checkpoint(random_qwen3_5), tmp_path, 3, engine={"max_prefill_token_num": 32})
    assert graph["counters"]["prefill_rows_with_history"] > 0
    assert set(graph["memory"]["padded"]) == {"Qwen3_5ForConditionalGeneration 1"}
    assert_identical(graph, want(checkpoint(random_qwen3_5), 3))


# --- negative controls -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [0, 4])
def test_control_padded_rows_with_a_live_slot(drafts: int, checkpoint: Checkpoint, tmp_path: Path) -> None:  # noqa: F811
    model = checkpoint(random_qwen3_5)
    result = run(model, tmp_path, 3, drafts=drafts, plant="pad_with_a_live_slot")
    assert_padded(result, drafts)
    got = [first_difference(g, w) is not None for g, w in zip(result["tokens"], want(model, 3), strict=True)]
    assert got == [True, False, False], "the first row's slot was given away"


@pytest.mark.parametrize(
    ("fault", "kind", "strays"), [("pad_with_a_free_slot", "slots", [7]), ("pad_with_a_free_block", "blocks", [63])]
)
def test_control_padded_rows_that_write_to_free_memory(
    fault: str,
    kind: str,
    strays: list[int],
    checkpoint: Checkpoint,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Tokens stay right; only the pattern tells."""
    model = checkpoint(random_qwen3_5)
    result = run(model, tmp_path, 3, drafts=2, plant=fault)
    assert_identical(result, want(model, 3))
    assert result["memory"][kind]["stray"] == strays


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("host_read", "Tensor.item() reads a device value on the host"),
        ("columns_by_length", "aten.new_empty.default: result 0 is float32 [1, "),
        ("metadata_of_the_step", "outside the step, has moved: a graph keeps the first address"),
    ],
)
def test_control_what_no_graph_survives(
    fault: str,
    says: str,
    checkpoint: Checkpoint,  # noqa: F811
    tmp_path: Path,
) -> None:
    model = checkpoint(random_qwen3_5)
    result = run(model, tmp_path, 3, drafts=2, plant=fault, guard=True, tokens=8)
    for got, right in zip(result["tokens"], want(model, 3), strict=True):
        assert got == right[:8], "eagerly the fault does no harm"
    assert any(says in problem for problem in result["guard"]["problems"]), result["guard"]
