"""Tile sizes and grids are plain integers that fit the chip they are given."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlinfer_ext.kernels.common.tiling import MAX_GRID, cdiv, core_grid, fit_block, next_power_of_2, prev_power_of_2
from dlinfer_ext.targets import load_soc

SIZES = st.integers(1, 1 << 20)


@pytest.mark.parametrize(
    ("a", "b", "want"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (2**40 + 1, 2**20, 2**20 + 1)]
)
def test_cdiv(a: int, b: int, want: int) -> None:
    assert cdiv(a, b) == want


@pytest.mark.parametrize(
    ("n", "up", "down"), [(1, 1, 1), (2, 2, 2), (3, 4, 2), (48, 64, 32), (64, 64, 64), (65, 128, 64)]
)
def test_powers_of_two(n: int, up: int, down: int) -> None:
    assert (next_power_of_2(n), prev_power_of_2(n)) == (up, down)


@pytest.mark.parametrize("n", [0, -1, -8])
def test_powers_of_two_of_nothing(n: int) -> None:
    assert next_power_of_2(n) == 1
    with pytest.raises(ValueError, match=f"^prev_power_of_2: {n} given; wanted a number of at least 1"):
        prev_power_of_2(n)


@given(extent=SIZES, size=st.integers(1, 512), budget=st.integers(1, 1 << 18), least=st.sampled_from([1, 8, 16, 64]))
def test_a_block_fits_and_is_as_large_as_is_of_use(extent: int, size: int, budget: int, least: int) -> None:
    if least * size > budget:
        with pytest.raises(ValueError, match=rf"needs {least * size} bytes; the buffer offers {budget}"):
            fit_block(extent, size, budget, least=least)
        return
    block = fit_block(extent, size, budget, least=least)
    assert block & (block - 1) == 0
    assert block >= least
    assert block * size <= budget
    # Twice the block would not fit, not help, or pass the limit.
    assert 2 * block * size > budget or block >= extent or block == 1 << 16


def test_a_block_keeps_its_limits() -> None:
    assert fit_block(8192, 4, 196608, most=1024) == 1024
    assert fit_block(5, 4, 196608) == 16
    assert fit_block(5, 4, 196608, least=1) == 8


@given(tasks=st.integers(0, 1 << 20), cores=st.integers(1, 1 << 17))
def test_a_grid_is_never_empty_nor_too_large(tasks: int, cores: int) -> None:
    grid = core_grid(tasks, cores)
    assert 1 <= grid <= MAX_GRID
    assert grid <= max(tasks, 1)
    assert grid <= cores
    # The task loop `range(program, tasks, grid)` of all programs takes every task once.
    if tasks < 300:
        assert sorted(t for p in range(grid) for t in range(p, tasks, grid)) == list(range(tasks))


def test_a_measured_tile_comes_before_the_default() -> None:
    soc = dataclasses.replace(load_soc("a2"), tiles={"causal_conv1d": {"channels": 512}})
    assert soc.tile("causal_conv1d", "channels", 256) == 512
    assert soc.tile("causal_conv1d", "tokens", 16) == 16
    assert soc.tile("gated_rms_norm", "channels", 256) == 256


def test_a_chip_can_be_a_key_and_cannot_be_changed() -> None:
    soc = load_soc("a2")
    assert len({soc, dataclasses.replace(soc), dataclasses.replace(soc, cube_cores=18)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        soc.ub_bytes = 1  # type: ignore[misc]
