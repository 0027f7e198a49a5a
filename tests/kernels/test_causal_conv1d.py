"""The batched convolution against its definition, and the equalities that serving relies on (exact in fp32)."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlinfer_ext.kernels.causal_conv1d import reference
from dlinfer_ext.ops.causal_conv1d import Layout, causal_conv1d, causal_conv1d_columns, causal_conv1d_update
from dlinfer_ext.testing import DTYPES, TOLERANCE, assert_close, guarded_pool, untouched

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)
ODD_CHANNELS = (1, 63, 65, 257)
LAYOUTS: tuple[Layout, ...] = ("linear", "ring")


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)])


def double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.double()


def dirty(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Return values of many magnitudes that every 16-bit type represents as it is rounded."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 2).to(dtype)


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a packed batch with its pool, as arguments that every form shares."""
    width = draw(st.integers(1, 8))
    channels = draw(st.sampled_from((1, 3, 63, 64, 65, 130)))
    rows = draw(st.integers(0, 5))
    length = st.sampled_from((0, 1, 2, width - 1, width, width + 1, 8, 90))
    lengths = draw(st.lists(length, min_size=rows, max_size=rows))
    tail = draw(st.sampled_from((0, 0, 3)))
    dtype = draw(st.sampled_from(DTYPES))
    state_dtype = draw(st.sampled_from((dtype, torch.float32)))
    columns = width - 1 + draw(st.integers(0, 4))
    slots = draw(st.permutations(range(7)))[:rows]
    pads = draw(st.lists(st.sampled_from((None, None, None, -1, -9, 7)), min_size=rows, max_size=rows))
    history = st.sampled_from((0, 0, 1, 2, width, 50, 2**31 - 100))
    seed = draw(st.integers(0, 2**16))
    tokens = sum(lengths) + tail
    x = dirty((channels, tokens), dtype, seed).t() if draw(st.booleans()) else dirty((tokens, channels), dtype, seed)
    pool, storage = guarded_pool((7, columns, channels), state_dtype)
    pool.copy_(dirty((7, columns, channels), state_dtype, seed + 1))
    return {
        "x": x,
        "weight": dirty((channels, 1, width), dtype, seed + 2).squeeze(1).t(),
        "bias": dirty((channels,), dtype, seed + 3) if draw(st.booleans()) else None,
        "pool": pool,
        "storage": storage,
        "cu_seqlens": offsets(lengths).to(draw(st.sampled_from((torch.int32, torch.int64)))),
        "lengths": lengths,
        "slots": torch.tensor([s if p is None else p for s, p in zip(slots, pads, strict=True)], dtype=torch.int32),
        "history": torch.tensor(draw(st.lists(history, min_size=rows, max_size=rows)), dtype=torch.int32),
        "activation": draw(st.sampled_from((None, "silu", "swish"))),
        "pad_slot_id": 7,
    }


def check(batch: dict[str, Any], before: Tensor, got: Tensor, want: Tensor, want_pool: Tensor) -> None:
    """Compare output and pool with the definition's, and everything else with what it was."""
    assert got.dtype == batch["x"].dtype
    assert_close("output", got, want, TOLERANCE["conv", got.dtype])
    pool = batch["pool"]
    assert torch.equal(pool, want_pool.to(pool.dtype)), "state"
    live = [int(s) for s, q in zip(batch["slots"], batch["lengths"], strict=True) if q and 0 <= s < 7]
    assert untouched(batch["storage"], before, pool, live)


@pytest.mark.parametrize("width", range(1, 9))
def test_reference_matches_conv1d(width: int) -> None:
    x, weight, bias = (torch.randn(s, dtype=torch.float64) for s in ((11, 5), (width, 5), (5,)))
    got = reference.causal_conv1d(x, weight, bias, None, offsets([11]), None, None, activation="silu")
    padded = F.pad(x.t(), (width - 1, 0))
    want = F.silu(F.conv1d(padded[None], weight.t()[:, None], bias, groups=5))[0].t()
    torch.testing.assert_close(got, want)


