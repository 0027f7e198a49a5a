"""From the linalg IR that triton-ascend hands to the Ascend compiler to a shared object for this CPU.

bishengir-opt (ascendnpu-ir) lowers the IR to MLIR's LLVM dialect, the LLVM inside triton-ascend makes an object, a C
compiler links it with `native_runtime.c`. The frontend, and so every decision that it takes on masks, tiles and
temporaries, is the one of the real compiler; what happens after linalg is not.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Final

from . import instrument
from .install import c_compiler, folder

# bishengir-opt's passes, in order: tensors to buffers, linalg to loops, everything to the LLVM dialect.
PASSES: Final[tuple[str, ...]] = (
    "--allow-unregistered-dialect",  # annotations for the Ascend compiler
    "--inline",
    "--convert-elementwise-to-linalg",
    "--linalg-generalize-named-ops",
    "--linalg-fuse-elementwise-ops",  # one loop for a chain of elementwise operations: up to twice as fast
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true allow-unknown-ops=true",
    "--buffer-deallocation-pipeline",
    "--convert-bufferization-to-memref",
    "--convert-linalg-to-loops",
    "--expand-strided-metadata",
    "--lower-affine",
    "--arith-expand=include-bf16=true",
    "--convert-scf-to-cf",
    "--memref-expand",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--convert-arith-to-llvm",
    "--convert-index-to-llvm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--convert-cf-to-llvm",
    "--convert-arith-to-llvm",
    "--reconcile-unrealized-casts",
)
TRIPLE: Final = "x86_64-unknown-linux-gnu"
# Used where the CPU has them; fp fusion stays off, so that a sum is the same on every machine.
FEATURES: Final = ("avx2", "fma", "f16c")
TIMEOUT_S: Final = 120
_C_TYPE: Final = {
    "i1": "_Bool",
    "i8": "int8_t",
    "i16": "int16_t",
    "i32": "int32_t",
    "i64": "int64_t",
    "f32": "float",
    "f64": "double",
}
# triton-ascend passes a lock and a workspace before the kernel's own arguments, and six i32 after them: the grid and
# the place of the program in it.
_HIDDEN_BEFORE: Final = 2
_HIDDEN_AFTER: Final = 6


class LowerError(RuntimeError):
    """A kernel that has no native form, and why."""


def build(linalg: str, counting: bool) -> bytes:
    """Return the shared object of a kernel.

    Args:
        linalg: the module in triton-ascend's linalg form.
        counting: let every access go through the counters of `native_count.c`.

    Raises:
        LowerError: an operation has no lowering, or a tool failed; the message has its words.
    """
    compiler = c_compiler()
    if compiler is None:
        raise LowerError("no C compiler: install gcc, or let CC name one")
    with tempfile.TemporaryDirectory(prefix="dlinfer_ext_native_") as scratch:
        mlir, lowered, object_file, source, library = (
            Path(scratch) / name for name in ("kernel.mlir", "lowered.mlir", "kernel.o", "host.c", "kernel.so")
        )
        mlir.write_text(_without_annotations(_with_bodies(linalg)), encoding="utf-8")
        _run(str(optimizer()), str(mlir), *PASSES, "-o", str(lowered))
        text = lowered.read_text(encoding="utf-8")
        if left := re.search(r"^\s*(?:%\S+ = )?\"?((?!llvm\.|module\b)[a-z_]+\.[a-z_.]+)", text, re.MULTILINE):
            raise LowerError(f"{left.group(1)} has no native lowering")
        if counting:
            lowered.write_text(instrument.instrument(text), encoding="utf-8")
        object_file.write_bytes(_object(lowered))
        source.write_text(_host_source(linalg, counting), encoding="utf-8")
        flags = ["-O2", "-fPIC", "-shared", "-Wl,--no-undefined", *(["-DCOUNT"] if counting else [])]
        _run(compiler, *flags, str(source), str(object_file), "-lm", "-ldl", "-o", str(library))
        return library.read_bytes()


@cache
def fingerprint() -> str:
    """Return what decides a shared object beside the IR: tools, passes, our own sources and the CPU's features."""
    version = subprocess.run([str(optimizer()), "--version"], capture_output=True, text=True, timeout=TIMEOUT_S)
    parts = [version.stdout, *PASSES, TRIPLE, *cpu_features()]
    for name in ("native_build.py", "instrument.py", "native_runtime.c", "native_count.c"):
        parts.append(_text(name))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@cache
def optimizer() -> Path:
    """Return bishengir-opt of the toolchain."""
    return folder() / "ascendnpuir" / "bin" / "bishengir-opt"


