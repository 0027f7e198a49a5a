"""Causal convolution: the depthwise convolution in front of GDN and KDA, with a state row per request.

A pool row [L, D] keeps a request's last inputs in one of three layouts:

- linear: the last W - 1 inputs, oldest first, in columns 0..W-2;
- rewind: the same from column 0 on, and behind them the rows of a verify step, so that the next step can start its
  history after any number of accepted rows (vLLM's layout);
- ring: position p of the request in column p mod L. Rejected drafts are overwritten, and nothing has to be moved.

A row reads one layout for life: a slot written in one cannot be continued in another.
"""

from __future__ import annotations

from typing import Final, Literal

import torch
from torch import Tensor

from ._checks import (
    FLOATS,
    INTS,
    require,
    require_choice,
    require_dtype,
    require_flag,
    require_inference,
    require_int,
    require_same_device,
    require_shape,
    require_tensor,
)
from ._registry import Operator
from ._value_checks import require_rows

MAX_WIDTH: Final = 8
_NAME: Final = "causal_conv1d"
_COLUMNS: Final = "causal_conv1d_columns"
_UPDATE: Final = "causal_conv1d_update"

Layout = Literal["linear", "ring"]


def _fake(x: Tensor, *args: object) -> Tensor:
    return x.new_empty(x.shape)


OPERATOR: Final = Operator.define(
    _NAME,
    "(Tensor x, Tensor weight, Tensor? bias, Tensor(a!)? conv_state, Tensor cu_seqlens, Tensor? state_indices,"
    " Tensor? history_lens, str layout, str? activation, int pad_slot_id, int? max_query_len) -> Tensor",
    _fake,
    summary="causal convolution of a packed batch, linear or ring state",
    dtypes=FLOATS,
)
COLUMNS_OPERATOR: Final = Operator.define(
    _COLUMNS,
    "(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) conv_state, Tensor cu_seqlens, Tensor? state_indices,"
    " Tensor? has_history, Tensor read_columns, Tensor write_columns, str? activation, int pad_slot_id) -> Tensor",
    _fake,
    summary="causal convolution of a packed batch, state columns given",
    dtypes=FLOATS,
)
UPDATE_OPERATOR: Final = Operator.define(
    _UPDATE,
    "(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, str? activation, Tensor? conv_state_indices,"
    " Tensor? num_accepted_tokens, Tensor? query_start_loc, int max_query_len, int pad_slot_id,"
    " Tensor? block_idx_last_scheduled_token, Tensor? initial_state_idx, Tensor? cache_seqlens) -> Tensor",
    _fake,
    summary="causal convolution of a decode or verify step, linear, rewind or ring state",
    dtypes=FLOATS,
)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    conv_state: Tensor | None = None,
    *,
    cu_seqlens: Tensor,
    state_indices: Tensor | None = None,
    history_lens: Tensor | None = None,
    layout: Layout = "linear",
    activation: str | None = None,
    pad_slot_id: int = -1,
    max_query_len: int | None = None,
) -> Tensor:
    """Convolve a packed batch of prefill, decode or verify rows and advance their state.

    out[t] = act(bias + sum_i weight[i] · input[t - (W-1) + i] over the row's history and new inputs, as in
    https://github.com/Dao-AILab/causal-conv1d. Products and sums are in fp32, rounded once. No host value is read,
    except under DLINFER_EXT_CHECK=1.

    Args:
        x: [T, D] fp32, bf16 or fp16, the rows' new tokens one after the other, any strides.
        weight: [W, D], W from 1 to 8, the newest tap last, any strides.
        bias: [D].
        conv_state: [S, L, D], L >= W - 1, the pool, any strides and its own dtype; only the addressed columns of the
            addressed slots change. None: no state is read or written.
        cu_seqlens: int32 or int64 [N + 1], from 0. Tokens from cu_seqlens[-1] on are padding: their output is zero.
        state_indices: int32 or int64 [N], slot of each row; None: row i has slot i. A row whose slot is < 0 or
            `pad_slot_id`, and a row without tokens, gives zeros and leaves its slot alone.
        history_lens: int32 or int64 [N], tokens of the request before this step. At 0 the state reads as zero, whatever
            the slot holds. A row < 0 is treated as padding. None: all 0.
        layout: "linear", where a history of 1..W-2 tokens has zeros to its left in the slot; or "ring", where
            positions before the start read zero and a row longer than L stores its last L inputs.
        activation: None, "silu" or "swish".
        pad_slot_id: a further slot number that means padding.
        max_query_len: an upper bound of the row lengths, which saves work in a ring; None: T.

    Returns:
        [T, D], a fresh tensor in x's dtype.

    Raises:
        ValueError: a shape, width, layout, activation or device that does not fit; under DLINFER_EXT_CHECK=1 also a
            slot outside the pool or used twice, a negative history, or offsets that do not fit. Those are otherwise
            the caller's duty.
        TypeError: a dtype that is not supported.
    """
    rows = _check_packed(_NAME, x, weight, bias, cu_seqlens, activation)
    require_choice(_NAME, "layout", layout, ("linear", "ring"), "'linear' or 'ring'")
    require_int(_NAME, "pad_slot_id", pad_slot_id)
    require_int(_NAME, "max_query_len", max_query_len, optional=True)
    _check_ints(_NAME, (rows,), state_indices=state_indices, history_lens=history_lens)
    if conv_state is not None:
        _check_pool(_NAME, conv_state, x, weight.shape[0])
        _check_identity(_NAME, "state_indices", state_indices, rows, conv_state)
    require_same_device(_NAME, "x", x, conv_state=conv_state, state_indices=state_indices, history_lens=history_lens)
    if max_query_len is not None:
        require(max_query_len >= 0, _NAME, "max_query_len", max_query_len, "None or >= 0")
    out: Tensor = torch.ops.dlinfer_ext.causal_conv1d(
        x,
        weight,
        bias,
        conv_state,
        cu_seqlens,
        state_indices,
        history_lens,
        layout,
        activation,
        pad_slot_id,
        max_query_len,
    )
    return out


