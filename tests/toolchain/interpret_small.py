"""Interprets the small kernels and prints, as JSON, which checks fail as it stands and with each fault planted.

python -m tests.toolchain.interpret_small
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from dlinfer_ext.toolchain import interpreter

CHECKS: dict[str, Callable[[Any], bool]] = {}


def check(function: Callable[[Any], bool]) -> Callable[[Any], bool]:
    CHECKS[function.__name__] = function
    return function


def edges() -> Tensor:
    """Values around every rounding case of bf16: ties to both sides, the largest, the smallest, inf, NaN."""
    ties = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 1 + 2.0**-8 + 2.0**-20, 3.4e38, 1e-40, 0.0, -0.0])
    special = torch.tensor([float("inf"), float("-inf"), float("nan")])
    return torch.cat([ties, special, torch.randn(85)])


def unwritten(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An output before a launch: bits that are no right answer, so that what a fault leaves alone never passes."""
    return torch.full(shape, -123 if dtype == torch.bfloat16 else -1234567, dtype=dtype)


def unwritten_like(x: Tensor) -> Tensor:
    return unwritten(*x.shape, dtype=x.dtype)


def same(got: Tensor, want: Tensor) -> bool:
    return torch.equal(got.nan_to_num(nan=777.0), want.nan_to_num(nan=777.0))


@check
def fp32_is_rounded_to_bf16(k: Any) -> bool:
    x = edges()
    k.copy[(1,)](x, o := unwritten(96, dtype=torch.bfloat16), 96, B=96)
    return same(o, x.bfloat16())


@check
def integers_become_bf16(k: Any) -> bool:
    x = torch.arange(-40, 56) * 1001
    k.copy[(1,)](x, o := unwritten(96, dtype=torch.bfloat16), 96, B=96)
    return same(o, x.to(torch.bfloat16))


@check
def bf16_becomes_integers(k: Any) -> bool:
    x = torch.randn(96).mul(100).bfloat16()
    k.copy[(1,)](x, o := unwritten(96, dtype=torch.int32), 96, B=96)
    return same(o, x.to(torch.int32))


def product(k: Any, dtype: torch.dtype, out: torch.dtype) -> bool:
    a, b = torch.randn(16, 48).to(dtype), torch.randn(48, 24).to(dtype)
    k.matmul[(1,)](a, b, o := unwritten(16, 24, dtype=out), M=16, N=24, K=48)
    want = a.double() @ b.double()
    return bool(((o.double() - want).abs() <= torch.finfo(out).eps * 64 + want.abs() * torch.finfo(out).eps).all())


@check
def bf16_product(k: Any) -> bool:
    return product(k, torch.bfloat16, torch.float32)


@check
def fp16_product(k: Any) -> bool:
    return product(k, torch.float16, torch.float32)


@check
def fp32_product(k: Any) -> bool:
    return product(k, torch.float32, torch.float32)


@check
def bf16_sum_of_two(k: Any) -> bool:
    a, b = edges().bfloat16(), torch.randn(96).bfloat16()
    k.add[(1,)](a, b, o := unwritten_like(a), 96, B=96)
    return same(o, a + b)


@check
def bf16_comparison(k: Any) -> bool:
    a, b = edges().bfloat16(), torch.randn(96).bfloat16()
    k.less[(1,)](a, b, o := unwritten(96, dtype=torch.int32), B=96)
    return same(o, (a < b).int())


@check
def largest_leaves_nan_out(k: Any) -> bool:
    x = torch.tensor([1.0, float("nan"), 3.0, -2.0])
    k.largest[(1,)](x, o := unwritten(1), B=4)
    return o.item() == 3.0


@check
def largest_of_bf16(k: Any) -> bool:
    x = torch.tensor([-1.0, -3.0, -2.0, -8.0]).bfloat16()
    k.largest[(1,)](x, o := unwritten(1), B=4)
    return o.item() == -1.0


@check
def integer_sum_wraps(k: Any) -> bool:
    x = torch.full((4,), 2**30, dtype=torch.int32)
    k.total[(1,)](x, o := unwritten(1, dtype=torch.int64), B=4)
    return o.item() == 0


@check
def truth_values_are_counted(k: Any) -> bool:
    x = torch.tensor([5, -1, 0, 7, 9, 2, 3, 1], dtype=torch.int32)
    k.count_below[(1,)](x, o := unwritten(1, dtype=torch.int32), 4, B=8)
    return o.item() == 5


@check
def division_rounds_towards_zero(k: Any) -> bool:
    a, b = torch.tensor([7, -7, 7, -7]), torch.tensor([2, 2, -2, -2])
    k.divide[(1,)](a, b, q := unwritten_like(a), r := unwritten_like(a), B=4)
    return q.tolist() == [3, -3, -3, 3] and r.tolist() == [1, -1, 1, -1]


