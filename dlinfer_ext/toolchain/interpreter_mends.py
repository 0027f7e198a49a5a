"""What is put right in Triton's interpreter; importing this module changes Triton for the whole process.

Only `interpreter.activate` imports it, with TRITON_INTERPRET=1 and the toolchain's Triton first on the path.

Mended, each caught by name in tests/toolchain/test_interpreter.py:

- bf16 is a bit pattern in a uint16 array here: arithmetic, comparison, reduction and `tl.dot` now take its value.
- Casts to bf16 round to nearest, ties to even, from any type.
- 16-bit products are summed in fp32.
- A loop counter is a Triton integer, as in a compiled kernel, so that `t.to(tl.int64)` works.
- min and max leave a NaN out where the compiled form does; integer sums keep their type.
- `tl.arange` takes any range, and a block is no condition of a branch.
- numpy 2.4 refuses to make a Python number of a one-element array, or a negative one unsigned.
- Arguments are not copied, programs run from the last to the first, and an access must fall into an argument.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Final

import numpy as np
import triton
import triton.language as tl
import triton.runtime.interpreter as stock
from torch import Tensor

from ..kernels.common.tiling import MAX_GRID

Array = np.ndarray[Any, Any]

COUNTS: Final[Counter[str]] = Counter()
# Options of a compiler, which has no part in this.
_OPTIONS: Final = frozenset({*stock.RESERVED_KWS, "multibuffer", "enable_auto_bind_sub_block", "compile_mode"})


# --- types ------------------------------------------------------------------------------------------------------------


def scalar_type(handle: Any) -> Any:
    """Return the element type of a handle."""
    return handle.dtype.scalar


def widen(handle: Any) -> Array:
    """Return the values of a handle that numpy can compute with: bf16 as fp32, everything else as it is."""
    data: Array = handle.data
    if scalar_type(handle) == tl.bfloat16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data


def round_to_bf16(values: Array) -> Array:
    """Return the bit patterns of the bf16 values nearest to fp32 values, ties to even; NaN stays NaN."""
    shape = np.shape(values)
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).reshape(shape)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, ((bits >> 16) | 0x40).astype(np.uint16), rounded)


def narrow(values: Array, dtype: Any) -> Any:
    """Return a handle of `dtype` with values as `widen` gives them."""
    if dtype == tl.bfloat16:
        return stock.TensorHandle(round_to_bf16(values), dtype)
    return stock.TensorHandle(np.asarray(values).astype(numpy_type(dtype), copy=False), dtype)


# --- memory -----------------------------------------------------------------------------------------------------------


class Memory:
    """Where a launch may read and write: the storages of its arguments, as sorted, disjoint ranges of addresses."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        spans: list[list[int]] = []
        for start, end in sorted({self.span(t) for t in tensors.values() if t.untyped_storage().nbytes()}):
            if spans and start <= spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], end)
            else:
                spans.append([start, end])
        self.tensors, self.spans = tensors, spans
        self.starts = np.array([s for s, _ in spans], dtype=np.uint64)
        self.ends = np.array([e for _, e in spans], dtype=np.uint64)

    @staticmethod
    def span(tensor: Tensor) -> tuple[int, int]:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()

    def check(self, what: str, pointers: Array, mask: Array, size: int) -> None:
        """Refuse an access of `size` bytes at each unmasked pointer that leaves the arguments.

        Raises:
            IndexError: with the number of such accesses and the argument nearest to the first of them.
        """
        live = pointers[mask if mask.shape == pointers.shape else np.broadcast_to(mask, pointers.shape)]
        if live.size == 0:
            return
        first, last = int(live.min()), int(live.max()) + size
        if any(start <= first and last <= end for start, end in self.spans):
            return
        if self.starts.size:
            owner = np.searchsorted(self.starts, live, side="right").astype(np.int64) - 1
            stray = (owner < 0) | (live + np.uint64(size) > self.ends[owner])
        else:
            stray = np.ones(live.shape, dtype=bool)
        if stray.any():
            first = int(live[stray].flat[0])
            raise IndexError(
                f"{int(stray.sum())} of {live.size} elements {what} outside every argument; {self.near(first)}"
            )

    def near(self, address: int) -> str:
        """Say where an address lies, as seen from the nearest argument."""
        distances = []
        for name, tensor in self.tensors.items():
            start, end = self.span(tensor)
            if end > start:
                distances.append(
                    (start - address, "before", name) if address < start else (address - end, "past", name)
                )
        if not distances:
            return "the launch has no tensor of any size"
        distance, side, name = min(distances)
        return f"the first lies {distance} bytes {side} the storage of {name}"


