"""Device code of the delta rules over packed prompts: a row is taken token by token, its state held in a core.

No byte is moved twice but for q and k, and there is no matrix product.
"""

import triton
import triton.language as tl

# Run-time values: a kernel is not built again for other lengths, strides or scales.
RUN_TIME = [
    "rows", "tokens", "scale", "pad_slot_id", "ring", "q_token", "q_head", "k_token", "k_head", "v_token", "v_head",
    "g_token", "g_head", "beta_token", "beta_head", "state_slot", "state_entry", "state_head",
    "cu_step", "slot_step", "history_step", "value_heads", "group",
]  # fmt: skip
POINTERS = [
    "q_ptr", "k_ptr", "v_ptr", "g_ptr", "beta_ptr", "o_ptr", "state_ptr", "cu_ptr", "slot_ptr", "history_ptr",
]  # fmt: skip


@triton.jit
def row_facts(
    cu_ptr, slot_ptr, history_ptr, row, rows, tokens, pad_slot_id, cu_step, slot_step, history_step,
    HAS_SLOTS: tl.constexpr, HAS_HISTORY: tl.constexpr,
):  # fmt: skip
    """Return (lo, hi, slot, history, live) of a row; the row past the last is the tokens that belong to none.

    Without a history a row goes on from the state stored, as with a history of 1.
    """
    inside = tl.minimum(row, rows - 1)
    lo = tl.load(cu_ptr + row * cu_step).to(tl.int64)
    hi = tl.where(row < rows, tl.load(cu_ptr + (inside + 1) * cu_step).to(tl.int64), tokens)
    slot = inside.to(tl.int64)
    if HAS_SLOTS:
        slot = tl.load(slot_ptr + inside * slot_step).to(tl.int64)
    history = tl.full((), 1, tl.int64)
    if HAS_HISTORY:
        history = tl.load(history_ptr + inside * history_step).to(tl.int64)
    live = (row < rows) & (slot >= 0) & (slot != pad_slot_id) & (history >= 0) & (hi > lo)
    return lo, hi, slot, history, live


@triton.jit
def clear(out, lo, hi, first, value_heads, V: tl.constexpr, BV: tl.constexpr):
    """Zero BV columns of the tokens lo..hi."""
    step = tl.arange(0, 8)
    n = (hi - lo).to(tl.int32)
    for t in range(0, n, 8):
        for c in range(0, BV, 16):
            ov = first + c + tl.arange(0, 16)
            mask = (step < n - t)[:, None] & (ov < V)[None, :]
            place = out + (lo + t) * (value_heads * V) + step[:, None] * (value_heads * V) + ov[None, :]
            tl.store(place, tl.zeros((8, 16), out.dtype.element_ty), mask=mask)


