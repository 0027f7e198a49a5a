"""The depthwise causal convolution with a per-request state, for prefill, decode and verify alike.

A task is a run of packed tokens by a block of channels. It loads the taps of its channels once, walks over the rows
that have tokens in its run, keeps the last W - 1 inputs in registers while it walks through a row, and stores in the
pool what the layout demands. So x, the history, the outputs and the new state each pass once.

Only one task touches a row's slot (for its channels): the one in which the row starts. It reads the history, then
writes. To make that true, it also computes those of the row's first W - 1 tokens that lie beyond its run, as they need
the history as well; later tasks find all they need in x.

Names: input k back means the k-th input before the current one; h1 .. h7 hold them, v0 .. v7 are their taps.
The mathematics is that of https://github.com/Dao-AILab/causal-conv1d.
"""

import triton
import triton.language as tl

LINEAR = tl.constexpr(0)
RING = tl.constexpr(1)
REWIND = tl.constexpr(2)
COLUMNS = tl.constexpr(3)

# Where the slot of a row comes from.
ROW_NUMBER = tl.constexpr(0)
INDEX = tl.constexpr(1)
FIRST_BLOCK = tl.constexpr(2)
BLOCK_POINTERS = tl.constexpr(3)

# How the taps lie in memory.
TAP_MAJOR = tl.constexpr(0)
INTERLEAVED = tl.constexpr(1)
STRIDED = tl.constexpr(2)

SEARCH = tl.constexpr(64)


@triton.jit
def _offsets(channel, stride, UNIT: tl.constexpr):
    """Offsets of channels; a stride that is known to be 1 keeps the access contiguous in the compiler's eyes."""
    return channel if UNIT else channel.to(tl.int64) * stride


@triton.jit
def _load(pointer, inside, EVEN: tl.constexpr):
    return tl.load(pointer) if EVEN else tl.load(pointer, mask=inside, other=0.0)


