"""A route is chosen once and visibly."""

from __future__ import annotations

import ast
import importlib
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dlinfer_ext.ops  # noqa: F401  (declares the operators)
from dlinfer_ext.forms import NO_KERNEL, kernel_form
from dlinfer_ext.ops import _registry
from dlinfer_ext.ops._registry import Choice, Route, choose, chosen
from dlinfer_ext.vendor.ascend.table import route_table

TARGET = "dlinfer_ext.kernels.gated_rms_norm.eager:gated_rms_norm"
EAGER = Route("eager", TARGET)
TRITON = Route("triton", TARGET)
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.eager_only(reason="about the choice of a route")

NO_TRITON = Route("triton", "no.such.module:nothing", missing=lambda: "Triton is not installed")


@pytest.fixture(autouse=True)
def _fresh_choices() -> Iterator[None]:
    chosen.cache_clear()
    yield
    chosen.cache_clear()


def bind(monkeypatch: pytest.MonkeyPatch, *routes: Route) -> None:
    monkeypatch.setattr(_registry, "routes", lambda name, vendor: routes)


def test_auto_takes_the_first_route(monkeypatch: pytest.MonkeyPatch) -> None:
    bind(monkeypatch, TRITON, EAGER)
    assert choose("op", "cpu").route is TRITON


def test_the_route_asked_for_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    bind(monkeypatch, TRITON, EAGER)
    monkeypatch.setenv("DLINFER_EXT_ROUTE", "eager")
    choice = choose("op", "cpu")
    assert choice.route is EAGER
    assert choice.passed_over == ()


