"""Kimi Delta Attention against transformers' modules, the fp64 definition, written-out values, and itself taken apart.

An id that starts with P and a number is a problem reported by users of other implementations, put as the smallest input
that shows it.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise, permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlinfer_ext.kernels.common import delta_chunks, delta_steps
from dlinfer_ext.kernels.kda import chunk_eager, reference
from dlinfer_ext.ops import kda, kda_gate, kda_update
from dlinfer_ext.testing import DTYPES, TOLERANCE, HostRead, assert_close, no_host_reads, rms_error
from tests.kernels import delta_checks
from tests.kernels.delta_checks import SMALL, Dims, Inputs, Rule, entry, ints, make_pool, offsets

EAGER_ONLY = pytest.mark.eager_only(reason="about a step inside the PyTorch form")

NAN, INF = float("nan"), float("inf")
FP32 = TOLERANCE["kda", torch.float32]
KDA = Rule("kda", kda, kda_update, reference.kda, reference.kda_update, channels=True)
check_prefill, check_update = partial(delta_checks.check_prefill, KDA), partial(delta_checks.check_update, KDA)
make_inputs = partial(delta_checks.make_inputs, channels=True)

SHAPES = [
    pytest.param(Dims(2, 2, 8, 8), id="HV=H"),
    pytest.param(Dims(2, 4, 8, 12), id="HV=2H-K<V"),
    pytest.param(Dims(1, 3, 12, 8), id="HV=3H-K>V"),
]
ORIENTATIONS = [pytest.param(True, id="VK"), pytest.param(False, id="KV")]
POOLS = [pytest.param(None, id="plain"), pytest.param(3, id="ring3")]
LENGTHS = [0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 130]


def channel_gate(tokens: int, dims: Dims, *values: float) -> Tensor:
    """Return [tokens, HV, K] that takes the values in turn over tokens, heads and channels."""
    heads, keys = dims.HV, dims.K
    at = torch.arange(tokens)[:, None, None] + torch.arange(heads)[:, None] + torch.arange(keys)
    return torch.tensor(values)[at % len(values)]


def drawn_gate(tokens: int, dims: Dims, low: float) -> Tensor:
    return low * torch.rand(tokens, dims.HV, dims.K, generator=torch.Generator().manual_seed(3))


def rare(tokens: int, dims: Dims, value: float, others: float) -> Tensor:
    chosen = torch.rand(tokens, dims.HV, dims.K, generator=torch.Generator().manual_seed(4)) < 0.1
    return torch.where(chosen, value, others)


GATES: dict[str, Tensor] = {
    "saturated -5": channel_gate(130, SMALL, -5.0),
    "P25-mixed 0/-5": channel_gate(130, SMALL, 0.0, -5.0),
    "half the channels -5": torch.where(torch.arange(SMALL.K) < SMALL.K // 2, -5.0, 0.0).expand(130, SMALL.HV, SMALL.K),
    "softplus down to -20": drawn_gate(130, SMALL, -20.0),
    "mixed -0.01/-20": channel_gate(130, SMALL, -20.0, -0.01, -0.02),
    "one -1e4 among small": rare(130, SMALL, -1e4, -0.003),
    "all -1e4": channel_gate(130, SMALL, -1e4),
    "reset by -inf": rare(130, SMALL, -INF, -0.1),
    "no decay": channel_gate(130, SMALL, 0.0),
}
EACH_GATE = pytest.mark.parametrize("gate", GATES.values(), ids=GATES.keys())


# --- the definition ---------------------------------------------------------------------------------------------------


def published(family: str) -> SimpleNamespace:
    """Return transformers' functions and gate of a model family."""
    if family == "glm5_next":
        from transformers.models.glm5_next import modeling_glm5_next as module

        gate = module.Glm5NextTextForgetGate
    else:
        from transformers.models.kimi_linear import modeling_kimi_linear as module

        gate = module.KimiLinearForgetGate
    return SimpleNamespace(
        chunk=module.chunk_kimi_delta_attention, recurrent=module.recurrent_kimi_delta_attention, gate=gate
    )


FAMILIES = pytest.mark.parametrize("family", ["glm5_next", "kimi_linear"])