@triton.jit
def _store(pointer, value, inside, EVEN: tl.constexpr):
    if EVEN:
        tl.store(pointer, value.to(pointer.dtype.element_ty))
    else:
        tl.store(pointer, value.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _tap(weight, w_tap, channel, w_channel, inside, TAP: tl.constexpr, WEIGHT: tl.constexpr, EVEN: tl.constexpr):
    return _load(weight + TAP * w_tap + _offsets(channel, w_channel, WEIGHT == TAP_MAJOR), inside, EVEN)


@triton.jit
def _deal(values, N: tl.constexpr):
    """The N values with even and the N with odd numbers."""
    return tl.split(tl.reshape(values, (N, 2)))


@triton.jit
def _taps(
    weight,
    w_tap,
    w_channel,
    start,
    channels,
    BLOCK: tl.constexpr,
    W: tl.constexpr,
    WEIGHT: tl.constexpr,
    EVEN: tl.constexpr,
):
    """v0 .. v7, fp32 [BLOCK], of the channels from `start` on; those from W on are unused."""
    v0 = 0.0
    v1 = 0.0
    v2 = 0.0
    v3 = 0.0
    v4 = 0.0
    v5 = 0.0
    v6 = 0.0
    v7 = 0.0
    if WEIGHT == INTERLEAVED:
        # Taken at once and dealt out: tap by tap, each block of 32 bytes would be fetched W times.
        place = tl.arange(0, BLOCK * W)
        values = _load(weight + start * W + place, place < (channels - start) * W, EVEN)
        if W == 2:
            v1, v0 = _deal(values, BLOCK)
        elif W == 4:
            even, odd = _deal(values, 2 * BLOCK)
            v3, v1 = _deal(even, BLOCK)
            v2, v0 = _deal(odd, BLOCK)
        else:
            even, odd = _deal(values, 4 * BLOCK)
            fourth, second = _deal(even, 2 * BLOCK)
            third, first = _deal(odd, 2 * BLOCK)
            v7, v3 = _deal(fourth, BLOCK)
            v6, v2 = _deal(third, BLOCK)
            v5, v1 = _deal(second, BLOCK)
            v4, v0 = _deal(first, BLOCK)
    else:
        channel = start + tl.arange(0, BLOCK)
        inside = channel < channels
        v0 = _tap(weight, w_tap, channel, w_channel, inside, W - 1, WEIGHT, EVEN)
        if W > 1:
            v1 = _tap(weight, w_tap, channel, w_channel, inside, W - 2, WEIGHT, EVEN)
        if W > 2:
            v2 = _tap(weight, w_tap, channel, w_channel, inside, W - 3, WEIGHT, EVEN)
        if W > 3:
            v3 = _tap(weight, w_tap, channel, w_channel, inside, W - 4, WEIGHT, EVEN)
        if W > 4:
            v4 = _tap(weight, w_tap, channel, w_channel, inside, W - 5, WEIGHT, EVEN)
        if W > 5:
            v5 = _tap(weight, w_tap, channel, w_channel, inside, W - 6, WEIGHT, EVEN)
        if W > 6:
            v6 = _tap(weight, w_tap, channel, w_channel, inside, W - 7, WEIGHT, EVEN)
        if W > 7:
            v7 = _tap(weight, w_tap, channel, w_channel, inside, W - 8, WEIGHT, EVEN)
    # The registers keep fp32; what is dealt out is as stored, which takes half the buffer.
    v0 = v0.to(tl.float32)
    if W > 1:
        v1 = v1.to(tl.float32)
    if W > 2:
        v2 = v2.to(tl.float32)
    if W > 3:
        v3 = v3.to(tl.float32)
    if W > 4:
        v4 = v4.to(tl.float32)
    if W > 5:
        v5 = v5.to(tl.float32)
    if W > 6:
        v6 = v6.to(tl.float32)
    if W > 7:
        v7 = v7.to(tl.float32)
    return v0, v1, v2, v3, v4, v5, v6, v7


@triton.jit
def _find_rows(cu, rows, low, high):
    """Numbers of the rows that hold the tokens `low` and `high`; `rows` itself for a token past the last row."""
    first = 0
    last = 0
    for start in range(0, rows, SEARCH):
        row = start + tl.arange(0, SEARCH)
        ends = tl.load(cu + 1 + row, mask=row < rows, other=2147483647).to(tl.int32)
        first += tl.sum((ends <= low).to(tl.int32), 0)
        last += tl.sum((ends <= high).to(tl.int32), 0)
    return first, last


@triton.jit
def _slots(source, initial, final, row, blocks, SLOTS: tl.constexpr):
    """The slots that a row reads and writes."""
    if SLOTS == ROW_NUMBER:
        read = row.to(tl.int64)
        write = read
    elif SLOTS == INDEX:
        read = tl.load(source + row).to(tl.int64)
        write = read
    elif SLOTS == FIRST_BLOCK:
        read = tl.load(source + row.to(tl.int64) * blocks).to(tl.int64)
        write = read
    else:
        line = source + row.to(tl.int64) * blocks
        read = tl.load(line + tl.load(initial + row)).to(tl.int64)
        write = tl.load(line + tl.load(final + row)).to(tl.int64)
    return read, write


@triton.jit
def _read(
    pool, reads, row, past, ring, p_column, columns, inside, BACK: tl.constexpr, W: tl.constexpr, LAYOUT: tl.constexpr
):
    """The stored input BACK back, [BLOCK] in the pool's dtype, and its column: zeros and < 0 if there is none."""
    if LAYOUT == RING:
        column = ring - BACK
        column = tl.where(column < 0, column + columns, column)
        column = tl.where(past < BACK, -1, column)
    elif LAYOUT == COLUMNS:
        column = tl.load(reads + row.to(tl.int64) * (W - 1) + (W - 1 - BACK)).to(tl.int32)
        column = tl.where(past != 0, column, -1)
    elif LAYOUT == REWIND:
        column = ring + (W - 1 - BACK)
    else:
        column = tl.where(past > 0, W - 1 - BACK, -1)
    found = column >= 0
    place = pool + tl.where(found, column, 0).to(tl.int64) * p_column
    return tl.load(place, mask=inside & found, other=0.0), column


@triton.jit
def _keep(
    value,
    column,
    pool,
    writes,
    row,
    length,
    moved,
    p_column,
    columns,
    inside,
    BACK: tl.constexpr,
    W: tl.constexpr,
    LAYOUT: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Store the input BACK before this step where the layout keeps it, bit for bit."""
    if LAYOUT == RING:
        # In place it is there already.
        place = tl.where(moved & (length + BACK <= columns), column, -1)
    elif LAYOUT == COLUMNS:
        place = W - BACK - length
        place = tl.where(place < tl.where(columns < W, 1, 0), -1, place)
        if place >= 0:
            place = tl.load(writes + row.to(tl.int64) * W + place).to(tl.int32)
    elif LAYOUT == REWIND:
        # Minus one for the input that falls out.
        place = W - 2 - BACK + 0 * length
    else:
        place = W - 1 - BACK - length
    if place >= 0:
        _store(pool + place.to(tl.int64) * p_column, value, inside, EVEN)


@triton.jit
def _move_history(
    source,
    target,
    reads,
    writes,
    row,
    past,
    ring,
    length,
    moved,
    p_column,
    columns,
    inside,
    BLOCK: tl.constexpr,
    W: tl.constexpr,
    LAYOUT: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Load h1 .. h7, fp32 [BLOCK], from the pool and store anew those that the layout keeps; loads come first."""
    h0 = tl.zeros((BLOCK,), tl.float32)
    if W > 1:
        r1, c1 = _read(source, reads, row, past, ring, p_column, columns, inside, 1, W, LAYOUT)
    if W > 2:
        r2, c2 = _read(source, reads, row, past, ring, p_column, columns, inside, 2, W, LAYOUT)
    if W > 3:
        r3, c3 = _read(source, reads, row, past, ring, p_column, columns, inside, 3, W, LAYOUT)
    if W > 4:
        r4, c4 = _read(source, reads, row, past, ring, p_column, columns, inside, 4, W, LAYOUT)
    if W > 5:
        r5, c5 = _read(source, reads, row, past, ring, p_column, columns, inside, 5, W, LAYOUT)
    if W > 6:
        r6, c6 = _read(source, reads, row, past, ring, p_column, columns, inside, 6, W, LAYOUT)
    if W > 7:
        r7, c7 = _read(source, reads, row, past, ring, p_column, columns, inside, 7, W, LAYOUT)
    if W > 1:
        _keep(r1, c1, target, writes, row, length, moved, p_column, columns, inside, 1, W, LAYOUT, EVEN)
    if W > 2:
        _keep(r2, c2, target, writes, row, length, moved, p_column, columns, inside, 2, W, LAYOUT, EVEN)
    if W > 3:
        _keep(r3, c3, target, writes, row, length, moved, p_column, columns, inside, 3, W, LAYOUT, EVEN)
    if W > 4:
        _keep(r4, c4, target, writes, row, length, moved, p_column, columns, inside, 4, W, LAYOUT, EVEN)
    if W > 5:
        _keep(r5, c5, target, writes, row, length, moved, p_column, columns, inside, 5, W, LAYOUT, EVEN)
    if W > 6:
        _keep(r6, c6, target, writes, row, length, moved, p_column, columns, inside, 6, W, LAYOUT, EVEN)
    if W > 7:
        _keep(r7, c7, target, writes, row, length, moved, p_column, columns, inside, 7, W, LAYOUT, EVEN)
    h1 = r1.to(tl.float32) if W > 1 else h0
    h2 = r2.to(tl.float32) if W > 2 else h0
    h3 = r3.to(tl.float32) if W > 3 else h0
    h4 = r4.to(tl.float32) if W > 4 else h0
    h5 = r5.to(tl.float32) if W > 5 else h0
    h6 = r6.to(tl.float32) if W > 6 else h0
    h7 = r7.to(tl.float32) if W > 7 else h0
    return h1, h2, h3, h4, h5, h6, h7


@triton.jit
def _past_inputs(x, token, x_token, inside, BLOCK: tl.constexpr, W: tl.constexpr, EVEN: tl.constexpr):
    """h1 .. h7 from the row's own tokens before `token`."""
    h0 = tl.zeros((BLOCK,), tl.float32)
    h1 = _load(x + (token - 1).to(tl.int64) * x_token, inside, EVEN).to(tl.float32) if W > 1 else h0
    h2 = _load(x + (token - 2).to(tl.int64) * x_token, inside, EVEN).to(tl.float32) if W > 2 else h0
    h3 = _load(x + (token - 3).to(tl.int64) * x_token, inside, EVEN).to(tl.float32) if W > 3 else h0
    h4 = _load(x + (token - 4).to(tl.int64) * x_token, inside, EVEN).to(tl.float32) if W > 4 else h0
    h5 = _load(x + (token - 5).to(tl.int64) * x_token, inside, EVEN).to(tl.float32) if W > 5 else h0
    h6 = _load(x + (token - 6).to(tl.int64) * x_token, inside, EVEN).to(tl.float32) if W > 6 else h0
    h7 = _load(x + (token - 7).to(tl.int64) * x_token, inside, EVEN).to(tl.float32) if W > 7 else h0
    return h1, h2, h3, h4, h5, h6, h7


@triton.jit
def _write_column(writes, row, token, length, ring, columns, W: tl.constexpr, LAYOUT: tl.constexpr):
    """Column of a new input that is to be stored."""
    if LAYOUT == RING:
        column = (ring + token) % columns
    elif LAYOUT == COLUMNS:
        column = tl.load(writes + row * W + (W - length + token)).to(tl.int32)
    elif LAYOUT == REWIND:
        column = W - 2 + token
    else:
        column = W - 1 - length + token
    return column


@triton.jit
def _output(
    x,
    h1,
    h2,
    h3,
    h4,
    h5,
    h6,
    h7,
    v0,
    v1,
    v2,
    v3,
    v4,
    v5,
    v6,
    v7,
    offset,
    W: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    total = x * v0
    if W > 1:
        total += h1 * v1
    if W > 2:
        total += h2 * v2
    if W > 3:
        total += h3 * v3
    if W > 4:
        total += h4 * v4
    if W > 5:
        total += h5 * v5
    if W > 6:
        total += h6 * v6
    if W > 7:
        total += h7 * v7
    if BIAS:
        total += offset
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    return total


@triton.jit(
    do_not_specialize=[
        "tokens",
        "channels",
        "rows",
        "run",
        "each",
        "x_skip",
        "x_token",
        "x_channel",
        "w_tap",
        "w_channel",
        "b_channel",
        "p_slot",
        "p_column",
        "p_channel",
        "columns",
        "blocks",
        "pad_slot_id",
        "otherwise",
    ],
    do_not_specialize_on_alignment=[
        "x",
        "weight",
        "bias",
        "pool",
        "out",
        "cu",
        "source",
        "initial",
        "final",
        "history",
        "reads",
        "writes",
    ],
)
def causal_conv1d_kernel(
    x,
    weight,
    bias,
    pool,
    out,
    cu,
    source,
    initial,
    final,
    history,
    reads,
    writes,
    tokens,
    channels,
    rows,
    run,
    each,
    x_skip,
    x_token,
    x_channel,
    w_tap,
    w_channel,
    b_channel,
    p_slot,
    p_column,
    p_channel,
    columns,
    blocks,
    pad_slot_id,
    otherwise,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    LAYOUT: tl.constexpr,
    SLOTS: tl.constexpr,
    POOL: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    UNIFORM: tl.constexpr,
    HISTORY: tl.constexpr,
    WEIGHT: tl.constexpr,
    X_UNIT: tl.constexpr,
    BIAS_UNIT: tl.constexpr,
    POOL_UNIT: tl.constexpr,
):
    """Convolve a packed batch and advance the state.

    Args:
        x: [T, D], or [N, q, D] if UNIFORM.
        weight: [W, D].
        bias: [D], or unused without BIAS.
        pool: [S, L, D], mutated, or unused without POOL.
        out: [T, D] contiguous; every element is written.
        cu: [N + 1], unused if UNIFORM.
        source: [N] or [N, blocks], by SLOTS.
        initial: [N], column of the slot to read, with BLOCK_POINTERS.
        final: [N], column of the slot to write, with BLOCK_POINTERS.
        history: [N]: tokens before this step, or the accepted count in REWIND, or a flag in COLUMNS.
        reads: [N, W - 1] in COLUMNS, < 0 for none.
        writes: [N, W] in COLUMNS, < 0 for none.
        tokens: T.
        channels: D.
        rows: N.
        run: packed tokens of a task.
        each: tokens of every row if UNIFORM.
        x_skip: what a row's stride in x exceeds that of its tokens by, if UNIFORM.
        x_token: stride of x; all strides are in elements, and the index tables are contiguous.
        x_channel: stride of x.
        w_tap: stride of weight.
        w_channel: stride of weight.
        b_channel: stride of bias.
        p_slot: stride of pool.
        p_column: stride of pool.
        p_channel: stride of pool.
        columns: L.
        blocks: columns of a block table.
        pad_slot_id: a slot number that means padding, as all < 0 do.
        otherwise: what `history` is without HISTORY.
        W: width, 1 to 8.
        BLOCK: channels of a task.
        EVEN: whether BLOCK divides D.
        LAYOUT: LINEAR, RING, REWIND or COLUMNS.
        SLOTS: ROW_NUMBER, INDEX, FIRST_BLOCK or BLOCK_POINTERS.
        POOL: whether there is a state.
        BIAS: whether there is a bias.
        SILU: whether the output is activated.
        UNIFORM: whether all rows have `each` tokens.
        HISTORY: whether `history` is given.
        WEIGHT: TAP_MAJOR, INTERLEAVED (stride W, for W of 2, 4 or 8) or STRIDED.
        X_UNIT: whether x_channel is 1.
        BIAS_UNIT: whether b_channel is 1.
        POOL_UNIT: whether p_channel is 1.
    """
    channel_blocks = tl.cdiv(channels, BLOCK)
    tasks = channel_blocks * tl.cdiv(tokens, run)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        first_channel = (task % channel_blocks) * BLOCK
        channel = first_channel + tl.arange(0, BLOCK)
        inside = channel < channels
        low = (task // channel_blocks) * run
        high = tl.minimum(low + run, tokens)
        if UNIFORM:
            first_row = low // each
            last_row = (high - 1) // each
        else:
            first_row, last_row = _find_rows(cu, rows, low, high - 1)
        v0, v1, v2, v3, v4, v5, v6, v7 = _taps(
            weight, w_tap, w_channel, first_channel, channels, BLOCK, W, WEIGHT, EVEN
        )
        offset = 0.0
        if BIAS:
            offset = _load(bias + _offsets(channel, b_channel, BIAS_UNIT), inside, EVEN).to(tl.float32)
        x_block = x + _offsets(channel, x_channel, X_UNIT)
        out_block = out + channel
        for row in range(first_row, last_row + 1):
            if UNIFORM:
                begin = row * each
                end = begin + each
            else:
                begin = tl.load(cu + row).to(tl.int32)
                end = tl.where(row < rows, tl.load(cu + tl.minimum(row + 1, rows)).to(tl.int32), tokens)
            # The part of the row that is this task's: see the top of this file.
            owner = begin >= low
            start = tl.where(owner, begin, tl.maximum(low, begin + (W - 1)))
            stop = tl.minimum(end, tl.where(owner, tl.maximum(high, begin + (W - 1)), high))
            if start < stop:
                known = tl.minimum(row, rows - 1)
                read, write = _slots(source, initial, final, known, blocks, SLOTS)
                past = otherwise.to(tl.int64)
                if HISTORY:
                    past = tl.load(history + known).to(tl.int64)
                live = (row < rows) & (read >= 0) & (read != pad_slot_id) & (write >= 0) & (write != pad_slot_id)
                if (LAYOUT == LINEAR) | (LAYOUT == RING):
                    live = live & (past >= 0)
                if live:
                    length = end - begin
                    x_row = x_block + row.to(tl.int64) * x_skip if UNIFORM else x_block
                    # The new inputs to store: none of a row that is another task's.
                    store_from = end
                    store_to = begin
                    ring = 0
                    h1 = tl.zeros((BLOCK,), tl.float32)
                    h2 = h1
                    h3 = h1
                    h4 = h1
                    h5 = h1
                    h6 = h1
                    h7 = h1
                    state = pool
                    if POOL:
                        lanes = _offsets(channel, p_channel, POOL_UNIT)
                        state = pool + write * p_slot + lanes
                        if LAYOUT == RING:
                            ring = (past % columns).to(tl.int32)
                        elif LAYOUT == REWIND:
                            ring = tl.minimum(tl.maximum(past - 1, 0), columns - (W - 1)).to(tl.int32)
                        if owner:
                            store_to = end
                            if LAYOUT == LINEAR:
                                store_from = end - (W - 1)
                            elif LAYOUT == RING:
                                store_from = end - columns
                            elif LAYOUT == REWIND:
                                store_from = begin + (1 if W == 1 else 0)
                                store_to = tl.minimum(end, begin + columns - (W - 2))
                            else:
                                store_from = end - tl.minimum(columns, W)
                            store_from = tl.maximum(store_from, begin)
                            h1, h2, h3, h4, h5, h6, h7 = _move_history(
                                pool + read * p_slot + lanes,
                                state,
                                reads,
                                writes,
                                known,
                                past,
                                ring,
                                length,
                                read != write,
                                p_column,
                                columns,
                                inside,
                                BLOCK,
                                W,
                                LAYOUT,
                                EVEN,
                            )
                    if begin < low:
                        h1, h2, h3, h4, h5, h6, h7 = _past_inputs(x_row, start, x_token, inside, BLOCK, W, EVEN)
                    for token in range(start, stop):
                        new = _load(x_row + token.to(tl.int64) * x_token, inside, EVEN)
                        if POOL:
                            place = token - begin
                            if (token >= store_from) & (token < store_to):
                                column = _write_column(writes, known, place, length, ring, columns, W, LAYOUT)
                                if column >= 0:
                                    _store(state + column.to(tl.int64) * p_column, new, inside, EVEN)
                        h0 = new.to(tl.float32)
                        total = _output(
                            h0, h1, h2, h3, h4, h5, h6, h7, v0, v1, v2, v3, v4, v5, v6, v7, offset, W, BIAS, SILU
                        )
                        _store(out_block + token.to(tl.int64) * channels, total, inside, EVEN)
                        if W > 7:
                            h7 = h6
                        if W > 6:
                            h6 = h5
                        if W > 5:
                            h5 = h4
                        if W > 4:
                            h4 = h3
                        if W > 3:
                            h3 = h2
                        if W > 2:
                            h2 = h1
                        if W > 1:
                            h1 = h0
                    if POOL:
                        # The row's end may lie in later tasks; its state is stored here all the same.
                        for token in range(tl.maximum(stop, store_from), store_to):
                            new = _load(x_row + token.to(tl.int64) * x_token, inside, EVEN)
                            column = _write_column(writes, known, token - begin, length, ring, columns, W, LAYOUT)
                            if column >= 0:
                                _store(state + column.to(tl.int64) * p_column, new, inside, EVEN)
                else:
                    nothing = tl.zeros((BLOCK,), out.dtype.element_ty)
                    for token in range(start, stop):
                        _store(out_block + token.to(tl.int64) * channels, nothing, inside, EVEN)
