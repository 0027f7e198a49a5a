"""Device code of the gated delta rule over packed prompts, in chunks of tokens. See chunk_launch.py for when.

The form that takes a row token by token is that of all delta rules, `common.delta_scan_kernel`.
"""

import triton
import triton.language as tl

from ..common.delta_scan_kernel import POINTERS, RUN_TIME, clear, row_facts


@triton.jit
def _product(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _unit_lower_inverse(a_t, C: tl.constexpr, BASE: tl.constexpr):
    """(I + A)^-1 of a strictly lower A [C, C] that is given transposed, in fp32.

    Forward substitution within the diagonal blocks of BASE, all blocks at once; then blocks are joined in pairs,
    [[X, 0], [-Y A21 X, Y]]. Powers of A, which a product of (I + A^2^n) takes, lose all digits when keys repeat.
    """
    i = tl.arange(0, C)
    block = (i // BASE)[:, None] == (i // BASE)[None, :]
    x = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    inner = tl.where(block, a_t, 0.0)
    for n in range(1, BASE):
        line = tl.sum(tl.where((i % BASE == n)[None, :], inner, 0.0), 1)
        new = tl.sum(line[:, None] * x, 0)
        x = x - tl.where(block & (i % BASE == n)[:, None], new[None, :], 0.0)
    if BASE < C:
        a = tl.trans(a_t)
        x = _join(x, a, C, BASE)
        if 2 * BASE < C:
            x = _join(x, a, C, 2 * BASE)
    return x


@triton.jit
def _join(x, a, C: tl.constexpr, SIZE: tl.constexpr):
    i = tl.arange(0, C)
    pair = (i // (2 * SIZE))[:, None] == (i // (2 * SIZE))[None, :]
    below = (i // SIZE)[:, None] > (i // SIZE)[None, :]
    part = tl.where(pair & below, a, 0.0)
    return x - _product(x, _product(part, x))


@triton.jit(do_not_specialize=RUN_TIME, do_not_specialize_on_alignment=POINTERS)
def gdr_dot_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, o_ptr, state_ptr, cu_ptr, slot_ptr, history_ptr,
    rows, tokens, scale, pad_slot_id, ring,
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, beta_token, beta_head,
    state_slot, state_entry, state_head, cu_step, slot_step, history_step, value_heads, group,
    Q_INNER: tl.constexpr, K_INNER: tl.constexpr, V_INNER: tl.constexpr, STATE_V: tl.constexpr, STATE_K: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BT: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_HISTORY: tl.constexpr, L2NORM: tl.constexpr, V_FIRST: tl.constexpr,
):  # fmt: skip
    """One task: one row, one value head, BV columns of V; chunks of BT tokens. See chunk_eager.py for the maths.

    Products take q and k as they are stored; norms, gates and write strengths scale their results. Gates between two
    tokens are summed directly, never as a difference of two running sums: see `chunk_eager.segment_decay`.
    """
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
        ov = first + tl.arange(0, BV)
        mk = ok < K
        mv = ov < V
        out = o_ptr + hv * V
        oi = tl.arange(0, BT)
        if live:
            s_ptr = state_ptr + slot * state_slot + hv.to(tl.int64) * state_head
            # A fresh row loads no line of the tile, whatever the slot holds.
            stored = tl.where(history > 0, V if V_FIRST else K, 0)
            source = s_ptr + (history % ring) * state_entry
            target = s_ptr + ((history + hi - lo) % ring) * state_entry
            if V_FIRST:
                inner = ov[:, None] * STATE_V + ok[None, :] * STATE_K
                s = tl.load(source + inner, mask=(ov < stored)[:, None] & mk[None, :], other=0.0).to(tl.float32)
            else:
                inner = ok[:, None] * STATE_K + ov[None, :] * STATE_V
                s = tl.load(source + inner, mask=(ok < stored)[:, None] & mv[None, :], other=0.0).to(tl.float32)
            h = hv // group
            n = (hi - lo).to(tl.int32)
            for start in range(0, n, BT):
                mt = oi < n - start
                mtk = mt[:, None] & mk[None, :]
                mtv = mt[:, None] & mv[None, :]
                base = lo + start
                from_q = q_ptr + base * q_token + h * q_head
                from_k = k_ptr + base * k_token + h * k_head
                from_v = v_ptr + base * v_token + hv * v_head
                q = tl.load(from_q + oi[:, None] * q_token + ok[None, :] * Q_INNER, mask=mtk, other=0.0).to(tl.float32)
                k = tl.load(from_k + oi[:, None] * k_token + ok[None, :] * K_INNER, mask=mtk, other=0.0).to(tl.float32)
                v = tl.load(from_v + oi[:, None] * v_token + ov[None, :] * V_INNER, mask=mtv, other=0.0)
                g = tl.load(g_ptr + base * g_token + hv * g_head + oi * g_token, mask=mt, other=0.0).to(tl.float32)
                from_beta = beta_ptr + base * beta_token + hv * beta_head
                beta = tl.load(from_beta + oi * beta_token, mask=mt, other=0.0).to(tl.float32)
                if L2NORM:
                    rq = scale / tl.sqrt(tl.sum(q * q, 1) + 1e-6)
                    rk = 1.0 / tl.sqrt(tl.sum(k * k, 1) + 1e-6)
                else:
                    rq = tl.full((BT,), 1.0, tl.float32) * scale
                    rk = tl.full((BT,), 1.0, tl.float32)
                low = oi[:, None] > oi[None, :]
                sums = tl.cumsum(tl.where(low, g[:, None], 0.0), 0)
                decay = tl.where(oi[:, None] >= oi[None, :], tl.exp(sums), 0.0)
                since = tl.exp(tl.cumsum(g, 0))
                until = tl.sum(tl.where((oi == BT - 1)[:, None], decay, 0.0), 0)
                kept = tl.sum(tl.where(oi == BT - 1, since, 0.0), 0)

                decay = decay * rk[None, :]
                a = tl.where(low, _product(k, tl.trans(k)) * decay, 0.0) * (beta * rk)[:, None]
                x = _unit_lower_inverse(tl.trans(a), BT, 16)
                p = _product(q, tl.trans(k)) * decay * rq[:, None]
                st = tl.trans(s) if V_FIRST else s
                u = (v.to(tl.float32) - _product(k, st) * (since * rk)[:, None]) * beta[:, None]
                u = _product(x, u)
                o = _product(q, st) * (since * rq)[:, None] + _product(p, u)
                to_o = out + base * (value_heads * V) + oi[:, None] * (value_heads * V) + ov[None, :]
                tl.store(to_o, o.to(o_ptr.dtype.element_ty), mask=mtv)
                u = u * (until * rk)[:, None]
                s = s * kept + (_product(tl.trans(u), k) if V_FIRST else _product(tl.trans(k), u))
            if V_FIRST:
                tl.store(target + inner, s.to(state_ptr.dtype.element_ty), mask=mv[:, None] & mk[None, :])
            else:
                tl.store(target + inner, s.to(state_ptr.dtype.element_ty), mask=mk[:, None] & mv[None, :])
        else:
            clear(out, lo, hi, first, value_heads, V, BV)