# --- builder ----------------------------------------------------------------------------------------------------------


def binary(function: Callable[..., Array]) -> Callable[..., Any]:
    """Make an operation whose result has the type of its operands."""

    def method(self: Any, lhs: Any, rhs: Any) -> Any:
        dtype = scalar_type(lhs)
        if dtype == tl.bfloat16:
            return narrow(function(widen(lhs), widen(rhs)), dtype)
        return stock.TensorHandle(function(lhs.data, rhs.data), dtype)

    return method


def comparison(function: Callable[..., Array]) -> Callable[..., Any]:
    """Make a comparison; its result is a truth value."""

    def method(self: Any, lhs: Any, rhs: Any) -> Any:
        return stock.TensorHandle(function(widen(lhs), widen(rhs)), tl.int1)

    return method


def constant(dtype: np.dtype[Any], triton_type: Any) -> Callable[..., Any]:
    """Make a constant, whatever its sign: the compiler takes an unsigned constant from a negative number too."""

    def method(self: Any, value: int) -> Any:
        return stock.TensorHandle(np.array([value], dtype=np.int64 if value < 0 else None).astype(dtype), triton_type)

    return method


def unsigned(values: Array) -> Array:
    """Return integers as the unsigned ones of the same bits."""
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


class Builder(stock.InterpreterBuilder):  # type: ignore[misc]
    """The interpreter's operations, mended."""

    memory: Memory | None = None

    def __init__(self) -> None:
        super().__init__()
        # As Triton-Ascend sets them; overflow checks only cost time where they are not compiled in.
        self.options = dataclasses.replace(
            stock.InterpreterOptions(),
            sanitize_overflow=False,
            default_dot_input_precision="ieee",
            allowed_dot_input_precisions=("ieee", "hf32"),
        )
        self.codegen_fns["min_dot_size"] = lambda lhs, rhs: (1, 1, 1)

    create_fadd = binary(np.add)
    create_fsub = binary(np.subtract)
    create_fmul = binary(np.multiply)
    create_fdiv = create_precise_divf = binary(np.divide)
    create_frem = binary(np.fmod)
    create_minnumf, create_maxnumf = binary(np.fmin), binary(np.fmax)
    create_minimumf, create_maximumf = binary(np.minimum), binary(np.maximum)
    create_fcmpOLT, create_fcmpOGT = comparison(np.less), comparison(np.greater)
    create_fcmpOLE, create_fcmpOGE = comparison(np.less_equal), comparison(np.greater_equal)
    create_fcmpOEQ, create_fcmpUNE = comparison(np.equal), comparison(np.not_equal)
    # The stock ones say that a truth value has the type of what was compared.
    create_icmpSLT = create_icmpULT = comparison(np.less)
    create_icmpSLE = create_icmpULE = comparison(np.less_equal)
    create_icmpSGT = create_icmpUGT = comparison(np.greater)
    create_icmpSGE = create_icmpUGE = comparison(np.greater_equal)
    create_icmpEQ, create_icmpNE = comparison(np.equal), comparison(np.not_equal)

    get_int8, get_uint8 = constant(np.dtype(np.int8), tl.int8), constant(np.dtype(np.uint8), tl.uint8)
    get_int16, get_uint16 = constant(np.dtype(np.int16), tl.int16), constant(np.dtype(np.uint16), tl.uint16)
    get_int32, get_uint32 = constant(np.dtype(np.int32), tl.int32), constant(np.dtype(np.uint32), tl.uint32)
    get_int64, get_uint64 = constant(np.dtype(np.int64), tl.int64), constant(np.dtype(np.uint64), tl.uint64)

    def get_bf16(self, value: float) -> Any:
        return narrow(np.array([value], dtype=np.float32), tl.bfloat16)

    def get_all_ones_value(self, dtype: Any) -> Any:
        kind = numpy_type(dtype)
        return stock.TensorHandle(np.full(1, True if kind.kind == "b" else -1).astype(kind), dtype.scalar)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        source, target = scalar_type(src), dst_type.scalar
        if source != target and tl.bfloat16 in (source, target):
            return narrow(widen(src), target)
        return stock.TensorHandle(src.data.astype(numpy_type(dst_type)), target)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if rounding_mode == stock._ir.ROUNDING_MODE.RTZ or scalar_type(src).is_fp8() or dst_type.scalar.is_fp8():
            raise NotImplementedError(f"{src.dtype} to {dst_type} with rounding {rounding_mode} is not interpreted")
        return self.cast_impl(src, dst_type)

    def create_clampf(self, arg: Any, lo: Any, hi: Any, propagate_nans: Any) -> Any:
        return narrow(np.clip(widen(arg), widen(lo), widen(hi)), scalar_type(arg))

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        # One rounding: fp64 holds the product of two fp32 values exactly.
        exact = widen(x).astype(np.float64) * widen(y) + widen(z)
        return (
            narrow(exact.astype(np.float32), scalar_type(z))
            if scalar_type(z) != tl.float64
            else super().create_fma(x, y, z)
        )

    def create_umulhi(self, lhs: Any, rhs: Any) -> Any:
        dtype = scalar_type(lhs)
        if lhs.data.dtype.itemsize == 8:
            return super().create_umulhi(*(stock.TensorHandle(unsigned(h.data), tl.uint64) for h in (lhs, rhs)))
        bits = 8 * lhs.data.dtype.itemsize
        high = (unsigned(lhs.data).astype(np.uint64) * unsigned(rhs.data).astype(np.uint64)) >> np.uint64(bits)
        return stock.TensorHandle(high.astype(f"u{bits // 8}").view(numpy_type(dtype)), dtype)

    def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        if scalar_type(a).is_int():
            product = np.matmul(a.data.astype(np.int32), b.data.astype(np.int32))
        else:
            product = np.matmul(widen(a).astype(np.float32), widen(b).astype(np.float32))
        return narrow(product + widen(d), scalar_type(d))

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *rest: Any) -> Any:
        if self.memory is not None:
            size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
            self.memory.check("read", ptrs.data, mask.data, size)
        return super().create_masked_load(ptrs, mask, other, *rest)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        if self.memory is not None:
            size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
            self.memory.check("written", ptrs.data, mask.data, size)
        return super().create_masked_store(ptrs, value, mask, *rest)


