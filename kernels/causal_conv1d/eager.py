"""Depthwise causal convolution with a per-request state, batched in PyTorch.

No loop over requests, no host read, no copy of a pool: what a step reads and writes is expressed as index tables
(`Moves`) that each layout builds in its own way, and one routine gathers the history, convolves and scatters.
The mathematics is that of https://github.com/Dao-AILab/causal-conv1d; `reference` is the definition.

Every output is the same sequence of vector instructions whatever the token's place in the batch, so a split or a
permuted batch is bit-exact in fp32. Two things see to it: scratch rows are padded to `_LANES` elements, so no element
falls into a scalar tail; and with several threads a block has at most `_GRAIN` elements, so PyTorch does not split it.
(The SiLU of a scalar tail differs from the vector SiLU in the last bit.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ..common.index import live_rows, row_of_token
from ..common.state_pool import FlatPool, flatten_pool

_LANES: Final = 64
_GRAIN: Final = 32768  # at::internal::GRAIN_SIZE
_DEVICE_BLOCK: Final = 1 << 22
_BITS: Final = {4: torch.int32, 2: torch.int16}


class Moves(NamedTuple):
    """Where each row's history lies and where its inputs go.

    Attributes:
        live: bool [N], rows that compute; the others leave zero output and an untouched state.
        read_slots: int64 [N].
        read_columns: int64 [N, W - 1], column of each history input, oldest first; < 0 reads zero.
        write_slots: int64 [N].
        write_columns: int64 [N, C], distinct within a row; < 0 writes nothing.
        write_sources: int64 [N, C], index into history ++ new of the input that goes there.
    """

    live: Tensor
    read_slots: Tensor
    read_columns: Tensor
    write_slots: Tensor
    write_columns: Tensor
    write_sources: Tensor


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
) -> Tensor:
    """Convolve a packed batch; see `dlinfer_ext.ops.causal_conv1d.causal_conv1d` for the arguments."""
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    slots = _slots(state_indices, lengths)
    history = torch.zeros_like(lengths) if history_lens is None else history_lens.long()
    live = live_rows(slots, cu_seqlens, pad_slot_id) & (history >= 0)
    width = weight.shape[0]
    if conv_state is None:
        none = lengths.new_zeros(lengths.shape[0], 0)
        moves = Moves(live, slots, none.new_full((lengths.shape[0], width - 1), -1), slots, none, none)
    elif layout == "linear":
        moves = linear_moves(live, slots, lengths, history > 0, width)
    else:
        longest = x.shape[0] if max_query_len is None else min(max_query_len, x.shape[0])
        moves = ring_moves(
            live, slots, slots, lengths, history, width, conv_state.shape[1], longest, keep_history=False
        )
    return run(x, weight, bias, conv_state, cu_seqlens, moves, activation)


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
) -> Tensor:
    """Convolve with the pool columns given; see `dlinfer_ext.ops.causal_conv1d.causal_conv1d_columns`."""
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    slots = _slots(state_indices, lengths)
    live = live_rows(slots, cu_seqlens, pad_slot_id)
    width = weight.shape[0]
    reads = live & has_history.bool() if has_history is not None else torch.zeros_like(live)
    # A ring of W - 1 columns holds the last W - 1 inputs only; the oldest of W would share a column with the newest.
    stored = min(width, conv_state.shape[1])
    moves = Moves(
        live,
        slots,
        read_columns.long().masked_fill(~reads[:, None], -1),
        slots,
        write_columns[:, width - stored :].long().masked_fill(~live[:, None], -1),
        lengths[:, None] - 1 + torch.arange(width - stored, width, device=x.device),
    )
    return run(x, weight, bias, conv_state, cu_seqlens, moves, activation)


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
) -> Tensor:
    """Advance every row by its new tokens; see `dlinfer_ext.ops.causal_conv1d.causal_conv1d_update`."""
    packed = x.reshape(-1, x.shape[-1])
    if query_start_loc is None:
        longest = x.shape[1] if x.dim() == 3 else 1
        cu_seqlens = torch.arange(x.shape[0] + 1, device=x.device) * longest
    else:
        longest = min(max_query_len, packed.shape[0]) if max_query_len >= 0 else packed.shape[0]
        cu_seqlens = query_start_loc
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    width, columns = weight.shape[0], conv_state.shape[1]
    if conv_state_indices is not None and conv_state_indices.dim() == 2:
        source = _block(conv_state_indices, initial_state_idx)
        target = _block(conv_state_indices, block_idx_last_scheduled_token)
    else:
        source = target = _slots(conv_state_indices, lengths)
    live = live_rows(source, cu_seqlens, pad_slot_id) & live_rows(target, cu_seqlens, pad_slot_id)
    if cache_seqlens is not None:
        history = cache_seqlens.long()
        live = live & (history >= 0)
        blocks = initial_state_idx is not None
        moves = ring_moves(live, source, target, lengths, history, width, columns, longest, keep_history=blocks)
    elif num_accepted_tokens is not None:
        moves = rewind_moves(live, source, target, lengths, num_accepted_tokens.long(), width, columns, longest)
    else:
        moves = linear_moves(live, source, lengths, torch.ones_like(live), width)._replace(write_slots=target)
    return run(packed, weight, bias, conv_state, cu_seqlens, moves, activation).view(x.shape)


def _slots(state_indices: Tensor | None, lengths: Tensor) -> Tensor:
    if state_indices is None:
        return torch.arange(lengths.shape[0], device=lengths.device)
    return state_indices.long()


def _block(table: Tensor, column: Tensor | None) -> Tensor:
    if column is None:
        return table[:, 0].long()
    return table.gather(1, column.long()[:, None])[:, 0].long()


def linear_moves(live: Tensor, slots: Tensor, lengths: Tensor, has_history: Tensor, width: int) -> Moves:
    """Read columns 0..W-2 and store the last W - 1 inputs there."""
    columns = torch.arange(width - 1, device=slots.device)
    return Moves(
        live,
        slots,
        torch.where((live & has_history)[:, None], columns, -1),
        slots,
        torch.where(live[:, None], columns, -1),
        lengths[:, None] + columns,
    )


def rewind_moves(
    live: Tensor,
    source: Tensor,
    target: Tensor,
    lengths: Tensor,
    accepted: Tensor,
    width: int,
    columns: int,
    longest: int,
) -> Moves:
    """Read W - 1 columns from accepted - 1 on; store history ++ new without its first input from column 0 on.

    The count belongs to the previous step: it says where its accepted history ends and has no bearing on this step's
    rows. A count below 1 reads as 1, and no count reaches past the slot's own columns.
    """
    first = (accepted - 1).clamp(0, columns - (width - 1))
    write = torch.arange(max(min(width - 2 + longest, columns), 0), device=source.device)
    return Moves(
        live,
        source,
        torch.where(live[:, None], first[:, None] + torch.arange(width - 1, device=source.device), -1),
        target,
        torch.where(live[:, None] & (write < width - 2 + lengths[:, None]), write, -1),
        (write + 1).expand(lengths.shape[0], -1),
    )


def ring_moves(
    live: Tensor,
    source: Tensor,
    target: Tensor,
    lengths: Tensor,
    history: Tensor,
    width: int,
    columns: int,
    longest: int,
    *,
    keep_history: bool,
) -> Moves:
    """Read and store position p in column p mod L; a longer step stores its last L inputs.

    Args:
        live: bool [N].
        source: int64 [N], slots read.
        target: int64 [N], slots written.
        lengths: int64 [N], new tokens.
        history: int64 [N], tokens before this step.
        width: W.
        columns: L.
        longest: upper bound of `lengths`.
        keep_history: store the history too, for a step that reads one block and writes another.
    """
    back = torch.arange(1 - width, 0, device=source.device)
    read = history[:, None] + back
    kept = width - 1 if keep_history else 0
    stored = min(columns, longest + kept)
    # Offsets, from the first new token, of the last `stored` positions; those before the ones to keep write nothing.
    offset = lengths[:, None] + torch.arange(-stored, 0, device=source.device)
    position = history[:, None] + offset
    return Moves(
        live,
        source,
        torch.where(live[:, None] & (read >= 0), read % columns, -1),
        target,
        torch.where(live[:, None] & (offset >= -kept) & (position >= 0), position % columns, -1),
        offset + (width - 1),
    )


def run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pool: Tensor | None,
    cu_seqlens: Tensor,
    moves: Moves,
    activation: str | None,
) -> Tensor:
    """Gather each row's history, convolve, and scatter; a range of channels at a time, so that scratch stays small.

    Within a range every gather comes before any scatter, and ranges share no byte.
    """
    tokens, channels = x.shape
    if moves.live.shape[0] == 0 or tokens == 0 or channels == 0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    if pool is not None and pool.numel() == 0:
        pool = None
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    size = Sizes.choose(x, moves, weight.shape[0])
    taps = Taps.build(cu_seqlens.long(), moves.live, size)
    scratch = Scratch.allocate(x, size)
    flat = None if pool is None else flatten_pool(pool)
    reads = None if flat is None else Reads.build(moves, flat)
    stores = None if flat is None or not moves.write_columns.numel() else Stores.build(cu_seqlens, moves, flat, tokens)
    for start in range(0, channels, size.channels):
        part = slice(start, min(start + size.channels, channels))
        state = None if flat is None else flat.view[:, part]
        if state is None or reads is None:
            history = x.new_zeros(moves.read_columns.numel(), part.stop - start)
        else:
            history = read_history(state, reads)
        scratch.load(x[:, part], history, weight[:, part], None if bias is None else bias[part], taps)
        convolve(x[:, part], taps, size, scratch, activation, out[:, part])
        if state is not None and stores is not None:
            write_columns(state, history, x[:, part], stores)
    return out


class Reads(NamedTuple):
    """The history reads as flat lists of N · (W - 1) entries.

    Attributes:
        places: int64, rows of the flat pool.
        keep: int [N · (W - 1), 1], all bits set where the value counts, none where it reads as zero.
    """

    places: Tensor
    keep: Tensor

    @classmethod
    def build(cls, moves: Moves, flat: FlatPool) -> Reads:
        # A padding row's slot may lie on either side of the pool.
        slots = moves.read_slots.masked_fill(~moves.live, 0)[:, None]
        places = flat.at(slots, moves.read_columns.clamp(min=0))
        none = (moves.read_columns < 0).to(_BITS[flat.view.element_size()])
        return cls(places.flatten(), none.view(-1, 1) - 1)


def read_history(state: Tensor, reads: Reads) -> Tensor:
    """Return the history of every row [N · (W - 1), channels] in the pool's dtype."""
    found = state.index_select(0, reads.places)
    # Bits are cleared, not values multiplied by zero: a reused slot may hold inf or NaN.
    found.view(reads.keep.dtype).bitwise_and_(reads.keep)
    return found


