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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dlinfer_ext.framework.lmdeploy import cpu_graphs
from tests.e2e.checkpoints import checkpoint, random_qwen3_5  # noqa: F401
from tests.e2e.engine import PROMPTS, ROOT, assert_identical, expected, first_difference

pytestmark = [pytest.mark.lmdeploy]

TOKENS = 32
DLINFER = asdict(cpu_graphs.DLINFER)
# The prompt of two tokens last: with lengths that are cumulative its history would come out as none at all.
SHORT_LAST = (0, 2, 1)
Checkpoint = Callable[..., Path]


def run(model: Path, tmp_path: Path, rows: int, *, warm_up: bool = True, **scenario: Any) -> dict[str, Any]:
    """Run one scenario of `padded_pipeline.py` in a process of its own.

    LMDeploy captures every bucket with dummy rows as it starts; without `warm_up`, requests are what it is done with.
    """
    done = start(model, tmp_path, rows, warm_up, **scenario)
    results = [text for text in done.stdout.splitlines() if text.startswith("RESULT ")]
    assert results, f"no result, exit code {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    result: dict[str, Any] = json.loads(results[-1].removeprefix("RESULT "))
    return result


def start(model: Path, tmp_path: Path, rows: int, warm_up: bool, **scenario: Any) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "scenario.json"
    base = {"model": str(model), "batches": [PROMPTS[:rows]], "tokens": TOKENS}
    file.write_text(json.dumps(base | scenario), encoding="utf-8")
    env = {k: v for k, v in os.environ.items() if not k.startswith("DLINFER_EXT_")} | {
        "DLINFER_EXT_VENDOR": "cpu",
        "DLINFER_EXT_CPU_DTYPE": "float32",
        "DLINFER_EXT_STRICT": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "LMDEPLOY_SKIP_WARMUP": "0" if warm_up else "1",
    }
    line = [sys.executable, "-m", "tests.e2e.padded_pipeline", str(file)]
    return subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)


def want(model: Path, rows: int) -> list[list[int]]:
    return expected(model, PROMPTS, TOKENS)[:rows]


def short_last(model: Path) -> tuple[dict[str, Any], list[list[int]]]:
    """Return a batch of three rows for `run`, and its tokens."""
    right = want(model, 3)
    return {"batches": [[PROMPTS[i] for i in SHORT_LAST]]}, [right[i] for i in SHORT_LAST]


def assert_padded(result: dict[str, Any], drafts: int) -> None:
    """Fail unless steps of every kind were padded: the model's own, and with drafts both kinds of the draft layer's."""
    assert result["counters"]["padded_rows"] >= result["counters"]["padded_steps"] > 0
    kinds = {f"Qwen3_5ForConditionalGeneration {1 + drafts}"}
    if drafts:
        kinds |= {f"Qwen3_5MTPModel {1 + drafts}", "Qwen3_5MTPModel 1"}
    padded = result["memory"]["padded"]
    assert {kind for kind, rows in padded.items() if rows > 0} == kinds, padded


@pytest.mark.parametrize(
    ("rows", "drafts", "card"), [(3, 0, {}), (3, 4, {}), (5, 0, DLINFER), (5, 4, DLINFER)], ids=lambda p: str(bool(p))
)
def test_padded_rows_change_no_token_and_write_nowhere(
    rows: int,
    drafts: int,
    card: dict[str, Any],
    checkpoint: Checkpoint,  # noqa: F811
    tmp_path: Path,
) -> None:
    model = checkpoint(random_qwen3_5)
    result = run(model, tmp_path, rows, drafts=drafts, card=card, guard=True)
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
    # LMDeploy's reserved slot is not written even if the runner pads with it; its block 0 is theirs always.
    assert not slots["reserved_changed"]
    assert blocks["reserved_changed"]
    guard = result["guard"]
    assert guard["compared"] > 10
    assert not guard["problems"], guard


