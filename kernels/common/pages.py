"""Caches in blocks: which entry of which block holds what of a packed batch. No host read, no copy of a cache.

A cache is [B, E, X]: B blocks of E entries. A row of the batch finds the block of its page i, which holds the entries
i · E to i · E + E - 1 of the request, at column i of its line of a table `block_offsets` [N, M].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .index import row_of_token
from .state_pool import FlatPool, copy_states_, donor_rows

# Of the fresh tensors of one step of a loop over parts of a batch.
STEP_BYTES = 32 << 20


@dataclass(frozen=True)
class PackedTokens:
    """Where the packed tokens stand in their requests.

    Attributes:
        owner: int64 [T], the row of each token, N - 1 for a token outside every row.
        position: int64 [T], counted from the start of the request; 0 for a token that is not live.
        live: bool [T], whether it is a token of a row that is no PAD row.
        end: int64 [N], history and tokens of each row; 0 for a PAD row.
    """

    owner: Tensor
    position: Tensor
    live: Tensor
    end: Tensor

    @property
    def visible(self) -> Tensor:
        """How many tokens of its request each token sees, itself included; int64 [T], 0 if it is not live."""
        return (self.position + 1) * self.live


def packed_tokens(cu_seqlens: Tensor, history_lens: Tensor, num_tokens: int) -> PackedTokens:
    """Return the places of T packed tokens in N >= 1 rows; a negative history marks a PAD row."""
    cu, history = cu_seqlens.long(), history_lens.long()
    row = row_of_token(cu, num_tokens)
    owner = row.clamp(max=history.shape[0] - 1)
    past = history[owner]
    live = (row == owner) & (past >= 0)
    position = past + torch.arange(num_tokens, device=cu.device) - cu[:-1][owner]
    return PackedTokens(owner, position * live, live, (history + cu.diff()) * (history >= 0))


def block_at(block_offsets: Tensor, rows: Tensor, page: Tensor, num_blocks: int) -> Tensor:
    """Return the blocks (int64) of pages of rows, within the cache whatever the unused columns of the table hold."""
    columns = page.clamp(0, block_offsets.shape[1] - 1)
    return block_offsets[rows, columns].long().clamp(0, num_blocks - 1)


def gather_pages(cache: Tensor, block_offsets: Tensor, rows: Tensor, pages: range) -> Tensor:
    """Return copies of pages of G rows, fp32 [G, len(pages) · E, X]; pages beyond the table repeat its last one."""
    at = torch.arange(pages.start, pages.stop, device=rows.device)
    blocks = block_at(block_offsets, rows[:, None], at, cache.shape[0])
    held = cache.index_select(0, blocks.flatten())
    return held.view(rows.shape[0], len(pages) * cache.shape[1], cache.shape[2]).float()


def clear_absent(held: Tensor, absent: Tensor) -> Tensor:
    """Set the entries that are not there (bool [G, S]) of gathered ones [G, S, X] to zero, in place.

    They may be NaN or inf, and a probability of zero times that is NaN.
    """
    return held.masked_fill_(absent[..., None], 0.0)


def write_entries(cache: FlatPool, places: Tensor, values: Tensor, writes: Tensor) -> None:
    """Store values, rounded once, at flat places of a cache.

    Only the device knows which of them are to be written. The others repeat one that is, so that the same bytes go to
    the same place twice; if there is none, all write back what the first place holds.

    Args:
        cache: of view [X, ..], mutated.
        places: int64 [K], all within the view; those to be written differ.
        values: [K, ..].
        writes: bool [K].
    """
    donor = donor_rows(writes, writes.shape[0])
    places = places[donor]
    stored = cache.view.index_select(0, places[:1])
    values = torch.where(writes.any(), values.index_select(0, donor).to(stored.dtype), stored)
    copy_states_(cache.view, places, values)