@check
def loop_counter_is_a_triton_integer(k: Any) -> bool:
    x = torch.randn(40)
    k.copy_tasks[(3,)](x, o := unwritten(40), 40, 10, B=10)
    return same(o, x)


@check
def slots_of_a_strided_pool(k: Any) -> bool:
    storage = torch.randn(6, 3, 8)
    pool, slots = storage[:, 1], torch.tensor([4, 0, 2])
    k.read_slots[(3,)](pool, slots, o := unwritten(3, 8), pool.stride(0), B=8)
    return same(o, pool[slots])


def refused(run: Callable[[], object], words: str) -> bool:
    try:
        run()
    except Exception as error:
        return words in str(error)
    return False


def with_room(n: int) -> Tensor:
    """A tensor of n numbers with memory of ours behind it, for what goes astray when nobody looks."""
    return torch.from_numpy(np.zeros(n + 64, dtype=np.float32)[:n])


@check
def reading_outside_is_refused(k: Any) -> bool:
    x, o = with_room(40), unwritten(48)
    return refused(lambda: k.copy_without_mask[(1,)](x, o, 40, B=48), "8 of 48 elements read outside every argument")


@check
def writing_outside_is_refused(k: Any) -> bool:
    x, o = torch.randn(48), with_room(40)
    return refused(lambda: k.store_without_mask[(1,)](x, o, 40, B=48), "written outside every argument")


@check
def branching_on_a_block_is_refused(k: Any) -> bool:
    x = torch.randn(8)
    return refused(lambda: k.branch_on_a_block[(1,)](x, x, B=8), "a block of shape [8] is taken for a condition")


@check
def waiting_for_another_program_shows(k: Any) -> bool:
    """A kernel whose programs depend on each other is right on a serial grid and must not pass."""
    x = torch.ones(5)
    k.running_sum[(5,)](x, o := torch.zeros(5))
    return not same(o, x.cumsum(0))


@check
def too_many_programs_are_refused(k: Any) -> bool:
    x = torch.zeros(1)
    return refused(lambda: k.copy[(65536,)](x, x, 0, B=1), "a grid of 65536 programs; the chip takes 65535")


@check
def gates_of_a_real_kernel(k: Any) -> bool:
    from dlinfer_ext.kernels.gated_delta_rule import launch, reference
    from dlinfer_ext.targets import load_soc
    from dlinfer_ext.testing import rms_error

    a, b, rate, bias = torch.randn(5, 4), torch.randn(5, 4), -torch.rand(4), torch.randn(4)
    got = launch.gated_delta_gate(a, b, rate, bias, 1.0, 20.0, soc=load_soc("a2"))
    want = reference.gated_delta_gate(a, b, rate, bias, 1.0, 20.0)
    return all(rms_error(g, w) < 1e-6 for g, w in zip(got, want, strict=True))


def failures(k: Any) -> list[str]:
    found = []
    for name, function in CHECKS.items():
        torch.manual_seed(0)
        try:
            right = function(k)
        except Exception:
            right = False
        if not right:
            found.append(name)
    return found


def main() -> int:
    interpreter.activate()
    from triton.runtime import interpreter as stock

    from dlinfer_ext.kernels.gated_delta_rule import gate_kernel
    from dlinfer_ext.toolchain import interpreter_mends as mends

    from . import small_kernel as k

    def unmended(*names: str) -> list[Any]:
        return [mock.patch.object(mends.Builder, n, getattr(stock.InterpreterBuilder, n)) for n in names]

    def truncate(values: Any) -> Any:
        return (values.astype("float32").view("uint32") >> 16).astype("uint16")

    def relabel(self: Any, src: Any, dst_type: Any, signed: bool) -> Any:
        return stock.TensorHandle(src.data, dst_type.scalar)

    planted = {
        "": [],
        "bf16 products of bit patterns": unmended("create_dot"),
        "bf16 cut off": [mock.patch.object(mends, "round_to_bf16", truncate)],
        "bf16 sums of bit patterns": unmended("create_fadd"),
        "bf16 compared as bit patterns": unmended("create_fcmpOLT"),
        "casts of bit patterns": unmended("cast_impl"),
        "integers called another type": [mock.patch.object(mends.Builder, "create_int_cast", relabel)],
        "Python's loop counter": [mock.patch.object(k, "_kernel_counter", range)],
        "no look at addresses": [mock.patch.object(mends.Memory, "check")],
        "a slot's size for its stride": [mock.patch.object(k, "read_slots", k.read_slots_as_if_dense)],
        "a sigmoid left out of a real kernel": [mock.patch.object(gate_kernel, "sigmoid", k.linear)],
    }
    report = {}
    for name, patches in planted.items():
        with ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            report[name] = failures(k)
    json.dump({"failures": report, "checks": list(CHECKS), "launches": interpreter.launches()}, sys.stdout)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
