"""Kimi Delta Attention (KDA): prefill in chunks, decode and verify token by token, and its gate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ._checks import (
    FLOATS,
    require,
    require_dtype,
    require_inference,
    require_real,
    require_same_device,
    require_shape,
    require_tensor,
)
from ._delta_checks import require_inputs, require_options, require_prompts, require_update
from ._delta_schemas import RULE_SCHEMA, UPDATE_SCHEMA, fake_rule, fake_update
from ._registry import Operator

_RULE: Final = "kda"
_UPDATE: Final = "kda_update"
_GATE: Final = "kda_gate"
# As in flash-linear-attention: within 16 tokens such gates sum up to no more than fp32 can undo, so kernels may rely on
# it. The PyTorch form would do without.
_LEAST_BOUND: Final = -5.0


def _fake_gate(x: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)


RULE: Final = Operator.define(
    _RULE,
    RULE_SCHEMA,
    fake_rule,
    summary="Kimi Delta Attention over packed prompts, in chunks",
    dtypes=FLOATS,
)
UPDATE: Final = Operator.define(
    _UPDATE,
    UPDATE_SCHEMA,
    fake_update,
    summary="Kimi Delta Attention of a decode or verify step",
    dtypes=FLOATS,
)
GATE: Final = Operator.define(
    _GATE,
    "(Tensor x, Tensor A_log, Tensor dt_bias, float? lower_bound) -> Tensor",
    _fake_gate,
    summary="log decay of Kimi Delta Attention, of each key channel",
    dtypes=FLOATS,
)


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    cu_seqlens: Tensor,
    state_indices: Tensor | None = None,
    history_lens: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    state_v_first: bool = True,
    pad_slot_id: int = -1,
    host_lengths: Sequence[int] | None = None,
) -> Tensor:
    """Apply Kimi Delta Attention to a packed batch of prompts and leave each row's final state in the pool.

    Per value head, with the state S as [K, V]: S <- diag(exp(g_t)) S; u = beta_t (v_t - S^T k_t); S <- S + k_t u^T;
    o_t = scale · S^T q_t. It is `dlinfer_ext.ops.gated_delta_rule.gated_delta_rule` with a decay for each key channel;
    rows, slots, histories, PAD rows and the caller's duties are those of that function. A row whose history is 0 starts
    from a zero state: do not ask for that with a large negative gate, which a NaN in the slot would pass.

    Maths: https://arxiv.org/abs/2510.26692 (Kimi Linear), https://arxiv.org/abs/2406.06484 (the chunked form).

    Args:
        q: [T, H, K] fp32, bf16 or fp16; this and the other inputs may be views with any strides.
        k: as q.
        v: [T, HV, V], q's dtype; HV is a multiple of H, and value head i uses query/key head i // (HV / H).
        g: [T, HV, K], log decay (at most 0; -inf is a full reset), any float dtype; see `kda_gate`.
        beta: [T, HV], write strength, any float dtype.
        state: [S, HV, V, K] (state_v_first) or [S, HV, K, V], or a ring [S, R, HV, ...] in which the state after n
            tokens lives in entry n mod R; fp32 (the norm), bf16 or fp16, any strides. Mutated: a ring only in the entry
            (history + length) mod R.
        cu_seqlens: int [N + 1], cumulative row lengths that start at 0.
        state_indices: int [N], the slot of each row; None means row i uses slot i.
        history_lens: int [N], tokens before this call; at 0 the row starts from a zero state whatever its slot holds.
            None (plain pools only) means that every row goes on from the state stored.
        scale: of the output; None means K^-0.5.
        use_qk_l2norm: divide q and k by sqrt(sum of squares + 1e-6) first.
        state_v_first: the orientation of the pool.
        pad_slot_id: a slot number that also marks a PAD row.
        host_lengths: the row lengths as Python ints. With them nothing is read from the device; without them
            `cu_seqlens` is read once.

    Returns:
        o [T, HV, V], a fresh tensor of v's dtype.

    Raises:
        TypeError: not a tensor, or an unsupported dtype.
        ValueError: shapes, devices or lengths that do not fit, or an input that requires a gradient.
    """
    require_options(_RULE, scale, use_qk_l2norm, state_v_first, pad_slot_id)
    require_inputs(_RULE, ["T"], q, k, v, {"g": g}, beta=beta)
    lengths = require_prompts(_RULE, q, v, state, cu_seqlens, state_indices, history_lens, state_v_first, host_lengths)
    return torch.ops.dlinfer_ext.kda(  # type: ignore[no-any-return]
        q, k, v, g, beta, state, cu_seqlens, state_indices, history_lens,
        q.shape[-1] ** -0.5 if scale is None else scale, use_qk_l2norm, state_v_first, pad_slot_id, lengths,
    )  # fmt: skip


def kda_update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    state_indices: Tensor | None = None,
    history_lens: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    state_v_first: bool = True,
    pad_slot_id: int = -1,
) -> Tensor:
    """Apply Kimi Delta Attention to a decode or verify step, token by token. Nothing is read from the device.

    The recurrence is that of `kda`. Where states are read and written (a slot, a ring, a table of slots) is that of
    `dlinfer_ext.ops.gated_delta_rule.gated_delta_rule_update`, and so are PAD rows and the caller's duties.

    Args:
        q: [N, Q, H, K], or packed [T, H, K] with `cu_seqlens`; fp32, bf16 or fp16, any strides.
        k: as q.
        v: [N, Q, HV, V] or [T, HV, V], q's dtype.
        g: [N, Q, HV, K] or [T, HV, K], log decay, any float dtype.
        beta: [N, Q, HV] or [T, HV], write strength, any float dtype.
        state: as in `kda`. Mutated.
        state_indices: int [N] or [N, W]; None means row i uses slot i.
        history_lens: int [N], tokens before this step; at 0 the row starts from a zero state. Needed for a ring; None
            means that every row goes on from the state stored.
        num_accepted_tokens: int [N], tokens of the previous step that were accepted; only with a table. None means 1.
        cu_seqlens: int [N + 1], for rows of different lengths; a row may hold at most R (ring) or W (table) tokens.
        scale: of the output; None means K^-0.5.
        use_qk_l2norm: divide q and k by sqrt(sum of squares + 1e-6) first.
        state_v_first: the orientation of the pool.
        pad_slot_id: a slot number that also marks a PAD row.

    Returns:
        o of v's shape, a fresh tensor of v's dtype.

    Raises:
        TypeError: not a tensor, or an unsupported dtype.
        ValueError: shapes or devices that do not fit, more tokens per row than a ring or table can hold, or an input
            that requires a gradient.
    """
    require_options(_UPDATE, scale, use_qk_l2norm, state_v_first, pad_slot_id)
    require_update(
        _UPDATE, q, k, v, state, state_indices, history_lens, num_accepted_tokens, cu_seqlens, state_v_first,
        {"g": g}, beta=beta,
    )  # fmt: skip
    return torch.ops.dlinfer_ext.kda_update(  # type: ignore[no-any-return]
        q, k, v, g, beta, state, state_indices, history_lens, num_accepted_tokens, cu_seqlens,
        q.shape[-1] ** -0.5 if scale is None else scale, use_qk_l2norm, state_v_first, pad_slot_id,
    )  # fmt: skip


def kda_gate(x: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None = None) -> Tensor:
    """Return the log decay of Kimi Delta Attention from its projection x.

    With z = x + dt_bias, without a bound g = -exp(A_log) · softplus(z) (Kimi Linear); softplus is z itself above 20 and
    does not underflow. With a bound g = lower_bound · sigmoid(exp(A_log) · z) (GLM-5.3-Flash): the bound scales a
    sigmoid and does not clamp the other form.

    Maths: https://arxiv.org/abs/2510.26692.

    Args:
        x: [.., HV, K] fp32, bf16 or fp16, any strides.
        A_log: [HV], any float dtype.
        dt_bias: [HV, K], or [HV · K] as checkpoints hold it, any float dtype.
        lower_bound: in [-5, 0), or None.

    Returns:
        g, a fresh fp32 tensor of x's shape.

    Raises:
        TypeError: not a tensor, or an unsupported dtype.
        ValueError: shapes or devices that do not fit, a bound outside [-5, 0), or an input that requires a gradient.
    """
    require_tensor(_GATE, "x", x)
    require_dtype(_GATE, "x", x, FLOATS)
    require(x.dim() >= 2, _GATE, "x", f"of shape {list(x.shape)}", "[.., HV, K]")
    heads, keys = x.shape[-2:]
    require_shape(_GATE, "A_log", A_log, [heads])
    require_tensor(_GATE, "dt_bias", dt_bias)
    require_shape(_GATE, "dt_bias", dt_bias, [heads * keys] if dt_bias.dim() == 1 else [heads, keys])
    for name, t in (("A_log", A_log), ("dt_bias", dt_bias)):
        require_dtype(_GATE, name, t, FLOATS)
    require_real(_GATE, "lower_bound", lower_bound, optional=True)
    require(
        lower_bound is None or _LEAST_BOUND <= lower_bound < 0,
        _GATE,
        "lower_bound",
        lower_bound,
        f"None, or a number in [{_LEAST_BOUND:g}, 0)",
    )
    require_same_device(_GATE, "x", x, A_log=A_log, dt_bias=dt_bias)
    require_inference(_GATE, x=x, A_log=A_log, dt_bias=dt_bias)
    return torch.ops.dlinfer_ext.kda_gate(  # type: ignore[no-any-return]
        x, A_log, dt_bias.unflatten(0, (heads, keys)) if dt_bias.dim() == 1 else dt_bias, lower_bound
    )
