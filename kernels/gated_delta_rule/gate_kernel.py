"""Device code of the gated delta rule's gates."""

import triton
import triton.language as tl

from ..common.delta_gate_kernel import log_decay, sigmoid


@triton.jit(
    do_not_specialize=[
        "a_ptr", "b_ptr", "rate_ptr", "dt_ptr", "g_ptr", "beta_ptr", "tokens", "a_token", "b_token", "softplus_beta",
        "inverse_beta", "softplus_threshold",
    ]
)  # fmt: skip
def gate_kernel(
    a_ptr,
    b_ptr,
    rate_ptr,
    dt_ptr,
    g_ptr,
    beta_ptr,
    tokens,
    a_token,
    b_token,
    softplus_beta,
    inverse_beta,
    softplus_threshold,
    HEADS: tl.constexpr,
    A_HEAD: tl.constexpr,
    B_HEAD: tl.constexpr,
    RATE_HEAD: tl.constexpr,
    DT_HEAD: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
):
    """a, b [T, HV] by strides -> g, beta [T, HV] fp32, contiguous. A task is BT tokens."""
    head = tl.arange(0, BH)
    rate = tl.load(rate_ptr + head * RATE_HEAD, mask=head < HEADS, other=0.0).to(tl.float32)
    dt_bias = tl.load(dt_ptr + head * DT_HEAD, mask=head < HEADS, other=0.0).to(tl.float32)
    for task in range(tl.program_id(0), tl.cdiv(tokens, BT), tl.num_programs(0)):
        first = (task * BT).to(tl.int64)
        step = tl.arange(0, BT)
        mask = (step < tokens - task * BT)[:, None] & (head < HEADS)[None, :]
        out = first * HEADS + step[:, None] * HEADS + head[None, :]
        a = tl.load(a_ptr + first * a_token + step[:, None] * a_token + head[None, :] * A_HEAD, mask=mask, other=0.0)
        decay = log_decay(
            a.to(tl.float32), dt_bias[None, :], rate[None, :], softplus_beta, inverse_beta, softplus_threshold
        )
        tl.store(g_ptr + out, decay, mask=mask)
        b = tl.load(b_ptr + first * b_token + step[:, None] * b_token + head[None, :] * B_HEAD, mask=mask, other=0.0)
        tl.store(beta_ptr + out, sigmoid(b.to(tl.float32)), mask=mask)