@given(batch=batches(), layout=st.sampled_from(LAYOUTS), bounded=st.booleans())
@SETTINGS
def test_prefill_matches_reference(batch: dict[str, Any], layout: Layout, bounded: bool) -> None:
    x, pool, storage = batch["x"], batch["pool"], batch["storage"]
    before, x_before, want_pool = storage.clone(), x.clone(), pool.double()
    got = causal_conv1d(
        x,
        batch["weight"],
        batch["bias"],
        pool,
        cu_seqlens=batch["cu_seqlens"],
        state_indices=batch["slots"],
        history_lens=batch["history"],
        layout=layout,
        activation=batch["activation"],
        pad_slot_id=7,
        max_query_len=max(batch["lengths"], default=0) if bounded else None,
    )
    want = reference.causal_conv1d(
        x.double(),
        batch["weight"].double(),
        double(batch["bias"]),
        want_pool,
        batch["cu_seqlens"],
        batch["slots"],
        batch["history"],
        layout,
        batch["activation"],
        7,
    )
    check(batch, before, got, want, want_pool)
    assert torch.equal(x, x_before)


@given(batch=batches(), extra=st.integers(0, 3), seed=st.integers(0, 99))
@SETTINGS
def test_columns_match_reference(batch: dict[str, Any], extra: int, seed: int) -> None:
    x, width, rows = batch["x"], batch["weight"].shape[0], len(batch["lengths"])
    columns = width + extra
    pool, storage = guarded_pool((7, columns, x.shape[1]), batch["pool"].dtype)
    pool.copy_(dirty(tuple(pool.shape), pool.dtype, seed))
    batch |= {"pool": pool, "storage": storage}
    history = batch["history"].long() + width
    read = (history[:, None] + torch.arange(1 - width, 0)) % columns
    read[:, : seed % width] = -1
    write = (
        history[:, None] + torch.tensor(batch["lengths"], dtype=torch.int64)[:, None] + torch.arange(-width, 0)
    ) % columns
    continues = torch.arange(rows) % 3 > 0
    before, want_pool = storage.clone(), pool.double()
    shared = batch["cu_seqlens"], batch["slots"], continues, read, write
    want = reference.causal_conv1d_columns(
        x.double(), batch["weight"].double(), double(batch["bias"]), want_pool, *shared, batch["activation"], 7
    )
    got = causal_conv1d_columns(
        x,
        batch["weight"],
        batch["bias"],
        pool,
        cu_seqlens=batch["cu_seqlens"],
        state_indices=batch["slots"],
        has_history=continues,
        read_columns=read,
        write_columns=write,
        activation=batch["activation"],
        pad_slot_id=7,
    )
    check(batch, before, got, want, want_pool)


@given(
    batch=batches(),
    layout=st.sampled_from(("linear", "rewind", "ring")),
    form=st.sampled_from(("packed", "[N, D]", "[N, q, D]")),
    blocks=st.booleans(),
    bounded=st.booleans(),
    data=st.data(),
)
@SETTINGS
def test_update_matches_reference(
    batch: dict[str, Any], layout: str, form: str, blocks: bool, bounded: bool, data: st.DataObject
) -> None:
    x, pool, width, rows = batch["x"], batch["pool"], batch["weight"].shape[0], len(batch["lengths"])
    if form != "packed":
        each = 1 if form == "[N, D]" else data.draw(st.integers(0, 5))
        x = dirty((rows, each, x.shape[1]), x.dtype, 5)
        batch["lengths"] = [each] * rows
        x = x[:, 0] if form == "[N, D]" else x
    longest = max(batch["lengths"], default=0)
    options: dict[str, Any] = {"conv_state_indices": batch["slots"]}
    if layout == "rewind":
        need = width - 1 + max((longest if bounded or form != "packed" else x.shape[0]) - 1, 0)
        columns = need + data.draw(st.integers(0, 3))
        counts = st.integers(0, columns - (width - 1) + 1)
        options["num_accepted_tokens"] = torch.tensor([data.draw(counts) for _ in range(rows)], dtype=torch.int32)
        pool, storage = guarded_pool((7, columns, x.shape[-1]), pool.dtype)
        pool.copy_(dirty((7, columns, x.shape[-1]), pool.dtype, 6))
        batch |= {"pool": pool, "storage": storage}
    elif layout == "ring":
        options["cache_seqlens"] = batch["history"]
    if form == "packed":
        options["query_start_loc"] = batch["cu_seqlens"]
    if blocks and rows:
        # Odd rows read the slot that they write in a step of their own; the others move on to a fresh one.
        others = torch.tensor([s for s in range(7) if s not in batch["slots"]] * 7, dtype=torch.int32)[:rows]
        moves_on = torch.arange(rows) % 2 if rows <= 3 else torch.zeros(rows, dtype=torch.int64)
        table = torch.stack([others, batch["slots"], torch.full_like(others, -1)], 1)
        options["conv_state_indices"] = table
        options["initial_state_idx"] = torch.ones(rows, dtype=torch.int32)
        options["block_idx_last_scheduled_token"] = (1 - moves_on).to(torch.int32)
        targets = table.gather(1, 1 - moves_on[:, None])[:, 0]
        batch["slots"] = torch.where(batch["slots"] == 7, -1, torch.where(batch["slots"] < 0, -1, targets))
    before, x_before, want_pool = batch["storage"].clone(), x.clone(), pool.double()
    want = reference.causal_conv1d_update(
        x.double(),
        want_pool,
        batch["weight"].double(),
        double(batch["bias"]),
        batch["activation"],
        pad_slot_id=7,
        **options,
    )
    got = causal_conv1d_update(
        x,
        pool,
        batch["weight"],
        batch["bias"],
        batch["activation"],
        max_query_len=longest if bounded else -1,
        pad_slot_id=7,
        **options,
    )
    assert got.shape == x.shape
    check(batch, before, got, want, want_pool)
    assert torch.equal(x, x_before)


