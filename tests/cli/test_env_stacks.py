"""configs/hosts.json: what goes together, read by types that refuse what they do not know."""

from __future__ import annotations

import copy
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import pytest
from packaging.specifiers import SpecifierSet
from pydantic import ValidationError

from dlinfer_ext.cli import stacks
from dlinfer_ext.framework.lmdeploy import contract

ROOT: Final = Path(__file__).parents[2]
TEXT: Final = (files("dlinfer_ext.configs") / "hosts.json").read_text(encoding="utf-8")


def change(path: tuple[str | int, ...], value: Any) -> str:
    record = json.loads(TEXT)
    place = record
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return json.dumps(record)


def test_the_file_is_read() -> None:
    hosts = stacks.load()
    assert [s.machine for s in hosts.stacks] == ["cpu", "a2", "a3", "a5"]
    assert set(hosts.lmdeploy) == set(contract.known_hosts()["lmdeploy"])


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("stack",), [], "stack"),
        (("stacks", 1, "torch-npu"), "==2.9.0", "torch-npu"),
        (("stacks", 1, "cann"), "8.5.0", "is no version specifier"),
        (("stacks", 1, "evidence"), "works on Ascend", "not run on NPU"),
        (("stacks", 1, "machine"), "a4", "machine"),
        (("lmdeploy", "0.18.0", "tested"), "yes", "tested"),
        (("pairs", 0, "driver"), "==1", "driver"),
        (("faults", 0, "package"), "dlinfer", "package"),
    ],
    ids=lambda v: str(v) if isinstance(v, tuple) else "",
)
def test_what_is_not_known_is_refused_by_name(path: tuple[str | int, ...], value: Any, says: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(says)):
        stacks.parse(change(path, value))


@pytest.mark.parametrize("key", ["machine", "evidence", "note", "cann"])
def test_what_is_missing_is_refused_by_name(key: str) -> None:
    record = copy.deepcopy(json.loads(TEXT))
    del record["stacks"][1][key]
    with pytest.raises(ValidationError, match=key):
        stacks.parse(json.dumps(record))


def test_the_cpu_row_is_the_pins_of_the_engine() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements/engine.txt").read_text(), re.MULTILINE))
    (cpu,) = (s for s in stacks.load().stacks if s.machine == "cpu")
    assert cpu.torch is not None
    for wanted, name in ((cpu.torch, "torch"), (cpu.lmdeploy, "lmdeploy"), (cpu.transformers, "transformers")):
        assert SpecifierSet(wanted).contains(pins[name]), name
    assert set(stacks.load().lmdeploy) == {pins["lmdeploy"]}


def test_no_row_of_a_card_claims_a_run() -> None:
    rows = [s for s in stacks.load().stacks if s.machine != "cpu"]
    assert {s.evidence for s in rows} == {"not run on NPU"}
    assert all(s.sources and s.note for s in rows)


def test_a_row_of_a_card_goes_together() -> None:
    """The CANN and torch of a row are those that its torch_npu was built for."""
    pairs = {p.torch_npu: p for p in stacks.load().pairs}
    for row in stacks.load().stacks:
        if row.torch_npu is not None:
            assert (pairs[row.torch_npu].torch, pairs[row.torch_npu].cann) == (row.torch, row.cann)
