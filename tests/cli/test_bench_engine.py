"""`bench engine`: its loops do what the operators do, its counts are of the right steps, and nothing passes unseen."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dlinfer_ext import ops
from dlinfer_ext.cli import bench_engine, bench_engine_child
from dlinfer_ext.cli.bench_engine import EngineFailed
from dlinfer_ext.cli.main import main
from dlinfer_ext.ops import _registry
from dlinfer_ext.testing import assert_close

# Rows with a history, a fresh one, a padded one, and one whose history is shorter than the convolution's window.
SLOTS, HISTORIES, LENGTHS = (3, 1, -1, 2), (9, 0, 4, 1), (2, 5, 1, 3)
TOKENS = sum(LENGTHS)


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what puts the loops in the place of the operators' forms, as the engine's process does."""

    def plant() -> None:
        sides = bench_engine_child._Sides()
        sides.side = "loop"
        monkeypatch.setattr(_registry, "chosen", sides.chosen)

    return plant


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def rows() -> dict[str, Any]:
    return {"state_indices": torch.tensor(SLOTS), "history_lens": torch.tensor(HISTORIES)}


def both(run: Callable[[Tensor], Tensor], pool: Tensor, plant: Callable[[], None]) -> None:
    """Compare the output and the pool of an operator with those of its loop."""
    mine, theirs = pool.clone(), pool.clone()
    with torch.inference_mode():
        wanted = run(mine)
        plant()
        got = run(theirs)
    assert_close("output", got, wanted, limit=1e-5)
    assert_close("pool", theirs, mine, limit=1e-5)
    assert not torch.equal(mine, pool)


@pytest.mark.parametrize(("layout", "columns"), [("ring", 7), ("linear", 3)])
def test_the_loop_of_the_convolution_is_the_operator(
    layout: Any,
    columns: int,
    loops: Callable[[], None],
) -> None:
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    x, weight, bias = normal(TOKENS, 6), normal(4, 6), normal(6)

    def run(pool: Tensor) -> Tensor:
        return ops.causal_conv1d(x, weight, bias, pool, cu_seqlens=starts, layout=layout, activation="silu", **rows())

    both(run, normal(5, columns, 6), loops)


@pytest.mark.parametrize("channel_gate", [False, True], ids=["gated_delta_rule", "kda"])
@pytest.mark.parametrize("ring", [None, 3], ids=["one", "ring"])
@pytest.mark.parametrize("step", [False, True], ids=["prompts", "step"])
def test_the_loops_of_the_rules_are_the_operators(
    channel_gate: bool, ring: int | None, step: bool, loops: Callable[[], None]
) -> None:
    tokens = (len(SLOTS), ring or 1) if step else (TOKENS,)
    q, k, v = (normal(*tokens, 2, 8 + (i == 2) * 4) for i in range(3))
    beta = normal(*tokens, 2).sigmoid()
    g = -normal(*tokens, 2, *([8] if channel_gate else [])).abs()
    pool = normal(5, *([ring] if ring else []), 2, 12, 8)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    histories = rows() | ({"history_lens": torch.tensor([9, 6, 4, 1])} if step else {})
    whole: dict[str, Any] = {"cu_seqlens": starts, "host_lengths": LENGTHS}

    def run(pool: Tensor) -> Tensor:
        if step:
            update = ops.kda_update if channel_gate else ops.gated_delta_rule_update
            return update(q, k, v, g, beta, pool, use_qk_l2norm=True, **histories)
        rule = ops.kda if channel_gate else ops.gated_delta_rule
        return rule(q, k, v, g, beta, pool, use_qk_l2norm=True, **histories, **whole)

    both(run, pool, loops)


def test_the_loop_with_gates_is_the_operator(loops: Callable[[], None]) -> None:
    shape = (len(SLOTS), 2, 2)
    q, k, v = normal(*shape, 8), normal(*shape, 8) + 1, normal(*shape, 12)
    a, b, decay, bias = normal(*shape), normal(*shape) + 1, -normal(2).exp(), normal(2)
    histories = rows() | {"history_lens": torch.tensor([9, 6, 4, 1])}

    def run(pool: Tensor) -> Tensor:
        return ops.sigmoid_gating_delta_rule_update(q, k, v, a, b, decay, bias, pool, use_qk_l2norm=True, **histories)

    both(run, normal(5, 2, 2, 12, 8), loops)