def causal_conv1d_columns(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    *,
    cu_seqlens: Tensor,
    read_columns: Tensor,
    write_columns: Tensor,
    state_indices: Tensor | None = None,
    has_history: Tensor | None = None,
    activation: str | None = None,
    pad_slot_id: int = -1,
) -> Tensor:
    """Convolve a packed batch whose caller has worked out the columns of a ring.

    Each row reads its history from `read_columns` and stores the last W of history ++ new into `write_columns`; of a
    pool with L = W - 1 columns the oldest of these W is left out.

    Args:
        x: see `causal_conv1d`, as the arguments not listed here.
        weight: [W, D].
        bias: [D] or None.
        conv_state: [S, L, D], mutated.
        cu_seqlens: int32 or int64 [N + 1].
        read_columns: int32 or int64 [N, W - 1], oldest first; a column < 0 reads zero.
        write_columns: int32 or int64 [N, W]; a column < 0 is not written.
        state_indices: int32 or int64 [N] or None.
        has_history: bool or int [N]; false reads zeros. None: no row has a history.
        activation: None, "silu" or "swish".
        pad_slot_id: a further slot number that means padding.

    Returns:
        [T, D], a fresh tensor in x's dtype.

    Raises:
        ValueError: as `causal_conv1d`; under DLINFER_EXT_CHECK=1 also a column >= L.
        TypeError: a dtype that is not supported.
    """
    rows = _check_packed(_COLUMNS, x, weight, bias, cu_seqlens, activation)
    require_int(_COLUMNS, "pad_slot_id", pad_slot_id)
    width = weight.shape[0]
    _check_pool(_COLUMNS, conv_state, x, width)
    _check_identity(_COLUMNS, "state_indices", state_indices, rows, conv_state)
    _check_ints(_COLUMNS, (rows,), state_indices=state_indices)
    require_tensor(_COLUMNS, "read_columns", read_columns)
    require_tensor(_COLUMNS, "write_columns", write_columns)
    _check_ints(_COLUMNS, (rows, width - 1), read_columns=read_columns)
    _check_ints(_COLUMNS, (rows, width), write_columns=write_columns)
    if has_history is not None:
        require_shape(_COLUMNS, "has_history", has_history, (rows,))
        require_dtype(_COLUMNS, "has_history", has_history, (torch.bool, *INTS))
    require_same_device(
        _COLUMNS,
        "x",
        x,
        conv_state=conv_state,
        state_indices=state_indices,
        has_history=has_history,
        read_columns=read_columns,
        write_columns=write_columns,
    )
    out: Tensor = torch.ops.dlinfer_ext.causal_conv1d_columns(
        x,
        weight,
        bias,
        conv_state,
        cu_seqlens,
        state_indices,
        has_history,
        read_columns,
        write_columns,
        activation,
        pad_slot_id,
    )
    return out


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = "silu",
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
    """Advance every row by its tokens of a decode or verify step. No host value is read, except when validating.

    The layout is rewind with `num_accepted_tokens`, ring with `cache_seqlens`, otherwise linear. Every row given is
    convolved; the accepted count tells where the history of the previous step ends and nothing else.

    Args:
        x: [N, D], [N, q, D], or packed [T, D] with `query_start_loc`; fp32, bf16 or fp16, any strides.
        conv_state: [S, L, D], the pool, any strides and its own dtype, mutated. L >= W - 1, and in rewind layout
            L >= W - 1 + (q - 1) for the longest row q.
        weight: [W, D], W from 1 to 8, the newest tap last.
        bias: [D].
        activation: None, "silu" or "swish".
        conv_state_indices: int32 or int64 [N], or a block table [N, blocks]; None: row i has slot i. Rows whose slot is
            < 0 or `pad_slot_id`, and rows without tokens, give zeros and leave their slot alone.
        num_accepted_tokens: int32 or int64 [N], tokens accepted of the previous step, from 1. Less than 1 reads as 1; a
            count that points beyond the slot's columns reads its last W - 1.
        query_start_loc: int32 or int64 [N + 1], from 0; tokens from its last value on give zeros.
        max_query_len: an upper bound of the row lengths with `query_start_loc`; < 0: T.
        pad_slot_id: a further slot number that means padding.
        block_idx_last_scheduled_token: int32 or int64 [N], column of the block table that holds the slot to write.
        initial_state_idx: int32 or int64 [N], column that holds the slot to read. With a block table and neither
            pointer, column 0 is both.
        cache_seqlens: int32 or int64 [N], tokens of the request before this step; positions before its start read zero.
            A row < 0 is treated as padding. A row longer than L stores its last L inputs.
        validate_data: check what only the device knows, as under DLINFER_EXT_CHECK=1.

    Returns:
        A fresh tensor of x's shape and dtype.

    Raises:
        ValueError: a shape, width, activation or device that does not fit, a slot too short for the layout, or two
            layouts at once; when validating also a slot outside the pool or used twice, a negative history, and a count
            or a row that does not fit the slot.
        TypeError: a dtype that is not supported.
    """
    require_tensor(_UPDATE, "x", x)
    require_int(_UPDATE, "max_query_len", max_query_len)
    require_int(_UPDATE, "pad_slot_id", pad_slot_id)
    require_flag(_UPDATE, "validate_data", validate_data)
    packed = query_start_loc is not None
    ranks = (2,) if packed else (2, 3)
    wanted = "[T, D]" if packed else "[N, D] or [N, q, D]"
    require(x.dim() in ranks, _UPDATE, "x", f"of shape {list(x.shape)}", wanted)
    if query_start_loc is None:
        rows, longest = x.shape[0], (x.shape[1] if x.dim() == 3 else 1)
    else:
        require_shape(_UPDATE, "query_start_loc", query_start_loc, ("N + 1",))
        require(len(query_start_loc) > 0, _UPDATE, "query_start_loc", "empty", "[N + 1]")
        rows, longest = query_start_loc.shape[0] - 1, (x.shape[0] if max_query_len < 0 else max_query_len)
    _check_operands(_UPDATE, x, weight, bias, activation)
    width = weight.shape[0]
    _check_pool(_UPDATE, conv_state, x, width)
    both = num_accepted_tokens is not None and cache_seqlens is not None
    require(not both, _UPDATE, "cache_seqlens", "given with num_accepted_tokens", "one of the two layouts")
    if num_accepted_tokens is not None:
        need = width - 1 + max(longest - 1, 0)
        require(
            conv_state.shape[1] >= need,
            _UPDATE,
            "conv_state",
            f"of shape {list(conv_state.shape)}",
            f"[S, L >= {need}, D] to rewind rows of up to {longest} tokens at width {width}",
        )
    pointers = {
        "block_idx_last_scheduled_token": block_idx_last_scheduled_token,
        "initial_state_idx": initial_state_idx,
    }
    if conv_state_indices is not None:
        require_tensor(_UPDATE, "conv_state_indices", conv_state_indices)
        shape = list(conv_state_indices.shape)
        require(len(shape) in (1, 2), _UPDATE, "conv_state_indices", f"of shape {shape}", "[N] or [N, blocks]")
    table = conv_state_indices is not None and conv_state_indices.dim() == 2
    for name, pointer in pointers.items():
        require(pointer is None or table, _UPDATE, name, "given", "None unless conv_state_indices is [N, blocks]")
    require(
        (block_idx_last_scheduled_token is None) == (initial_state_idx is None),
        _UPDATE,
        "initial_state_idx",
        "given or left out alone",
        "both or neither of initial_state_idx and block_idx_last_scheduled_token",
    )
    if not table:
        _check_ints(_UPDATE, (rows,), conv_state_indices=conv_state_indices)
        _check_identity(_UPDATE, "conv_state_indices", conv_state_indices, rows, conv_state)
    elif conv_state_indices is not None:
        require(conv_state_indices.shape[1] > 0, _UPDATE, "conv_state_indices", "without blocks", "[N, blocks >= 1]")
        _check_ints(_UPDATE, (rows, conv_state_indices.shape[1]), conv_state_indices=conv_state_indices)
    _check_ints(_UPDATE, (rows,), num_accepted_tokens=num_accepted_tokens, cache_seqlens=cache_seqlens, **pointers)
    _check_ints(_UPDATE, (rows + 1,), query_start_loc=query_start_loc)
    require_same_device(
        _UPDATE,
        "x",
        x,
        conv_state=conv_state,
        conv_state_indices=conv_state_indices,
        num_accepted_tokens=num_accepted_tokens,
        query_start_loc=query_start_loc,
        cache_seqlens=cache_seqlens,
        **pointers,
    )
    if validate_data:
        arguments = {
            "x": x,
            "conv_state": conv_state,
            "weight": weight,
            "conv_state_indices": conv_state_indices,
            "num_accepted_tokens": num_accepted_tokens,
            "query_start_loc": query_start_loc,
            "max_query_len": max_query_len,
            "pad_slot_id": pad_slot_id,
            "cache_seqlens": cache_seqlens,
            **pointers,
        }
        require_rows(_UPDATE, arguments)
    out: Tensor = torch.ops.dlinfer_ext.causal_conv1d_update(
        x,
        conv_state,
        weight,
        bias,
        activation,
        conv_state_indices,
        num_accepted_tokens,
        query_start_loc,
        max_query_len,
        pad_slot_id,
        block_idx_last_scheduled_token,
        initial_state_idx,
        cache_seqlens,
    )
    return out


