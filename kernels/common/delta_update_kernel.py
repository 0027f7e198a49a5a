"""Device code of the delta rules of a decode or verify step.

A task is one row, one value head and one block of value channels: its part of the state is read once, stays in the
unified buffer while the tokens pass, and is written where the form asks for it. The recurrence of one channel does not
look at another, so that tasks share nothing but q and k.
"""

import triton
import triton.language as tl

from .delta_gate_kernel import log_decay, sigmoid


@triton.jit(
    do_not_specialize=[
        "q_ptr", "k_ptr", "v_ptr", "g_ptr", "beta_ptr", "rate_ptr", "dt_ptr", "state_ptr", "o_ptr", "slots_ptr",
        "history_ptr", "accepted_ptr", "cu_ptr",
        "rows", "tokens", "heads", "limit", "scale", "pad_slot_id",
        "softplus_beta", "inverse_beta", "softplus_threshold",
        "q_row", "q_token", "q_head", "k_row", "k_token", "k_head", "v_row", "v_token", "v_head",
        "g_row", "g_token", "g_head", "beta_row", "beta_token", "beta_head", "rate_head", "dt_head",
        "slot_stride", "entry_stride", "head_stride", "entries",
        "slots_row", "slots_column", "history_row", "accepted_row", "cu_row",
    ]
)  # fmt: skip
def delta_update_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    rate_ptr,
    dt_ptr,
    state_ptr,
    o_ptr,
    slots_ptr,
    history_ptr,
    accepted_ptr,
    cu_ptr,
    rows,
    tokens,
    heads,
    limit,
    scale,
    pad_slot_id,
    softplus_beta,
    inverse_beta,
    softplus_threshold,
    q_row,
    q_token,
    q_head,
    k_row,
    k_token,
    k_head,
    v_row,
    v_token,
    v_head,
    g_row,
    g_token,
    g_head,
    beta_row,
    beta_token,
    beta_head,
    rate_head,
    dt_head,
    slot_stride,
    entry_stride,
    head_stride,
    entries,
    slots_row,
    slots_column,
    history_row,
    accepted_row,
    cu_row,
    RATIO: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    Q_INNER: tl.constexpr,
    K_INNER: tl.constexpr,
    V_INNER: tl.constexpr,
    STATE_K: tl.constexpr,
    STATE_V: tl.constexpr,
    V_OUTER: tl.constexpr,
    FORM: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_HISTORY: tl.constexpr,
    HAS_ACCEPTED: tl.constexpr,
    GATED: tl.constexpr,
    NORMALISE: tl.constexpr,
    G_INNER: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """One row, head and block of value channels a task.

    FORM 0: a state a slot, written after the last token; 1: a ring, entry (history + t + 1) mod R after token t; 2: a
    table of slots, column t after token t. `limit`: tokens of a row at most (R, W); `entries`: R or W. Packed: `tokens`
    is T, and a task row past the last writes the zeros of the tokens past cu_seqlens[-1]. Dense: `tokens` is Q.
    GATED: `g_ptr` and `beta_ptr` hold a and b. CHANNELS: a decay for each key, g [.., HV, K], and not GATED. The state
    tile is [BV, BK] if V_OUTER, else [BK, BV]: as in memory.
    """
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    ks = tl.arange(0, BK)
    lanes = tl.arange(0, BV)
    task_rows = rows
    if PACKED:
        task_rows = rows + 1
    for task in range(tl.program_id(0), task_rows * heads * BLOCKS, tl.num_programs(0)):
        vs = (task % BLOCKS) * BV + lanes
        head = (task // BLOCKS) % heads
        row = task // (BLOCKS * heads)
        known = tl.minimum(row, rows - 1)
        if PACKED:
            start = tl.load(cu_ptr + row * cu_row).to(tl.int64)
            end = tl.load(cu_ptr + tl.minimum(row + 1, rows) * cu_row).to(tl.int64)
            end = tl.where(row < rows, end, tokens.to(tl.int64))
            length = (end - start).to(tl.int32)
            out = start
        else:
            start = tl.full((), 0, tl.int64)
            length = tokens
            out = row.to(tl.int64) * tokens

        count = tl.where(row < rows, tl.minimum(length, limit), 0)
        history = tl.full((), 1, tl.int64)
        if HAS_HISTORY:
            history = tl.load(history_ptr + known * history_row).to(tl.int64)
            count = tl.where(history < 0, 0, count)
        column = 0
        if HAS_ACCEPTED:
            taken = tl.load(accepted_ptr + known * accepted_row).to(tl.int64)
            column = tl.minimum(tl.maximum(taken - 1, 0), entries - 1).to(tl.int32)
        if HAS_SLOTS:
            row_slots = slots_ptr + known.to(tl.int64) * slots_row
            slot = tl.load(row_slots + column * slots_column).to(tl.int64)
            count = tl.where((slot < 0) | (slot == pad_slot_id), 0, count)
        else:
            slot = known.to(tl.int64)
        if FORM == 2:
            missing = 0
            for t in range(0, count):
                target = tl.load(row_slots + t * slots_column).to(tl.int64)
                missing += tl.where((target < 0) | (target == pad_slot_id), 1, 0)
            count = tl.where(missing > 0, 0, count)

        po = o_ptr + (out * heads + head) * V
        if count > 0:
            base = state_ptr + head.to(tl.int64) * head_stride
            source = base + slot * slot_stride
            if FORM == 1:
                source += (history % entries) * entry_stride
            # A row without a history reads nothing: the bound of the load is 0 for it.
            if V_OUTER:
                tile = vs[:, None] * STATE_V + ks[None, :] * STATE_K
                bound = tl.where(history == 0, 0, V) if HAS_HISTORY else V
                if BK != K:
                    reads = (vs < bound)[:, None] & (ks < K)[None, :]
                    writes = (vs < V)[:, None] & (ks < K)[None, :]
                else:
                    reads = (vs < bound)[:, None]
                    writes = (vs < V)[:, None]
            else:
                tile = ks[:, None] * STATE_K + vs[None, :] * STATE_V
                bound = tl.where(history == 0, 0, K) if HAS_HISTORY else K
                if V % BV != 0:
                    reads = (ks < bound)[:, None] & (vs < V)[None, :]
                    writes = (ks < K)[:, None] & (vs < V)[None, :]
                else:
                    reads = (ks < bound)[:, None]
                    writes = (ks < K)[:, None]
            if HAS_HISTORY or ((BK != K) or (V % BV != 0)):
                s = tl.load(source + tile, mask=reads, other=0.0).to(tl.float32)
            else:
                s = tl.load(source + tile).to(tl.float32)

            row64 = row.to(tl.int64)
            pq = q_ptr + row64 * q_row + start * q_token + (head // RATIO).to(tl.int64) * q_head
            pk = k_ptr + row64 * k_row + start * k_token + (head // RATIO).to(tl.int64) * k_head
            pv = v_ptr + row64 * v_row + start * v_token + head.to(tl.int64) * v_head
            pg = g_ptr + row64 * g_row + start * g_token + head.to(tl.int64) * g_head
            pb = beta_ptr + row64 * beta_row + start * beta_token + head.to(tl.int64) * beta_head
            if GATED:
                rate = tl.load(rate_ptr + head * rate_head).to(tl.float32)
                dt_bias = tl.load(dt_ptr + head * dt_head).to(tl.float32)

            for t in range(0, count):
                at = tl.full((), 0, tl.int64) + t
                if BK != K:
                    q = tl.load(pq + at * q_token + ks * Q_INNER, mask=ks < K, other=0.0).to(tl.float32)
                    k = tl.load(pk + at * k_token + ks * K_INNER, mask=ks < K, other=0.0).to(tl.float32)
                else:
                    q = tl.load(pq + at * q_token + ks * Q_INNER).to(tl.float32)
                    k = tl.load(pk + at * k_token + ks * K_INNER).to(tl.float32)
                if V % BV != 0:
                    v = tl.load(pv + at * v_token + vs * V_INNER, mask=vs < V, other=0.0).to(tl.float32)
                else:
                    v = tl.load(pv + at * v_token + vs * V_INNER).to(tl.float32)
                if not CHANNELS:
                    g = tl.load(pg + at * g_token).to(tl.float32)
                elif BK != K:
                    # Lanes past K decay nothing: a NaN there would reach every sum over the keys.
                    g = tl.load(pg + at * g_token + ks * G_INNER, mask=ks < K, other=0.0).to(tl.float32)
                else:
                    g = tl.load(pg + at * g_token + ks * G_INNER).to(tl.float32)
                b = tl.load(pb + at * beta_token).to(tl.float32)
                if GATED:
                    g = log_decay(g, dt_bias, rate, softplus_beta, inverse_beta, softplus_threshold)
                    b = sigmoid(b)
                if NORMALISE:
                    # A vector divided by a scalar: the quotient of two scalars would go to the vector unit and back.
                    q = q / tl.sqrt(tl.sum(q * q, 0) + 1e-6)
                    k = k / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
                q = q * scale
                decay = tl.exp(g)
                if CHANNELS:
                    decay = tl.expand_dims(decay, 0 if V_OUTER else 1)
                s = s * decay
                if V_OUTER:
                    u = (v - tl.sum(s * k[None, :], 1)) * b
                    s = s + u[:, None] * k[None, :]
                    o = tl.sum(s * q[None, :], 1)
                else:
                    u = (v - tl.sum(s * k[:, None], 0)) * b
                    s = s + k[:, None] * u[None, :]
                    o = tl.sum(s * q[:, None], 0)
                result = o.to(o_ptr.dtype.element_ty)
                if V % BV != 0:
                    tl.store(po + at * (heads * V) + vs, result, mask=vs < V)
                else:
                    tl.store(po + at * (heads * V) + vs, result)
                if FORM != 0:
                    if FORM == 1:
                        goal = base + slot * slot_stride + ((history + t + 1) % entries) * entry_stride
                    else:
                        goal = base + tl.load(row_slots + t * slots_column).to(tl.int64) * slot_stride
                    if (BK != K) or (V % BV != 0):
                        tl.store(goal + tile, s.to(state_ptr.dtype.element_ty), mask=writes)
                    else:
                        tl.store(goal + tile, s.to(state_ptr.dtype.element_ty))
            if FORM == 0:
                if (BK != K) or (V % BV != 0):
                    tl.store(source + tile, s.to(state_ptr.dtype.element_ty), mask=writes)
                else:
                    tl.store(source + tile, s.to(state_ptr.dtype.element_ty))

        zeros = tl.zeros((BV,), dtype=tl.float32).to(o_ptr.dtype.element_ty)
        for t in range(count, length):
            at = tl.full((), 0, tl.int64) + t
            if V % BV != 0:
                tl.store(po + at * (heads * V) + vs, zeros, mask=vs < V)
            else:
                tl.store(po + at * (heads * V) + vs, zeros)
