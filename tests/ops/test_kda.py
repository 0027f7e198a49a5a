"""Kimi Delta Attention's interface: what it refuses and checks on demand, and the names of its peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dlinfer_ext.kernels.kda import reference
from dlinfer_ext.ops import kda, kda_gate, kda_update
from dlinfer_ext.testing import TOLERANCE, assert_close, no_host_reads
from dlinfer_ext.vendor.ascend import triton_ops

FP32 = TOLERANCE["kda", torch.float32]
H, HV, K, V = 2, 4, 8, 12
ORIENTATIONS = pytest.mark.parametrize("v_first", [True, False], ids=["VK", "KV"])


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def inputs(*lead: int, dtype: torch.dtype = torch.float32) -> Inputs:
    q, k, v = torch.randn(*lead, H, K), torch.randn(*lead, H, K), torch.randn(*lead, HV, V)
    return Inputs(q.to(dtype), k.to(dtype), v.to(dtype), -torch.rand(*lead, HV, K), torch.rand(*lead, HV))


def ints(*values: int) -> Tensor:
    return torch.tensor(values)


def packed(x: Inputs) -> Inputs:
    return Inputs(*(y.flatten(0, 1) for y in x))


def inner(v_first: bool) -> tuple[int, ...]:
    return (HV, V, K) if v_first else (HV, K, V)


@pytest.mark.parametrize("form", ["rule", "rule-ring", "update", "update-ring", "update-table", "update-packed"])
def test_opcheck(form: str) -> None:
    state = torch.randn(4, 3, HV, V, K) if form.endswith("ring") else torch.randn(4, HV, V, K)
    slots, past = ints(2, 0), ints(0, 5)
    tail = (K**-0.5, True, True, -1)
    if form.startswith("rule"):
        args: tuple[Any, ...] = (*inputs(5), state, ints(0, 2, 5), slots, past, *tail, [2, 3])
        torch.library.opcheck(torch.ops.dlinfer_ext.kda.default, args)
        return
    accepted = cu = None
    x = inputs(2, 2)
    if form == "update-table":
        slots, accepted = ints(2, 0, 1, 3).view(2, 2), ints(2, 1)
    if form == "update-packed":
        x, cu = inputs(4), ints(0, 1, 4)
    torch.library.opcheck(torch.ops.dlinfer_ext.kda_update.default, (*x, state, slots, past, accepted, cu, *tail))


Run = Callable[[], object]
REFUSED: dict[str, tuple[Run, str]] = {
    "more-tokens-than-ring-entries": (
        lambda: kda_update(*inputs(1, 4), torch.zeros(2, 3, HV, V, K), history_lens=ints(1)),
        r"kda_update: argument 'q' is of 4 tokens per row; wanted at most 3",
    ),
    "wrong-orientation": (
        lambda: kda_update(*inputs(1, 1), torch.zeros(2, HV, K, V)),
        r"'state' is of shape \[2, 4, 8, 12\]; wanted \[S, 4, 12, 8\]",
    ),
    "a-gate-per-head": (
        lambda: kda_update(*inputs(1, 1)._replace(g=torch.zeros(1, 1, HV)), torch.zeros(2, HV, V, K)),
        r"'g' is of shape \[1, 1, 4\]; wanted \[1, 1, 4, 8\]",
    ),
    "fewer-slots-than-rows": (
        lambda: kda(*inputs(4), torch.zeros(1, HV, V, K), cu_seqlens=ints(0, 1, 4)),
        r"'state' is of 1 slots; wanted at least 2",
    ),
    "bound-below-what-kernels-can-hold": (
        lambda: kda_gate(torch.zeros(1, HV, K), torch.zeros(HV), torch.zeros(HV, K), -6.0),
        r"'lower_bound' is -6.0; wanted None, or a number in \[-5, 0\)",
    ),
    "gate-parameters-without-the-gate": (
        lambda: triton_ops.chunk_kda(*inputs(1, 2), A_log=torch.zeros(HV)),
        r"chunk_kda: argument 'A_log' is given without use_gate_in_kernel",
    ),
    "initial-state-in-the-other-orientation": (
        lambda: triton_ops.chunk_kda(*inputs(1, 2), initial_state=torch.zeros(1, HV, V, K)),
        r"chunk_kda: argument 'initial_state' is of shape \[1, 4, 12, 8\]; wanted \[1, 4, 8, 12\]",
    ),
    "two-forms-at-once": (
        lambda: triton_ops.fused_recurrent_kda(
            *inputs(1, 1), initial_state=torch.zeros(3, HV, V, K), ssm_state_indices=ints(0), state_ids_rb=ints(0),
            cache_seqlens_rb=ints(0),
        ),
        r"fused_recurrent_kda: argument 'ssm_state_indices' is given with state_ids_rb",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("run", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_by_name(run: Run, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run()


def test_check_names_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLINFER_EXT_CHECK", "1")
    pool = torch.zeros(4, HV, V, K)
    kda_update(*inputs(2, 1), pool, state_indices=ints(3, -1))
    with pytest.raises(ValueError, match=r"kda_update: argument 'state_indices' is 4 at row 1; wanted below 4"):
        kda_update(*inputs(2, 1), pool, state_indices=ints(1, 4))
    with pytest.raises(ValueError, match=r"kda: argument 'state_indices' is 3 at row 1 and at row 0"):
        kda(*inputs(5), pool, cu_seqlens=ints(0, 2, 5), state_indices=ints(3, 3))


@ORIENTATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunk_name_matches_definition(dtype: torch.dtype, v_first: bool) -> None:
    x = inputs(2, 35, dtype=dtype)
    initial = torch.randn(2, *inner(v_first))
    before, want_final = initial.clone(), initial.double()
    o, final = triton_ops.chunk_kda(
        *x, initial_state=initial, output_final_state=True, use_qk_l2norm_in_kernel=True, state_v_first=v_first
    )
    want = reference.kda(
        *packed(x), want_final, cu_seqlens=ints(0, 35, 70), use_qk_l2norm=True, state_v_first=v_first
    ).view(2, 35, HV, V)
    assert o.dtype == dtype
    assert final is not None
    assert final.dtype == torch.float32
    assert_close("o", o, want, TOLERANCE["kda", dtype])
    assert_close("final state", final, want_final, FP32)
    assert torch.equal(initial, before)


def test_chunk_name_packed_without_state() -> None:
    x, cu = inputs(1, 9), ints(0, 4, 4, 9)
    o, final = triton_ops.chunk_kda(*x, scale=0.5, cu_seqlens=cu)
    assert final is None
    assert_close("o", o[0], reference.kda(*packed(x), torch.zeros(3, HV, V, K), cu_seqlens=cu, scale=0.5), FP32)
    kept = torch.randn(3, HV, K, V)
    _, final = triton_ops.chunk_kda(*x, initial_state=kept, output_final_state=True, cu_seqlens=cu)
    assert final is not None
    assert torch.equal(final[1], kept[1]), "a zero-length row keeps its state"


@pytest.mark.parametrize("bound", [None, -5.0], ids=["softplus", "bound"])
def test_names_compute_the_gate_when_asked(bound: float | None) -> None:
    x = inputs(2, 3)
    raw, rate, bias = 3 * torch.randn(2, 3, HV, K), torch.randn(1, 1, HV, 1), torch.randn(HV * K)
    gate: dict[str, Any] = {"use_gate_in_kernel": True, "A_log": rate, "dt_bias": bias, "lower_bound": bound}
    g = reference.kda_gate(raw, rate.flatten(), bias, bound)
    pool = torch.zeros(2, HV, V, K).double()
    want = reference.kda_update(*x._replace(g=g), pool)
    o, _ = triton_ops.chunk_kda(*x._replace(g=raw), **gate)
    assert_close("chunk", o, want, FP32)
    o, final = triton_ops.fused_recurrent_kda(*x._replace(g=raw), **gate)
    assert_close("recurrent", o, want, FP32)
    assert_close("state", final, pool, FP32)
    without = reference.kda_gate(raw, rate.flatten(), torch.zeros(HV * K), bound)
    o, _ = triton_ops.chunk_kda(*x._replace(g=raw), **{**gate, "dt_bias": None})
    assert_close("no bias", o, reference.kda_update(*x._replace(g=without), torch.zeros(2, HV, V, K).double()), FP32)


RECURRENT: dict[str, dict[str, Any]] = {
    "own-state": {},
    "no-state": {"initial_state": None},
    "slots": {"ssm_state_indices": ints(5, 0, -1)},
    "table": {"ssm_state_indices": ints(5, 1, 0, 2, 4, 3).view(3, 2), "num_accepted_tokens": ints(2, 1, 1)},
    "ring": {"state_ids_rb": ints(1, -1, 0), "cache_seqlens_rb": ints(7, 3, 0), "num_state": 3},
}


@ORIENTATIONS
@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize("form", RECURRENT.values(), ids=RECURRENT.keys())
def test_recurrent_name_matches_definition(form: dict[str, Any], varlen: bool, v_first: bool) -> None:
    x = inputs(1, 5) if varlen else inputs(3, 2)
    cu = ints(0, 2, 4, 5) if varlen else None
    pool = torch.randn(6, *inner(v_first))
    given = {"initial_state": pool, **form}
    ring = form.get("num_state")
    want_pool = torch.zeros(3, *inner(v_first)).double() if given["initial_state"] is None else pool.double()
    with no_host_reads():
        o, state = triton_ops.fused_recurrent_kda(
            *x, cu_seqlens=cu, use_qk_l2norm_in_kernel=True, state_v_first=v_first, **given
        )
    want = reference.kda_update(
        *(packed(x) if varlen else x),
        want_pool.unflatten(0, (-1, ring)) if ring else want_pool,
        state_indices=form.get("state_ids_rb", form.get("ssm_state_indices")),
        history_lens=form.get("cache_seqlens_rb"),
        num_accepted_tokens=form.get("num_accepted_tokens"),
        cu_seqlens=cu,
        use_qk_l2norm=True,
        state_v_first=v_first,
    )
    assert_close("o", o[0] if varlen else o, want, FP32)
    assert_close("state", state, want_pool, FP32)
    if given["initial_state"] is not None:
        assert state is pool


def test_recurrent_name_without_beta_and_in_place() -> None:
    q, k, v, g, _ = inputs(2, 2)
    pool = torch.randn(5, HV, V, K)
    before, want_pool = pool.clone(), pool.double()
    o, final = triton_ops.fused_recurrent_kda(
        q, k, v, g, initial_state=pool, inplace_final_state=False, ssm_state_indices=ints(3, -1)
    )
    want = reference.kda_update(q, k, v, g, torch.ones(2, 2, HV), want_pool, state_indices=ints(3, -1))
    assert torch.equal(pool, before)
    assert_close("o", o, want, FP32)
    assert_close("final", final[0], want_pool[3], FP32)
    assert not final[1].any()
