"""Attention over latents against transformers' module, the fp64 definition, written-out values, and itself cut up."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dlinfer_ext.cli.bench_cases import peak_bytes
from dlinfer_ext.kernels.common import pages as common_pages
from dlinfer_ext.kernels.common.pages import STEP_BYTES
from dlinfer_ext.kernels.latent_attention import dense_eager, reference, sparse_eager
from dlinfer_ext.ops import latent_attention, latent_write
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
HEADS, DIM, VALUE = 3, 12, 8
SCALE = 0.3
LENGTHS_GIVEN = pytest.mark.parametrize("given", ["exact", "bounds", "none"])
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
DENSE_OR_SPARSE = pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])


def limit(dtype: torch.dtype) -> float:
    return TOLERANCE["latent", dtype]


FP32 = limit(torch.float32)


def ints(*values: int) -> Tensor:
    return torch.tensor(values)


def selection(pages: Pages, width: int = 9, outside: int = 0) -> Tensor:
    """Return int32 [T, width]: of each token up to `width` positions that it sees, in any order, then -1."""
    generator = torch.Generator().manual_seed(11)
    chosen = torch.full((pages.tokens + outside, width), -1, dtype=torch.int32)
    t = 0
    for past, n in zip(pages.history, pages.lengths, strict=True):
        for position in range(max(past, 0), max(past, 0) + n):
            seen = torch.randperm(position + 1, generator=generator)[:width]
            chosen[t, : seen.shape[0]] = seen
            t += 1
    return chosen


def written(pages: Pages) -> set[tuple[int, int]]:
    size = pages.block_size
    return {
        (int(pages.table[row, p // size]), p % size) for row in range(len(pages.lengths)) for p in pages.positions(row)
    }


def filled(pages: Pages, latents: list[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Return a cache with the latents of every row's history and tokens, and NaN everywhere else."""
    cache, _ = make_cache(pages.blocks, pages.block_size, DIM, dtype or latents[0].dtype)
    ends = [max(h, 0) + n for h, n in zip(pages.history, pages.lengths, strict=True)]
    whole = pages.step(ends, [0] * len(ends))
    reference.latent_write(whole.pack(latents), cache, **whole.rows)
    return cache


def attend(pages: Pages, q: Tensor, cache: Tensor, **options: Any) -> Tensor:
    common: dict[str, Any] = {
        "value_dim": VALUE,
        "scale": SCALE,
        "max_kv_len": pages.longest,
        "host_lengths": pages.lengths,
    }
    return latent_attention(q, cache, **pages.rows, **(common | options))


def check_attention(
    lengths: list[int],
    history: list[int],
    block_size: int = 16,
    *,
    sparse: bool = False,
    given: str = "exact",
    slack: int = 0,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    outside: int = 0,
    seed: int = 0,
    width: int = 9,
    value: int = VALUE,
) -> Tensor:
    """Compare with the definition: values, type, zero rows, inputs and cache untouched, nothing read on the host."""
    pages = make_pages(lengths, history, block_size, seed=seed)
    cache = filled(pages, requests(pages, DIM, dtype=dtype), cache_dtype)
    q = pages.pack(requests(pages, HEADS, DIM, dtype=dtype, seed=2), outside)
    indices = selection(pages, width, outside) if sparse else None
    kept = q.clone(), cache.clone()
    options: dict[str, Any] = {
        "value_dim": value, "scale": SCALE, "max_kv_len": pages.longest + slack, "indices": indices,
    }  # fmt: skip
    with no_host_reads():
        o = latent_attention(q, cache, **pages.rows, **options, host_lengths=host_lengths(given, pages))
    assert o.dtype == dtype
    assert torch.equal(bits(q), bits(kept[0]))
    assert torch.equal(bits(cache), bits(kept[1]))
    want = reference.latent_attention(q, cache, **pages.rows, **options)
    assert_close("o", o, want, limit(dtype))
    live = [h >= 0 for h, n in zip(history, lengths, strict=True) for _ in range(n)] + [False] * outside
    assert not any(bool(o[t].any()) for t, lives in enumerate(live) if not lives)
    return o


