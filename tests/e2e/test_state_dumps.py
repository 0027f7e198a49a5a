"""Dumps of a running engine: every one is right, and with the fault this project began with some are not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dlinfer_ext.cli.main import main
from tests.e2e import engine
from tests.e2e.engine import PROMPTS, SHORT
from tests.engine_faults.plant import VARIABLE

pytestmark = [pytest.mark.lmdeploy, pytest.mark.long]

CHECKPOINTS = engine.ROOT / "examples" / "checkpoints"


def dumps_of(folder: Path, model: str, drafts: int, fault: str = "", steps: str = "0-7") -> list[str]:
    """Serve prompts in short chunks and return the dumps of it, as the command line takes them."""
    env = {"DLINFER_EXT_DUMP": str(folder), "DLINFER_EXT_DUMP_STEPS": steps, VARIABLE: fault}
    rounds = [[{"text": text, "new": 12} for text in (*PROMPTS[:3], *SHORT)]]
    settings = {"num_gpu_blocks": 64, "max_prefill_token_num": 32}
    job = {"model": str(CHECKPOINTS / model), "drafts": drafts, "engine": settings, "rounds": rounds}
    engine.run_many([job], env=env, plugins=("tests.engine_faults.plant",) if fault else ())
    return sorted(map(str, folder.glob("*.safetensors")))


@pytest.mark.parametrize(
    ("model", "drafts", "kinds"),
    [
        ("tiny_qwen3_5", 0, {"causal_conv1d linear", "gated_delta_rule plain",
                             "sigmoid_gating_delta_rule_update plain"}),
        ("tiny_qwen3_5", 3, {"causal_conv1d ring", "gated_delta_rule ring", "sigmoid_gating_delta_rule_update ring"}),
        ("tiny_glm5_next", 2, {"causal_conv1d ring", "kda ring", "kda_update ring", "kpool_update pages",
                               "latent_write pages", "latent_attention pages"}),
    ],
    ids=["gdn", "gdn-drafts", "kda-drafts"],
)  # fmt: skip
def test_every_dump_of_a_right_engine_is_right(
    model: str, drafts: int, kinds: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dumps = dumps_of(tmp_path, model, drafts)
    assert main(["explain-state", "--json", *dumps]) == 0
    reports: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["dumps"]
    assert {f"{r['operator']} {r['layout']}" for r in reports} >= kinds
    rows = [row for report in reports for row in report["rows"]]
    assert any(row["history"] for row in rows)
    assert any(row["live"] and row["tokens"] == 2 and row["history"] == 0 for row in rows), "no prompt below the window"
    assert not any("not held against" in f["text"] for report in reports for f in report["findings"])


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        # The one that this project began with: a short chunk takes its neighbour's inputs.
        (
            "ring_gather_from_packed_batch",
            r"conv_state\[\d+, \d+\] (was written with|does not hold) the input of position",
        ),
        (
            "recurrent_ring_slot_one_behind",
            r"state\[\d+, \d+\] does not hold the state after \d+ tokens, but the state after",
        ),
    ],
)
def test_a_fault_of_state_is_seen(fault: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dumps = dumps_of(tmp_path, "tiny_qwen3_5", 3, fault=fault, steps="1-6")
    assert main(["explain-state", "--quiet", *dumps]) == 1
    said = capsys.readouterr().out
    assert re.search(rf"  ! row \d: {says}", said)
    assert "nothing is wrong" in said, "the other of the two operators is right"
