"""Chunks of a packed batch, ordered for a scan that advances every row by one chunk at a time. No host read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .index import row_of_token


@dataclass(frozen=True)
class ChunkGrid:
    """NC chunks of C positions each. Rows are sorted by length, longest first; chunks by rank, then by row.

    Attributes:
        counts: how many rows reach each rank; the chunks of rank c are the next counts[c] chunks, one for each of the
            first counts[c] rows.
        rows: int64 [n], the row of the batch at each sorted place; n = counts[0].
        token: int64 [NC · C], the packed token at each position; a position past its row's end repeats the row's last
            token, so that nothing of another row enters.
        valid: bool [NC, C], which positions are tokens.
        owner: int64 [T], the row of each packed token; N for a token outside every row.
        place: int64 [T], the position (chunk · C + offset) of each packed token.
    """

    counts: tuple[int, ...]
    rows: Tensor
    token: Tensor
    valid: Tensor
    owner: Tensor
    place: Tensor

    def place_of(self, live: Tensor) -> Tensor:
        """Return `place`, and NC · C for the tokens outside every row or of a row that is not live (bool [N])."""
        with_outside = torch.cat((live, live.new_zeros(1)))
        return torch.where(with_outside[self.owner], self.place, self.valid.numel())


def rank_counts(num_rows: int, num_tokens: int, chunk: int, lengths: Sequence[int] | None) -> tuple[int, ...]:
    """Return for each chunk rank how many rows reach it, or a bound on that when the lengths are unknown.

    Of T tokens in all, at most T // n rows can be n tokens long.
    """
    if lengths is None:
        return tuple(min(num_rows, num_tokens // (start + 1)) for start in range(0, num_tokens, chunk))
    longest = max(lengths, default=0)
    return tuple(sum(n > start for n in lengths) for start in range(0, longest, chunk))


def chunk_size(num_rows: int, num_tokens: int, most: int, lengths: Sequence[int] | None) -> int:
    """Return C for rows that may all be short, as in a decode or verify step: a power of two, at most `most`.

    Without the lengths it is taken from their mean, so that no chunk of an even batch is longer than its rows need.
    """
    longest = -(-num_tokens // max(1, num_rows)) if lengths is None else max(lengths, default=0)
    return min(most, 1 << max(0, longest - 1).bit_length())


def chunk_grid(cu_seqlens: Tensor, num_tokens: int, chunk: int, lengths: Sequence[int] | None) -> ChunkGrid:
    """Lay a packed batch out in chunks.

    Args:
        cu_seqlens: int [N + 1].
        num_tokens: T, at least cu_seqlens[-1].
        chunk: C.
        lengths: the row lengths as Python ints, or None; without them the grid is laid out for the worst case.
    """
    device, cu = cu_seqlens.device, cu_seqlens.long()
    start, end = cu[:-1], cu[1:]
    counts = rank_counts(start.shape[0], num_tokens, chunk, lengths)
    order = torch.argsort(end - start, descending=True, stable=True)
    place_of_row = torch.argsort(order)
    num_rows = counts[0] if counts else 0
    rows = order[:num_rows]

    per_rank = torch.tensor(counts, device=device)
    first_chunk = torch.cumsum(per_rank, 0) - per_rank
    rank = torch.repeat_interleave(torch.arange(len(counts), device=device), per_rank, output_size=sum(counts))
    row = rows[torch.arange(sum(counts), device=device) - first_chunk[rank]]
    token = (start[row] + rank * chunk)[:, None] + torch.arange(chunk, device=device)
    valid = token < end[row, None]
    token = torch.minimum(token, end[row, None] - 1).clamp(min=0)

    owner = row_of_token(cu, num_tokens)
    inside = owner.clamp(max=start.shape[0] - 1)
    offset = torch.arange(num_tokens, device=device) - start[inside]
    place = first_chunk[(offset // chunk).clamp(max=len(counts) - 1)] + place_of_row[inside]
    return ChunkGrid(counts, rows, token.flatten(), valid, owner, place * chunk + offset % chunk)