# --- reductions -------------------------------------------------------------------------------------------------------


class Reduce(stock.ReduceOps):  # type: ignore[misc]
    """Sums in the type of the operand, and min and max as the compiled ones treat NaN."""

    def apply_impl(self, inputs: tuple[Any, ...]) -> Any:
        operand = inputs[0]
        values = widen(operand.handle)
        # The second of each pair leaves NaN out; numpy has it for floating-point values only.
        choices = {
            tl.standard._sum_combine: (np.add, np.add),
            tl.standard._elementwise_max: (np.maximum, np.fmax),
            tl.standard._elementwise_min: (np.minimum, np.fmin),
        }
        if self.combine_fn not in choices:
            return super().apply_impl(inputs)
        function = choices[self.combine_fn][values.dtype.kind == "f"]
        axis = tuple(range(values.ndim)) if self.axis is None else self.axis
        result = function.reduce(values, axis=axis, keepdims=self.keep_dims, dtype=values.dtype)
        return self.to_tensor(narrow(np.asarray(result), operand.dtype.scalar).data, operand.dtype)


class Scan(stock.ScanOps):  # type: ignore[misc]
    """Running sums in the type of the operand."""

    def cumsum(self, operand: Any) -> Any:
        handle = narrow(
            np.cumsum(widen(operand.handle), axis=self.axis, dtype=widen(operand.handle).dtype), operand.dtype.scalar
        )
        return [self.to_tensor(handle.data, operand.dtype)]


