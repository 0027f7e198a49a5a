"""Gated delta rule against the fp64 definition, against written-out values, and against itself taken apart.

R and B numbers in the ids are the defects seen in peers' operators, each put as the smallest input that shows it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlinfer_ext.kernels.common import delta_chunks, delta_steps
from dlinfer_ext.kernels.common.chunks import rank_counts
from dlinfer_ext.kernels.common.state_pool import copy_states_, donor_rows, flatten_pool, ring_slot
from dlinfer_ext.kernels.gated_delta_rule import chunk_eager, reference
from dlinfer_ext.ops import (
    gated_delta_gate,
    gated_delta_rule,
    gated_delta_rule_update,
    sigmoid_gating_delta_rule_update,
)
from dlinfer_ext.testing import DTYPES, TOLERANCE, HostRead, assert_close, no_host_reads, rms_error
from tests.kernels import delta_checks
from tests.kernels.delta_checks import (
    SMALL,
    Dims,
    Inputs,
    Rule,
    assert_only_written,
    bits,
    entry,
    ints,
    make_inputs,
    make_pool,
    offsets,
)

NAN, INF = float("nan"), float("inf")
FP32 = TOLERANCE["delta_rule", torch.float32]


EAGER_ONLY = pytest.mark.eager_only(reason="about a step inside the PyTorch form")
SHAPES = [
    pytest.param(Dims(2, 2, 8, 8), id="HV=H"),
    pytest.param(Dims(2, 4, 8, 12), id="HV=2H-K<V"),
    pytest.param(Dims(1, 3, 12, 8), id="HV=3H-K>V"),
]
ORIENTATIONS = [pytest.param(True, id="VK"), pytest.param(False, id="KV")]
POOLS = [pytest.param(None, id="plain"), pytest.param(3, id="ring3")]


def make_gating(
    lead: Sequence[int], dims: Dims = SMALL, dtype: torch.dtype = torch.float32, shift: float = 0.0
) -> dict[str, Any]:
    """Return a and b as views of one projection, and the parameters of the gates in types of their own."""
    generator = torch.Generator().manual_seed(2)
    wide = torch.randn(*lead, 2 * dims.HV + 3, generator=generator)
    wide[..., dims.HV + 1 :] += shift
    wide = wide.to(dtype)
    return {
        "a": wide[..., dims.HV + 1 : 2 * dims.HV + 1],
        "b": wide[..., : dims.HV],
        "neg_exp_A": -torch.rand(dims.HV, generator=generator),
        "dt_bias": torch.randn(dims.HV, generator=generator).bfloat16(),
    }


GDN = Rule(
    "delta_rule",
    gated_delta_rule,
    gated_delta_rule_update,
    reference.gated_delta_rule,
    reference.gated_delta_rule_update,
    channels=False,
    gating=(sigmoid_gating_delta_rule_update, reference.sigmoid_gating_delta_rule_update, make_gating),
)
check_prefill, check_update = partial(delta_checks.check_prefill, GDN), partial(delta_checks.check_update, GDN)


LENGTHS = [0, 1, 2, 15, 16, 17, 63, 64, 65, 130]


@pytest.mark.parametrize("ring", POOLS)
@pytest.mark.parametrize("v_first", ORIENTATIONS)
@pytest.mark.parametrize("length", LENGTHS, ids=lambda n: f"T{n}")
def test_prefill_one_row_matches_definition(length: int, v_first: bool, ring: int | None) -> None:
    check_prefill([length], slots=[2], history=[4], v_first=v_first, ring=ring)


@pytest.mark.parametrize("dims", SHAPES)
@pytest.mark.parametrize("v_first", ORIENTATIONS)
@pytest.mark.parametrize("ring", POOLS)
@pytest.mark.parametrize(
    "lengths",
    [[0, 5, 33], [33, 0, 5], [5, 33, 0], [0, 0, 0, 7], [70, 1, 40, 2, 0, 0]],
    ids=lambda n: "-".join(map(str, n)),
)
def test_prefill_batch_matches_definition(lengths: list[int], dims: Dims, v_first: bool, ring: int | None) -> None:
    rows = len(lengths)
    history = [0, 7, 0, 4, 1, 2][:rows]
    check_prefill(
        lengths, dims=dims, slots=list(range(rows, 0, -1)), history=history, v_first=v_first, ring=ring, tail=3
    )


@pytest.mark.parametrize("pool_dtype", DTYPES, ids=lambda d: f"pool-{str(d)[6:]}")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_prefill_rounds_once(dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    check_prefill([40, 3], slots=[1, 0], history=[5, 0], dtype=dtype, pool_dtype=pool_dtype)


def test_prefill_without_history_goes_on_from_the_stored_state() -> None:
    check_prefill([5, 3], slots=[1, 3])
    check_prefill([5, 0, 3])


def test_prefill_scale_and_no_norm() -> None:
    check_prefill([20, 3], history=[0, 2], scale=0.25)
    check_prefill([20, 3], history=[0, 2], use_qk_l2norm=False, limit=1e-4)


@pytest.mark.parametrize("pad_slot_id", [-1, 2, 999], ids=lambda n: f"pad{n}")
@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("ring", POOLS)
def test_prefill_pad_rows_touch_nothing(at: int, ring: int | None, pad_slot_id: int) -> None:
    slots = [0, 1, 3, 4]
    slots[at] = pad_slot_id
    check_prefill([4, 35, 1, 9], slots=slots, history=[3, 0, 5, 1], ring=ring, pad_slot_id=pad_slot_id)


@pytest.mark.parametrize("dirty", [NAN, INF, -0.0], ids=str)
@pytest.mark.parametrize("ring", POOLS)
@pytest.mark.parametrize("pool_dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_prefill_all_pad_changes_no_bit(ring: int | None, pool_dtype: torch.dtype, dirty: float) -> None:
    o = check_prefill([4, 0, 2], slots=[-1, 0, -5], history=[3, 0, 0], ring=ring, dirty=dirty, pool_dtype=pool_dtype)
    assert not o.any()


@pytest.mark.parametrize("dirty", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("ring", POOLS)
def test_prefill_fresh_row_ignores_what_a_slot_holds(ring: int | None, dirty: float) -> None:
    check_prefill([5, 40], slots=[2, 0], history=[0, 0], ring=ring, dirty=dirty)


def test_empty_batches() -> None:
    pool, storage = make_pool(2)
    before = storage.clone()
    for tokens, rows in ((0, 0), (0, 2), (3, 0), (3, 2)):
        o = gated_delta_rule(*make_inputs([tokens]), pool, cu_seqlens=torch.zeros(rows + 1, dtype=torch.int64))
        assert o.shape == (tokens, SMALL.HV, SMALL.V)
        assert not o.any()
    o = gated_delta_rule_update(*make_inputs([0, 2]), pool)
    assert o.shape == (0, 2, SMALL.HV, SMALL.V)
    o = gated_delta_rule_update(*make_inputs([2, 0]), pool)
    assert o.shape == (2, 0, SMALL.HV, SMALL.V)
    assert torch.equal(storage, before)


def alternating(tokens: int, *values: float) -> Tensor:
    return torch.tensor([values[i % len(values)] for i in range(tokens)])[:, None]


GATES = {
    "saturated -5": alternating(130, -5.0),
    "mixed 0/-5": alternating(130, 0.0, -5.0, 0.0),
    "mixed -0.01/-20": alternating(130, -20.0, -0.01, -0.01, -0.02),
    "one -1e4 among small": torch.where(torch.arange(130) % 11 == 3, -1e4, -0.003)[:, None],
    "all -1e4": alternating(130, -1e4),
    "reset by -inf": torch.where(torch.arange(130) % 50 == 20, -INF, -0.1)[:, None],
    "B47-no decay": alternating(130, 0.0),
}


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES.keys())
def test_prefill_holds_fp32_accuracy_under_any_gate(gate: Tensor) -> None:
    check_prefill([130], history=[9], gate=gate)
    check_prefill([64, 66], history=[0, 3], gate=gate)


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES.keys())
def test_update_holds_fp32_accuracy_under_any_gate(gate: Tensor) -> None:
    check_update(5, 6, slots=[3, 1, 0, 2, 4], history=[1, 0, 2, 3, 4], gate=gate[10:40].view(5, 6, 1))


@pytest.mark.parametrize("bad", [NAN, INF], ids=str)
@pytest.mark.parametrize("name", Inputs._fields)
def test_a_bad_row_harms_no_other(name: str, bad: float) -> None:
    lengths, past = [33, 5, 40], ints(2, 2, 2)
    x = make_inputs([78])
    pool, _ = make_pool(3)
    clean = pool.clone()
    want = gated_delta_rule(*x, clean, cu_seqlens=offsets(lengths), history_lens=past, host_lengths=lengths)
    getattr(x, name)[33:38] = bad
    o = gated_delta_rule(*x, pool, cu_seqlens=offsets(lengths), history_lens=past, host_lengths=lengths)
    for part, row in ((slice(0, 33), 0), (slice(38, 78), 2)):
        assert_close("o", o[part], want[part], FP32)
        assert_close("state", pool[row], clean[row], FP32)


@pytest.mark.parametrize("bad", [NAN, INF], ids=str)
@pytest.mark.parametrize("name", Inputs._fields)
def test_a_bad_decode_row_harms_no_other(name: str, bad: float) -> None:
    x, slots = make_inputs([4, 2]), ints(2, 0, -1, 1)
    pool, _ = make_pool(3)
    clean = pool.clone()
    want = gated_delta_rule_update(*x, clean, state_indices=slots)
    for bad_row in (1, 2):
        dirty, y = pool.clone(), make_inputs([4, 2])
        getattr(y, name)[bad_row] = bad
        o = gated_delta_rule_update(*y, dirty, state_indices=slots)
        for row, slot in ((0, 2), (3, 1)):
            assert torch.equal(o[row], want[row])
            assert torch.equal(dirty[slot], clean[slot])


@pytest.mark.parametrize("ring", POOLS)
@pytest.mark.parametrize("lengths", [[20], [70]], ids=["T20", "T70"])
def test_prefill_at_every_split_equals_one_shot(lengths: list[int], ring: int | None) -> None:
    total = lengths[0]
    x = make_inputs([total])
    pool, _ = make_pool(1, ring=ring)
    one = pool.clone()
    want = gated_delta_rule(*x, one, cu_seqlens=offsets([total]), history_lens=ints(0), host_lengths=[total])
    for split in range(1, total, 1 if total < 30 else 9):
        parts = pool.clone()
        o = torch.cat([
            gated_delta_rule(
                *x.rows(slice(lo, hi)),
                parts,
                cu_seqlens=ints(0, hi - lo),
                history_lens=ints(lo),
                host_lengths=[hi - lo],
            )
            for lo, hi in ((0, split), (split, total))
        ])  # fmt: skip
        assert_close(f"o split at {split}", o, want, FP32)
        e = entry(0, total, ring)
        assert_close(f"state split at {split}", parts[e], one[e], FP32)


def test_batch_equals_separate_and_permuted() -> None:
    lengths, slots, past = [33, 0, 1, 64, 7], [4, 0, 2, 1, 3], [0, 2, 5, 1, 0]
    starts = offsets(lengths).tolist()
    x = make_inputs([starts[-1]])
    pool, _ = make_pool(5)
    batch = pool.clone()
    o = gated_delta_rule(
        *x, batch, cu_seqlens=offsets(lengths), state_indices=torch.tensor(slots), history_lens=torch.tensor(past)
    )
    separate = pool.clone()
    for (lo, hi), slot, h in zip(pairwise(starts), slots, past, strict=True):
        part = gated_delta_rule(
            *x.rows(slice(lo, hi)),
            separate,
            cu_seqlens=ints(0, hi - lo),
            state_indices=ints(slot),
            history_lens=ints(h),
        )
        assert_close("o", part, o[lo:hi], FP32)
    assert_close("states", separate, batch, FP32)
    order = [3, 1, 4, 0, 2]
    permuted = pool.clone()
    tokens = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in order])
    po = gated_delta_rule(
        *x.rows(tokens),
        permuted,
        cu_seqlens=offsets([lengths[i] for i in order]),
        state_indices=torch.tensor([slots[i] for i in order]),
        history_lens=torch.tensor([past[i] for i in order]),
    )
    assert_close("o permuted", po, o[tokens], FP32)
    assert_close("states permuted", permuted, batch, FP32)


def test_recurrence_by_hand() -> None:
    one, half = torch.ones(2, 1, 1), torch.full((2, 1), 0.5)
    for pool in (torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1, 1), NAN)):
        o = gated_delta_rule(
            one, one, one, half.log(), half, pool, cu_seqlens=ints(0, 2), history_lens=ints(0), host_lengths=[2]
        )
        # S = 0.5; then 0.5 · S = 0.25, u = 0.5 (1 - 0.25) = 0.375, S = 0.625.
        assert o.flatten().tolist() == pytest.approx([0.5, 0.625], abs=1e-7)
        assert pool.item() == pytest.approx(0.625, abs=1e-7)


@pytest.mark.parametrize("dims", SHAPES)
@pytest.mark.parametrize("v_first", ORIENTATIONS)
@pytest.mark.parametrize("ring", [None, 1, 4], ids=["plain", "ring1", "ring4"])
@pytest.mark.parametrize("steps", [1, 2, 4], ids=lambda n: f"Q{n}")
def test_update_matches_definition(steps: int, ring: int | None, v_first: bool, dims: Dims) -> None:
    if ring and steps > ring:
        steps = ring
    check_update(
        5, steps, dims=dims, slots=[6, 0, -1, 3, 1], history=[9, 0, 4, 1, 2], v_first=v_first, ring=ring
    )  # fmt: skip


@pytest.mark.parametrize("pool_dtype", DTYPES, ids=lambda d: f"pool-{str(d)[6:]}")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("ring", POOLS)
def test_update_rounds_once(dtype: torch.dtype, pool_dtype: torch.dtype, ring: int | None) -> None:
    check_update(3, 3, slots=[2, 0, 3], history=[5, 0, 1], dtype=dtype, pool_dtype=pool_dtype, ring=ring)


@pytest.mark.parametrize("steps", [1, 4], ids=lambda n: f"Q{n}")
def test_update_one_row_of_one_key_head(steps: int) -> None:
    """A rank's share of a small model: broadcasting the key head over its value heads needs no copy by itself."""
    check_update(1, steps, dims=Dims(1, 3, 12, 8), slots=[2])


