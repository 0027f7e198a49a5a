"""Device code of Kimi Delta Attention's gates."""

import triton
import triton.language as tl

from ..common.delta_gate_kernel import log1p_of_exp, sigmoid


@triton.jit(
    do_not_specialize=["tokens", "x_token", "x_head", "bias_head", "rate_head", "heads", "lower_bound"],
    do_not_specialize_on_alignment=["x_ptr", "rate_ptr", "bias_ptr", "g_ptr"],
)
def kda_gate_kernel(
    x_ptr, rate_ptr, bias_ptr, g_ptr, tokens, heads, lower_bound, x_token, x_head, rate_head, bias_head,
    X_INNER: tl.constexpr, BIAS_INNER: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    """Log decays: x [T, HV, K] by strides -> g [T, HV, K] fp32, contiguous. A task is BT tokens of one head.

    `rate_ptr` [HV] holds A_log, `bias_ptr` [HV, K]. BOUNDED: lower_bound · sigmoid(exp(A_log) · z); else the softplus
    form, in which z above 20 is its own softplus.
    """
    ks = tl.arange(0, BK)
    step = tl.arange(0, BT)
    for task in range(tl.program_id(0), tl.cdiv(tokens, BT) * heads, tl.num_programs(0)):
        head = task % heads
        first = (task // heads) * BT
        rate = tl.exp(tl.load(rate_ptr + head * rate_head).to(tl.float32))
        bias = tl.load(bias_ptr + head * bias_head + ks * BIAS_INNER, mask=ks < K, other=0.0).to(tl.float32)
        mask = (step < tokens - first)[:, None] & (ks < K)[None, :]
        source = x_ptr + first.to(tl.int64) * x_token + head.to(tl.int64) * x_head
        x = tl.load(source + step[:, None] * x_token + ks[None, :] * X_INNER, mask=mask, other=0.0)
        z = x.to(tl.float32) + bias[None, :]
        g = lower_bound * sigmoid(rate * z) if BOUNDED else -rate * tl.where(z > 20.0, z, log1p_of_exp(z))
        target = g_ptr + (first.to(tl.int64) * heads + head) * K
        tl.store(target + step[:, None] * (heads * K) + ks[None, :], g, mask=mask)
