"""Gated delta rule in chunks: prefill of a packed batch. No host read when the row lengths are given.

The chunked form of Yang et al. (Gated Delta Networks, arXiv 2412.06464; the delta rule's is arXiv 2406.06484). Within a
chunk of C tokens, with S the state before it, c_i the sum of the gates up to token i, D_ij = exp(c_i - c_j) for j <= i
and 0 above:

    (I + strictly lower(beta_i k_i·k_j D_ij)) U = beta (v - exp(c) (k S))
    o = exp(c) (q S) + lower(q_i·k_j D_ij) U        S <- exp(c_C) S + sum_j exp(c_C - c_j) k_j u_j^T

What does not depend on S is computed for all chunks at once; the scan then advances all rows by one chunk at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..common.chunks import ChunkGrid, chunk_grid
from ..common.numerics import l2norm
from ..common.state_pool import FlatPool, flatten_pool, live_slots, read_stored, ring_slot, row_mask, write_live_state
from .inputs import Options, Tokens

CHUNK = 32
# Of the gathered inputs of one block of heads; keeps a block's work in cache.
BLOCK_BYTES = 20 << 20


def segment_decay(g: Tensor) -> Tensor:
    """Return [..., C, C] with exp(g_{j+1} + ... + g_i) at (i, j) for j <= i, and 0 above the diagonal.

    The gates are summed directly: a difference of two running sums loses the small gates that follow a large one, and
    is inf - inf after a gate of -inf. Above the diagonal the sum is empty, so the exponential cannot overflow there.
    """
    size = g.shape[-1]
    sums = g[..., :, None].expand(*g.shape, size).tril(-1).cumsum(-2)
    return sums.exp_().tril_()


def unit_lower_inverse(a: Tensor) -> Tensor:
    """Return (I + strictly lower part of a)^-1 for a [M, C, C]."""
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
    inverse: Tensor = torch.linalg.solve_triangular(a, eye, upper=False, unitriangular=True)
    return inverse


def gather_chunks(x: Tensor, grid: ChunkGrid, out: Tensor) -> Tensor:
    """Copy packed tokens [T, h, X] into chunks [NC, h, C, X] of another dtype."""
    chunks, heads, size, width = out.shape
    return out.copy_(x.index_select(0, grid.token).view(chunks, size, heads, width).transpose(1, 2))


def gather_gate(x: Tensor, grid: ChunkGrid) -> Tensor:
    """Return [NC, HV, C] in fp32 of packed gates [T, HV]; 0 past a row's end, so that such a position is neutral."""
    gate = x.float().index_select(0, grid.token).view(*grid.valid.shape, -1)
    return torch.where(grid.valid[..., None], gate, 0.0).transpose(1, 2).contiguous()


class ChunkTerms(NamedTuple):
    """What chunks need besides the state; M = chunks · heads.

    Attributes:
        qk: [M, 2C, K], scaled queries above keys.
        t: [M, C, C], (I + strictly lower(beta_i k_i·k_j D_ij))^-1.
        p: [M, C, C], q_i·k_j D_ij, lower triangular.
        bv: [M, C, V], beta · v; the scan overwrites it.
        start: [M, C, 1], exp of the gates summed from the chunk's start.
        bstart: [M, C, 1], beta · start.
        end: [M, C, 1], exp of the gates that follow a token in the chunk.
    """

    qk: Tensor
    t: Tensor
    p: Tensor
    bv: Tensor
    start: Tensor
    bstart: Tensor
    end: Tensor

    def split_ranks(self, sizes: Sequence[int]) -> list[ChunkTerms]:
        return [ChunkTerms(*part) for part in zip(*(y.split(sizes) for y in self), strict=True)]


def scan_rank(state: Tensor, x: ChunkTerms, v_first: bool) -> Tensor:
    """Advance states, fp32 [M, V, K] (v_first) or [M, K, V], by one chunk, in place; returns o [M, C, V]."""
    size = x.bv.shape[1]
    k = x.qk[:, size:]
    y = torch.bmm(x.qk, state.transpose(1, 2) if v_first else state)
    u = torch.bmm(x.t, x.bv.addcmul_(y[:, size:], x.bstart, value=-1))
    o = torch.mul(y[:, :size], x.start, out=x.bv).baddbmm_(x.p, u)
    u.mul_(x.end)
    state.mul_(x.start[:, -1:])
    if v_first:
        state.baddbmm_(u.transpose(1, 2), k)
    else:
        state.baddbmm_(k.transpose(1, 2), u)
    return o


