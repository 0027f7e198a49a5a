"""Gated RMS norm against written-out values and the fp64 definition."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlinfer_ext.kernels.gated_rms_norm import reference
from dlinfer_ext.ops.gated_rms_norm import RMSNormGated, gated_rms_norm, rmsnorm_fn
from dlinfer_ext.testing import DTYPES, TOLERANCE, assert_close, no_host_reads


def inputs(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, gate = (torch.randn(shape, generator=generator).mul_(3).to(dtype) for _ in range(2))
    weight = torch.rand(shape[-1], generator=generator).add_(0.5).to(dtype)
    return x, gate, weight


def definition(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
) -> Tensor:
    group = x.shape[-1] if group_size is None else group_size
    return reference.gated_rms_norm(x, gate, weight, bias, eps, activation, norm_before_gate, group)


# x = [3, 4] has rms 3.5355339 and norm [0.8485281, 1.1313708]; the gate [0, 1] has silu [0, 0.7310586] and sigmoid
# [0.5, 0.7310586].
WRITTEN_OUT = [
    pytest.param("silu", True, [0.0, 1.6541970], id="R69-norm-then-silu"),
    pytest.param("silu", False, [0.0, 2.8284271], id="R69-silu-then-norm"),
    pytest.param("swish", True, [0.0, 1.6541970], id="swish-is-silu"),
    pytest.param("sigmoid", True, [0.4242641, 1.6541970], id="R67-norm-then-sigmoid"),
    pytest.param("sigmoid", False, [0.6454630, 2.5166466], id="R67-sigmoid-then-norm"),
]


@pytest.mark.parametrize(("activation", "norm_before_gate", "want"), WRITTEN_OUT)
def test_written_out_values(activation: str, norm_before_gate: bool, want: list[float]) -> None:
    x, gate, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 1.0]]), torch.tensor([1.0, 2.0])
    got = gated_rms_norm(x, gate, weight, eps=0.0, activation=activation, norm_before_gate=norm_before_gate)
    torch.testing.assert_close(got, torch.tensor([want]), rtol=1e-6, atol=1e-7)


def test_without_gate_is_rms_norm_with_bias() -> None:
    got = gated_rms_norm(torch.tensor([[3.0, 4.0]]), None, torch.tensor([1.0, 2.0]), torch.tensor([0.5, -1.0]), eps=0.0)
    torch.testing.assert_close(got, torch.tensor([[1.3485281, 1.2627417]]), rtol=1e-6, atol=1e-7)


def test_eps_is_inside_the_root() -> None:
    got = gated_rms_norm(torch.tensor([[1e-3, -1e-3]]), None, torch.ones(2), eps=1e-6)
    torch.testing.assert_close(got, torch.tensor([[0.70710678, -0.70710678]]), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_before_gate", [True, False], ids=["norm-first", "gate-first"])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize(
    ("shape", "group_size"),
    [((1, 128), None), ((7, 128), 32), ((2, 3, 4, 80), 16), ((5, 65), None), ((5, 6), 1), ((128,), None)],
    ids=["M1", "groups-of-32", "4d-groups", "odd", "groups-of-1", "1d"],
)
def test_matches_the_definition(
    shape: tuple[int, ...], group_size: int | None, activation: str, norm_before_gate: bool, dtype: torch.dtype
) -> None:
    x, gate, weight = inputs(shape, dtype)
    got = gated_rms_norm(
        x, gate, weight, activation=activation, norm_before_gate=norm_before_gate, group_size=group_size
    )
    want = definition(x, gate, weight, activation=activation, norm_before_gate=norm_before_gate, group_size=group_size)
    assert got.dtype == dtype
    assert_close("gated_rms_norm", got, want, TOLERANCE["norm", dtype])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.integers(0, 9),
    groups=st.integers(1, 4),
    group_size=st.integers(1, 33),
    dtype=st.sampled_from(DTYPES),
    weight_dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(["silu", "sigmoid"]),
    norm_before_gate=st.booleans(),
    gated=st.booleans(),
    biased=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_matches_the_definition_on_drawn_cases(
    rows: int,
    groups: int,
    group_size: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    activation: str,
    norm_before_gate: bool,
    gated: bool,
    biased: bool,
    seed: int,
) -> None:
    x, z, weight = inputs((rows, groups * group_size), dtype, seed)
    bias = weight * 0.1 if biased else None  # too small to cancel a norm of one channel
    gate, weight = z if gated else None, weight.to(weight_dtype)
    got = gated_rms_norm(
        x, gate, weight, bias, activation=activation, norm_before_gate=norm_before_gate, group_size=group_size
    )
    want = definition(
        x, gate, weight, bias, activation=activation, norm_before_gate=norm_before_gate, group_size=group_size
    )
    assert_close("gated_rms_norm", got, want, TOLERANCE["norm", dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_is_rounded_once(dtype: torch.dtype) -> None:
    """Rounding the norm before the gate as well moves about a third of all results by a step of the dtype."""
    x, gate, weight = inputs((64, 128), dtype)
    right = gated_rms_norm(x, gate, weight) == definition(x, gate, weight).to(dtype)
    assert right.float().mean() > 0.995


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: f"R64-{d}")
def test_weight_has_the_dtype_asked_for(dtype: torch.dtype) -> None:
    norm = RMSNormGated(32, eps=1e-6, dtype=dtype)
    assert norm.weight.dtype == dtype
    assert not norm.weight.requires_grad
    assert norm.bias is None
    fine = torch.full((32,), 1 + 2**-12, dtype=torch.float64)
    norm.weight.copy_(fine)
    x, gate, _ = inputs((4, 32), torch.float32)
    assert_close("RMSNormGated", norm(x, gate), definition(x, gate, fine.to(dtype)), TOLERANCE["norm", torch.float32])


def test_module_and_function_agree_with_the_operator() -> None:
    x, gate, weight = inputs((4, 32), torch.float32)
    norm = RMSNormGated(32, eps=1e-5, group_size=8, norm_before_gate=False, activation="sigmoid")
    norm.weight.copy_(weight)
    want = definition(x, gate, weight, eps=1e-5, group_size=8, norm_before_gate=False, activation="sigmoid")
    assert_close("RMSNormGated", norm(x, gate), want, 2e-6)
    assert_close("rmsnorm_fn", rmsnorm_fn(x, weight, None, gate, 1e-5, 8, False, True, "sigmoid"), want, 2e-6)


@pytest.mark.parametrize("shape", [(0, 16), (0, 3, 16), (4, 0, 16)], ids=lambda s: f"R65-{list(s)}")
def test_empty_batch_gives_an_empty_result(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16)
    got = gated_rms_norm(x, x, torch.ones(16))
    assert got.shape == x.shape
    assert got.dtype == x.dtype


def test_many_rows_are_each_normed() -> None:
    """R66: more rows than a launch grid of 65535 holds."""
    x, gate, weight = inputs((4096 * 32, 8), torch.float32)
    got = gated_rms_norm(x, gate, weight)
    some = [0, 1, 65534, 65535, 65536, 131071]
    assert_close("gated_rms_norm", got[some], definition(x[some], gate[some], weight), 2e-6)
    assert bool(torch.isfinite(got).all())


def test_needs_no_npu_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """R68: the norm runs on a CPU tensor, and neither torch_npu nor Triton is imported by it."""
    for name in ("torch_npu", "triton"):
        monkeypatch.setitem(sys.modules, name, None)
    got = gated_rms_norm(torch.tensor([[3.0, 4.0]]), None, torch.ones(2), eps=0.0)
    torch.testing.assert_close(got, torch.tensor([[0.8485281, 1.1313708]]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_views_are_read_as_they_are_and_left_alone(dtype: torch.dtype) -> None:
    wide, weights = inputs((6, 5, 64), dtype)[0], inputs((1, 64), dtype, 1)[2]
    views = {"slice": (wide[:, 1:3, 8:40], wide[:, 3:5, 8:40]), "transposed": (wide[0].T, wide[1].T)}
    before = wide.clone(), weights.clone()
    for name, (x, gate) in views.items():
        weight = weights[::2][: x.shape[-1]]
        got = gated_rms_norm(x, gate, weight)
        assert_close(name, got, definition(x, gate, weight), TOLERANCE["norm", dtype])
        assert got.untyped_storage().data_ptr() != wide.untyped_storage().data_ptr()
    assert torch.equal(wide, before[0])
    assert torch.equal(weights, before[1])


@pytest.mark.parametrize("norm_before_gate", [True, False], ids=["norm-first", "gate-first"])
def test_inputs_are_unchanged_and_the_result_is_fresh(norm_before_gate: bool) -> None:
    x, gate, weight = inputs((4, 16), torch.float32)
    before = [t.clone() for t in (x, gate, weight)]
    got = gated_rms_norm(x, gate, weight, norm_before_gate=norm_before_gate)
    got.fill_(7)
    assert all(torch.equal(a, b) for a, b in zip((x, gate, weight), before, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_alone_equals_the_row_in_a_batch(dtype: torch.dtype) -> None:
    x, gate, weight = inputs((33, 128), dtype)
    alone = torch.cat([gated_rms_norm(x[i : i + 1], gate[i : i + 1], weight) for i in range(33)])
    assert torch.equal(gated_rms_norm(x, gate, weight), alone)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_a_bad_row_harms_no_other(bad: float) -> None:
    x, gate, weight = inputs((5, 16), torch.float32)
    clean = gated_rms_norm(x, gate, weight)
    x[2, 3] = gate[2, 5] = bad
    got = gated_rms_norm(x, gate, weight)
    others = [0, 1, 3, 4]
    assert torch.equal(got[others], clean[others])
    assert not bool(torch.isfinite(got[2]).all())


def test_large_values_in_a_16_bit_type_do_not_overflow() -> None:
    x, weight = torch.full((1, 64), 60000.0, dtype=torch.float16), torch.ones(64, dtype=torch.float16)
    assert torch.equal(gated_rms_norm(x, None, weight), torch.ones(1, 64, dtype=torch.float16))


def test_reads_nothing_on_the_host() -> None:
    x, gate, weight = inputs((4, 16), torch.bfloat16)
    with no_host_reads():
        gated_rms_norm(x, gate, weight, group_size=4)
        gated_rms_norm(x, gate, weight, norm_before_gate=False)
