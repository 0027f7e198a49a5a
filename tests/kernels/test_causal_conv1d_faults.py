"""Faults of this operator reported in public, or found by reading, each as its smallest input and the right result.

B-numbers are public reports; R-numbers are findings in two implementations that serve these models on Ascend:
dlinfer's `causal_conv1d_fn` (R01..R13) and the update kernel that dlinfer and vllm-ascend share (R14..R30).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dlinfer_ext.ops.causal_conv1d import Layout, causal_conv1d, causal_conv1d_update
from dlinfer_ext.testing import guarded_pool, no_host_reads, untouched
from dlinfer_ext.vendor.ascend.triton_ops import causal_conv1d_fn, causal_conv1d_ref, causal_conv1d_update_npu

CASES: dict[str, Callable[[], None]] = {}
Options = dict[str, Any]
ONES = torch.ones(1, 4)


def fault(*ids: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(case: Callable[[], None]) -> Callable[[], None]:
        for name in ids:
            assert name not in CASES
            CASES[name] = case
        return case

    return register


def ints(*values: int) -> Tensor:
    return torch.tensor(values)


def layouts(accepted: Tensor, history: Tensor) -> tuple[Options, Options, Options]:
    """Return the arguments that choose the layouts of the update: linear, rewind and ring."""
    return {}, {"num_accepted_tokens": accepted}, {"cache_seqlens": history}


def column(*values: float) -> Tensor:
    """Return [T, 1]."""
    return torch.tensor(values, dtype=torch.float32)[:, None]


def ring_offsets(history: list[int], lengths: list[int], columns: int, width: int = 4) -> Options:
    """Return what the engine passes for a ring prefill."""
    before, after = torch.tensor(history), torch.tensor(history) + torch.tensor(lengths)
    return {
        "query_start_loc": torch.tensor([0, *accumulate(lengths)]),
        "has_initial_state": before > 0,
        "read_conv_offsets": (before[:, None] + torch.arange(1 - width, 0)) % columns,
        "write_conv_offsets": (after[:, None] + torch.arange(-width, 0)) % columns,
    }


def plain(x: Tensor, weight: Tensor, activation: str | None = None) -> Tensor:
    """Return the convolution of one whole request [T, D] by F.conv1d in fp64."""
    full = F.pad(x.double().t(), (weight.shape[0] - 1, 0))
    out = F.conv1d(full[None], weight.double().t()[:, None], groups=x.shape[1])[0].t()
    return F.silu(out) if activation else out


# Ring prefill, the two cases of the mission: a short chunk must not store a neighbour's tokens.


@fault("ring-fresh-short-chunk")
def _() -> None:
    pool = torch.zeros(4, 1, 6)
    causal_conv1d_fn(
        torch.tensor([[10.0, 20, 30, 40, 1]]),
        ONES,
        conv_states=pool,
        cache_indices=ints(1, 2),
        **ring_offsets([0, 0], [4, 1], 6),
    )
    assert pool[:, 0].tolist() == [[0] * 6, [10, 20, 30, 40, 0, 0], [1, 0, 0, 0, 0, 0], [0] * 6]
    got = causal_conv1d_update_npu(
        column(2), pool.transpose(1, 2), ONES.t(), None, "silu", ints(2), cache_seqlens=ints(1)
    )
    assert got.item() == 2.857722520828247


@fault("ring-one-token-tail")
def _() -> None:
    pool = torch.zeros(4, 1, 6)
    pool[1, 0] = torch.tensor([10.0, 20, 30, 40, 0, 0])
    causal_conv1d_fn(torch.ones(1, 1), ONES, conv_states=pool, cache_indices=ints(1), **ring_offsets([4], [1], 6))
    assert pool[1, 0].tolist() == [10, 20, 30, 40, 1, 0]
    got = causal_conv1d_update_npu(
        column(2), pool.transpose(1, 2), ONES.t(), None, "silu", ints(1), cache_seqlens=ints(5)
    )
    assert got.item() == 73.0


@fault("verify-rows-are-all-convolved", "B01")
def _() -> None:
    weight = torch.tensor([1.0, 10, 100, 1000])[:, None]
    for accepted in range(1, 9):
        pool = torch.arange(10.0)[None, :, None].clone()
        new = torch.arange(20.0, 28)[:, None]
        got = causal_conv1d_update(new[None], pool, weight, None, None, num_accepted_tokens=ints(accepted))
        full = [*range(accepted - 1, accepted + 2), *range(20, 28)]
        want = [sum(w * v for w, v in zip((1, 10, 100, 1000), full[t : t + 4], strict=True)) for t in range(8)]
        assert got.flatten().tolist() == want
        assert pool.flatten().tolist() == full[1:]


@fault("R01")
def _() -> None:
    x = torch.tensor([[9.0, 9, 1, 2, 3]])
    pool = torch.zeros(2, 1, 3)
    got = causal_conv1d_fn(
        x, ONES, activation=None, conv_states=pool, cache_indices=ints(-1, 1), query_start_loc=ints(0, 2, 5)
    )
    assert got.tolist() == [[0, 0, 1, 3, 6]]


@fault("R02")
def _() -> None:
    pool = torch.randn(2, 1, 3)
    before = pool.clone()
    got = causal_conv1d_fn(
        torch.randn(1, 4),
        ONES,
        torch.ones(1),
        conv_states=pool,
        cache_indices=ints(-1, -1),
        query_start_loc=ints(0, 1, 4),
    )
    assert got.tolist() == [[0, 0, 0, 0]]
    assert torch.equal(pool, before)


@fault("R03", "B81")
def _() -> None:
    for history in (0, 1):
        pool = torch.tensor([[[5.0, 6, 7]], [[0.0, 0, 0]]])
        got = causal_conv1d_fn(
            torch.tensor([[1.0, 2, 3]]),
            ONES,
            activation=None,
            conv_states=pool,
            cache_indices=ints(0, 1),
            has_initial_state=ints(history, 0).bool(),
            query_start_loc=ints(0, 0, 3),
        )
        assert got.tolist() == [[1, 3, 6]]
        assert pool[:, 0].tolist() == [[5, 6, 7], [1, 2, 3]]
    # Empty rows may even share the slot of a row that has a token.
    pool = torch.zeros(5, 3, 1)
    got = causal_conv1d_update(
        column(1), pool, ONES.t(), None, None, ints(4, 4, 4), query_start_loc=ints(0, 1, 1, 1), max_query_len=1
    )
    assert got.item() == 1
    assert pool[4].flatten().tolist() == [0, 0, 1]


@fault("R04", "B03")
def _() -> None:
    pool = torch.zeros(2, 1, 7)
    pool[1, 0] = torch.tensor([107.0, 108, 109, 103, 104, 105, 106])
    causal_conv1d_fn(
        torch.tensor([[1.0, 2, 3, 4, 5, 110, 111]]), ONES, conv_states=pool, **ring_offsets([0, 10], [5, 2], 7)
    )
    assert pool[:, 0].tolist() == [[0, 2, 3, 4, 5, 0, 0], [107, 108, 109, 110, 111, 105, 106]]


@fault("R05")
def _() -> None:
    pool = torch.zeros(1, 1, 7)
    causal_conv1d_fn(torch.tensor([[5.0, 6]]), ONES, conv_states=pool, **ring_offsets([0], [2], 7))
    assert pool[0, 0].tolist() == [5, 6, 0, 0, 0, 0, 0]


@fault("R06")
def _() -> None:
    pool = torch.randn(3, 1, 7)
    before = pool.clone()
    offsets = ring_offsets([4], [3], 7)
    causal_conv1d_fn(torch.ones(1, 3), ONES, conv_states=pool, cache_indices=ints(-1), **offsets)
    assert torch.equal(pool, before)


@fault("R07")
def _() -> None:
    for pad in (-7, 1, 99):
        pool = torch.randn(3, 1, 7)
        before = pool.clone()
        got = causal_conv1d_fn(
            torch.ones(1, 3), ONES, torch.ones(1), conv_states=pool, cache_indices=ints(pad), pad_slot_id=pad
        )
        assert got.tolist() == [[0, 0, 0]]
        assert torch.equal(pool, before)


@fault("R08", "R29")
def _() -> None:
    pool = torch.full((1, 1, 3), 1.00390625 / 2)
    x = torch.ones(1, 1, dtype=torch.bfloat16)
    got = causal_conv1d_fn(
        x, ONES.bfloat16(), activation=None, conv_states=pool, has_initial_state=torch.tensor([True])
    )
    assert got.dtype == torch.bfloat16
    assert got.item() == torch.tensor(1 + 3 * 1.00390625 / 2).bfloat16().item()
    assert pool[0, 0].tolist() == [1.00390625 / 2, 1.00390625 / 2, 1]


@fault("R09", "B02", "B111")
def _() -> None:
    pool, x, weight = torch.zeros(3, 7, 2), torch.randn(4, 2), torch.randn(4, 2)
    offsets = ring_offsets([3, 5], [2, 2], 7)
    two = ints(0, 2)
    with no_host_reads():
        causal_conv1d_fn(x.t(), weight.t(), conv_states=pool.transpose(1, 2), cache_indices=two, **offsets)
        causal_conv1d_fn(
            x.t(), weight.t(), conv_states=pool.transpose(1, 2), query_start_loc=offsets["query_start_loc"]
        )
        causal_conv1d(x, weight, cu_seqlens=offsets["query_start_loc"], layout="ring", activation="silu")
        for state in layouts(ints(1, 2), ints(4, 9)):
            causal_conv1d_update(x[:2], pool, weight, conv_state_indices=two, **state)
            causal_conv1d_update(x.view(2, 2, 2), pool, weight, conv_state_indices=two, **state)
            causal_conv1d_update(x, pool, weight, query_start_loc=offsets["query_start_loc"], max_query_len=3, **state)


@fault("R10")
def _() -> None:
    x, weight = (torch.randn(9, 5) * 3).bfloat16(), torch.randn(4, 5).bfloat16()
    pool = torch.zeros(1, 3, 5, dtype=torch.bfloat16)
    decoded = torch.cat([causal_conv1d_update(token[None], pool, weight) for token in x])
    assert torch.equal(causal_conv1d_fn(x.t(), weight.t()).t(), decoded)


@fault("R11")
def _() -> None:
    pool = torch.full((1, 1, 3), 9.0)
    got = causal_conv1d_fn(torch.ones(1, 2), ONES, activation=None, conv_states=pool, has_initial_state=None)
    assert got.tolist() == [[1, 2]]


@fault("R12")
def _() -> None:
    for history in (1, 2):
        pool = torch.full((1, 1, 7), 50.0)
        pool[0, 0, :history] = 1
        plan = ring_offsets([history], [1], 7)
        metadata = SimpleNamespace(cache_seqlens=ints(history))
        got = causal_conv1d_fn(
            torch.ones(1, 1), ONES, activation=None, conv_states=pool.clone(), metadata=metadata, **plan
        )
        assert got.item() == history + 1
        got = causal_conv1d(
            column(1),
            ONES.t(),
            None,
            pool.transpose(1, 2),
            cu_seqlens=ints(0, 1),
            history_lens=ints(history),
            layout="ring",
        )
        assert got.item() == history + 1
    # Written by this function the slot needs no metadata: the first chunk stores the zeros before its start.
    pool = torch.full((1, 1, 7), 50.0)
    causal_conv1d_fn(torch.ones(1, 1), ONES, conv_states=pool, **ring_offsets([0], [1], 7))
    got = causal_conv1d_fn(torch.ones(1, 1), ONES, activation=None, conv_states=pool, **ring_offsets([1], [1], 7))
    assert got.item() == 2


@fault("R13", "B27")
def _() -> None:
    # One contract: linear is columns 0..W-2 of a wider row too, for prefill and for decode.
    x, weight = torch.randn(9, 3), torch.randn(4, 3)
    pool = torch.full((1, 6, 3), float("nan"))
    first = causal_conv1d(x[:5], weight, None, pool, cu_seqlens=ints(0, 5))
    rest = [causal_conv1d_update(token[None], pool, weight, None, None) for token in x[5:]]
    torch.testing.assert_close(torch.cat([first, *rest]).double(), plain(x, weight), rtol=1e-5, atol=1e-5)
    assert torch.equal(pool[0, :3], x[-3:])


@fault("R14", "B07")
def _() -> None:
    pool = torch.tensor([[1.0, 2, 3], [1, 2, 3]])[..., None]
    causal_conv1d_update(
        column(10, 4, 5, 6), pool, ONES.t(), None, None, query_start_loc=ints(0, 1, 4), max_query_len=3
    )
    assert pool[..., 0].tolist() == [[2, 3, 10], [4, 5, 6]]
    # Lengths below the room that the pool or a table has for drafts.
    lengths, columns = [2, 4, 3], 7
    x, weight = torch.randn(9, 3), torch.randn(4, 3)
    for layout in ("num_accepted_tokens", "cache_seqlens"):
        state: Options = {layout: ints(1, 2, 3)}
        pool = torch.randn(3, columns, 3)
        separate = pool.clone()
        got = causal_conv1d_update(x, pool, weight, query_start_loc=ints(0, 2, 6, 9), max_query_len=4, **state)
        for row, part in enumerate(x.split(lengths)):
            own: Options = {layout: state[layout][row : row + 1]}
            alone = causal_conv1d_update(part[None], separate, weight, conv_state_indices=ints(row), **own)
            assert torch.equal(got.split(lengths)[row], alone[0])
        assert torch.equal(pool, separate)


@fault("R15")
def _() -> None:
    pool, storage = guarded_pool((2, 4, 1), torch.float32)
    before = storage.clone()
    with pytest.raises(ValueError, match=r"causal_conv1d_update: argument 'conv_state'.*L >= 5"):
        causal_conv1d_update(torch.ones(1, 3, 1), pool, ONES.t(), num_accepted_tokens=ints(1))
    assert torch.equal(storage, before)


@fault("R16")
def _() -> None:
    for value, weight, want in ((70000.0, 1.0, 70000.0), (1e5, 0.0, 0.0), (1e-8, 1e6, 1e-2), (1.0001, 1.0, 1.0001)):
        for dtype in (torch.float32, torch.bfloat16):
            x, w = torch.full((1, 1), value).to(dtype), torch.full((1, 1), weight).to(dtype)
            pool = torch.zeros(1, 3, 1, dtype=dtype)
            taps = torch.cat([torch.zeros(3, 1).to(dtype), w])
            got = causal_conv1d_update(x, pool, taps, None, None)
            torch.testing.assert_close(got, (x * w), rtol=0, atol=0)
            assert abs(got.item() - want) <= abs(want) * (1e-6 if dtype == torch.float32 else 8e-3)


@fault("R17", "B14")
def _() -> None:
    for width in range(1, 9):
        newest = torch.zeros(width, 1)
        newest[-1] = 1
        assert causal_conv1d_update(column(3), torch.ones(1, 7, 1), newest, None, None).item() == 3
        state = torch.arange(1.0, width).view(1, -1, 1).clone()
        got = causal_conv1d_update(column(10), state, torch.ones(width, 1), None, None)
        assert got.item() == 10 + sum(range(width))
    for width in (0, 9):
        with pytest.raises(ValueError, match="W from 1 to 8"):
            causal_conv1d_update(column(3), torch.ones(1, 9, 1), torch.ones(width, 1))
    # A longer linear row: its anchor is column 0. A ring: position 5 of 7.
    row = torch.arange(1.0, 8).view(1, 7, 1)
    assert causal_conv1d_update(column(10), row.clone(), ONES.t(), None, None).item() == 1 + 2 + 3 + 10
    assert (
        causal_conv1d_update(column(10), row.clone(), ONES.t(), None, None, cache_seqlens=ints(5)).item()
        == 3 + 4 + 5 + 10
    )


@fault("R18", "B26")
def _() -> None:
    x = torch.randn(2, 3)
    before = x.clone()
    got = causal_conv1d_update_npu(x, torch.zeros(2, 3, 3), torch.randn(4, 3))
    assert got.data_ptr() != x.data_ptr()
    assert torch.equal(x, before)


@fault("R19")
def _() -> None:
    x = torch.ones(3, 2)
    got = causal_conv1d_update(x, torch.zeros(2, 3, 2), torch.ones(4, 2), torch.ones(2), None, ints(-1, 0, -1))
    assert got.tolist() == [[0, 0], [2, 2], [0, 0]]


@fault("R20", "B11")
def _() -> None:
    for channels in (96, 256):
        x, weight = torch.randn(4, channels), torch.randn(4, channels)
        pool, storage = guarded_pool((4, 3, channels), torch.float32)
        pool.copy_(torch.randn(4, 3, channels))
        before, old = storage.clone(), pool.clone()
        got = causal_conv1d_update(x, pool, weight, None, None, ints(3, -1, 0, -1))
        assert torch.equal(got[[1, 3]], torch.zeros(2, channels))
        for row, slot in ((0, 3), (2, 0)):
            full = torch.cat([old[slot], x[row : row + 1]])
            torch.testing.assert_close(
                got[row].double(), (full.double() * weight.double()).sum(0), rtol=1e-5, atol=1e-5
            )
            assert torch.equal(pool[slot], full[1:])
        assert untouched(storage, before, pool, [0, 3])


@fault("R21")
def _() -> None:
    pool, storage = guarded_pool((3, 4, 1), torch.float32)
    before = storage.clone()
    got = causal_conv1d_update(column(1), pool, ONES.t(), torch.ones(1), None, ints(1), cache_seqlens=ints(-4))
    assert got.item() == 0
    assert torch.equal(storage, before)
    both: tuple[Layout, ...] = ("linear", "ring")
    for layout in both:
        got = causal_conv1d(
            column(1), ONES.t(), torch.ones(1), pool, cu_seqlens=ints(0, 1), history_lens=ints(-4), layout=layout
        )
        assert got.item() == 0
        assert torch.equal(storage, before)


@fault("R22")
def _() -> None:
    for accepted, count in ((0, 1), (-3, 1), (99, 3)):
        pools = [guarded_pool((3, 5, 1), torch.float32)[0] for _ in range(2)]
        for pool in pools:
            pool.copy_(torch.arange(15.0).view(3, 5, 1))
        got, want = (
            causal_conv1d_update(column(1), pool, ONES.t(), None, None, ints(1), num_accepted_tokens=ints(n))
            for pool, n in zip(pools, (accepted, count), strict=True)
        )
        assert torch.equal(got, want)
        assert torch.equal(*pools)


@fault("R23")
def _() -> None:
    pools = [torch.arange(6.0).view(2, 3, 1) for _ in range(2)]
    got = causal_conv1d_update(column(1, 2), pools[0], ONES.t(), None, None, None)
    want = causal_conv1d_update(column(1, 2), pools[1], ONES.t(), None, None, ints(0, 1))
    assert torch.equal(got, want)
    assert torch.equal(*pools)


@fault("R24")
def _() -> None:
    for layout in layouts(ints(2), ints(9)):
        pool = torch.arange(30.0).view(5, 6, 1)
        expected = pool[3:4].clone()
        want = causal_conv1d_update(column(50), expected, ONES.t(), None, None, **layout)
        got = causal_conv1d_update(
            column(50),
            pool,
            ONES.t(),
            None,
            None,
            torch.tensor([[3, 1, -1]]),
            block_idx_last_scheduled_token=ints(1),
            initial_state_idx=ints(0),
            **layout,
        )
        assert torch.equal(got, want)
        assert torch.equal(pool[[0, 2, 3, 4]], torch.arange(30.0).view(5, 6, 1)[[0, 2, 3, 4]])
        # The block written must carry the request on by itself.
        if "cache_seqlens" in layout:
            layout = {"cache_seqlens": ints(10)}
        elif layout:
            layout = {"num_accepted_tokens": ints(1)}
        onward = [
            causal_conv1d_update(column(60), state, ONES.t(), None, None, ints(slot), **layout)
            for state, slot in ((pool, 1), (expected, 0))
        ]
        assert torch.equal(*onward)


@fault("R25")
def _() -> None:
    pool, storage = guarded_pool((2, 3, 1), torch.float32)
    before = storage.clone()
    with pytest.raises(ValueError, match=r"'conv_state_indices' is 2 at row 1; wanted below 2, the slots"):
        causal_conv1d_update(column(1, 1), pool, ONES.t(), conv_state_indices=ints(0, 2), validate_data=True)
    assert torch.equal(storage, before)


@fault("R26")
def _() -> None:
    x, weight = torch.randn(5, 256), torch.randn(4, 256)
    pool = torch.zeros(1, 4, 256)
    got = causal_conv1d_update(x[None], pool, weight, None, None, cache_seqlens=ints(0))
    torch.testing.assert_close(got[0].double(), plain(x, weight), rtol=1e-5, atol=1e-5)
    assert torch.equal(pool[0], x[[4, 1, 2, 3]])


@fault("R27", "B113", "B116", "B09")
def _() -> None:
    # Any draft lengths in turn, any room for them, in one process.
    for room in (1, 2, 3, 5):
        for layout in ("num_accepted_tokens", "cache_seqlens"):
            weight, pool = torch.randn(4, 3), torch.zeros(1, 3 + room, 3)
            kept, outs, accepted = [torch.zeros(0, 3)], [], 1
            for drafts in (min(room, 3), 0, min(room, 2), 1, room, 0):
                rows = torch.randn(drafts + 1, 3)
                state: Options = {layout: ints(accepted if layout == "num_accepted_tokens" else len(torch.cat(kept)))}
                got = causal_conv1d_update(rows[None], pool, weight, None, None, **state)
                accepted = max(drafts, 1)
                kept.append(rows[:accepted])
                outs.append(got[0, :accepted])
            torch.testing.assert_close(torch.cat(outs).double(), plain(torch.cat(kept), weight), rtol=1e-5, atol=1e-5)


@fault("R30")
def _() -> None:
    x, weight = torch.randn(3, 2).t(), torch.randn(4, 3)
    assert x.stride(1) != 1
    pools = [torch.randn(2, 3, 3)] * 2
    got, want = (
        causal_conv1d_update(v, p.clone(), weight, validate_data=True)
        for v, p in zip((x, x.contiguous()), pools, strict=True)
    )
    assert torch.equal(got, want)


@fault("B04")
def _() -> None:
    steps: tuple[tuple[Options, Options], ...] = (
        ({"num_accepted_tokens": ints(1)}, {"num_accepted_tokens": ints(3)}),
        ({"cache_seqlens": ints(0)}, {"cache_seqlens": ints(3)}),
    )
    for verify, decode in steps:
        tokens, rejected, weight = torch.randn(4, 3), torch.randn(1, 3), torch.randn(4, 3)
        pool = torch.zeros(1, 7, 3)
        rows = torch.cat([tokens[:3], rejected])
        first = causal_conv1d_update(rows[None], pool, weight, None, None, **verify)
        last = causal_conv1d_update(tokens[3:], pool, weight, None, None, **decode)
        got = torch.cat([first[0, :3], last])
        torch.testing.assert_close(got.double(), plain(tokens, weight), rtol=1e-5, atol=1e-5)


@fault("B05", "B33")
def _() -> None:
    # Whole rows are copied to other slots and the requests change places: counts and histories go with the request.
    for layout, start, then in (
        ("num_accepted_tokens", ints(1, 1), ints(4, 1)),
        ("cache_seqlens", ints(8, 20), ints(12, 21)),
    ):
        before: Options = {layout: start}
        after: Options = {layout: then}
        swapped: Options = {layout: then.flip(0)}
        weight, pool, drafts = torch.randn(4, 3), torch.randn(4, 6, 3), torch.randn(2, 4, 3)
        causal_conv1d_update(drafts, pool, weight, conv_state_indices=ints(0, 1), **before)
        moved = pool.clone()
        moved[[3, 2]] = pool[[0, 1]]
        x = torch.randn(2, 3)
        want = causal_conv1d_update(x, pool, weight, conv_state_indices=ints(0, 1), **after)
        got = causal_conv1d_update(x.flip(0), moved, weight, conv_state_indices=ints(2, 3), **swapped)
        assert torch.equal(got.flip(0), want)


@fault("B06")
def _() -> None:
    shared = torch.full((3, 96, 4), 7.0)
    pool = shared[:, 30:36]
    causal_conv1d_update(torch.randn(3, 4, 4), pool, torch.randn(4, 4), num_accepted_tokens=ints(1, 2, 3))
    assert bool((shared[:, :30] == 7).all())
    assert bool((shared[:, 36:] == 7).all())


@fault("B08", "B29", "B30", "B32", "B34", "B36", "R-mixed-batch")
def _() -> None:
    # Verify, plain decode, a one-token prefill tail, a long prefill: in any order as if each were alone.
    lengths, history = [4, 1, 9, 1, 4, 4], [12, 7, 0, 30, 3, 5]
    weight, xs = torch.randn(4, 3), [torch.randn(q, 3) for q in lengths]
    state = torch.randn(6, 7, 3)
    for order in ([0, 1, 2, 3, 4, 5], [3, 4, 5, 0, 1, 2], [2, 1, 3, 0, 5, 4]):
        pool, separate = state.clone(), state.clone()
        got = causal_conv1d(
            torch.cat([xs[i] for i in order]),
            weight,
            None,
            pool,
            cu_seqlens=torch.tensor([0, *accumulate(lengths[i] for i in order)]),
            state_indices=torch.tensor(order),
            history_lens=torch.tensor([history[i] for i in order]),
            layout="ring",
        ).split([lengths[i] for i in order])
        for i, out in zip(order, got, strict=True):
            alone = causal_conv1d_update(
                xs[i][None], separate, weight, None, None, ints(i), cache_seqlens=ints(history[i])
            )
            assert torch.equal(out, alone[0])
        assert torch.equal(pool, separate)


@fault("B10")
def _() -> None:
    x, weight = torch.randn(2, 3), torch.randn(4, 3)
    values = torch.randn(5, 3, 3)
    pools = [
        values.clone(),
        values.transpose(1, 2).contiguous().transpose(1, 2),
        guarded_pool((5, 3, 3), torch.float32)[0],
    ]
    pools[2].copy_(values)
    pools.append(torch.randn(3, 3, 5).permute(2, 1, 0).copy_(values))
    outs = [causal_conv1d_update(x, pool, weight, conv_state_indices=ints(4, 1)) for pool in pools]
    for out, pool in zip(outs, pools, strict=True):
        assert torch.equal(out, outs[0])
        assert torch.equal(pool, pools[0])


@fault("B12")
def _() -> None:
    x, weight = torch.randn(5, 70), torch.randn(4, 70)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.bfloat16):
        got = causal_conv1d(x.to(dtype), weight.to(dtype), cu_seqlens=ints(0, 5))
        want = plain(x.to(dtype), weight.to(dtype))
        torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2)


@fault("B15", "B16")
def _() -> None:
    # Slot times stride past 2**31 elements; the memory is never touched but for two rows.
    storage = torch.from_numpy(np.zeros(2**31 + 4096, dtype=np.float16))
    pool = storage.as_strided((2, 3, 8), (2**31 + 64, 8, 1))
    pool[1] = 1
    slots = torch.tensor([1], dtype=torch.int32)
    got = causal_conv1d_update(torch.ones(1, 8).half(), pool, torch.ones(4, 8).half(), None, None, slots)
    assert got.tolist() == [[4.0] * 8]


@fault("B17")
def _() -> None:
    for tokens in (1025, 1026):
        x, weight = torch.randn(tokens, 64), torch.randn(4, 64)
        got = causal_conv1d_fn(x.t(), weight.t(), activation=None, conv_states=None)
        torch.testing.assert_close(got.t().double(), plain(x, weight), rtol=1e-5, atol=1e-5)


@fault("B18")
def _() -> None:
    for tile in (8, 64):
        for tokens in (tile + 3, tile + 4, tile + 5, 2 * tile + 2):
            x, pool = torch.randn(tokens, 3), torch.zeros(1, 3, 3)
            causal_conv1d(x, torch.randn(4, 3), None, pool, cu_seqlens=ints(0, tokens))
            assert torch.equal(pool[0], x[-3:])


@fault("B19", "B21", "B22")
def _() -> None:
    for tokens in (1, 2):
        old, x, weight = torch.randn(3, 3), torch.randn(tokens, 3), torch.randn(4, 3)
        pool = old[None].clone()
        got = causal_conv1d(x, weight, None, pool, cu_seqlens=ints(0, tokens), history_lens=ints(3), activation="swish")
        full = torch.cat([old, x])
        assert torch.equal(pool[0], full[-3:])
        torch.testing.assert_close(got.double(), plain(full, weight, "silu")[3:], rtol=1e-5, atol=1e-5)


@fault("B20")
def _() -> None:
    weight = torch.tensor([1.0, 10, 100, 1000])[:, None]
    got = causal_conv1d_update(column(4), torch.tensor([1.0, 2, 3]).view(1, 3, 1), weight, None, None)
    assert got.item() == 1 * 1 + 2 * 10 + 3 * 100 + 4 * 1000


@fault("B23")
def _() -> None:
    x, weight = torch.randn(1, 3, 1), torch.randn(3, 4)
    out = causal_conv1d_ref(x, weight, activation=None)
    assert isinstance(out, Tensor)
    torch.testing.assert_close(out[0, :, 0], x[0, :, 0] * weight[:, -1])
    out, state = causal_conv1d_ref(x, weight, return_final_states=True)
    assert state.tolist() == torch.cat([torch.zeros(1, 3, 2), x], 2).tolist()


@fault("B24")
def _() -> None:
    from dlinfer_ext.cli.bench_cases import peak_bytes

    shared = torch.zeros(4096, 2, 6, 64, dtype=torch.bfloat16)
    pool, x, weight = shared[:, 1], torch.randn(4, 64).bfloat16(), torch.randn(4, 64).bfloat16()
    used = peak_bytes(lambda: causal_conv1d_update(x, pool, weight, conv_state_indices=ints(9, 3, 4000, 1)))
    assert used < pool.numel() * 2 / 10


@fault("B25")
def _() -> None:
    pool, weight = torch.zeros(4, 3, 1), ONES.t()
    with pytest.raises(ValueError, match=r"'conv_state_indices' is of shape \[4\]; wanted \[3\]"):
        causal_conv1d_update(
            torch.ones(4, 1), pool, weight, None, None, ints(0, 1, 2, -1), query_start_loc=ints(0, 1, 2, 3)
        )
    got = causal_conv1d_update(
        torch.ones(4, 1), pool, weight, None, None, ints(0, 1, 2), query_start_loc=ints(0, 1, 2, 3), max_query_len=1
    )
    assert got.flatten().tolist() == [1, 1, 1, 0]
    got = causal_conv1d_update(
        torch.ones(4, 1),
        pool,
        weight,
        None,
        None,
        ints(0, 1, 2, -1),
        query_start_loc=ints(0, 1, 2, 3, 4),
        max_query_len=1,
    )
    assert got.flatten().tolist() == [2, 2, 2, 0]


@fault("B31")
def _() -> None:
    # A prefill tail that has the shape of a decode or of a verify step.
    x, weight = torch.randn(12, 3), torch.randn(4, 3)
    for chunks in ([8, 1, 3], [8, 4]):
        pool, outs = torch.full((1, 7, 3), float("inf")), []
        for start, end in pairwise([0, *accumulate(chunks)]):
            outs.append(
                causal_conv1d(
                    x[start:end],
                    weight,
                    None,
                    pool,
                    cu_seqlens=ints(0, end - start),
                    history_lens=ints(start),
                    layout="ring",
                )
            )
        torch.testing.assert_close(torch.cat(outs).double(), plain(x, weight), rtol=1e-5, atol=1e-5)


@fault("B35")
def _() -> None:
    pool = torch.arange(10.0)[:, None, None].expand(10, 3, 1).clone()
    got = causal_conv1d_update(
        column(0, 0, 0, 0), pool, ONES.t(), None, None, ints(5, 9), query_start_loc=ints(0, 2, 4), max_query_len=2
    )
    assert got.flatten().tolist() == [15, 10, 27, 18]


@fault("B37")
def _() -> None:
    x, weight = torch.randn(8, 3), torch.randn(4, 3)
    x[5:] = float("nan")
    pools = [torch.zeros(1, 3, 3), torch.zeros(1, 3, 3)]
    padded = causal_conv1d(x, weight, torch.ones(3), pools[0], cu_seqlens=ints(0, 5))
    exact = causal_conv1d(x[:5], weight, torch.ones(3), pools[1], cu_seqlens=ints(0, 5))
    assert torch.equal(padded, torch.cat([exact, torch.zeros(3, 3)]))
    assert torch.equal(*pools)


@fault("B75", "B76", "B77", "B79", "B80", "B82")
def _() -> None:
    # One real row in a bucket of 8; dummy rows alone.
    for layout in layouts(torch.ones(8).long(), torch.arange(8)):
        pool, storage = guarded_pool((10, 6, 3), torch.float32)
        pool.copy_(torch.randn(10, 6, 3))
        x, weight = torch.randn(8, 3), torch.randn(4, 3)
        for real in (True, False):
            slots = torch.full((8,), -1)
            slots[5] = 3 if real else -1
            before, alone = storage.clone(), pool.clone()
            got = causal_conv1d_update(x, pool, weight, torch.ones(3), None, slots, **layout)
            assert untouched(storage, before, pool, [3] if real else [])
            state = {name: values[5:6] for name, values in layout.items()}
            want = causal_conv1d_update(x[5:6], alone, weight, torch.ones(3), None, slots[5:6], **state)
            assert torch.equal(pool, alone)
            assert torch.equal(got, torch.zeros(8, 3).index_copy(0, ints(5), want))


@fault("B78")
def _() -> None:
    pool = torch.randn(3, 6, 3)
    before, weight = pool.clone(), torch.randn(4, 3)
    none = torch.zeros(0, dtype=torch.int64)
    for layout in layouts(none, none):
        for x in (torch.zeros(0, 3), torch.zeros(0, 4, 3)):
            got = causal_conv1d_update(x, pool, weight, conv_state_indices=none, **layout)
            assert got.shape == x.shape
        got = causal_conv1d_update(
            torch.ones(2, 3), pool, weight, None, "silu", none, query_start_loc=ints(0), max_query_len=2, **layout
        )
        assert torch.equal(got, torch.zeros(2, 3))
    got = causal_conv1d(torch.zeros(0, 3), weight, None, pool, cu_seqlens=ints(0, 0, 0))
    assert got.shape == (0, 3)
    assert causal_conv1d_fn(torch.zeros(3, 0), weight.t()).shape == (3, 0)
    assert torch.equal(pool, before)


@fault("B105")
def _() -> None:
    x = torch.ones(70000, 1)
    got = causal_conv1d(x, ONES.t(), cu_seqlens=torch.arange(70001))
    assert bool((got == 1).all())
    assert causal_conv1d(x, ONES.t(), cu_seqlens=ints(0, 70000)).sum().item() == 4 * 70000 - 6


@fault("B112", "B114")
def _() -> None:
    # The ring's phase is exact for histories close to the end of int32.
    for history in (2**24 + 1, 2**31 - 3):
        for dtype in (torch.int32, torch.int64):
            pool = torch.zeros(1, 7, 1)
            for back in (3, 2, 1):
                pool[0, (history - back) % 7] = 10.0**back
            got = causal_conv1d_update(
                column(1, 1)[None], pool, ONES.t(), None, None, cache_seqlens=torch.tensor([history], dtype=dtype)
            )
            assert got.flatten().tolist() == [1111, 112]
            assert pool[0, (history + 1) % 7].item() == 1


@pytest.mark.parametrize("name", sorted(CASES))
def test_reported_fault(name: str) -> None:
    CASES[name]()