# --- speed ------------------------------------------------------------------------------------------------------------

# A small kernel is a thousand operations on a few numbers each: what the language does around them takes the time.


@cache
def block(shape: tuple[int, ...]) -> tuple[tuple[Any, ...], Any]:
    """Return the shape and the number of elements of a block as the constants that a tensor holds."""
    return tuple(tl.constexpr(n) for n in shape), tl.constexpr(math.prod(shape))


# The stock functions that are called where the short way does not do.
_stock_type, _stock_cast = cache(stock._get_np_dtype), tl.semantic.cast
_stock_operands = tl.semantic.binary_op_type_checking_impl


def numpy_type(dtype: Any) -> Any:
    """Return the type of the array that holds a Triton type; the stock table is made anew at every call."""
    element = dtype.scalar
    return np.dtype(np.uint64) if element.is_ptr() else _stock_type(element)


def make_tensor(self: Any, handle: Any, type: Any) -> None:
    """`tl.tensor.__init__`, with the constants of its shape made once."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    shape, self.numel = block(tuple(type.shape) if type.is_block() else ())
    self.shape = list(shape)


def cast(input: Any, dst_ty: Any, builder: Any, fp_downcast_rounding: Any = None) -> Any:
    """`semantic.cast`, at once where nothing is to be done."""
    target = getattr(dst_ty, "value", dst_ty)
    return input if input.dtype == target.scalar else _stock_cast(input, target, builder, fp_downcast_rounding)


def operands(lhs: Any, rhs: Any, builder: Any, *flags: bool, **named: bool) -> Any:
    """`semantic.binary_op_type_checking_impl`, at once for two tensors of one type other than a pointer."""
    if isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor) and lhs.dtype == rhs.dtype and not lhs.dtype.is_ptr():
        # Half a float is divided in fp32.
        division = flags[3] if len(flags) > 3 else named.get("div_or_mod", False)
        if not division or lhs.dtype not in (tl.float16, tl.bfloat16):
            if lhs.type is rhs.type or lhs.type == rhs.type:
                return lhs, rhs
            return tl.semantic.broadcast_impl_value(lhs, rhs, builder)
    return _stock_operands(lhs, rhs, builder, *flags, **named)


def patch_builtins(place: Any) -> None:
    """Let every built-in of a module or class work on BUILDER."""
    for name, member in stock.inspect.getmembers(place):
        if tl.core.is_builtin(member):
            inner = getattr(member, "__wrapped__", member)
            setattr(place, name, lambda *a, _inner=inner, **k: _inner(*a, **{**k, "_builder": BUILDER}))


# --- language ---------------------------------------------------------------------------------------------------------


def counter(*bounds: Any) -> Iterator[Any]:
    """The `range` of a kernel: its counter is an int32 scalar, or int64 if a bound is."""
    wide = any(isinstance(b, tl.tensor) and b.dtype == tl.int64 for b in bounds)
    dtype, kind = (tl.int64, np.int64) if wide else (tl.int32, np.int32)
    for i in range(*(operator.index(getattr(b, "value", b)) for b in bounds)):
        yield tl.tensor(stock.TensorHandle(np.array([i], dtype=kind), dtype), dtype)


def counter_with_options(*bounds: Any, **options: Any) -> Iterator[Any]:
    """`tl.range`, whose keywords speak to the compiler."""
    return counter(*bounds)


def arange(start: int, end: int, builder: Any) -> Any:
    """`tl.arange` over any range, as Triton-Ascend compiles it."""
    if end <= start:
        raise ValueError(f"tl.arange({start}, {end}): the end must be greater than the start")
    return tl.tensor(builder.create_make_range(start, end), tl.block_type(tl.int32, [end - start]))


def condition(value: Any) -> bool:
    """The truth of what a kernel branches on; a block has none, as in a compiled kernel."""
    if isinstance(value, tl.tensor) and value.type.is_block():
        raise ValueError(f"a block of shape {list(value.handle.data.shape)} is taken for a condition; wanted a scalar")
    return bool(value)


class Rewriter(stock.ASTTransformer):  # type: ignore[misc]
    """Gives the loops of a kernel Triton's counters, and its branches a condition that is checked."""

    def visit_If(self, node: ast.If | ast.While) -> ast.If | ast.While:
        self.generic_visit(node)
        called = ast.Name(id="_kernel_condition", ctx=ast.Load())
        node.test = ast.Call(func=called, args=[node.test], keywords=[])
        return node

    visit_While = visit_If

    def visit_For(self, node: ast.For) -> ast.For:
        self.generic_visit(node)
        call = node.iter
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "range":
            call.func.id = "_kernel_counter"
        return node