@cache
def cpu_features() -> tuple[str, ...]:
    """Return which of FEATURES this CPU has, by /proc/cpuinfo."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ()
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    have = flags.group(1).split() if flags else []
    return tuple(feature for feature in FEATURES if feature in have)


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _run(*line: str) -> None:
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise LowerError(f"{Path(line[0]).name} did not end within {TIMEOUT_S} s") from None
    if done.returncode:
        raise LowerError(f"{Path(line[0]).name} failed ({done.returncode}): {done.stderr.strip()[:1500]}")


def _without_annotations(linalg: str) -> str:
    """Drop hints to the Ascend compiler, which change no value; refuse operations that only it can lower."""
    linalg = re.sub(r"^\s*annotation\.mark[^\n]*\n", "", linalg, flags=re.MULTILINE)
    linalg = re.sub(r"\s*\{hivm\.unlikely_condition\}", "", linalg)
    operation = re.search(r"^\s*(?:%\S+ = )?\"?((?:hivm|hfusion|annotation|scope)\.[a-z_.]+)", linalg, re.MULTILINE)
    if operation:
        raise LowerError(f"{operation.group(1)} has no native lowering")
    return linalg


_CUMSUM: Final = re.compile(r"func\.func private @(triton_cumsum_\d+)\(tensor<([^>]*)>, i32, i1\) -> tensor<[^>]*>")


def _with_bodies(linalg: str) -> str:
    """Give a body to the helpers that triton-ascend leaves to CANN: a forward fp32 cumulative sum over dimension 0."""

    def body(declared: re.Match[str]) -> str:
        name, shape = declared.groups()
        length, *rest = shape.split("x")
        rest, element = rest[:-1], rest[-1] if rest else ""
        for call in re.finditer(rf"call @{name}\(%\w+, %(\w+), %(\w+)\)", linalg):
            dimension, reverse = call.groups()
            zero = re.search(rf"%{dimension} = arith\.constant 0 : i32", linalg)
            forward = re.search(rf"%{reverse} = arith\.constant false", linalg)
            if not zero or not forward or element != "f32":
                raise LowerError(f"{name}: only a forward fp32 cumsum over dimension 0 has a native form")
        row = f"tensor<{'x'.join(['1', *rest])}xf32>"
        sizes, ones = ", ".join(["1", *rest]), ", ".join(["1"] * (1 + len(rest)))
        here, before = (", ".join([index, *["0"] * len(rest)]) for index in ("%i", "%p"))
        return f"""func.func private @{name}(%x: tensor<{shape}>, %d: i32, %r: i1) -> tensor<{shape}> {{
    %one = arith.constant 1 : index
    %n = arith.constant {length} : index
    %y = scf.for %i = %one to %n step %one iter_args(%sums = %x) -> (tensor<{shape}>) {{
      %p = arith.subi %i, %one : index
      %sum = tensor.extract_slice %sums[{before}] [{sizes}] [{ones}] : tensor<{shape}> to {row}
      %new = tensor.extract_slice %sums[{here}] [{sizes}] [{ones}] : tensor<{shape}> to {row}
      %both = arith.addf %sum, %new : {row}
      %next = tensor.insert_slice %both into %sums[{here}] [{sizes}] [{ones}] : {row} into tensor<{shape}>
      scf.yield %next : tensor<{shape}>
    }}
    return %y : tensor<{shape}>
  }}"""

    return _CUMSUM.sub(body, linalg)


def _object(lowered: Path) -> bytes:
    from triton._C.libtriton import ir, llvm

    llvm.init_targets()
    context = ir.context()
    ir.load_dialects(context)
    module = llvm.to_module(ir.parse_mlir_module(str(lowered), context), llvm.context())
    features = ",".join(f"+{feature}" for feature in cpu_features())
    llvm.attach_datalayout(module, TRIPLE, "", "")
    llvm.optimize_module(module, llvm.OPTIMIZE_O3)
    result: bytes = llvm.translate_to_asm(str(module), TRIPLE, "x86-64", features, [], False, True)
    return result


def _host_source(linalg: str, counting: bool) -> str:
    """Return the C text that calls the kernel, with the runtime behind it."""
    entry = re.search(r"func\.func @(\w+)\((.*?)\) attributes", linalg, re.DOTALL)
    if entry is None:
        raise LowerError("the module has no kernel")
    name, types = entry.group(1), re.findall(r"%arg\d+: (memref<[^>]*>|\w+)", entry.group(2))
    declared, given = [], []
    for position, kind in enumerate(types[:-_HIDDEN_AFTER]):
        index = position - _HIDDEN_BEFORE
        if kind.startswith("memref"):
            # A one-dimensional memref: base, data, offset, size, stride.
            declared.append("void *, void *, int64_t, int64_t, int64_t")
            given.append("0, 0, 0, 0, 1" if index < 0 else f"a[{index}].p, a[{index}].p, 0, INT64_MAX >> 8, 1")
        elif kind in _C_TYPE:
            declared.append(_C_TYPE[kind])
            given.append(f"({_C_TYPE[kind]})a[{index}].{'f' if kind[0] == 'f' else 'i'}")
        else:
            raise LowerError(f"{name}: an argument of type {kind} has no native form")
    after = ", ".join(["int32_t"] * _HIDDEN_AFTER)
    return f"""#define _GNU_SOURCE
#include <stdint.h>
union argument {{ void *p; int64_t i; double f; }};
extern void kernel({", ".join([*declared, after])}) __asm__("{name}");
{_text("native_runtime.c")}
{_text("native_count.c") if counting else ""}
static void call_program(const union argument *a, const int32_t *grid, int32_t x, int32_t y, int32_t z) {{
  kernel({", ".join([*given, "grid[0], grid[1], grid[2], x, y, z"])});
}}
"""
