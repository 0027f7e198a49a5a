"""Device code of the gated delta rule over packed prompts.

`scan` keeps a block of a state in the unified buffer and takes a row token by token: it moves no byte twice but for q
and k, and has no matrix product. See chunk_launch.py for which form is taken when.
"""

import triton
import triton.language as tl

# Run-time values: a kernel is not built again for other lengths, strides or scales.
RUN_TIME = [
    "rows", "tokens", "scale", "pad_slot_id", "ring", "q_token", "q_head", "k_token", "k_head", "v_token", "v_head",
    "g_token", "g_head", "beta_token", "beta_head", "state_slot", "state_entry", "state_head",
]  # fmt: skip
POINTERS = [
    "q_ptr", "k_ptr", "v_ptr", "g_ptr", "beta_ptr", "o_ptr", "state_ptr", "cu_ptr", "slot_ptr", "history_ptr",
]  # fmt: skip


@triton.jit
def _row(
    cu_ptr, slot_ptr, history_ptr, row, rows, tokens, pad_slot_id, HAS_SLOTS: tl.constexpr, HAS_HISTORY: tl.constexpr
):
    """Return (lo, hi, slot, history, live) of a row; the row past the last is the tokens that belong to none.

    Without a history a row goes on from the state stored, as with a history of 1.
    """
    inside = tl.minimum(row, rows - 1)
    lo = tl.load(cu_ptr + row).to(tl.int64)
    hi = tl.where(row < rows, tl.load(cu_ptr + inside + 1).to(tl.int64), tokens)
    slot = inside.to(tl.int64)
    if HAS_SLOTS:
        slot = tl.load(slot_ptr + inside).to(tl.int64)
    history = tl.full((), 1, tl.int64)
    if HAS_HISTORY:
        history = tl.load(history_ptr + inside).to(tl.int64)
    live = (row < rows) & (slot >= 0) & (slot != pad_slot_id) & (history >= 0) & (hi > lo)
    return lo, hi, slot, history, live


@triton.jit(do_not_specialize=RUN_TIME, do_not_specialize_on_alignment=POINTERS)
def gdr_scan_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, o_ptr, state_ptr, cu_ptr, slot_ptr, history_ptr,
    rows, tokens, scale, pad_slot_id, ring,
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, beta_token, beta_head,
    state_slot, state_entry, state_head,
    Q_INNER: tl.constexpr, K_INNER: tl.constexpr, V_INNER: tl.constexpr, STATE_V: tl.constexpr, STATE_K: tl.constexpr,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BT: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_HISTORY: tl.constexpr, L2NORM: tl.constexpr, V_FIRST: tl.constexpr,
):  # fmt: skip
    """One task: one row, one value head, BV columns of V. The state tile is [BV, BK] if V_FIRST, else [BK, BV]."""
    AXIS: tl.constexpr = 1 if V_FIRST else 0  # of the keys in the state tile
    OTHER: tl.constexpr = 0 if V_FIRST else 1
    blocks = tl.cdiv(V, BV)
    for task in range(tl.program_id(0), (rows + 1) * HV * blocks, tl.num_programs(0)):
        row = task // (HV * blocks)
        hv = (task // blocks) % HV
        first = (task % blocks) * BV
        lo, hi, slot, history, live = _row(
            cu_ptr, slot_ptr, history_ptr, row, rows, tokens, pad_slot_id, HAS_SLOTS, HAS_HISTORY
        )
        ok = tl.arange(0, BK)
        ov = first + tl.arange(0, BV)
        mk = ok < K
        mv = ov < V
        ms = tl.expand_dims(mv, AXIS) & tl.expand_dims(mk, OTHER)
        inner = tl.expand_dims(ov, AXIS) * STATE_V + tl.expand_dims(ok, OTHER) * STATE_K
        out = o_ptr + hv * V
        if live:
            s_ptr = state_ptr + slot * state_slot + hv.to(tl.int64) * state_head
            # A fresh row loads no line of the tile, whatever the slot holds.
            stored = tl.where(history > 0, V if V_FIRST else K, 0)
            lines = (ov if V_FIRST else ok) < stored
            s = tl.load(
                s_ptr + (history % ring) * state_entry + inner,
                mask=lines[:, None] & (mk if V_FIRST else mv)[None, :],
                other=0.0,
            ).to(tl.float32)
            h = hv // GROUP
            for t in range(lo, hi):
                q = tl.load(q_ptr + t * q_token + h * q_head + ok * Q_INNER, mask=mk, other=0.0).to(tl.float32)
                k = tl.load(k_ptr + t * k_token + h * k_head + ok * K_INNER, mask=mk, other=0.0).to(tl.float32)
                v = tl.load(v_ptr + t * v_token + hv * v_head + ov * V_INNER, mask=mv, other=0.0).to(tl.float32)
                g = tl.load(g_ptr + t * g_token + hv * g_head).to(tl.float32)
                beta = tl.load(beta_ptr + t * beta_token + hv * beta_head).to(tl.float32)
                if L2NORM:
                    q = q / tl.sqrt(tl.sum(q * q, 0) + 1e-6)
                    k = k / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
                kk = tl.expand_dims(k, OTHER)
                s = s * tl.exp(g)
                u = (v - tl.sum(s * kk, AXIS)) * beta
                s = s + tl.expand_dims(u, AXIS) * kk
                o = tl.sum(s * tl.expand_dims(q * scale, OTHER), AXIS)
                tl.store(out + t * (HV * V) + ov, o.to(o_ptr.dtype.element_ty), mask=mv)
            place = s_ptr + ((history + hi - lo) % ring) * state_entry
            tl.store(place + inner, s.to(state_ptr.dtype.element_ty), mask=ms)
        else:
            for t in range(lo, hi, BT):
                ot = t + tl.arange(0, BT)
                mt = (ot < hi)[:, None] & mv[None, :]
                tl.store(
                    out + ot[:, None] * (HV * V) + ov[None, :], tl.zeros((BT, BV), o_ptr.dtype.element_ty), mask=mt
                )
