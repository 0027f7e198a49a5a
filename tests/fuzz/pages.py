"""The caches of sparse latent attention, in blocks: pools of keys, raw tokens of the open pool, latents.

What the indexer is given is chosen so that its numbers are exact: keys, queries and weights are small integers, and the
gates of a pool leave one token or two equal ones. So ties are common, and a choice is right or wrong.
"""

from __future__ import annotations

from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from dlinfer_ext import ops
from dlinfer_ext.kernels.kpool_indexer import reference as kpool
from dlinfer_ext.kernels.latent_attention import reference as latent
from dlinfer_ext.testing import TOLERANCE

from .world import LONGEST, NAN, NO_HISTORY, OTHER, PAD_SLOT, SEATS, UNKNOWN, Batch, Row, Step, World

HEADS, DIM, LATENT, VALUE = 2, 4, 5, 4
SCALE = 0.6
# What a token gives: the indexer's key, gate, query and weights, the latent and the query of attention.
SHAPES: Final = ((DIM,), (DIM,), (HEADS, DIM), (HEADS,), (LATENT,), (HEADS, LATENT))
SIZES: Final = [prod(shape) for shape in SHAPES]
UNUSED: Final = (-1, 2**31 - 1, -(2**31))


class Pages(World):
    """Blocks of a request in the order in which they were free; `flip`: attention to all tokens, not to those chosen.

    The other way: a bound on the context above the longest. `width` sets the pools' size, 2 or 4.
    """

    def build(self) -> None:
        self.kpool, self.topk = (4, 8) if self.width > 2 else (2, 4)
        self.limit = TOLERANCE["latent", torch.float32]
        self.block = 2 * self.kpool
        self.per_seat = -(-(LONGEST + self.drafts) // self.block)
        blocks = 1 + SEATS * self.per_seat
        self.keys = self.pool("pools", (blocks, 2, DIM))
        self.tails = self.pool("tails", (blocks, self.kpool + self.drafts + self.spare, 2 * DIM))
        self.latents = self.pool("latents", (blocks, self.block, LATENT))
        self.ape = 1000.0 * torch.arange(self.kpool)[:, None].repeat(1, DIM)
        self.order = torch.randperm(blocks, generator=self.generator).tolist()

    def draw(self, count: int) -> Tensor:
        def whole(low: int, high: int, width: int) -> Tensor:
            return torch.randint(low, high, (count, width), generator=self.generator).float()

        key, gate, query, weights, *floats = SIZES
        attention = torch.randn(count, sum(floats), generator=self.generator)
        # With `ape` the largest gate of a pool is that of one token or of two, and far above the others.
        parts = [whole(-2, 3, key), 2000 * whole(0, 2, gate), whole(-2, 3, query), whole(-2, 3, weights), attention]
        return torch.cat(parts, 1)

    def split(self, tokens: Tensor) -> list[Tensor]:
        parts = tokens.split(SIZES, 1)
        return [x.unflatten(1, shape) for x, shape in zip(parts, SHAPES, strict=True)]

    def slots_of(self, seat: int) -> list[int]:
        return self.order[seat * self.per_seat : (seat + 1) * self.per_seat]

    def table(self, row: Row) -> list[int]:
        """Return the blocks of a row, and what means nothing in the columns that it does not reach."""
        reached = -(-(row.history + len(row.new)) // self.block)
        if row.seat in (NO_HISTORY, PAD_SLOT):
            reached = self.per_seat
        elif row.seat < 0:
            reached = 0
        unused = UNUSED[row.seat % len(UNUSED)]
        blocks = [self.order[-1]] * self.per_seat if row.seat == PAD_SLOT else self.slots_of(max(row.seat, 0))
        return blocks[:reached] + [unused] * (self.per_seat + 1 - reached)

    def run(self, batch: Batch, *, update: bool) -> list[Tensor]:
        for name in ("kpool_update", "kpool_select", "latent_write", "latent_attention"):
            self.calls[name] += 1
        key, gate, query, weights, c, q = self.split(batch.packed)
        rows: dict[str, Any] = {
            "cu_seqlens": batch.cu_seqlens,
            "history_lens": batch.ints([-1 if row.seat < 0 else row.history for row in batch.rows]),
            "block_offsets": torch.tensor([self.table(row) for row in batch.rows]),
        }
        host: dict[str, Any] = {"host_lengths": None if batch.form & UNKNOWN else batch.lengths}
        longest = max((row.history + len(row.new) for row in batch.rows if row.seat >= 0), default=0)
        bound = longest + (5 if batch.form & OTHER else 0)
        ops.kpool_update(key, gate, self.ape, self.keys, self.tails, **rows, **host)
        chosen = ops.kpool_select(
            query, weights, self.keys, topk=self.topk, kpool=self.kpool, max_kv_len=bound, **rows, **host
        )
        ops.latent_write(c, self.latents, **rows)
        out = ops.latent_attention(
            q, self.latents, value_dim=VALUE, scale=SCALE, max_kv_len=bound, indices=None if self.flip else chosen,
            **rows, **host,
        )  # fmt: skip
        return [chosen, out]

    def define(self, batch: Batch, *, update: bool) -> Step:
        width = self.topk + self.kpool - 1
        chosen, outputs = [], []
        written: dict[str, dict[tuple[int, ...], Tensor]] = {name: {} for name in self.pools}
        for row in batch.rows:
            if row.live is None:
                chosen.append(torch.full((len(row.new), width), -1, dtype=torch.int32))
                outputs.append(torch.zeros(len(row.new), HEADS, VALUE, dtype=torch.float64))
                continue
            indices, out = self.from_the_first(row, written)
            chosen.append(indices)
            outputs.append(out)
        outside = len(batch.outside)
        chosen.append(torch.full((outside, width), -1, dtype=torch.int32))
        outputs.append(torch.zeros(outside, HEADS, VALUE, dtype=torch.float64))
        return Step([torch.cat(chosen), torch.cat(outputs)], written)

    def from_the_first(self, row: Row, written: dict[str, dict[tuple[int, ...], Tensor]]) -> tuple[Tensor, Tensor]:
        """Return what a row's new tokens choose and give, from caches of its own request; note what is written."""
        key, gate, query, weights, c, q = self.split(row.whole)
        total, count = len(key), len(row.new)
        blocks = -(-total // self.block)
        pools, latents = torch.full((blocks, 2, DIM), NAN), torch.full((blocks, self.block, LATENT), NAN)
        # No token takes another's place here.
        tails = torch.full((blocks, self.block, 2 * DIM), NAN)
        table = torch.arange(blocks)[None]
        everything: dict[str, Any] = {"cu_seqlens": torch.tensor([0, total]), "history_lens": torch.tensor([0])}
        new: dict[str, Any] = {"cu_seqlens": torch.tensor([0, count]), "history_lens": torch.tensor([row.history])}
        kpool.kpool_update(key, gate, self.ape, pools, tails, block_offsets=table, **everything)
        latent.latent_write(c, latents, block_offsets=table, **everything)
        self.note(row, written, pools, tails, latents)
        part = slice(row.history, None)
        chosen = kpool.kpool_select(
            query[part], weights[part], pools, block_offsets=table, topk=self.topk, kpool=self.kpool, max_kv_len=total,
            **new,
        )  # fmt: skip
        out = latent.latent_attention(
            q[part], latents, block_offsets=table, value_dim=VALUE, scale=SCALE, max_kv_len=total,
            indices=None if self.flip else chosen, **new,
        )  # fmt: skip
        return chosen, out

    def note(
        self,
        row: Row,
        written: dict[str, dict[tuple[int, ...], Tensor]],
        pools: Tensor,
        tails: Tensor,
        latents: Tensor,
    ) -> None:
        """Note what a row's new tokens leave in its blocks: a latent each, itself raw, and the pools they complete."""
        slots = self.slots_of(row.seat)
        ring = self.tails.shape[1]
        for p in range(row.history, row.history + len(row.new)):
            page, place = divmod(p, self.block)
            written["latents"][slots[page], place] = latents[page, place]
            written["tails"][slots[page], p % ring] = tails[page, place]
            if (p + 1) % self.kpool == 0:
                written["pools"][slots[page], place // self.kpool] = pools[page, place // self.kpool]
