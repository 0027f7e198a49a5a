"""`plan` for the released models: figures by hand, what it warns of, and what it refuses."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors import safe_open

from .glm_checkpoints import TRAINED_GLM
from .plan_process import GIB, ask, report

# As released; see docs/en/hosts.md for where the values come from.
RELEASED = {"index_kpool": 4, "num_nextn_predict_layers": 1, "index_share_for_mtp_iteration": True}
KDA, HEADS, DIM, SPARSE = 34, 64, 128, 11


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.Glm5NextConfig(text_config=RELEASED, vision_config={}).to_dict()
    config["architectures"] = ["Glm5NextForConditionalGeneration"]
    path = tmp_path_factory.mktemp("released") / "glm.json"  # any name will do
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("tp", "drafts", "recurrent", "window"),
    [
        # 64 heads of 128 x 128 in fp32 are 4 MiB a layer: 142.6 MB a request; 3 or 7 columns of 3 * 8192 channels.
        (1, 0, 142_606_336, KDA * 3 * 24576 * 2),
        (8, 0, 142_606_336 // 8, KDA * 3 * 3072 * 2),
        (8, 3, 68 * 2**20, KDA * 7 * 3072 * 2),
    ],
)
def test_state_of_a_request(released: Path, tp: int, drafts: int, recurrent: int, window: int) -> None:
    seen = report(released, f"--tp={tp}", f"--drafts={drafts}")
    states = {pool["name"]: pool["bytes"] for pool in seen["card"]["states"]}
    assert states == {"glm5_kda_conv": window, "glm5_kda_recurrent": recurrent}
    # Each token has 512 latents and a quarter of a pool of 128 in bf16; each block the tail of its open pool in fp32.
    tail = (4 + drafts) * 2 * DIM * 4
    block = 64 * 512 * 2 + 16 * DIM * 2 + tail
    assert seen["card"]["block"] == SPARSE * block
    assert seen["card"]["draft_block"] == (block if drafts else 0)
    assert seen["request"]["cache_bytes"] == -(-(32768 + drafts) // 64) * (SPARSE + bool(drafts)) * block


def test_weights_of_the_released_model(released: Path) -> None:
    """320 billion parameters in bf16: tp 8 is too few for cards of 64 GiB, and both say so."""
    seen = report(released, "--tp=8", "--drafts=3")
    assert 8 * seen["card"]["weights"] / 2e9 == pytest.approx(316, rel=0.01)
    assert not seen["fits"]
    assert seen["warnings"][0].startswith("the weights leave nothing: 75.41 GiB of 62.00 GiB; more ranks (--tp)")
    assert report(released, "--tp=16", "--drafts=3", "--batch=64")["fits"]


def test_weights_are_those_of_the_checkpoint() -> None:
    """In the dtype they are stored in, every tensor of the file counts once, but for those of the vision part."""
    seen = report(TRAINED_GLM, "--drafts=1", "--dtype=float32")["card"]
    with safe_open(TRAINED_GLM / "model.safetensors", "pt") as file:
        stored = sum(file.get_tensor(name).numel() * 4 for name in file.keys() if "visual" not in name)  # noqa: SIM118
    assert seen["weights"] + seen["draft_weights"] == stored


@cache
def fits(batch: int) -> dict[str, Any]:
    return report(TRAINED_GLM, "--drafts=3", f"--batch={batch}", "--memory-gib=0.1", "--reserved-gib=0")


def test_advice_holds() -> None:
    """What it says is the most states fits, and one request more does not."""
    card = fits(8)["card"]
    most = (int(0.1 * GIB) - card["weights"] - card["draft_weights"]) // card["slot"] - 2
    over = fits(most + 1)
    assert not over["fits"]
    assert f"--batch {most} is the most" in over["warnings"][0]
    assert fits(most // 2)["fits"]


def test_exit_codes_and_words(released: Path, tmp_path: Path) -> None:
    held = ask(released, "--tp=16", "--batch=64")
    assert (held.returncode, held.stdout.splitlines()[-1]) == (0, "fits"), held.stderr
    none = ask(released, "--tp=8")
    assert (none.returncode, none.stdout.splitlines()[-1]) == (1, "does not fit"), none.stderr
    missing = ask(tmp_path)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert (
        f"plan: --config {tmp_path} is no file and no folder with a config.json; wanted one of them" in missing.stderr
    )
    other = tmp_path / "config.json"
    other.write_text('{"model_type": "llama"}', encoding="utf-8")
    unknown = ask(other)
    assert unknown.returncode == 2
    assert "wanted a config.json whose model_type is one of qwen3_5, qwen3_5_moe, glm5_next" in unknown.stderr
    ranks = ask(released, "--tp=7")
    assert ranks.returncode == 2
    assert "wanted a multiple of tp, 7" in ranks.stderr
    soc = ask(released, "--soc=a5")
    assert soc.returncode == 2
    assert "--memory-gib" in soc.stderr
    negative = ask(released, "--memory-gib=-1")
    assert negative.returncode == 2
    assert "wanted a number of GiB, 0 or more" in negative.stderr


def test_a_state_in_bf16_is_warned_of() -> None:
    tiny = TRAINED_GLM.parent / "tiny_qwen3_5"
    lossy = report(tiny)
    assert any("LMDEPLOY_FP32_MAMBA_SSM_DTYPE=1" in line for line in lossy["warnings"])
    exact = report(tiny, LMDEPLOY_FP32_MAMBA_SSM_DTYPE="1")
    assert exact["warnings"] == []
    size = [next(p["bytes"] for p in seen["card"]["states"] if p["name"] == "recurrent") for seen in (lossy, exact)]
    assert size[1] == 2 * size[0]
