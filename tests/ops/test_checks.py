"""DLINFER_EXT_CHECK=1: each kind of fault in each operator that touches a state pool; off, it reads nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dlinfer_ext import ops
from dlinfer_ext.ops import _access, _registry, _watch, state_dump
from dlinfer_ext.testing import HostRead, no_host_reads

from .state_calls import CALLS, FAULTS, INF, NAN, StateCall, put

EACH_CALL = pytest.mark.parametrize("name", CALLS)
# These read the lengths of a prompt once where none are given, and that is documented.
READS_LENGTHS = ("gated_delta_rule", "kda")


@pytest.fixture
def _checking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLINFER_EXT_CHECK", "1")


def pools_of(call: StateCall, arguments: dict[str, Any]) -> list[Tensor]:
    return [arguments[name] for name in _access.KINDS[call.operator].pools]


@EACH_CALL
def test_right_calls_pass_and_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, results = CALLS[name], []
    for check in ("0", "1"):
        monkeypatch.setenv("DLINFER_EXT_CHECK", check)
        torch.manual_seed(0)
        arguments = call.arguments()
        results.append((call.function(**arguments), *pools_of(call, arguments)))
    for off, on in zip(*results, strict=True):
        assert (off is None and on is None) or torch.equal(off.nan_to_num(777.0), on.nan_to_num(777.0))


@pytest.mark.usefixtures("_checking")
@pytest.mark.parametrize(("name", "kind"), FAULTS, ids=[f"{name}-{kind}" for name, kind in FAULTS])
def test_a_fault_is_named_with_its_row(name: str, kind: str) -> None:
    call, wrong = CALLS[name], CALLS[name].faults[kind]
    arguments = call.arguments()
    wrong.change(arguments)
    before = [pool.clone() for pool in pools_of(call, arguments)]
    with pytest.raises(
        ValueError, match=rf"^{call.operator}: argument '{wrong.argument}' is .* at row {wrong.row}\b.*; wanted "
    ):
        call.function(**arguments)
    if not kind.endswith("written"):
        for pool, was in zip(pools_of(call, arguments), before, strict=True):
            assert torch.equal(pool.nan_to_num(777.0), was.nan_to_num(777.0)), "a pool was touched before the check"


@EACH_CALL
def test_the_same_values_are_not_looked_for_by_default(name: str) -> None:
    """The control: it is the check that names them, and not the operator. What is out of bounds must not be run."""
    for kind, wrong in CALLS[name].faults.items():
        if kind.startswith(("nan-", "inf-", "negative-history")):
            arguments = CALLS[name].arguments()
            wrong.change(arguments)
            CALLS[name].function(**arguments)


@pytest.mark.usefixtures("_checking")
@pytest.mark.parametrize("name", [n for n, c in CALLS.items() if "g" in _access.KINDS[c.operator].resets])
def test_a_full_reset_is_no_fault(name: str) -> None:
    arguments = CALLS[name].arguments()
    put("g", 0, -INF)(arguments)
    CALLS[name].function(**arguments)


@pytest.mark.usefixtures("_checking")
@EACH_CALL
def test_a_row_that_has_no_slot_may_hold_anything(name: str) -> None:
    call = CALLS[name]
    arguments = call.arguments()
    for argument, value in arguments.items():
        if argument.endswith("indices") and isinstance(value, Tensor):
            arguments[argument] = torch.full_like(value, -1)
        if argument == "history_lens":
            arguments[argument] = torch.full_like(value, -3)
        if argument in _access.KINDS[call.operator].inputs:
            arguments[argument] = torch.full_like(value, NAN)
    call.function(**arguments)


@pytest.mark.usefixtures("_checking")
def test_more_than_one_fault_is_counted() -> None:
    arguments = CALLS["gdn-plain"].arguments()
    put("v", 0, NAN)(arguments)
    put("v", 3, NAN)(arguments)
    with pytest.raises(ValueError, match=r"wanted finite values \(and 1 more like it\)"):
        ops.gated_delta_rule(**arguments)


def test_every_operator_that_writes_is_checked() -> None:
    writing = {
        name
        for name in _registry.OPERATORS
        for a in getattr(torch.ops.dlinfer_ext, name).default._schema.arguments
        if a.alias_info is not None and a.alias_info.is_write
    }
    assert writing | {"kpool_select", "latent_attention"} == set(_access.KINDS)
    assert {call.operator for call in CALLS.values()} == set(_access.KINDS)
    for name, kind in _access.KINDS.items():
        schema = {a.name for a in getattr(torch.ops.dlinfer_ext, name).default._schema.arguments}
        assert {*kind.pools, *kind.inputs, *kind.metadata, *kind.resets} <= schema


def test_an_update_that_validates_its_data_checks_the_rows_without_the_variable() -> None:
    arguments = CALLS["conv-update-ring"].arguments()
    ops.causal_conv1d_update(**arguments, validate_data=True)
    CALLS["conv-update-ring"].faults["shared-slot"].change(arguments)
    with pytest.raises(ValueError, match="'conv_state_indices' is 3 at row 1 and at row 0"):
        ops.causal_conv1d_update(**arguments, validate_data=True)


# --- what it costs when it is off -------------------------------------------------------------------------------------


@contextmanager
def counted_reads() -> Iterator[list[str]]:
    """Count reads of the host instead of refusing them."""
    reads: list[str] = []
    original = HostRead.__init__

    def note(self: HostRead, why: str) -> None:
        reads.append(why)
        original(self, why)

    with mock.patch.object(HostRead, "__init__", note):
        yield reads


@EACH_CALL
def test_off_it_reads_nothing_and_calls_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = CALLS[name]
    arguments = call.arguments()
    if call.operator in READS_LENGTHS:
        arguments["host_lengths"] = [2, 3, 1]
    call.function(**call.arguments())  # a route is chosen, and a kernel made, once
    monkeypatch.setattr(_watch, "call", lambda *_: pytest.fail("watched"))
    monkeypatch.setattr(_access, "plan_call", lambda *_: pytest.fail("planned"))
    with no_host_reads():
        call.function(**arguments)


@EACH_CALL
@pytest.mark.parametrize("variable", ["DLINFER_EXT_CHECK", "DLINFER_EXT_DUMP"])
def test_the_guard_sees_the_reads_when_it_is_on(
    name: str, variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    state_dump.reset()
    monkeypatch.setenv(variable, "1" if variable.endswith("CHECK") else str(tmp_path))
    with counted_reads() as reads, pytest.raises(HostRead), no_host_reads():
        CALLS[name].function(**CALLS[name].arguments())
    assert reads
