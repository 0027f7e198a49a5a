"""The counting build: what a sound kernel moves, and that each planted fault is caught by its name."""

from __future__ import annotations

from typing import Any

import pytest

from dlinfer_ext.toolchain.instrument import UncountableError, instrument
from tests.toolchain.native_process import needs_native, run

pytestmark = pytest.mark.toolchain

NAMES = (
    *("clean", "narrow_runs", "dropped_mask", "dropped_mask_in_a_larger_buffer", "slot_stride", "address_from_data"),
    *("same_bytes", "neighbours", "unfilled_padding", "leaked", "bounded"),
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(NAMES, tmp_path_factory.mktemp("cache"))


@needs_native
def test_a_sound_kernel_moves_each_byte_once_and_has_no_fault(results: dict[str, Any]) -> None:
    got = results["clean"]
    assert got["x"] == [4000, 0, 4000, 0]
    assert got["y"] == [0, 4000, 0, 4000]
    assert (got["bytes"], got["blocks"], got["faults"]) == (8000, 8000, {})


@needs_native
def test_runs_of_two_bytes_cost_a_block_each(results: dict[str, Any]) -> None:
    assert results["narrow_runs"] == [64 * 2, 64 * 32, 64 * 2]


@needs_native
def test_a_dropped_mask_is_stray(results: dict[str, Any]) -> None:
    """Four programs of 256 elements over 1000: 24 elements of 4 bytes past the end."""
    assert results["dropped_mask"] == {"stray_read": 96, "stray_written": 96}


@needs_native
def test_a_stray_write_into_the_tensors_own_storage_is_seen_and_kept_off(results: dict[str, Any]) -> None:
    assert results["dropped_mask_in_a_larger_buffer"] == {"stray_written": 96, "guard changed": 0}


@needs_native
def test_a_wrong_slot_stride_is_stray(results: dict[str, Any]) -> None:
    """Rows of another layer lie between the first and the last element of the pool, and belong to none of them."""
    got = results["slot_stride"]
    assert got["right"] == {}
    assert got["sums"] == [0, 64, 0, 64, 0, 0]
    assert got["wrong"] == {"stray_read": 512, "stray_written": 512}
    # Slots 1 and 3 of layer 0 are rows 2 and 6; the wrong stride hits layer 1's rows.
    assert got["plain"] == [0, 64, 0, 64, *[0] * 8]


@needs_native
def test_an_address_from_data_is_stray_and_no_crash(results: dict[str, Any]) -> None:
    assert results["address_from_data"]["stray_read"] == 4


@needs_native
def test_two_programs_that_write_the_same_bytes_conflict(results: dict[str, Any]) -> None:
    assert results["same_bytes"] == {"write_write": 2 * 64 * 4}


@needs_native
def test_a_program_that_reads_what_another_writes_conflicts(results: dict[str, Any]) -> None:
    """The result is right, since programs run in order here; on a card they do not."""
    assert results["neighbours"] == {"read_write": 2 * 64 * 4}


@needs_native
def test_a_temporary_that_nobody_wrote_is_seen_in_the_output(results: dict[str, Any]) -> None:
    assert results["unfilled_padding"] == {"unwritten": 4}


@needs_native
def test_temporaries_that_are_not_freed_are_leaks(results: dict[str, Any]) -> None:
    """Built without the pass that frees them."""
    assert set(results["leaked"]) == {"leaked"}


@needs_native
def test_a_case_over_its_bound_does_not_hold(results: dict[str, Any]) -> None:
    assert results["bounded"] == {"ratio": 1.0, "blocks": 1.0, "loose": True, "tight": False}


MODULE = "module attributes {{}} {{\n  llvm.func @f(%arg0: !llvm.ptr) {{\n    {}\n  }}\n}}"


@pytest.mark.parametrize(
    "operation",
    [
        "%1 = llvm.atomicrmw fadd %arg0, %0 monotonic : !llvm.ptr, f32",
        '"llvm.intr.memset"(%arg0, %0, %1) <{isVolatile = false}> : (!llvm.ptr, i8, i64) -> ()',
        "%1 = llvm.load %arg0 : !llvm.ptr -> vector<4xf32>",
    ],
)
def test_an_access_that_cannot_be_counted_is_refused(operation: str) -> None:
    with pytest.raises(UncountableError, match="cannot be counted"):
        instrument(MODULE.format(operation))


def test_loads_stores_copies_and_temporaries_go_through_the_counters() -> None:
    text = instrument(
        MODULE.format(
            "\n    ".join(
                (
                    "%1 = llvm.load %arg0 {alignment = 2 : i64} : !llvm.ptr -> bf16",
                    "llvm.store %1, %arg0 : bf16, !llvm.ptr",
                    '"llvm.intr.memcpy"(%arg0, %2, %3) <{isVolatile = false}> : (!llvm.ptr, !llvm.ptr, i64) -> ()',
                    "%4 = llvm.call @malloc(%3) : (i64) -> !llvm.ptr",
                    "llvm.call @free(%4) : (!llvm.ptr) -> ()",
                    "llvm.store %5, %6 : !llvm.struct<(i64, ptr)>, !llvm.ptr",
                )
            )
        )
    )
    for call in ("load(%arg0", "store(%arg0", "copy(%arg0, %2, %3)", "malloc(%3)", "free(%4)"):
        assert f"@count_{call}" in text, call
    assert "constant(2 : i64)" in text
    assert "llvm.store %5, %6 :" in text, "a descriptor on the stack is nobody's traffic"
