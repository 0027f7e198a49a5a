"""The gated delta rule under the names and signatures that LMDeploy's Ascend code and dlinfer users import."""

from __future__ import annotations

import torch
from torch import Tensor

from dlinfer_ext.ops._checks import FLOATS, require, require_dtype, require_flag, require_shape, require_tensor
from dlinfer_ext.ops.gated_delta_rule import (
    gated_delta_rule,
    gated_delta_rule_update,
    sigmoid_gating_delta_rule_update,
)

from .delta import prompts, require_batches, require_lead, steps


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Apply the gated delta rule to prompts, as flash-linear-attention's function of this name does.

    Reads `cu_seqlens` once on the host; `dlinfer_ext.ops.gated_delta_rule` takes the lengths and then reads nothing.

    Args:
        q: [B, T, H, K].
        k: [B, T, H, K].
        v: [B, T, HV, V].
        g: [B, T, HV], log decay.
        beta: [B, T, HV].
        scale: of the output; None means K^-0.5.
        initial_state: [N, HV, K, V], one for each row; None: zeros. Not mutated.
        output_final_state: also return the final states.
        cu_seqlens: int [N + 1] with B = 1; None: B rows of T tokens.
        head_first: the inputs, and o, are [B, heads, T, ...].
        use_qk_l2norm_in_kernel: normalise q and k first.

    Returns:
        (o [B, T, HV, V] in v's dtype, final states [N, HV, K, V] in fp32 or None). A zero-length row keeps its state.

    Raises:
        TypeError: not a tensor, or an unsupported dtype.
        ValueError: shapes that do not fit.
    """
    op = "chunk_gated_delta_rule"
    require_batches(op, q=q, k=k, v=v, g=g, beta=beta)
    require_flag(op, "output_final_state", output_final_state)
    require_flag(op, "head_first", head_first)
    if head_first:
        q, k, v, g, beta = (t.transpose(1, 2) for t in (q, k, v, g, beta))
    o, state = prompts(
        op, gated_delta_rule, q, k, v, g, beta, scale, initial_state, cu_seqlens, use_qk_l2norm_in_kernel, False
    )
    return o.transpose(1, 2) if head_first else o, state if output_final_state else None


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    cache_seqlens_rb: Tensor | None = None,
    state_ids_rb: Tensor | None = None,
    num_state: int = 1,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule token by token; nothing is read from the device.

    The state is the row's own (no indices), a slot (`ssm_state_indices` [N]), a table of slots, one per token (the
    indices [N, W], with `num_accepted_tokens`), or a ring (the `_rb` arguments): the state after n tokens lives in
    entry id · num_state + n mod num_state, and every token stores its own. A negative index marks a PAD row; slot 0 is
    a slot like any other.

    Args:
        q: [B, T, H, K].
        k: [B, T, H, K].
        v: [B, T, HV, V].
        g: [B, T, HV], log decay.
        beta: [B, T, HV]; None: ones.
        scale: of the output; None means K^-0.5.
        initial_state: [*, HV, V, K], or [ids, num_state, HV, V, K] for a ring; None: zeros. Mutated when
            `inplace_final_state`.
        inplace_final_state: store the states in `initial_state`; otherwise the final states come in a new tensor, which
            the table and ring forms, with a state for each token, do not have.
        cu_seqlens: int [N + 1] with B = 1; None: B rows of T tokens.
        ssm_state_indices: int [N] or [N, W].
        num_accepted_tokens: int [N], tokens of the previous step that were accepted; starts from column accepted - 1.
        cache_seqlens_rb: int [N], tokens before this step; at 0 the row starts from a zero state.
        state_ids_rb: int [N].
        num_state: entries of a ring.
        use_qk_l2norm_in_kernel: normalise q and k first.

    Returns:
        (o [B, T, HV, V] in v's dtype, `initial_state` itself or new final states [N, HV, V, K] in fp32).

    Raises:
        TypeError: not a tensor, or an unsupported dtype.
        ValueError: shapes that do not fit, or arguments of two forms at once.
    """
    op = "fused_recurrent_gated_delta_rule"
    require_tensor(op, "g", g)
    return steps(
        op, gated_delta_rule_update, q, k, v, g, torch.ones_like(g) if beta is None else beta, scale, initial_state,
        inplace_final_state, cu_seqlens, ssm_state_indices, num_accepted_tokens, cache_seqlens_rb, state_ids_rb,
        num_state, use_qk_l2norm_in_kernel, True,
    )  # fmt: skip


def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    initial_state_source: Tensor | None,
    initial_state_indices: Tensor | None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Compute the gates and apply the gated delta rule token by token; nothing is read from the device.

    g = -exp(A_log) · softplus(a + dt_bias) and beta = sigmoid(b). The pool is [K, V] here, as in SGLang's and dlinfer's
    function of this name, and holds the state after the row's last token. A ring pool needs the history, which this
    signature does not carry: it is refused, use `fused_recurrent_gated_delta_rule`.

    Args:
        A_log: [HV].
        a: [.., HV] for B · T tokens.
        dt_bias: [HV].
        softplus_beta: of the softplus.
        softplus_threshold: of softplus_beta · x, above which softplus(x) is x.
        q: [B, T, H, K].
        k: [B, T, H, K].
        v: [B, T, HV, V].
        b: [.., HV] for B · T tokens.
        initial_state_source: [S, HV, K, V], any strides, mutated; None: zeros, nothing is kept.
        initial_state_indices: int [N]; negative marks a PAD row. None: row i uses slot i.
        scale: of the output; None means K^-0.5.
        use_qk_l2norm_in_kernel: normalise q and k first.
        cu_seqlens: int [N + 1] with B = 1; None: B rows of T tokens.

    Returns:
        o [B, T, HV, V] in v's dtype.

    Raises:
        TypeError: not a tensor, or an unsupported dtype.
        ValueError: shapes that do not fit.
    """
    op = "fused_sigmoid_gating_delta_rule_update"
    rows, _ = require_lead(op, q, v, cu_seqlens, k=k)
    heads, values, keys = v.shape[2], v.shape[3], q.shape[3]
    for name, t in (("a", a), ("b", b)):
        require_tensor(op, name, t)
        require(
            t.dim() >= 1 and t.shape[-1] == heads and t.numel() == v.shape[0] * v.shape[1] * heads,
            op,
            name,
            f"of shape {list(t.shape)}",
            f"[.., {heads}] for {v.shape[0] * v.shape[1]} tokens",
        )
    if initial_state_source is None:
        require(initial_state_indices is None, op, "initial_state_source", "None", "a pool, as slots are given")
        initial_state_source = torch.zeros(rows, heads, keys, values, dtype=torch.float32, device=q.device)
    require_shape(op, "initial_state_source", initial_state_source, ["S", heads, keys, values])
    require_tensor(op, "A_log", A_log)
    require_dtype(op, "A_log", A_log, FLOATS)
    # Views: a and b may be slices of one projection.
    a, b = a.reshape(v.shape[:3]), b.reshape(v.shape[:3])
    if cu_seqlens is not None:
        q, k, v, a, b = q[0], k[0], v[0], a[0], b[0]
    o = sigmoid_gating_delta_rule_update(
        q,
        k,
        v,
        a,
        b,
        -torch.exp(A_log.float()),
        dt_bias,
        initial_state_source,
        state_indices=initial_state_indices,
        cu_seqlens=cu_seqlens,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        state_v_first=False,
        softplus_beta=softplus_beta,
        softplus_threshold=softplus_threshold,
    )
    return o if cu_seqlens is None else o[None]