def head_blocks(positions: int, heads: int, keys: int, values: int) -> list[slice]:
    """Return blocks of query/key heads whose gathered inputs take about BLOCK_BYTES."""
    per_head = max(1, positions * 2 * (keys + values) * 4)
    step = max(1, min(heads, BLOCK_BYTES // per_head))
    return [slice(h, min(h + step, heads)) for h in range(0, heads, step)]


def state_places(
    pool: FlatPool,
    cu_seqlens: Tensor,
    state_indices: Tensor | None,
    history_lens: Tensor | None,
    pad_slot_id: int,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return (read, write, fresh, live) of the rows; the places of a row that is not live are 0."""
    length = cu_seqlens[1:] - cu_seqlens[:-1]
    live = length > 0
    slots = torch.arange(length.shape[0], device=length.device) if state_indices is None else state_indices
    live &= live_slots(slots, pad_slot_id)
    fresh = None
    read = write = pool.at(slots)
    if history_lens is not None:
        live &= history_lens >= 0
        fresh = (history_lens == 0) & live
        if pool.ring is not None:
            read = pool.at(slots, ring_slot(history_lens, 0, pool.ring))
            write = pool.at(slots, ring_slot(history_lens, length, pool.ring))
    return read * live, write * live, fresh, live


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    state_indices: Tensor | None,
    history_lens: Tensor | None,
    scale: float,
    use_qk_l2norm: bool,
    state_v_first: bool,
    pad_slot_id: int,
    host_lengths: list[int] | None,
) -> Tensor:
    """Batched form of `dlinfer_ext.ops.gated_delta_rule.gated_delta_rule`."""
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist() if host_lengths is None else host_lengths
    x, options = Tokens(q, k, v, g, beta), Options(scale, use_qk_l2norm, state_v_first, pad_slot_id)
    return scan_chunks(x, flatten_pool(state), cu_seqlens, state_indices, history_lens, tuple(lengths), CHUNK, options)


def scan_chunks(
    x: Tokens,
    pool: FlatPool,
    cu_seqlens: Tensor,
    state_indices: Tensor | None,
    history_lens: Tensor | None,
    lengths: tuple[int, ...] | None,
    size: int,
    options: Options,
) -> Tensor:
    """Run the chunked form over a packed batch, with chunks of `size` tokens. Returns o [T, HV, V], mutates the pool.

    Without `lengths` the grid is laid out for the worst case of `cu_seqlens`, and nothing is read on the host.
    """
    tokens, heads, keys = x.q.shape
    value_heads, values = x.v.shape[1:]
    if tokens == 0 or cu_seqlens.shape[0] < 2 or pool.view.shape[0] == 0 or (lengths is not None and not any(lengths)):
        return torch.zeros_like(x.v, memory_format=torch.contiguous_format)
    if lengths is not None:
        size = min(size, 1 << (max(lengths) - 1).bit_length())
    grid = chunk_grid(cu_seqlens, tokens, size, lengths)
    read, write, fresh, live = state_places(pool, cu_seqlens, state_indices, history_lens, options.pad_slot_id)
    place = grid.place_of(live)
    read, write, live = read[grid.rows], write[grid.rows], live[grid.rows]
    clear = None if fresh is None else row_mask(~fresh[grid.rows], pool.view.dtype)
    gates, betas = gather_gate(x.g, grid), gather_gate(x.beta, grid)

    group, chunks, positions = value_heads // heads, grid.valid.shape[0], grid.valid.numel()
    pool_view = pool.view.unflatten(1, (heads, group))
    out = torch.empty(x.v.shape, dtype=x.v.dtype, device=x.v.device)
    for hs in head_blocks(positions, heads, keys, values):
        block = hs.stop - hs.start
        qk = torch.empty(chunks, block, 2 * size, keys, dtype=torch.float32, device=x.q.device)
        gather_chunks(x.q[:, hs], grid, qk[:, :, :size])
        gather_chunks(x.k[:, hs], grid, qk[:, :, size:])
        if options.use_qk_l2norm:
            qk = l2norm(qk)
        qk[:, :, :size].mul_(options.scale)
        scores = qk @ qk[:, :, size:].transpose(-1, -2)
        bv = torch.empty(chunks, block, size, values, dtype=torch.float32, device=x.q.device)
        o = torch.empty(positions + 1, block, values, dtype=torch.float32, device=x.q.device)
        o[positions] = 0
        o_chunks = o[:positions].view(chunks, size, block, values).transpose(1, 2).split(grid.counts)
        for j in range(group):
            hv = slice(hs.start * group + j, hs.stop * group, group)
            b = betas[:, hv, :, None]
            decay = segment_decay(gates[:, hv])
            start = torch.exp(gates[:, hv].cumsum(-1))[..., None]
            t = unit_lower_inverse((scores[:, :, size:] * decay).mul_(b))
            end, p = decay[:, :, -1, :, None], decay.mul(scores[:, :, :size])
            gather_chunks(x.v[:, hv], grid, bv).mul_(b)
            view = pool_view[:, hs, j]
            state = read_stored(view, read, clear).float()
            terms = ChunkTerms(*(y.flatten(0, 1) for y in (qk, t, p, bv, start, b * start, end)))
            ranks = terms.split_ranks([n * block for n in grid.counts])
            for n, o_part, rank in zip(grid.counts, o_chunks, ranks, strict=True):
                o_part.copy_(scan_rank(state[:n].flatten(0, 1), rank, options.state_v_first).view_as(o_part))
            write_live_state(view, write, state, live)
            out[:, hv] = o.index_select(0, place)
    return out
