"""Gated delta rule (Gated DeltaNet): prefill in chunks, decode and verify token by token, and its gates."""

from __future__ import annotations

import math
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

_RULE: Final = "gated_delta_rule"
_UPDATE: Final = "gated_delta_rule_update"
_GATE: Final = "gated_delta_gate"
_GATING_UPDATE: Final = "sigmoid_gating_delta_rule_update"


def _fake_gate(
    a: Tensor,
    b: Tensor,
    neg_exp_A: Tensor,
    dt_bias: Tensor,
    softplus_beta: float,
    softplus_threshold: float,
) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape, dtype=torch.float32), b.new_empty(b.shape, dtype=torch.float32)


def _fake_gating_update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    neg_exp_A: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    state_indices: Tensor | None,
    history_lens: Tensor | None,
    num_accepted_tokens: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    use_qk_l2norm: bool,
    state_v_first: bool,
    pad_slot_id: int,
    softplus_beta: float,
    softplus_threshold: float,
) -> Tensor:
    return v.new_empty(v.shape)


RULE: Final = Operator.define(
    _RULE,
    RULE_SCHEMA,
    fake_rule,
    summary="gated delta rule over packed prompts, in chunks",
    dtypes=FLOATS,
)
UPDATE: Final = Operator.define(
    _UPDATE,
    UPDATE_SCHEMA,
    fake_update,
    summary="gated delta rule of a decode or verify step",
    dtypes=FLOATS,
)
GATE: Final = Operator.define(
    _GATE,
    "(Tensor a, Tensor b, Tensor neg_exp_A, Tensor dt_bias, float softplus_beta, float softplus_threshold)"
    " -> (Tensor, Tensor)",
    _fake_gate,
    summary="log decay and write strength of the gated delta rule",
    dtypes=FLOATS,
)
GATING_UPDATE: Final = Operator.define(
    _GATING_UPDATE,
    "(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor neg_exp_A, Tensor dt_bias, Tensor(a!) state,"
    " Tensor? state_indices, Tensor? history_lens, Tensor? num_accepted_tokens, Tensor? cu_seqlens, float scale,"
    " bool use_qk_l2norm, bool state_v_first, int pad_slot_id, float softplus_beta, float softplus_threshold)"
    " -> Tensor",
    _fake_gating_update,
    summary="gates and gated delta rule of a decode or verify step, in one",
    dtypes=FLOATS,
)


def _require_gating(
    op: str, a: Tensor, neg_exp_A: Tensor, dt_bias: Tensor, softplus_beta: float, softplus_threshold: float
) -> None:
    """Check what the gates take besides a and b, against a [.., HV]."""
    for name, t in (("neg_exp_A", neg_exp_A), ("dt_bias", dt_bias)):
        require_shape(op, name, t, [a.shape[-1]])
        require_dtype(op, name, t, FLOATS)
    require_same_device(op, "a", a, neg_exp_A=neg_exp_A, dt_bias=dt_bias)
    require_inference(op, neg_exp_A=neg_exp_A, dt_bias=dt_bias)
    require_real(op, "softplus_beta", softplus_beta)
    require_real(op, "softplus_threshold", softplus_threshold)
    finite = softplus_beta != 0 and math.isfinite(softplus_beta)
    require(finite, op, "softplus_beta", softplus_beta, "a finite number other than 0")
    require(not math.isnan(softplus_threshold), op, "softplus_threshold", softplus_threshold, "a number")