class Launch(stock.GridExecutor):  # type: ignore[misc]
    """One launch, on the very tensors that were given."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        unknown = kwargs.keys() - set(self.arg_names) - _OPTIONS
        if unknown:
            raise TypeError(f"{self.fn.__name__} has no argument {', '.join(sorted(unknown))}")
        given = {name: value for name, value in kwargs.items() if name in self.arg_names}
        if kwargs.get("warmup"):
            return
        arguments = stock.inspect.getcallargs(self.fn, *args, **given)
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        for name, tensor in tensors.items():
            if tensor.device.type != "cpu":
                raise ValueError(f"{self.fn.__name__}: {name} is on {tensor.device}; only CPU tensors are interpreted")
        values = {n: v if n in self.constexprs else stock._implicit_cvt(v) for n, v in arguments.items()}
        grid = self.grid(values) if callable(self.grid) else self.grid
        grid = (*grid, 1, 1)[:3]
        programs = grid[0] * grid[1] * grid[2]
        if programs > MAX_GRID:
            raise ValueError(f"{self.fn.__name__}: a grid of {programs} programs; the chip takes {MAX_GRID}")
        BUILDER.set_grid_dim(*grid)
        outer, BUILDER.memory = BUILDER.memory, Memory(tensors)
        try:
            # On a chip no program waits for another; backwards, one that does goes wrong here.
            for place in reversed(range(programs)):
                yz, x = divmod(place, grid[0])
                z, y = divmod(yz, grid[1])
                BUILDER.set_grid_idx(x, y, z)
                with np.errstate(all="ignore"):
                    self.fn(**values)
        except stock.InterpreterError:
            raise
        except Exception as error:
            raise stock.InterpreterError(f"{self.fn.__name__}: {error!r}") from error
        finally:
            BUILDER.memory = outer
        COUNTS[self.fn.__name__] += 1


BUILDER: Final = Builder()


def mend() -> None:
    """Put the mended parts in the place of the stock ones."""
    stock.interpreter_builder = BUILDER
    stock.ReduceOps, stock.ScanOps, stock.GridExecutor = Reduce, Scan, Launch
    stock.FunctionRewriter.ast_transformer = Rewriter()
    # The rewriter lends a kernel's module every name of the stock module.
    stock._kernel_counter, stock._kernel_condition = counter, condition
    tl.semantic.arange = arange
    # Once for the process, where the stock interpreter looks through the whole language at every call.
    tl.tensor.__init__ = make_tensor
    tl.semantic.cast, tl.semantic.binary_op_type_checking_impl = cast, operands
    stock._get_np_dtype = numpy_type
    for place in (tl, tl.core, tl.tensor, tl.math):
        patch_builtins(place)
    for lang in (tl, tl.core):
        stock._patch_lang_tensor(lang.tensor)
        stock._patch_lang_core(lang)
        lang.range = counter_with_options
    tl.tensor.__index__ = lambda self: int(self.handle.data.item())
    stock._patch_lang = lambda function: None
    triton.jit = interpreted(triton.jit)


def interpreted(jit: Callable[..., Any]) -> Callable[..., Any]:
    """Make `triton.jit` interpret, whatever TRITON_INTERPRET says when a kernel is defined."""

    def decorate(function: Any = None, **options: Any) -> Any:
        if function is None:
            return lambda f: stock.InterpretedFunction(f, **options)
        return stock.InterpretedFunction(function, **options)

    decorate.__wrapped__ = jit  # type: ignore[attr-defined]
    return decorate


mend()