def _check_operands(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> None:
    """Check what the forms share; the last dimension of x is D."""
    channels = x.shape[-1]
    require_shape(op, "weight", weight, ("W", channels))
    width = weight.shape[0]
    require(1 <= width <= MAX_WIDTH, op, "weight", f"of width {width}", f"[W, D] with W from 1 to {MAX_WIDTH}")
    if bias is not None:
        require_shape(op, "bias", bias, (channels,))
        require_dtype(op, "bias", bias, FLOATS)
    require_dtype(op, "x", x, FLOATS)
    require_dtype(op, "weight", weight, FLOATS)
    require_choice(op, "activation", activation, (None, "silu", "swish"), "None, 'silu' or 'swish'")
    require_same_device(op, "x", x, weight=weight, bias=bias)
    require_inference(op, x=x, weight=weight, bias=bias)


def _check_packed(
    op: str, x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, activation: str | None
) -> int:
    """Check the operands of a packed batch and return N."""
    require_shape(op, "x", x, ("T", "D"))
    _check_operands(op, x, weight, bias, activation)
    require_shape(op, "cu_seqlens", cu_seqlens, ("N + 1",))
    require_dtype(op, "cu_seqlens", cu_seqlens, INTS)
    require(cu_seqlens.shape[0] > 0, op, "cu_seqlens", "empty", "[N + 1]")
    require_same_device(op, "x", x, cu_seqlens=cu_seqlens)
    return cu_seqlens.shape[0] - 1


def _check_pool(op: str, conv_state: Tensor, x: Tensor, width: int) -> None:
    require_shape(op, "conv_state", conv_state, ("S", "L", x.shape[-1]))
    require_dtype(op, "conv_state", conv_state, FLOATS)
    require_inference(op, conv_state=conv_state)
    shape = list(conv_state.shape)
    require(shape[1] >= width - 1, op, "conv_state", f"of shape {shape}", f"[S, L >= {width - 1}, D] at width {width}")


def _check_identity(op: str, arg: str, state_indices: Tensor | None, rows: int, conv_state: Tensor) -> None:
    slots = conv_state.shape[0]
    enough = state_indices is not None or rows <= slots
    require(enough, op, arg, "None", f"slot numbers, as {rows} rows do not fit {slots} slots one to one")


def _check_ints(op: str, shape: tuple[int, ...], **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None:
            require_shape(op, name, tensor, shape)
            require_dtype(op, name, tensor, INTS)
