"""The causal convolution under the names and signatures that LMDeploy's Ascend code and dlinfer users import."""

from __future__ import annotations

import torch
from torch import Tensor

from dlinfer_ext.ops._checks import (
    FLOATS,
    INTS,
    require,
    require_dtype,
    require_flag,
    require_same_device,
    require_shape,
    require_tensor,
)
from dlinfer_ext.ops.causal_conv1d import causal_conv1d, causal_conv1d_columns, causal_conv1d_update


def _activation(activation: str | bool | None) -> str | None:
    """Translate the booleans that dlinfer's update takes: True is SiLU, False is none."""
    if isinstance(activation, bool):
        return "silu" if activation else None
    return activation


def causal_conv1d_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = "silu",
) -> Tensor | tuple[Tensor, Tensor]:
    """Convolve B sequences of one length, channels first, as the reference of Dao-AILab/causal-conv1d does.

    Args:
        x: [B, D, T].
        weight: [D, W].
        bias: [D].
        initial_states: [B, D, W - 1]; None: zeros. Not mutated.
        return_final_states: also return the last W - 1 inputs.
        final_states_out: [B, D, W - 1], filled and returned as the final states.
        activation: None, "silu" or "swish".

    Returns:
        [B, D, T] in x's dtype, or that and the final states [B, D, W - 1] in x's dtype.

    Raises:
        ValueError: what does not fit.
        TypeError: not a tensor, or a dtype that is not supported.
    """
    op = "causal_conv1d_ref"
    require_shape(op, "x", x, ("B", "D", "T"))
    batch, channels, tokens = x.shape
    require_shape(op, "weight", weight, (channels, "W"))
    before = weight.shape[1] - 1
    require_flag(op, "return_final_states", return_final_states)
    if final_states_out is not None:
        require_shape(op, "final_states_out", final_states_out, (batch, channels, before))
        require_dtype(op, "final_states_out", final_states_out, FLOATS)
        require_same_device(op, "x", x, final_states_out=final_states_out)
    if initial_states is None:
        state = x.new_zeros(batch, before, channels)
    else:
        require_shape(op, "initial_states", initial_states, (batch, channels, before))
        require_dtype(op, "initial_states", initial_states, FLOATS)
        dtype = torch.promote_types(x.dtype, initial_states.dtype)
        state = initial_states.transpose(1, 2).to(dtype, copy=True)
    out = causal_conv1d(
        x.transpose(1, 2).reshape(batch * tokens, channels),
        weight.t(),
        bias,
        state,
        cu_seqlens=torch.arange(batch + 1, device=x.device) * tokens,
        history_lens=torch.ones(batch, dtype=torch.int64, device=x.device),
        activation=activation,
        max_query_len=tokens,
    )
    out = out.view(batch, tokens, channels).transpose(1, 2)
    if not return_final_states:
        return out
    final = state.transpose(1, 2).to(x.dtype)
    return out, final if final_states_out is None else final_states_out.copy_(final)


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    conv_states: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    cache_indices: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    metadata: object | None = None,
    pad_slot_id: int = -1,
    read_conv_offsets: Tensor | None = None,
    write_conv_offsets: Tensor | None = None,
) -> Tensor:
    """Convolve a packed prefill, channels first, and advance the state of its rows.

    Without offsets the state is linear (columns 0..W-2). With them it is a ring whose columns the caller gives: a row
    reads its history from `read_conv_offsets` and stores the last W of history ++ new at `write_conv_offsets`.

    Args:
        x: [D, T], any strides; a transposed [T, D] is read without a copy.
        weight: [D, W].
        bias: [D].
        activation: None, "silu" or "swish".
        conv_states: [S, D, L], any strides, mutated; a transposed position-major pool is the fast one. None: no state.
        has_initial_state: bool [N], rows that continue; None: none does.
        cache_indices: int [N], slots; None: row i has slot i. Rows with a slot < 0 or `pad_slot_id` give zero columns.
        query_start_loc: int [N + 1]; None: one row of T tokens.
        metadata: None or any object. If its `cache_seqlens` [N] (tokens before this step) is not None, positions before
            a request's start read zero in a ring, even in a dirty slot. Nothing else is read of it.
        pad_slot_id: a further slot number that means padding.
        read_conv_offsets: int [N, W - 1], oldest first; < 0 reads zero.
        write_conv_offsets: int [N, W]; < 0 is not written.

    Returns:
        [D, T] in x's dtype, a fresh tensor (its transpose is contiguous).

    Raises:
        ValueError: what does not fit, see `dlinfer_ext.ops.causal_conv1d`; one kind of offsets without the other, or
            offsets without a pool.
        TypeError: a dtype that is not supported.
    """
    op = "causal_conv1d_fn"
    require_shape(op, "x", x, ("D", "T"))
    require_shape(op, "weight", weight, (x.shape[0], "W"))
    if conv_states is not None:
        require_shape(op, "conv_states", conv_states, ("S", x.shape[0], "L"))
        conv_states = conv_states.transpose(1, 2)
    if has_initial_state is not None:
        require_tensor(op, "has_initial_state", has_initial_state)
        require_dtype(op, "has_initial_state", has_initial_state, (torch.bool, *INTS))
    if query_start_loc is None:
        query_start_loc = torch.arange(2, device=x.device) * x.shape[1]
    if read_conv_offsets is None or write_conv_offsets is None:
        alone = "read_conv_offsets" if write_conv_offsets is None else "write_conv_offsets"
        neither = read_conv_offsets is None and write_conv_offsets is None
        require(neither, op, alone, "given alone", "both offsets (ring) or neither (linear)")
        out = causal_conv1d(
            x.t(),
            weight.t(),
            bias,
            conv_states,
            cu_seqlens=query_start_loc,
            state_indices=cache_indices,
            history_lens=None if has_initial_state is None else has_initial_state.to(torch.int32),
            activation=activation,
            pad_slot_id=pad_slot_id,
        )
        return out.t()
    require(conv_states is not None, op, "conv_states", "None", "a pool, as ring offsets are given")
    assert conv_states is not None
    history = getattr(metadata, "cache_seqlens", None)
    if history is not None:
        require_shape(op, "read_conv_offsets", read_conv_offsets, ("N", "W - 1"))
        require_shape(op, "metadata.cache_seqlens", history, read_conv_offsets.shape[:1])
        require_dtype(op, "metadata.cache_seqlens", history, INTS)
        require_same_device(op, "x", x, **{"metadata.cache_seqlens": history, "read_conv_offsets": read_conv_offsets})
        before = torch.arange(-read_conv_offsets.shape[-1], 0, device=x.device)
        read_conv_offsets = torch.where(history[:, None] + before >= 0, read_conv_offsets, -1)
    out = causal_conv1d_columns(
        x.t(),
        weight.t(),
        bias,
        conv_states,
        cu_seqlens=query_start_loc,
        read_columns=read_conv_offsets,
        write_columns=write_conv_offsets,
        state_indices=cache_indices,
        has_history=has_initial_state,
        activation=activation,
        pad_slot_id=pad_slot_id,
    )
    return out.t()


def causal_conv1d_update_npu(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | bool | None = "silu",
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int = -1,
    pad_slot_id: int = -1,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    validate_data: bool = False,
) -> Tensor:
    """Advance every row by its tokens; see `dlinfer_ext.ops.causal_conv1d.causal_conv1d_update`.

    Unlike dlinfer's, it leaves x as it is and returns a fresh tensor. `activation` may also be True (SiLU) or False.
    """
    return causal_conv1d_update(
        x,
        conv_state,
        weight,
        bias,
        _activation(activation),
        conv_state_indices,
        num_accepted_tokens,
        query_start_loc,
        max_query_len,
        pad_slot_id,
        block_idx_last_scheduled_token,
        initial_state_idx,
        cache_seqlens,
        validate_data,
    )
