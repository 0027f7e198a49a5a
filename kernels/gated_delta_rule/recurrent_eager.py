"""Gated delta rule one token at a time, batched over rows: decode and verify. No host read.

The state is taken block by block (rows, and parts of a row when a row is large), so that a block stays in cache between
its read and its write and the extra memory stays a fraction of the state addressed. With S the state before a token and
d = exp(g), a block computes

    [S^T k, d S^T q] in one product;  u = beta (v - d S^T k);  S <- d S + k u^T;  o = d S^T q + (k·q) u

which is the recurrence with the decay moved behind the product (Yang et al., Gated Delta Networks, arXiv 2412.06464).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..common.index import row_of_token
from ..common.numerics import l2norm
from ..common.state_pool import (
    FlatPool,
    clear_rows,
    donor_rows,
    flatten_pool,
    live_slots,
    read_stored,
    ring_slot,
    write_state,
)
from .chunk_eager import scan_chunks
from .inputs import Options, Tokens

# Small enough to stay in a last-level cache, large enough that the calls cost little against the work.
BLOCK_BYTES = 4 << 20
# Of the state addressed, how much one block may take.
BLOCK_FRACTION = 7


@dataclass(frozen=True)
class StepRows:
    """Where the rows of a step read and write.

    Attributes:
        live: bool [N], rows that have a state; None if all have.
        length: int64 [N], tokens of each row; None if all have Q.
        read: int64 [N], flat place of the state before the step.
        write: int64 [N, Q] the place after each token, or [N, 1] the place after the last.
        each_token: which of the two.
        fresh: bool [N], rows that start from a zero state; None if none does.
        idle: bool [N], rows of a block without a live row; None if there can be none.
    """

    live: Tensor | None
    length: Tensor | None
    read: Tensor
    write: Tensor
    each_token: bool
    fresh: Tensor | None
    idle: Tensor | None = None


class StepInputs(NamedTuple):
    """The inputs of a step in fp32, step by step; M = rows · HV, a row's heads side by side.

    Attributes:
        kq: [Q, M, 2, K], the key and the scaled query times the decay.
        bv: [Q, M, V], beta · v.
        bd: [Q, M, 1], beta · decay.
        decay: [Q, M, 1].
        dot: [Q, M, 1], key · scaled query.
        still: bool [Q, M, 1], where the state must stay as it is (decay and key are 1); None if nowhere.
    """

    kq: Tensor
    bv: Tensor
    bd: Tensor
    decay: Tensor
    dot: Tensor
    still: Tensor | None

    def of_heads(self, first: int, last: int) -> list[StepInputs]:
        """Return the inputs of the heads first..last-1 of M, one item per token."""
        tensors = (self.kq, self.bv, self.bd, self.decay, self.dot)
        stills = [None] * self.bv.shape[0] if self.still is None else self.still[:, first:last].unbind()
        per_token = zip(*(y[:, first:last].unbind() for y in tensors), stills, strict=True)
        return [StepInputs(*token) for token in per_token]


class Block(NamedTuple):
    """States taken at once: some rows, or some heads or value channels of one row."""

    rows: slice
    heads: slice
    values: slice


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
    length: Tensor | None,
    pad_slot_id: int,
) -> StepRows:
    """Work out which rows are live, and the places that each reads and writes; a row that is not live has place 0."""
    device = pool.view.device
    token = torch.arange(steps, device=device)
    alive: list[Tensor] = [] if length is None else [length > 0]
    slots = torch.arange(rows, device=device) if state_indices is None else state_indices
    each_token = slots.dim() == 2 or pool.ring is not None
    if slots.dim() == 2:
        column = accepted_column(num_accepted_tokens, rows, slots.shape[1], device)
        source, target = slots.gather(1, column[:, None])[:, 0], slots[:, :steps]
        target_ok = live_slots(target, pad_slot_id)
        if length is not None:
            target_ok |= token >= length[:, None]
        alive += [live_slots(source, pad_slot_id), target_ok.all(1)]
        read, write = pool.at(source), pool.at(target)
    else:
        if state_indices is not None:
            alive.append(live_slots(slots, pad_slot_id))
        read = pool.at(slots)
        write = read[:, None]
        if pool.ring is not None and history_lens is not None:
            read = pool.at(slots, ring_slot(history_lens, 0, pool.ring))
            write = pool.at(slots[:, None], ring_slot(history_lens[:, None], token + 1, pool.ring))
    fresh = None
    if history_lens is not None:
        alive.append(history_lens >= 0)
        fresh = history_lens == 0
    if length is not None:
        # Past its last token a row holds its last state, and stores it again where it already is.
        write = write.gather(1, torch.minimum(token, length[:, None] - 1).clamp(min=0))
    if not alive:
        return StepRows(None, length, read, write, each_token, fresh)
    live = alive[0]
    for ok in alive[1:]:
        live = live & ok
    fresh = None if fresh is None else fresh & live
    return StepRows(live, length, read * live, write * live[:, None], each_token, fresh)


def repeat_donors(plan: StepRows, tokens: Tokens, block: int) -> tuple[StepRows, Tokens, Tensor | None]:
    """Let each row that is not live repeat a live row of its block of rows, so that its write changes nothing.

    Args:
        plan: of the step.
        tokens: [Q, N, ...].
        block: rows per block of states.

    Returns:
        The plan and the inputs by donor (the plan's `live` and `length` stay as they were), and bool [Q, N] where a row
        must leave its state as it is: rows of a block without a live row, and tokens past a row's end.
    """
    if plan.live is None:
        return plan, tokens, None
    donor = donor_rows(plan.live, block)
    steps = tokens.q.shape[0]
    idle = ~plan.live.index_select(0, donor)
    still = idle.expand(steps, -1)
    if plan.length is not None:
        token = torch.arange(steps, device=donor.device)[:, None]
        still = still | (token >= plan.length.index_select(0, donor))
    fresh = None if plan.fresh is None else plan.fresh.index_select(0, donor)
    read, write = plan.read.index_select(0, donor), plan.write.index_select(0, donor)
    by_donor = StepRows(plan.live, plan.length, read, write, plan.each_token, fresh, idle)
    return by_donor, tokens.map(lambda x: x.index_select(1, donor)), still


def prepare(x: Tokens, still: Tensor | None, options: Options) -> StepInputs:
    """Compute in fp32 what a step needs besides the state; inputs [Q, N, ...], still bool [Q, N]."""
    steps, rows, heads, keys = x.q.shape
    value_heads = x.v.shape[2]
    q, k, beta = x.q.float(), x.k.float(), x.beta.float()
    decay = torch.exp(x.g.float())
    if options.use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    if still is not None:
        k = torch.where(still[:, :, None, None], 1.0, k)
        decay = torch.where(still[:, :, None], 1.0, decay)
        still = still[:, :, None].expand(-1, -1, value_heads).reshape(steps, -1, 1)
    kq = torch.empty(steps, rows, heads, value_heads // heads, 2, keys, dtype=torch.float32, device=k.device)
    kq[..., 0, :] = k[:, :, :, None]
    torch.mul(q[:, :, :, None], (decay * options.scale).view(*kq.shape[:4], 1), out=kq[..., 1, :])
    dot = (k * q).sum(-1, keepdim=True).mul_(options.scale).expand(*kq.shape[:4])
    bv = (x.v.float() * beta[..., None]).flatten(1, 2)
    bd, decay, dot = (y.reshape(steps, -1, 1) for y in (beta * decay, decay, dot))
    return StepInputs(kq.flatten(1, 3), bv, bd, decay, dot, still)


def state_blocks(rows: int, heads: int, values: int, keys: int, limit: int) -> tuple[int, list[Block]]:
    """Cut the states of a step into blocks of at most about `limit` bytes in fp32.

    Returns:
        How many rows a block may span, and the blocks; a row is cut only if it is too large for a block.
    """
    per_row = heads * values * keys * 4
    whole = slice(0, heads), slice(0, values)
    if limit >= per_row:
        step = min(rows, limit // per_row)
        return step, [Block(slice(n, min(n + step, rows)), *whole) for n in range(0, rows, step)]
    channels = max(1, limit // (keys * 4))
    step = max(1, channels // values)
    head_parts = [slice(h, min(h + step, heads)) for h in range(0, heads, step)]
    value_parts = [slice(v, min(v + channels, values)) for v in range(0, values, channels)]
    return 1, [Block(slice(n, n + 1), h, v) for n in range(rows) for h in head_parts for v in value_parts]


def step_state(state: Tensor, x: StepInputs, values: slice, v_first: bool) -> tuple[Tensor, Tensor]:
    """Advance states by one token, in place.

    Args:
        state: fp32 [m, V', K] (v_first) or [m, K, V'], mutated.
        x: the inputs of one token and of these m states.
        values: the value channels V' that `state` holds.
        v_first: the orientation.

    Returns:
        (u, d S^T q), each [m, V'].
    """
    y = torch.bmm(x.kq, state.transpose(1, 2) if v_first else state)
    u = torch.addcmul(x.bv[:, values], x.bd, y[:, 0], value=-1)
    if x.still is not None:
        # x · 1 + (-0.0) is x bit for bit, whatever an untouched state holds.
        u = torch.where(x.still, -0.0, u)
    state.mul_(x.decay[..., None])
    if v_first:
        state.addcmul_(u[..., None], x.kq[:, :1])
    else:
        state.addcmul_(x.kq[:, 0, :, None], u[:, None])
    return u, y[:, 1]


def run_steps(x: Tokens, pool: FlatPool, plan: StepRows, options: Options) -> Tensor:
    """Run Q steps over N rows of inputs [Q, N, ...]; returns o [Q, N, HV, V] and mutates the pool."""
    steps, rows, heads, values = x.v.shape
    keys, v_first, dtype = x.q.shape[-1], options.state_v_first, x.v.dtype
    # A 16-bit pool needs the stored form of a block beside its fp32 form.
    copies = 1 if pool.view.dtype == torch.float32 else 2
    state_bytes = rows * heads * values * keys * pool.view.element_size()
    limit = min(BLOCK_BYTES, state_bytes // (BLOCK_FRACTION * copies))
    span, blocks = state_blocks(rows, heads, values, keys, limit)
    plan, x, still = repeat_donors(plan, x, span)
    inputs = prepare(x, still, options)
    del x
    o = torch.empty_like(inputs.bv)
    for block in blocks:
        n, hs, vs = block
        view = pool.view[:, hs, vs] if v_first else pool.view[:, hs, :, vs]
        idle = None if plan.idle is None else plan.idle[n]
        stored = read_stored(view, plan.read[n], None if plan.fresh is None else plan.fresh[n])
        states, kept = stored.float(), None
        if states is not stored and idle is not None:
            kept = clear_rows(stored, ~idle)
        state = states.flatten(0, 1)
        first, last = n.start * heads + hs.start, (n.stop - 1) * heads + hs.stop
        for t, token in enumerate(inputs.of_heads(first, last)):
            u, y = step_state(state, token, vs, v_first)
            torch.addcmul(y, token.dot, u, out=o[t, first:last, vs])
            if plan.each_token:
                write_state(view, plan.write[n, t], states, kept, idle)
        if not plan.each_token:
            write_state(view, plan.write[n, 0], states, kept, idle)
    o = o.view(steps, rows, heads, values)
    if plan.live is not None:
        o = torch.where(plan.live[:, None, None], o, 0.0)
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
    # Past its end a row repeats its last token, so that nothing of another row enters.
    offset = torch.minimum(torch.arange(steps, device=cu.device)[:, None], length - 1).clamp(min=0)
    grid = (start + offset).clamp(max=tokens - 1).flatten()
    plan = plan_rows(pool, rows, steps, state_indices, history_lens, num_accepted_tokens, length, options.pad_slot_id)
    o = run_steps(x.map(lambda t: t.index_select(0, grid).unflatten(0, (steps, rows))), pool, plan, options)
    owner = row_of_token(cu, tokens)
    inside = owner < rows
    owner = torch.where(inside, owner, 0)
    position = torch.arange(tokens, device=cu.device) - cu[owner]
    inside &= position < steps
    packed = o.flatten(0, 1).index_select(0, position.clamp(0, steps - 1) * rows + owner)
    return torch.where(inside[:, None, None], packed, 0)


def gated_delta_rule_update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    state_indices: Tensor | None,
    history_lens: Tensor | None,
    num_accepted_tokens: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    use_qk_l2norm: bool,
    state_v_first: bool,
    pad_slot_id: int,
) -> Tensor:
    """Batched form of `dlinfer_ext.ops.gated_delta_rule.gated_delta_rule_update`."""
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if v.numel() == 0 or state.shape[0] == 0 or rows == 0:
        return torch.zeros_like(v, memory_format=torch.contiguous_format)
    x, options = Tokens(q, k, v, g, beta), Options(scale, use_qk_l2norm, state_v_first, pad_slot_id)
    pool = flatten_pool(state)
    if cu_seqlens is None:
        plan = plan_rows(pool, rows, q.shape[1], state_indices, history_lens, num_accepted_tokens, None, pad_slot_id)
        return run_steps(x.map(lambda t: t.transpose(0, 1)), pool, plan, options).transpose(0, 1).contiguous()
    capacity = pool.ring
    if state_indices is not None and state_indices.dim() == 2:
        capacity = state_indices.shape[1]
    if capacity is None:
        # Any row may hold any share of the tokens; short chunks keep the worst-case grid near one chunk per row.
        chunk = min(32, max(4, 2 * (q.shape[0] // rows)))
        return scan_chunks(x, pool, cu_seqlens, state_indices, history_lens, None, chunk, options)
    return run_packed_steps(x, pool, cu_seqlens, state_indices, history_lens, num_accepted_tokens, capacity, options)
