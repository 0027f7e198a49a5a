"""An operator that a machine registers is one more route, taken if its signature is the one wanted."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dlinfer_ext.forms import NO_KERNEL
from dlinfer_ext.ops import _registry
from dlinfer_ext.ops._registry import Route, chosen
from dlinfer_ext.ops.gated_rms_norm import gated_rms_norm
from dlinfer_ext.targets import load_soc
from dlinfer_ext.vendor.ascend import bindings, fused, soc
from dlinfer_ext.vendor.ascend.fused import FusedOperator, packed
from dlinfer_ext.vendor.ascend.table import route_table

pytestmark = pytest.mark.eager_only(reason="about the choice of a route")

SCHEMA = "(Tensor x, Tensor weight_columns, float eps) -> Tensor"
EAGER = Route("eager", "dlinfer_ext.kernels.gated_rms_norm.eager:gated_rms_norm")
LIBRARY = torch.library.Library("dlinfer_ext_test", "FRAGMENT")
LIBRARY.define("norm" + SCHEMA)
CALLS: list[tuple[int, ...]] = []


@torch.library.impl(LIBRARY, "norm", "CPU")
def registered_norm(x: Tensor, weight_columns: Tensor, eps: float) -> Tensor:
    """What a machine would register; it wants its weight as a column."""
    CALLS.append(tuple(weight_columns.shape))
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight_columns[:, 0], eps)


def column(weight: Tensor) -> Tensor:
    return weight[:, None].contiguous()


def form(x: Tensor, gate: Tensor | None, weight: Tensor, *rest: Any, registered: Any) -> Tensor:
    """Takes what the eager form takes: bias, eps, ..."""
    result: Tensor = registered(x, packed(weight, column), rest[1])
    return result


def entry(name: str = "dlinfer_ext_test::norm", schema: str = SCHEMA) -> FusedOperator:
    return FusedOperator("gated_rms_norm", name, schema, f"{__name__}:form")


@pytest.fixture(autouse=True)
def _fresh_choices() -> Iterator[None]:
    chosen.cache_clear()
    CALLS.clear()
    yield
    chosen.cache_clear()


def serve(monkeypatch: pytest.MonkeyPatch, chip: str, bound: FusedOperator) -> None:
    """Let a CPU tensor's operator take the routes of a machine with this chip."""
    monkeypatch.setattr(soc, "this_soc", lambda: load_soc(chip))
    monkeypatch.setattr(_registry, "routes", lambda name, vendor: (bound.route(), EAGER))


def test_a_registered_operator_serves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    serve(monkeypatch, "a2", entry())
    x, weight = torch.randn(3, 8), torch.randn(8)
    with caplog.at_level(logging.WARNING, "dlinfer_ext"):
        got = gated_rms_norm(x, None, weight, eps=1e-6)
    torch.testing.assert_close(got, torch.nn.functional.rms_norm(x, (8,), weight, 1e-6))
    assert CALLS == [(8, 1)]
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("chip", "bound", "why"),
    [
        pytest.param("a2", entry("dlinfer_ext_test::absent"),
                     "this machine registers no torch.ops.dlinfer_ext_test.absent", id="absent"),
        pytest.param("a2", entry("no_such_namespace::norm"),
                     "this machine registers no torch.ops.no_such_namespace.norm", id="no-namespace"),
        pytest.param("a3", entry(schema="(Tensor output, Tensor x, Tensor weight_columns, float eps) -> Tensor"),
                     "the signature differs: this machine has dlinfer_ext_test::norm(Tensor x, Tensor weight_columns, "
                     "float eps) -> Tensor; wanted dlinfer_ext_test::norm(Tensor output, Tensor x, Tensor "
                     "weight_columns, float eps) -> Tensor", id="other-arguments"),
        pytest.param("a3", entry(schema="(Tensor(a!) x, Tensor weight_columns, float eps) -> Tensor"),
                     "the signature differs: this machine has dlinfer_ext_test::norm(Tensor x, Tensor weight_columns, "
                     "float eps) -> Tensor; wanted dlinfer_ext_test::norm(Tensor(a!) x, Tensor weight_columns, float "
                     "eps) -> Tensor", id="other-mutation"),
        pytest.param("a5", entry(), "registered operators are withheld on a5", id="a5"),
        pytest.param("310p", entry(), "registered operators are withheld on 310p", id="310p"),
    ],
)  # fmt: skip
def test_otherwise_the_next_route_serves_and_one_line_says_so(
    chip: str, bound: FusedOperator, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    serve(monkeypatch, chip, bound)
    x, weight = torch.randn(3, 8), torch.randn(8)
    with caplog.at_level(logging.WARNING, "dlinfer_ext"):
        for _ in range(2):
            got = gated_rms_norm(x, None, weight, eps=1e-6)
    torch.testing.assert_close(got, torch.nn.functional.rms_norm(x, (8,), weight, 1e-6))
    assert CALLS == []
    assert caplog.messages == [f"gated_rms_norm: route fused passed over ({why}); eager serves"]


def test_strict_makes_a_mismatch_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, "a2", entry("dlinfer_ext_test::absent"))
    monkeypatch.setenv("DLINFER_EXT_ROUTE", "fused")
    monkeypatch.setenv("DLINFER_EXT_STRICT", "1")
    with pytest.raises(RuntimeError, match=r"route 'fused' cannot serve \(this machine registers no torch\.ops"):
        _registry.choose("gated_rms_norm", "cpu")


