"""Device functions of the gates of delta rules, on fp32 scalars or tiles."""

import triton
import triton.language as tl


@triton.jit
def log1p_of_exp(x):
    """log(1 + exp(x)) as max(x, 0) + log1p(exp(-|x|)), with a relative error of a few roundings for any x.

    log1p(e) = 2 atanh(e / (2 + e)); the argument is at most 1/3, where eight terms of the series are enough for fp32.
    So neither the sum 1 + e nor the error of a device's log spoils a tiny e.
    """
    e = tl.exp(tl.where(x > 0.0, -x, x))
    z = e / (2.0 + e)
    y = z * z
    series = 1.0 / 13.0 + y * (1.0 / 15.0)
    series = 1.0 / 11.0 + y * series
    series = 1.0 / 9.0 + y * series
    series = 1.0 / 7.0 + y * series
    series = 1.0 / 5.0 + y * series
    series = 1.0 / 3.0 + y * series
    return tl.where(x > 0.0, x, 0.0) + 2.0 * (z + z * (y * series))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) without overflow; its smallest values are exact."""
    e = tl.exp(tl.where(x > 0.0, -x, x))
    return tl.where(x > 0.0, 1.0, e) / (1.0 + e)


@triton.jit
def log_decay(a, dt_bias, neg_exp_A, softplus_beta, inverse_beta, softplus_threshold):
    """neg_exp_A · softplus(a + dt_bias)."""
    x = a + dt_bias
    bx = x * softplus_beta
    return neg_exp_A * tl.where(bx > softplus_threshold, x, log1p_of_exp(bx) * inverse_beta)
