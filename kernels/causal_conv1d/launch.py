"""Launchers of the convolution kernel. Nothing is read from the device; only small index tables are ever copied."""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ..common.tiling import SoC, cdiv, core_grid, fit_block
from .kernel import causal_conv1d_kernel

_LINEAR, _RING, _REWIND, _COLUMNS = range(4)
_LAYOUTS: Final = {"linear": _LINEAR, "ring": _RING}
_ROW_NUMBER, _INDEX, _FIRST_BLOCK, _BLOCK_POINTERS = range(4)
_TAP_MAJOR, _INTERLEAVED, _STRIDED = range(3)

# Blocks of channels to choose from; few, as each is a build.
_BLOCKS: Final = (256, 512, 1024)
# What a load or store costs beside its elements, in elements: a guess, as it was never measured on a card.
_FIXED: Final = 512
# How much of the traffic that cannot be avoided may come on top because runs load taps and history again.
_EXTRA: Final = 0.06
# Of the unified buffer; the rest is left to what the compiler adds.
_SHARE: Final = 0.9
# Bytes of the unified buffer for one channel and tap: the tap and the history in fp32, as they are stored, and as they
# pass from one token to the next. Where something is not contiguous along the channels, each element takes 32 bytes,
# several times.
_TAP_BYTES: Final = 32
_SCATTERED_BYTES: Final = 352


class _Slots(NamedTuple):
    """Where the slots of the rows are.

    Attributes:
        kind: one of the numbers above.
        table: int [N] or [N, blocks], or None.
        initial: int [N], the block to read, or None.
        final: int [N], the block to write, or None.
        blocks: columns of a block table.
    """

    kind: int
    table: Tensor | None
    initial: Tensor | None = None
    final: Tensor | None = None
    blocks: int = 1

    @classmethod
    def of(cls, table: Tensor | None) -> _Slots:
        return cls(_ROW_NUMBER, None) if table is None else cls(_INDEX, table.contiguous())


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor | None,
    cu_seqlens: Tensor,
    state_indices: Tensor | None,
    history_lens: Tensor | None,
    layout: str,
    activation: str | None,
    pad_slot_id: int,
    max_query_len: int | None,
    *,
    soc: SoC,
) -> Tensor:
    """Convolve a packed batch; see `dlinfer_ext.ops.causal_conv1d.causal_conv1d` for the arguments.

    `max_query_len` is not needed: the kernel finds the row lengths on the device.
    """
    slots = _Slots.of(state_indices)
    return _launch(
        x, weight, bias, conv_state, activation, pad_slot_id, soc, slots, cu_seqlens, history_lens, 0, _LAYOUTS[layout]
    )


