"""The compile route tells sound kernels from faulty ones, each by its cause, and keeps what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dlinfer_ext.toolchain import aot, chart, install, matrix
from dlinfer_ext.toolchain.hivm import Buffer, Facts

pytestmark = pytest.mark.toolchain

needs_toolchain = pytest.mark.skipif(install.missing() is not None, reason=f"{install.missing()}")
CONTROLS = str(Path(__file__).with_name("control_kernel.py"))
SOCS = ("a2", "a5")


def run(cache: Path, dtype: str = "bfloat16") -> dict[tuple[str, str], matrix.Row]:
    rows = matrix.run_matrix(SOCS, ["qwen3_5-9b"], [1], [dtype], cache, source=CONTROLS, timeout=100)
    return {(r.phase, r.soc): r for r in rows}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hivm")


@pytest.fixture(scope="module")
def rows(cache: Path) -> dict[tuple[str, str], matrix.Row]:
    return run(cache)


@needs_toolchain
@pytest.mark.parametrize("soc", SOCS)
class TestControls:
    def test_sound_kernel(self, rows: dict[tuple[str, str], matrix.Row], soc: str) -> None:
        row = rows["sound", soc]
        assert row.held
        assert (row.kernel, row.grid) == ("copy_kernel", (1, 1, 1))
        facts = row.build.facts
        assert facts is not None
        assert (facts.loaded, facts.stored, facts.unsized) == ((4096,), (4096,), 0)
        assert (facts.loads, facts.stores, facts.dots, facts.core) == (1, 1, (), "AIV")

    @pytest.mark.parametrize(
        ("phase", "buffer", "needed"), [("ub", "UB", 524288), ("l1", "L1", 786432), ("l0c", "L0C", 524288)]
    )
    def test_overflow(
        self, rows: dict[tuple[str, str], matrix.Row], soc: str, phase: str, buffer: str, needed: int
    ) -> None:
        available = {"UB": (196608, 253952), "L1": (524288, 524288), "L0C": (131072, 262144)}[buffer]
        build = rows[phase, soc].build
        assert (build.kind, build.buffer, build.needed) == ("overflow", buffer, needed)
        assert build.available == available[SOCS.index(soc)]
        words = f"overflow: {buffer} would need {needed} bytes and has {build.available}"
        assert rows[phase, soc].faults == (words,)

    def test_unsupported_type(self, rows: dict[tuple[str, str], matrix.Row], soc: str) -> None:
        assert rows["fp64", soc].build.kind == "type"

    def test_language_the_frontend_refuses(self, rows: dict[tuple[str, str], matrix.Row], soc: str) -> None:
        row = rows["return-in-loop", soc]
        assert row.build.kind == "frontend"
        assert "Cannot have `return` statements" in row.faults[0]

    def test_grid(self, rows: dict[tuple[str, str], matrix.Row], soc: str) -> None:
        row = rows["grid", soc]
        assert row.build.kind == "ok"
        assert row.faults == ("grid: 70000 programs; a launch has at most 65535",)

    def test_matrix_product(self, rows: dict[tuple[str, str], matrix.Row], soc: str) -> None:
        row = rows["product", soc]
        assert row.held
        assert row.build.facts is not None
        assert (row.build.facts.core, sum(row.build.facts.dots)) == ("AIC", 1)


@needs_toolchain
def test_fits_only_without_double_buffering(rows: dict[tuple[str, str], matrix.Row]) -> None:
    row = rows["retry", "a2"]
    assert row.build.kind == "retry"
    assert "enable-auto-multi-buffer" in row.build.dropped
    assert row.build.facts is not None
    assert not row.held


@needs_toolchain
def test_cube_and_vector_cores_exchange_through_memory_on_a2_only(rows: dict[tuple[str, str], matrix.Row]) -> None:
    a2, a5 = (rows["exchange", soc].build.facts for soc in SOCS)
    assert a2 is not None
    assert a5 is not None
    tile = 64 * 64 * 4
    # Two operands written and read, one product written and read; that read by both vector cores.
    assert a2.exchange_bytes(1) == (2 + 2 + 1 + 2) * tile
    assert a2.workspace > 0
    assert (a5.exchange, a5.workspace) == ((), 0)
    assert a5.onchip == 3


@needs_toolchain
def test_launchers_that_launch_nothing(cache: Path) -> None:
    # A row of its own dtype: what a launcher raised is not kept, so that such a case is asked for again.
    rows = run(cache, "float32")
    for soc in SOCS:
        assert rows["raises", soc].faults == (f"launcher: ValueError: launcher: nothing to launch for {soc}",)
        assert rows["nothing", soc].faults == ("launcher: it launched no kernel",)


@needs_toolchain
def test_second_run_starts_no_process(
    rows: dict[tuple[str, str], matrix.Row], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoWorker:
        def __init__(self, *_: object) -> None:
            raise AssertionError("a worker was started")

    monkeypatch.setattr(aot, "Worker", NoWorker)
    started = time.monotonic()
    again = run(cache)
    assert time.monotonic() - started < 5
    assert all(row.cached for row in again.values())
    assert {k: r.build for k, r in again.items()} == {k: r.build for k, r in rows.items()}


@needs_toolchain
def test_equal_kernels_are_compiled_once(rows: dict[tuple[str, str], matrix.Row], cache: Path) -> None:
    assert rows["sound", "a2"].build == rows["sound-twice", "a2"].build
    keys = {r.build.key for r in rows.values() if r.kernel}
    assert len(list((cache / "raw").glob("*/*"))) == len(keys)


@needs_toolchain
def test_kernel_that_takes_too_long(tmp_path: Path) -> None:
    results = matrix.run_matrix(["a5"], ["qwen3_5-9b"], [1], cache=tmp_path, source=CONTROLS, timeout=0.01, workers=1)
    row = next(r for r in results if r.phase == "sound")
    assert row.build.kind == "timeout"


def _row(**changes: object) -> matrix.Row:
    facts = Facts("AIV", (Buffer("UB", 180000, 196608),))
    build = aot.Build("k", "a2", "key", facts=facts, seconds=1.5)
    row = matrix.Row("m", 1, "bfloat16", "op", "p", "a2", "k", (2, 1, 1), build, False, 1000, 1.5, 2.0)
    return replace(row, **changes)  # type: ignore[arg-type]


def test_too_much_of_the_unified_buffer_is_a_fault() -> None:
    row = _row()
    assert matrix.judge(row.build, row.grid) == ("UB: 180000 of 196608 bytes, 91.6%; at most 90% may be planned",)


def test_bytes_are_held_to_the_lower_bound() -> None:
    assert matrix.with_bytes(_row(), 1500, 2000).held
    row = matrix.with_bytes(_row(), 1501, 2001)
    assert (row.moved, row.blocks) == (1501, 2001)
    assert row.faults == (
        "bytes: 1501 moved, 1.50 × the lower bound; at most 1.50 ×",
        "blocks: 2001 moved, 2.00 × the lower bound; at most 2.00 ×",
    )
    assert "1.50/2.00" in row.as_texts()
    assert matrix.with_bytes(_row(bytes_limit=None, blocks_limit=None), 10**9, 10**9).held


@needs_toolchain
def test_counted_bytes_reach_the_verdict(rows: dict[tuple[str, str], matrix.Row], cache: Path) -> None:
    counted = matrix.run_matrix(
        ["a2"],
        ["qwen3_5-9b"],
        [1],
        cache=cache,
        source=CONTROLS,
        bytes_of=lambda row: (10**6, None) if row.phase == "sound" else None,
    )
    faults = {row.phase: row.faults for row in counted}
    assert faults["sound"] == ("bytes: 1000000 moved, 61.04 × the lower bound; at most 1.50 ×",)
    assert faults["sound-twice"] == ()


def test_table_and_json_of_a_row() -> None:
    row = _row()
    assert len(row.as_texts()) == len(matrix.COLUMNS)
    assert json.loads(json.dumps(row.as_json()))["build"]["facts"]["buffers"][0]["used"] == 180000


def test_chip_without_triton() -> None:
    with pytest.raises(ValueError, match="no Triton kernel is built for the chip '310p'"):
        matrix.run_matrix(["310p"], ["qwen3_5-9b"], [1])


def test_missing_toolchain_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLINFER_EXT_TOOLCHAIN", str(tmp_path / "nothing"))
    with pytest.raises(RuntimeError, match="compiler wheels are not in"):
        matrix.run_matrix(["a2"], ["qwen3_5-9b"], [1], cache=tmp_path, source=CONTROLS)


def test_claim_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    claim = f"from dlinfer_ext.toolchain import aot; aot.Store(aot.Path({str(tmp_path)!r})).claim('k')"
    subprocess.run([sys.executable, "-c", claim], check=True, cwd=Path(__file__).parents[2])
    store = aot.Store(tmp_path)
    assert store.claim("k")
    assert not store.claim("k")
    store.release("k")
    assert store.claim("k")


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.sep + "elsewhere")
    assert aot.cache_folder() == Path(os.sep) / "elsewhere" / "dlinfer_ext" / "hivm"
    assert aot.cache_folder(Path("given")) == Path("given")


def test_chart_takes_the_largest_of_each_kernel(tmp_path: Path) -> None:
    low = replace(_row().build, facts=None, seconds=3.0)
    assert chart.largest([_row(), _row(build=low)]) == {"k": {"a2": (180000 / 196608, 3.0)}}
    if chart.missing() is None:
        chart.draw([_row()], tmp_path / "chart.png")
        assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    else:
        with pytest.raises(RuntimeError, match=r"requirements/report\.txt"):
            chart.draw([_row()], tmp_path / "chart.png")
