"""The interpreter is right where the stock one is not, and what it would hide comes to light, fault by fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dlinfer_ext.toolchain import install, interpreter, native

ROOT = Path(__file__).parents[2]
needs_toolchain = pytest.mark.skipif(install.missing() is not None, reason=str(install.missing()))

# With a fault planted exactly these checks fail.
CAUGHT_BY = {
    "": set(),
    "bf16 products of bit patterns": {"bf16_product"},
    "bf16 cut off": {"fp32_is_rounded_to_bf16", "integers_become_bf16", "bf16_sum_of_two"},
    "bf16 sums of bit patterns": {"bf16_sum_of_two"},
    "bf16 compared as bit patterns": {"bf16_comparison"},
    "casts of bit patterns": {"fp32_is_rounded_to_bf16", "integers_become_bf16"},
    "integers called another type": {"integer_sum_wraps", "truth_values_are_counted"},
    "Python's loop counter": {"loop_counter_is_a_triton_integer"},
    "no look at addresses": {"reading_outside_is_refused", "writing_outside_is_refused"},
    "a slot's size for its stride": {"slots_of_a_strided_pool"},
    "a sigmoid left out of a real kernel": {"gates_of_a_real_kernel"},
}


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DLINFER_EXT_TOOLCHAIN": str(install.folder())}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    done = python("-m", "tests.toolchain.interpret_small")
    assert done.returncode == 0, done.stderr[-3000:]
    read: dict[str, Any] = json.loads(done.stdout)
    return read


@needs_toolchain
@pytest.mark.parametrize("fault", sorted(CAUGHT_BY))
def test_a_planted_fault_fails_exactly_its_checks(fault: str, report: dict[str, Any]) -> None:
    assert set(report["failures"][fault]) == CAUGHT_BY[fault]


@needs_toolchain
def test_every_fault_is_planted_and_launches_are_counted(report: dict[str, Any]) -> None:
    assert report["failures"].keys() == CAUGHT_BY.keys()
    assert report["launches"] > len(report["checks"])


@needs_toolchain
def test_the_variable_of_triton_stays_out_of_the_environment() -> None:
    code = "import os; from dlinfer_ext.toolchain import interpreter as i; i.activate(); i.activate(); " \
           "assert 'TRITON_INTERPRET' not in os.environ; assert i.active() and i.launches() == 0"  # fmt: skip
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
@pytest.mark.parametrize(("first", "second"), [("native", "interpreter"), ("interpreter", "native")])
def test_one_process_takes_one_of_the_two(first: str, second: str) -> None:
    code = f"from dlinfer_ext.toolchain import {first}, {second}; {first}.activate(); {second}.activate()"
    done = python("-c", code)
    assert done.returncode == 1
    assert "RuntimeError: this process" in done.stderr.splitlines()[-1], done.stderr


@needs_toolchain
def test_a_run_on_a_route_that_launches_nothing_fails() -> None:
    test = "tests/kernels/test_gated_rms_norm.py"
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "--route", "interpret", test, "-k", "empty_batch")
    assert done.returncode == 1
    assert "route interpret: no kernel was launched" in done.stdout


def test_without_the_toolchain_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DLINFER_EXT_TOOLCHAIN", str(tmp_path))
    assert "make toolchain" in (interpreter.missing() or "")
    with pytest.raises(RuntimeError, match="make toolchain"):
        interpreter.activate()


def test_what_is_left_out_as_too_long_still_exists() -> None:
    from tests.conftest import LONG_INTERPRETED

    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", "tests/kernels")
    ids = [line for line in done.stdout.splitlines() if "::" in line]
    assert [b for b in LONG_INTERPRETED if not any(i.startswith(b) for i in ids)] == []
