"""GLM-5.3-Flash checkpoints in block-FP8, bf16 and fp32 load to the same model, and one that is not whole to none.

FP8 weights are dequantised as they are read. In fp32 the engine's tokens then are those of transformers on a checkpoint
of the values that they stand for; in bf16 they are, and so are the logits, those of a bf16 checkpoint of these values.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from dlinfer_ext.e2e import server as serve
from tests.e2e import engine
from tests.e2e.checkpoints import checkpoint  # noqa: F401
from tests.e2e.engine import PROMPTS
from tests.e2e.glm_checkpoints import LAYERS, TEXT, random_glm5_next
from tests.e2e.glm_fp8 import (
    FILE,
    SCALE,
    changed_tensors,
    is_quantised,
    quantised,
    random_glm5_next_dequantised,
    random_glm5_next_fp8,
    shard,
)
from tests.e2e.glm_reference import assert_greedy

pytestmark = [pytest.mark.lmdeploy, pytest.mark.xdist_group("glm-types")]
TOKENS: Final = 16
BATCH: Final = {"num_gpu_blocks": 64, "max_batch_size": 4, "max_prefill_token_num": 64}


# --- the writer -------------------------------------------------------------------------------------------------------


def test_a_block_has_a_scale_of_its_own() -> None:
    """Written out: 448 is the largest value of FP8, and 2 · 2 blocks of a 3 x 5 weight, some of them not whole."""
    weight = torch.tensor([[448.0, 1, 0, 896, 2], [2, 4, 8, 0, 0], [224, 0, 0, 112, 56]])
    values, scale, dense = quantised(weight, (2, 3))
    assert scale.tolist() == [[1.0, 2.0], [0.5, 0.25]]
    assert values.float().tolist() == [[448, 1, 0, 448, 1], [2, 4, 8, 0, 0], [448, 0, 0, 448, 224]]
    assert dense.equal(weight)


def test_what_the_release_has_in_fp8(checkpoint: Callable[..., Path]) -> None:  # noqa: F811
    weights = load_file(checkpoint(random_glm5_next) / FILE)
    layers = {name.removeprefix(TEXT) for name in weights if is_quantised(name, weights)}
    assert all(name.startswith("layers.") for name in layers)
    assert not any(".self_attn.o_proj" in name for name in layers if name.startswith("layers.0."))
    attention = {name.removeprefix("layers.3.self_attn.") for name in layers if name.startswith("layers.3.self_attn.")}
    projections = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "indexer.wq_b", "indexer.wk")
    assert attention == {f"{name}.weight" for name in projections}
    assert f"layers.{LAYERS}.mlp.experts.7.down_proj.weight" in layers
    assert "layers.0.mlp.gate_proj.weight" in layers
    assert not any("mlp.gate.weight" in name or "norm" in name for name in layers)


# --- what is loaded ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A checkpoint, and the one that transformers judges it by (None: the same)."""

    writer: Callable[..., Path]
    options: dict[str, Any]
    judge: dict[str, Any] | None = None
    drafts: int = 0
    engine: dict[str, Any] = field(default_factory=dict)


def fp8(block: tuple[int, int], drafts: int = 0, *, dtype: str = "float32", tp: int = 1, **options: Any) -> Case:
    more = {"tp": tp, "distributed_executor_backend": "mp"} if tp > 1 else {}
    same: dict[str, Any] = {"block": block, "dtype": dtype}
    return Case(random_glm5_next_fp8, same | options, same, drafts, more)


CASES: Final = {
    "blocks of 128": fp8((128, 128), 3),
    "small blocks, within text_config, scales first": fp8((24, 16), 3, inside=True, order="scales first"),
    "small blocks, bf16 beside them, weights first": fp8((16, 24), dtype="bfloat16", order="weights first"),
    "bf16": Case(random_glm5_next, {"dtype": "bfloat16"}, drafts=3),
}
RANKS: Final = {
    "two ranks, shares that are whole blocks": fp8((16, 16), 3, tp=2),
    "two ranks, shares that are not": fp8((24, 24), 3, tp=2, order="scales first"),
}
Outcome = tuple[Path, dict[str, Any], list[dict[str, Any]]]


