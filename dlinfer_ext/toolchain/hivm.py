"""Reads what bishengir-compile leaves behind: its log, and the HIVM text with planned buffer addresses.

HIVM (module.hivm.opt.mlir) is the last form of a kernel that is made without CANN. It says where every buffer lies in
the on-chip memories, and lists each transfer, vector call and matrix product. On A2 and A3 loops are `scf.for`; on A5
they are branches between blocks, and vector code is outlined into functions of intrinsics.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

# Address space of the compiler -> the name of the memory in the documentation.
MEMORIES: Final = {"ub": "UB", "cbuf": "L1", "ca": "L0A", "cb": "L0B", "cc": "L0C"}
# Masks are packed.
_BITS: Final = {
    "i1": 1,
    **dict.fromkeys(("i8", "ui8", "f8E4M3FN", "f8E5M2"), 8),
    **dict.fromkeys(("i16", "ui16", "f16", "bf16"), 16),
    **dict.fromkeys(("i32", "ui32", "f32"), 32),
    **dict.fromkeys(("i64", "ui64", "f64", "index"), 64),
}


@dataclass(frozen=True)
class Buffer:
    """High-water mark of one on-chip memory, in bytes."""

    name: str
    used: int
    available: int

    @property
    def share(self) -> float:
        return self.used / self.available


@dataclass(frozen=True)
class Facts:
    """What the HIVM text of one kernel says. Tuples by loop depth: entry d is for one run of the code inside d loops.

    Loops whose trips the text tells are unrolled in the sums and do not count as a depth. The vector part of a matrix
    kernel runs on two vector cores; accesses that both perform count twice.

    Attributes:
        core: "AIV" (vector), "AIC" (cube) or "MIX" (both).
        buffers: on-chip memories that are used; L0A and L0B are planned after HIVM.
        loads: transfers from global memory in the text.
        stores: transfers to global memory in the text.
        scalars: single elements read or written one at a time, without a transfer.
        loaded: bytes of the loads whose size is known, by loop depth; exchange is not among them.
        stored: bytes of the stores whose size is known, by loop depth.
        unsized: transfers whose size depends on a mask or on run-time values.
        exchange: bytes moved between cube and vector cores through a workspace in global memory, by loop depth.
        workspace: bytes of that workspace for one program.
        onchip: transfers between cube and vector cores that stay on the chip.
        dots: matrix products, by loop depth.
        vector_ops: vector operations in the text.
        barriers: pipe barriers within a core.
        flags: waits of one pipe for another.
        core_syncs: waits of a cube core for a vector core or the reverse.
    """

    core: str
    buffers: tuple[Buffer, ...] = ()
    loads: int = 0
    stores: int = 0
    scalars: int = 0
    loaded: tuple[int, ...] = ()
    stored: tuple[int, ...] = ()
    unsized: int = 0
    exchange: tuple[int, ...] = ()
    workspace: int = 0
    onchip: int = 0
    dots: tuple[int, ...] = ()
    vector_ops: int = 0
    barriers: int = 0
    flags: int = 0
    core_syncs: int = 0

    def buffer(self, name: str) -> Buffer | None:
        """Return the buffer called `name`, such as "UB", or None if the kernel does not use it."""
        return next((b for b in self.buffers if b.name == name), None)

    def exchange_bytes(self, trips: int) -> int:
        """Return the bytes that a launch moves through the workspace.

        Args:
            trips: runs of the loop that holds the matrix products, over all programs of the launch.

        Raises:
            ValueError: the exchange is spread over several loop depths, so that one number of trips does not do.
        """
        moved = [n for n in self.exchange if n]
        if len(moved) > 1:
            raise ValueError(f"exchange at several loop depths: {self.exchange}")
        return sum(moved) * trips

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Facts:
        """Return the facts that `dataclasses.asdict` and JSON made a record of."""
        values: dict[str, Any] = {f.name: record[f.name] for f in fields(cls)}
        values["buffers"] = tuple(Buffer(**b) for b in values["buffers"])
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**values)


@dataclass(frozen=True)
class Failure:
    """Why a build did not reach HIVM.

    Attributes:
        kind: "overflow", "crash", "type" or "refused".
        message: the compiler's words.
        buffer: the memory that overflowed.
        needed: bytes wanted there.
        available: bytes that it has.
    """

    kind: str
    message: str
    buffer: str | None = None
    needed: int | None = None
    available: int | None = None


_TYPE_WORDS: Final = re.compile(
    r"should have element type|must be .* of .* values, but got|unexpected type|unsupported (element )?type|"
    r"not support\w* .*\btype\b|\bfp?64\b|\bfp?8\b",
    re.IGNORECASE,
)


def failure(log: str, returncode: int) -> Failure:
    """Return what a compiler's log names as the cause of a failure."""
    if m := re.search(r"(\w+) overflow, requires (\d+) bits while (\d+) bits available", log):
        name, needed, available = MEMORIES.get(m[1].lower(), m[1]), int(m[2]) // 8, int(m[3]) // 8
        text = f"{name} would need {needed} bytes and has {available}"
        return Failure("overflow", text, name, needed, available)
    if returncode < 0 or re.search(r"Stack dump|PLEASE submit|Assertion .* failed|Segmentation fault", log):
        word = re.search(r"Assertion [^\n]*|LLVM ERROR[^\n]*|UNREACHABLE[^\n]*|Segmentation fault", log)
        return Failure("crash", word[0][:400] if word else f"the compiler died with exit status {returncode}")
    errors = [e.strip() for e in re.findall(r"error: ([^\n]*)", log)]
    errors = [e for e in errors if "Failed to run" not in e and "External hivmc" not in e]
    text = " | ".join(dict.fromkeys(e[:300] for e in errors))
    if not text and "Failed to run BiShengHIR pipeline" in log:
        text = "the compiler gives no cause beyond 'Failed to run BiShengHIR pipeline'"
    text = text or f"exit status {returncode}: {log.strip()[-300:]}"
    return Failure("type" if _TYPE_WORDS.search(text) else "refused", text)


