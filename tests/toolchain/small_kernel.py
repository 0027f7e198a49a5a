"""Small kernels, right and wrong, for the tests of the interpreter."""

import triton
import triton.language as tl


@triton.jit
def copy(x, o, n, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(o + i, tl.load(x + i, mask=i < n, other=0.0), mask=i < n)


@triton.jit
def copy_without_mask(x, o, n, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(o + i, tl.load(x + i), mask=i < n)


@triton.jit
def store_without_mask(x, o, n, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(o + i, tl.load(x + i, mask=i < n, other=0.0))


@triton.jit
def matmul(a, b, o, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m = tl.arange(0, M)[:, None]
    n = tl.arange(0, N)[None, :]
    x = tl.load(a + m * K + tl.arange(0, K)[None, :])
    y = tl.load(b + tl.arange(0, K)[:, None] * N + n)
    tl.store(o + m * N + n, tl.dot(x, y))


@triton.jit
def add(a, b, o, n, B: tl.constexpr):
    """In the type of the operands."""
    i = tl.arange(0, B)
    tl.store(o + i, tl.load(a + i) + tl.load(b + i))


@triton.jit
def less(a, b, o, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(o + i, tl.where(tl.load(a + i) < tl.load(b + i), 1, 0))


@triton.jit
def largest(x, o, B: tl.constexpr):
    tl.store(o, tl.max(tl.load(x + tl.arange(0, B)), 0))


@triton.jit
def total(x, o, B: tl.constexpr):
    tl.store(o, tl.sum(tl.load(x + tl.arange(0, B)), 0))


@triton.jit
def count_below(x, o, bound, B: tl.constexpr):
    tl.store(o, tl.sum((tl.load(x + tl.arange(0, B)) < bound).to(tl.int32), 0))


@triton.jit
def divide(a, b, quotient, rest, B: tl.constexpr):
    """Rounded towards zero, as the compiled form does."""
    i = tl.arange(0, B)
    tl.store(quotient + i, tl.load(a + i) // tl.load(b + i))
    tl.store(rest + i, tl.load(a + i) % tl.load(b + i))


@triton.jit
def copy_tasks(x, o, n, stride, B: tl.constexpr):
    """A task loop; its counter is made 64 bits wide before it is multiplied."""
    for task in range(tl.program_id(0), tl.cdiv(n, B), tl.num_programs(0)):
        i = task.to(tl.int64) * stride + tl.arange(0, B)
        tl.store(o + i, tl.load(x + i))


@triton.jit
def branch_on_a_block(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i)
    if v > 0:
        tl.store(o + i, v)


@triton.jit
def read_slots(pool, slots, o, slot_stride, B: tl.constexpr):
    i = tl.program_id(0)
    at = tl.load(slots + i).to(tl.int64) * slot_stride + tl.arange(0, B)
    tl.store(o + i * B + tl.arange(0, B), tl.load(pool + at))


@triton.jit
def read_slots_as_if_dense(pool, slots, o, slot_stride, B: tl.constexpr):
    """Takes the size of a slot for its stride."""
    i = tl.program_id(0)
    at = tl.load(slots + i).to(tl.int64) * B + tl.arange(0, B)
    tl.store(o + i * B + tl.arange(0, B), tl.load(pool + at))


@triton.jit
def running_sum(x, o):
    """Program i needs what program i - 1 has stored."""
    i = tl.program_id(0)
    before = tl.load(o + i - 1, mask=i > 0, other=0.0)
    tl.store(o + i, before + tl.load(x + i))


@triton.jit
def linear(x):
    """In the place of a sigmoid."""
    return x
