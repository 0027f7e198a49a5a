"""What the operators on blocks of a paged cache read and write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .plan import Arguments, Entries, Plan, Row
from .rows import row_spans


class _Page(NamedTuple):
    """What a row of a call on blocks can reach."""

    row: int
    tokens: range
    history: int
    blocks: list[int]
    live: bool

    @property
    def end(self) -> int:
        return self.history + len(self.tokens)

    def at(self, first: int, last: int, size: int, inside: Callable[[Tensor], Tensor], base: int) -> Entries:
        """Return the entries of positions first to last - 1: block by `size`, place by `inside`; the later counts."""
        positions = torch.arange(first, max(first, last))
        blocks = torch.tensor(self.blocks, dtype=torch.int64)
        if not len(positions):
            return Entries.of((), 2)
        index = torch.stack((blocks[positions // size], inside(positions)), 1)
        # Of equal entries the last is kept: unique() of the reversed ones names the first of each.
        _, inverse = index.unique(dim=0, return_inverse=True)
        latest = torch.zeros(int(inverse.max()) + 1, dtype=torch.int64).scatter_reduce(
            0, inverse, torch.arange(len(index)), "amax", include_self=False
        )
        keep = latest.sort().values
        return Entries(index[keep], positions[keep] - base)


def _pages(plan: Plan, args: Arguments, first: str, blocks: int, size: int) -> list[_Page]:
    """Check the rows of a call on blocks; `first` names the packed tokens."""
    plan.layout = "pages"
    table = args["block_offsets"].tolist()
    spans = row_spans(
        plan, "cu_seqlens", args["cu_seqlens"], args[first].shape[0], None, args.get("host_lengths"), exact=False
    )
    room = args["block_offsets"].shape[1] * size
    limit = min(room, args.get("max_kv_len", room))
    pages = []
    for row, (tokens, history) in enumerate(zip(spans, args["history_lens"].tolist(), strict=True)):
        n = len(tokens)
        live = n > 0 and history >= 0
        if live:
            wrong = history + n > limit
            live = not plan.refuse(wrong, "history_lens", f"{history} with {n} tokens", f"at most {limit} in all", row)
        reached = table[row][: -(-max(history + n, n) // size)]
        if live:
            for block in reached:
                live &= not plan.refuse(
                    not 0 <= block < blocks, "block_offsets", block, f"0 to {blocks - 1}, the blocks of the cache", row
                )
        pages.append(_Page(row, tokens, history, reached, live))
    return pages


def _own_blocks(plan: Plan, pages: list[_Page], size: int) -> list[_Page]:
    """Note a block that two rows write; a block that is only read may be shared.

    A batch of rows that are all the same is not one of requests: LMDeploy warms up with every row in block 0.
    """
    if len({(page.history, len(page.tokens), *page.blocks) for page in pages if page.live}) == 1:
        return pages
    owners: dict[int, int] = {}
    found = []
    for page in pages:
        live = page.live
        for block in page.blocks[page.history // size :] if live else ():
            owner = owners.setdefault(block, page.row)
            if owner != page.row:
                live = not plan.clash("block_offsets", block, page.row, owner, "blocks that no other row writes")
        found.append(page._replace(live=live))
    return found


def _add_page(
    plan: Plan, page: _Page, size: int, reads: Mapping[str, Entries], writes: Mapping[str, Entries], blocks: int
) -> None:
    pad = () if page.live else tuple(b for b in page.blocks if 0 <= b < blocks)
    plan.rows.append(
        Row(
            page.row, page.tokens, page.history, tuple(page.blocks), page.live, None, reads if page.live else {},
            writes if page.live else {}, dict.fromkeys(writes, pad),
        )
    )  # fmt: skip


def kpool_update(plan: Plan, args: Arguments) -> None:
    pool, tails = args["ape"].shape[0], args["tail_cache"].shape[1]
    blocks, per_block, _ = args["pool_cache"].shape
    size = per_block * pool
    for page in _own_blocks(plan, _pages(plan, args, "k", blocks, size), size):
        history, end = page.history, page.end
        reads, writes = dict[str, Entries](), {"pool_cache": Entries.of((), 2), "tail_cache": Entries.of((), 2)}
        if page.live:
            reads["tail_cache"] = page.at(history - history % pool, history, size, lambda p: p % tails, history)
            writes["tail_cache"] = page.at(history, end, size, lambda p: p % tails, history)
            writes["pool_cache"] = page.at(history // pool, end // pool, per_block, lambda j: j % per_block, 0)
        _add_page(plan, page, size, reads, writes, blocks)


def kpool_select(plan: Plan, args: Arguments) -> None:
    (blocks, per_block, _), pool = args["pool_cache"].shape, args["kpool"]
    for page in _pages(plan, args, "q", blocks, per_block * pool):
        reads = dict[str, Entries]()
        if page.live:
            reads["pool_cache"] = page.at(0, page.end // pool, per_block, lambda j: j % per_block, 0)
        _add_page(plan, page, per_block * pool, reads, {}, blocks)


def latent_write(plan: Plan, args: Arguments) -> None:
    blocks, size, _ = args["cache"].shape
    for page in _own_blocks(plan, _pages(plan, args, "c", blocks, size), size):
        writes = {"cache": Entries.of((), 2)}
        if page.live:
            writes["cache"] = page.at(page.history, page.end, size, lambda p: p % size, page.history)
        _add_page(plan, page, size, {}, writes, blocks)


def latent_attention(plan: Plan, args: Arguments) -> None:
    blocks, size, _ = args["cache"].shape
    for page in _pages(plan, args, "q", blocks, size):
        reads = dict[str, Entries]()
        if page.live:
            reads["cache"] = page.at(0, page.end, size, lambda p: p % size, page.history)
        _add_page(plan, page, size, reads, {}, blocks)
