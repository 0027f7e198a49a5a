"""The native route: small kernels on CPU tensors against PyTorch, how many builds they cost, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dlinfer_ext import envs
from dlinfer_ext.toolchain import install, native
from tests.toolchain.native_process import needs_native, run

pytestmark = pytest.mark.toolchain

NAMES = (
    *("scaled", "rounding", "product", "maths", "grid", "specialised", "refused", "both_builds", "chips", "spawned"),
    *("checked", "timed"),
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(NAMES, tmp_path_factory.mktemp("cache"))


@needs_native
def test_scaling_is_exact_and_every_launch_is_counted(results: dict[str, Any]) -> None:
    got = results["scaled"]
    assert got["wrong"] == {"torch.float32": 0, "torch.bfloat16": 0, "torch.float16": 0}
    assert got["launches"] == got["scale_kernel"] == 9
    assert got["builds"] == 3, "one build a type"


@needs_native
def test_casts_round_as_pytorch_does(results: dict[str, Any]) -> None:
    """Ties to even, overflow, subnormal numbers, infinities and NaN, to bf16 and fp16."""
    assert results["rounding"] == 0


@needs_native
def test_product_and_functions_match_fp64(results: dict[str, Any]) -> None:
    assert results["product"] < 1e-6
    assert results["maths"] < 1e-6


@needs_native
def test_each_program_of_a_grid_runs_once(results: dict[str, Any]) -> None:
    assert results["grid"] == list(range(24))


@needs_native
def test_specialisation_is_tritons_own(results: dict[str, Any]) -> None:
    assert results["specialised"] == {"scale_kernel": 3, "any_length_kernel": 1}


@needs_native
def test_another_device_is_refused_by_name(results: dict[str, Any]) -> None:
    assert results["refused"] == "scale_kernel: x is on meta; native kernels take CPU tensors only"


@needs_native
def test_counting_and_plain_builds_live_side_by_side(results: dict[str, Any]) -> None:
    assert results["both_builds"] == {"bytes": 512, "wrong": 0, "builds": 2}


@needs_native
def test_two_chips_in_one_process(results: dict[str, Any]) -> None:
    assert results["chips"] == {"seen": [["a2", True], ["a5", True], ["a2", True]], "builds": 2}


@needs_native
def test_a_spawned_process_builds_nothing_anew(results: dict[str, Any]) -> None:
    """It has to enter the toolchain itself, and finds its parent's kernel in the cache on disk."""
    right, launches, builds = results["spawned"]
    assert right is True
    assert (launches, builds) == (1, 0)


@needs_native
def test_a_sum_in_bf16_fails_a_case_that_a_sum_in_fp32_passes(results: dict[str, Any]) -> None:
    held, error, limit = results["checked"]["fp32_sum_kernel"]
    assert held, (error, limit)
    held, error, limit = results["checked"]["bf16_sum_kernel"]
    assert not held
    assert error > 2 * limit


@needs_native
def test_a_case_is_timed_beside_another_form(results: dict[str, Any]) -> None:
    assert results["timed"] == [True, True, True]


@needs_native
def test_another_triton_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("triton")
    other.__file__ = "/elsewhere/triton/__init__.py"
    monkeypatch.setitem(sys.modules, "triton", other)
    with pytest.raises(RuntimeError, match=r"already imported another Triton, from /elsewhere"):
        install.enter()


@needs_native
def test_an_interpreting_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        native.activate()


@needs_native
def test_a_missing_c_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "install gcc" in str(native.missing())


# --- where the toolchain lives ----------------------------------------------------------------------------------------


def dist_info(folder: Path, name: str, version: str) -> None:
    (folder / f"{name.replace('-', '_')}-{version}.dist-info").mkdir(parents=True)


def test_a_missing_toolchain_names_what_brings_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(envs.TOOLCHAIN.name, str(tmp_path / "none"))
    why = str(install.missing())
    assert "make toolchain" in why
    assert "verify --install" in why
    assert all(f"{name} {version}" in why for name, version in install.pins().items())


def test_another_version_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(envs.TOOLCHAIN.name, str(tmp_path))
    for name, version in install.pins().items():
        dist_info(tmp_path, name, "9.9" if name == "ascendnpu-ir" else version)
    assert "ascendnpu-ir 1.2.0 (there is 9.9)" in str(install.missing())


def test_without_the_variable_it_lives_in_the_python_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(envs.TOOLCHAIN.name, raising=False)
    assert install.folder() == Path(sys.prefix) / "share" / "dlinfer_ext" / "toolchain"


class Pip:
    """Stands for pip: notes its calls, and makes the folder it is told to make unless it is to fail."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.lines = code, list[list[str]]()

    def __call__(self, line: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.lines.append(line)
        target = Path(line[line.index("--target") + 1])
        for name, version in list(install.pins().items())[: None if self.code == 0 else 1]:
            dist_info(target, name, version)
        return subprocess.CompletedProcess(line, self.code, "", "no space left")


def test_install_brings_the_pins_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pip, where = Pip(), tmp_path / "deep" / "toolchain"
    monkeypatch.setenv(envs.TOOLCHAIN.name, str(where))
    monkeypatch.setattr(subprocess, "run", pip)
    assert install.install() == install.install() == where
    assert len(pip.lines) == 1, "the second call found it there"
    assert {f"{n}=={v}" for n, v in install.pins().items()} <= set(pip.lines[0])
    assert "--no-deps" in pip.lines[0]
    assert install.missing() is None
    assert [p.name for p in where.parent.iterdir()] == ["toolchain"], "something is left beside it"


def test_install_that_fails_leaves_what_was_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    where = tmp_path / "toolchain"
    dist_info(where, "triton-ascend", "3.1.0")
    monkeypatch.setenv(envs.TOOLCHAIN.name, str(where))
    monkeypatch.setattr(subprocess, "run", Pip(code=1))
    with pytest.raises(RuntimeError, match="no space left"):
        install.install()
    assert [p.name for p in tmp_path.iterdir()] == ["toolchain"]
    assert [p.name for p in where.iterdir()] == ["triton_ascend-3.1.0.dist-info"]


def test_install_does_not_replace_a_folder_of_other_things(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    monkeypatch.setenv(envs.TOOLCHAIN.name, str(tmp_path))
    with pytest.raises(RuntimeError, match="holds no packages"):
        install.install()
    assert (tmp_path / "letter.txt").exists()