def run_chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, layout: Layout, chunks: list[int], columns: int
) -> tuple[Tensor, Tensor]:
    """Return the outputs and the pool after one request's chunks, one call each, in a slot that was dirty."""
    pool = torch.full((2, columns, x.shape[1]), float("nan"), dtype=x.dtype)
    outs, before = [], 0
    for start, end in pairwise([0, *accumulate(chunks)]):
        outs.append(
            causal_conv1d(
                x[start:end],
                weight,
                bias,
                pool,
                cu_seqlens=offsets([end - start]),
                state_indices=torch.tensor([1]),
                history_lens=torch.tensor([before]),
                layout=layout,
                activation="silu",
            )
        )
        before = end
    return torch.cat(outs), pool


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("channels", ODD_CHANNELS)
@pytest.mark.parametrize("width", [2, 4, 8])
def test_chunks_equal_one_shot_at_every_split(layout: Layout, channels: int, width: int) -> None:
    tokens, columns = 41, width + 2
    x, weight, bias = torch.randn(tokens, channels), torch.randn(width, channels), torch.randn(channels)
    want, _ = run_chunks(x, weight, bias, layout, [tokens], columns)
    for split in range(1, tokens):
        # The last token is a call of its own: the output after each state.
        got, _ = run_chunks(x, weight, bias, layout, [split, tokens - 1 - split, 1], columns)
        assert torch.equal(got, want), f"split at {split}"
    got, _ = run_chunks(x, weight, bias, layout, [1] * tokens, columns)
    assert torch.equal(got, want)


@pytest.mark.parametrize("threads", [1, 2])
def test_long_chunks_equal_one_shot(threads: int) -> None:
    was = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, weight = torch.randn(1500, 257), torch.randn(4, 257)
        want, state = run_chunks(x, weight, None, "linear", [1500], 3)
        for chunks in ([1, 1499], [700, 800], [511, 513, 476], [1497, 3]):
            got, after = run_chunks(x, weight, None, "linear", chunks, 3)
            assert torch.equal(got, want)
            assert torch.equal(after[1], state[1])
    finally:
        torch.set_num_threads(was)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("channels", ODD_CHANNELS)