def dropped(log: str) -> tuple[str, ...]:
    """Return the optimisations that the compiler gave up in order to make a kernel fit, in its own names.

    It then compiles again and succeeds without an error; double buffering is one of them.
    """
    notes = re.findall(r"\[NOTE\][^\n]*?automatically ([^\n]*?)(?: and retrying compilation|; compilation)", log)
    return tuple(dict.fromkeys(re.findall(r"set ([\w-]+) to \w+", " ".join(notes))))


def read(text: str) -> Facts:
    """Return what the text of module.hivm.opt.mlir says of its kernel.

    Raises:
        ValueError: the text holds no kernel.
    """
    functions = list(_functions(text))
    vector = {name: _intrinsics(lines) for name, header, lines in functions if "hivm.vector_function" in header}
    entries = [f for f in functions if "#hacc.arg_type<workspace>" in f[1] or "hacc.entry" in f[1]]
    if not entries:
        raise ValueError("the text holds no function with the arguments of a kernel")
    tally = _Tally(vector)
    for _, header, lines in entries:
        tally.add(header, lines)
    capacity = {name: int(bits) // 8 for name, bits in re.findall(r'dl_entry<"(\w+)_SIZE", (\d+)', text)}
    buffers = []
    for space, name in MEMORIES.items():
        if space in tally.high:
            step = capacity.get(f"{name}_ALIGN", 1)
            buffers.append(Buffer(name, -(-tally.high[space] // step) * step, capacity[name]))
    size = re.search(r"@\w+_infer_workspace_shape_function\(.*?constant (\d+) : index", text, re.S)
    cores = {m for _, header, _ in entries for m in re.findall(r"func_core_type<(\w+)>", header)}
    module = re.search(r"module_core_type<(\w+)>", text)
    sums: dict[str, Any] = {name: tally.count[name] for name in _COUNTS}
    sums.update({name: tally.by_depth(name) for name in _BY_DEPTH})
    return Facts(
        core=module[1] if module else "MIX" if len(cores) > 1 else "".join(cores),
        buffers=tuple(buffers),
        workspace=int(size[1]) if size else 0,
        **sums,
    )


_COUNTS: Final = ("loads", "stores", "scalars", "unsized", "onchip", "vector_ops", "barriers", "flags", "core_syncs")
_BY_DEPTH: Final = ("loaded", "stored", "exchange", "dots")
_OPERATIONS: Final = {
    "hivm.hir.pipe_barrier": "barriers",
    "hivm.hir.wait_flag": "flags",
    "hivm.hir.sync_block_wait": "core_syncs",
}
_CHAIN: Final = re.compile(
    r"\s*(%\w+) = memref\.(cast|view|subview|reinterpret_cast|collapse_shape|expand_shape|memory_space_cast) "
    r"(%\w+).*? : (memref<.*) (?:to|into) memref<.*$"
)
_CALL: Final = re.compile(r"call @(\w+)\(([^)]*)\) (?:\{[^}]*\} )?: \((.*)\) -> ")
_SCALAR: Final = re.compile(r"memref\.(load|store) .* : (memref<.*#hivm\.address_space<gm>>)")
_CONSTANT: Final = re.compile(r"\s*(%[\w-]+) = (?:arith|llvm\.mlir)\.constant\(?\s*(-?\d+) : (?:i32|i64|index)")
_POINTER: Final = re.compile(r"hivm\.hir\.pointer_cast\(([^)]*)\)[^:\n]*: (memref<.*#hivm\.address_space<(\w+)>>)")
_SHAPE: Final = re.compile(r"memref<((?:[\d?]+x)*)([A-Za-z]\w*)")


def _functions(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield name, header and body lines of each function that has a body."""
    for m in re.finditer(r"^  func\.func (?:private )?@(\w+)(\([^\n]*\{)\n(.*?)^  \}", text, re.S | re.M):
        yield m[1], m[2], m[3].split("\n")


def _intrinsics(lines: list[str]) -> int:
    """Return how many vector operations an outlined vector function has, moves and masks left out."""
    names = re.findall(r"intr\.hivm\.(v\w+)", "\n".join(lines))
    return sum(1 for n in names if not n.startswith(("vld", "vst", "vdup", "vbr", "vci")))


def _bytes(memref: str) -> int | None:
    """Return the size of a memref type, or None if it is known only at run time."""
    m = _SHAPE.match(memref)
    if m is None or "?" in m[1] or m[2] not in _BITS:
        return None
    return -(-math.prod(int(d) for d in m[1].split("x") if d) * _BITS[m[2]] // 8)


def _split(types: str) -> list[str]:
    """Split a list of types at its outer commas."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(types):
        depth += (c in "<[({") - (c in ">])}")
        if c == "," and depth == 0:
            parts.append(types[start:i].strip())
            start = i + 1
    return [*parts, types[start:].strip()]


def _space(memref: str) -> str | None:
    m = re.search(r"#hivm\.address_space<(\w+)>", memref) if memref.startswith("memref<") else None
    return m[1] if m else None


@dataclass
class _Tally:
    """Sums over the functions that make up one kernel."""

    vector: Mapping[str, int]
    high: dict[str, int] = field(default_factory=dict)
    count: Counter[str] = field(default_factory=Counter)
    depths: dict[str, Counter[int]] = field(default_factory=lambda: {name: Counter() for name in _BY_DEPTH})

    def by_depth(self, name: str) -> tuple[int, ...]:
        c = self.depths[name]
        return tuple(c[d] for d in range(max(c, default=-1) + 1))

    def add(self, header: str, lines: list[str]) -> None:
        workspace = re.search(r"(%\w+): memref<[^%]*#hacc\.arg_type<workspace>", header)
        chain: dict[str, tuple[str, str, str]] = {}
        constants = _constants(lines)
        twice = 2 if any("hivm.hir.get_sub_block_idx" in line for line in lines) else 1
        for line, depth, trips, single in _walk(lines, constants):
            times = trips if single else trips * twice
            if m := _CHAIN.match(line):
                chain[m[1]] = (m[2], m[3], m[4])
            elif m := _POINTER.search(line):
                size = _bytes(m[2]) or 0
                for address in (constants.get(a.strip()) for a in m[1].split(",")):
                    if address is not None:
                        self.high[m[3]] = max(self.high.get(m[3], 0), address + size)
            elif m := _CALL.search(line):
                operands = list(zip(m[2].split(", "), _split(m[3]), strict=True))
                self._call(m[1], operands, depth, trips, times, chain, workspace[1] if workspace else "")
            elif m := _SCALAR.search(line):
                self.count["scalars"] += 1
                name = "loaded" if m[1] == "load" else "stored"
                shape = _SHAPE.match(m[2])
                self.depths[name][depth] += _BITS.get(shape[2] if shape else "", 0) // 8 * times
            for word, name in _OPERATIONS.items():
                self.count[name] += word in line

    def _call(
        self,
        name: str,
        operands: list[tuple[str, str]],
        depth: int,
        trips: int,
        times: int,
        chain: Mapping[str, tuple[str, str, str]],
        workspace: str,
    ) -> None:
        memrefs = [(o, t, s) for o, t in operands if (s := _space(t)) is not None]
        spaces = [s for _, _, s in memrefs]
        if name.startswith("mma"):
            self.depths["dots"][depth] += trips
        elif "gm" in spaces:
            where = spaces.index("gm")
            operand, kind, _ = memrefs[where]
            size, exact = _bytes(kind), True
            while operand in chain:
                # A cast hides a size; a view of run-time size has none.
                view, operand, outer = chain[operand]
                exact = exact and view == "cast"
                size = _bytes(outer) if size is None and exact else size
            self.count["unsized"] += size is None
            self.count["loads" if where == 0 else "stores"] += 1
            to = "exchange" if operand == workspace else "loaded" if where == 0 else "stored"
            self.depths[to][depth] += (size or 0) * times
        elif len(set(spaces)) > 1:
            self.count["onchip"] += 1
        elif set(spaces) == {"ub"}:
            self.count["vector_ops"] += self.vector.get(name, 1)


def _walk(lines: list[str], constants: Mapping[str, int]) -> Iterator[tuple[str, int, int, bool]]:
    """Yield each line with what is around it.

    Yields:
        The line; loops whose trips are known only at run time; the product of the trips of the other loops; whether
        only one of two vector cores comes there.
    """
    around, halves, conditions = _block_loops(lines, constants), _block_halves(lines), _half_conditions(lines)
    # For each open brace: the trips of its loop (None: not a loop, 0: not known), and whether it is one core's.
    stack: list[tuple[int | None, bool]] = []
    for i, line in enumerate(lines):
        text = line.strip()
        closed = stack.pop() if text.startswith("}") and stack else (None, False)
        loops = [*around[i], *(trips for trips, _ in stack if trips is not None)]
        yield line, loops.count(0), math.prod(n for n in loops if n), halves[i] or any(half for _, half in stack)
        if not text.endswith("{"):
            continue
        if text.startswith("}"):
            stack.append(closed)
        elif m := re.search(r"scf\.for %\w+ = (\S+) to (\S+) step (\S+)", text):
            stack.append((_trips(*(constants.get(v) for v in m.groups())), False))
        else:
            m = re.search(r"scf\.if (%\w+)", text)
            stack.append((0 if "scf.while" in text else None, m is not None and m[1] in conditions))


def _trips(start: int | None, end: int | None, step: int | None) -> int:
    """Return how often a loop runs, or 0 if that is known only at run time."""
    return 0 if start is None or end is None or not step else max(0, -(-(end - start) // step))


def _constants(lines: list[str]) -> dict[str, int]:
    return {m[1]: int(m[2]) for line in lines if (m := _CONSTANT.match(line))}


def _half_conditions(lines: list[str]) -> set[str]:
    """Return the names of conditions that compare the number of the vector core."""
    numbers, conditions = set[str](), set[str]()
    for line in lines:
        m = re.match(r"\s*(%\w+) = (\S+)(.*)", line)
        if m is None:
            continue
        used = set(re.findall(r"%\w+", m[3]))
        if m[2].startswith("hivm.hir.get_sub_block_idx") or (
            m[2].startswith(("arith.index_cast", "arith.trunci", "arith.ext", "llvm.")) and used & numbers
        ):
            numbers.add(m[1])
        elif (m[2] == "arith.cmpi" and used & numbers) or (m[2] == "arith.andi" and used & conditions):
            conditions.add(m[1])
    return conditions


def _blocks(lines: list[str]) -> dict[str, int]:
    """Return the line on which each block of a function begins."""
    return {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"\s*(\^bb\d+)\b.*:\s*(//.*)?$", line))}


def _block_loops(lines: list[str], constants: Mapping[str, int]) -> list[list[int]]:
    """Return for each line the trips of the loops made of branches around it, 0 where they are not known.

    A branch to an earlier block closes a loop, which holds everything in between: the compiler writes blocks in order.
    """
    starts, ends = _blocks(lines), dict[int, int]()
    for i, line in enumerate(lines):
        if "cf.br" in line or "cf.cond_br" in line:
            for target in re.findall(r"\^bb\d+", line):
                if starts[target] <= i:
                    ends[starts[target]] = max(i, ends.get(starts[target], 0))
    spans = [(start, end, _block_trips(lines, start, end, constants)) for start, end in ends.items()]
    return [[trips for start, end, trips in spans if start <= i <= end] for i in range(len(lines))]


def _block_trips(lines: list[str], start: int, end: int, constants: Mapping[str, int]) -> int:
    """Return the trips of the loop whose first block begins at line `start` and whose last branch is at `end`."""
    head = re.match(r"\s*(\^bb\d+)\((%\w+): ", lines[start])
    if head is None:
        return 0
    jump = re.compile(re.escape(f"br {head[1]}(") + r"(%\w+)")
    entry = next((m[1] for line in lines[:start] if (m := jump.search(line))), "")
    latch = jump.search(lines[end])
    body = "\n".join(lines[start : end + 1])
    test = re.search(rf"arith\.cmpi slt, {head[2]}, (%\w+)", body)
    step = re.search(rf"{latch[1]} = arith\.addi {head[2]}, (%\w+)", body) if latch else None
    if test is None or step is None:
        return 0
    return _trips(constants.get(entry), constants.get(test[1]), constants.get(step[1]))


def _block_halves(lines: list[str]) -> list[bool]:
    """Return for each line whether a branch on the number of the vector core is around it."""
    starts, conditions = _blocks(lines), _half_conditions(lines)
    spans = []
    for i, line in enumerate(lines):
        m = re.search(r"cf\.cond_br (%\w+), (\^bb\d+)[^^]*(\^bb\d+)", line)
        if m and m[1] in conditions and i < starts[m[2]] < starts[m[3]]:
            spans.append((starts[m[2]], starts[m[3]]))
    return [any(a <= i < b for a, b in spans) for i in range(len(lines))]