def test_without_a_device_it_says_so() -> None:
    assert entry().missing() == "torch_npu is not installed"


def test_a_weight_is_packed_once_and_again_when_it_is_written_to() -> None:
    made = []

    def pack(weight: Tensor) -> Tensor:
        made.append(weight.shape)
        return weight.t().contiguous()

    weight = torch.randn(4, 3)
    first = packed(weight, pack)
    assert packed(weight, pack) is first
    assert len(made) == 1
    weight.mul_(2)
    assert torch.equal(packed(weight, pack), weight.t())
    assert len(made) == 2
    with torch.inference_mode():
        loaded = torch.randn(4, 3)
        assert packed(loaded, pack) is packed(loaded, pack)
    assert len(made) == 3


# --- the route table --------------------------------------------------------------------------------------------------


def able(chip: str, operator: str = "causal_conv1d_update") -> dict[str, tuple[bool, str]]:
    return {e.route: (e.able, e.note) for e in route_table(chip)[operator]}


def test_the_table_has_every_operator_and_route_in_the_order_of_the_bindings() -> None:
    for chip in ("a2", "a3", "a5", "310p"):
        table = route_table(chip)
        assert set(table) == set(bindings.ROUTES)
        for operator, entries in table.items():
            assert [e.route for e in entries] == ["fused", "triton", "eager"]
            assert {e.operator for e in entries} == {operator}
            names = [r.name for r in bindings.ROUTES[operator]]
            unbound = {"fused"} - set(names) | ({"triton"} if operator in NO_KERNEL else set())
            assert names == [e.route for e in entries if e.route not in unbound]
            assert not any(e.able for e in entries if e.route in unbound)


def test_a5_withholds_registered_operators_and_310p_has_no_triton_either() -> None:
    assert able("a5") == {
        "fused": (False, "registered operators are withheld on a5"),
        "triton": (True, "where triton-ascend is installed"),
        "eager": (True, ""),
    }
    assert able("310p") == {
        "fused": (False, "registered operators are withheld on 310p"),
        "triton": (False, "Triton has no Ascend310P3 target"),
        "eager": (True, ""),
    }


@pytest.mark.parametrize("chip", ["a2", "a3"])
def test_a_bound_operator_is_in_the_table(chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert able(chip)["fused"] == (False, "no registered operator is bound to it")
    monkeypatch.setattr(fused, "FUSED", (entry(),))
    assert able(chip, "gated_rms_norm")["fused"] == (
        True,
        f"where the machine registers dlinfer_ext_test::norm{SCHEMA}",
    )
    assert able(chip)["fused"] == (False, "no registered operator is bound to it")


def test_an_unknown_chip_is_an_error() -> None:
    with pytest.raises(ValueError, match="chip 'a9' is not known: take one of 310p, a2, a3, a5"):
        route_table("a9")