@pytest.mark.parametrize("drafts", [0, 4])
def test_a_first_step_that_is_run_three_times_counts_once(
    drafts: int,
    checkpoint: Checkpoint,  # noqa: F811
    tmp_path: Path,
) -> None:
    model = checkpoint(random_qwen3_5)
    batch, right = short_last(model)
    result = run(model, tmp_path, 3, warm_up=False, drafts=drafts, card=DLINFER, guard=True, **batch)
    assert_identical(result, right)
    assert_padded(result, drafts)
    # The buckets of 4 and fewer rows that were needed, of the model and with drafts of both kinds of draft steps.
    assert result["counters"]["captures"] >= (3 if drafts else 1)
    assert not result["guard"]["problems"], result["guard"]
    assert not result["memory"]["slots"]["reserved_changed"]


def test_prefill_is_never_padded_and_eager_mode_never_pads(checkpoint: Checkpoint, tmp_path: Path) -> None:  # noqa: F811
    result = run(checkpoint(random_qwen3_5), tmp_path, 3, engine={"eager_mode": True})
    assert result["counters"]["decode_steps"] > 0
    assert "padded_steps" not in result["counters"]
    graph = run(checkpoint(random_qwen3_5), tmp_path, 3, engine={"max_prefill_token_num": 32})
    assert graph["counters"]["prefill_rows_with_history"] > 0
    assert set(graph["memory"]["padded"]) == {"Qwen3_5ForConditionalGeneration 1"}
    assert_identical(graph, want(checkpoint(random_qwen3_5), 3))


# --- negative controls -----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("drafts", "card"),
    [
        (0, {"cumulative_q_seqlens": True}),
        (4, {"cumulative_q_seqlens": True}),
        (0, {"stale_cu_seqlens": True}),
        (4, {"stale_cu_seqlens": True}),
    ],
)
def test_control_rows_from_what_the_runner_binds(
    drafts: int,
    card: dict[str, Any],
    checkpoint: Checkpoint,  # noqa: F811
    tmp_path: Path,
) -> None:
    model = checkpoint(random_qwen3_5)
    batch, right = short_last(model)
    result = run(model, tmp_path, 3, drafts=drafts, card=card, plant="rows_of_the_host", **batch)
    assert_padded(result, drafts)
    assert [first_difference(g, w) for g, w in zip(result["tokens"], right, strict=True)] != [None] * 3


@pytest.mark.long
@pytest.mark.parametrize("fault", ["capture_with_real_rows", "fill_from_its_own_buffers"])
def test_control_first_step_of_a_bucket(fault: str, checkpoint: Checkpoint, tmp_path: Path) -> None:  # noqa: F811
    model = checkpoint(random_qwen3_5)
    batch, right = short_last(model)
    result = run(model, tmp_path, 3, warm_up=False, card=DLINFER, plant=fault, **batch)
    assert result["counters"]["captures"] >= 1
    assert [first_difference(g, w) for g, w in zip(result["tokens"], right, strict=True)] != [None] * 3


@pytest.mark.long
def test_control_a_capture_that_is_not_replayed(checkpoint: Checkpoint, tmp_path: Path) -> None:  # noqa: F811
    done = start(checkpoint(random_qwen3_5), tmp_path, 3, True, plant="capture_without_a_replay")
    assert "captured a graph and did not replay it for the step it was captured with" in done.stdout + done.stderr
    assert "RESULT " not in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("drafts", [0, 4])
def test_control_padded_rows_with_a_live_slot(drafts: int, checkpoint: Checkpoint, tmp_path: Path) -> None:  # noqa: F811
    model = checkpoint(random_qwen3_5)
    result = run(model, tmp_path, 3, drafts=drafts, plant="pad_with_a_live_slot")
    assert_padded(result, drafts)
    got = [first_difference(g, w) is not None for g, w in zip(result["tokens"], want(model, 3), strict=True)]
    assert got == [True, False, False], "the first row's slot was given away"


@pytest.mark.long
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


@pytest.mark.long
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
