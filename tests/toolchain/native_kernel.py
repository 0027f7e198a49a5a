"""Small kernels, sound and faulty, for the tests of the native route. Imported where the toolchain is on the path."""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def scale_kernel(x, y, n, factor, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + o, tl.load(x + o, mask=o < n, other=0.0) * factor, mask=o < n)


@triton.jit(do_not_specialize=["n"])
def any_length_kernel(x, y, n, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + o, tl.load(x + o, mask=o < n, other=0.0), mask=o < n)


@triton.jit
def cast_kernel(x, y, B: tl.constexpr):
    o = tl.arange(0, B)
    tl.store(y + o, tl.load(x + o).to(y.dtype.element_ty))


@triton.jit
def product_kernel(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + m[:, None] * K + k[None, :]).to(tl.float32)
    right = tl.load(b + k[:, None] * N + n[None, :]).to(tl.float32)
    tl.store(c + m[:, None] * N + n[None, :], tl.dot(left, right, input_precision="ieee"))


@triton.jit
def maths_kernel(x, y, B: tl.constexpr):
    o = tl.arange(0, B)
    v = tl.load(x + o)
    tl.store(y + o, tl.exp(v) / tl.sqrt(1.0 + v * v) + tl.cumsum(v, 0) + tl.log(2.0 + tl.sin(v)) * tl.max(v, 0))


@triton.jit
def grid_kernel(y):
    at = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    tl.store(y + at, at)


@triton.jit
def column_kernel(x, y, stride, B: tl.constexpr):
    o = tl.arange(0, B)
    tl.store(y + o, tl.load(x + o * stride))


# --- faults -----------------------------------------------------------------------------------------------------------


@triton.jit
def no_mask_kernel(x, y, n, factor, B: tl.constexpr):
    """The mask is left out: the last program reads and writes past the end."""
    o = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + o, tl.load(x + o) * factor)


@triton.jit
def slots_kernel(pool, slots, stride, D: tl.constexpr):
    """Adds 1 to a slot of a pool; right if `stride` is the pool's."""
    d = tl.arange(0, D)
    at = tl.load(slots + tl.program_id(0)) * stride + d
    tl.store(pool + at, tl.load(pool + at) + 1.0)


@triton.jit
def far_kernel(x, y):
    """Takes an address from data without looking at it."""
    tl.store(y, tl.load(x + tl.load(x).to(tl.int64) * 1000000))


@triton.jit
def same_bytes_kernel(x, y, B: tl.constexpr):
    """Every program writes the whole output; the last one wins."""
    o = tl.arange(0, B)
    tl.store(y + o, tl.load(x + o) + tl.program_id(0))


@triton.jit
def neighbour_kernel(x, B: tl.constexpr):
    """Each program reads what the one before it writes: right only if they run in order."""
    o = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + B + o, tl.load(x + o) + 1.0)


@triton.jit
def padding_kernel(x, y, n, B: tl.constexpr):
    """Sums a tile whose masked lanes nobody fills."""
    o = tl.arange(0, B)
    tl.store(y, tl.sum(tl.load(x + o, mask=o < n, care_padding=False), 0))


@triton.jit
def bf16_sum_kernel(x, y, n, B: tl.constexpr):
    """Sums in bf16 and not in fp32."""
    total = tl.zeros([B], tl.bfloat16)
    for i in range(n):
        total = (total + tl.load(x + i * B + tl.arange(0, B))).to(tl.bfloat16)
    tl.store(y + tl.arange(0, B), total)


@triton.jit
def fp32_sum_kernel(x, y, n, B: tl.constexpr):
    total = tl.zeros([B], tl.float32)
    for i in range(n):
        total += tl.load(x + i * B + tl.arange(0, B)).to(tl.float32)
    tl.store(y + tl.arange(0, B), total.to(tl.bfloat16))