def gated_delta_rule(
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
    """Apply the gated delta rule to a packed batch of prompts and leave each row's final state in the pool.

    Per value head, with the state S as [K, V]: S <- exp(g_t) S; u = beta_t (v_t - S^T k_t); S <- S + k_t u^T;
    o_t = scale · S^T q_t. Value head i uses query/key head i // (HV / H). Arithmetic is fp32, rounded once at a store.

    PAD rows (a negative slot, `pad_slot_id`, or a negative history) and zero-length rows touch no state and give zeros,
    and so do tokens past cu_seqlens[-1]. Two rows must not share a slot, and slots must lie in the pool: the caller's
    duty, checked under DLINFER_EXT_CHECK=1.

    Maths: https://arxiv.org/abs/2412.06464 (Gated Delta Networks), https://arxiv.org/abs/2406.06484 (the chunked form).

    Args:
        q: [T, H, K] fp32, bf16 or fp16; this and the other inputs may be views with any strides.
        k: as q.
        v: [T, HV, V], q's dtype.
        g: [T, HV], log decay (at most 0; -inf is a full reset), any float dtype.
        beta: [T, HV], write strength, any float dtype.
        state: [S, HV, V, K] (state_v_first) or [S, HV, K, V], or a ring [S, R, HV, ...] in which the state after n
            tokens lives in entry n mod R; fp32, bf16 or fp16, any strides. Mutated: a ring only in the entry
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
    require_inputs(_RULE, ["T"], q, k, v, g=g, beta=beta)
    lengths = require_prompts(_RULE, q, v, state, cu_seqlens, state_indices, history_lens, state_v_first, host_lengths)
    return torch.ops.dlinfer_ext.gated_delta_rule(  # type: ignore[no-any-return]
        q, k, v, g, beta, state, cu_seqlens, state_indices, history_lens,
        q.shape[-1] ** -0.5 if scale is None else scale, use_qk_l2norm, state_v_first, pad_slot_id, lengths,
    )  # fmt: skip


def gated_delta_rule_update(
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
    """Apply the gated delta rule to a decode or verify step, token by token. Nothing is read from the device.

    The recurrence, PAD rows and the caller's duties are those of `gated_delta_rule`. Where states are read and written:

    - plain pool, state_indices [N]: from the slot, and back to it after the row's last token;
    - ring pool: from entry history mod R, and after token t to entry (history + t + 1) mod R, so that the next step may
      go on from any accepted token by its history alone;
    - plain pool, state_indices [N, W]: from the slot in column accepted - 1, and after token t to the slot in column t
      (vLLM's table). Columns past the row's tokens are not touched. A row with a PAD id in a column that it needs is a
      PAD row. An accepted count below 1 counts as 1, one above W as W.

    Args:
        q: [N, Q, H, K], or packed [T, H, K] with `cu_seqlens`; fp32, bf16 or fp16, any strides.
        k: as q.
        v: [N, Q, HV, V] or [T, HV, V], q's dtype.
        g: [N, Q, HV] or [T, HV], log decay, any float dtype.
        beta: as g, write strength.
        state: as in `gated_delta_rule`. Mutated.
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
        g=g, beta=beta,
    )  # fmt: skip
    return torch.ops.dlinfer_ext.gated_delta_rule_update(  # type: ignore[no-any-return]
        q, k, v, g, beta, state, state_indices, history_lens, num_accepted_tokens, cu_seqlens,
        q.shape[-1] ** -0.5 if scale is None else scale, use_qk_l2norm, state_v_first, pad_slot_id,
    )  # fmt: skip


def gated_delta_gate(
    a: Tensor,
    b: Tensor,
    neg_exp_A: Tensor,
    dt_bias: Tensor,
    *,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
) -> tuple[Tensor, Tensor]:
    """Return the gates of the gated delta rule: g = neg_exp_A · softplus(a + dt_bias) and beta = sigmoid(b).

    softplus(x) = log(1 + exp(softplus_beta · x)) / softplus_beta without underflow, x itself above the threshold.
    Maths: https://arxiv.org/abs/2412.06464.

    Args:
        a: [.., HV] fp32, bf16 or fp16, any strides.
        b: as a.
        neg_exp_A: [HV], -exp(A_log), any float dtype.
        dt_bias: [HV], any float dtype.
        softplus_beta: finite, not 0.
        softplus_threshold: of softplus_beta · x.

    Returns:
        (g, beta), each a fresh fp32 tensor of a's shape.

    Raises:
        TypeError: not a tensor, or an unsupported dtype.
        ValueError: shapes or devices that do not fit, a softplus that is none, or an input that requires a gradient.
    """
    require_tensor(_GATE, "a", a)
    require_dtype(_GATE, "a", a, FLOATS)
    require(a.dim() >= 1, _GATE, "a", f"of shape {list(a.shape)}", "[.., HV]")
    require_shape(_GATE, "b", b, a.shape)
    require_dtype(_GATE, "b", b, FLOATS)
    require_same_device(_GATE, "a", a, b=b)
    require_inference(_GATE, a=a, b=b)
    _require_gating(_GATE, a, neg_exp_A, dt_bias, softplus_beta, softplus_threshold)
    return torch.ops.dlinfer_ext.gated_delta_gate(  # type: ignore[no-any-return]
        a, b, neg_exp_A, dt_bias, softplus_beta, softplus_threshold
    )


def sigmoid_gating_delta_rule_update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    neg_exp_A: Tensor,
    dt_bias: Tensor,
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
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
) -> Tensor:
    """Compute the gates and apply the gated delta rule to a decode or verify step, in one launch where a kernel serves.

    It is `gated_delta_gate` followed by `gated_delta_rule_update`, and the states, the forms of a step, PAD rows and
    the caller's duties are those of the latter. Nothing is read from the device.

    Maths: https://arxiv.org/abs/2412.06464.

    Args:
        q: [N, Q, H, K], or packed [T, H, K] with `cu_seqlens`; fp32, bf16 or fp16, any strides.
        k: as q.
        v: [N, Q, HV, V] or [T, HV, V], q's dtype.
        a: [N, Q, HV] or [T, HV], any float dtype, any strides.
        b: as a.
        neg_exp_A: [HV], -exp(A_log), any float dtype.
        dt_bias: [HV], any float dtype.
        state: as in `gated_delta_rule`. Mutated.
        state_indices: int [N] or [N, W]; None means row i uses slot i.
        history_lens: int [N], tokens before this step; at 0 the row starts from a zero state. Needed for a ring; None
            means that every row goes on from the state stored.
        num_accepted_tokens: int [N], tokens of the previous step that were accepted; only with a table. None means 1.
        cu_seqlens: int [N + 1], for rows of different lengths; a row may hold at most R (ring) or W (table) tokens.
        scale: of the output; None means K^-0.5.
        use_qk_l2norm: divide q and k by sqrt(sum of squares + 1e-6) first.
        state_v_first: the orientation of the pool.
        pad_slot_id: a slot number that also marks a PAD row.
        softplus_beta: finite, not 0.
        softplus_threshold: of softplus_beta · x.

    Returns:
        o of v's shape, a fresh tensor of v's dtype.

    Raises:
        TypeError: not a tensor, or an unsupported dtype.
        ValueError: shapes or devices that do not fit, more tokens per row than a ring or table can hold,
            a softplus that is none, or an input that requires a gradient.
    """
    require_options(_GATING_UPDATE, scale, use_qk_l2norm, state_v_first, pad_slot_id)
    require_update(
        _GATING_UPDATE, q, k, v, state, state_indices, history_lens, num_accepted_tokens, cu_seqlens, state_v_first,
        a=a, b=b,
    )  # fmt: skip
    _require_gating(_GATING_UPDATE, a, neg_exp_A, dt_bias, softplus_beta, softplus_threshold)
    return torch.ops.dlinfer_ext.sigmoid_gating_delta_rule_update(  # type: ignore[no-any-return]
        q, k, v, a, b, neg_exp_A, dt_bias, state, state_indices, history_lens, num_accepted_tokens, cu_seqlens,
        q.shape[-1] ** -0.5 if scale is None else scale, use_qk_l2norm, state_v_first, pad_slot_id, softplus_beta,
        softplus_threshold,
    )  # fmt: skip
