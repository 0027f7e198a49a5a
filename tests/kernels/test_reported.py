"""Problems reported of other implementations of GLM-5.3-Flash's blocks, each in its own situation, by its number.

The register of all of them, with links, and with the tests of the engine that are about the others, is
tests/reported.py. Each case compares the batched operators with their definitions, or with values written out.
"""

from __future__ import annotations

import ast
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from dlinfer_ext.kernels.causal_conv1d import reference as conv_definition
from dlinfer_ext.kernels.clamped_moe import reference as moe_definition
from dlinfer_ext.kernels.kda import reference as kda_definition
from dlinfer_ext.kernels.kpool_indexer import reference as kpool_definition
from dlinfer_ext.kernels.latent_attention import reference as latent_definition
from dlinfer_ext.ops import (
    clamped_moe,
    clamped_silu_and_mul,
    kda,
    kda_update,
    kpool_select,
    kpool_update,
    latent_attention,
)
from dlinfer_ext.ops.causal_conv1d import causal_conv1d, causal_conv1d_update
from dlinfer_ext.testing import TOLERANCE, assert_close, no_host_reads
from tests.kernels import test_kpool_indexer as kpool_tests
from tests.kernels import test_latent_attention as latent_tests
from tests.kernels.delta_checks import SMALL, Dims, Inputs, entry, ints, make_pool, offsets
from tests.kernels.page_checks import make_cache, make_pages, requests
from tests.kernels.test_kda import channel_gate, check_prefill, check_update, drawn_gate, make_inputs, run_parts

NAN: Final = float("nan")
FP32: Final = TOLERANCE["kda", torch.float32]
KPOOL_FP32: Final = TOLERANCE["kpool", torch.float32]
WIDTH: Final = 4

CASES: Final[dict[str, Callable[[], None]]] = {}
# Cases with an operator that has no kernel yet.
EAGER: Final[set[str]] = set()


def reported(name: str, *, eager_only: bool = False) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(case: Callable[[], None]) -> Callable[[], None]:
        assert name not in CASES
        CASES[name] = case
        if eager_only:
            EAGER.add(name)
        return case

    return register


def tokens(x: Inputs, first: int, last: int) -> Inputs:
    """Return tokens of one row as a step [1, last - first, ..]."""
    return Inputs(*(y[None, first:last] for y in x))


@reported("01-vllm-ascend-15329")
def _() -> None:
    """A step that verifies two tokens is two steps of one, in the rule and in the convolution."""
    slots, past = ints(2, 0, 3), ints(5, 1, 8)
    check_update(3, 2, slots=[2, 0, 3], history=[5, 1, 8], ring=2)
    x, (pool, _) = make_inputs([3, 2]), make_pool(4, ring=2)
    single = pool.clone()
    both = kda_update(*x, pool, state_indices=slots, history_lens=past)
    for t in range(2):
        alone = kda_update(*x.rows((slice(None), slice(t, t + 1))), single, state_indices=slots, history_lens=past + t)
        assert_close(f"token {t}", both[:, t : t + 1], alone, FP32)
    assert_close("states", pool, single, FP32)

    new, weight, window = torch.randn(3, 2, 6), torch.randn(WIDTH, 6), torch.randn(4, WIDTH, 6)
    single = window.clone()
    both = causal_conv1d_update(new, window, weight, None, "silu", slots, cache_seqlens=past)
    for t in range(2):
        alone = causal_conv1d_update(new[:, t], single, weight, None, "silu", slots, cache_seqlens=past + t)
        assert_close(f"token {t}", both[:, t], alone, FP32)
    assert torch.equal(window, single)


@reported("01-vllm-ascend-15329-attention", eager_only=True)
def _() -> None:
    for sparse in (False, True):
        latent_tests.check_attention([2, 2, 2], [5, 0, 300], sparse=sparse)
    kpool_tests.check_select([2, 2, 2], [5, 70, 300])