class Stores(NamedTuple):
    """The state writes as flat lists of M = N · C entries.

    An entry that writes nothing repeats the first one that does: same place, same value. If none does, every entry
    writes back what slot 0, column 0 holds. So the shape is fixed without a look at the mask on the host.

    Attributes:
        places: int64 [M], rows of the flat pool.
        tokens: int64 [M], packed token that is the value, if a new input is.
        values: int64 [M], row of history ++ the tokens above ++ what slot 0, column 0 holds.
    """

    places: Tensor
    tokens: Tensor
    values: Tensor

    @classmethod
    def build(cls, cu_seqlens: Tensor, moves: Moves, flat: FlatPool, num_tokens: int) -> Stores:
        rows, stored = moves.write_columns.shape
        before = moves.read_columns.shape[1]
        columns = moves.write_columns.flatten()
        wanted = columns >= 0
        none = ~wanted.any()
        entries = torch.arange(rows * stored, device=columns.device)
        entry = torch.where(wanted, entries, wanted.to(torch.uint8).argmax())
        row = entry // stored
        source = moves.write_sources.flatten()[entry]
        value = torch.where(source < before, row * before + source, rows * before + entries)
        return cls(
            flat.at(moves.write_slots[row], columns[entry]).masked_fill(none, 0),
            (cu_seqlens[:-1].long()[row] + source - before).clamp(0, num_tokens - 1),
            value.masked_fill(none, rows * (before + stored)),
        )


