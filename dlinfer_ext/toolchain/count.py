"""What a native kernel moves, and the faults that running its programs one after the other would hide.

    with counting() as launches:
        operator(...)
    launches[0].bytes, launches[0].faults()

A **run** is a contiguous stretch that one copy of a tile moves, or one scalar access. Rows of a copy that follow each
other without a gap are one run. `blocks` is every run rounded out to whole blocks of 32 bytes, the unit of Ascend's
global memory: a run of 2 bytes costs 32. The bytes of accesses are those of the linalg IR, before the Ascend compiler
adds the exchange between cube and vector cores.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from . import native

# Two fillings of fresh temporaries: NaN in every floating-point type and -1 in every integer one, and a large finite
# number. What differs between a run with one and a run with the other comes from a temporary that nobody wrote.
_POISONS: Final = (0xFF, 0x55)


@dataclass(frozen=True)
class Traffic:
    """What a launch moved of one tensor, or of several that overlap in memory (their names joined by "+").

    Attributes:
        read, written: bytes, each access counted.
        read_distinct, written_distinct: bytes touched at least once.
        read_blocks, written_blocks: bytes of the runs rounded out to blocks of 32.
    """

    read: int
    written: int
    read_distinct: int
    written_distinct: int
    read_blocks: int
    written_blocks: int


@dataclass(frozen=True)
class Launch:
    """One counted launch. Every number but `traffic` is 0 for a kernel without a fault.

    Attributes:
        kernel: name of the Triton function.
        grid: programs in x, y and z.
        traffic: by the name of the tensor argument.
        stray_read, stray_written: bytes that belong to no element of a tensor argument and to no temporary.
        leaked: temporaries that were never freed.
        unwritten: bytes of the tensor arguments whose value depends on what fresh temporaries held: the kernel was run
            a second time from the same inputs with another filling, and these bytes came out different.
        write_write: bytes written by one program after another had written them, each time.
        read_write: bytes read by one program and written by another, in either order, each time.
    """

    kernel: str
    grid: tuple[int, int, int]
    traffic: Mapping[str, Traffic]
    stray_read: int
    stray_written: int
    leaked: int
    unwritten: int
    write_write: int
    read_write: int

    @property
    def bytes(self) -> int:
        return sum(t.read + t.written for t in self.traffic.values())

    @property
    def blocks(self) -> int:
        return sum(t.read_blocks + t.written_blocks for t in self.traffic.values())

    def faults(self) -> dict[str, int]:
        """Return the numbers that should be 0 and are not, by name."""
        names = ("stray_read", "stray_written", "leaked", "unwritten", "write_write", "read_write")
        return {name: getattr(self, name) for name in names if getattr(self, name)}


class _CRange(ctypes.Structure):
    _fields_ = (
        ("lo", ctypes.c_uint64),
        ("hi", ctypes.c_uint64),
        ("unit", ctypes.c_uint64),
        ("reader", ctypes.c_void_p),
        ("writer", ctypes.c_void_p),
        ("read", ctypes.c_int64),
        ("written", ctypes.c_int64),
        ("read_blocks", ctypes.c_int64),
        ("written_blocks", ctypes.c_int64),
    )


class _CTotals(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("stray_read", "stray_written", "leaked", "leaked_bytes", "write_write", "read_write")
    )


class _Range:
    """The bytes that tensors span which overlap, with a mark per unit for readers and writers."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.lo = min(t.data_ptr() for t in tensors.values())
        self.hi = max(_end(t) for t in tensors.values())
        self.unit = min(t.element_size() for t in tensors.values())
        self.marks: Any = np.zeros((2, (self.hi - self.lo) // self.unit), np.uint32)  # readers, writers
        self.bytes: Any = np.ctypeslib.as_array((ctypes.c_uint8 * (self.hi - self.lo)).from_address(self.lo))

    def given(self) -> _CRange:
        reader, writer = (row.ctypes.data for row in self.marks)
        return _CRange(self.lo, self.hi, self.unit, reader, writer)

    def outside(self) -> tuple[int, int]:
        """Return the distinct bytes read and written that lie between the elements of strided tensors."""
        if any(t.is_contiguous() and _end(t) - t.data_ptr() == self.hi - self.lo for t in self.tensors.values()):
            return 0, 0
        element = torch.zeros(self.marks.shape[1], dtype=torch.bool)
        for t in self.tensors.values():
            # An element is one unit or several side by side.
            per = t.element_size() // self.unit
            strides = [*(stride * per for stride in t.stride()), 1]
            element.as_strided([*t.shape, per], strides, (t.data_ptr() - self.lo) // self.unit).fill_(True)
        between = ~element.numpy()
        read, written = (int(np.count_nonzero(row[between])) * self.unit for row in self.marks)
        return read, written

    def traffic(self, c: _CRange) -> Traffic:
        read, written = (int(np.count_nonzero(row)) * self.unit for row in self.marks)
        return Traffic(c.read, c.written, read, written, c.read_blocks, c.written_blocks)


def _end(tensor: Tensor) -> int:
    """Return the address behind the last element of a tensor that is not empty."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.data_ptr() + (last + 1) * tensor.element_size())


def _ranges(tensors: Mapping[str, Tensor]) -> list[_Range]:
    """Return the ranges of tensors that share no byte with each other, by address."""
    present = sorted((t.data_ptr(), name) for name, t in tensors.items() if t.numel())
    groups: list[list[str]] = []
    end = 0
    for start, name in present:
        if not groups or start >= end:
            groups.append([])
        groups[-1].append(name)
        end = max(end, _end(tensors[name]))
    return [_Range({name: tensors[name] for name in tensors if name in group}) for group in groups]


@contextmanager
def counting() -> Iterator[list[Launch]]:
    """Count every native launch inside; the list grows with each.

    Kernels are built anew for it and run 10 to 135 times slower, each launch twice. The native driver has to be active.
    """
    counted: list[Launch] = []
    with native.recording(lambda call: counted.append(_count(call))):
        yield counted


def _count(call: native.Call) -> Launch:
    ranges = _ranges(call.tensors)
    before = [r.bytes.copy() for r in ranges]
    given, totals = _run(call, ranges, _POISONS[0], count=True)
    first = [r.bytes.copy() for r in ranges]
    for r, old in zip(ranges, before, strict=True):
        r.bytes[:] = old
    _run(call, ranges, _POISONS[1], count=False)
    unwritten = sum(int(np.count_nonzero(r.bytes != was)) for r, was in zip(ranges, first, strict=True))
    between = [r.outside() for r in ranges]
    return Launch(
        kernel=call.kernel,
        grid=call.grid,
        traffic={"+".join(r.tensors): r.traffic(c) for r, c in zip(ranges, given, strict=True)},
        stray_read=totals.stray_read + sum(read for read, _ in between),
        stray_written=totals.stray_written + sum(written for _, written in between),
        leaked=totals.leaked,
        unwritten=unwritten,
        write_write=totals.write_write,
        read_write=totals.read_write,
    )


def _run(call: native.Call, ranges: list[_Range], poison: int, *, count: bool) -> tuple[list[_CRange], _CTotals]:
    given = (_CRange * max(1, len(ranges)))(*(r.given() for r in ranges))
    totals = _CTotals()
    call.library.count_begin(given, ctypes.c_int64(len(ranges)), ctypes.c_int32(count), ctypes.c_int32(poison))
    try:
        call.run()
    finally:
        call.library.count_end(ctypes.byref(totals))
    return list(given)[: len(ranges)], totals