@FAMILIES
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_definition_is_that_of_transformers(family: str, form: str) -> None:
    x, initial = make_inputs([2, 70], Dims(3, 3, 8, 12)), torch.randn(2, 3, 8, 12)
    want, want_state = getattr(published(family), form)(
        *x, initial_state=initial, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    state = initial.double()
    flat = Inputs(*(y.flatten(0, 1) for y in x))
    o = reference.kda(*flat, state, cu_seqlens=ints(0, 70, 140), use_qk_l2norm=True, state_v_first=False)
    assert_close("o", want.flatten(0, 1), o, FP32)
    assert_close("state", want_state, state, FP32)


@pytest.mark.parametrize(
    ("family", "bound"), [("glm5_next", -5.0), ("glm5_next", None), ("kimi_linear", None)], ids=str
)
def test_gate_is_that_of_transformers(family: str, bound: float | None) -> None:
    heads, keys = 3, 8
    config = SimpleNamespace(hidden_size=16, linear_head_dim=keys, linear_num_heads=heads, linear_lower_bound=bound)
    module = published(family).gate(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape))
        hidden = torch.randn(2, 5, 16)
        want = module(hidden)
        x = module.f_b_proj(module.f_a_proj(hidden)).view(2, 5, heads, keys)
        g = kda_gate(x, module.A_log.flatten(), module.dt_bias, bound)
        definition = reference.kda_gate(x, module.A_log.flatten(), module.dt_bias, bound)
    assert_close("definition", want, definition, 1e-6)
    assert_close("g", g, definition, 1e-6)
    assert bool((g <= 0).all())
    assert bound is None or bool((g >= bound).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("bound", [None, -5.0, -0.5], ids=["softplus", "bound-5", "bound-0.5"])
def test_gate_matches_definition_on_views(bound: float | None, dtype: torch.dtype) -> None:
    wide = (8 * torch.randn(5, 4 * 6 + 3)).to(dtype)
    x, rate, bias = wide[:, 3:].unflatten(1, (4, 6)), torch.randn(4).bfloat16(), torch.randn(4, 6)
    before = wide.clone()
    with no_host_reads():
        g = kda_gate(x, rate, bias, bound)
    assert g.dtype == torch.float32
    assert torch.equal(wide, before)
    assert_close("g", g, reference.kda_gate(x, rate, bias, bound), 1e-6)
    assert torch.equal(g, kda_gate(x, rate, bias.flatten(), bound))


def test_gate_written_out() -> None:
    """The bound scales a sigmoid: at z = 0 it gives half the bound, where a clamped softplus would give -0.69."""
    x, zero = torch.tensor([[[0.0, -17.0, 25.0, 1.0]]]), torch.zeros(1, 4)
    g = kda_gate(x, torch.tensor([math.log(2.0)]), zero, -5.0)
    want = [-2.5, -5 / (1 + math.exp(34)), -5.0, -5 / (1 + math.exp(-2))]
    assert g.flatten().tolist() == pytest.approx(want, rel=1e-6)
    # The rate is inside the sigmoid, and outside the softplus, which does not underflow.
    g = kda_gate(x, torch.tensor([math.log(2.0)]), zero)
    want = [-2 * math.log(2), -2 * 4.1399376e-8, -50.0, -2 * math.log1p(math.e)]
    assert g.flatten().tolist() == pytest.approx(want, rel=1e-6)


def test_recurrence_by_hand() -> None:
    """Two channels with decays 1/2 and 1/4; the value is corrected by what the decayed state already holds."""
    k = torch.tensor([[[1.0, 2.0]], [[1.0, 0.0]]])
    q = torch.tensor([[[1.0, 1.0]], [[0.0, 1.0]]])
    v, beta = torch.tensor([[[8.0]], [[5.0]]]), torch.tensor([[1.0], [0.5]])
    g = torch.tensor([0.5, 0.25]).log().expand(2, 1, 2)
    for run in ("prefill", "update"):
        pool = torch.full((1, 1, 1, 2), NAN)
        if run == "prefill":
            o = kda(q, k, v, g, beta, pool, cu_seqlens=ints(0, 2), history_lens=ints(0), scale=1.0)
        else:
            o = kda_update(q[None], k[None], v[None], g[None], beta[None], pool, history_lens=ints(0), scale=1.0)
        # S = [8, 16], o = 24; then [4, 4], u = 0.5 (5 - 4), S = [4.5, 4], o = 4.
        assert o.flatten().tolist() == pytest.approx([24.0, 4.0], rel=1e-6)
        assert pool.flatten().tolist() == pytest.approx([4.5, 4.0], rel=1e-6)


# --- prefill ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ring", POOLS)
@pytest.mark.parametrize("v_first", ORIENTATIONS)
@pytest.mark.parametrize("length", LENGTHS, ids=lambda n: f"T{n}")
def test_prefill_one_row_matches_definition(length: int, v_first: bool, ring: int | None) -> None:
    check_prefill([length], slots=[2], history=[4], v_first=v_first, ring=ring)


@pytest.mark.parametrize("dims", SHAPES)
@pytest.mark.parametrize("v_first", ORIENTATIONS)
@pytest.mark.parametrize("ring", POOLS)
@pytest.mark.parametrize(
    "lengths", [[0, 5, 33], [33, 0, 5], [0, 0, 0, 7], [70, 1, 40, 2, 0, 0]], ids=lambda n: "-".join(map(str, n))
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


def test_prefill_scale_no_norm_and_no_slots() -> None:
    check_prefill([20, 3], history=[0, 2], scale=0.25)
    check_prefill([20, 3], history=[0, 2], use_qk_l2norm=False, limit=1e-4)
    check_prefill([5, 0, 3])


@EACH_GATE
def test_prefill_holds_fp32_accuracy_under_any_gate(gate: Tensor) -> None:
    check_prefill([130], history=[9], gate=gate)
    check_prefill([64, 66], history=[0, 3], gate=gate)


@EACH_GATE
def test_update_holds_fp32_accuracy_under_any_gate(gate: Tensor) -> None:
    part = gate[10:40].unflatten(0, (5, 6))
    check_update(5, 6, slots=[3, 1, 0, 2, 4], history=[1, 0, 2, 3, 4], gate=part)


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
def test_rows_without_a_state_change_no_bit(ring: int | None, pool_dtype: torch.dtype, dirty: float) -> None:
    common: dict[str, Any] = {"ring": ring, "dirty": dirty, "pool_dtype": pool_dtype}
    assert not check_prefill([4, 0, 2], slots=[-1, 0, -5], history=[3, 0, 0], **common).any()
    assert not check_update(3, 2, slots=[-1, -3, -1], history=[3, 0, 0], **common).any()


@pytest.mark.parametrize("dirty", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("ring", POOLS)
def test_fresh_row_ignores_what_a_slot_holds(ring: int | None, dirty: float) -> None:
    check_prefill([5, 40], slots=[2, 0], history=[0, 0], ring=ring, dirty=dirty)
    check_update(3, 3, slots=[2, 0, -1], history=[0, 0, 0], ring=ring, dirty=dirty)


def test_empty_batches() -> None:
    pool, storage = make_pool(2)
    before = storage.clone()
    for tokens, rows in ((0, 0), (0, 2), (3, 0), (3, 2)):
        o = kda(*make_inputs([tokens]), pool, cu_seqlens=torch.zeros(rows + 1, dtype=torch.int64))
        assert o.shape == (tokens, SMALL.HV, SMALL.V)
        assert not o.any()
    for lead in ([0, 2], [2, 0]):
        assert kda_update(*make_inputs(lead), pool).shape == (*lead, SMALL.HV, SMALL.V)
    assert torch.equal(storage, before)


@pytest.mark.parametrize("bad", [NAN, INF], ids=str)
@pytest.mark.parametrize("name", Inputs._fields)
def test_a_bad_row_harms_no_other(name: str, bad: float) -> None:
    """P3: NaN of one request spread to the others."""
    lengths, past = [33, 5, 40], ints(2, 2, 2)
    x = make_inputs([78])
    pool, _ = make_pool(3)
    clean = pool.clone()
    want = kda(*x, clean, cu_seqlens=offsets(lengths), history_lens=past, host_lengths=lengths)
    if name == "g":
        x = x._replace(g=x.g.clone())
    getattr(x, name)[33:38] = bad
    o = kda(*x, pool, cu_seqlens=offsets(lengths), history_lens=past, host_lengths=lengths)
    for part, row in ((slice(0, 33), 0), (slice(38, 78), 2)):
        assert_close("o", o[part], want[part], FP32)
        assert_close("state", pool[row], clean[row], FP32)


@pytest.mark.parametrize("bad", [NAN, INF], ids=str)
@pytest.mark.parametrize("name", Inputs._fields)
def test_a_bad_decode_row_harms_no_other(name: str, bad: float) -> None:
    x, slots = make_inputs([4, 2]), ints(2, 0, -1, 1)
    pool, _ = make_pool(3)
    clean = pool.clone()
    want = kda_update(*x, clean, state_indices=slots)
    for bad_row in (1, 2):
        dirty, y = pool.clone(), Inputs(*(z.clone() for z in x))
        getattr(y, name)[bad_row] = bad
        o = kda_update(*y, dirty, state_indices=slots)
        for row, slot in ((0, 2), (3, 1)):
            assert torch.equal(o[row], want[row])
            assert torch.equal(dirty[slot], clean[slot])


def run_parts(x: Inputs, pool: Tensor, cuts: list[int]) -> Tensor:
    """Run one row in slot 0 from nothing, in parts that end at `cuts`."""
    return torch.cat([
        kda(*x.rows(slice(lo, hi)), pool, cu_seqlens=ints(0, hi - lo), history_lens=ints(lo), host_lengths=[hi - lo])
        for lo, hi in pairwise([0, *cuts])
    ])  # fmt: skip


@pytest.mark.parametrize("ring", POOLS)
@pytest.mark.parametrize("gate", ["random", "softplus down to -20", "P25-mixed 0/-5"])
def test_prefill_at_every_split_equals_one_shot(ring: int | None, gate: str) -> None:
    """P23: the state that is returned is compared as well as the output."""
    total = 130
    x = make_inputs([total], gate=GATES.get(gate))
    first, _ = make_pool(1, ring=ring)
    one, e = first.clone(), entry(0, total, ring)
    want = run_parts(x, one, [total])
    exact = torch.zeros(1, SMALL.HV, SMALL.V, SMALL.K).double()
    assert_close("one shot", want, reference.kda(*x, exact, cu_seqlens=ints(0, total)), 1e-4)
    for cuts in ([1], [2], [3], [15], [16], [17], [63], [64], [65], [129], [2, 3, 6], [33, 34, 98]):
        parts = first.clone()
        assert_close(f"o split at {cuts}", run_parts(x, parts, [*cuts, total]), want, FP32)
        assert_close(f"state split at {cuts}", parts[e], one[e], FP32)


@pytest.mark.parametrize("gate", ["random", *GATES])
def test_a_prefix_does_not_depend_on_later_tokens(gate: str) -> None:
    """P26: a reference inside a tile, at its middle row, makes roundings depend on the tokens that follow."""
    total = 130
    x = make_inputs([total], gate=GATES.get(gate))
    want = run_parts(x, make_pool(1)[0], [total])
    for keep in (1, 2, 7, 8, 15, 16, 17, 31, 32, 50, 129):
        y = Inputs(*(z.clone() for z in x))
        other = make_inputs([total], seed=7)
        for name in Inputs._fields:
            getattr(y, name)[keep:] = getattr(other, name)[keep:]
        o = run_parts(y, make_pool(1)[0], [total])
        assert torch.equal(o[:keep], want[:keep]), f"{keep} tokens"
        assert not torch.equal(o[keep:], want[keep:])


def test_batch_equals_separate_and_permuted() -> None:
    lengths, slots, past = [33, 0, 1, 64, 7], [4, 0, 2, 1, 3], [0, 2, 5, 1, 0]
    starts = offsets(lengths).tolist()
    x = make_inputs([starts[-1]])
    pool, _ = make_pool(5)
    batch = pool.clone()
    o = kda(*x, batch, cu_seqlens=offsets(lengths), state_indices=torch.tensor(slots), history_lens=torch.tensor(past))
    separate = pool.clone()
    for (lo, hi), slot, h in zip(pairwise(starts), slots, past, strict=True):
        alone: dict[str, Any] = {"state_indices": ints(slot), "history_lens": ints(h)}
        part = kda(*x.rows(slice(lo, hi)), separate, cu_seqlens=ints(0, hi - lo), **alone)
        assert_close("o", part, o[lo:hi], FP32)
    assert_close("states", separate, batch, FP32)
    order = [3, 1, 4, 0, 2]
    tokens = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in order])
    permuted = pool.clone()
    po = kda(
        *x.rows(tokens),
        permuted,
        cu_seqlens=offsets([lengths[i] for i in order]),
        state_indices=torch.tensor([slots[i] for i in order]),
        history_lens=torch.tensor([past[i] for i in order]),
    )
    assert_close("o permuted", po, o[tokens], FP32)
    assert_close("states permuted", permuted, batch, FP32)


# --- decode and verify ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", SHAPES)
@pytest.mark.parametrize("v_first", ORIENTATIONS)
@pytest.mark.parametrize("ring", [None, 1, 4], ids=["plain", "ring1", "ring4"])
@pytest.mark.parametrize("steps", [1, 2, 4], ids=lambda n: f"Q{n}")
def test_update_matches_definition(steps: int, ring: int | None, v_first: bool, dims: Dims) -> None:
    steps = min(steps, ring or steps)
    check_update(5, steps, dims=dims, slots=[6, 0, -1, 3, 1], history=[9, 0, 4, 1, 2], v_first=v_first, ring=ring)


@pytest.mark.parametrize("pool_dtype", DTYPES, ids=lambda d: f"pool-{str(d)[6:]}")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("ring", POOLS)
def test_update_rounds_once(dtype: torch.dtype, pool_dtype: torch.dtype, ring: int | None) -> None:
    check_update(3, 3, slots=[2, 0, 3], history=[5, 0, 1], dtype=dtype, pool_dtype=pool_dtype, ring=ring)


def test_update_without_indices_or_history() -> None:
    check_update(3, 2)
    check_update(1, 4, dims=Dims(1, 3, 12, 8), slots=[2])


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("pad_slot_id", [-1, 2, 999], ids=lambda n: f"pad{n}")
@pytest.mark.parametrize("ring", POOLS)
def test_update_pad_rows_touch_nothing(at: int, pad_slot_id: int, ring: int | None) -> None:
    slots = [0, 1, 3, 4]
    slots[at] = pad_slot_id
    o = check_update(4, 2, slots=slots, history=[3, 0, 5, 1], ring=ring, pad_slot_id=pad_slot_id)
    assert not o[at].any()


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
    check_update(6, 2, slots=[-1, -1, 3, -1, 0, 1], history=[1, 2, 3, 4, 0, 5], v_first=v_first, ring=ring)


@pytest.mark.parametrize("dims", SHAPES)
@pytest.mark.parametrize("v_first", ORIENTATIONS)
def test_table_matches_definition(dims: Dims, v_first: bool) -> None:
    table = [[1, 5, 7], [0, 2, 3], [4, -1, -1], [-1, -1, -1], [9, 8, 6]]
    check_update(5, 3, dims=dims, slots=table, accepted=[3, 1, 1, 2, 2], v_first=v_first, num_slots=11)
    check_update(2, 1, dims=dims, slots=[[1, 5, 7], [0, -1, -1]], accepted=[3, 1], v_first=v_first, num_slots=9)


@pytest.mark.parametrize("accepted", [0, -4, 4, 99])
def test_accepted_count_outside_the_table_stays_in_the_row(accepted: int) -> None:
    check_update(2, 2, slots=[[1, 5, 7], [0, 2, 3]], accepted=[accepted, 2], num_slots=9)


@pytest.mark.parametrize("form", ["plain", "ring", "table"])
@pytest.mark.parametrize("v_first", ORIENTATIONS)
@pytest.mark.parametrize("lengths", [[2, 4, 3], [0, 4, 1, 0], [1, 1, 1, 1], [0, 0]], ids=str)
def test_packed_rows_match_definition(lengths: list[int], v_first: bool, form: str) -> None:
    rows = len(lengths)
    common: dict[str, Any] = {"lengths": lengths, "v_first": v_first}
    if form == "table":
        table = torch.randperm(rows * 4 + 1, generator=torch.Generator().manual_seed(2))[: rows * 4].view(rows, 4)
        accepted = [i % 4 + 1 for i in range(rows)]
        check_update(rows, 0, slots=table.tolist(), accepted=accepted, num_slots=rows * 4 + 1, **common)
        return
    slots, ring = [-1, *range(rows - 1, 0, -1)], 4 if form == "ring" else None
    check_update(rows, 0, slots=slots, history=[5, 0, 7, 2][:rows], ring=ring, num_slots=16, **common)


@pytest.mark.parametrize("lengths", [[9, 0, 1, 3], [1] * 20, [40, 1, 1], [11, 5]], ids=str)
def test_packed_plain_rows_of_unbounded_length(lengths: list[int]) -> None:
    check_update(len(lengths), 0, slots=list(range(len(lengths))), history=[2] * len(lengths), lengths=lengths)


@pytest.mark.parametrize("v_first", ORIENTATIONS)
@pytest.mark.parametrize("ring", POOLS)
def test_update_equals_prefill_of_the_same_tokens(ring: int | None, v_first: bool) -> None:
    """P2: chunk and decode wrote the state in different orientations; K ≠ V, and both read what the other wrote."""
    rows, steps = 4, 3
    x = make_inputs([rows, steps])
    pool, _ = make_pool(6, ring=ring, v_first=v_first)
    other = pool.clone()
    common: dict[str, Any] = {
        "state_indices": ints(5, 0, 2, 3), "history_lens": ints(4, 0, 7, 1), "state_v_first": v_first,
    }  # fmt: skip
    o = kda_update(*x, pool, **common)
    flat = Inputs(*(y.flatten(0, 1) for y in x))
    po = kda(*flat, other, cu_seqlens=torch.arange(rows + 1) * steps, host_lengths=[steps] * rows, **common)
    assert_close("o", po.view_as(o), o, FP32)
    for row in range(rows):
        e = entry(int(common["state_indices"][row]), int(common["history_lens"][row]) + steps, ring)
        assert_close("state", other[e], pool[e], FP32)


def drafts_after(x: Inputs, prompt: int, accepted: int, count: int, seed: int) -> Inputs:
    """Return [1, count, ..] with the true tokens up to `accepted` and wrong ones after."""
    wrong = make_inputs([1, count], seed=seed)
    return Inputs(*(
        torch.cat([getattr(x, n)[None, prompt : prompt + accepted], getattr(wrong, n)[:, accepted:]], 1)
        for n in Inputs._fields
    ))  # fmt: skip


@pytest.mark.parametrize("form", ["ring", "table"])
@pytest.mark.parametrize("drafts", [1, 2, 3, 7], ids=lambda n: f"P1-drafts{n}")
def test_verify_goes_on_from_any_accepted_token_in_any_order(drafts: int, form: str) -> None:
    """One request for each accepted count, and the requests change places in the batch between the steps."""
    rows, prompt = 1 + drafts, 10
    xs = [make_inputs([prompt + 2 * rows], seed=i) for i in range(rows)]
    wants = [reference.kda(*x, torch.zeros(1, 4, 12, 8).double(), cu_seqlens=ints(0, len(x.q))) for x in xs]
    ids = torch.randperm(rows * rows, generator=torch.Generator().manual_seed(5)).view(rows, rows)
    pool, _ = make_pool(rows if form == "ring" else rows * rows, ring=rows if form == "ring" else None)
    pool.fill_(NAN)
    lengths = [prompt] * rows
    first = Inputs(*(torch.cat([getattr(x, n)[:prompt] for x in xs]) for n in Inputs._fields))
    slots = torch.arange(rows) if form == "ring" else ids[:, 0]
    kda(*first, pool, cu_seqlens=offsets(lengths), state_indices=slots, history_lens=torch.zeros(rows).long())

    step = [drafts_after(x, prompt, i + 1, rows, 50 + i) for i, x in enumerate(xs)]
    batch = Inputs(*(torch.cat(parts) for parts in zip(*step, strict=True)))
    past = torch.full((rows,), prompt)
    if form == "ring":
        o = kda_update(*batch, pool, state_indices=torch.arange(rows), history_lens=past)
    else:
        o = kda_update(*batch, pool, state_indices=ids, num_accepted_tokens=torch.ones(rows).long())
    order = torch.arange(rows).flip(0)
    rest = [Inputs(*(y[None, prompt + i + 1 : prompt + i + 1 + rows] for y in xs[i])) for i in order.tolist()]
    batch = Inputs(*(torch.cat(parts) for parts in zip(*rest, strict=True)))
    if form == "ring":
        p = kda_update(*batch, pool, state_indices=order, history_lens=prompt + order + 1)
    else:
        p = kda_update(*batch, pool, state_indices=ids[order], num_accepted_tokens=order + 1)
    for place, i in enumerate(order.tolist()):
        assert_close(f"verified, accepted {i + 1}", o[i, : i + 1], wants[i][prompt : prompt + i + 1], FP32)
        want = wants[i][prompt + i + 1 : prompt + i + 1 + rows]
        assert_close(f"after {i + 1} accepted", p[place], want, FP32)


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_rows_may_stand_in_any_order(order: tuple[int, ...]) -> None:
    x, slots, past = make_inputs([3, 2]), ints(4, 0, 2), ints(3, 0, 5)
    pool, _ = make_pool(5, ring=2)
    other, rows = pool.clone(), torch.tensor(order)
    o = kda_update(*x, pool, state_indices=slots, history_lens=past)
    p = kda_update(*x.rows(rows), other, state_indices=slots[rows], history_lens=past[rows])
    assert_close("o", p, o[rows], FP32)
    assert_close("pool", other, pool, FP32)


# --- what else a caller relies on -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[5, 0, 33], [0, 0], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("ring", POOLS)
def test_prefill_with_host_lengths_reads_nothing(lengths: list[int], ring: int | None) -> None:
    x, (pool, _) = make_inputs([sum(lengths)]), make_pool(4, ring=ring)
    rows = len(lengths)
    common: dict[str, Any] = {"state_indices": ints(2, 0, -1)[:rows], "history_lens": ints(3, 0, 1)[:rows]}
    with no_host_reads():
        kda(*x, pool, cu_seqlens=offsets(lengths), **common, host_lengths=lengths)


@EAGER_ONLY
def test_prefill_without_host_lengths_reads_them() -> None:
    with pytest.raises(HostRead), no_host_reads():
        kda(*make_inputs([4]), make_pool(4)[0], cu_seqlens=ints(0, 3, 4), history_lens=ints(3, 0))


PEERS: dict[str, dict[str, Any]] = {
    "P3-long-prompt-among-pads": {"lengths": [700, 3, 1], "slots": [1, -1, 0], "history": [0, 2, 0], "dirty": NAN},
    "P7-state-at-a-chunk-border": {"lengths": [32, 64, 31], "history": [32, 0, 1]},
    "P23-K-differs-from-V": {"lengths": [64, 1], "dims": Dims(2, 2, 16, 24), "history": [0, 3]},
    "P25-mixed-gates": {"lengths": [130], "gate": GATES["P25-mixed 0/-5"]},
    "P27-K60-is-no-power-of-two": {"lengths": [70, 2], "dims": Dims(1, 2, 60, 20), "history": [5, 0]},
    "P31-warm-up-then-use": {"lengths": [1, 64, 65], "history": [0, 0, 0], "dirty": NAN, "dims": Dims(1, 1, 32, 32)},
}


@pytest.mark.parametrize("case", PEERS.values(), ids=PEERS.keys())
@pytest.mark.parametrize("v_first", ORIENTATIONS)
def test_prefill_problems_of_peers(case: dict[str, Any], v_first: bool) -> None:
    check_prefill(**case, v_first=v_first)


@pytest.mark.parametrize("v_first", ORIENTATIONS)
@pytest.mark.parametrize("case", ["P1-verify-of-two", "P27-K60", "int32-history-near-its-end"])
def test_update_problems_of_peers(case: str, v_first: bool) -> None:
    given: dict[str, Any] = {
        "P1-verify-of-two": {"steps": 2, "history": [4, 0], "ring": 2},
        "P27-K60": {"steps": 2, "dims": Dims(1, 2, 60, 20)},
        "int32-history-near-its-end": {"steps": 3, "history": [2**31 - 2, 2**31 - 1], "ring": 7},
    }[case]
    check_update(2, **given, v_first=v_first)


@pytest.mark.parametrize("v_first", ORIENTATIONS)
@pytest.mark.parametrize("form", ["prefill", "update"])
def test_what_lies_behind_the_keys_is_not_read(form: str, v_first: bool) -> None:
    """P27: K = 60 in lanes of 64, with NaN behind each head's keys and values."""
    dims, rows = Dims(1, 2, 60, 20), 3

    def among_nan(y: Tensor) -> Tensor:
        wide = torch.full((*y.shape[:-1], 64), NAN)
        wide[..., : y.shape[-1]] = y
        return wide[..., : y.shape[-1]]

    x = make_inputs([rows], dims)
    x = Inputs(among_nan(x.q), among_nan(x.k), among_nan(x.v), among_nan(x.g), x.beta)
    pool, _ = make_pool(rows, dims, v_first=v_first)
    pool = among_nan(pool)
    want_pool, cu = pool.double(), torch.arange(rows + 1)
    want = reference.kda(*x, want_pool, cu_seqlens=cu, state_v_first=v_first)
    if form == "prefill":
        o = kda(*x, pool, cu_seqlens=cu, state_v_first=v_first)
    else:
        o = kda_update(*Inputs(*(y[:, None] for y in x)), pool, state_v_first=v_first)[:, 0]
    assert_close("o", o, want, FP32)
    assert_close("pool", pool, want_pool, FP32)


def test_padding_of_a_bucket_is_neutral() -> None:
    """5 tokens padded to 8, by k = beta = g = 0 or through cu_seqlens, leave the state of 5 tokens."""
    x = make_inputs([8])
    want, by_offsets, by_zeros = (torch.zeros(1, SMALL.HV, SMALL.V, SMALL.K) for _ in range(3))
    kda(*x.rows(slice(0, 5)), want, cu_seqlens=ints(0, 5))
    assert not kda(*x, by_offsets, cu_seqlens=ints(0, 5))[5:].any()
    y = Inputs(*(z.clone() for z in x))
    for z in (y.k, y.g, y.beta):
        z[5:] = 0
    kda(*y, by_zeros, cu_seqlens=ints(0, 8))
    assert torch.equal(by_offsets, want)
    assert_close("state", by_zeros, want, FP32)


def test_l2_epsilon_is_inside_the_root() -> None:
    one, zero = torch.ones(1, 1, 1), torch.zeros(1, 1, 1)
    q, beta = one * 3e-7, torch.ones(1, 1)
    expected = 3e-7 / math.sqrt(9e-14 + 1e-6) / math.sqrt(1 + 1e-6)
    o = kda(q, one, one, zero, beta, torch.zeros(1, 1, 1, 1), cu_seqlens=ints(0, 1), use_qk_l2norm=True)
    assert o.item() == pytest.approx(expected, rel=1e-5)
    pool = torch.zeros(1, 1, 1, 1)
    o = kda_update(q[None], one[None], one[None], zero[None], beta[None], pool, use_qk_l2norm=True)
    assert o.item() == pytest.approx(expected, rel=1e-5)


def test_pool_of_any_strides() -> None:
    dims = Dims(1, 2, 8, 12)
    x = make_inputs([3, 1], dims)
    flat = Inputs(*(y[:, 0] for y in x))
    cu = torch.arange(4)
    for pool in (
        torch.randn(2, 4, 12, 8).permute(1, 0, 2, 3),
        torch.randn(4, 3, 2, 12, 8)[:, 1],
        torch.randn(4, 2, 8, 12).transpose(-1, -2),
    ):
        want, other = pool.double(), torch.empty_like(pool).copy_(pool)
        ref = reference.kda(*flat, want, cu_seqlens=cu)
        assert_close("prefill", kda(*flat, other, cu_seqlens=cu), ref, FP32)
        assert_close("update", kda_update(*x, pool)[:, 0], ref, FP32)
        assert_close("pool of prefill", other, want, FP32)
        assert_close("pool of update", pool, want, FP32)


def test_work_is_proportional_to_the_rows_addressed() -> None:
    from dlinfer_ext.cli.bench_cases import peak_bytes

    pool, x = torch.zeros(4096, 4, 16, 16), make_inputs([2, 1], Dims(2, 4, 16, 16))
    common: dict[str, Any] = {"state_indices": ints(5, 9), "history_lens": ints(0, 3)}
    flat = Inputs(*(y[:, 0] for y in x))
    assert peak_bytes(lambda: kda_update(*x, pool, **common)) < pool.nbytes / 100
    assert peak_bytes(lambda: kda(*flat, pool, cu_seqlens=ints(0, 1, 2), **common)) < pool.nbytes / 100


# --- negative controls ------------------------------------------------------------------------------------------------


def chunk_with_a_reference(x: Inputs, tile: int, row: int, chunk: int = 64) -> tuple[Tensor, Tensor]:
    """The usual chunked form in fp32 of one row of [T, HV, ..] with H = HV, from a zero state [HV, K, V].

    Decays are differences of running sums, split at row `row` of each tile of `tile` rows.
    """
    q, k, v, g, beta = (y.float().movedim(1, 0) for y in x)
    q = q * q.shape[-1] ** -0.5
    state, out = q.new_zeros(q.shape[0], q.shape[-1], v.shape[-1]), []
    for lo in range(0, q.shape[1], chunk):
        qc, kc, vc, bc = (y[:, lo : lo + chunk] for y in (q, k, v, beta[..., None]))
        c = g[:, lo : lo + chunk].cumsum(1)
        size = c.shape[1]
        products = [c.new_zeros(c.shape[0], size, size) for _ in range(2)]
        for i in range(0, size, tile):
            r, rows = c[:, min(i + row, size - 1), None], slice(i, i + tile)
            keys = (kc[:, : i + tile] * (r - c[:, : i + tile]).exp()).transpose(1, 2)
            for p, left in zip(products, (qc, kc * bc), strict=True):
                p[:, rows, : i + tile] = (left[:, rows] * (c[:, rows] - r).exp()) @ keys
        inverse = torch.linalg.inv(torch.eye(size) + products[1].tril(-1))
        u = inverse @ (bc * (vc - (kc * c.exp()) @ state))
        out.append((qc * c.exp()) @ state + products[0].tril() @ u)
        state = c[:, -1, :, None].exp() * state + (kc * (c[:, -1:] - c).exp()).transpose(1, 2) @ u
    return torch.cat(out, 1).movedim(0, 1), state


WIDE = Dims(2, 2, 32, 32)


def error_of(o: Tensor, x: Inputs) -> float:
    want = reference.kda(*x, torch.zeros(1, WIDE.HV, WIDE.V, WIDE.K).double(), cu_seqlens=ints(0, len(x.q)))
    return rms_error(o, want) if torch.isfinite(o).all() else INF


def normalised(gate: Tensor) -> Inputs:
    x = make_inputs([130], WIDE, gate=gate)
    return x._replace(q=torch.nn.functional.normalize(x.q, dim=-1), k=torch.nn.functional.normalize(x.k, dim=-1))


@pytest.mark.parametrize(
    ("tile", "row", "gate", "holds"),
    [
        (16, 0, channel_gate(130, WIDE, -1.0, -0.3), True),
        (64, 0, channel_gate(130, WIDE, -5.0), False),
        (16, 0, channel_gate(130, WIDE, 0.0, -5.0), True),
        (16, 0, drawn_gate(130, WIDE, -20.0), False),
    ],
    ids=["first row", "no tiles, -5", "first row, 0/-5", "first row, -20"],
)
def test_control_a_split_by_tiles_fails_where_it_is_known_to(tile: int, row: int, gate: Tensor, holds: bool) -> None:
    """The gates of these tests do tell forms apart: ours holds on all of them."""
    x = normalised(gate)
    assert (error_of(chunk_with_a_reference(x, tile, row)[0], x) <= FP32) == holds
    assert error_of(run_parts(x, torch.zeros(1, WIDE.HV, WIDE.V, WIDE.K), [130]), x) <= FP32


def test_control_a_reference_at_the_middle_row_sees_later_tokens() -> None:
    x = normalised(drawn_gate(130, WIDE, -1.0))
    y = x._replace(g=torch.cat([x.g[:20], 0.5 * x.g[20:]]))
    for row, causal in ((0, True), (8, False)):
        ours, other = (chunk_with_a_reference(z, 16, row)[0] for z in (x, y))
        assert torch.equal(ours[:20], other[:20]) == causal


def test_control_a_reset_by_a_gate_is_no_reset() -> None:
    """On NaN it does nothing; on numbers it costs the usual form its precision, by the ulp of 1e6."""
    x = normalised(drawn_gate(130, WIDE, -1.0))
    reset = x._replace(g=torch.cat([torch.full_like(x.g[:1], -1e6), x.g[1:]]))
    assert error_of(chunk_with_a_reference(x, 16, 0)[0], x) <= FP32
    assert error_of(chunk_with_a_reference(reset, 16, 0)[0], x) > 100 * FP32
    pool = torch.full((1, WIDE.HV, WIDE.V, WIDE.K), NAN)
    assert not torch.isfinite(kda(*reset, pool.clone(), cu_seqlens=ints(0, 130))).any()
    assert error_of(kda(*x, pool, cu_seqlens=ints(0, 130), history_lens=ints(0)), x) <= FP32


# --- any batch --------------------------------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.one_of(st.integers(0, 9), st.integers(10, 70)), min_size=1, max_size=6),
    data=st.data(),
    dims=st.sampled_from([Dims(1, 1, 4, 6), Dims(2, 4, 6, 4), Dims(1, 3, 5, 5)]),
    ring=st.sampled_from([None, 1, 2, 5]),
    v_first=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    pool_dtype=st.sampled_from(DTYPES),
    block=st.sampled_from([1, 2000, 8 << 20]),
    chunk=st.sampled_from([4, 16, 32, 64]),
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