def test_batched_and_permuted_equal_separate(layout: Layout, channels: int) -> None:
    lengths, history = [3, 0, 1, 40, 2, 8], [0, 4, 9, 0, 2, 30]
    weight = torch.randn(4, channels)
    xs = [torch.randn(q, channels) for q in lengths]
    pool = torch.randn(6, 6, channels)

    def step(order: list[int], pool: Tensor) -> list[Tensor]:
        got = causal_conv1d(
            torch.cat([xs[i] for i in order]),
            weight,
            None,
            pool,
            cu_seqlens=offsets([lengths[i] for i in order]),
            state_indices=torch.tensor(order),
            history_lens=torch.tensor([history[i] for i in order]),
            layout=layout,
            activation="silu",
        )
        return list(got.split([lengths[i] for i in order]))

    alone, batched, permuted = pool.clone(), pool.clone(), pool.clone()
    want = [step([i], alone)[0] for i in range(6)]
    for order, after in ((list(range(6)), batched), ([4, 3, 0, 5, 1, 2], permuted)):
        for i, got in zip(order, step(order, after), strict=True):
            assert torch.equal(got, want[i])
        assert torch.equal(after, alone)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prefill_verify_and_decode_agree(dtype: torch.dtype) -> None:
    """R10: the same tokens by any call give the same bits in every dtype."""
    x, weight = dirty((12, 65), dtype, 1), dirty((4, 65), dtype, 2)
    want, _ = run_chunks(x, weight, None, "ring", [12], 7)
    pool = torch.zeros(1, 7, 65, dtype=dtype)
    got = [
        causal_conv1d_update(x[start:end][None], pool, weight, cache_seqlens=torch.tensor([start]))[0]
        for start, end in pairwise([0, 1, 2, 6, 9, 10, 12])
    ]
    assert torch.equal(torch.cat(got), want)
    pool = torch.zeros(1, 3, 65, dtype=dtype)
    assert torch.equal(torch.cat([causal_conv1d_update(t[None], pool, weight) for t in x]), want)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("layout", ["rewind", "ring"])
def test_verify_continues_after_every_accepted_count(layout: str, width: int) -> None:
    """A step of q rows, of which a are accepted, then fewer rows: as if only the accepted had ever been seen."""
    rows, channels = 5, 3
    for accepted in range(1, rows + 1):
        for following in range(1, rows + 1):
            prompt, drafts, new = (torch.randn(n, channels) for n in (6, rows, following))
            weight = torch.randn(width, channels)
            kept = torch.cat([prompt, drafts[:accepted], new])
            want, _ = run_chunks(kept, weight, None, "linear", [len(kept)], width + 1)
            pool = torch.full((1, width - 1 + rows, channels), float("nan"))
            shared = {"cu_seqlens": offsets([6]), "activation": "silu"}
            if layout == "ring":
                causal_conv1d(prompt, weight, None, pool, layout="ring", **shared)  # type: ignore[arg-type]
                causal_conv1d_update(drafts[None], pool, weight, cache_seqlens=torch.tensor([6]))
                got = causal_conv1d_update(new[None], pool, weight, cache_seqlens=torch.tensor([6 + accepted]))
            else:
                causal_conv1d(prompt, weight, None, pool, **shared)  # type: ignore[arg-type]
                causal_conv1d_update(drafts[None], pool, weight, num_accepted_tokens=torch.tensor([1]))
                got = causal_conv1d_update(new[None], pool, weight, num_accepted_tokens=torch.tensor([accepted]))
            assert torch.equal(got[0], want[-following:]), f"accepted {accepted}, then {following} rows"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [1, 2, 4])
def test_state_of_every_length_and_history(layout: Layout, width: int) -> None:
    """Fresh and continued rows of every short length in one batch: outputs, slots, and the next token's output."""
    cases = [(q, h) for q in (0, 1, 2, width - 1, width, width + 1, 8) for h in (0, 1, width - 1, 50)]
    lengths, history = [q for q, _ in cases], torch.tensor([h for _, h in cases])
    columns = width + 2
    pool = torch.randn(len(cases), columns, 2)
    weight, next_token = torch.randn(width, 2), torch.randn(len(cases), 2)
    x = torch.randn(sum(lengths), 2)
    want_pool = pool.double()
    plan = offsets(lengths), None, history
    after = torch.arange(len(cases) + 1), None, history + torch.tensor(lengths)
    for values, plan_ in ((x, plan), (next_token, after)):
        got = causal_conv1d(
            values, weight, None, pool, cu_seqlens=plan_[0], history_lens=plan_[2], layout=layout, activation="silu"
        )
        want = reference.causal_conv1d(
            values.double(), weight.double(), None, want_pool, *plan_, layout=layout, activation="silu"
        )
        assert_close("output", got, want, TOLERANCE["conv", torch.float32])
        assert torch.equal(pool, want_pool.float())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")], ids=["inf", "nan"])
