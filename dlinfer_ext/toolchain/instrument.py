"""The counting build: a text edit of a kernel in MLIR's LLVM dialect, so that every access goes through a counter.

Loads and stores take the address that the counter returns, so that an access outside every tensor neither crashes nor
goes unseen. An operation on memory that this edit does not know is refused: nothing is left uncounted.
"""

from __future__ import annotations

import re
from typing import Final

_BYTES: Final = {
    "i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "f16": 2, "bf16": 2, "f32": 4, "f64": 8, "!llvm.ptr": 8
}  # fmt: skip
_LOAD: Final = re.compile(r"(?P<indent>\s*)(?P<head>%\w+ = llvm\.load )(?P<at>%\w+)(?P<tail>.* -> (?P<type>\S+))$")
_STORE: Final = re.compile(
    r"(?P<indent>\s*)(?P<head>llvm\.store %\w+, )(?P<at>%\w+)(?P<tail>[^:]* : (?P<type>.+), !llvm\.ptr)$"
)
_COPY: Final = re.compile(r'(?P<indent>\s*)"llvm\.intr\.memcpy"\((?P<operands>%\w+, %\w+, %\w+)\)')
_MEMORY: Final = re.compile(r"llvm\.(load|store|atomicrmw|cmpxchg|inline_asm|intr\.(mem\w+|masked\.\w+|vp\.\w+))\b")
_DECLARATIONS: Final = """
  llvm.func @count_load(!llvm.ptr, i64) -> !llvm.ptr
  llvm.func @count_store(!llvm.ptr, i64) -> !llvm.ptr
  llvm.func @count_copy(!llvm.ptr, !llvm.ptr, i64)"""


class UncountableError(RuntimeError):
    """A kernel holds an operation on memory that cannot be counted."""


def instrument(module: str) -> str:
    """Return a module in the LLVM dialect with its accesses routed through `native_count.c`.

    Raises:
        UncountableError: an operation on memory that is neither a load, a store nor a copy.
    """
    lines = [_line(number, line) for number, line in enumerate(module.split("\n"))]
    text = "\n".join(lines).replace("@malloc(", "@count_malloc(").replace("@free(", "@count_free(")
    return re.sub(r"^(module\b[^\n]*\{)$", lambda m: m.group(1) + _DECLARATIONS, text, count=1, flags=re.MULTILINE)


def _line(number: int, line: str) -> str:
    if not (memory := _MEMORY.search(line)):
        return line
    if copy := _COPY.match(line):
        call = f"llvm.call @count_copy({copy['operands']}) : (!llvm.ptr, !llvm.ptr, i64) -> ()"
        return copy["indent"] + call
    access = _LOAD.match(line) or _STORE.match(line)
    if access is None:
        raise UncountableError(f"llvm.{memory.group(1)} cannot be counted: {line.strip()}")
    if access["type"].startswith(("!llvm.struct", "!llvm.array")):
        return line  # a memref descriptor on the stack, on its way to memrefCopy, or the sizes of one
    if access["type"] not in _BYTES:
        raise UncountableError(f"an access of type {access['type']} cannot be counted: {line.strip()}")
    indent, kind = access["indent"], memory.group(1)
    size, at = f"%count_size_{number}", f"%count_at_{number}"
    return (
        f"{indent}{size} = llvm.mlir.constant({_BYTES[access['type']]} : i64) : i64\n"
        f"{indent}{at} = llvm.call @count_{kind}({access['at']}, {size}) : (!llvm.ptr, i64) -> !llvm.ptr\n"
        f"{indent}{access['head']}{at}{access['tail']}"
    )
