"""Stock LMDeploy with every operator on the native route: the Triton kernels, beside the eager forms, in fp32.

Tokens alone say little about the states that they came from, so those are compared too, in every rank.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from dlinfer_ext import envs
from dlinfer_ext.testing import rms_error
from dlinfer_ext.toolchain import native
from tests.e2e import engine
from tests.e2e.engine import accepted, assert_identical, expected
from tests.e2e.test_engine import PYTHON, TRAINED

MISSING = native.missing()
pytestmark = [
    pytest.mark.lmdeploy,
    pytest.mark.slow,
    pytest.mark.toolchain,
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.xdist_group("ports"),
]
TOKENS = 64
PROMPT_LENGTHS = {1, 3, 15, 32, 75}  # by which rows are known
# RMS error of a row's state over its RMS: another order of sums, over the layers before and the tokens so far.
STATE_LIMIT = 2e-6
# Operator -> kernels that serve it. A prompt takes one of two forms of the rule.
KERNELS = {
    "causal_conv1d": {"causal_conv1d_kernel"},
    "gated_delta_gate": {"gate_kernel"},
    "gated_delta_rule": {"delta_scan_kernel", "gdr_dot_kernel"},
    "gated_delta_rule_update": {"delta_update_kernel"},
    "gated_rms_norm": {"gated_rms_norm_kernel", "gated_rms_norm_wide_kernel"},
}


def run(route: str, ranks: int, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run the trained checkpoint on a route; return the result and what each rank left behind, by rank."""
    folder.mkdir()
    hook = Path(__file__).parent / "left_behind"
    env = {
        envs.ROUTE.name: route,
        envs.TOOLCHAIN.name: os.environ.get(envs.TOOLCHAIN.name, ""),
        "E2E_LEFT_BEHIND": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(hook), os.environ.get("PYTHONPATH")))),
    }
    options: dict[str, Any] = {"tp": 2, "distributed_executor_backend": "mp"} if ranks == 2 else {}
    result = engine.run(
        TRAINED, [list(PYTHON)], tokens=TOKENS, drafts=3, max_prefill_token_num=32, env=env, timeout_s=280, **options
    )
    files = sorted(folder.glob("*.pt"))
    assert [f.stem for f in files] == [str(rank) for rank in range(ranks)]
    return result, [torch.load(f) for f in files]


@pytest.mark.parametrize("ranks", [1, 2])
def test_native_kernels_serve_as_the_eager_forms_do(ranks: int, tmp_path: Path) -> None:
    eager, theirs = run("eager", ranks, tmp_path / "eager")
    result, ours = run("native", ranks, tmp_path / "native")
    assert_identical(eager, expected(TRAINED, PYTHON, TOKENS))
    assert_identical(result, eager["tokens"])
    assert accepted(result) > 0
    for rank, (native_rank, eager_rank) in enumerate(zip(ours, theirs, strict=True)):
        counts = native_rank["counters"]
        assert counts["prefill_rows_with_history"] > 0
        assert counts["verify_steps"] > 0
        assert idle(counts) == [], f"rank {rank}: {counts}"
        assert idle(eager_rank["counters"]) == list(KERNELS), "the eager run launched kernels"
        compare_rows(rank, native_rank["rows"], eager_rank["rows"])


def idle(counts: dict[str, int]) -> list[str]:
    """Return the operators of which a process launched no kernel."""
    return [name for name, kernels in KERNELS.items() if not any(counts.get(f"native.{k}") for k in kernels)]


def compare_rows(rank: int, ours: dict[int, Any], theirs: dict[int, Any]) -> None:
    assert set(ours) == set(theirs) == PROMPT_LENGTHS
    for prompt, want in theirs.items():
        got = ours[prompt]
        both = sorted(set(got) & set(want))
        assert len(both) >= 8, f"the runs stopped at the same place {len(both)} times: {sorted(got)}, {sorted(want)}"
        for seen in both:
            assert len(got[seen]) == len(want[seen]) == 2, "convolution and rule"
            for pool, (a, b) in enumerate(zip(got[seen], want[seen], strict=True)):
                assert a.dtype == b.dtype == torch.float32
                assert bool(b.any()), "a state of zeros compares with everything"
                error = rms_error(a, b)
                assert error <= STATE_LIMIT, f"rank {rank}, prompt of {prompt}, {seen} tokens, pool {pool}: {error:.2e}"


def states(value: float, prompts: set[int]) -> dict[int, Any]:
    one = [torch.ones(3, 3, 8), torch.full((3, 2, 4, 4), value)]
    return {prompt: {prompt + step: one for step in range(9)} for prompt in prompts}


def test_a_process_that_launched_nothing_is_named() -> None:
    """The controls of the comparison: a run of two ranks whose workers lack the driver gives the right tokens too."""
    counts = {"native.delta_update_kernel": 3, "native.gate_kernel": 0}
    assert idle(counts) == [name for name in KERNELS if name != "gated_delta_rule_update"]


@pytest.mark.parametrize("value", [1 + 1e-5, float("nan")])
def test_a_state_that_is_a_little_off_is_told(value: float) -> None:
    good = states(1.0, PROMPT_LENGTHS)
    compare_rows(0, states(1 + 1e-7, PROMPT_LENGTHS), good)
    with pytest.raises(AssertionError, match="rank 0, prompt of 1, 1 tokens, pool 1"):
        compare_rows(0, states(1.0, PROMPT_LENGTHS) | {1: states(value, {1})[1]}, good)


def test_states_that_were_not_taken_are_told() -> None:
    with pytest.raises(AssertionError):
        compare_rows(0, states(1.0, {1, 3}), states(1.0, PROMPT_LENGTHS))
