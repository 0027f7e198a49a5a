"""The chip of a machine is read from its device, with the core counts that the device reports."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from dlinfer_ext.targets import load_soc
from dlinfer_ext.vendor.ascend import soc


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    soc.this_soc.cache_clear()
    yield
    soc.this_soc.cache_clear()


def device(monkeypatch: pytest.MonkeyPatch, name: str, *, available: bool = True, **properties: Any) -> None:
    """Put a stand-in of torch_npu with one device in the place of the real one."""
    module = ModuleType("torch_npu")
    module.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    npu = SimpleNamespace(
        is_available=lambda: available,
        get_device_name=lambda index: name,
        get_device_properties=lambda index: SimpleNamespace(**properties),
    )
    monkeypatch.setattr(torch, "npu", npu, raising=False)


def triton(monkeypatch: pytest.MonkeyPatch, *, installed: bool) -> None:
    module = ModuleType("triton")
    module.__spec__ = importlib.machinery.ModuleSpec("triton", None)
    found = module.__spec__ if installed else None
    monkeypatch.setattr(soc, "find_spec", lambda name: found if name == "triton" else find_spec(name))


def test_core_counts_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """R28: a chip with fewer cores than its record is not given a grid for the full number."""
    device(monkeypatch, "Ascend910B4-1", cube_core_num=18, vector_core_num=36)
    found = soc.this_soc()
    assert (found.name, found.cube_cores, found.vector_cores) == ("a2", 18, 36)
    assert found.ub_bytes == load_soc("a2").ub_bytes
    assert soc.given() == {"soc": found}


@pytest.mark.parametrize("properties", [{}, {"cube_core_num": 0, "vector_core_num": 0}], ids=["absent", "zero"])
def test_core_counts_that_a_device_does_not_report_come_from_the_record(
    properties: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    device(monkeypatch, "Ascend910_9382", **properties)
    assert soc.this_soc() == load_soc("a3")


def test_the_device_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device(monkeypatch, "Ascend910B3")
    first = soc.this_soc()
    device(monkeypatch, "Ascend950PR_9589")
    assert soc.this_soc() is first


@pytest.mark.parametrize(("name", "able"), [("Ascend910B3", True), ("Ascend950DT_9581", True), ("Ascend310P3", False)])
def test_triton_serves_where_the_chip_has_a_target(name: str, able: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device(monkeypatch, name)
    triton(monkeypatch, installed=True)
    assert (soc.triton_missing() is None) == able
    triton(monkeypatch, installed=False)
    want = "pip install triton-ascend" if able else "Triton has no Ascend310P3 target"
    assert want in (soc.triton_missing() or "")


def test_what_is_wrong_with_a_machine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert soc.triton_missing() == "torch_npu is not installed"
    device(monkeypatch, "Ascend910B3", available=False)
    assert "npu-smi info" in (soc.triton_missing() or "")
    device(monkeypatch, "Ascend999")
    assert "device 'Ascend999' is not known" in (soc.triton_missing() or "")
