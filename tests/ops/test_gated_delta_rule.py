"""The gated delta rule's interface: what it refuses and checks on demand, and the names that dlinfer users import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dlinfer_ext.kernels.gated_delta_rule import reference
from dlinfer_ext.ops import gated_delta_rule, gated_delta_rule_update
from dlinfer_ext.testing import TOLERANCE, assert_close, no_host_reads
from dlinfer_ext.vendor.ascend import triton_ops

FP32 = TOLERANCE["delta_rule", torch.float32]
H, HV, K, V = 2, 4, 8, 12


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def inputs(*lead: int, dtype: torch.dtype = torch.float32) -> Inputs:
    q, k, v = torch.randn(*lead, H, K), torch.randn(*lead, H, K), torch.randn(*lead, HV, V)
    return Inputs(q.to(dtype), k.to(dtype), v.to(dtype), -torch.rand(*lead, HV), torch.rand(*lead, HV))


def ints(*values: int) -> Tensor:
    return torch.tensor(values)


def packed(x: Inputs) -> Inputs:
    return Inputs(*(y.flatten(0, 1) for y in x))


@pytest.mark.parametrize("form", ["rule", "rule-ring", "update", "update-ring", "update-table", "update-packed"])
def test_opcheck(form: str) -> None:
    ring = form.endswith("ring")
    state = torch.randn(4, 3, HV, V, K) if ring else torch.randn(4, HV, V, K)
    slots, past = ints(2, 0), ints(0, 5)
    tail = (K**-0.5, True, True, -1)
    if form.startswith("rule"):
        args: tuple[Any, ...] = (*inputs(5), state, ints(0, 2, 5), slots, past, *tail, [2, 3])
        torch.library.opcheck(torch.ops.dlinfer_ext.gated_delta_rule.default, args)
        return
    accepted = cu = None
    x = inputs(2, 2)
    if form == "update-table":
        slots, accepted = ints(2, 0, 1, 3).view(2, 2), ints(2, 1)
    if form == "update-packed":
        x, cu = inputs(4), ints(0, 1, 4)
    args = (*x, state, slots, past, accepted, cu, *tail)
    torch.library.opcheck(torch.ops.dlinfer_ext.gated_delta_rule_update.default, args)


def test_opcheck_gate() -> None:
    args = (torch.randn(3, HV), torch.randn(3, HV), -torch.rand(HV), torch.randn(HV), 1.0, 20.0)
    torch.library.opcheck(torch.ops.dlinfer_ext.gated_delta_gate.default, args)


Run = Callable[[], object]
REFUSED: dict[str, tuple[Run, str]] = {
    "R38-more-tokens-than-ring-entries": (
        lambda: gated_delta_rule_update(*inputs(1, 4), torch.zeros(2, 3, HV, V, K), history_lens=ints(1)),
        r"gated_delta_rule_update: argument 'q' is of 4 tokens per row; wanted at most 3",
    ),
    "B52-more-tokens-than-columns": (
        lambda: gated_delta_rule_update(*inputs(1, 3), torch.zeros(9, HV, V, K), state_indices=ints(0, 1)[None]),
        r"'q' is of 3 tokens per row; wanted at most 2",
    ),
    "ring-without-history": (
        lambda: gated_delta_rule_update(*inputs(1, 1), torch.zeros(2, 3, HV, V, K)),
        r"'history_lens' is None",
    ),
    "table-on-a-ring": (
        lambda: gated_delta_rule_update(
            *inputs(1, 1), torch.zeros(2, 3, HV, V, K), state_indices=ints(0, 1)[None], history_lens=ints(1)
        ),
        r"'state_indices' is of shape \[1, 2\]; wanted \[N\] for a ring pool",
    ),
    "accepted-without-a-table": (
        lambda: gated_delta_rule_update(*inputs(1, 1), torch.zeros(2, HV, V, K), num_accepted_tokens=ints(1)),
        r"'num_accepted_tokens'",
    ),
    "wrong-orientation": (
        lambda: gated_delta_rule_update(*inputs(1, 1), torch.zeros(2, HV, K, V)),
        r"'state' is of shape \[2, 4, 8, 12\]; wanted \[S, 4, 12, 8\]",
    ),
    "fewer-slots-than-rows": (
        lambda: gated_delta_rule(*inputs(4), torch.zeros(1, HV, V, K), cu_seqlens=ints(0, 1, 4)),
        r"'state' is of 1 slots; wanted at least 2",
    ),
    "host-lengths-beyond-the-tokens": (
        lambda: gated_delta_rule(*inputs(4), torch.zeros(2, HV, V, K), cu_seqlens=ints(0, 1, 5), host_lengths=[1, 4]),
        r"'host_lengths' is \[1, 4\]",
    ),
    "requires-grad": (
        lambda: gated_delta_rule_update(*inputs(1, 1), torch.zeros(2, HV, V, K, requires_grad=True)),
        r"'state' has requires_grad=True",
    ),
    "HV-not-a-multiple-of-H": (
        lambda: gated_delta_rule_update(
            inputs(1, 1).q, inputs(1, 1).k, torch.zeros(1, 1, 3, V), torch.zeros(1, 1, 3), torch.zeros(1, 1, 3),
            torch.zeros(2, 3, V, K),
        ),
        r"'v' is of shape",
    ),
    "R43-ring-pool-without-history": (
        lambda: triton_ops.fused_sigmoid_gating_delta_rule_update(
            torch.zeros(HV), torch.zeros(1, 1, HV), torch.zeros(HV), 1.0, 20.0, *inputs(1, 1)[:3],
            torch.zeros(1, 1, HV), torch.zeros(3, 3, HV, K, V), ints(2),
        ),
        r"fused_sigmoid_gating_delta_rule_update: argument 'initial_state_source'",
    ),
    "two-forms-at-once": (
        lambda: triton_ops.fused_recurrent_gated_delta_rule(
            *inputs(1, 1), initial_state=torch.zeros(3, HV, V, K), ssm_state_indices=ints(0), state_ids_rb=ints(0),
            cache_seqlens_rb=ints(0),
        ),
        r"'ssm_state_indices' is given with state_ids_rb",
    ),
    "ring-that-does-not-divide-the-pool": (
        lambda: triton_ops.fused_recurrent_gated_delta_rule(
            *inputs(1, 1), initial_state=torch.zeros(4, HV, V, K), state_ids_rb=ints(0), cache_seqlens_rb=ints(0),
            num_state=3,
        ),
        r"'num_state' is 3",
    ),
    "not-in-place-with-a-state-per-token": (
        lambda: triton_ops.fused_recurrent_gated_delta_rule(
            *inputs(1, 1), initial_state=torch.zeros(4, HV, V, K), ssm_state_indices=ints(0, 1)[None],
            inplace_final_state=False,
        ),
        r"'inplace_final_state' is False",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("run", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_by_name(run: Run, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run()


def step(**kwargs: Any) -> Run:
    rows = 2
    return lambda: gated_delta_rule_update(*inputs(rows, 1), torch.zeros(4, HV, V, K), **kwargs)


def prompt(**kwargs: Any) -> Run:
    kwargs = {"cu_seqlens": ints(0, 2, 5), **kwargs}
    return lambda: gated_delta_rule(*inputs(5), torch.zeros(4, HV, V, K), **kwargs)


CHECKED: dict[str, tuple[Run, str]] = {
    "slot-beyond-the-pool": (step(state_indices=ints(1, 4)), r"'state_indices' is 4 at row 1; wanted below 4"),
    "shared-slot": (step(state_indices=ints(3, 3)), r"'state_indices' is 3 at row 1 and at row 0"),
    "shared-table-slot": (step(state_indices=ints(0, 1, 2, 2).view(2, 2)), r"is 2 at row 1 and at row 1"),
    "R33-negative-history": (step(history_lens=ints(3, -4)), r"'history_lens' is -4 at row 1; wanted at least 0"),
    "accepted-zero": (
        step(state_indices=ints(0, 1, 2, 3).view(2, 2), num_accepted_tokens=ints(1, 0)),
        r"'num_accepted_tokens' is 0 at row 1; wanted 1 to 2",
    ),
    "B52-accepted-beyond-the-table": (
        step(state_indices=ints(0, 1, 2, 3).view(2, 2), num_accepted_tokens=ints(3, 1)),
        r"'num_accepted_tokens' is 3 at row 0; wanted 1 to 2",
    ),
    "row-longer-than-the-table": (
        lambda: gated_delta_rule_update(
            *inputs(5), torch.zeros(4, HV, V, K), state_indices=ints(0, 1, 2, 3).view(2, 2), cu_seqlens=ints(0, 2, 5)
        ),
        r"'cu_seqlens' is 3 tokens at row 1; wanted at most 2",
    ),
    "prompt-slot-beyond-the-pool": (prompt(state_indices=ints(1, 4)), r"gated_delta_rule: .* is 4 at row 1"),
    "falling-offsets": (prompt(cu_seqlens=ints(0, 3, 2)), r"'cu_seqlens' is falling by 1 at row 1"),
    "offsets-from-one": (prompt(cu_seqlens=ints(1, 3, 5)), r"'cu_seqlens' is 1 at row 0; wanted 0"),
    "host-lengths-disagree": (prompt(host_lengths=[3, 2]), r"'host_lengths' is 3 at row 0; wanted 2, as cu_seqlens"),
}


@pytest.mark.parametrize(("run", "message"), CHECKED.values(), ids=CHECKED.keys())
def test_check_names_the_row(monkeypatch: pytest.MonkeyPatch, run: Run, message: str) -> None:
    monkeypatch.setenv("DLINFER_EXT_CHECK", "1")
    with pytest.raises(ValueError, match=message):
        run()


def test_check_lets_good_input_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLINFER_EXT_CHECK", "1")
    step(state_indices=ints(-1, -1), history_lens=ints(0, 0))()
    step(state_indices=ints(0, 1, 2, -1).view(2, 2), num_accepted_tokens=ints(2, 1))()
    prompt(state_indices=ints(3, 0), history_lens=ints(0, 1), host_lengths=[2, 3])()
    prompt(cu_seqlens=ints(0, 0, 5), state_indices=ints(1, 1))()


@pytest.mark.parametrize("head_first", [False, True], ids=["BTH", "BHT"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["R54-float32", "bfloat16"])
def test_chunk_name_matches_definition(dtype: torch.dtype, head_first: bool) -> None:
    x = inputs(2, 35, dtype=dtype)
    initial = torch.randn(2, HV, K, V)
    before = initial.clone()
    given = Inputs(*(y.transpose(1, 2) for y in x)) if head_first else x
    o, final = triton_ops.chunk_gated_delta_rule(
        *given, initial_state=initial, output_final_state=True, head_first=head_first, use_qk_l2norm_in_kernel=True
    )
    want_final = initial.double()
    want = reference.gated_delta_rule(
        *packed(x), want_final, cu_seqlens=ints(0, 35, 70), use_qk_l2norm=True, state_v_first=False
    ).view(2, 35, HV, V)
    assert o.dtype == dtype
    assert final is not None
    assert final.dtype == torch.float32
    assert_close("o", o.transpose(1, 2) if head_first else o, want, TOLERANCE["delta_rule", dtype])
    assert_close("final state", final, want_final, FP32)
    assert torch.equal(initial, before)


def test_chunk_name_packed_without_state() -> None:
    x = inputs(1, 9)
    cu = ints(0, 4, 4, 9)
    o, final = triton_ops.chunk_gated_delta_rule(*x, scale=0.5, cu_seqlens=cu)
    want = reference.gated_delta_rule(*packed(x), torch.zeros(3, HV, V, K), cu_seqlens=cu, scale=0.5)
    assert final is None
    assert_close("o", o[0], want, FP32)
    kept = torch.randn(3, HV, K, V)
    _, final = triton_ops.chunk_gated_delta_rule(*x, initial_state=kept, output_final_state=True, cu_seqlens=cu)
    assert final is not None
    assert torch.equal(final[1], kept[1]), "B43: a zero-length row keeps its state"


def test_chunk_name_empty() -> None:
    o, final = triton_ops.chunk_gated_delta_rule(*inputs(2, 0), output_final_state=True)
    assert o.shape == (2, 0, HV, V)
    assert final is not None
    assert not final.any()


RECURRENT: dict[str, dict[str, Any]] = {
    "own-state": {},
    "R34-no-state": {"initial_state": None},
    "slots": {"ssm_state_indices": ints(5, 0, -1)},
    "table": {"ssm_state_indices": ints(5, 1, 0, 2, 4, 3).view(3, 2), "num_accepted_tokens": ints(2, 1, 1)},
    "ring": {"state_ids_rb": ints(1, -1, 0), "cache_seqlens_rb": ints(7, 3, 0), "num_state": 3},
}


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize("form", RECURRENT.values(), ids=RECURRENT.keys())
def test_recurrent_name_matches_definition(form: dict[str, Any], varlen: bool) -> None:
    x = inputs(1, 5) if varlen else inputs(3, 2)
    cu = ints(0, 2, 4, 5) if varlen else None
    pool = torch.randn(6, HV, V, K)
    given = {"initial_state": pool, **form}
    ring = form.get("num_state")
    want_pool = torch.zeros(3, HV, V, K).double() if given["initial_state"] is None else pool.double()
    with no_host_reads():
        o, state = triton_ops.fused_recurrent_gated_delta_rule(
            *x, cu_seqlens=cu, use_qk_l2norm_in_kernel=True, **given
        )  # fmt: skip
    want = reference.gated_delta_rule_update(
        *(packed(x) if varlen else x),
        want_pool.unflatten(0, (-1, ring)) if ring else want_pool,
        state_indices=form.get("state_ids_rb", form.get("ssm_state_indices")),
        history_lens=form.get("cache_seqlens_rb"),
        num_accepted_tokens=form.get("num_accepted_tokens"),
        cu_seqlens=cu,
        use_qk_l2norm=True,
    )
    assert_close("o", o[0] if varlen else o, want, FP32)
    assert_close("state", state, want_pool, FP32)
    if given["initial_state"] is not None:
        assert state is pool


def test_recurrent_name_without_beta_and_in_place() -> None:
    q, k, v, g, _ = inputs(2, 2)
    pool = torch.randn(5, HV, V, K)
    before, want_pool = pool.clone(), pool.double()
    o, final = triton_ops.fused_recurrent_gated_delta_rule(
        q, k, v, g, initial_state=pool, inplace_final_state=False, ssm_state_indices=ints(3, -1)
    )
    want = reference.gated_delta_rule_update(q, k, v, g, torch.ones_like(g), want_pool, state_indices=ints(3, -1))
    assert torch.equal(pool, before)
    assert final.dtype == torch.float32
    assert_close("o", o, want, FP32)
    assert_close("final", final[0], want_pool[3], FP32)
    assert not final[1].any()


def test_recurrent_name_takes_a_ring_by_slot() -> None:
    x = inputs(1, 2)
    flat = torch.randn(6, HV, V, K)
    ring = flat.clone().view(2, 3, HV, V, K)
    common: dict[str, Any] = {"state_ids_rb": ints(1), "cache_seqlens_rb": ints(4), "num_state": 3}
    o, _ = triton_ops.fused_recurrent_gated_delta_rule(*x, initial_state=flat, **common)
    p, _ = triton_ops.fused_recurrent_gated_delta_rule(*x, initial_state=ring, **common)
    assert torch.equal(o, p)
    assert torch.equal(flat, ring.flatten(0, 1))


@pytest.mark.parametrize("cu", [None, ints(0, 1, 2, 3), ints(0, 2, 2, 3)], ids=["R41-dense", "decode", "varlen"])
def test_sigmoid_gating_name_matches_definition(cu: Tensor | None) -> None:
    q, k, v, _, _ = inputs(3, 1) if cu is None else inputs(1, 3)
    wide = torch.randn(*v.shape[:2], 2 * HV)
    a, b = wide[..., HV:], wide[..., :HV]
    a_log, bias = torch.randn(HV), torch.randn(HV)
    storage = torch.randn(5, 2, HV, K, V)
    pool = storage[:, 1]
    want_pool, before = pool.double(), storage.clone()
    slots = ints(4, 0, -1)
    g, beta = reference.gated_delta_gate(a, b, -a_log.exp(), bias, 2.0, 15.0)
    x = Inputs(q, k, v, g, beta)
    want = reference.gated_delta_rule_update(
        *(x if cu is None else packed(x)), want_pool, state_indices=slots, state_v_first=False, cu_seqlens=cu, scale=0.3
    )
    with no_host_reads():
        o = triton_ops.fused_sigmoid_gating_delta_rule_update(
            a_log, a, bias, 2.0, 15.0, q, k, v, b, pool, slots, scale=0.3, cu_seqlens=cu
        )
    assert_close("o", o.flatten(0, 1), want.view(-1, HV, V), FP32)
    assert_close("pool", pool, want_pool, FP32)
    assert torch.equal(storage[:, 0], before[:, 0])


def test_sigmoid_gating_name_without_state() -> None:
    q, k, v, _, _ = inputs(2, 1)
    gates = torch.randn(2, 1, HV)
    o = triton_ops.fused_sigmoid_gating_delta_rule_update(
        torch.zeros(HV), gates, torch.zeros(HV), 1.0, 20.0, q, k, v, gates, None, None
    )
    g, beta = reference.gated_delta_gate(gates, gates, -torch.ones(HV), torch.zeros(HV))
    want = reference.gated_delta_rule_update(q, k, v, g, beta, torch.zeros(2, HV, V, K))
    assert_close("o", o, want, FP32)