# --- the cache --------------------------------------------------------------------------------------------------------


def check_write(
    lengths: list[int],
    history: list[int],
    block_size: int = 16,
    *,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    outside: int = 0,
    seed: int = 0,
) -> None:
    pages = make_pages(lengths, history, block_size, seed=seed)
    c = pages.pack(requests(pages, DIM, dtype=dtype), outside)
    cache, storage = make_cache(pages.blocks, block_size, DIM, cache_dtype or dtype)
    before, want = storage.clone(), cache.clone()
    with no_host_reads():
        latent_write(c, cache, **pages.rows)
    reference.latent_write(c, want, **pages.rows)
    assert torch.equal(bits(cache), bits(want))
    assert_only_written(storage, before, cache, written(pages))


def test_write_by_hand() -> None:
    """Positions 3 to 5 of a row in blocks of two: the second entry of its block 1, both of its block 2."""
    cache = torch.zeros(4, 2, 1)
    rows: dict[str, Any] = {"cu_seqlens": ints(0, 3), "block_offsets": ints(0, 3, 1)[None], "history_lens": ints(3)}
    latent_write(torch.tensor([[7.0], [8.0], [9.0]]), cache, **rows)
    assert cache.flatten().tolist() == [0, 0, 8, 9, 0, 0, 0, 7]


@pytest.mark.parametrize("block_size", [1, 4, 16, 128], ids=lambda b: f"block{b}")
@pytest.mark.parametrize("history", [0, 1, 15, 16, 63], ids=lambda h: f"h{h}")
def test_write_is_the_definition(history: int, block_size: int) -> None:
    check_write([1, 2, 3, 0, 40], [history] * 5, block_size, outside=3)


