"""Delta rules one token at a time, batched over rows: decode and verify. No host read.

The state is taken block by block (rows, and parts of a row when a row is large), so that a block stays in cache between
its read and its write and the extra memory stays a fraction of the state addressed. With S the state before a token, a
block computes

    S <- exp(g) S;  [S^T k, S^T q] in one product;  u = beta (v - S^T k);  S <- S + k u^T;  o = S^T q + (k·q) u

with both products taken before the update (Yang et al., Gated Delta Networks, arXiv 2412.06464); the gate is a number
for a head, or one for each key channel (Kimi Team, arXiv 2510.26692). A decode step of a few
small states costs as much in calls as in arithmetic, so calls are saved: the inputs are packed into one tensor, which
is gathered and cut once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .delta_chunks import HeadTerms, scan_chunks
from .delta_inputs import Options, Tokens
from .index import row_of_token
from .numerics import l2norm
from .state_pool import (
    FlatPool,
    donor_rows,
    flatten_pool,
    live_slots,
    read_stored,
    ring_slot,
    row_mask,
    write_state,
)
from .tiling import prev_power_of_2

# Small enough to stay in a last-level cache, large enough that the calls cost little against the work.
BLOCK_BYTES = 2 << 20
# Of the state addressed, how much one block may take.
BLOCK_FRACTION = 7
# States of a step that take no more than this are one block: cutting them up costs more calls than it saves memory.
SMALL_BYTES = 2 << 20


@dataclass(frozen=True)
class StepRows:
    """Where the rows of a step read and write.

    Attributes:
        live: bool [N], rows that have a state.
        length: int64 [N], tokens of each row; None if all have Q.
        start: int64 [N], the first token of each row in the packed inputs.
        read: int64 [N], flat place of the state before the step.
        write: int64 [Q, N], the place after each token; None if the last state goes back to `read`.
        fresh: bool [N], rows that start from a zero state; None if none does.
    """

    live: Tensor
    length: Tensor | None
    start: Tensor
    read: Tensor
    write: Tensor | None
    fresh: Tensor | None


class StepInputs(NamedTuple):
    """The inputs of Q tokens in fp32; M = rows · HV, a row's heads side by side.

    Attributes:
        kq: [Q, M, 2, K], the key and the scaled query.
        v: [Q, M, V].
        beta: [Q, M, 1].
        decay: [Q, M, 1, 1], or of each key channel [Q, M, 1, K] (v_first) or [Q, M, K, 1].
        dot: [Q, M, 1], key · scaled query.
        moving: int32 [Q, N, 1], all bits set, but none where the state of a row must stay as it is (there the decay is
            1 and the key -0.0).
    """

    kq: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor
    dot: Tensor
    moving: Tensor

    def at(self, t: int, rows: slice, states: slice, values: slice) -> StepInputs:
        """Return the inputs of token t for a block: its rows, its run of M and its value channels."""
        kq, v, beta, decay, dot, moving = self
        return StepInputs(
            kq[t, states], v[t, states, values], beta[t, states], decay[t, states], dot[t, states], moving[t, rows]
        )


class StateBlocks(NamedTuple):
    """How the states of a step are cut; a row is cut into parts only if it is too large for a block.

    Attributes:
        rows: rows of each block.
        heads: the parts of a row by heads.
        values: the parts of a head by value channels.
    """

    rows: list[int]
    heads: list[slice]
    values: list[slice]


def accepted_column(num_accepted_tokens: Tensor | None, rows: int, width: int, device: torch.device) -> Tensor:
    """Return int64 [N]: the column of the index table that holds the state to start from, `accepted - 1`.

    A count below 1 reads column 0 and a count beyond the table its last column: never another row's memory.
    """
    if num_accepted_tokens is None:
        return torch.zeros(rows, dtype=torch.long, device=device)
    return (num_accepted_tokens.long() - 1).clamp(0, width - 1)


def plan_rows(
    pool: FlatPool,
    rows: int,
    steps: int,
    state_indices: Tensor | None,
    history_lens: Tensor | None,
    num_accepted_tokens: Tensor | None,
    start: Tensor,
    length: Tensor | None,
    pad_slot_id: int,
) -> StepRows:
    """Work out which rows are live, and the places that each reads and writes; a row that is not live has place 0."""
    device = pool.view.device
    slots = torch.arange(rows, device=device) if state_indices is None else state_indices
    write: Tensor | None = None
    if slots.dim() == 2:
        column = accepted_column(num_accepted_tokens, rows, slots.shape[1], device)
        source, target = slots.gather(1, column[:, None])[:, 0], slots[:, :steps].t()
        target_ok = live_slots(target, pad_slot_id)
        if length is not None:
            target_ok |= torch.arange(steps, device=device)[:, None] >= length
        live = live_slots(source, pad_slot_id) & target_ok.all(0)
        read, write = pool.at(source), pool.at(target)
    else:
        live = live_slots(slots, pad_slot_id)
        if pool.ring is not None and history_lens is not None:
            after = torch.arange(1, steps + 1, device=device)[:, None]
            read = pool.at(slots, ring_slot(history_lens, 0, pool.ring))
            write = pool.at(slots, ring_slot(history_lens, after, pool.ring))
        else:
            read = pool.at(slots)
    if length is not None:
        live &= length > 0
        if write is not None:
            # Past its last token a row holds its last state, and stores it again where it already is.
            token = torch.arange(steps, device=device)[:, None]
            write = write.gather(0, torch.minimum(token, length - 1).clamp(min=0))
    fresh = None
    if history_lens is not None:
        live &= history_lens >= 0
        fresh = (history_lens == 0) & live
    read = read * live
    return StepRows(live, length, start, read, None if write is None else write * live, fresh)


def prepare(x: Tokens, plan: StepRows, donor: Tensor, idle: Tensor, steps: int, options: Options) -> StepInputs:
    """Gather the tokens of each row's donor, and compute in fp32 what each needs besides the state.

    Args:
        x: packed [T, ...] or dense [N, Q, ...]; tokens are counted in this order.
        plan: of the step.
        donor: int64 [N], the row whose tokens each row takes.
        idle: bool [N], rows whose state must stay as it is.
        steps: Q.
        options: of the rule.
    """
    *lead, heads, values = x.v.shape
    total, keys, group = math.prod(lead), x.q.shape[-1], heads // x.q.shape[-2]
    q, k = (x.q, x.k) if group == 1 else (y.repeat_interleave(group, -2) for y in (x.q, x.k))
    g = x.g if x.g.dim() == x.v.dim() else x.g[..., None]
    # The row behind the last token stands for a token that leaves a state as it is: s · exp(-0.0) + (-0.0)(0.0) is s
    # bit for bit, -0.0 included.
    packed = torch.empty(total + 1, heads, 2 * keys + values + g.shape[-1] + 1, dtype=torch.float32, device=q.device)
    packed[total].fill_(-0.0)
    tokens = packed[:total].view(*lead, heads, -1)
    torch.cat((k, q, x.v, g, x.beta[..., None]), -1, out=tokens)

    step = torch.arange(steps, device=q.device)[:, None]
    still = idle if plan.length is None else idle | (step >= plan.length.index_select(0, donor))
    token = torch.where(still, total, plan.start.index_select(0, donor) + step).flatten()
    # As in the packed inputs, a token's heads side by side.
    packed = packed.index_select(0, token).view(steps, -1, packed.shape[2])
    moving = row_mask(token != total, torch.float32).view(steps, -1, 1)

    kq, v, g, beta = packed.split((2 * keys, values, g.shape[-1], 1), 2)
    kq = kq.unflatten(2, (2, keys))
    if options.use_qk_l2norm:
        kq = l2norm(kq)
    kq[:, :, 1].mul_(options.scale)
    dot = (kq[:, :, 0] * kq[:, :, 1]).sum(-1, keepdim=True)
    decay = g.exp().unsqueeze(2 if options.state_v_first else 3)
    return StepInputs(kq, v, beta, decay, dot, moving)


def state_blocks(rows: int, heads: int, values: int, keys: int, limit: int) -> StateBlocks:
    """Cut the states of a step into blocks of at most about `limit` bytes in fp32."""

    def cut(total: int, step: int) -> list[slice]:
        return [slice(i, min(i + step, total)) for i in range(0, total, step)]

    per_row = heads * values * keys * 4
    if limit >= per_row:
        count = -(-rows // (limit // per_row))
        sizes = [n.stop - n.start for n in cut(rows, -(-rows // count))]
        return StateBlocks(sizes, [slice(0, heads)], [slice(0, values)])
    channels = max(1, limit // (keys * 4))
    return StateBlocks([1] * rows, cut(heads, max(1, channels // values)), cut(values, channels))


def step_state(state: Tensor, x: StepInputs, v_first: bool, o: Tensor) -> None:
    """Advance states by one token, in place.

    Args:
        state: fp32 [m, V, K] (v_first) or [m, K, V], mutated.
        x: the inputs of the token for these m states, without the leading Q; `moving` by row.
        v_first: the orientation.
        o: [m, V], written.
    """
    state.mul_(x.decay)
    s_k, s_q = torch.bmm(x.kq, state.transpose(1, 2) if v_first else state).unbind(1)
    u = torch.sub(x.v, s_k).mul_(x.beta)
    # Whatever the state holds, u is 0.0 and the key -0.0 where the state must stay.
    u.view(torch.int32).view(x.moving.shape[0], -1).bitwise_and_(x.moving)
    key = x.kq[:, 0]
    if v_first:
        state.addcmul_(u[:, :, None], key[:, None])
    else:
        state.addcmul_(key[:, :, None], u[:, None])
    torch.addcmul(s_q, x.dot, u, out=o)


def run_steps(x: Tokens, pool: FlatPool, plan: StepRows, steps: int, options: Options) -> Tensor:
    """Run Q steps over N rows of inputs [T, ...] or [N, Q, ...]; returns o [Q, N, HV, V] and mutates the pool."""
    rows, (heads, values) = plan.read.shape[0], x.v.shape[-2:]
    keys, dtype, stored_dtype = x.q.shape[-1], x.v.dtype, pool.view.dtype
    # A 16-bit pool needs the stored form of a block beside its fp32 form.
    copies = 1 if stored_dtype == torch.float32 else 2
    state_bytes = rows * heads * values * keys * stored_dtype.itemsize
    limit = min(BLOCK_BYTES, state_bytes // (BLOCK_FRACTION * copies))
    if state_bytes <= SMALL_BYTES:
        limit = rows * heads * values * keys * 4
    blocks = state_blocks(rows, heads, values, keys, limit)

    # A row that is not live repeats a live one of its block, so that its write changes nothing.
    donor = donor_rows(plan.live, blocks.rows[0])
    idle = ~plan.live.index_select(0, donor)
    inputs = prepare(x, plan, donor, idle, steps, options)
    del x
    read = plan.read.index_select(0, donor)
    write = None if plan.write is None else plan.write.index_select(1, donor)
    clear = None if plan.fresh is None else row_mask(~plan.fresh.index_select(0, donor), stored_dtype)
    keep = None if copies == 1 else row_mask(idle, stored_dtype)
    o = torch.empty(steps, rows * heads, values, dtype=torch.float32, device=pool.view.device)

    v_dim = 2 if options.state_v_first else 3
    first = 0
    for size in blocks.rows:
        block = slice(first, first + size)
        first += size
        clear_mask, keep_mask = (None if m is None else m[block] for m in (clear, keep))
        for hs in blocks.heads:
            at = slice(block.start * heads + hs.start, (block.stop - 1) * heads + hs.stop)
            for vs in blocks.values:
                view = pool.view[:, hs].narrow(v_dim, vs.start, vs.stop - vs.start)
                stored = read_stored(view, read[block], clear_mask)
                states = stored.float()
                state = states.flatten(0, 1)
                for t in range(steps):
                    step_state(state, inputs.at(t, block, at, vs), options.state_v_first, o[t, at, vs])
                    if write is not None or t == steps - 1:
                        place = read[block] if write is None else write[t, block]
                        write_state(view, place, states, stored, keep_mask)
                # Otherwise this block would stay alive while the next one is read.
                del stored, states, state
    o = o.view(steps, rows, heads, values)
    o.view(torch.int32).bitwise_and_(row_mask(plan.live, torch.float32)[..., 0])
    return o.to(dtype)


def run_packed_steps(
    x: Tokens,
    pool: FlatPool,
    cu_seqlens: Tensor,
    state_indices: Tensor | None,
    history_lens: Tensor | None,
    num_accepted_tokens: Tensor | None,
    capacity: int,
    options: Options,
) -> Tensor:
    """Run rows of different lengths, none longer than `capacity`; returns o [T, HV, V]."""
    rows, tokens = cu_seqlens.shape[0] - 1, x.q.shape[0]
    steps = min(capacity, tokens)
    cu = cu_seqlens.long()
    start, length = cu[:-1], (cu[1:] - cu[:-1]).clamp(max=steps)
    plan = plan_rows(
        pool, rows, steps, state_indices, history_lens, num_accepted_tokens, start, length, options.pad_slot_id
    )
    o = run_steps(x, pool, plan, steps, options)
    owner = row_of_token(cu, tokens)
    inside = owner < rows
    owner = torch.where(inside, owner, 0)
    position = torch.arange(tokens, device=cu.device) - cu[owner]
    inside &= position < steps
    packed = o.flatten(0, 1).index_select(0, position.clamp(0, steps - 1) * rows + owner)
    return torch.where(inside[:, None, None], packed, 0)


def update(
    x: Tokens,
    state: Tensor,
    state_indices: Tensor | None,
    history_lens: Tensor | None,
    num_accepted_tokens: Tensor | None,
    cu_seqlens: Tensor | None,
    options: Options,
    head_terms: HeadTerms,
) -> Tensor:
    """Run a decode or verify step of a rule; `head_terms` serves packed rows of any length, which go in chunks.

    Returns o of v's shape and dtype; `state` (a pool as in `dlinfer_ext.ops.gated_delta_rule`) is mutated.
    """
    rows = x.q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if x.v.numel() == 0 or state.shape[0] == 0 or rows == 0:
        return torch.zeros_like(x.v, memory_format=torch.contiguous_format)
    pool = flatten_pool(state)
    if cu_seqlens is None:
        steps = x.q.shape[1]
        start = torch.arange(0, rows * steps, steps, device=x.q.device)
        plan = plan_rows(
            pool, rows, steps, state_indices, history_lens, num_accepted_tokens, start, None, options.pad_slot_id
        )
        return run_steps(x, pool, plan, steps, options).transpose(0, 1).contiguous()
    capacity = pool.ring
    if state_indices is not None and state_indices.dim() == 2:
        capacity = state_indices.shape[1]
    if capacity is None:
        # Any row may hold any share of the tokens; short chunks keep the worst-case grid near one chunk per row.
        chunk = prev_power_of_2(min(32, max(4, 2 * (x.q.shape[0] // rows))))
        return scan_chunks(x, pool, cu_seqlens, state_indices, history_lens, None, chunk, options, head_terms)
    return run_packed_steps(x, pool, cu_seqlens, state_indices, history_lens, num_accepted_tokens, capacity, options)
