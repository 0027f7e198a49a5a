"""Gated delta rule one token at a time, batched over rows: decode and verify. No host read.

The state is taken block by block (rows, and parts of a row when a row is large), so that a block stays in cache between
its read and its write and the extra memory stays a fraction of the state addressed. With S the state before a token and
d = exp(g), a block computes

    [S^T k, d S^T q] in one product;  u = beta (v - d S^T k);  S <- d S + k u^T;  o = d S^T q + (k·q) u

which is the recurrence with the decay moved behind the product (Yang et al., Gated Delta Networks, arXiv 2412.06464).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..common.index import row_of_token
from ..common.numerics import l2norm
from ..common.state_pool import (
    FlatPool,
    donor_rows,
    flatten_pool,
    live_slots,
    read_stored,
    ring_slot,
    row_mask,
    write_state,
)
from .chunk_eager import scan_chunks
from .inputs import Options, Tokens

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
        live: bool [N], rows that have a state; None if all have.
        length: int64 [N], tokens of each row; None if all have Q.
        read: int64 [N], flat place of the state before the step.
        write: int64 [Q, N] the place after each token, or [1, N] the place after the last.
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
    """The inputs of a token in fp32; M = rows · HV, a row's heads side by side.

    Attributes:
        kq: [M, 2, K], the key and the scaled query times the decay.
        bv: [M, V], beta · v.
        bd: [M, 1], beta · decay.
        decay: [M, 1, 1].
        dot: [M, 1], key · scaled query.
        moving: int32 [M, 1], all bits set, but none where the state must stay as it is (there the decay is 1 and the
            key -0.0); None if all move.
    """

    kq: Tensor
    bv: Tensor
    bd: Tensor
    decay: Tensor
    dot: Tensor
    moving: Tensor | None

    def split(self, sizes: Sequence[int]) -> list[StepInputs]:
        """Return the inputs of consecutive runs of M."""
        if len(sizes) == 1:
            return [self]
        moving = [None] * len(sizes) if self.moving is None else self.moving.split(sizes)
        tensors = (self.kq, self.bv, self.bd, self.decay, self.dot)
        return [StepInputs(*part) for part in zip(*(x.split(sizes) for x in tensors), moving, strict=True)]


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
    length: Tensor | None,
    pad_slot_id: int,
) -> StepRows:
    """Work out which rows are live, and the places that each reads and writes; a row that is not live has place 0."""
    device = pool.view.device
    alive: list[Tensor] = [] if length is None else [length > 0]
    slots = torch.arange(rows, device=device) if state_indices is None else state_indices
    write: Tensor | None = None
    if slots.dim() == 2:
        column = accepted_column(num_accepted_tokens, rows, slots.shape[1], device)
        source, target = slots.gather(1, column[:, None])[:, 0], slots[:, :steps].t()
        target_ok = live_slots(target, pad_slot_id)
        if length is not None:
            target_ok |= torch.arange(steps, device=device)[:, None] >= length
        alive += [live_slots(source, pad_slot_id), target_ok.all(0)]
        read, write = pool.at(source), pool.at(target)
    else:
        if state_indices is not None:
            alive.append(live_slots(slots, pad_slot_id))
        if pool.ring is not None and history_lens is not None:
            after = torch.arange(1, steps + 1, device=device)[:, None]
            read = pool.at(slots, ring_slot(history_lens, 0, pool.ring))
            write = pool.at(slots, ring_slot(history_lens, after, pool.ring))
        else:
            read = pool.at(slots)
    fresh = None
    if history_lens is not None:
        alive.append(history_lens >= 0)
        fresh = history_lens == 0
    if length is not None and write is not None:
        # Past its last token a row holds its last state, and stores it again where it already is.
        token = torch.arange(steps, device=device)[:, None]
        write = write.gather(0, torch.minimum(token, length - 1).clamp(min=0))
    each_token = write is not None
    if not alive:
        return StepRows(None, length, read, read[None] if write is None else write, each_token, fresh)
    live = alive[0]
    for ok in alive[1:]:
        live = live & ok
    read = read * live
    write = read[None] if write is None else write * live
    return StepRows(live, length, read, write, each_token, None if fresh is None else fresh & live)


def repeat_donors(plan: StepRows, block: int) -> tuple[StepRows, Tensor | None]:
    """Let each row that is not live repeat a live row of its block of rows, so that its write changes nothing.

    Args:
        plan: of the step.
        block: rows per block of states.

    Returns:
        The plan by donor (its `live` and `length` stay as they were), and the donor of each row, or None if all rows
        are live.
    """
    if plan.live is None:
        return plan, None
    donor = donor_rows(plan.live, block)
    read = plan.read.index_select(0, donor)
    write = plan.write.index_select(1, donor) if plan.each_token else read[None]
    fresh = None if plan.fresh is None else plan.fresh.index_select(0, donor)
    idle = ~plan.live.index_select(0, donor)
    return StepRows(plan.live, plan.length, read, write, plan.each_token, fresh, idle), donor


def still_tokens(plan: StepRows, donor: Tensor | None, steps: int) -> Tensor | None:
    """Return bool [Q, N]: where a row must leave its state as it is, idle or past its end; None if nowhere."""
    if plan.idle is None or donor is None:
        return None
    still = plan.idle.expand(steps, -1)
    if plan.length is None:
        return still
    token = torch.arange(steps, device=donor.device)[:, None]
    return still | (token >= plan.length.index_select(0, donor))


def prepare(x: Tokens, donor: Tensor | None, still: Tensor | None, options: Options) -> list[StepInputs]:
    """Compute in fp32 what each token needs besides the state.

    Args:
        x: [Q, N, ...].
        donor: int64 [N] or None.
        still: bool [Q, N] or None.
        options: of the rule.
    """
    steps, _, heads, keys = x.q.shape
    group = x.v.shape[2] // heads

    def by_donor(y: Tensor) -> Tensor:
        return (y if donor is None else y.index_select(1, donor)).float()

    kq = by_donor(torch.stack((x.k, x.q), 3))
    decay, beta = torch.exp(by_donor(x.g)), by_donor(x.beta)
    if options.use_qk_l2norm:
        kq = l2norm(kq)
    moving: Tensor | list[None] = [None] * steps
    if still is not None:
        mask = still.to(torch.int32).sub_(1)
        key_bits = kq[..., 0, :].view(torch.int32)
        key_bits.bitwise_and_(mask[:, :, None, None])
        key_bits.bitwise_or_((~mask & torch.iinfo(torch.int32).min)[:, :, None, None])
        decay.masked_fill_(still[:, :, None], 1.0)
        moving = mask[:, :, None].expand(-1, -1, heads * group).reshape(steps, -1, 1)
    dot = (kq[..., 0, :] * kq[..., 1, :]).sum(-1).mul_(options.scale)
    if group > 1:
        kq = kq[:, :, :, None].expand(-1, -1, -1, group, -1, -1)
        dot = dot[..., None].expand(-1, -1, -1, group)
    kq = kq.reshape(steps, -1, 2, keys).contiguous()  # a view still, if one row has one key head
    bd = (beta * decay).reshape(steps, -1, 1)
    bv = (by_donor(x.v) * beta[..., None]).flatten(1, 2)
    decay = decay.reshape(steps, -1, 1)
    kq[:, :, 1].mul_(decay * options.scale)
    flat = zip(kq, bv, bd, decay[..., None], dot.reshape(steps, -1, 1), moving, strict=True)
    return [StepInputs(*token) for token in flat]


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
        x: the inputs of the token for these m states.
        v_first: the orientation.
        o: [m, V], written.
    """
    y = torch.bmm(x.kq, state.transpose(1, 2) if v_first else state)
    u = torch.addcmul(x.bv, x.bd, y[:, 0], value=-1)
    if x.moving is not None:
        # Where it is 0, k u^T is (-0.0)(0.0) = -0.0, and s · 1 + (-0.0) is s bit for bit, whatever the state holds.
        u.view(torch.int32).bitwise_and_(x.moving)
    state.mul_(x.decay)
    if v_first:
        state.addcmul_(u[:, :, None], x.kq[:, :1])
    else:
        state.addcmul_(x.kq[:, 0, :, None], u[:, None])
    torch.addcmul(y[:, 1], x.dot, u, out=o)