def test_calls_are_counted_in_decode_and_verify_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {"prefill_steps": 0, "decode_steps": 0, "verify_steps": 0}
    monkeypatch.setattr(bench_engine_child, "_steps", steps.copy)
    sides = bench_engine_child._Sides()
    sides.count = True

    def reads(x: Tensor) -> float:
        return (x + 1).sum().item()

    sides.ours = lambda name, vendor: reads  # type: ignore[assignment]
    for phase, expected in (("prefill_steps", 0), ("verify_steps", 1), ("prefill_steps", 1), ("decode_steps", 2)):
        steps[phase] += 1
        sides.chosen("kda", "cpu")(torch.ones(2))
        assert (sides.host_reads, sides.calls) == (expected, 3 * expected)


class FakeEngine:
    """Answers rounds as told, without a process."""

    def __init__(self, seconds: float, accepted: list[int], tokens: dict[str, int], steps: int = 4) -> None:
        self.seconds, self.accepted, self.tokens, self.steps = seconds, accepted, tokens, steps

    def ask(self, side: str, requests: list[dict[str, Any]], *, count: bool = False) -> dict[str, Any]:
        loop = side == "loop"
        return {
            "seconds": self.seconds * (3 if loop else 1),
            "tokens": [[self.tokens[side]] * r["new"] for r in requests],
            "steps": {"prefill_steps": 1, "decode_steps": 0, "verify_steps": self.steps},
            "accepted": self.accepted,
            "counts": {"calls": 400 if loop else 40, "host_reads": 12 if loop else 0, "launches": 0},
        }


SAME = {"ours": 7, "loop": 7}


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        (FakeEngine(0.1, [1, 2], SAME), None),
        (FakeEngine(0.1, [1, 2], {"ours": 7, "loop": 8}), "tokens differ"),
        (FakeEngine(0.1, [0, 0], SAME), "no draft was accepted"),
        (FakeEngine(0.1, [], SAME), "no draft was accepted"),
        (FakeEngine(0.1, [1], SAME, steps=0), "no decode or verify step"),
    ],
    ids=["good", "differs", "rejected", "no-verify-row", "no-step"],
)
def test_a_case_shows_that_its_path_ran(engine: FakeEngine, problem: str | None) -> None:
    engines: Any = {0: FakeEngine(0.2, [], SAME), 2: engine}
    requests = [{"text": "a", "new": 8}, {"text": "b", "new": 8}]
    none, drafted = bench_engine._case("qwen", engines, 2, 16, requests, 3, 0.0)
    assert none.name == "qwen drafts 0 batch 2 prompt 16"
    assert list(none.baselines) == ["loop"]
    assert drafted.held == (problem is None)
    assert problem is None or problem in "; ".join(drafted.problems)
    assert drafted.runs == 3
    assert {name: side.speedup for name, side in drafted.baselines.items()} == pytest.approx(
        {"loop": 3, "no drafts": 2}
    )
    if engine.steps:
        assert drafted.counts is not None
        assert (drafted.counts.calls, drafted.counts.host_reads) == (10, 0)
        assert drafted.baselines["loop"].counts is not None
        assert (drafted.baselines["loop"].counts.calls, drafted.baselines["loop"].counts.host_reads) == (100, 3)


def test_the_end_of_an_engine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_engine, "CHILD", "this")  # a module that prints and ends
    with bench_engine._started({}) as child, pytest.raises(EngineFailed, match=r"(?s)exit code 0.*Zen of Python"):
        child.answer(60)


def test_checkpoints_that_are_not_here_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "engine", "--model", "qwen"]) == 1
    assert "holds no config.json; run from the root" in capsys.readouterr().err
    assert main(["bench", "engine", "--batch", "0,1"]) == 2


@pytest.mark.long
@pytest.mark.lmdeploy
@pytest.mark.parametrize("model", ["qwen", "glm"])
def test_the_engine_is_measured_on_all_sides(model: str, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    line = ["bench", "engine", "--model", model, "--drafts", "0,2", "--batch", "1,3", "--new", "8", "--repeats", "3"]
    assert main([*line, "--json", "--out", str(file)]) == 0
    cases = json.loads(file.read_text())["cases"]
    assert [c["name"] for c in cases] == [f"{model} drafts {d} batch {b} prompt 16" for b in (1, 3) for d in (0, 2)]
    assert [c["runs"] for c in cases] == [3] * 4
    for case in cases:
        assert case["engine"]["identical"]
        assert case["counts"]["host_reads"] == 0
        assert case["baselines"]["loop"]["counts"]["host_reads"] > 0
    for none, drafted in pairwise(cases[:2]):
        assert drafted["engine"]["accepted"] > 0
        assert drafted["engine"]["steps"] < none["engine"]["steps"]
    # A loop's calls grow with the batch, ours do not.
    for one, three in zip(cases[:2], cases[2:], strict=True):
        assert three["baselines"]["loop"]["counts"]["calls"] > one["baselines"]["loop"]["counts"]["calls"]
        assert three["counts"]["calls"] == one["counts"]["calls"]
