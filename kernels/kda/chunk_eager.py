"""Kimi Delta Attention in chunks: prefill of a packed batch. No host read when the row lengths are given.

The scan is that of all delta rules (`common.delta_chunks`); here are the terms of a decay per key channel (Kimi Team,
arXiv 2510.26692). It stands inside the sum over channels, q_i·D_ij·k_j, so a matrix product needs it split in two
factors, one for the query and one for the key, and the split must not overflow: exp(c_i - r)·exp(r - c_j) with r the
sum of the gates at the first row of a tile of 16 holds for gates down to -5 (15 · 5 < 88) and not for the softplus's.

So the tile is halved until nothing is left to split. Of two neighbouring runs of h tokens, h = 1, 2, 4 … C/2, each
token of the second run sees each of the first across their common border. With r at that border, the first row of the
second run, the query's factor is the decay from there up to its token and the key's the decay that follows its token
in the first run. Neither is ever above 1, whatever the gates, so that one form serves both gates and nothing has to be
known of their values; either may underflow, but then so does their product. And no factor takes part of a token that
comes later than the query, so that the output of a prefix does not depend on what follows.

The factors of one h are those of the last, times the decay of a whole run. They are products of the tokens' own decays:
no difference of two running sums, which would lose the small gates that follow a large one, and none of -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.delta_chunks import ChunkTerms, ValueTerms, scan_chunks, unit_lower_inverse
from ..common.delta_inputs import Options, Tokens
from ..common.state_pool import flatten_pool

CHUNK = 32


def decay_runs(read: Tensor, key: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply each token's decays into what reads and writes, and return its products with the tokens before it.

    Args:
        read: [M, C, 2, K], query and key times the token's own decay; on return times the decay from the chunk's start.
        key: [M, C, K], contiguous as `read`; on return times the decay that follows it in the chunk.
        decay: [M, C, K], of each token; C is a power of two.

    Returns:
        (products [M, C, 2, C]: at (i, 0, j) q_i·D_ij·k_j and at (i, 1, j) k_i·D_ij·k_j for j < i, and 0 for the others;
        the decay over the chunk [M, 1, K]).
    """
    rows, size, keys = key.shape
    products = read.new_zeros(rows, size, 2, size)
    total, run = decay, 1
    while run < size:
        pairs = size // (2 * run)
        readers, writers = read.view(-1, 2, 2 * run, keys)[:, 1], key.view(-1, 2, run, keys)[:, 0]
        across = torch.bmm(readers, writers.transpose(1, 2)).view(rows, pairs, run, 2, run)
        # [M, second run, 2, first run, pair]: of all pairs of runs, those of neighbours.
        place = products.view(rows, pairs, 2, run, 2, pairs, 2, run)[:, :, 1, :, :, :, 0].diagonal(0, 1, 4)
        place.copy_(across.movedim(1, -1))
        first, second = total.reshape(-1, 2, 1, keys).unbind(1)
        readers.mul_(first)
        writers.mul_(second)
        total = first * second
        run *= 2
    return products, total.view(rows, 1, keys)


def head_terms(qk: Tensor) -> ValueTerms:
    """Return what makes the terms of a value head; see `common.delta_chunks.HeadTerms`. The gates are [NC, h, C, K]."""
    own = qk.prod(3).sum(-1)

    def value_terms(gate: Tensor, beta: Tensor, bv: Tensor) -> ChunkTerms:
        decay = gate.exp()
        read, key = qk * decay[..., None, :], qk[..., 1, :].contiguous()
        products, total = decay_runs(read.flatten(0, 1), key.flatten(0, 1), decay.flatten(0, 1))
        qk_keys, kk = products.view(*read.shape[:4], -1).unbind(3)
        t = unit_lower_inverse(kk * beta)
        qk_keys.diagonal(dim1=2, dim2=3).copy_(own)
        return ChunkTerms(read.flatten(2, 3), key, t, qk_keys, bv, beta, total.view(*key.shape[:2], 1, -1))

    return value_terms


def kda(
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
    """Batched form of `dlinfer_ext.ops.kda.kda`."""
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist() if host_lengths is None else host_lengths
    x, options = Tokens(q, k, v, g, beta), Options(scale, use_qk_l2norm, state_v_first, pad_slot_id)
    return scan_chunks(
        x, flatten_pool(state), cu_seqlens, state_indices, history_lens, tuple(lengths), CHUNK, options, head_terms
    )