@EACH_DTYPE
@pytest.mark.parametrize("cache_dtype", DTYPES, ids=lambda d: f"cache-{str(d)[6:]}")
def test_write_rounds_once(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    check_write([9, 3], [2, 0], dtype=dtype, cache_dtype=cache_dtype)


@pytest.mark.parametrize("seed", range(20))
def test_write_of_drawn_batches(seed: int) -> None:
    rng, lengths, history = drawn(seed)
    check_write(lengths, history, rng.choice([1, 2, 5, 64]), outside=rng.choice([0, 2]), seed=seed)


def test_write_of_pad_rows_and_empty_batches() -> None:
    for at in range(4):
        history = [3, 0, 5, 1]
        history[at] = -1 - at
        check_write([4, 35, 1, 9], history)
    check_write([4, 0, 2], [-1, 5, -7], outside=2)
    check_write([0, 0], [0, 9])
    check_write([0], [3], outside=3)
    for rows, tokens in ((0, 0), (0, 3), (2, 0)):
        cache = torch.randn(2, 4, DIM)
        before = cache.clone()
        latent_write(
            torch.randn(tokens, DIM), cache, cu_seqlens=torch.zeros(rows + 1, dtype=torch.int64),
            block_offsets=torch.zeros(rows, 1, dtype=torch.int32), history_lens=torch.zeros(rows, dtype=torch.int64),
        )  # fmt: skip
        assert torch.equal(cache, before)


def test_a_nan_of_one_request_is_written_and_goes_nowhere_else() -> None:
    pages = make_pages([3, 4], [1, -1], 4)
    cache, _ = make_cache(pages.blocks, 4, DIM)
    cache.zero_()
    c = pages.pack(requests(pages, DIM))
    c[1], c[3:] = NAN, NAN
    latent_write(c, cache, **pages.rows)
    assert int(cache.isnan().sum()) == DIM


# --- attention --------------------------------------------------------------------------------------------------------


def test_attention_by_hand() -> None:
    """Scores 0 and ln 3 of the two tokens give weights 1/4 and 3/4; the value is the first channel of the latent."""
    cache = torch.tensor([[[8.0, 0.0], [4.0, math.log(3) / 2]], [[NAN, NAN], [NAN, NAN]]])
    rows: dict[str, Any] = {"cu_seqlens": ints(0, 2), "block_offsets": ints(0, 1)[None], "history_lens": ints(0)}
    q = torch.tensor([[[0.0, 1.0], [5.0, 7.0]], [[0.0, 1.0], [0.0, -1.0]]])
    options: dict[str, Any] = {**rows, "value_dim": 1, "scale": 2.0, "max_kv_len": 2}
    o = latent_attention(q, cache, **options)
    assert o.flatten().tolist() == pytest.approx([8, 8, 5, 7], rel=1e-6)
    for indices, want in (
        ([[0, -1], [1, -1]], [8, 8, 4, 4]),
        ([[0, -1], [1, 0]], [8, 8, 5, 7]),
        # A query without a token; and one to which a later token is named.
        ([[-1, -1], [0, -1]], [0, 0, 8, 8]),
        ([[1, 0], [0, -1]], [8, 8, 8, 8]),
    ):
        o = latent_attention(q, cache, **options, indices=torch.tensor(indices))
        assert o.flatten().tolist() == pytest.approx(want, rel=1e-6), indices


@DENSE_OR_SPARSE
@pytest.mark.parametrize("block_size", [1, 4, 128, 300], ids=lambda b: f"block{b}")
@pytest.mark.parametrize("history", [0, 1, 127, 300], ids=lambda h: f"h{h}")
def test_attention_matches_definition(history: int, block_size: int, sparse: bool) -> None:
    check_attention([1, 2, 3, 0, 20], [history] * 5, block_size, sparse=sparse, slack=5, outside=3)


@DENSE_OR_SPARSE
@pytest.mark.parametrize("seed", range(40))
def test_attention_of_drawn_batches(seed: int, sparse: bool) -> None:
    rng, lengths, history = drawn(seed)
    check_attention(
        lengths, history, rng.choice([1, 2, 5, 64]), sparse=sparse, given=rng.choice(["exact", "bounds", "none"]),
        slack=rng.choice([0, 1, 500]), outside=rng.choice([0, 2]), seed=seed, width=rng.choice([1, 4, 60]),
        value=rng.choice([1, VALUE, DIM]),
    )  # fmt: skip


@DENSE_OR_SPARSE
@EACH_DTYPE
@pytest.mark.parametrize("cache_dtype", DTYPES, ids=lambda d: f"cache-{str(d)[6:]}")
def test_attention_rounds_once(dtype: torch.dtype, cache_dtype: torch.dtype, sparse: bool) -> None:
    check_attention([20, 1, 3], [40, 7, 0], sparse=sparse, dtype=dtype, cache_dtype=cache_dtype)


@pytest.mark.parametrize("lengths", [[1] * 6, [4] * 6], ids=["decode", "verify3"])
@DENSE_OR_SPARSE
@LENGTHS_GIVEN
def test_a_step_matches_definition(lengths: list[int], sparse: bool, given: str) -> None:
    check_attention(lengths, [0, 700, 1, -1, 255, 256], 64, sparse=sparse, given=given, slack=3)


@DENSE_OR_SPARSE
def test_large_scores_do_not_overflow(sparse: bool) -> None:
    """Scores of ±10,000 in rising, falling and equal order over the steps of a long context."""
    pages = make_pages([2, 2, 2], [700, 700, 700], 64)
    latents = requests(pages, DIM)
    for row, slope in enumerate((1.0, -1.0, 0.0)):
        latents[row][:, 0] = 1e4 * slope * torch.linspace(-1, 1, 702)
    cache = filled(pages, latents)
    q = torch.zeros(6, 1, DIM)
    q[:, 0, 0], q[:, 0, 1] = 1.0, 1.0
    indices = torch.arange(702).expand(6, -1).int() if sparse else None
    o = attend(pages, q, cache, indices=indices, scale=1.0)
    want = reference.latent_attention(
        q, cache, **pages.rows, value_dim=VALUE, scale=1.0, max_kv_len=702, indices=indices
    )
    assert_close("o", o, want, 1e-4)


@DENSE_OR_SPARSE
def test_any_chunks_equal_one_shot(sparse: bool) -> None:
    total = 300
    pages = make_pages([total], [0], 16)
    latents, q = requests(pages, DIM), pages.pack(requests(pages, HEADS, DIM, seed=2))
    chosen = selection(pages, 40)
    one = attend(pages, q, filled(pages, latents), indices=chosen if sparse else None)
    for cuts in ([1], [2, 3], [15, 16, 17], [255, 256, 260], [*range(200, 300)]):
        cache, _ = make_cache(pages.blocks, 16, DIM)
        parts = []
        for lo, hi in pairwise([0, *cuts, total]):
            step = pages.step([hi - lo], [lo])
            latent_write(latents[0][lo:hi], cache, **step.rows)
            parts.append(attend(step, q[lo:hi], cache, indices=chosen[lo:hi] if sparse else None))
        assert_close(f"cut at {cuts}", torch.cat(parts), one, FP32)


def test_every_position_selected_is_the_whole_context() -> None:
    pages = make_pages([30, 4], [50, 0], 16)
    cache, q = filled(pages, requests(pages, DIM)), pages.pack(requests(pages, HEADS, DIM, seed=2))
    everything = torch.arange(85).expand(34, -1).int()
    seen = torch.tensor([*range(51, 81), *range(1, 5)])[:, None]
    indices = torch.where(everything < seen, everything, -1)
    assert_close("o", attend(pages, q, cache, indices=indices), attend(pages, q, cache), FP32)


@DENSE_OR_SPARSE
def test_the_rest_of_the_batch_and_the_bounds_change_nothing(sparse: bool) -> None:
    pages = make_pages([5, 40, 1, 3], [90, 20, 300, 61], 16)
    cache, q = filled(pages, requests(pages, DIM)), pages.pack(requests(pages, HEADS, DIM, seed=2))
    indices = selection(pages, 40) if sparse else None
    together = attend(pages, q, cache, indices=indices)
    starts = [0, 5, 45, 46, 49]
    for row, (lo, hi) in enumerate(pairwise(starts)):
        one = Pages([hi - lo], [pages.history[row]], 16, pages.table[row : row + 1], pages.blocks)
        alone = attend(one, q[lo:hi], cache, indices=None if indices is None else indices[lo:hi])
        assert_close("alone", alone, together[lo:hi], FP32)
    for options in ({"max_kv_len": 5000}, {"host_lengths": None}, {"host_lengths": [50] * 4}):
        assert_close(str(options), attend(pages, q, cache, indices=indices, **options), together, FP32)


@DENSE_OR_SPARSE
@pytest.mark.parametrize("stale", [NAN, INF, -INF], ids=str)
def test_what_lies_past_the_context_reaches_no_output(stale: float, sparse: bool) -> None:
    """Rejected drafts' latents, other requests' blocks, and the rest of a block."""
    pages = make_pages([2, 1], [13, 30], 16, room=8)
    latents, q = requests(pages, DIM, room=8), pages.pack(requests(pages, HEADS, DIM, seed=2))
    clean = filled(pages, latents)
    dirty = clean.clone()
    dirty[clean.isnan()] = stale
    indices = selection(pages, 10) if sparse else None
    if indices is not None:
        indices[:, 9] = 40  # of a position that is not there
    o = attend(pages, q, dirty, indices=indices, max_kv_len=pages.longest + 4)
    assert bool(o.isfinite().all())
    assert torch.equal(o, attend(pages, q, clean, indices=indices, max_kv_len=pages.longest + 4))


@DENSE_OR_SPARSE
@pytest.mark.parametrize("bad", [NAN, INF], ids=str)
@pytest.mark.parametrize("where", ["q", "cache"])
def test_a_bad_request_harms_no_other(where: str, bad: float, sparse: bool) -> None:
    pages = make_pages([5, 40, 3], [90, 60, -1], 16)
    cache, q = filled(pages, requests(pages, DIM)), pages.pack(requests(pages, HEADS, DIM, seed=2))
    indices = selection(pages, 100) if sparse else None
    want = attend(pages, q, cache, indices=indices)
    if where == "q":
        q[5:] = bad
    else:
        cache[pages.table[1, :3].long()] = bad
    o = attend(pages, q, cache, indices=indices)
    assert torch.equal(o[:5], want[:5])
    assert not bool(o[45:].any()), "a PAD row"
    assert not bool(o[5:45].isfinite().all()), "the bad values did not come in"


@DENSE_OR_SPARSE
def test_pad_rows_and_empty_batches(sparse: bool) -> None:
    for at in range(4):
        history = [3, 0, 5, 1]
        history[at] = -1 - at
        check_attention([4, 35, 1, 9], history, sparse=sparse, outside=at)
    assert not bool(check_attention([3, 2], [-1, -1], sparse=sparse).any())
    check_attention([0, 0], [0, 9], sparse=sparse)
    check_attention([0], [40], sparse=sparse, outside=3)
    for rows, tokens in ((0, 0), (0, 3), (2, 0)):
        o = latent_attention(
            torch.randn(tokens, HEADS, DIM), torch.randn(2, 4, DIM), value_dim=VALUE, scale=1.0, max_kv_len=8,
            cu_seqlens=torch.zeros(rows + 1, dtype=torch.int64), history_lens=torch.zeros(rows, dtype=torch.int64),
            block_offsets=torch.zeros(rows, 2, dtype=torch.int32),
            indices=torch.zeros(tokens, 5, dtype=torch.int64) if sparse else None,
        )  # fmt: skip
        assert o.shape == (tokens, HEADS, VALUE)
        assert not bool(o.any())


def test_queries_may_be_views() -> None:
    pages = make_pages([5, 3], [60, 33], 16)
    cache, q = filled(pages, requests(pages, DIM)), pages.pack(requests(pages, HEADS, DIM, seed=2))
    turned = torch.cat((q, q), 2).transpose(0, 1).contiguous().transpose(0, 1)[..., :DIM]
    chosen = selection(pages)
    for indices in (None, chosen):
        assert torch.equal(attend(pages, turned, cache, indices=indices), attend(pages, q, cache, indices=indices))


@DENSE_OR_SPARSE
def test_fresh_memory_is_bounded(sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 2048 tokens over a context of 4096: the scores alone, of all heads, would take 1 GiB."""
    tokens, past, heads, dim = 2048, 2048, 32, 16
    pages = make_pages([tokens], [past], 128)
    cache = torch.randn(pages.blocks, 128, dim)
    q, indices = torch.randn(tokens, heads, dim), None
    if sparse:  # a copy of what is selected for all tokens would take 128 MiB
        indices = torch.randint(0, past, (tokens, 1024), dtype=torch.int32)

    def run() -> Tensor:
        return attend(pages, q, cache, indices=indices, value_dim=dim)

    # The output twice, as it is laid out in chunks first, and the steps' tensors.
    bound = 2 * q.nbytes + 1.5 * STEP_BYTES
    assert peak_bytes(run) <= bound
    monkeypatch.setattr(sparse_eager if sparse else dense_eager, "STEP_BYTES", 4 * STEP_BYTES)
    assert peak_bytes(run) > bound, "it is the steps that keep the bound"


def test_pages_of_a_step_are_gathered_once_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    gather = common_pages.gather_pages

    def counted(cache: Tensor, table: Tensor, rows: Tensor, pages: range) -> Tensor:
        asked.append(rows.shape[0] * len(pages))
        return gather(cache, table, rows, pages)

    monkeypatch.setattr(dense_eager, "gather_pages", counted)
    check_attention([4] * 6, [500] * 6, 64)
    assert sum(asked) == 6 * 8, "4 tokens of a row share its pages, in steps of 256 tokens"


@pytest.mark.parametrize("module", [dense_eager, sparse_eager], ids=["dense", "sparse"])
def test_more_queries_than_a_step(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP_BYTES", 200_000)
    check_attention([90, 33, 1, 0, 2], [600, 0, 603, 1, -1], 16, sparse=module is sparse_eager, width=200)


@DENSE_OR_SPARSE
def test_the_guard_against_host_reads_sees_into_the_operators(sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name = (sparse_eager, "block_at") if sparse else (dense_eager, "gather_pages")
    monkeypatch.setattr(module, name, lambda *args: torch.full((int(args[1].max()),), 0))
    with pytest.raises(HostRead):
        check_attention([9], [31], sparse=sparse)


# --- beside transformers ----------------------------------------------------------------------------------------------


@DENSE_OR_SPARSE
def test_attention_is_that_of_transformers(sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole layer with its projections expanded there and absorbed here, over the tokens that its indexer chose."""
    from transformers.models.glm5_next import modeling_glm5_next as published

    heads, hidden, q_rank, rank, nope, value, tokens = 4, 24, 20, 32, 12, 10, 40
    config = SimpleNamespace(
        attention_dropout=0.0, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=heads,
        q_lora_rank=q_rank, qk_rope_head_dim=0, kv_lora_rank=rank, v_head_dim=value, qk_nope_head_dim=nope,
        attention_bias=False, rms_norm_eps=1e-5, indexer_types=["full"], _attn_implementation="eager",
        index_n_heads=8, index_head_dim=8, index_topk=8 if sparse else 64, index_kpool=4,
        index_kpool_always_select_tail=True,
    )  # fmt: skip
    layer = published.Glm5NextTextAttention(config, 0)
    found: list[Tensor] = []
    build = layer.build_attention_mask_from_topk

    def kept(topk_indices: Tensor, **rest: Any) -> Any:
        found.append(topk_indices[0])
        return build(topk_indices=topk_indices, **rest)

    monkeypatch.setattr(layer, "build_attention_mask_from_topk", kept)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape))
        x = torch.randn(1, tokens, hidden)
        want = layer(x, torch.ones(1, tokens, dtype=torch.bool))[0][0]
        q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(x)))[0].view(tokens, heads, nope)
        c = layer.kv_a_layernorm(layer.kv_a_proj_with_mqa(x))[0]
        up_key, up_value = layer.kv_b_proj.weight.view(heads, nope + value, rank).split([nope, value], 1)
        absorbed = torch.einsum("thn,hnr->thr", q, up_key)
        pages = make_pages([tokens], [0], 8)
        cache, _ = make_cache(pages.blocks, 8, rank)
        latent_write(c, cache, **pages.rows)
        o = latent_attention(
            absorbed, cache, **pages.rows, value_dim=rank, scale=nope**-0.5, max_kv_len=tokens,
            indices=found[0] if sparse else None,
        )  # fmt: skip
        got = layer.o_proj(torch.einsum("thr,hvr->thv", o, up_value).flatten(1))
    assert_close("layer", got, want, 5e-6)
    if sparse:
        everything = latent_attention(
            absorbed, cache, **pages.rows, value_dim=rank, scale=nope**-0.5, max_kv_len=tokens
        )
        assert not torch.allclose(everything, o, rtol=1e-2), "the selection made no difference"