def causal_conv1d_columns(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    cu_seqlens: Tensor,
    state_indices: Tensor | None,
    has_history: Tensor | None,
    read_columns: Tensor,
    write_columns: Tensor,
    activation: str | None,
    pad_slot_id: int,
    *,
    soc: SoC,
) -> Tensor:
    """Convolve with the pool columns given; see `dlinfer_ext.ops.causal_conv1d.causal_conv1d_columns`."""
    slots = _Slots.of(state_indices)
    flags = has_history.view(torch.int8) if has_history is not None and has_history.dtype == torch.bool else has_history
    columns = read_columns.contiguous(), write_columns.contiguous()
    return _launch(
        x, weight, bias, conv_state, activation, pad_slot_id, soc, slots, cu_seqlens, flags, 0, _COLUMNS, columns
    )


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_state_indices: Tensor | None,
    num_accepted_tokens: Tensor | None,
    query_start_loc: Tensor | None,
    max_query_len: int,
    pad_slot_id: int,
    block_idx_last_scheduled_token: Tensor | None,
    initial_state_idx: Tensor | None,
    cache_seqlens: Tensor | None,
    *,
    soc: SoC,
) -> Tensor:
    """Advance every row by its new tokens; see `dlinfer_ext.ops.causal_conv1d.causal_conv1d_update`.

    With block pointers, no row may read a slot that another row of the step writes: rows run in any order.
    """
    slots = _Slots.of(conv_state_indices)
    if conv_state_indices is not None and conv_state_indices.dim() == 2:
        slots = slots._replace(kind=_FIRST_BLOCK, blocks=conv_state_indices.shape[1])
        if initial_state_idx is not None and block_idx_last_scheduled_token is not None:
            initial, final = initial_state_idx.contiguous(), block_idx_last_scheduled_token.contiguous()
            slots = slots._replace(kind=_BLOCK_POINTERS, initial=initial, final=final)
    history, layout = None, _LINEAR
    if cache_seqlens is not None:
        history, layout = cache_seqlens, _RING
    elif num_accepted_tokens is not None:
        history, layout = num_accepted_tokens, _REWIND
    return _launch(
        x, weight, bias, conv_state, activation, pad_slot_id, soc, slots, query_start_loc, history, 1, layout
    )


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pool: Tensor | None,
    activation: str | None,
    pad_slot_id: int,
    soc: SoC,
    slots: _Slots,
    cu_seqlens: Tensor | None,
    history: Tensor | None,
    otherwise: int,
    layout: int,
    columns: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Launch the kernel.

    Args:
        x: [T, D], or [N, q, D] without `cu_seqlens`.
        weight: [W, D].
        bias: [D] or None.
        pool: [S, L, D], mutated, or None.
        activation: None, or anything else for SiLU.
        pad_slot_id: a slot number that means padding.
        soc: the chip.
        slots: of the rows.
        cu_seqlens: int [N + 1]; None: x is [N, D] or [N, q, D].
        history: int [N], what the layout makes of it; None: `otherwise` for all rows.
        otherwise: see `history`.
        layout: one of the numbers above.
        columns: int [N, W - 1] and [N, W], columns to read and to write.
    """
    *_, token_stride, channel_stride = x.stride()
    channels = x.shape[-1]
    if cu_seqlens is not None:
        rows, each, tokens, row_skip = cu_seqlens.shape[0] - 1, 0, x.shape[0], 0
    else:
        rows, each = x.shape[0], (x.shape[1] if x.dim() == 3 else 1)
        tokens, row_skip = rows * each, x.stride(0) - each * token_stride
    if rows == 0 or tokens == 0 or channels == 0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    if pool is not None and pool.numel() == 0:
        pool = None
    width = weight.shape[0]
    # The kernel writes every element: zeros for PAD rows and for tokens behind the last row.
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    slot_stride, column_stride, state_stride = (0, 0, 1) if pool is None else pool.stride()
    tap_stride, weight_stride = weight.stride()
    kind = _STRIDED
    if weight_stride == 1 or channels == 1:
        kind = _TAP_MAJOR
    elif weight_stride == width and tap_stride == 1 and width in (2, 4, 8):
        kind = _INTERLEAVED
    scattered = kind == _STRIDED or channel_stride != 1 or state_stride != 1
    widest = _widest(channels, weight, out if pool is None else pool, bias is not None, scattered, soc)
    block, run = _plan(tokens, channels, rows, each or cdiv(tokens, rows), width, widest, soc)
    causal_conv1d_kernel[(core_grid(cdiv(channels, block) * cdiv(tokens, run), soc.vector_cores),)](
        x,
        weight,
        bias,
        pool,
        out,
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        slots.table,
        slots.initial,
        slots.final,
        None if history is None else history.contiguous(),
        *columns,
        tokens,
        channels,
        rows,
        run,
        each,
        row_skip,
        token_stride,
        channel_stride,
        tap_stride,
        weight_stride,
        0 if bias is None else bias.stride(0),
        slot_stride,
        column_stride,
        state_stride,
        0 if pool is None else pool.shape[1],
        slots.blocks,
        pad_slot_id,
        otherwise,
        W=width,
        BLOCK=block,
        EVEN=channels % block == 0,
        LAYOUT=layout,
        SLOTS=slots.kind,
        POOL=pool is not None,
        BIAS=bias is not None,
        SILU=activation is not None,
        UNIFORM=cu_seqlens is None,
        HISTORY=history is not None,
        WEIGHT=kind,
        X_UNIT=channel_stride == 1,
        BIAS_UNIT=bias is None or bias.stride(0) == 1,
        POOL_UNIT=state_stride == 1,
    )
    return out


def _widest(channels: int, weight: Tensor, pool: Tensor, has_bias: bool, scattered: bool, soc: SoC) -> int:
    """Return the most channels of a task.

    Args:
        channels: D.
        weight: [W, D].
        pool: what holds the history.
        has_bias: whether there is one.
        scattered: whether x, weight or pool is not contiguous along the channels.
        soc: the chip.
    """
    width = weight.shape[0]
    per_tap = _TAP_BYTES + 4 * weight.element_size() + _SCATTERED_BYTES * scattered
    per_channel = width * per_tap + 4 * pool.element_size() + 8 * has_bias
    return fit_block(channels, per_channel, int(_SHARE * soc.ub_bytes), most=_BLOCKS[-1])


# Every layer of a step asks the same.
@lru_cache(maxsize=256)
def _plan(tokens: int, channels: int, rows: int, each: int, width: int, widest: int, soc: SoC) -> tuple[int, int]:
    """Return the channels and the packed tokens of a task.

    The cores get equal work if all rows live; larger blocks have fewer loads and stores, and longer runs load taps and
    history less often.

    Args:
        tokens: T.
        channels: D.
        rows: N.
        each: tokens of a row on average; a run is a multiple of it if it can be.
        width: W.
        widest: the most channels.
        soc: the chip.
    """
    widest = min(widest, soc.tile("causal_conv1d", "block", widest))
    blocks = sorted({min(block, widest) for block in _BLOCKS})
    again = 2 * width - 1
    runs = 1 + int(_EXTRA * 2 * (tokens + rows * (width - 1)) / again)
    best = (0.0, 0, 0)
    for block in blocks:
        for count in range(1, min(runs, 2 * soc.vector_cores, tokens) + 1):
            run = cdiv(tokens, count)
            if run >= each:
                run = cdiv(run, each) * each
            rounds = cdiv(cdiv(channels, block) * cdiv(tokens, run), soc.vector_cores)
            cost = float(rounds * (run + again) * (block + _FIXED))
            if not best[1] or cost < best[0]:
                best = cost, block, run
    return best[1], best[2]