@reported("02-vllm-41292")
def _() -> None:
    """Decode goes on from what prefill has stored, where keys and values differ in width, in either order of both."""
    total, prompt = 40, 33
    for dims in (Dims(2, 4, 8, 12), Dims(2, 2, 12, 8), Dims(1, 1, 8, 8)):
        x, common = make_inputs([total], dims), {"use_qk_l2norm": True}
        exact = torch.zeros(1, dims.HV, dims.V, dims.K).double()
        want = kda_definition.kda(*x, exact, cu_seqlens=ints(0, total), use_qk_l2norm=True)
        for v_first in (True, False):
            pool, _ = make_pool(2, dims, v_first=v_first)
            row: dict[str, Any] = {"state_indices": ints(1), "state_v_first": v_first, **common}
            kda(*x.rows(slice(0, prompt)), pool, cu_seqlens=ints(0, prompt), history_lens=ints(0), **row)
            for t in range(prompt, total):
                o = kda_update(*tokens(x, t, t + 1), pool, history_lens=ints(t), **row)
                assert_close(f"token {t}", o[0], want[t : t + 1], FP32)
            assert_close("state", pool[1], exact[0] if v_first else exact[0].transpose(1, 2), FP32)


@reported("03-vllm-51039")
def _() -> None:
    """After a long prompt no NaN, and none from one request in another, nor in a slot that no row has."""
    assert bool(check_prefill([700, 3, 1], slots=[1, -1, 0], history=[0, 2, 0], dirty=NAN, tail=2).isfinite().all())
    lengths, past = [200, 5, 1], ints(0, 2, 2)
    x, (pool, _) = make_inputs([206]), make_pool(4)
    clean = pool.clone()
    common: dict[str, Any] = {"cu_seqlens": offsets(lengths), "history_lens": past, "host_lengths": lengths}
    want = kda(*x, clean, **common)
    x.v[200:205] = NAN
    o = kda(*x, pool, **common)
    for part, row in ((slice(0, 200), 0), (slice(205, 206), 2)):
        assert_close("o", o[part], want[part], FP32)
        assert_close("state", pool[row], clean[row], FP32)
    assert torch.equal(pool[3], clean[3])