def run_steps(x: Tokens, pool: FlatPool, plan: StepRows, options: Options) -> Tensor:
    """Run Q steps over N rows of inputs [Q, N, ...]; returns o [Q, N, HV, V] and mutates the pool."""
    steps, rows, heads, values = x.v.shape
    keys, dtype, stored_dtype = x.q.shape[-1], x.v.dtype, pool.view.dtype
    # A 16-bit pool needs the stored form of a block beside its fp32 form.
    copies = 1 if stored_dtype == torch.float32 else 2
    state_bytes = rows * heads * values * keys * stored_dtype.itemsize
    limit = min(BLOCK_BYTES, state_bytes // (BLOCK_FRACTION * copies))
    if state_bytes <= SMALL_BYTES:
        limit = rows * heads * values * keys * 4
    blocks = state_blocks(rows, heads, values, keys, limit)
    plan, donor = repeat_donors(plan, blocks.rows[0])
    sizes = [n * (hs.stop - hs.start) for n in blocks.rows for hs in blocks.heads]
    inputs = [token.split(sizes) for token in prepare(x, donor, still_tokens(plan, donor, steps), options)]
    del x
    o = torch.empty(steps, rows * heads, values, dtype=torch.float32, device=pool.view.device)
    outputs = [token.split(sizes) if len(sizes) > 1 else (token,) for token in o]

    v_dim = 2 if options.state_v_first else 3
    views = [
        (j, vs, pool.view[:, hs].narrow(v_dim, vs.start, vs.stop - vs.start))
        for j, hs in enumerate(blocks.heads)
        for vs in blocks.values
    ]
    none: list[Tensor | None] = [None] * len(blocks.rows)
    clear = none if plan.fresh is None else row_mask(~plan.fresh, stored_dtype).split(blocks.rows)
    keep = none if plan.idle is None or copies == 1 else row_mask(plan.idle, stored_dtype).split(blocks.rows)
    places = zip(plan.read.split(blocks.rows), plan.write.split(blocks.rows, 1), clear, keep, strict=True)
    for i, (read, write, clear_mask, keep_mask) in enumerate(places):
        for j, vs, view in views:
            stored = read_stored(view, read, clear_mask)
            states = stored.float()
            state = states.flatten(0, 1)
            for t in range(steps):
                at = i * len(blocks.heads) + j
                token, out = inputs[t][at], outputs[t][at]
                if len(blocks.values) > 1:
                    token, out = token._replace(bv=token.bv[:, vs]), out[:, vs]
                step_state(state, token, options.state_v_first, out)
                if plan.each_token or t == steps - 1:
                    write_state(view, write[t if plan.each_token else 0], states, stored, keep_mask)
            # Otherwise this block would stay alive while the next one is read.
            del stored, states, state
    o = o.view(steps, rows, heads, values)
    if plan.live is not None:
        o.view(torch.int32).bitwise_and_(row_mask(plan.live, torch.float32).view(-1, 1, 1))
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