def run_cases(
    make: Callable[..., Path], cases: dict[str, Case], folder: Path, env: dict[str, str], *plugins: str
) -> dict[str, Outcome]:
    """Run the engines of some cases in one process: the checkpoint, the result, and what its models loaded."""
    loaded = folder / "loaded.jsonl"
    models = [make(case.writer, **case.options) for case in cases.values()]
    jobs = [
        {
            "model": str(model),
            "drafts": case.drafts,
            "engine": BATCH | case.engine,
            "rounds": [[{"text": p, "new": TOKENS} for p in PROMPTS]],
            "top_logits": 5,
        }
        for model, case in zip(models, cases.values(), strict=True)
    ]
    results = engine.run_many(
        jobs, timeout_s=300, plugins=("tests.e2e.count_loaded", *plugins), env={"E2E_LOADED": str(loaded)} | env
    )
    lines = iter([json.loads(line) for line in loaded.read_text().splitlines()] if loaded.exists() else [])
    counts = [
        [next(lines) for _ in range(0 if case.engine.get("tp") else 1 + bool(case.drafts))] for case in cases.values()
    ]
    return dict(zip(cases, zip(models, results, counts, strict=True), strict=True))


@pytest.fixture(scope="module")
def in_fp32(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:  # noqa: F811
    return run_cases(checkpoint, CASES, tmp_path_factory.mktemp("fp32"), {})


def judge(case: Case, outcome: Outcome, make: Callable[..., Path]) -> None:
    model = outcome[0] if case.judge is None else make(random_glm5_next_dequantised, **case.judge)
    assert_greedy(model, [list(PROMPTS)], outcome[1], TOKENS)


@pytest.mark.parametrize("name", CASES)
def test_tokens_in_fp32_are_those_of_transformers(
    name: str,
    in_fp32: dict[str, Outcome],
    checkpoint: Callable[..., Path],  # noqa: F811
) -> None:
    judge(CASES[name], in_fp32[name], checkpoint)


@pytest.mark.long
def test_a_rank_dequantises_its_share(checkpoint: Callable[..., Path], tmp_path: Path) -> None:  # noqa: F811
    for name, outcome in run_cases(checkpoint, RANKS, tmp_path, {}).items():
        judge(RANKS[name], outcome, checkpoint)


@pytest.mark.long
def test_scales_of_other_blocks_are_noticed(checkpoint: Callable[..., Path], tmp_path: Path) -> None:  # noqa: F811
    """The control of these comparisons: text that is wrong from the first token or soon after."""
    name = "small blocks, within text_config, scales first"
    outcomes = run_cases(checkpoint, {name: CASES[name]}, tmp_path, {}, "tests.e2e.rolled_scales")
    with pytest.raises(AssertionError, match="first differing token"):
        judge(CASES[name], outcomes[name], checkpoint)


def names_in(model: Path) -> set[str]:
    names: set[str] = set()
    for file in model.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names |= set(tensors.keys())
    return names


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_has_its_place(name: str, in_fp32: dict[str, Outcome]) -> None:
    """As many tensors taken as the checkpoint has, the vision part and the scales aside."""
    model, _, counts = in_fp32[name]
    tensors = {n for n in names_in(model) if not n.endswith(SCALE) and not n.startswith("model.visual.")}
    draft = {n for n in tensors if n.startswith(f"{TEXT}layers.{LAYERS}.")}
    assert draft
    assert draft < tensors
    want = {False: len(tensors - draft)} | ({True: len(draft)} if CASES[name].drafts else {})
    assert {count["draft"]: count["taken"] for count in counts} == want


BLOCK: Final = (24, 16)
BF16: Final = {"dtype": "bfloat16"}  # of the engine
IN_BF16: Final = {
    "fp8": Case(random_glm5_next_fp8, {"block": BLOCK, "order": "weights first"}, drafts=3, engine=BF16),
    "fp32": Case(random_glm5_next_dequantised, {"block": BLOCK}, drafts=3, engine=BF16),
    "bf16": Case(random_glm5_next_dequantised, {"block": BLOCK, "to": "bfloat16"}, drafts=3, engine=BF16),
}


@pytest.mark.long
def test_in_bf16_all_types_are_one_model(checkpoint: Callable[..., Path], tmp_path: Path) -> None:  # noqa: F811
    """To the last bit: every type is rounded once to what the engine multiplies with."""
    outcomes = run_cases(checkpoint, IN_BF16, tmp_path, {"DLINFER_EXT_CPU_DTYPE": "auto"})
    first, *others = ({k: r[k] for k in ("tokens", "top_logits")} for _, r, _ in outcomes.values())
    assert all(other == first for other in others)
    in_place = load_file(outcomes["bf16"][0] / FILE)
    assert in_place[f"{TEXT}layers.3.self_attn.o_proj.weight"].dtype == torch.bfloat16
    assert in_place[f"{TEXT}layers.0.self_attn.A_log"].dtype == torch.float32


# --- what is refused --------------------------------------------------------------------------------------------------

O_PROJ: Final = f"{TEXT}layers.3.self_attn.o_proj.weight"
EXPERT: Final = f"{TEXT}layers.5.mlp.experts.6.up_proj.weight"
DRAFT: Final = f"{TEXT}layers.{LAYERS}."


def without(*beginnings: str) -> Callable[[dict[str, Tensor]], None]:
    def change(weights: dict[str, Tensor]) -> None:
        gone = [name for name in weights if name.startswith(beginnings)]
        assert gone
        for name in gone:
            del weights[name]

    return change


def given(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda weights: weights.update({name: tensor})


@dataclass(frozen=True)
class Wrong:
    """How a checkpoint is spoilt, and what the start says."""

    says: str
    change: Callable[[dict[str, Tensor]], object] | None = None
    error: str = "CheckpointError"
    drafts: int = 0
    config: dict[str, Any] = field(default_factory=dict)


WRONG: Final = {
    "a missing scale": Wrong("FP8 weights or scales without the other: model.layers.3.self_attn.o_proj.weight;",
                             without(O_PROJ + SCALE)),
    "a missing weight": Wrong("FP8 weights or scales without the other: "
                              "model.layers.3.self_attn.o_proj.weight_scale_inv;", lambda weights: weights.pop(O_PROJ)),
    "a missing tensor": Wrong("parameters that the checkpoint does not fill: model.layers.0.self_attn.A_log;",
                              without(f"{TEXT}layers.0.self_attn.A_log")),
    "a missing expert": Wrong("model.layers.5.mlp.experts.gate_up (15 of 16 parts)", without(EXPERT)),
    "an unknown tensor": Wrong("tensors that the model has no place for: model.layers.0.self_attn.extra.weight;",
                               given(f"{TEXT}layers.0.self_attn.extra.weight", torch.ones(2, 2))),
    "a tensor of another shape": Wrong("a tensor that does not fit", given(f"{TEXT}norm.weight", torch.ones(63))),
    "scales of other blocks": Wrong("scales of shape [2, 1] for a torch.float8_e4m3fn weight of shape [64, 64]: "
                                    "model.layers.3.self_attn.o_proj.weight; wanted FP8 and [3, 4]",
                                    given(O_PROJ + SCALE, torch.ones(2, 1))),
    "no draft layer": Wrong(
        f"parameters that the checkpoint does not fill: layers.{LAYERS}.", without(DRAFT), drafts=3
    ),
    "no draft layer, by config.json": Wrong(
        "config key 'num_nextn_predict_layers' is 0; wanted 1", without(DRAFT), "ConfigError", 3,
        {"num_nextn_predict_layers": 0},
    ),
    "another quantisation": Wrong(
        "config key 'quantization_config' is {'quant_method': 'awq'", None, "SystemExit", 0,
        {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}},
    ),
}  # fmt: skip


def spoilt(model: Path, to: Path, wrong: Wrong) -> Path:
    changed_tensors(model, to, wrong.change or (lambda weights: None))
    config = json.loads((to / "config.json").read_text())
    config["text_config"] |= wrong.config
    if "quantization_config" in wrong.config:
        config["quantization_config"] = wrong.config["quantization_config"]
    (to / "config.json").write_text(json.dumps(config))
    return to


def doubled(model: Path, to: Path) -> Path:
    shutil.copytree(model, to)
    weights = load_file(to / FILE)
    shard(to, weights, {"lm_head.weight": weights["lm_head.weight"]})
    return to


def starts(jobs: list[dict[str, Any]], folder: Path, timeout_s: float) -> list[dict[str, Any]]:
    """Start engines one after the other; a start that does not end fails here."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("DLINFER_EXT_")}
    env |= {"DLINFER_EXT_VENDOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    asked, out = folder / "jobs.json", folder / "results.json"
    asked.write_text(json.dumps(jobs))
    code, stdout, stderr = engine._run_group(
        [sys.executable, "-m", "tests.e2e.start_each", str(asked), str(out)], env, timeout_s
    )
    results: list[dict[str, Any]] = json.loads(out.read_text()) if out.exists() else []
    assert code == 0, f"start {len(results)} did not end, or the process did not: {code}\n{stderr[-4000:]}"
    return [{"log": stdout + stderr, **result} for result in results]


@pytest.fixture(scope="module")
def refusals(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:  # noqa: F811
    folder, model = tmp_path_factory.mktemp("spoilt"), checkpoint(random_glm5_next_fp8, block=BLOCK)
    jobs = [
        {"model": str(spoilt(model, folder / str(i), wrong)), "drafts": wrong.drafts}
        for i, wrong in enumerate(WRONG.values())
    ]
    jobs += [{"model": str(doubled(model, folder / "doubled"))}, {"model": str(model), "drafts": 3}]
    return dict(zip((*WRONG, "doubled", "whole"), starts(jobs, folder, 240), strict=True))


@pytest.mark.parametrize("name", WRONG)
def test_a_spoilt_checkpoint_ends_the_start_by_name(name: str, refusals: dict[str, dict[str, Any]]) -> None:
    ended, wrong = refusals[name], WRONG[name]
    assert ended["error"] == wrong.error
    # Before there is an engine LMDeploy only logs.
    assert wrong.says in ended["log" if wrong.error == "SystemExit" else "message"]


def test_a_tensor_in_two_files_is_refused(refusals: dict[str, dict[str, Any]]) -> None:
    assert "tensors that came twice: lm_head.weight" in refusals["doubled"]["message"]


def test_the_checkpoint_that_was_spoilt_starts(refusals: dict[str, dict[str, Any]]) -> None:
    assert refusals["whole"]["error"] is None


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_ends_with_the_name_too(ranks: int, checkpoint: Callable[..., Path], tmp_path: Path) -> None:  # noqa: F811
    """The engine is a process of its own there, and the ranks are; none waits for one that has ended."""
    model = spoilt(checkpoint(random_glm5_next_fp8, block=BLOCK), tmp_path / "spoilt", WRONG["a missing scale"])
    line = serve.command(model, "spoilt", serve.free_port(), 0, ("--tp", str(ranks)))
    env = serve.environment(LMDEPLOY_EXECUTOR_BACKEND="mp")
    code, stdout, stderr = engine._run_group(line, env, 120)
    assert code not in (None, 0), "it did not end by itself"
    assert f"CheckpointError: glm5_next: {WRONG['a missing scale'].says}" in stdout + stderr
