"""What the tests of the native route look at, run in a process of its own: it takes over `triton` for good.

Usage: python -m tests.toolchain.native_scenarios NAME...; prints one JSON object of results by name.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dlinfer_ext.targets import load_soc
from dlinfer_ext.testing import rms_error
from dlinfer_ext.toolchain import native, native_build, run_cases
from dlinfer_ext.toolchain.cases import Case
from dlinfer_ext.toolchain.count import Launch, counting

SCENARIOS: dict[str, Callable[[], Any]] = {}


def scenario(function: Callable[[], Any]) -> Callable[[], Any]:
    SCENARIOS[function.__name__] = function
    return function


def kernels() -> Any:
    native.activate()
    from tests.toolchain import native_kernel

    return native_kernel


def count(launch: Callable[[], Any]) -> Launch:
    with counting() as launches:
        launch()
    (counted,) = launches
    return counted


# --- results ----------------------------------------------------------------------------------------------------------


@scenario
def scaled() -> dict[str, Any]:
    """Launches and builds of one kernel in several types; callable grid; a length that no tile divides."""
    k, before = kernels(), native.launches()
    wrong = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(1000).to(dtype)
        y = torch.empty_like(x)
        for _ in range(3):
            k.scale_kernel[lambda meta: (-(-1000 // meta["B"]),)](x, y, 1000, 2.0, B=256)
        wrong[str(dtype)] = int((y != 2 * x).sum())
    builds = [name for name in native.builds() if name == "scale_kernel"]
    return {"wrong": wrong, "launches": native.launches() - before, "builds": len(builds), **native.kernels()}


@scenario
def rounding() -> int:
    """Elements whose cast differs from PyTorch's: ties, overflow, subnormal numbers, infinities, NaN."""
    special = [float("inf"), -float("inf"), float("nan"), 1e-45, 65519.9, 65520.0, 3.4e38, -0.0]
    ties = ((torch.arange(2040, dtype=torch.int32) << 16) | 0x8000).view(torch.float32)
    bits = torch.randint(-(2**31), 2**31, (6144,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    x = torch.cat([torch.tensor(special), ties, bits])
    wrong = 0
    for dtype in (torch.bfloat16, torch.float16):
        y = torch.empty(8192, dtype=dtype)
        kernels().cast_kernel[(1,)](x, y, B=8192)
        want = x.to(dtype)
        wrong += int(((y != want) & ~(y.isnan() & want.isnan())).sum())
    return wrong


@scenario
def product() -> float:
    a, b, c = torch.randn(16, 64), torch.randn(64, 32), torch.empty(16, 32)
    kernels().product_kernel[(1,)](a, b, c, M=16, N=32, K=64)
    want = a.double() @ b.double()
    return rms_error(c, want)


@scenario
def maths() -> float:
    x, y = torch.rand(256), torch.empty(256)
    kernels().maths_kernel[(1,)](x, y, B=256)
    v = x.double()
    want = v.exp() / (1 + v * v).sqrt() + v.cumsum(0) + (2 + v.sin()).log() * v.max()
    return rms_error(y, want)


@scenario
def grid() -> list[int]:
    y = torch.full((24,), -1, dtype=torch.int32)
    kernels().grid_kernel[(2, 3, 4)](y)
    return y.tolist()


def built_since(before: int, kernel: str) -> int:
    return native.builds()[before:].count(kernel)


@scenario
def specialised() -> dict[str, int]:
    """Builds that seven lengths cost, with and without do_not_specialize."""
    k, before = kernels(), len(native.builds())
    x, y = torch.randn(128), torch.empty(128)
    for n in (1, 2, 3, 16, 17, 32, 64):
        k.scale_kernel[(1,)](x, y, n, 1.5, B=128)
        k.any_length_kernel[(1,)](x, y, n, B=128)
    return {name: built_since(before, name) for name in ("scale_kernel", "any_length_kernel")}


@scenario
def refused() -> str:
    k = kernels()
    try:
        k.scale_kernel[(1,)](torch.empty(8, device="meta"), torch.empty(8), 8, 1.0, B=8)
    except ValueError as error:
        return str(error)
    return "not refused"


@scenario
def both_builds() -> dict[str, Any]:
    """A plain launch after a counted one is not counted, and runs a build of its own."""
    k, before = kernels(), len(native.builds())
    x, y = torch.randn(64), torch.empty(64)
    counted = count(lambda: k.scale_kernel[(2,)](x, y, 64, 2.0, B=32))
    k.scale_kernel[(2,)](x, y, 64, 3.0, B=32)
    return {"bytes": counted.bytes, "wrong": int((y != 3 * x).sum()), "builds": built_since(before, "scale_kernel")}


@scenario
def chips() -> dict[str, Any]:
    """Two chips in one process: a build for each, and none when the first is asked for again."""
    k, before = kernels(), len(native.builds())
    x, y = torch.randn(64), torch.empty(64)
    seen = []
    for name in ("a2", "a5", "a2"):
        soc = native.activate(name)["soc"]
        y.zero_()
        k.scale_kernel[(4,)](x, y, 64, 2.0, B=16)
        seen.append([soc.name, torch.equal(y, 2 * x)])
    return {"seen": seen, "builds": built_since(before, "scale_kernel")}


def _spawned(connection: Any) -> None:
    k = kernels()
    x, y = torch.randn(64), torch.empty(64)
    k.scale_kernel[(1,)](x, y, 64, 2.0, B=64)
    connection.send([torch.equal(y, 2 * x), native.launches(), len(native.builds())])


@scenario
def spawned() -> Any:
    """Right, launches and builds of a spawned process that finds the kernel in the cache on disk."""
    k = kernels()
    x, y = torch.randn(64), torch.empty(64)
    k.scale_kernel[(1,)](x, y, 64, 2.0, B=64)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_spawned, args=(theirs,))
    process.start()
    result = ours.recv() if ours.poll(120) else "no answer"
    process.join(30)
    return result


# --- counts -----------------------------------------------------------------------------------------------------------


def _faults(launch: Callable[[], Any]) -> dict[str, int]:
    return count(launch).faults()


@scenario
def clean() -> dict[str, Any]:
    x, y = torch.randn(1000, dtype=torch.float32), torch.empty(1000)
    counted = count(lambda: kernels().scale_kernel[(4,)](x, y, 1000, 2.0, B=256))
    moved = {name: [t.read, t.written, t.read_distinct, t.written_distinct] for name, t in counted.traffic.items()}
    return {**moved, "bytes": counted.bytes, "blocks": counted.blocks, "faults": counted.faults()}


@scenario
def narrow_runs() -> list[int]:
    """Bytes and blocks of 64 channels of 2 bytes that lie 64 bytes apart."""
    pool = torch.zeros(64, 32, dtype=torch.bfloat16)
    column, out = pool.t()[0], torch.empty(64, dtype=torch.bfloat16)
    counted = count(lambda: kernels().column_kernel[(1,)](column, out, column.stride(0), B=64))
    return [counted.traffic["x"].read, counted.traffic["x"].read_blocks, counted.traffic["y"].written_blocks]


@scenario
def dropped_mask() -> dict[str, int]:
    x, y = torch.randn(1000), torch.empty(1000)
    return _faults(lambda: kernels().no_mask_kernel[(4,)](x, y, 1000, 2.0, B=256))


@scenario
def dropped_mask_in_a_larger_buffer() -> dict[str, Any]:
    """The bytes behind the tensor belong to the same storage, as guard rows do: still stray, and unchanged."""
    storage = torch.full((1100,), 777.0)
    x, y = torch.randn(1024), storage[:1000]
    faults = _faults(lambda: kernels().no_mask_kernel[(4,)](x, y, 1000, 2.0, B=256))
    return {**faults, "guard changed": int((storage[1000:] != 777.0).sum())}


@scenario
def slot_stride() -> dict[str, Any]:
    """A layer's slice of a shared pool, addressed with the stride of a pool of its own."""
    pool, slots = torch.zeros(6, 2, 64)[:, 0], torch.tensor([1, 3])
    right = _faults(lambda: kernels().slots_kernel[(2,)](pool, slots, pool.stride(0), D=64))
    sums = pool.sum(1).tolist()
    wrong = _faults(lambda: kernels().slots_kernel[(2,)](pool, slots, 64, D=64))
    # The plain build does what it is told: rows of other layers and slots change.
    storage = torch.zeros(6, 2, 64)
    kernels().slots_kernel[(2,)](storage[:, 0], slots, 64, D=64)
    return {"right": right, "sums": sums, "wrong": wrong, "plain": storage.sum(2).flatten().tolist()}


@scenario
def address_from_data() -> dict[str, Any]:
    """An address far outside anything mapped does not crash the counting build."""
    x, y = torch.full((8,), 1e6), torch.empty(1)
    return _faults(lambda: kernels().far_kernel[(1,)](x, y))


@scenario
def same_bytes() -> dict[str, int]:
    x, y = torch.randn(64), torch.empty(64)
    return _faults(lambda: kernels().same_bytes_kernel[(3,)](x, y, B=64))


@scenario
def neighbours() -> dict[str, int]:
    x = torch.zeros(64 * 4)
    return _faults(lambda: kernels().neighbour_kernel[(3,)](x, B=64))


@scenario
def unfilled_padding() -> dict[str, int]:
    x, y = torch.randn(1000), torch.empty(1)
    return _faults(lambda: kernels().padding_kernel[(1,)](x, y, 1000, B=1024))


@contextmanager
def without_pass(name: str) -> Iterator[None]:
    """Build with one pass left out."""
    kept = native_build.PASSES
    native_build.PASSES = tuple(p for p in kept if p != name)  # type: ignore[misc]
    native_build.fingerprint.cache_clear()
    try:
        yield
    finally:
        native_build.PASSES = kept  # type: ignore[misc]
        native_build.fingerprint.cache_clear()


@scenario
def leaked() -> dict[str, int]:
    with without_pass("--buffer-deallocation-pipeline"):
        x, y = torch.randn(1000), torch.empty(1000)
        return _faults(lambda: kernels().scale_kernel[(2,)](x, y, 1000, 2.0, B=512))


# --- cases ------------------------------------------------------------------------------------------------------------


def _case(kernel: str, **limits: float) -> Case:
    def arguments() -> dict[str, Any]:
        torch.manual_seed(0)
        return {"x": torch.randn(512, 64).bfloat16()}

    def launch(x: torch.Tensor, soc: Any) -> torch.Tensor:
        y = torch.empty(64, dtype=x.dtype)
        getattr(kernels(), kernel)[(1,)](x, y, x.size(0), B=64)
        return y

    return Case(
        "sum",
        "512",
        "norm",
        arguments,
        launch,
        lambda x: x.sum(0),
        512 * 64 * 2,
        64 * 2,
        **limits,  # type: ignore[arg-type]
    )


@scenario
def checked() -> dict[str, Any]:
    soc = load_soc("a2")
    return {
        name: [check.held, check.error, check.limit]
        for name in ("fp32_sum_kernel", "bf16_sum_kernel")
        for check in [run_cases.check_native(_case(name), soc)]
    }


@scenario
def bounded() -> dict[str, Any]:
    soc = load_soc("a2")
    loose = run_cases.count_case(_case("fp32_sum_kernel", bytes_limit=1.0, blocks_limit=1.0), soc)
    tight = run_cases.count_case(_case("fp32_sum_kernel", bytes_limit=0.9), soc)
    return {"ratio": loose.bytes_ratio, "blocks": loose.blocks_ratio, "loose": loose.held, "tight": tight.held}


@scenario
def timed() -> list[Any]:
    timing = run_cases.time_case(_case("fp32_sum_kernel"), load_soc("a2"), lambda x: x.sum(0))
    return [timing.native_s > 0, timing.eager_s > 0, timing.held]


if __name__ == "__main__":
    names = sys.argv[1:]
    torch.manual_seed(0)
    out = {name: SCENARIOS[name]() for name in names}
    sys.stdout.write("RESULT " + json.dumps(out) + "\n")
