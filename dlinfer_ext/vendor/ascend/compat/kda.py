"""Kimi Delta Attention under the names and signatures that users of flash-linear-attention import."""

from __future__ import annotations

import torch
from torch import Tensor

from dlinfer_ext.ops._checks import require, require_flag, require_tensor
from dlinfer_ext.ops.kda import kda, kda_update
from dlinfer_ext.ops.kda import kda_gate as kda_gate

from .delta import prompts, steps


def _gate(
    op: str, x: Tensor, in_kernel: bool, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> Tensor:
    """Return the log decay: x itself, or computed from it by the parameters."""
    require_tensor(op, "g", x)
    require_flag(op, "use_gate_in_kernel", in_kernel)
    if not in_kernel:
        for name, value in (("A_log", A_log), ("dt_bias", dt_bias), ("lower_bound", lower_bound)):
            require(value is None, op, name, "given without use_gate_in_kernel", "None: g is the log decay itself")
        return x
    require_tensor(op, "A_log", A_log)
    assert A_log is not None
    if dt_bias is None:
        dt_bias = torch.zeros(x.shape[-2:], device=x.device)
    # Checkpoints hold it as [1, 1, HV, 1] too.
    return kda_gate(x, A_log.flatten(), dt_bias, lower_bound)


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Apply Kimi Delta Attention to prompts, as flash-linear-attention's function of this name does.

    Reads `cu_seqlens` once on the host; `dlinfer_ext.ops.kda` takes the lengths and then reads nothing.

    Args:
        q: [B, T, H, K].
        k: [B, T, H, K].
        v: [B, T, HV, V].
        g: [B, T, HV, K], log decay; with `use_gate_in_kernel` what `dlinfer_ext.ops.kda_gate` takes.
        beta: [B, T, HV].
        scale: of the output; None means K^-0.5.
        initial_state: [N, HV, K, V], or [N, HV, V, K] (state_v_first), one for each row; None: zeros. Not mutated.
        output_final_state: also return the final states.
        use_qk_l2norm_in_kernel: normalise q and k first.
        use_gate_in_kernel: compute the log decay from g and the next three.
        A_log: HV numbers.
        dt_bias: [HV, K] or [HV · K]; None: zeros.
        lower_bound: in [-5, 0), or None for the softplus.
        cu_seqlens: int [N + 1] with B = 1; None: B rows of T tokens.
        state_v_first: the orientation of the states.

    Returns:
        (o [B, T, HV, V] in v's dtype, final states as `initial_state` in fp32 or None). A zero-length row keeps its
        state.

    Raises:
        TypeError: not a tensor, or an unsupported dtype.
        ValueError: shapes that do not fit.
    """
    op = "chunk_kda"
    require_flag(op, "output_final_state", output_final_state)
    require_flag(op, "state_v_first", state_v_first)
    g = _gate(op, g, use_gate_in_kernel, A_log, dt_bias, lower_bound)
    o, state = prompts(
        op, kda, q, k, v, g, beta, scale, initial_state, cu_seqlens, use_qk_l2norm_in_kernel, state_v_first
    )
    return o, state if output_final_state else None


def fused_recurrent_kda(
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
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    state_v_first: bool = True,
) -> tuple[Tensor, Tensor]:
    """Apply Kimi Delta Attention token by token; nothing is read from the device.

    Pools, indices, rings and accepted counts are those of `fused_recurrent_gated_delta_rule`.

    Args:
        q: [B, T, H, K].
        k: [B, T, H, K].
        v: [B, T, HV, V].
        g: [B, T, HV, K], log decay; with `use_gate_in_kernel` what `dlinfer_ext.ops.kda_gate` takes.
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
        use_gate_in_kernel: compute the log decay from g and the next three.
        A_log: HV numbers.
        dt_bias: [HV, K] or [HV · K]; None: zeros.
        lower_bound: in [-5, 0), or None for the softplus.
        state_v_first: the orientation; False: [.., HV, K, V].

    Returns:
        (o [B, T, HV, V] in v's dtype, `initial_state` itself or new final states in fp32).

    Raises:
        TypeError: not a tensor, or an unsupported dtype.
        ValueError: shapes that do not fit, or arguments of two forms at once.
    """
    op = "fused_recurrent_kda"
    g = _gate(op, g, use_gate_in_kernel, A_log, dt_bias, lower_bound)
    return steps(
        op, kda_update, q, k, v, g, torch.ones_like(g[..., 0]) if beta is None else beta, scale, initial_state,
        inplace_final_state, cu_seqlens, ssm_state_indices, num_accepted_tokens, cache_seqlens_rb, state_ids_rb,
        num_state, use_qk_l2norm_in_kernel, state_v_first,
    )  # fmt: skip