class Request:
    """What a request leaves behind it: the last inputs of the convolution, a state, pools of keys and the open pool."""

    PARTS: Final = ("window", "state", "pools", "tails")

    def __init__(self, slot: int, blocks: list[int]) -> None:
        self.slot, self.table = ints(slot), torch.tensor([blocks])
        self.window, (self.state, _) = torch.zeros(3, WIDTH - 1, 6), make_pool(3)
        self.state.zero_()
        self.pools, self.tails = torch.zeros(4, 2, 6), torch.zeros(4, 5, 12)

    def step(self, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
        """Run tokens and return what the convolution and the rule give, and the pools."""
        generator = torch.Generator().manual_seed(9)
        x, weight, ape = (torch.randn(n, 6, generator=generator) for n in (16, WIDTH, 4))
        rows: dict[str, Any] = {"cu_seqlens": ints(0, last - first), "history_lens": ints(first)}
        part, slotted = slice(first, last), rows | {"state_indices": self.slot}
        conv = causal_conv1d(x[part], weight, None, self.window, **slotted)
        o = kda(*make_inputs([16]).rows(part), self.state, **slotted, use_qk_l2norm=True)
        kpool_update(x[part], x[part] / 2, ape, self.pools, self.tails, **rows, block_offsets=self.table)
        return conv, o, self.pools[self.table[0]]

    def take(self, other: Request, parts: tuple[str, ...]) -> None:
        for name in parts:
            paged = name in ("pools", "tails")
            mine, its = (r.table[0] if paged else r.slot for r in (self, other))
            getattr(self, name)[mine] = getattr(other, name)[its]


@reported("04-vllm-52627", eager_only=True)
def _() -> None:
    """Another instance goes on like the first if it has all that a request leaves behind, and not without a part."""
    for missing in (None, *Request.PARTS):
        here, there = Request(1, [2, 0]), Request(2, [1, 3])
        here.step(0, 6)
        there.take(here, tuple(p for p in Request.PARTS if p != missing))
        same = [torch.equal(a, b) for a, b in zip(here.step(6, 9), there.step(6, 9), strict=True)]
        assert all(same) == (missing is None), missing


@reported("05-vllm-53912")
def _() -> None:
    """What was kept of a prefix, and taken up after drafts were verified behind it, is the state computed anew."""
    prefix, total, drafts = 64, 90, 3
    x, (pool, _) = make_inputs([total]), make_pool(3, ring=1 + drafts)
    exact = torch.zeros(1, SMALL.HV, SMALL.V, SMALL.K).double()
    want = kda_definition.kda(*x, exact, cu_seqlens=ints(0, total))
    kda(*x.rows(slice(0, prefix)), pool, cu_seqlens=ints(0, prefix), state_indices=ints(0), history_lens=ints(0))
    pool[2] = pool[0]
    for seed, past in ((7, prefix), (8, prefix + 1), (9, prefix + 4)):
        wrong = make_inputs([1, 1 + drafts], seed=seed)
        kda_update(*wrong, pool, state_indices=ints(0), history_lens=ints(past))
    rest = slice(prefix, total)
    o = kda(
        *x.rows(rest), pool, cu_seqlens=ints(0, total - prefix), state_indices=ints(2), history_lens=ints(prefix)
    )  # fmt: skip
    assert_close("o", o, want[rest], FP32)
    assert_close("state", pool[entry(2, total, 1 + drafts)], exact[0], FP32)


@reported("06-vllm-56196")
def _() -> None:
    """Chunks shorter than width - 1 go to their own slots, beside the older columns that stay."""
    lengths, slots, history = [1, 2, 1, 3, 1], [2, 0, -1, 4, 5], [5, 0, 3, 2, 0]
    x, weight = torch.randn(sum(lengths), 6), torch.randn(WIDTH, 6)
    columns = {"linear": WIDTH - 1, "ring": 6}
    for layout, length in columns.items():
        pool = torch.randn(7, length, 6)
        before, want_pool = pool.clone(), pool.double()
        rows = offsets(lengths), torch.tensor(slots), torch.tensor(history)
        want = conv_definition.causal_conv1d(x, weight, None, want_pool, *rows, layout, "silu")
        o = causal_conv1d(
            x, weight, None, pool, cu_seqlens=rows[0], state_indices=rows[1], history_lens=rows[2],
            layout="ring" if layout == "ring" else "linear", activation="silu",
        )  # fmt: skip
        assert_close(layout, o, want, TOLERANCE["kda", torch.float32])
        assert torch.equal(pool.double(), want_pool), layout
        assert torch.equal(pool[[1, 3, 6]], before[[1, 3, 6]])
        if layout == "ring":
            # Position 5 is in column 5; of the older ones none has moved.
            assert torch.equal(pool[2, 5], x[0])
            assert torch.equal(pool[2, :5], before[2, :5])


@reported("07-vllm-34587")
def _() -> None:
    """At the end of each block the pool holds the state of just the tokens so far, which is what may be kept."""
    x, pool, block = make_inputs([150]), torch.full((1, SMALL.HV, SMALL.V, SMALL.K), NAN), 64
    for first in range(0, 150, block):
        last = min(first + block, 150)
        kda(*x.rows(slice(first, last)), pool, cu_seqlens=ints(0, last - first), history_lens=ints(first))
        exact = torch.zeros(1, SMALL.HV, SMALL.V, SMALL.K).double()
        kda_definition.kda(*x.rows(slice(0, last)), exact, cu_seqlens=ints(0, last))
        assert_close(f"state of {last} tokens", pool, exact, FP32)


@reported("07-vllm-34587-pools", eager_only=True)
def _() -> None:
    """A pool is not there before its last token, and whole with it."""
    pages = make_pages([8], [0], 8)
    caches = kpool_tests.Caches(pages, 4, 5)
    for position in range(8):
        caches.update(pages.step([1], [position]))
        block = caches.pools[int(pages.table[0, 0])]
        there = [bool(block[p].isfinite().all()) for p in range(2)]
        assert there == [position >= 3, position >= 7]
    assert_close("pools", caches.pools_of(0, 8), caches.whole_pools(0, 8), KPOOL_FP32)


@reported("08-llm-616")
def _() -> None:
    """Decode rows beside chunks of prompts are what they are alone."""
    lengths, slots, history = [1, 65, 1, 33, 1], [4, 0, 2, 1, 5], [9, 64, 3, 0, 70]
    total, cu = sum(lengths), offsets(lengths)
    x, (pool, _) = make_inputs([total]), make_pool(6)
    inputs, weight, window = torch.randn(total, 6), torch.randn(WIDTH, 6), torch.randn(6, WIDTH - 1, 6)
    states, windows = pool.clone(), window.clone()
    rows: dict[str, Any] = {
        "cu_seqlens": cu, "state_indices": torch.tensor(slots), "history_lens": torch.tensor(history),
    }  # fmt: skip
    o = kda(*x, pool, **rows, use_qk_l2norm=True)
    conv = causal_conv1d(inputs, weight, None, window, **rows)
    for row, (lo, hi) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
        one: dict[str, Any] = {"state_indices": ints(slots[row]), "history_lens": ints(history[row])}
        if hi - lo == 1:
            alone = kda_update(*tokens(x, lo, hi), states, **one, use_qk_l2norm=True)[0]
        else:
            alone = kda(*x.rows(slice(lo, hi)), states, cu_seqlens=ints(0, hi - lo), **one, use_qk_l2norm=True)
        assert_close(f"row {row}", o[lo:hi], alone, FP32)
        part = causal_conv1d(inputs[lo:hi], weight, None, windows, cu_seqlens=ints(0, hi - lo), **one)
        assert_close(f"convolution of row {row}", conv[lo:hi], part, FP32)
    assert_close("states", pool, states, FP32)
    assert torch.equal(window, windows)


@reported("08-llm-616-attention", eager_only=True)
def _() -> None:
    for sparse in (False, True):
        latent_tests.check_attention([1, 65, 1, 33], [90, 64, 3, 0], sparse=sparse)
    kpool_tests.check_update([1, 65, 1, 33], [90, 64, 3, 0])
    kpool_tests.check_select([1, 65, 1, 33], [90, 64, 3, 0])


@reported("09-llm-622", eager_only=True)
def _() -> None:
    """Of 1 + 3 tokens one is kept, again and again, from each place in a pool; the rejected ones carry 1000."""
    for phase in range(4):
        for kept in (1, 2, 4):
            caches, total = kpool_tests.speculate(4, 3, 7, 12 + phase, [kept] * 6)
            assert_close("pools", caches.pools_of(0, total), caches.whole_pools(0, total), KPOOL_FP32)


@reported("10-vllm-55201", eager_only=True)
def _() -> None:
    """With fewer complete pools than may be taken the rest is -1, whatever lies in entries that no pool has yet."""
    for history in (0, 2, 3, 9, 14, 15, 30):
        pages = make_pages([1], [history], 16, room=40)
        cache = kpool_tests.key_cache(pages, 4)
        cache[cache.isnan()] = 1e6
        q, w = torch.ones(1, 2, kpool_tests.DIM), torch.ones(1, 2)
        options: dict[str, Any] = {**pages.rows, "topk": 16, "kpool": 4, "max_kv_len": history + 41}
        got = kpool_select(q, w, cache, **options)
        assert torch.equal(got, kpool_definition.kpool_select(q, w, cache, **options))
        chosen = got[0][got[0] >= 0].tolist()
        complete = (history + 1) // 4
        assert len(chosen) == len(set(chosen)) == 4 * min(complete, 4) + (history + 1) % 4
        assert max(chosen) <= history
        assert bool((got[0, len(chosen) :] == -1).all())


@reported("11-vllm-55563", eager_only=True)
def _() -> None:
    """2048 tokens in pools of 4 make 2051 columns, of which the last three are the open pool's or -1."""
    topk, kpool, history = 2048, 4, 2086
    pages = make_pages([1, 1, 1], [history, history + 1, 2], 64)
    q, w = (pages.pack(x) for x in kpool_tests.queries(pages, exact=True))
    keys = kpool_tests.key_cache(pages, kpool, exact=True)
    options: dict[str, Any] = {**pages.rows, "max_kv_len": pages.longest}
    got = kpool_select(q, w, keys, **options, topk=topk, kpool=kpool)
    assert got.shape == (3, 2051)
    assert got[0, 2048:].tolist() == [2084, 2085, 2086]
    assert got[1, 2048:].tolist() == [-1, -1, -1]
    assert got[2].tolist() == [0, 1, 2] + [-1] * 2048
    assert torch.equal(got, kpool_definition.kpool_select(q, w, keys, **options, topk=topk, kpool=kpool))

    latents = requests(pages, latent_tests.DIM)
    cache = latent_tests.filled(pages, latents)
    query = pages.pack(requests(pages, latent_tests.HEADS, latent_tests.DIM, seed=2))
    reads: dict[str, Any] = {**options, "value_dim": latent_tests.VALUE, "scale": 0.3, "indices": got}
    o = latent_attention(query, cache, **reads)
    assert_close("o", o, latent_definition.latent_attention(query, cache, **reads), TOLERANCE["latent", torch.float32])


@reported("12-vllm-57317", eager_only=True)
def _() -> None:
    """A raw token lies in entry p mod R of its own block, and nowhere else."""
    kpool, ring, size, total = 4, 7, 8, 21
    pages = make_pages([total], [0], size)
    caches = kpool_tests.Caches(pages, kpool, ring)
    whole = torch.cat((caches.k[0], caches.gate[0]), 1)
    held: dict[tuple[int, int], int] = {}
    for first, last in ((0, 1), (1, 6), (6, 20), (20, total)):
        caches.update(pages.step([last - first], [first]))
        for p in range(first, last):
            held[int(pages.table[0, p // size]), p % ring] = p
        for block in range(pages.blocks):
            for place in range(ring):
                got = caches.tails[block, place]
                holds = held.get((block, place))
                right = bool(got.isnan().all()) if holds is None else torch.equal(got, whole[holds])
                assert right, (block, place)


@reported("13-exl3-79", eager_only=True)
def _() -> None:
    """Rows in buffers that stay where they are, filled anew for each step; and rows of which nothing may be written."""
    dim, kpool, ring, rows, size = kpool_tests.DIM, 4, 7, 3, 8
    k, gate = torch.zeros(rows * 2, dim), torch.zeros(rows * 2, dim)
    table, history = torch.zeros(rows, 3, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    cu, ape = ints(0, 2, 4, 6), torch.randn(kpool, dim)
    pools, tails = make_cache(9, size // kpool, dim)[0], make_cache(9, ring, 2 * dim)[0]
    want = pools.double(), tails.double()
    places = [t.data_ptr() for t in (k, gate, table, history, pools, tails)]
    steps: tuple[tuple[list[int], list[list[int]]], ...] = (
        ([2, 5, -1], [[0, 1, -1], [2, 3, 2**31 - 1], [4, 4, 4]]),
        ([-1, 7, 4], [[0, 0, 0], [2, 3, 9], [5, -(2**31), 6]]),
        ([22, -1, -9], [[7, 0, 1], [2, 2, 2], [3, 3, 3]]),
    )
    for past, blocks in steps:
        for buffer in (k, gate):
            buffer.normal_()
        table.copy_(torch.tensor(blocks))
        history.copy_(torch.tensor(past))
        given: dict[str, Any] = {"cu_seqlens": cu, "block_offsets": table, "history_lens": history}
        with no_host_reads():
            kpool_update(k, gate, ape, pools, tails, **given, host_lengths=[2, 2, 2])
        kpool_definition.kpool_update(k, gate, ape, *want, **given)
        assert torch.equal(tails.double().nan_to_num(7), want[1].nan_to_num(7))
        assert torch.equal(pools.isnan(), want[0].isnan())
        assert_close("pools", pools.nan_to_num(), want[0].nan_to_num(), KPOOL_FP32)
    assert places == [t.data_ptr() for t in (k, gate, table, history, pools, tails)]
    kpool_tests.check_update([4, 0, 35, 1], [3, 5, -1, 1], outside=3)


@reported("18-sglang-37813")
def _() -> None:
    """A verify step leaves the state after its token t at (history + t + 1) mod ring, from any history."""
    for history in range(5):
        check_update(3, 4, slots=[2, 0, 4], history=[history, history + 3, 0], ring=4)
    x, (pool, _) = make_inputs([1, 4]), make_pool(1, ring=4)
    begun, exact = pool.clone(), pool[:, 2].double()
    kda_update(*x, pool, history_lens=ints(6))
    for t in range(4):
        kda_definition.kda_update(*x.rows((slice(None), slice(t, t + 1))), exact, history_lens=ints(6 + t))
        assert_close(f"after token {t}", pool[0, (6 + t + 1) % 4], exact[0], FP32)
    assert not torch.equal(pool, begun)


@reported("21-mlx-vlm-2030", eager_only=True)
def _() -> None:
    """Gate and up are clamped before SiLU, the gate from above only: values written out, and the experts."""
    gate, up = [12.0, 30.0, -30.0, 10.0, 0.5], [12.0, -30.0, 30.0, 3.0, -10.5]

    def silu(z: float) -> float:
        return z / (1 + math.exp(-z))

    want = [silu(min(g, 10.0)) * max(-10.0, min(u, 10.0)) for g, u in zip(gate, up, strict=True)]
    got = clamped_silu_and_mul(torch.tensor([gate + up]), 10.0)[0]
    assert got.tolist() == pytest.approx(want, rel=1e-6)
    assert got[0].item() == pytest.approx(99.99546, rel=1e-6), "silu(10) is below 10"

    generator = torch.Generator().manual_seed(0)
    x, gate_up, down = (20 * torch.randn(s, generator=generator) for s in ((5, 16), (4, 16, 16), (4, 16, 8)))
    weights, ids = torch.rand(5, 2, generator=generator), torch.rand(5, 4, generator=generator).topk(2).indices
    layer = x, gate_up, down, weights, ids
    want_layer = moe_definition.clamped_moe(*layer, 10.0, 0)
    assert_close("experts", clamped_moe(*layer, limit=10.0), want_layer, TOLERANCE["clamped_moe", torch.float32])


@reported("23-dflash2-4")
def _() -> None:
    """The state that is left is compared as well as the output, at lengths around those of a chunk."""
    for length in (1, 31, 32, 33, 63, 64, 65, 128):
        check_prefill([length], dims=Dims(1, 2, 16, 24), slots=[1], history=[3])


@reported("25-cula-89")
def _() -> None:
    """Gates at their bound, at the bound beside none, and far below it: nothing overflows."""
    gates = channel_gate(130, SMALL, -5.0), channel_gate(130, SMALL, 0.0, -5.0), drawn_gate(130, SMALL, -20.0)
    for gate in gates:
        assert bool(check_prefill([130], history=[9], gate=gate).isfinite().all())
        check_update(2, 3, slots=[1, 0], history=[4, 1], gate=gate[:6].unflatten(0, (2, 3)))


@reported("26-attention-gym-337")
def _() -> None:
    """Not one bit of the first outputs depends on what follows, here a gate that is steeper."""
    total = 70
    for low in (-1.0, -5.0):
        x = make_inputs([total], gate=drawn_gate(total, SMALL, low))
        want = run_parts(x, make_pool(1)[0], [total])
        for keep in (1, 7, 8, 17, 40):
            other = x._replace(g=torch.cat([x.g[:keep], 3 * x.g[keep:]]))
            got = run_parts(other, make_pool(1)[0], [total])
            assert torch.equal(got[:keep], want[:keep]), f"the first {keep} of {total} tokens"


@reported("27-fla-1090")
def _() -> None:
    """K = 60 in lanes of 64: NaN behind each head's keys and gates is not read."""
    dims = Dims(1, 2, 60, 20)
    check_prefill([70, 2], dims=dims, history=[5, 0])
    check_update(2, 2, dims=dims)

    def among_nan(y: Tensor) -> Tensor:
        wide = torch.full((*y.shape[:-1], 64), NAN)
        wide[..., : y.shape[-1]] = y
        return wide[..., : y.shape[-1]]

    x = make_inputs([3], dims)
    x = Inputs(among_nan(x.q), among_nan(x.k), among_nan(x.v), among_nan(x.g), x.beta)
    pool, _ = make_pool(1, dims)
    exact = pool.double()
    want = kda_definition.kda(*x, exact, cu_seqlens=ints(0, 3), history_lens=ints(1))
    decoded = pool.clone()
    o = kda(*x, pool, cu_seqlens=ints(0, 3), history_lens=ints(1))
    p = kda_update(*Inputs(*(y[None] for y in x)), decoded, history_lens=ints(1))[0]
    for got, state in ((o, pool), (p, decoded)):
        assert_close("o", got, want, FP32)
        assert_close("state", state, exact, FP32)


def kernel_sources() -> dict[str, str]:
    """Return the sources that hold kernels, by path."""
    spec = importlib.util.find_spec("dlinfer_ext.kernels")
    assert spec is not None
    files = [f for root in spec.submodule_search_locations or () for f in sorted(Path(root).rglob("*.py"))]
    texts = {str(f): f.read_text(encoding="utf-8") for f in files}
    return {name: text for name, text in texts.items() if "triton" in text}


def autotuned(source: str) -> list[str]:
    """Return the functions that a decorator of triton's chooses configurations for."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return [f.name for f in functions if any("autotune" in ast.unparse(d) for d in f.decorator_list)]


@reported("28-plugin-fl-57")
def _() -> None:
    sources = kernel_sources()
    assert len(sources) >= 5
    assert {name: found for name, text in sources.items() if (found := autotuned(text))} == {}


@reported("31-vllm-ascend-6695")
def _() -> None:
    """A warm-up on memory that holds anything leaves nothing: the same slots serve fresh requests right afterwards."""
    dims = Dims(1, 1, 32, 32)
    x, (pool, _) = make_inputs([65], dims), make_pool(2, dims)
    pool.fill_(NAN)
    for lengths in ([1, 1], [64, 1]):
        kda(*x.rows(slice(0, sum(lengths))), pool, cu_seqlens=offsets(lengths), history_lens=ints(0, 0))
    kda_update(*make_inputs([2, 1], dims), pool, history_lens=ints(0, 0))
    pool[1] = NAN
    for slot in (0, 1):
        exact = torch.zeros(1, 1, 32, 32).double()
        want = kda_definition.kda(*x, exact, cu_seqlens=ints(0, 65))
        o = kda(*x, pool, cu_seqlens=ints(0, 65), state_indices=ints(slot), history_lens=ints(0))
        assert_close("o", o, want, FP32)
        assert_close("state", pool[slot], exact[0], FP32)


def params() -> list[Any]:
    mark = pytest.mark.eager_only(reason="no kernel is written for it yet")
    return [pytest.param(name, id=name, marks=[mark] if name in EAGER else []) for name in CASES]


@pytest.mark.parametrize("name", params())
def test_reported_fault(name: str) -> None:
    CASES[name]()
