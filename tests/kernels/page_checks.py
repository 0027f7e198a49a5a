"""Requests in blocks of a cache: tables in any order, garbage in unused columns, NaN in unused entries."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlinfer_ext.testing import guarded_pool

NAN = float("nan")


class Pages(NamedTuple):
    """A batch of rows in pages.

    Attributes:
        lengths: tokens of each row.
        history: tokens before them; negative: a PAD row.
        block_size: tokens of a block.
        table: int32 [N, M]; the columns that are not reached hold no block.
        blocks: of the caches.
    """

    lengths: list[int]
    history: list[int]
    block_size: int
    table: Tensor
    blocks: int

    @property
    def rows(self) -> dict[str, Any]:
        return {
            "cu_seqlens": torch.tensor([0, *self.lengths]).cumsum(0).int(),
            "block_offsets": self.table,
            "history_lens": torch.tensor(self.history, dtype=torch.int32),
        }

    @property
    def longest(self) -> int:
        return max((h + n for h, n in zip(self.history, self.lengths, strict=True) if h >= 0), default=0)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def step(self, lengths: Sequence[int], history: Sequence[int]) -> Pages:
        """Return other rows of the same requests."""
        return self._replace(lengths=list(lengths), history=list(history))

    def positions(self, row: int) -> range:
        """Return the positions of a row's tokens; none of a PAD row."""
        past = self.history[row]
        return range(past, past + self.lengths[row]) if past >= 0 else range(0)

    def pack(self, requests: Sequence[Tensor], outside: int = 0) -> Tensor:
        """Return the rows' tokens of the whole requests, packed, and NaN for tokens outside every row."""
        parts = [x[max(h, 0) : max(h, 0) + n] for x, h, n in zip(requests, self.history, self.lengths, strict=True)]
        return torch.cat([*parts, torch.full((outside, *requests[0].shape[1:]), NAN, dtype=requests[0].dtype)])


def make_pages(
    lengths: Sequence[int], history: Sequence[int], block_size: int, *, room: int = 0, seed: int = 0
) -> Pages:
    """Return rows with blocks for `room` more tokens each, in random order, and columns of garbage behind them."""
    need = [-(-(max(h, 0) + n + room) // block_size) for h, n in zip(history, lengths, strict=True)]
    blocks = sum(need) + 3
    free = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    garbage = (-1, 2**31 - 1, -(2**31), blocks)
    table = torch.full((len(need), max(need, default=0) + 2), 0, dtype=torch.int32)
    for row, n in enumerate(need):
        table[row, :n] = torch.tensor(free[:n], dtype=torch.int32)
        table[row, n:] = garbage[row % len(garbage)]
        free = free[n:]
    return Pages(list(lengths), list(history), block_size, table, blocks)


def make_cache(blocks: int, entries: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return (cache [blocks, entries, width], storage): a strided view full of NaN among guard rows."""
    cache, storage = guarded_pool((blocks, entries, width), dtype)
    return cache.fill_(NAN), storage


def drawn(seed: int) -> tuple[Random, list[int], list[int]]:
    """Return (generator, lengths, histories) of a batch drawn by seed: short, long, empty and PAD rows."""
    rng = Random(seed)
    rows = rng.randint(1, 5)
    lengths = [rng.choice([0, 1, 2, 3, 5, 17, 40]) for _ in range(rows)]
    history = [rng.choice([-1, 0, 1, 2, 3, 7, 10, 33]) for _ in range(rows)]
    return rng, lengths, history


def requests(
    pages: Pages, *shape: int, dtype: torch.dtype = torch.float32, room: int = 0, seed: int = 1
) -> list[Tensor]:
    """Return random values [tokens, *shape] for every position of each request."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [max(h, 0) + n + room for h, n in zip(pages.history, pages.lengths, strict=True)]
    return [torch.randn(n, *shape, generator=generator).to(dtype) for n in sizes]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()])


def assert_only_written(storage: Tensor, before: Tensor, cache: Tensor, entries: set[tuple[int, int]]) -> None:
    """Assert that nothing but the entries (block, entry) of the cache differs from before, bit for bit."""
    want = before.clone()
    view = want.as_strided(cache.size(), cache.stride(), cache.storage_offset())
    for entry in entries:
        view[entry] = cache[entry]
    assert torch.equal(bits(storage), bits(want)), "an entry that is not addressed was written"


def host_lengths(choice: str, pages: Pages) -> Any:
    """Return the row lengths as given ("exact"), as bounds above them, or None."""
    return {"exact": pages.lengths, "bounds": [n + 2 for n in pages.lengths], "none": None}[choice]
