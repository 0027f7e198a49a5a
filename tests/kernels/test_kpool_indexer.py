"""The indexer over pools of keys against transformers' module, the fp64 definition, written-out values, and itself.

An id that starts with P and a number is a problem reported by users of other implementations, put as the smallest input
that shows it.
"""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dlinfer_ext.kernels.common import pages as common_pages
from dlinfer_ext.kernels.kpool_indexer import reference, select_eager
from dlinfer_ext.ops import kpool_select, kpool_update
from dlinfer_ext.testing import DTYPES, TOLERANCE, HostRead, assert_close, no_host_reads
from tests.kernels.page_checks import (
    NAN,
    Pages,
    assert_only_written,
    bits,
    drawn,
    host_lengths,
    make_cache,
    make_pages,
    requests,
)

pytestmark = pytest.mark.eager_only(reason="no kernel is written for it yet")

INF = float("inf")
# Of 16 channels the scale is 1/4: scores of small integers have no rounding, and equal ones are equal everywhere.
DIM, HEADS = 16, 4
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
POOLS = pytest.mark.parametrize("pool", [1, 2, 3, 4, 16], ids=lambda p: f"P{p}")


def limit(dtype: torch.dtype) -> float:
    return TOLERANCE["kpool", dtype]


def ints(*values: int) -> Tensor:
    return torch.tensor(values)


