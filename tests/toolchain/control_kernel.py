"""Kernels with known faults, and one that is sound, as cases for the compile route's tests.

The tests never import this file: it is loaded by the process that has the compiler.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl

from dlinfer_ext.toolchain.cases import Case


@triton.jit
def copy_kernel(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(o + i, tl.load(x + i) + 1)


@triton.jit(do_not_specialize=["n"])
def double_buffered_kernel(x, o, n, B: tl.constexpr):
    i = tl.arange(0, B)
    for t in range(n):
        tl.store(o + t * B + i, tl.load(x + t * B + i) * 2.0)


@triton.jit
def product_kernel(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left, right = tl.load(a + m[:, None] * K + k[None]), tl.load(b + k[:, None] * N + n[None])
    tl.store(c + m[:, None] * N + n[None], tl.dot(left, right))


@triton.jit(do_not_specialize=["n"])
def exchange_kernel(a, b, c, n, D: tl.constexpr):
    d = tl.arange(0, D)
    at = d[:, None] * D + d[None]
    for t in range(n):
        x, y = tl.exp(tl.load(a + t * D * D + at)), tl.exp(tl.load(b + t * D * D + at))
        tl.store(c + t * D * D + at, tl.exp(tl.dot(x, y, input_precision="ieee")))


@triton.jit(do_not_specialize=["n"])
def return_in_loop_kernel(x, o, n, B: tl.constexpr):
    i = tl.arange(0, B)
    for t in range(n):
        if t > 3:
            return
        tl.store(o + i, tl.load(x + i))


def _case(phase, launch, **arguments):
    return Case("control", phase, None, lambda: arguments, launch, launch, 8192, 8192, bytes_limit=1.5)


def cases(model, tp, dtype):
    """Yield one case per kind of outcome; launchers that launch nothing are the cases of fp32."""
    x, bf16 = torch.zeros(4096), torch.zeros(4096, dtype=torch.bfloat16)

    def launcher(kernel, grid=1, **constants):
        def launch(*, soc, **arguments):
            kernel[(grid,)](*arguments.values(), **constants)

        return launch

    def raises(*, soc):
        raise ValueError("launcher: nothing to launch for " + soc.name)

    if dtype is torch.float32:
        yield _case("raises", raises)
        yield _case("nothing", lambda *, soc: None)
        return
    yield _case("sound", launcher(copy_kernel, B=1024), x=x, o=x)
    yield _case("sound-twice", launcher(copy_kernel, B=1024), x=x, o=x)
    yield _case("ub", launcher(copy_kernel, B=131072), x=x, o=x)
    yield _case("l1", launcher(product_kernel, M=256, N=128, K=1024), a=bf16, b=bf16, c=x)
    yield _case("l0c", launcher(product_kernel, M=256, N=512, K=64), a=bf16, b=bf16, c=x)
    yield _case("product", launcher(product_kernel, M=64, N=64, K=64), a=bf16, b=bf16, c=x)
    yield _case("exchange", launcher(exchange_kernel, D=64), a=x, b=x, c=x, n=3)
    yield _case("retry", launcher(double_buffered_kernel, B=32768), x=x, o=x, n=5)
    yield _case("grid", launcher(copy_kernel, grid=70000, B=1024), x=x, o=x)
    yield _case("fp64", launcher(copy_kernel, B=64), x=x.double(), o=x.double())
    yield _case("return-in-loop", launcher(return_in_loop_kernel, B=64), x=x, o=x, n=5)