def test_update_without_indices_or_history() -> None:
    check_update(3, 2)
    check_update(3, 2, slots=[3, 1, 5])


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("pad_slot_id", [-1, 2, 999], ids=lambda n: f"pad{n}")
@pytest.mark.parametrize("ring", POOLS)
def test_update_pad_rows_touch_nothing(at: int, pad_slot_id: int, ring: int | None) -> None:
    slots = [0, 1, 3, 4]
    slots[at] = pad_slot_id
    o = check_update(4, 2, slots=slots, history=[3, 0, 5, 1], ring=ring, pad_slot_id=pad_slot_id)
    assert not o[at].any()


@pytest.mark.parametrize("dirty", [NAN, INF, -0.0], ids=str)
@pytest.mark.parametrize("pool_dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("ring", POOLS)
@pytest.mark.parametrize("v_first", ORIENTATIONS)
def test_update_all_pad_changes_no_bit(ring: int | None, pool_dtype: torch.dtype, dirty: float, v_first: bool) -> None:
    o = check_update(
        3, 2, slots=[-1, -3, -1], history=[3, 0, 0], ring=ring, dirty=dirty, pool_dtype=pool_dtype, v_first=v_first
    )  # fmt: skip
    assert not o.any()


@pytest.mark.parametrize("dirty", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("ring", POOLS)
def test_update_fresh_row_ignores_what_a_slot_holds(ring: int | None, dirty: float) -> None:
    check_update(3, 3, slots=[2, 0, -1], history=[0, 0, 0], ring=ring, dirty=dirty)


@EAGER_ONLY
@pytest.mark.parametrize("ring", POOLS)
@pytest.mark.parametrize("v_first", ORIENTATIONS)
@pytest.mark.parametrize("size", [1, 100, 400, 1600, 4000], ids=["one-channel", "channels", "heads", "row", "rows"])
def test_update_in_blocks_of_any_size(
    monkeypatch: pytest.MonkeyPatch, size: int, v_first: bool, ring: int | None
) -> None:
    monkeypatch.setattr(delta_steps, "BLOCK_BYTES", size)
    monkeypatch.setattr(delta_steps, "BLOCK_FRACTION", 1)
    monkeypatch.setattr(delta_steps, "SMALL_BYTES", 0)
    # The first block of two rows holds no live row, the second one, the third two.
    check_update(
        6, 2, slots=[-1, -1, 3, -1, 0, 1], history=[1, 2, 3, 4, 0, 5], v_first=v_first, ring=ring
    )  # fmt: skip


@pytest.mark.parametrize("dims", SHAPES)
@pytest.mark.parametrize("v_first", ORIENTATIONS)
def test_table_matches_definition(dims: Dims, v_first: bool) -> None:
    table = [[1, 5, 7], [0, 2, 3], [4, -1, -1], [-1, -1, -1], [9, 8, 6]]
    check_update(5, 3, dims=dims, slots=table, accepted=[3, 1, 1, 2, 2], v_first=v_first, num_slots=11)


def test_table_columns_past_the_step_are_not_touched() -> None:
    check_update(2, 1, slots=[[1, 5, 7], [0, -1, -1]], accepted=[3, 1], num_slots=9)
    check_update(2, 1, slots=[[1, 5, 7], [0, 2, 3]], history=[0, 4], accepted=[1, 3], num_slots=9)


@pytest.mark.parametrize("accepted", [0, -4, 4, 99], ids=lambda n: f"R36-accepted{n}")
def test_accepted_count_outside_the_table_stays_in_the_row(accepted: int) -> None:
    check_update(2, 2, slots=[[1, 5, 7], [0, 2, 3]], accepted=[accepted, 2], num_slots=9)


def test_table_with_any_strides() -> None:
    # R36: the second stride of the table is 2.
    wide = torch.tensor([[1, 9, 5, 9, 7, 9], [0, 9, 2, 9, 3, 9]])
    x = make_inputs([2, 3])
    pool, _ = make_pool(10)
    dense = pool.clone()
    o = gated_delta_rule_update(*x, pool, state_indices=wide[:, ::2], num_accepted_tokens=ints(2, 1))
    want = gated_delta_rule_update(*x, dense, state_indices=wide[:, ::2].contiguous(), num_accepted_tokens=ints(2, 1))
    assert torch.equal(o, want)
    assert torch.equal(pool, dense)


PACKED = [
    pytest.param([2, 4, 3], id="B07-shorter-drafts"),
    pytest.param([0, 4, 1, 0], id="empty-rows"),
    pytest.param([1, 1, 1, 1], id="decode"),
    pytest.param([4, 1, 0, 2, 3], id="B08-verify-and-plain"),
    pytest.param([0, 0], id="all-empty"),
]


@pytest.mark.parametrize("form", ["plain", "ring", "table"])
@pytest.mark.parametrize("v_first", ORIENTATIONS)
@pytest.mark.parametrize("lengths", PACKED)
def test_packed_rows_match_definition(lengths: list[int], v_first: bool, form: str) -> None:
    rows = len(lengths)
    common: dict[str, Any] = {"lengths": lengths, "v_first": v_first}
    if form == "table":
        table = torch.randperm(rows * 4 + 1, generator=torch.Generator().manual_seed(2))[: rows * 4].view(rows, 4)
        table[-1, lengths[-1] :] = -1
        accepted = [1 if i == rows - 1 else i % 4 + 1 for i in range(rows)]
        check_update(rows, 0, slots=table.tolist(), accepted=accepted, num_slots=rows * 4 + 1, **common)
    else:
        slots = list(range(rows, 0, -1))
        slots[0] = -1
        check_update(
            rows, 0, slots=slots, history=[5, 0, 7, 2, 1][:rows], ring=4 if form == "ring" else None, num_slots=16,
            **common,
        )  # fmt: skip


@pytest.mark.parametrize("lengths", [[9, 0, 1, 3], [1] * 20, [40, 1, 1]], ids=["uneven", "decode", "one-long"])
def test_packed_plain_rows_of_unbounded_length(lengths: list[int]) -> None:
    check_update(len(lengths), 0, slots=list(range(len(lengths))), history=[2] * len(lengths), lengths=lengths)


@pytest.mark.parametrize("ring", POOLS)
def test_update_equals_prefill_of_the_same_tokens(ring: int | None) -> None:
    rows, steps = 4, 3
    x = make_inputs([rows, steps], dtype=torch.bfloat16)
    pool, _ = make_pool(6, ring=ring, dtype=torch.bfloat16)
    other = pool.clone()
    slots, past = ints(5, 0, 2, 3), ints(4, 0, 7, 1)
    o = gated_delta_rule_update(*x, pool, state_indices=slots, history_lens=past)
    flat = Inputs(*(y.flatten(0, 1) for y in x))
    po = gated_delta_rule(
        *flat,
        other,
        cu_seqlens=torch.arange(rows + 1) * steps,
        state_indices=slots,
        history_lens=past,
        host_lengths=[steps] * rows,
    )
    # Both round one fp32 value once, so they may differ by one step of bf16 where that value lies on an edge.
    torch.testing.assert_close(po.view_as(o), o, rtol=2**-7, atol=1e-6)
    for row in range(rows):
        e = entry(int(slots[row]), int(past[row]) + steps, ring)
        torch.testing.assert_close(other[e], pool[e], rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("drafts", [1, 2, 3, 7], ids=lambda n: f"drafts{n}")
def test_ring_verify_goes_on_from_any_accepted_token(drafts: int) -> None:
    ring, prompt = 1 + drafts, 10
    for accepted in range(1, ring + 1):
        x = make_inputs([prompt + accepted + ring], seed=accepted)
        pool, _ = make_pool(2, ring=ring)
        slot = ints(1)
        gated_delta_rule(
            *x.rows(slice(0, prompt)), pool, cu_seqlens=ints(0, prompt), state_indices=slot, history_lens=ints(0)
        )
        # The step verifies `ring` rows; those past `accepted` are wrong drafts and are rejected.
        drafted = make_inputs([1, ring], seed=99)
        for name in Inputs._fields:
            getattr(drafted, name)[0, :accepted] = getattr(x, name)[prompt : prompt + accepted]
        gated_delta_rule_update(*drafted, pool, state_indices=slot, history_lens=ints(prompt))
        rest = Inputs(*(y[None, prompt + accepted :] for y in x))
        o = gated_delta_rule_update(*rest, pool, state_indices=slot, history_lens=ints(prompt + accepted))
        want = reference.gated_delta_rule(*x, torch.zeros(1, SMALL.HV, SMALL.V, SMALL.K), cu_seqlens=ints(0, len(x.q)))
        assert_close(f"accepted {accepted}", o[0], want[prompt + accepted :], FP32)


def test_ring_with_changing_draft_counts() -> None:
    """B116, B04, R52: steps of 4, 1, 3, 2 rows, one of them accepted less than offered, equal plain decoding."""
    ring, total = 4, 16
    x = make_inputs([total])
    pool, _ = make_pool(1, ring=ring)
    pool.fill_(NAN)
    want = reference.gated_delta_rule(*x, torch.zeros(1, SMALL.HV, SMALL.V, SMALL.K), cu_seqlens=ints(0, total))
    done = 0
    for offered, accepted in ((4, 2), (1, 1), (3, 3), (2, 1), (4, 4), (1, 1), (4, 4)):
        step = Inputs(*(y[None, done : done + offered] for y in x))
        o = gated_delta_rule_update(*step, pool, history_lens=ints(done))
        assert_close(f"step at {done}", o[0], want[done : done + offered], FP32)
        done += accepted
    assert done == total


def test_table_verify_goes_on_from_any_accepted_token() -> None:
    prompt, width = 6, 4
    table = ints(3, 0, 4, 1)[None]
    for accepted in range(1, width + 1):
        x = make_inputs([prompt + accepted + 2], seed=accepted)
        pool, _ = make_pool(5)
        gated_delta_rule(
            *x.rows(slice(0, prompt)), pool, cu_seqlens=ints(0, prompt), state_indices=table[:, 0], history_lens=ints(0)
        )
        drafted = make_inputs([1, width], seed=99)
        for name in Inputs._fields:
            getattr(drafted, name)[0, :accepted] = getattr(x, name)[prompt : prompt + accepted]
        gated_delta_rule_update(*drafted, pool, state_indices=table, num_accepted_tokens=ints(1))
        rest = Inputs(*(y[None, prompt + accepted :] for y in x))
        o = gated_delta_rule_update(*rest, pool, state_indices=table, num_accepted_tokens=ints(accepted))
        want = reference.gated_delta_rule(*x, torch.zeros(1, SMALL.HV, SMALL.V, SMALL.K), cu_seqlens=ints(0, len(x.q)))
        assert_close(f"accepted {accepted}", o[0], want[prompt + accepted :], FP32)


@pytest.mark.parametrize("lengths", [[5, 0, 33], [0, 0], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("ring", POOLS)
def test_prefill_with_host_lengths_reads_nothing(lengths: list[int], ring: int | None) -> None:
    x = make_inputs([sum(lengths)])
    pool, _ = make_pool(4, ring=ring)
    slots = torch.tensor([2, 0, -1][: len(lengths)])
    past = torch.tensor([3, 0, 1][: len(lengths)])
    common: dict[str, Any] = {"cu_seqlens": offsets(lengths), "state_indices": slots, "history_lens": past}
    with no_host_reads():
        gated_delta_rule(*x, pool, **common, host_lengths=lengths)


@EAGER_ONLY
def test_prefill_without_host_lengths_reads_them() -> None:
    x, (pool, _) = make_inputs([4]), make_pool(4)
    common: dict[str, Any] = {"state_indices": ints(2, 0), "history_lens": ints(3, 0)}
    with pytest.raises(HostRead), no_host_reads():
        gated_delta_rule(*x, pool, cu_seqlens=offsets([1, 3]), **common)


GATING_FORMS: dict[str, dict[str, Any]] = {
    "decode": {"rows": 4, "steps": 1, "slots": [6, 0, -1, 3], "history": [9, 0, 4, 1]},
    "decode-from-what-is-stored": {"rows": 3, "steps": 1},
    "tokens": {"rows": 3, "steps": 3, "slots": [2, 0, 1], "history": [0, 3, 1]},
    "ring-decode": {"rows": 4, "steps": 1, "slots": [6, 0, -1, 3], "history": [9, 0, 4, 1], "ring": 4},
    "ring-verify": {"rows": 4, "steps": 4, "slots": [6, 0, -1, 3], "history": [9, 0, 4, -1], "ring": 4},
    "table": {
        "rows": 4, "steps": 2, "slots": [[1, 5, 7], [0, 2, 3], [4, -1, -1], [9, 8, 6]], "accepted": [3, 1, 1, 2],
        "num_slots": 11,
    },
    "packed": {"rows": 4, "steps": 0, "lengths": [5, 0, 1, 7], "slots": [3, 1, -1, 0], "history": [0, 2, 1, 4]},
    "packed-ring": {"rows": 4, "steps": 0, "lengths": [2, 0, 4, 1], "slots": [3, 1, -1, 0], "history": [0, 2, 1, 4],
                    "ring": 4},
    "packed-table": {"rows": 2, "steps": 0, "lengths": [3, 1], "slots": [[1, 5, 7], [0, 2, -1]], "accepted": [2, 2],
                     "num_slots": 9},
    "inf-left-in-fresh-slots": {"rows": 2, "steps": 2, "slots": [1, 0], "history": [0, 0], "dirty": INF},
}  # fmt: skip


@pytest.mark.parametrize("form", GATING_FORMS.values(), ids=GATING_FORMS.keys())
@pytest.mark.parametrize("v_first", ORIENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_update_with_gating_matches_definition(form: dict[str, Any], v_first: bool, dtype: torch.dtype) -> None:
    form = dict(form)
    o = check_update(form.pop("rows"), form.pop("steps"), **form, v_first=v_first, dtype=dtype, gating={})
    assert o.any()


@pytest.mark.parametrize("shift", [-17.0, -80.0, 4.0, 30.0], ids=lambda n: f"a{n:+.0f}")
def test_update_with_gating_holds_accuracy_over_the_softplus(shift: float) -> None:
    check_update(3, 4, slots=[2, 0, 1], gating={"shift": shift})
    check_update(3, 4, slots=[2, 0, 1], gating={"shift": shift, "softplus_beta": 2.0, "softplus_threshold": 5.0})


def test_update_with_gating_equals_gates_then_update() -> None:
    x, gating, (pool, _) = make_inputs([3, 2]), make_gating([3, 2]), make_pool(4)
    two, slots = pool.clone(), ints(2, 0, 3)
    o = sigmoid_gating_delta_rule_update(x.q, x.k, x.v, **gating, state=pool, state_indices=slots)
    want = gated_delta_rule_update(x.q, x.k, x.v, *gated_delta_gate(**gating), two, state_indices=slots)
    assert_close("o", o, want, FP32)
    assert_close("state", pool, two, FP32)


@pytest.mark.parametrize("bad", [NAN, INF], ids=str)
@pytest.mark.parametrize("name", ["q", "v", "a", "b"])
def test_a_bad_row_with_gating_harms_no_other(name: str, bad: float) -> None:
    x, (pool, _) = make_inputs([3, 2]), make_pool(3)
    given: dict[str, Any] = {"q": x.q, "k": x.k, "v": x.v, **make_gating([3, 2])}
    clean = pool.clone()
    want = sigmoid_gating_delta_rule_update(**given, state=clean)
    given[name][1] = bad
    o = sigmoid_gating_delta_rule_update(**given, state=pool)
    for row in (0, 2):
        assert torch.equal(o[row], want[row])
        assert torch.equal(pool[row], clean[row])


def test_gate_reads_nothing_and_takes_views() -> None:
    """B55, B56: a and b are columns of one projection."""
    for heads in (2, 6):
        wide = torch.randn(5, 2 * heads + 1)
        a, b = wide[:, heads + 1 :], wide[:, :heads]
        neg, bias = -torch.rand(heads), torch.randn(heads)
        with no_host_reads():
            g, beta = gated_delta_gate(a, b, neg, bias)
        want_g, want_beta = reference.gated_delta_gate(a, b, neg, bias)
        assert_close("g", g, want_g, 1e-6)
        assert_close("beta", beta, want_beta, 1e-6)


def test_gate_does_not_underflow() -> None:
    """R44: softplus(-17) is 4.1e-8, and log(1 + exp(x)) in fp32 gives 0."""
    a, one = torch.tensor([[-17.0, -80.0, 25.0, 0.0]]), torch.ones(4)
    g, beta = gated_delta_gate(a, torch.tensor([[0.0, -100.0, 100.0, 1.0]]), -one, 0 * one)
    assert g[0].tolist() == pytest.approx([-4.1399376e-8, -1.8048513e-35, -25.0, -math.log(2)], rel=1e-6)
    assert beta[0].tolist() == pytest.approx([0.5, 3.783506e-44, 1.0, 1 / (1 + math.exp(-1))], rel=1e-2)
    assert g.dtype == beta.dtype == torch.float32


def test_gate_softplus_beta_and_threshold() -> None:
    a, zero, one = torch.tensor([[3.0, 1.0]]), torch.zeros(2), torch.ones(2)
    g, _ = gated_delta_gate(a, a, -one, zero, softplus_beta=2.0, softplus_threshold=5.0)
    assert g[0].tolist() == pytest.approx([-3.0, -math.log1p(math.exp(2)) / 2], rel=1e-6)


PEER_PREFILL: dict[str, dict[str, Any]] = {
    "B39-T1": {"lengths": [1], "history": [3], "gate": torch.tensor([-0.5])},
    "B39-T63": {"lengths": [63], "history": [3], "gate": torch.tensor([-0.5])},
    "B39-T65": {"lengths": [65], "history": [3], "gate": torch.tensor([-0.5])},
    "B39-T100": {"lengths": [100], "history": [3], "gate": torch.tensor([-0.5])},
    "B42-gates-of-minus-50": {"lengths": [2, 40], "history": [1, 1], "gate": torch.tensor([-50.0])},
    "B43-empty-sequences": {"lengths": [0, 64, 0, 6]},
    "B44-empty-in-the-middle": {"lengths": [64, 0, 64]},
    "B45-T1-to-16": {"lengths": list(range(1, 17))},
    "B47-no-decay": {"lengths": [7, 50, 64, 65], "gate": torch.tensor([0.0])},
    "B48-many-documents": {"lengths": [1 + i * 37 % 130 for i in range(60)], "dims": Dims(1, 1, 4, 4)},
    "B49-short-segments": {"lengths": [57, 2, 5]},
    "B50-K80-V96": {"lengths": [2, 33], "dims": Dims(1, 2, 80, 96)},
    "B51-V72": {"lengths": [3], "dims": Dims(1, 1, 32, 72)},
    "B54-history-decides-not-length": {"lengths": [40, 1, 40], "history": [40, 1, 0]},
    "B57-bf16-pool": {"lengths": [9, 40], "pool_dtype": torch.bfloat16},
    "B58-fp32-pool-bf16-model": {"lengths": [9, 40], "dtype": torch.bfloat16, "pool_dtype": torch.float32},
    "B59-K64-V32": {"lengths": [130], "dims": Dims(1, 1, 64, 32)},
    "R35-slot-0-is-a-slot": {"lengths": [4], "slots": [0], "history": [0]},
    "R47-pads-do-not-reach-slot-0": {"lengths": [4, 4, 4], "slots": [-1, 1, -1], "history": [0, 2, 0]},
    "R48-ring-K-differs-from-V": {"lengths": [4, 33], "ring": 3, "history": [0, 4], "dims": Dims(1, 2, 16, 8)},
}


@pytest.mark.parametrize("case", PEER_PREFILL.values(), ids=PEER_PREFILL.keys())
@pytest.mark.parametrize("v_first", ORIENTATIONS)
def test_prefill_faults_of_peers(case: dict[str, Any], v_first: bool) -> None:
    check_prefill(**case, v_first=v_first)


PEER_UPDATE: dict[str, dict[str, Any]] = {
    "R32-rows-without-a-state-give-zeros": {"rows": 3, "steps": 2, "slots": [-1, 1, -1]},
    "R33-negative-history": {"rows": 2, "steps": 2, "slots": [2, 0], "history": [-4, 5], "ring": 3},
    "R35-slot-0-is-a-slot": {"rows": 1, "steps": 1, "slots": [0]},
    "R46-verify-keeps-every-state": {"rows": 2, "steps": 3, "history": [4, 0], "ring": 3},
    "R48-ring-K-differs-from-V": {"rows": 2, "steps": 2, "history": [4, 0], "ring": 3, "dims": Dims(1, 2, 16, 8)},
    "R52-plain-step-on-a-ring": {"rows": 2, "steps": 1, "history": [6, 2], "ring": 4},
    "B50-K80-V96": {"rows": 2, "steps": 1, "dims": Dims(1, 2, 80, 96)},
    "B51-V72": {"rows": 2, "steps": 2, "dims": Dims(1, 1, 32, 72)},
    "B52-five-drafts-six-columns": {
        "rows": 2, "steps": 6, "slots": [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]], "accepted": [6, 1], "num_slots": 12,
    },
    "B58-fp32-pool-bf16-model": {"rows": 2, "steps": 1, "dtype": torch.bfloat16},
    "B114-ring-phase-of-a-long-context": {"rows": 2, "steps": 3, "history": [2**31 - 2, 2**31 - 1], "ring": 7},
}  # fmt: skip


@pytest.mark.parametrize("case", PEER_UPDATE.values(), ids=PEER_UPDATE.keys())
@pytest.mark.parametrize("v_first", ORIENTATIONS)
def test_update_faults_of_peers(case: dict[str, Any], v_first: bool) -> None:
    case = dict(case)
    check_update(case.pop("rows"), case.pop("steps"), **case, v_first=v_first)


@pytest.mark.parametrize(("total", "split"), [(65, 64), (3, 2), (128, 64)], ids=["B38-65", "B38-3", "B40-B41-128"])
def test_padding_of_the_last_chunk_is_neutral(total: int, split: int) -> None:
    x = make_inputs([total])
    first, _ = make_pool(1)
    whole, parts = first.clone(), first.clone()
    want = reference.gated_delta_rule(*x, first.double(), cu_seqlens=ints(0, total))
    o = gated_delta_rule(*x, whole, cu_seqlens=ints(0, total))
    a = gated_delta_rule(*x.rows(slice(0, split)), parts, cu_seqlens=ints(0, split))
    b = gated_delta_rule(*x.rows(slice(split, total)), parts, cu_seqlens=ints(0, total - split))
    assert_close("one shot", o, want, FP32)
    assert_close("two passes", torch.cat([a, b]), want, FP32)
    assert_close("state", parts, whole, FP32)


def test_prompt_padded_to_a_bucket_has_the_state_of_the_prompt() -> None:
    """B37: 5 tokens padded to 8 through cu_seqlens, and through g = beta = 0."""
    x = make_inputs([8])
    want = torch.zeros(1, SMALL.HV, SMALL.V, SMALL.K)
    gated_delta_rule(*x.rows(slice(0, 5)), want, cu_seqlens=ints(0, 5))
    by_offsets, by_gates = torch.zeros_like(want), torch.zeros_like(want)
    o = gated_delta_rule(*x, by_offsets, cu_seqlens=ints(0, 5))
    assert not o[5:].any()
    x.g[5:] = 0
    x.beta[5:] = 0
    gated_delta_rule(*x, by_gates, cu_seqlens=ints(0, 8))
    assert torch.equal(by_offsets, want)
    assert_close("state", by_gates, want, FP32)


def test_keys_that_are_not_normalised_stay_finite() -> None:
    """B46: fp16 keys of norm 8; the inverse of the chunk's system is in fp32."""
    dims = Dims(1, 1, 64, 64)
    x = make_inputs([64], dims, torch.float16)
    o = gated_delta_rule(*x, torch.zeros(1, 1, 64, 64), cu_seqlens=ints(0, 64), history_lens=ints(0))
    want = reference.gated_delta_rule(*x, torch.zeros(1, 1, 64, 64).double(), cu_seqlens=ints(0, 64))
    assert torch.isfinite(o).all()
    assert rms_error(o, want) < 2e-3


def test_l2_epsilon_is_inside_the_root_on_every_route() -> None:
    """R40: a query of norm 3e-7 keeps 3e-7 / sqrt(9e-14 + 1e-6) = 3e-4 of its length, whichever route serves."""
    one = torch.ones(1, 1, 1)
    q, g, beta = one * 3e-7, torch.zeros(1, 1), torch.ones(1, 1)
    expected = 3e-7 / math.sqrt(9e-14 + 1e-6) / math.sqrt(1 + 1e-6)
    o = gated_delta_rule(q, one, one, g, beta, torch.zeros(1, 1, 1, 1), cu_seqlens=ints(0, 1), use_qk_l2norm=True)
    assert o.item() == pytest.approx(expected, rel=1e-5)
    o = gated_delta_rule_update(
        q[None], one[None], one[None], g[None], beta[None], torch.zeros(1, 1, 1, 1), use_qk_l2norm=True
    )
    assert o.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("form", ["prefill", "update"])
def test_pool_of_any_strides(form: str) -> None:
    """R42, B10, B50: a permuted pool and a per-layer slice are written in place, not copied."""
    dims = Dims(1, 2, 8, 12)
    x = make_inputs([3, 1], dims)
    storage = torch.randn(2, 4, 12, 8)
    layers = torch.randn(4, 3, 2, 12, 8)
    transposed = torch.randn(4, 2, 8, 12)
    for pool in (storage.permute(1, 0, 2, 3), layers[:, 1], transposed.transpose(-1, -2)):
        want = pool.double()
        if form == "update":
            o = gated_delta_rule_update(*x, pool)
            ref = reference.gated_delta_rule_update(*x, want)
        else:
            flat = Inputs(*(y[:, 0] for y in x))
            o = gated_delta_rule(*flat, pool, cu_seqlens=torch.arange(4))
            ref = reference.gated_delta_rule(*flat, want, cu_seqlens=torch.arange(4))
        assert_close("o", o, ref, FP32)
        assert_close("pool", pool, want, FP32)


def test_ring_pool_of_any_strides() -> None:
    """The slot stride is not a multiple of the entry stride."""
    dims = Dims(1, 1, 2, 2)
    x = make_inputs([3, 2], dims)
    storage = torch.full((200,), 777.0)
    pool = storage.as_strided((3, 3, 1, 2, 2), (31, 6, 4, 2, 1), 5)
    pool.copy_(torch.randn(3, 3, 1, 2, 2))
    before, want = storage.clone(), pool.double()
    slots, past = ints(2, 0, 1), ints(4, 0, 2)
    o = gated_delta_rule_update(*x, pool, state_indices=slots, history_lens=past)
    ref = reference.gated_delta_rule_update(*x, want, state_indices=slots, history_lens=past)
    assert_close("o", o, ref, FP32)
    assert_close("pool", pool, want, FP32)
    entries = [entry(int(s), int(h) + t, 3) for s, h in zip(slots, past, strict=True) for t in (1, 2)]
    assert_only_written(storage, before, pool, entries)


@EAGER_ONLY
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_offsets_are_64_bit(dtype: torch.dtype) -> None:
    """R45, B53: slot 5000 of a pool with 2^20 elements per slot lies beyond 2^31."""
    plain = flatten_pool(torch.empty(6000, 32, 256, 128, device="meta"))
    slot = torch.tensor([5000], dtype=dtype)
    assert plain.at(slot).dtype == torch.int64
    assert plain.at(slot).item() * plain.view.stride(0) == 5000 * 2**20
    layers = torch.empty(6000, 24, 4, 32, 256, 128, device="meta")
    ring = flatten_pool(layers[:, 3])
    flat = ring.at(slot, torch.tensor([3], dtype=dtype))
    assert flat.dtype == torch.int64
    assert flat.item() * ring.view.stride(0) == 5000 * layers.stride(0) + 3 * layers.stride(2)


@EAGER_ONLY
def test_int32_ring_arithmetic_does_not_overflow() -> None:
    assert ring_slot(torch.tensor([2**31 - 1], dtype=torch.int32), 5, 7).tolist() == [(2**31 + 4) % 7]
    assert ring_slot(torch.tensor([10, 11]), torch.tensor([0, 2]), 3).tolist() == [1, 1]


def test_work_is_proportional_to_the_rows_addressed() -> None:
    """R50, B24: nothing as large as the pool is made."""
    from dlinfer_ext.cli.bench_cases import peak_bytes

    pool, x, slots, past = torch.zeros(4096, 4, 16, 16), make_inputs([2, 1], Dims(2, 4, 16, 16)), ints(5, 9), ints(0, 3)
    assert (
        peak_bytes(lambda: gated_delta_rule_update(*x, pool, state_indices=slots, history_lens=past))
        < pool.nbytes / 100
    )
    flat = Inputs(*(y[:, 0] for y in x))
    used = peak_bytes(
        lambda: gated_delta_rule(*flat, pool, cu_seqlens=ints(0, 1, 2), state_indices=slots, history_lens=past)
    )
    assert used < pool.nbytes / 100


def test_update_memory_is_a_fraction_of_the_states_addressed() -> None:
    from dlinfer_ext.cli.bench_cases import peak_bytes

    x = make_inputs([16, 1], Dims(8, 8, 128, 128))
    pool = torch.zeros(20, 8, 128, 128)
    addressed = 16 * pool[0].nbytes
    slots, past = torch.arange(16) + 2, torch.arange(16)
    for p in (pool, pool.bfloat16()):
        used = peak_bytes(partial(gated_delta_rule_update, *x, p, state_indices=slots, history_lens=past))
        assert used <= addressed * p.element_size() / 4 / 4 + 16 * 8 * 128 * 4 * 8


@EAGER_ONLY
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("offset", [0, 4, 8, 3], ids=lambda n: f"offset{n}")
@pytest.mark.parametrize("keys", [3, 8, 16], ids=lambda n: f"K{n}")
def test_states_are_copied_bit_for_bit_whatever_the_alignment(keys: int, offset: int, dtype: torch.dtype) -> None:
    storage = torch.randn(1024).to(dtype)
    view = storage.as_strided((4, 2, 3, keys), (128, 3 * keys, keys, 1), offset)
    raw = torch.randint(-(2**15), 2**15, (2, 2, 3, keys * dtype.itemsize // 2), dtype=torch.int16)
    states, want, index = raw.view(dtype), storage.clone(), ints(3, 1)
    for i, place in enumerate((3, 1)):
        want.as_strided(view.size(), view.stride(), offset)[place] = states[i]
    copy_states_(view, index, states)
    assert torch.equal(bits(storage), bits(want))


@EAGER_ONLY
def test_donors_stay_in_their_block() -> None:
    live = torch.tensor([False, True, True, False, False, False, True])
    assert donor_rows(live, 7).tolist() == [1, 1, 2, 1, 1, 1, 6]
    assert donor_rows(live, 3).tolist() == [1, 1, 2, 3, 3, 3, 6]
    assert donor_rows(live, 2).tolist() == [1, 1, 2, 2, 4, 4, 6]
    assert donor_rows(~live[1:3], 2).tolist() == [0, 0]


@EAGER_ONLY
def test_worst_case_grid_covers_every_batch() -> None:
    for lengths in ([7, 0, 1], [3, 3, 2], [8, 0, 0], [1] * 8, [0, 0, 0]):
        for chunk in (1, 2, 4):
            exact = rank_counts(len(lengths), 8, chunk, tuple(lengths))
            bound = rank_counts(len(lengths), 8, chunk, None)
            assert len(exact) <= len(bound)
            assert all(a <= b for a, b in zip(exact, bound, strict=False))


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    data=st.data(),
    dims=st.sampled_from([Dims(1, 1, 4, 6), Dims(2, 4, 6, 4), Dims(1, 3, 5, 5)]),
    ring=st.sampled_from([None, 1, 2, 5]),
    v_first=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    pool_dtype=st.sampled_from(DTYPES),
    block=st.sampled_from([1, 2000, 8 << 20]),
    chunk=st.sampled_from([4, 32]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_prefill_matches_definition_on_any_batch(
    lengths: list[int], data: st.DataObject, dims: Dims, ring: int | None, v_first: bool, dtype: torch.dtype,
    pool_dtype: torch.dtype, block: int, chunk: int,
) -> None:  # fmt: skip
    rows = len(lengths)
    slots = data.draw(st.permutations(range(rows + 3)))[:rows]
    slots = [-1 if data.draw(st.integers(0, 4)) == 0 else s for s in slots]
    history = data.draw(st.lists(st.integers(-1, 9), min_size=rows, max_size=rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_chunks, "BLOCK_BYTES", block)
        patch.setattr(chunk_eager, "CHUNK", chunk)
        check_prefill(
            lengths, dims=dims, slots=slots, history=history, v_first=v_first, ring=ring, dtype=dtype,
            pool_dtype=pool_dtype, tail=data.draw(st.integers(0, 3)), host=data.draw(st.booleans()),
        )  # fmt: skip


@given(
    rows=st.integers(1, 6),
    data=st.data(),
    dims=st.sampled_from([Dims(1, 1, 4, 6), Dims(2, 4, 6, 4), Dims(1, 3, 5, 5)]),
    form=st.sampled_from(["plain", "ring", "table"]),
    v_first=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    pool_dtype=st.sampled_from(DTYPES),
    block=st.sampled_from([1, 300, 4 << 20]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_update_matches_definition_on_any_batch(
    rows: int, data: st.DataObject, dims: Dims, form: str, v_first: bool, dtype: torch.dtype, pool_dtype: torch.dtype,
    block: int,
) -> None:  # fmt: skip
    width = data.draw(st.integers(1, 4))
    packed = data.draw(st.booleans())
    steps = data.draw(st.integers(1, width))
    lengths = data.draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows)) if packed else None
    history = data.draw(st.lists(st.integers(-1, 9), min_size=rows, max_size=rows))
    ids = data.draw(st.permutations(range(rows * width)))
    ids = [-1 if data.draw(st.integers(0, 6)) == 0 else s for s in ids]
    slots: Any = [ids[i * width : (i + 1) * width] for i in range(rows)] if form == "table" else ids[:rows]
    accepted = data.draw(st.lists(st.integers(0, width + 1), min_size=rows, max_size=rows)) if form == "table" else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_steps, "BLOCK_BYTES", block)
        patch.setattr(delta_steps, "SMALL_BYTES", 0)
        check_update(
            rows, steps, dims=dims, slots=slots, history=history, accepted=accepted, lengths=lengths, v_first=v_first,
            ring=width if form == "ring" else None, dtype=dtype, pool_dtype=pool_dtype, num_slots=rows * width,
        )  # fmt: skip
