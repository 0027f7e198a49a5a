"""Tile sizes and grids in plain integers, from the facts of a chip that are given: nothing here asks a device.

A kernel's tile must fit the unified buffer (UB) of a vector core, and a grid should have about as many programs as the
chip has cores: each program then takes every n-th task in a loop, which on Ascend beats a program for each task, and
keeps a grid below its limit of 65535 programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_GRID = 65535
# A masked tile of one row is miscompiled by Triton-Ascend 3.2 (flash-linear-attention#1146).
MIN_ROWS = 8


@dataclass(frozen=True)
class SoC:
    """What a launcher needs to know of a chip; `configs/soc/*.json` holds one record each.

    Attributes:
        name: "a2", "a3", "a5" or "310p".
        arch: the name that the compiler takes, such as "Ascend910B3".
        cube_cores: matrix cores.
        vector_cores: vector cores.
        ub_bytes: unified buffer of a vector core.
        l1_bytes: L1 buffer of a cube core.
        l0a_bytes: left operand of a matrix product.
        l0b_bytes: right operand.
        l0c_bytes: its fp32 result.
        triton: whether Triton kernels can be built for it.
        fused: whether operators that a machine registers in torch.ops may be used on it.
        tiles: measured choices, operator -> name -> value, from `configs/tiles`.
    """

    name: str
    arch: str
    cube_cores: int
    vector_cores: int
    ub_bytes: int
    l1_bytes: int
    l0a_bytes: int
    l0b_bytes: int
    l0c_bytes: int
    triton: bool = True
    fused: bool = True
    tiles: Mapping[str, Mapping[str, int]] = field(default_factory=dict, hash=False)

    def tile(self, operator: str, name: str, default: int) -> int:
        """Return the measured choice for this chip, or `default`."""
        return self.tiles.get(operator, {}).get(name, default)


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n, and 1 for n < 1."""
    return 1 << max(n - 1, 0).bit_length()


def prev_power_of_2(n: int) -> int:
    """Return the largest power of two that is at most n.

    Raises:
        ValueError: n < 1.
    """
    if n < 1:
        raise ValueError(f"prev_power_of_2: {n} given; wanted a number of at least 1")
    return 1 << (n.bit_length() - 1)


def fit_block(extent: int, bytes_per_element: int, budget: int, *, least: int = 16, most: int = 1 << 16) -> int:
    """Return the power-of-two block of `extent` whose working set fits a buffer.

    Args:
        extent: elements in all; the block is no larger than needed to cover it.
        bytes_per_element: of everything that is live at once for one element of the block, double buffers included.
        budget: bytes that may be used.
        least: the smallest block, at least 1.
        most: the largest.

    Raises:
        ValueError: not even `least` elements fit.
    """
    if least * bytes_per_element > budget:
        raise ValueError(
            f"a block of {least} elements at {bytes_per_element} bytes each needs {least * bytes_per_element} bytes; "
            f"the buffer offers {budget}"
        )
    return max(least, min(most, prev_power_of_2(budget // bytes_per_element), next_power_of_2(extent)))


def core_grid(tasks: int, cores: int) -> int:
    """Return the programs to launch for a task loop: one per core, fewer if there are fewer tasks, at least one."""
    return max(1, min(tasks, cores, MAX_GRID))