class Caches:
    """The caches of requests, with their tokens up to the histories taken in by the definition."""

    def __init__(
        self,
        pages: Pages,
        pool: int,
        ring: int,
        *,
        dtype: torch.dtype = torch.float32,
        pool_dtype: torch.dtype | None = None,
        room: int = 0,
    ) -> None:
        self.pages, self.pool, self.ring = pages, pool, ring
        self.k, self.gate = (requests(pages, DIM, dtype=dtype, room=room, seed=s) for s in (1, 2))
        self.ape = torch.randn(pool, DIM, generator=torch.Generator().manual_seed(3))
        entries = pages.block_size // pool
        self.pools, self.pool_storage = make_cache(pages.blocks, entries, DIM, pool_dtype or dtype)
        self.tails, self.tail_storage = make_cache(pages.blocks, ring, 2 * DIM)
        before = pages.step([max(h, 0) for h in pages.history], [0 if h >= 0 else -1 for h in pages.history])
        pools, tails = self.pools.double(), self.tails.double()
        self.define(before, pools, tails)
        self.pools.copy_(pools)
        self.tails.copy_(tails)

    def define(self, pages: Pages, pools: Tensor, tails: Tensor) -> None:
        reference.kpool_update(pages.pack(self.k), pages.pack(self.gate), self.ape, pools, tails, **pages.rows)

    def update(self, pages: Pages, **options: Any) -> None:
        kpool_update(
            pages.pack(self.k), pages.pack(self.gate), self.ape, self.pools, self.tails, **pages.rows, **options
        )

    def pools_of(self, row: int, tokens: int) -> Tensor:
        """Return the complete pools of a request's first tokens, in order."""
        entries = self.pools.shape[1]
        at = [(int(self.pages.table[row, p // entries]), p % entries) for p in range(tokens // self.pool)]
        return torch.stack([self.pools[place] for place in at]) if at else self.pools.new_zeros(0, DIM)

    def whole_pools(self, row: int, tokens: int) -> Tensor:
        """Return what they have to be, in fp64."""
        k, gate = (x[row][: tokens // self.pool * self.pool].double().unflatten(0, (-1, self.pool))
                   for x in (self.k, self.gate))  # fmt: skip
        weight = (gate + self.ape.double()).exp()
        whole: Tensor = (weight * k).sum(1) / weight.sum(1)
        return whole


def places(pages: Pages, pool: int, ring: int) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Return which entries of pools and of tails the tokens of a batch write."""
    written: tuple[set[tuple[int, int]], set[tuple[int, int]]] = (set(), set())
    for row in range(len(pages.lengths)):
        for position in pages.positions(row):
            block = int(pages.table[row, position // pages.block_size])
            written[1].add((block, position % ring))
            if (position + 1) % pool == 0:
                written[0].add((block, position % pages.block_size // pool))
    return written


def check_update(
    lengths: list[int],
    history: list[int],
    pool: int = 4,
    *,
    entries: int = 2,
    drafts: int = 3,
    given: str = "exact",
    dtype: torch.dtype = torch.float32,
    pool_dtype: torch.dtype | None = None,
    outside: int = 0,
    seed: int = 0,
) -> Caches:
    """Compare with the definition: what is written, and nothing else, inputs untouched, nothing read on the host."""
    pages, ring = make_pages(lengths, history, pool * entries, seed=seed), pool + drafts
    caches = Caches(pages, pool, ring, dtype=dtype, pool_dtype=pool_dtype)
    inputs = [pages.pack(caches.k, outside), pages.pack(caches.gate, outside), caches.ape]
    kept, before = [x.clone() for x in inputs], [caches.pool_storage.clone(), caches.tail_storage.clone()]
    want = caches.pools.double(), caches.tails.double()
    caches.define(pages, *want)
    k, gate, ape = inputs
    with no_host_reads():
        kpool_update(k, gate, ape, caches.pools, caches.tails, **pages.rows, host_lengths=host_lengths(given, pages))
    assert all(torch.equal(bits(x), bits(y)) for x, y in zip(inputs, kept, strict=True))
    written = places(pages, pool, ring)
    assert_only_written(caches.pool_storage, before[0], caches.pools, written[0])
    assert_only_written(caches.tail_storage, before[1], caches.tails, written[1])
    for at in written[0]:
        assert_close("pool", caches.pools[at], want[0][at], limit(caches.pools.dtype))
    for at in written[1]:
        assert torch.equal(caches.tails[at].double(), want[1][at]), "a tail keeps what came, bit for bit"
    for row, (past, n) in enumerate(zip(history, lengths, strict=True)):
        if past >= 0:
            got, whole = caches.pools_of(row, past + n), caches.whole_pools(row, past + n)
            assert_close("whole request", got, whole, limit(caches.pools.dtype))
    return caches


# --- pools ------------------------------------------------------------------------------------------------------------


def test_pool_by_hand() -> None:
    """Weights 1/4 and 3/4 from the gates; the positions' own term can undo that; each channel for itself."""
    k = torch.tensor([[2.0, 10.0], [6.0, 20.0], [8.0, 9.0]])
    gate = torch.tensor([[0.0, math.log(3)], [math.log(3), 0.0], [50.0, 50.0]])
    rows: dict[str, Any] = {"cu_seqlens": ints(0, 3), "block_offsets": ints(1)[None], "history_lens": ints(0)}
    for ape, want in ((torch.zeros(2, 2), [5.0, 12.5]), (torch.tensor([[math.log(3)] * 2, [0.0] * 2]), [4.0, 11.0])):
        pools, tails = torch.full((2, 2, 2), NAN), torch.full((2, 2, 4), NAN)
        kpool_update(k, gate, ape, pools, tails, **rows)
        assert pools[1, 0].tolist() == pytest.approx(want, rel=1e-6)
        assert bool(pools[1, 1].isnan().all()), "the second pool is not complete"
        # Of positions 0 and 2, which share an entry, the later.
        assert torch.equal(tails[1], torch.cat((k, gate), 1)[[2, 1]])
        assert bool(pools[0].isnan().all())
        # The next token completes the second pool from what waits in the tail.
        next_rows = {**rows, "cu_seqlens": ints(0, 1), "history_lens": ints(3)}
        kpool_update(torch.tensor([[0.0, 1.0]]), torch.tensor([[50.0, 50.0]]), ape * 0, pools, tails, **next_rows)
        assert pools[1, 1].tolist() == pytest.approx([4.0, 5.0], rel=1e-6)


@POOLS
@pytest.mark.parametrize("history", [0, 1, 2, 3, 5, 8, 63], ids=lambda h: f"h{h}")
def test_update_matches_definition(history: int, pool: int) -> None:
    check_update([1, 2, 3, 0, 40], [history] * 5, pool, outside=3)


@pytest.mark.parametrize("seed", range(40))
def test_update_of_drawn_batches(seed: int) -> None:
    rng, lengths, history = drawn(seed)
    check_update(
        lengths, history, rng.choice([1, 2, 4, 8]), entries=rng.choice([1, 2, 5]), drafts=rng.choice([0, 1, 3]),
        given=rng.choice(["exact", "bounds", "none"]), outside=rng.choice([0, 2]), seed=seed,
    )  # fmt: skip


@EACH_DTYPE
@pytest.mark.parametrize("pool_dtype", DTYPES, ids=lambda d: f"pool-{str(d)[6:]}")
def test_update_rounds_once(dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    check_update([9, 3, 1], [2, 0, 7], dtype=dtype, pool_dtype=pool_dtype)


def test_a_block_of_one_pool_of_128() -> None:
    check_update([130, 1, 200], [120, 127, 0], 128, entries=1)


def test_inputs_may_be_views() -> None:
    """Keys and gates as parts of one projection, and a table that is a part of a wider one."""
    pages = make_pages([5, 3], [3, 0], 8)
    caches = Caches(pages, 4, 7)
    pools, tails = caches.pools.clone(), caches.tails.clone()
    caches.update(pages)
    wide = torch.cat((pages.pack(caches.k), torch.zeros(8, 3), pages.pack(caches.gate)), 1)
    table = torch.cat((pages.table, pages.table), 1)[:, : pages.table.shape[1]]
    rows = {**pages.rows, "block_offsets": table}
    kpool_update(wide[:, :DIM], wide[:, DIM + 3 :], caches.ape.T.contiguous().T, pools, tails, **rows)
    assert torch.equal(bits(pools), bits(caches.pools.contiguous()))
    assert torch.equal(bits(tails), bits(caches.tails.contiguous()))


@POOLS
def test_any_chunks_equal_one_shot(pool: int) -> None:
    """Not one bit differs, as the pool is the same sum of the same numbers."""
    total, one = 45, None
    for cuts in ([], [1], [2, 3], [7, 8, 9], [16, 31], [44], [*range(1, 45)]):
        pages = make_pages([total], [0], 3 * pool)
        caches = Caches(pages, pool, pool)
        for lo, hi in pairwise([0, *cuts, total]):
            caches.update(pages.step([hi - lo], [lo]))
        got = caches.pools_of(0, total)
        one = got if one is None else one
        assert torch.equal(got, one), cuts
    assert one is not None
    assert one.shape[0] == total // pool


def speculate(pool: int, drafts: int, ring: int, start: int, accept: list[int]) -> tuple[Caches, int]:
    """Run verify steps in which only `accept` tokens of 1 + drafts are kept; rejected ones carry other numbers."""
    room = sum(accept) + drafts + 1
    pages = make_pages([start], [0], 2 * pool, room=room)
    caches = Caches(pages, pool, ring, room=room)
    caches.update(pages)
    past = start
    for kept in accept:
        step = pages.step([1 + drafts], [past])
        k, gate = step.pack(caches.k).clone(), step.pack(caches.gate).clone()
        k[kept:], gate[kept:] = 1e3, 9.0
        kpool_update(k, gate, caches.ape, caches.pools, caches.tails, **step.rows)
        past += kept
    return caches, past


@pytest.mark.parametrize("phase", range(4), ids=lambda p: f"T%P={p}")
@pytest.mark.parametrize("drafts", [1, 2, 3, 7], ids=lambda d: f"drafts{d}")
@pytest.mark.parametrize("kept", [1, 2, 4, 8], ids=lambda a: f"keep{a}")
def test_rejected_drafts_leave_no_trace(phase: int, drafts: int, kept: int) -> None:
    """P9: rejected drafts that complete a pool, or take the places of tokens of the open one, or cross a block."""
    accept = [min(kept, 1 + drafts)] * 9
    caches, total = speculate(4, drafts, 4 + drafts, 12 + phase, accept)
    assert_close("pools", caches.pools_of(0, total), caches.whole_pools(0, total), limit(torch.float32))


def test_a_tail_without_room_for_drafts_is_found_out() -> None:
    """P9, the control: with R = P, drafts overwrite the open pool's tokens, and a rejected one gets into a pool."""
    caches, total = speculate(4, 3, 4, 15, [1] * 9)
    with pytest.raises(AssertionError, match="RMS error"):
        assert_close("pools", caches.pools_of(0, total), caches.whole_pools(0, total), limit(torch.float32))


def test_an_open_pool_moves_with_its_block() -> None:
    """A block copied in the middle of a pool, as a prefix cache does, goes on like the original."""
    pages = make_pages([6], [0], 8, room=20)
    caches = Caches(pages, 4, 7, room=20)
    caches.update(pages)
    (spare,) = sorted(set(range(pages.blocks)) - set(pages.table[0, :-2].tolist()))[:1]
    for cache in (caches.pools, caches.tails):
        cache[spare] = cache[pages.table[0, 0]]
        cache[pages.table[0, 0]] = NAN
    pages.table[0, 0] = spare
    caches.update(pages.step([10], [6]))
    assert_close("pools", caches.pools_of(0, 16), caches.whole_pools(0, 16), limit(torch.float32))


@pytest.mark.parametrize("at", range(4))
def test_pad_rows_write_nothing(at: int) -> None:
    history = [3, 0, 5, 1]
    history[at] = -1 - at
    check_update([4, 35, 1, 9], history)


def test_batches_that_write_nothing() -> None:
    check_update([4, 0, 2], [-1, 5, -7], outside=2)
    check_update([0, 0], [0, 9])
    check_update([0], [3], outside=3)
    for rows, tokens in ((0, 0), (0, 3), (2, 0)):
        pools, tails = torch.randn(2, 2, DIM), torch.randn(2, 4, 2 * DIM)
        before = pools.clone(), tails.clone()
        table = torch.zeros(rows, 1, dtype=torch.int32)
        x = torch.randn(tokens, DIM)
        kpool_update(
            x, x, torch.zeros(4, DIM), pools, tails, block_offsets=table,
            cu_seqlens=torch.zeros(rows + 1, dtype=torch.int64), history_lens=torch.zeros(rows, dtype=torch.int64),
        )  # fmt: skip
        assert torch.equal(pools, before[0])
        assert torch.equal(tails, before[1])


@pytest.mark.parametrize("bad", [NAN, INF], ids=str)
@pytest.mark.parametrize("name", ["k", "gate"])
def test_a_bad_request_harms_no_other(name: str, bad: float) -> None:
    pages = make_pages([5, 4, 7], [2, 3, 0], 8)
    clean, dirty = Caches(pages, 4, 7), Caches(pages, 4, 7)
    getattr(dirty, name)[1][3:] = bad
    clean.update(pages)
    dirty.update(pages)
    for row, total in ((0, 7), (2, 7)):
        assert torch.equal(dirty.pools_of(row, total), clean.pools_of(row, total))
    assert not bool(dirty.pools_of(1, 7).isfinite().all()), "the bad values did not come in"


# --- choice -----------------------------------------------------------------------------------------------------------


def queries(
    pages: Pages, *, seed: int = 5, exact: bool = False, heads: int = HEADS
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the queries and weights of every position; `exact`: of small integers, so that scores have no rounding."""
    q, w = requests(pages, heads, DIM, seed=seed), requests(pages, heads, seed=seed + 1)
    return ([x.round() for x in q], [x.round() for x in w]) if exact else (q, w)


def key_cache(pages: Pages, pool: int, *, exact: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a pool cache with a key for each complete pool and NaN everywhere else."""
    cache, _ = make_cache(pages.blocks, pages.block_size // pool, DIM, dtype)
    generator = torch.Generator().manual_seed(7)
    for row in range(len(pages.lengths)):
        for p in range((max(pages.history[row], 0) + pages.lengths[row]) // pool):
            key = torch.randn(DIM, generator=generator)
            block = int(pages.table[row, p // cache.shape[1]])
            cache[block, p % cache.shape[1]] = key.round() if exact else key
    return cache


def check_select(
    lengths: list[int],
    history: list[int],
    pool: int = 4,
    topk: int = 8,
    *,
    entries: int = 4,
    given: str = "exact",
    slack: int = 0,
    exact: bool = True,
    outside: int = 0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Compare with the definition, index by index; scores are exact, so that equal ones are equal in both."""
    pages = make_pages(lengths, history, pool * entries, seed=seed)
    q, w = (pages.pack(x, outside).to(dtype) for x in queries(pages, exact=exact, seed=seed))
    cache = key_cache(pages, pool, exact=exact, dtype=dtype)
    before = cache.clone()
    options: dict[str, Any] = {"topk": topk, "kpool": pool, "max_kv_len": pages.longest + slack}
    want = reference.kpool_select(q, w, cache, **pages.rows, **options)
    with no_host_reads():
        got = kpool_select(q, w, cache, **pages.rows, **options, host_lengths=host_lengths(given, pages))
    assert got.dtype == torch.int32
    assert torch.equal(bits(cache), bits(before))
    assert torch.equal(got, want)
    return got


def test_choice_by_hand() -> None:
    """Seven tokens, pools of two: three keys and an open pool. The heads' relu is taken before their weights."""
    q = torch.tensor([[[1.0], [-1.0]]])
    keys = torch.tensor([[[2.0], [-3.0], [1.0], [NAN]]])
    rows: dict[str, Any] = {"cu_seqlens": ints(0, 1), "block_offsets": ints(0)[None], "history_lens": ints(6)}
    for weights, topk, want in (
        # Scores 2, 6, 1: relu(q · key) is 2, 0, 1 of the first head and 0, 3, 0 of the second.
        ([1.0, 2.0], 2, [2, 3, 6]),
        ([1.0, 2.0], 4, [0, 1, 2, 3, 6]),
        # Scores 2, -3, 1.
        ([1.0, -1.0], 2, [0, 1, 6]),
        ([1.0, -1.0], 4, [0, 1, 4, 5, 6]),
        # Scores 0, 3, 0: of the equal ones the earlier.
        ([0.0, 1.0], 4, [0, 1, 2, 3, 6]),
        # All 0.
        ([0.0, 0.0], 2, [0, 1, 6]),
        ([0.0, 1.0], 6, [0, 1, 2, 3, 4, 5, 6]),
        ([0.0, 1.0], 9, [0, 1, 2, 3, 4, 5, 6, -1, -1, -1]),
        # Not even one pool: the open one alone.
        ([0.0, 1.0], 1, [6, -1]),
    ):
        got = kpool_select(q, torch.tensor([weights]), keys, **rows, topk=topk, kpool=2, max_kv_len=7)
        assert got.tolist() == [want], (weights, topk)


@pytest.mark.parametrize("topk", [1, 3, 4, 8, 9, 16, 64, 500], ids=lambda k: f"k{k}")
@pytest.mark.parametrize("pool", [1, 2, 4, 7], ids=lambda p: f"P{p}")
def test_choice_matches_definition(pool: int, topk: int) -> None:
    check_select([1, 2, 3, 0, 40], [0, 41, 6, 8, 33], pool, topk, slack=3, outside=2)


@pytest.mark.parametrize("lengths", [[1] * 6, [4] * 6], ids=["decode", "verify3"])
@pytest.mark.parametrize("given", ["exact", "bounds", "none"])
def test_choice_of_a_step(lengths: list[int], given: str) -> None:
    check_select(lengths, [0, 700, 1, -1, 255, 256], given=given, slack=3, entries=16)


@pytest.mark.parametrize("exact", [True, False], ids=["ties", "random"])
@pytest.mark.parametrize("seed", range(40))
def test_choice_of_drawn_batches(seed: int, exact: bool) -> None:
    rng, lengths, history = drawn(seed)
    check_select(
        lengths, history, rng.choice([1, 2, 4, 8]), rng.choice([1, 4, 8, 16, 64]), entries=rng.choice([1, 2, 5]),
        given=rng.choice(["exact", "bounds", "none"]), slack=rng.choice([0, 1, 500]), exact=exact,
        outside=rng.choice([0, 2]), seed=seed,
    )  # fmt: skip


@EACH_DTYPE
def test_choice_in_every_dtype(dtype: torch.dtype) -> None:
    check_select([9, 3, 1], [31, 0, 60], dtype=dtype)


def test_choice_with_blocks_of_one_pool_of_128() -> None:
    check_select([130, 1, 4], [500, 1023, 127], 128, 256, entries=1)


def test_more_pools_and_queries_than_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several groups of chunks, several steps of pages."""
    asked: list[int] = []
    gather = common_pages.gather_pages

    def counted(cache: Tensor, table: Tensor, rows: Tensor, pages: range) -> Tensor:
        asked.append(rows.shape[0])
        return gather(cache, table, rows, pages)

    monkeypatch.setattr(select_eager, "gather_pages", counted)
    monkeypatch.setattr(select_eager, "STEP_BYTES", 3 * 4 * 16 * (HEADS * 128 + 6 * 256 + 64))
    check_select([90, 33, 1], [600, 0, 603], 4, 32, entries=16)
    assert len(asked) >= 6
    assert len(set(asked)) > 1


@pytest.mark.parametrize("longest", [5, 11])
def test_without_more_pools_than_are_taken_no_key_is_read(longest: int) -> None:
    """Up to topk + P - 1 tokens the choice is all of them, whatever keys and queries are."""
    pages = make_pages([longest], [0], 4)
    q, w = torch.full((longest, 1, DIM), NAN), torch.full((longest, 1), NAN)
    cache = torch.full((pages.blocks, 1, DIM), NAN)
    got = kpool_select(q, w, cache, **pages.rows, topk=8, kpool=4, max_kv_len=longest)
    assert got.tolist() == [[p if p <= t else -1 for p in range(11)] for t in range(longest)]


def select(pages: Pages, q: list[Tensor], w: list[Tensor], cache: Tensor, **options: Any) -> Tensor:
    common: dict[str, Any] = {"topk": 16, "kpool": 4, "max_kv_len": pages.longest, "host_lengths": pages.lengths}
    return kpool_select(pages.pack(q), pages.pack(w), cache, **pages.rows, **(common | options))


def test_choice_does_not_depend_on_the_rest_of_the_batch() -> None:
    """Index by index: rows alone, in another order, with a larger bound, without lengths."""
    pages = make_pages([5, 40, 1, 3], [90, 20, 200, 61], 16)
    (q, w), cache = queries(pages, heads=32), key_cache(pages, 4)
    together = select(pages, q, w, cache)
    alone = []
    for row in range(4):
        one = Pages([pages.lengths[row]], [pages.history[row]], 16, pages.table[row : row + 1], pages.blocks)
        alone.append(select(one, q[row : row + 1], w[row : row + 1], cache))
    assert torch.equal(torch.cat(alone), together)
    for bound in (pages.longest + 1, 500, 5000):
        assert torch.equal(select(pages, q, w, cache, max_kv_len=bound), together)
    assert torch.equal(select(pages, q, w, cache, host_lengths=None), together)
    back = Pages(pages.lengths[::-1], pages.history[::-1], 16, pages.table.flip(0), pages.blocks)
    turned = select(back, q[::-1], w[::-1], cache).split(back.lengths)
    assert torch.equal(torch.cat(turned[::-1]), together)


def test_choice_in_any_chunks_equals_one_shot() -> None:
    total = 150
    pages = make_pages([total], [0], 16)
    (q, w), cache = queries(pages, heads=32), key_cache(pages, 4)
    one = select(pages, q, w, cache)
    for cuts in ([1], [2, 3], [63, 64, 65], [100, 101, 104], [*range(20, 150)]):
        parts = [select(pages.step([hi - lo], [lo]), q, w, cache) for lo, hi in pairwise([0, *cuts, total])]
        assert torch.equal(torch.cat(parts), one), cuts


def test_a_pool_of_a_rejected_draft_is_no_candidate() -> None:
    """P9, P10: its key is still there, and larger than all, but its last token lies past the query."""
    pages = make_pages([1], [14], 16, room=4)
    cache = key_cache(pages, 4)
    cache[int(pages.table[0, 0]), 3] = 1e6
    q = torch.ones(1, 1, DIM)
    options: dict[str, Any] = {"topk": 4, "kpool": 4}
    got = kpool_select(q, torch.ones(1, 1), cache, **pages.rows, **options, max_kv_len=19)
    assert got[0, 4:].tolist() == [12, 13, 14]
    assert got[0, 0] < 12
    after = kpool_select(q, torch.ones(1, 1), cache, **pages.step([1], [15]).rows, **options, max_kv_len=19)
    assert after[0].tolist() == [12, 13, 14, 15, -1, -1, -1]


@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("name", ["q", "w", "key"])
def test_a_bad_request_changes_no_other_choice(name: str, bad: float) -> None:
    pages = make_pages([5, 40, 3], [90, 60, 61], 16)
    (q, w), cache = queries(pages), key_cache(pages, 4)
    want = select(pages, q, w, cache).split(pages.lengths)
    if name == "key":
        cache[pages.table[1, :3].long()] = bad
    else:
        {"q": q, "w": w}[name][1][70:] = bad
    got = select(pages, q, w, cache).split(pages.lengths)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[2], want[2])
    # What the bad one chooses are tokens that it sees, each once.
    for t, row in enumerate(got[1].tolist()):
        chosen = [p for p in row if p >= 0]
        assert len(chosen) == len(set(chosen)) == 16 + (61 + t) % 4
        assert max(chosen) <= 60 + t


def test_a_nan_counts_as_the_least() -> None:
    pages = make_pages([1], [31], 16)
    cache = key_cache(pages, 4, exact=True)
    cache[int(pages.table[0, 0]), 1] = NAN
    q = torch.ones(1, 1, DIM)
    options: dict[str, Any] = {**pages.rows, "topk": 28, "kpool": 4, "max_kv_len": 32}
    got = kpool_select(q, torch.ones(1, 1), cache, **options)
    assert got[0, :28].tolist() == [p for p in range(32) if p // 4 != 1]
    assert torch.equal(got, reference.kpool_select(q, torch.ones(1, 1), cache, **options))


def test_pad_rows_and_empty_batches_choose_nothing() -> None:
    got = check_select([4, 35, 1, 9], [70, -1, -9, 50], outside=3)
    assert bool((got[4:40] == -1).all())
    assert bool((got[-3:] == -1).all())
    assert bool((check_select([3, 2], [-1, -1]) == -1).all())
    check_select([0, 0], [0, 9])
    check_select([0], [40], outside=3)
    for rows, tokens in ((0, 0), (0, 3), (2, 0)):
        got = kpool_select(
            torch.randn(tokens, 2, DIM), torch.randn(tokens, 2), torch.randn(2, 2, DIM), topk=8, kpool=4, max_kv_len=64,
            cu_seqlens=torch.zeros(rows + 1, dtype=torch.int64), history_lens=torch.zeros(rows, dtype=torch.int64),
            block_offsets=torch.zeros(rows, 1, dtype=torch.int32),
        )  # fmt: skip
        assert got.shape == (tokens, 11)
        assert bool((got == -1).all())


def test_queries_may_be_views() -> None:
    pages = make_pages([5, 3], [60, 33], 16)
    (q, w), cache = queries(pages), key_cache(pages, 4)
    want = select(pages, q, w, cache)
    wide = torch.cat((pages.pack(w), pages.pack(q).flatten(1), torch.zeros(8, 3)), 1)
    turned = wide[:, HEADS:-3].unflatten(1, (HEADS, DIM)).transpose(1, 2).contiguous().transpose(1, 2)
    got = kpool_select(turned, wide[:, :HEADS], cache, **pages.rows, topk=16, kpool=4, max_kv_len=pages.longest)
    assert torch.equal(got, want)


def test_the_guard_against_host_reads_sees_into_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    def reading(scores: Tensor, complete: Tensor, most: int) -> Tensor:
        return torch.arange(int(complete.max()))[:most].expand(scores.shape[0], -1)

    monkeypatch.setattr(select_eager, "best_pools", reading)
    with pytest.raises(HostRead):
        check_select([9], [31])


# --- both, beside transformers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [15, 16, 17, 18, 75], ids=lambda n: f"T{n}")
def test_both_are_the_indexer_of_transformers(tokens: int) -> None:
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextIndexer

    pool, topk, heads, hidden, rank = 4, 16, 32, 24, 20
    config = SimpleNamespace(
        hidden_size=hidden, index_n_heads=heads, index_head_dim=DIM, qk_rope_head_dim=0, index_topk=topk,
        q_lora_rank=rank, index_kpool=pool, index_kpool_always_select_tail=True,
    )  # fmt: skip
    module = Glm5NextTextIndexer(config, 0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape))
        x, resid = torch.randn(1, tokens, hidden), torch.randn(1, tokens, rank)
        want = module(x, resid, torch.ones(1, tokens, dtype=torch.bool), None)[0]
        k, gate = module.k_norm(module.wk(x))[0], (x @ module.index_kpool_compress_gate.T)[0]
        q, weights = module.wq_b(resid)[0].view(tokens, heads, DIM), module.weights_proj(x)[0] * heads**-0.5
        pages = make_pages([tokens], [0], 8)
        pools, tails = make_cache(pages.blocks, 2, DIM)[0], make_cache(pages.blocks, 4, 2 * DIM)[0]
        got = []
        for lo, hi in ((0, tokens // 3), (tokens // 3, tokens - 2), (tokens - 2, tokens)):
            rows = pages.step([hi - lo], [lo]).rows
            kpool_update(k[lo:hi], gate[lo:hi], module.index_kpool_compress_ape, pools, tails, **rows)
            options: dict[str, Any] = {"topk": topk, "kpool": pool, "max_kv_len": hi}
            got.append(kpool_select(q[lo:hi], weights[lo:hi], pools, **rows, **options))
    ours = torch.cat(got)
    assert ours.shape == want.shape
    assert torch.equal(ours.sort(1).values, want.sort(1).values)
    assert tokens <= topk + pool - 1 or len(set(ours[-1].tolist())) < tokens, "everything was chosen"


# --- what is checked on demand ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        pytest.param({"cu_seqlens": ints(1, 2, 5)}, "cu_seqlens", id="start"),
        pytest.param({"cu_seqlens": ints(0, -1, 5)}, "cu_seqlens", id="falling"),
        pytest.param({"cu_seqlens": ints(0, 2, 6)}, "cu_seqlens", id="past-the-tokens"),
        pytest.param({"host_lengths": [2, 2]}, "host_lengths", id="too-short"),
        pytest.param({"history_lens": ints(3, 6)}, "history_lens", id="past-the-table"),
        pytest.param({"block_offsets": torch.tensor([[0, 4], [1, 2]])}, "block_offsets", id="past-the-cache"),
        pytest.param({"block_offsets": torch.tensor([[0, 3], [-1, 2]])}, "block_offsets", id="negative"),
    ],
)
def test_values_are_checked_on_demand(changed: dict[str, Any], argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: dict[str, Any] = {
        "cu_seqlens": ints(0, 2, 5),
        "block_offsets": torch.tensor([[0, 3], [1, 2]]),
        "history_lens": ints(3, -1) if argument == "nothing" else ints(3, 1),
        "host_lengths": [2, 3],
    }
    x, pools, tails = torch.randn(5, 3), torch.randn(4, 2, 3), torch.randn(4, 3, 6)
    monkeypatch.setenv("DLINFER_EXT_CHECK", "1")
    kpool_update(x, x, torch.zeros(2, 3), pools, tails, **rows)
    before = pools.clone(), tails.clone()
    with pytest.raises(ValueError, match=f"^kpool_update: argument '{argument}' .*wanted"):
        kpool_update(x, x, torch.zeros(2, 3), pools, tails, **(rows | changed))
    assert torch.equal(pools, before[0])
    assert torch.equal(tails, before[1])


def test_the_bound_on_the_context_is_checked_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLINFER_EXT_CHECK", "1")
    with pytest.raises(
        ValueError, match=r"^kpool_select: argument 'history_lens' is 31 with 9 tokens at row 0; wanted"
    ):
        kpool_select(
            torch.zeros(9, 1, 1), torch.zeros(9, 1), torch.zeros(5, 4, 1), cu_seqlens=ints(0, 9), topk=4, kpool=2,
            block_offsets=torch.arange(5)[None], history_lens=ints(31), max_kv_len=39,
        )  # fmt: skip