@pytest.mark.parametrize("asked", ["auto", "triton"])
def test_a_route_passed_over_is_logged_once_with_the_reason(
    asked: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bind(monkeypatch, NO_TRITON, EAGER)
    monkeypatch.setenv("DLINFER_EXT_ROUTE", asked)
    with caplog.at_level(logging.WARNING, "dlinfer_ext"):
        assert chosen("op", "cpu") is chosen("op", "cpu")
    assert caplog.messages == ["op: route triton passed over (Triton is not installed); eager serves"]


def test_a_route_that_is_not_bound_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    bind(monkeypatch, EAGER)
    monkeypatch.setenv("DLINFER_EXT_ROUTE", "triton")
    with caplog.at_level(logging.WARNING, "dlinfer_ext"):
        chosen("op", "cpu")
    assert caplog.messages == ["op: route triton passed over (vendor cpu binds no triton form of it); eager serves"]


def test_nothing_is_logged_when_nothing_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bind(monkeypatch, EAGER)
    with caplog.at_level(logging.DEBUG, "dlinfer_ext"):
        chosen("op", "cpu")
    assert caplog.messages == []


@pytest.mark.parametrize("bound", [(NO_TRITON, EAGER), (EAGER,)], ids=["missing", "not-bound"])
def test_strict_makes_it_an_error(bound: tuple[Route, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    bind(monkeypatch, *bound)
    monkeypatch.setenv("DLINFER_EXT_ROUTE", "triton")
    monkeypatch.setenv("DLINFER_EXT_STRICT", "1")
    with pytest.raises(RuntimeError, match=r"^op: route 'triton' cannot serve \(.*\) and DLINFER_EXT_STRICT=1"):
        choose("op", "cpu")


def test_strict_is_content_with_the_best_route(monkeypatch: pytest.MonkeyPatch) -> None:
    bind(monkeypatch, TRITON, NO_TRITON)
    monkeypatch.setenv("DLINFER_EXT_STRICT", "1")
    assert choose("op", "cpu").route is TRITON


def test_no_route_at_all_is_an_error_that_lists_them(monkeypatch: pytest.MonkeyPatch) -> None:
    bind(monkeypatch, NO_TRITON, Route("eager", TARGET, missing=lambda: "broken"))
    with pytest.raises(RuntimeError, match=r"^op: no route can serve .*triton: Triton is not installed; eager: broken"):
        choose("op", "cpu")


@pytest.mark.parametrize("variable", ["DLINFER_EXT_ROUTE", "DLINFER_EXT_STRICT"])
def test_an_unknown_value_is_an_error_that_lists_the_choices(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bind(monkeypatch, NO_TRITON, EAGER)
    monkeypatch.setenv(variable, "fast")
    with pytest.raises(ValueError, match=rf"^{variable}='fast' is not supported: set it to one of "):
        choose("op", "cpu")


def test_a_choice_is_read_when_it_is_made_and_then_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    bind(monkeypatch, EAGER)
    first = chosen("op", "cpu")
    bind(monkeypatch, NO_TRITON)
    assert chosen("op", "cpu") is first
    with pytest.raises(RuntimeError, match="no route can serve"):
        chosen("another", "cpu")


def functions_of(module: str) -> set[str]:
    """Return the names that a module defines or imports, without importing it: a launcher imports Triton."""
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
    return names


@pytest.mark.parametrize("vendor", ["cpu", "ascend"])
@pytest.mark.parametrize("name", sorted(_registry.OPERATORS))
def test_a_vendor_binds_every_operator_and_each_target_exists(name: str, vendor: str) -> None:
    routes = _registry.routes(name, vendor)
    # What is taken unasked ends with the form that runs anywhere.
    assert [route for route in routes if not route.on_request][-1].name == "eager"
    for route in routes:
        module, _, function = route.target.partition(":")
        assert function in functions_of(module)


@pytest.mark.parametrize("vendor", ["cpu", "ascend"])
def test_a_vendor_binds_no_unknown_operator(vendor: str) -> None:
    assert set(importlib.import_module(f"dlinfer_ext.vendor.{vendor}.bindings").ROUTES) == set(_registry.OPERATORS)


def test_a_route_on_request_serves_only_if_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    native = Route("native", TARGET, on_request=True)
    bind(monkeypatch, native, EAGER)
    assert choose("op", "cpu") == Choice(EAGER, ())
    monkeypatch.setenv("DLINFER_EXT_ROUTE", "native")
    assert choose("op", "cpu") == Choice(native, ())


def test_a_route_on_request_that_is_not_named_is_no_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    bind(monkeypatch, NO_TRITON, Route("native", TARGET, on_request=True))
    with pytest.raises(RuntimeError, match=r"no route can serve on vendor cpu \(triton: Triton is not installed\)"):
        choose("op", "cpu")


def test_a_route_is_prepared_before_its_import_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    def prepare() -> dict[str, Any]:
        steps.append("prepared")
        return {"soc": "a2"}

    def load(name: str) -> Any:
        steps.append(name)
        return SimpleNamespace(launch=lambda x, *, soc: (x, soc))

    bind(monkeypatch, Route("triton", "some.module:launch", prepare=prepare))
    monkeypatch.setattr(importlib, "import_module", load)
    assert [chosen("op", "cpu")(n) for n in (1, 2)] == [(1, "a2"), (2, "a2")]
    assert steps == ["prepared", "some.module"]


def test_choosing_a_route_prepares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare() -> dict[str, Any]:
        raise AssertionError("a table of routes must not start a compiler")

    bind(monkeypatch, Route("triton", TARGET, prepare=prepare))
    assert choose("op", "cpu").route.name == "triton"


@pytest.mark.parametrize("key", ["CPU", "PrivateUse1"])
@pytest.mark.parametrize("name", sorted(_registry.OPERATORS))
def test_an_operator_is_registered_for_the_device_of_each_vendor(name: str, key: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"dlinfer_ext::{name}", key)


@pytest.mark.parametrize("operator", sorted(NO_KERNEL))
def test_without_a_kernel_the_batched_form_serves_and_the_table_says_so(operator: str) -> None:
    for vendor in ("cpu", "ascend"):
        choice = choose(operator, vendor)
        assert choice.route.name == "eager"
        assert choice.passed_over == ()
    for soc in ("a2", "a3", "a5", "310p"):
        routes = {entry.route: entry for entry in route_table(soc)[operator]}
        assert [name for name, entry in routes.items() if entry.able] == ["eager"]
        assert routes["triton"].note == "no kernel is written for it yet"


@pytest.mark.parametrize("operator", sorted(NO_KERNEL))
def test_a_kernel_that_is_asked_for_is_missed_by_name(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLINFER_EXT_ROUTE", "native")
    assert choose(operator, "cpu").passed_over == (("native", "vendor cpu binds no native form of it"),)
    monkeypatch.setenv("DLINFER_EXT_STRICT", "1")
    with pytest.raises(RuntimeError, match=rf"^{operator}: route 'native' cannot serve"):
        choose(operator, "cpu")


@pytest.mark.parametrize("operator", sorted(NO_KERNEL))
def test_a_launcher_that_is_written_is_bound(operator: str) -> None:
    module, _, function = kernel_form(operator).partition(":")
    written = ROOT.joinpath(*module.split(".")).with_suffix(".py").exists()
    assert not (written and function in functions_of(module)), f"NO_KERNEL names {operator}, which has a launcher"