@triton.jit
def _load_state(source, lines, columns, in_lines, in_columns, LINE: tl.constexpr, COLUMN: tl.constexpr):
    """A tile of a state in fp32; lines that are masked are zero and not read."""
    mask = in_lines[:, None] & in_columns[None, :]
    return tl.load(source + lines[:, None] * LINE + columns[None, :] * COLUMN, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_state(target, s, lines, columns, in_lines, in_columns, LINE: tl.constexpr, COLUMN: tl.constexpr):
    mask = in_lines[:, None] & in_columns[None, :]
    tl.store(target + lines[:, None] * LINE + columns[None, :] * COLUMN, s.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _advance(s, q, k, decay, beta, v_ptr, o_ptr, mv, AXIS: tl.constexpr, CHANNELS: tl.constexpr):
    """Take one token: store its output, return the state after it. AXIS is that of the keys in the tile.

    decay is a number, or with CHANNELS one for each key.
    """
    v = tl.load(v_ptr, mask=mv, other=0.0).to(tl.float32)
    key = tl.expand_dims(k, 1 - AXIS)
    if CHANNELS:
        # The decayed state times the key is the state times the decayed key: no second tile is held during the sum.
        u = (v - tl.sum(s * tl.expand_dims(k * decay, 1 - AXIS), AXIS)) * beta
        s = s * tl.expand_dims(decay, 1 - AXIS)
    else:
        s = s * decay
        u = (v - tl.sum(s * key, AXIS)) * beta
    s = s + tl.expand_dims(u, AXIS) * key
    o = tl.sum(s * tl.expand_dims(q, 1 - AXIS), AXIS)
    tl.store(o_ptr, o.to(o_ptr.dtype.element_ty), mask=mv)
    return s


@triton.jit(do_not_specialize=RUN_TIME, do_not_specialize_on_alignment=POINTERS)
def delta_scan_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, o_ptr, state_ptr, cu_ptr, slot_ptr, history_ptr,
    rows, tokens, scale, pad_slot_id, ring,
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, beta_token, beta_head,
    state_slot, state_entry, state_head, cu_step, slot_step, history_step, value_heads, group,
    Q_INNER: tl.constexpr, K_INNER: tl.constexpr, V_INNER: tl.constexpr, STATE_V: tl.constexpr, STATE_K: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_SLOTS: tl.constexpr, HAS_HISTORY: tl.constexpr, L2NORM: tl.constexpr, V_FIRST: tl.constexpr,
    G_INNER: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One task: one row, one value head, BV columns of V, in four tiles [BV / 4, BK] (V_FIRST) or [BK, BV / 4].

    Four, because what a tile's update needs beside the state is as large as a tile: so a whole head of 128 x 128 fits.
    """
    PART: tl.constexpr = BV // 4
    AXIS: tl.constexpr = 1 if V_FIRST else 0
    LINE: tl.constexpr = STATE_V if V_FIRST else STATE_K
    COLUMN: tl.constexpr = STATE_K if V_FIRST else STATE_V
    blocks = tl.cdiv(V, BV)
    for task in range(tl.program_id(0), (rows + 1) * value_heads * blocks, tl.num_programs(0)):
        row = task // (value_heads * blocks)
        hv = (task // blocks) % value_heads
        first = (task % blocks) * BV
        lo, hi, slot, history, live = row_facts(
            cu_ptr, slot_ptr, history_ptr, row, rows, tokens, pad_slot_id, cu_step, slot_step, history_step,
            HAS_SLOTS, HAS_HISTORY,
        )  # fmt: skip
        ok = tl.arange(0, BK)
        ov0 = first + tl.arange(0, PART)
        ov1 = ov0 + PART
        ov2 = ov1 + PART
        ov3 = ov2 + PART
        mk = ok < K
        if live:
            head = state_ptr + slot * state_slot + hv.to(tl.int64) * state_head
            source = head + (history % ring) * state_entry
            target = head + ((history + hi - lo) % ring) * state_entry
            # A fresh row reads no line of a tile, whatever the slot holds.
            if V_FIRST:
                end = tl.where(history > 0, V, 0)
                s0 = _load_state(source, ov0, ok, ov0 < end, mk, LINE, COLUMN)
                s1 = _load_state(source, ov1, ok, ov1 < end, mk, LINE, COLUMN)
                s2 = _load_state(source, ov2, ok, ov2 < end, mk, LINE, COLUMN)
                s3 = _load_state(source, ov3, ok, ov3 < end, mk, LINE, COLUMN)
            else:
                mf = ok < tl.where(history > 0, K, 0)
                s0 = _load_state(source, ok, ov0, mf, ov0 < V, LINE, COLUMN)
                s1 = _load_state(source, ok, ov1, mf, ov1 < V, LINE, COLUMN)
                s2 = _load_state(source, ok, ov2, mf, ov2 < V, LINE, COLUMN)
                s3 = _load_state(source, ok, ov3, mf, ov3 < V, LINE, COLUMN)
            h = hv // group
            for t in range(lo, hi):
                q = tl.load(q_ptr + t * q_token + h * q_head + ok * Q_INNER, mask=mk, other=0.0).to(tl.float32)
                k = tl.load(k_ptr + t * k_token + h * k_head + ok * K_INNER, mask=mk, other=0.0).to(tl.float32)
                g = g_ptr + t * g_token + hv * g_head
                if CHANNELS:
                    # Lanes past K decay nothing: a NaN there would reach every sum over the keys.
                    decay = tl.exp(tl.load(g + ok * G_INNER, mask=mk, other=0.0).to(tl.float32))
                else:
                    decay = tl.exp(tl.load(g).to(tl.float32))
                beta = tl.load(beta_ptr + t * beta_token + hv * beta_head).to(tl.float32)
                if L2NORM:
                    q = q / tl.sqrt(tl.sum(q * q, 0) + 1e-6)
                    k = k / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
                q = q * scale
                v = v_ptr + t * v_token + hv * v_head
                o = o_ptr + t * (value_heads * V) + hv * V
                s0 = _advance(s0, q, k, decay, beta, v + ov0 * V_INNER, o + ov0, ov0 < V, AXIS, CHANNELS)
                s1 = _advance(s1, q, k, decay, beta, v + ov1 * V_INNER, o + ov1, ov1 < V, AXIS, CHANNELS)
                s2 = _advance(s2, q, k, decay, beta, v + ov2 * V_INNER, o + ov2, ov2 < V, AXIS, CHANNELS)
                s3 = _advance(s3, q, k, decay, beta, v + ov3 * V_INNER, o + ov3, ov3 < V, AXIS, CHANNELS)
            if V_FIRST:
                _store_state(target, s0, ov0, ok, ov0 < V, mk, LINE, COLUMN)
                _store_state(target, s1, ov1, ok, ov1 < V, mk, LINE, COLUMN)
                _store_state(target, s2, ov2, ok, ov2 < V, mk, LINE, COLUMN)
                _store_state(target, s3, ov3, ok, ov3 < V, mk, LINE, COLUMN)
            else:
                _store_state(target, s0, ok, ov0, mk, ov0 < V, LINE, COLUMN)
                _store_state(target, s1, ok, ov1, mk, ov1 < V, LINE, COLUMN)
                _store_state(target, s2, ok, ov2, mk, ov2 < V, LINE, COLUMN)
                _store_state(target, s3, ok, ov3, mk, ov3 < V, LINE, COLUMN)
        else:
            clear(o_ptr + hv * V, lo, hi, first, value_heads, V, BV)