def test_fresh_row_in_a_dirty_slot_starts_from_zero(layout: Layout, bad: float) -> None:
    x, weight = torch.randn(5, 3), torch.randn(4, 3)
    outs = []
    for fill in (0.0, bad):
        pool = torch.full((1, 6, 3), fill)
        first = causal_conv1d(x[:1], weight, None, pool, cu_seqlens=offsets([1]), layout=layout)
        second = causal_conv1d(
            x[1:], weight, None, pool, cu_seqlens=offsets([4]), history_lens=torch.tensor([1]), layout=layout
        )
        outs.append(torch.cat([first, second]))
    assert torch.equal(*outs)


@pytest.mark.parametrize("lengths", [[2, 3, 1], [30, 40, 50]], ids=["short", "long"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")], ids=["inf", "nan"])
def test_bad_row_stays_alone(lengths: list[int], bad: float) -> None:
    weight, pool = torch.randn(4, 3), torch.randn(3, 3, 3)
    x = torch.randn(sum(lengths), 3)
    spoilt, spoilt_pool = x.clone(), pool.clone()
    spoilt[lengths[0] : lengths[0] + lengths[1]] = bad
    spoilt_pool[1] = bad
    cu, history = offsets(lengths), torch.tensor([5, 5, 5])
    want = causal_conv1d(x, weight, None, pool, cu_seqlens=cu, history_lens=history)
    got = causal_conv1d(spoilt, weight, None, spoilt_pool, cu_seqlens=cu, history_lens=history)
    good = [0, 2]
    for row in good:
        assert torch.equal(got.split(lengths)[row], want.split(lengths)[row])
    assert torch.equal(spoilt_pool[good], pool[good])


@pytest.mark.parametrize("lengths", [[2, 3, 1, 2], [20, 30, 10, 25]], ids=["short", "long"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pad_row_at_every_position(layout: Layout, lengths: list[int]) -> None:
    weight, x, pool = torch.randn(4, 3), torch.randn(sum(lengths), 3), torch.randn(4, 6, 3)
    history = torch.tensor([7, 0, 9, 2])

    def step(slots: list[int]) -> tuple[tuple[Tensor, ...], Tensor]:
        after = pool.clone()
        plan = {"cu_seqlens": offsets(lengths), "state_indices": torch.tensor(slots), "history_lens": history}
        got = causal_conv1d(x, weight, torch.ones(3), after, **plan, layout=layout, activation="silu")  # type: ignore[arg-type]
        return got.split(lengths), after

    want, want_pool = step([0, 1, 2, 3])
    for pads in ([0], [1], [2], [3], [0, 3], [1, 2], [0, 1, 2, 3]):
        got, after = step([-1 if i in pads else i for i in range(4)])
        for i in range(4):
            assert torch.equal(got[i], torch.zeros_like(got[i]) if i in pads else want[i])
            assert torch.equal(after[i], pool[i] if i in pads else want_pool[i])


def test_more_than_2_to_the_24_elements() -> None:
    """B13: large inputs are as right as small ones, at both ends and between."""
    tokens, channels = 8200, 2049
    assert tokens * channels > 2**24
    x, weight = torch.randn(tokens, channels).bfloat16(), torch.randn(4, channels).bfloat16()
    got = causal_conv1d(x, weight, cu_seqlens=torch.tensor([0, 4096, tokens]), activation="silu")
    for start, end in ((0, 40), (4080, 4120), (tokens - 40, tokens)):
        inside = torch.arange(start, end)
        first = torch.where(inside < 4096, 0, 4096)
        terms = [
            torch.where((inside - back >= first)[:, None], x[(inside - back).clamp(min=0)].double(), 0)
            * weight[3 - back].double()
            for back in range(4)
        ]
        want = F.silu(torch.stack(terms).sum(0))
        assert_close(f"tokens {start} to {end}", got[start:end], want, TOLERANCE["conv", torch.bfloat16])