# --- what is checked on demand ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        pytest.param({"cu_seqlens": ints(0, 2, 6)}, "cu_seqlens", id="past-the-tokens"),
        pytest.param({"host_lengths": [2, 2]}, "host_lengths", id="too-short"),
        pytest.param({"max_kv_len": 4}, "history_lens", id="past-the-bound"),
        pytest.param({"history_lens": ints(3, 6)}, "history_lens", id="past-the-table"),
        pytest.param({"block_offsets": torch.tensor([[0, 4], [1, 2]])}, "block_offsets", id="past-the-cache"),
    ],
)
def test_values_are_checked_on_demand(changed: dict[str, Any], argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLINFER_EXT_CHECK", "1")
    options: dict[str, Any] = {
        "cu_seqlens": ints(0, 2, 5), "block_offsets": torch.tensor([[0, 3], [1, 2]]), "history_lens": ints(3, 1),
        "host_lengths": [2, 3], "max_kv_len": 5, "value_dim": 2, "scale": 1.0,
    }  # fmt: skip
    q, cache = torch.randn(5, 2, 3), torch.randn(4, 4, 3)
    latent_attention(q, cache, **options)
    with pytest.raises(ValueError, match=f"^latent_attention: argument '{argument}' .*wanted"):
        latent_attention(q, cache, **(options | changed))
