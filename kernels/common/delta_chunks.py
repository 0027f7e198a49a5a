"""Delta rules in chunks: prefill of a packed batch. No host read when the row lengths are given.

The chunked form of the delta rule (Yang et al., arXiv 2406.06484) and its gated kinds (arXiv 2412.06464, 2510.26692).
Within a chunk of C tokens, with S [K, V] the state before it, D_ij the decay of the tokens j+1 .. i (a number, or one
for each key channel) and k_i·D_ij·k_j the product over the channels, decayed:

    (I + strictly lower(beta_i k_i·D_ij·k_j)) U = beta (v - (D k) S)          D: the decay from the chunk's start
    o = (D q) S + lower(q_i·D_ij·k_j) U        S <- D_C S + sum_j (D_Cj k_j) u_j^T

What does not depend on S is computed for all chunks at once, by each rule in its own way (`HeadTerms`); the scan then
advances all rows by one chunk at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .chunks import ChunkGrid, chunk_grid
from .delta_inputs import Options, Tokens
from .numerics import l2norm
from .state_pool import FlatPool, live_slots, read_stored, ring_slot, row_mask, write_live_state

# Of the gathered inputs of one block of heads; keeps a block's work in cache.
BLOCK_BYTES = 20 << 20


class ChunkTerms(NamedTuple):
    """What chunks need besides the state; M = chunks · heads.

    A decay per head is left to factors of the results, as it is cheaper there; one per channel is in the operands.

    Attributes:
        read: [M, 2C, K], for each token what reads the state for its query (scaled), then for its key.
        key: [M, C, K], what a token writes under.
        t: [M, C, C], (I + strictly lower(beta_i k_i·D_ij·k_j))^-1.
        p: [M, C, C], q_i·D_ij·k_j, lower triangular.
        bv: [M, C, V], beta · v; the scan overwrites it.
        bstart: [M, C, 1], beta, times the decay from the chunk's start if `read` does not hold it.
        total: [M, 1, 1] or [M, 1, K], the decay of the state over the chunk.
        start: [M, C, 1], the decay from the chunk's start; None if `read` holds it.
        end: [M, C, 1], the decay that follows a token in the chunk; None if `key` holds it.
    """

    read: Tensor
    key: Tensor
    t: Tensor
    p: Tensor
    bv: Tensor
    bstart: Tensor
    total: Tensor
    start: Tensor | None = None
    end: Tensor | None = None

    def flat(self) -> ChunkTerms:
        """Return terms [chunks, heads, ...] as [M, ...]."""
        return ChunkTerms(*(None if y is None else y.flatten(0, 1) for y in self))  # type: ignore[arg-type]

    def split_ranks(self, sizes: Sequence[int]) -> list[ChunkTerms]:
        parts = ([None] * len(sizes) if y is None else y.split(sizes) for y in self)
        return [ChunkTerms(*part) for part in zip(*parts, strict=True)]


# Given gates [NC, h, C] or [NC, h, C, K], beta [NC, h, C, 1] and beta · v [NC, h, C, V], return terms [NC, h, ...].
ValueTerms = Callable[[Tensor, Tensor, Tensor], ChunkTerms]
# Given queries (scaled) and keys [NC, h, C, 2, K], return what makes the terms of one value head for each of h heads;
# it is called once for each value head of a group. Neither may change what it is given.
HeadTerms = Callable[[Tensor], ValueTerms]


def unit_lower_inverse(a: Tensor) -> Tensor:
    """Return (I + strictly lower part of a)^-1 for a [.., C, C]."""
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
    inverse: Tensor = torch.linalg.solve_triangular(a, eye, upper=False, unitriangular=True)
    return inverse


def gather_chunks(x: Tensor, grid: ChunkGrid, out: Tensor) -> Tensor:
    """Copy packed tokens [T, h, X] into chunks [NC, h, C, X] of another dtype."""
    chunks, heads, size, width = out.shape
    return out.copy_(x.index_select(0, grid.token).view(chunks, size, heads, width).transpose(1, 2))


def gather_gate(x: Tensor, grid: ChunkGrid) -> Tensor:
    """Return [NC, h, C] or [NC, h, C, K] in fp32 of packed gates [T, h] or [T, h, K].

    It is 0 past a row's end, so that such a position is neutral.
    """
    inside = grid.valid.view(*grid.valid.shape, *(1,) * (x.dim() - 1))
    gate = x.index_select(0, grid.token).view(*grid.valid.shape, *x.shape[1:])
    return torch.where(inside, gate.float(), 0.0).transpose(1, 2).contiguous()


def scan_rank(state: Tensor, x: ChunkTerms, v_first: bool) -> Tensor:
    """Advance states, fp32 [M, V, K] (v_first) or [M, K, V], by one chunk, in place; returns o [M, C, V]."""
    y = torch.bmm(x.read, state.transpose(1, 2) if v_first else state)
    from_q, from_k = y.unflatten(1, (-1, 2)).unbind(2)
    u = torch.bmm(x.t, x.bv.addcmul_(from_k, x.bstart, value=-1))
    o = x.bv.copy_(from_q) if x.start is None else torch.mul(from_q, x.start, out=x.bv)
    o.baddbmm_(x.p, u)
    if x.end is not None:
        u.mul_(x.end)
    if v_first:
        state.mul_(x.total).baddbmm_(u.transpose(1, 2), x.key)
    else:
        state.mul_(x.total.transpose(1, 2)).baddbmm_(x.key.transpose(1, 2), u)
    return o


def head_blocks(positions: int, heads: int, width: int) -> list[slice]:
    """Return blocks of query/key heads whose gathered inputs, `width` numbers a position, take about BLOCK_BYTES."""
    per_head = max(1, positions * width * 4)
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


def scan_chunks(
    x: Tokens,
    pool: FlatPool,
    cu_seqlens: Tensor,
    state_indices: Tensor | None,
    history_lens: Tensor | None,
    lengths: tuple[int, ...] | None,
    size: int,
    options: Options,
    head_terms: HeadTerms,
) -> Tensor:
    """Run a rule over a packed batch, in chunks of `size` tokens. Returns o [T, HV, V], mutates the pool.

    Without `lengths` the grid is laid out for the worst case of `cu_seqlens`, and nothing is read on the host. `size`
    is a power of two.
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
    betas = gather_gate(x.beta, grid)

    group, chunks, positions = value_heads // heads, grid.valid.shape[0], grid.valid.numel()
    pool_view = pool.view.unflatten(1, (heads, group))
    out = torch.empty(x.v.shape, dtype=x.v.dtype, device=x.v.device)
    for hs in head_blocks(positions, heads, 2 * (keys + values)):
        block = hs.stop - hs.start
        qk = torch.empty(chunks, block, size, 2, keys, dtype=torch.float32, device=x.q.device)
        gather_chunks(x.q[:, hs], grid, qk[..., 0, :])
        gather_chunks(x.k[:, hs], grid, qk[..., 1, :])
        if options.use_qk_l2norm:
            qk = l2norm(qk)
        qk[..., 0, :].mul_(options.scale)
        value_terms = head_terms(qk)
        bv = torch.empty(chunks, block, size, values, dtype=torch.float32, device=x.q.device)
        o = torch.empty(positions + 1, block, values, dtype=torch.float32, device=x.q.device)
        o[positions] = 0
        o_chunks = o[:positions].view(chunks, size, block, values).transpose(1, 2).split(grid.counts)
        for j in range(group):
            hv = slice(hs.start * group + j, hs.stop * group, group)
            beta = betas[:, hv, :, None]
            gather_chunks(x.v[:, hv], grid, bv).mul_(beta)
            terms = value_terms(gather_gate(x.g[:, hv], grid), beta, bv).flat()
            ranks = terms.split_ranks([n * block for n in grid.counts])
            view = pool_view[:, hs, j]
            state = read_stored(view, read, clear).float()
            for n, o_part, rank in zip(grid.counts, o_chunks, ranks, strict=True):
                o_part.copy_(scan_rank(state[:n].flatten(0, 1), rank, options.state_v_first).view_as(o_part))
            write_live_state(view, write, state, live)
            out[:, hv] = o.index_select(0, place)
    return out