def write_columns(state: Tensor, history: Tensor, x: Tensor, stores: Stores) -> None:
    """Scatter inputs, old and new, into the pool; bit copies where the dtypes agree."""
    values = torch.cat([history, x.index_select(0, stores.tokens).to(state.dtype), state[:1]])
    state.index_copy_(0, stores.places, values.index_select(0, stores.values))


def _block_elements(device: torch.device) -> int:
    if device.type != "cpu":
        return _DEVICE_BLOCK
    return _GRAIN if torch.get_num_threads() > 1 else 4 * _GRAIN


class Sizes(NamedTuple):
    """How the work is cut up, from Python ints only.

    Attributes:
        tokens: T.
        rows: N.
        width: W.
        shifted: whether most outputs come from shifted views of x (see `Taps`).
        channels: channels at a time, a multiple of `_LANES`.
        block: outputs at a time.
    """

    tokens: int
    rows: int
    width: int
    shifted: bool
    channels: int
    block: int

    @classmethod
    def choose(cls, x: Tensor, moves: Moves, width: int) -> Sizes:
        tokens, channels = x.shape
        rows = moves.live.shape[0]
        history = rows * (width - 1)
        # Measured on a CPU: an output by look-up costs about 1.4 by shift, and the first W - 1 of each row come twice.
        shifted = tokens >= 4 * history
        table = 2 * history if shifted else history + tokens
        # Rows held at a time; a store holds its values twice.
        held = table + 2 * moves.write_columns.numel()
        elements = _block_elements(x.device)
        most = max(min(elements // min(tokens, 64 if shifted else 256), 5 * elements // max(held, 1)) // _LANES, 1)
        lanes = math.ceil(channels / _LANES)
        taken = math.ceil(lanes / math.ceil(lanes / most)) * _LANES
        return cls(tokens, rows, width, shifted, taken, min(elements // taken, tokens))


class Taps(NamedTuple):
    """Where the W inputs of an output lie.

    Outputs that are looked up take their inputs from a table: the history of every row, then packed tokens. In a batch
    of short rows these are all. In a long batch they are the first W - 1 of each row, whose inputs reach back into the
    history; the others come from shifted views of x. The arithmetic is the same, so the result cannot tell.

    Attributes:
        inputs: per block of outputs looked up, tensors of table rows, oldest input first; without the output's own
            token where all are looked up, as it lies in order.
        tokens: per block, the token of each output looked up; None: all in order.
        picked: per block, the place of each output in its block, or the row of zeros behind it where it is dead.
        table_tokens: int64 [N · (W - 1)], the tokens in the table; None: all in order.
        shifted: per block of shifted outputs, what `picked` is.
    """

    inputs: list[tuple[Tensor, ...]]
    tokens: tuple[Tensor, ...] | None
    picked: tuple[Tensor, ...]
    table_tokens: Tensor | None
    shifted: tuple[Tensor, ...]

    @classmethod
    def build(cls, cu: Tensor, live: Tensor, size: Sizes) -> Taps:
        rows, before = size.rows, size.width - 1
        token = torch.arange(size.tokens, device=cu.device)
        row = row_of_token(cu, size.tokens)
        dead = ~torch.cat([live, live.new_zeros(1)])[row]
        row = row.clamp(max=rows - 1)
        picked = torch.where(dead, size.block, token % size.block).split(size.block)
        back = torch.arange(before, -1, -1, device=cu.device)[:, None]
        if not size.shifted:
            place = token - cu[row]
            own, older = rows * before + token - back, (row + 1) * before + place - back
            inputs = torch.where(place >= back, own, older)[:before].split(size.block, 1)
            return cls([block.unbind() for block in inputs], None, picked, None, ())
        # A row shorter than W - 1 repeats its last token, and an empty row the first token of the row before it: a
        # repeated output gets the same value again.
        lengths = cu[1:] - cu[:-1]
        first = torch.arange(before, device=cu.device)
        owner = torch.where(lengths > 0, torch.arange(rows, device=cu.device), row[(cu[:-1] - 1).clamp(min=0)])
        place = torch.minimum(first, (lengths - 1).clamp(min=0)[:, None]).flatten()
        owner = owner[:, None].expand(rows, before).flatten()
        own, older = (rows + owner) * before + place - back, (owner + 1) * before + place - back
        inputs = torch.where(place >= back, own, older).split(size.block, 1)
        tokens = (cu[owner] + place).clamp(max=size.tokens - 1)
        order = torch.arange(rows * before, device=cu.device) % size.block
        return cls(
            [block.unbind() for block in inputs],
            tokens.split(size.block),
            torch.where(dead[tokens], size.block, order).split(size.block),
            (cu[:-1, None] + first).clamp(max=size.tokens - 1).flatten(),
            picked,
        )


class Scratch(NamedTuple):
    """Buffers of one call, reused for every block. Rows are padded to whole vectors; the padding is never shown.

    Attributes:
        weight: W tensors fp32 [channels].
        bias: fp32 [channels].
        table: fp32 [history and tokens, channels].
        window: fp32 [W - 1 + block, channels], consecutive tokens.
        taken: fp32 [block, channels], inputs looked up.
        sums: fp32 [block + 1, channels].
        rounded: [block + 1, channels] in x's dtype, the last row zero; `sums` itself in fp32.
    """

    weight: tuple[Tensor, ...]
    bias: Tensor
    table: Tensor
    window: Tensor
    taken: Tensor
    sums: Tensor
    rounded: Tensor

    @classmethod
    def allocate(cls, x: Tensor, size: Sizes) -> Scratch:
        def rows(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(count, size.channels, dtype=dtype, device=x.device)

        before = size.width - 1
        history = size.rows * before
        looked_up = history if size.shifted else size.tokens
        sums = rows(size.block + 1)
        rounded = sums if x.dtype == torch.float32 else rows(size.block + 1, x.dtype)
        rounded[-1] = 0
        return cls(
            rows(size.width).unbind(),
            rows(1)[0].zero_(),
            rows(history + looked_up),
            rows(before + size.block if size.shifted else 0),
            rows(min(size.block, looked_up)),
            sums,
            rounded,
        )

    def load(self, x: Tensor, history: Tensor, weight: Tensor, bias: Tensor | None, taps: Taps) -> None:
        """Take up one range of channels."""
        channels = x.shape[1]
        for tap, row in enumerate(self.weight):
            row[:channels] = weight[tap]
        if bias is not None:
            self.bias[:channels] = bias
        self.table[: history.shape[0], :channels] = history
        self.table[history.shape[0] :, :channels] = x if taps.table_tokens is None else x[taps.table_tokens]


def convolve(x: Tensor, taps: Taps, size: Sizes, scratch: Scratch, activation: str | None, out: Tensor) -> None:
    """Write the outputs [T, channels] of one range of channels."""
    channels, before = x.shape[1], size.width - 1
    for start, picked in zip(range(0, size.tokens, size.block), taps.shifted, strict=False):
        count = picked.shape[0]
        # The first W - 1 tokens of all are looked up below, so what stands before them here does not matter.
        missing = max(before - start, 0)
        scratch.window[missing : before + count, :channels] = x[start - before + missing : start + count]
        shifts = (scratch.window[tap : tap + count] for tap in range(size.width))
        done = outputs(shifts, scratch, activation, count)
        torch.index_select(done[:, :channels], 0, picked, out=out[start : start + count])
    for block, (inputs, picked) in enumerate(zip(taps.inputs, taps.picked, strict=True)):
        count = picked.shape[0]
        taken = scratch.taken[:count]
        found: Iterable[Tensor] = (torch.index_select(scratch.table, 0, rows, out=taken) for rows in inputs)
        if taps.tokens is None:
            found = chain(found, [scratch.table[-size.tokens :][block * size.block :][:count]])
        done = outputs(found, scratch, activation, count)[:, :channels]
        if taps.tokens is None:
            torch.index_select(done, 0, picked, out=out[block * size.block :][:count])
        else:
            out.index_copy_(0, taps.tokens[block], done.index_select(0, picked))


def outputs(inputs: Iterable[Tensor], scratch: Scratch, activation: str | None, count: int) -> Tensor:
    """Return act(bias + sum of weight · input) for a block, in x's dtype, with the row of zeros at its end.

    Args:
        inputs: W tensors [count, channels], oldest tap first; each is used up before the next is asked for.
        scratch: the buffers.
        activation: None, or anything else for SiLU.
        count: outputs in the block.

    Returns:
        [block + 1, channels], a part of scratch.
    """
    sums = scratch.sums[:count]
    for tap, (values, weight) in enumerate(zip(inputs, scratch.weight, strict=True)):
        torch.addcmul(sums if tap else scratch.bias, values, weight, out=sums)
    if activation is not None:
        torch.ops.aten.silu_(sums)
    if scratch.rounded is not scratch.sums:
        scratch.rounded[:count] = sums
    return scratch.rounded
