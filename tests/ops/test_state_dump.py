"""DLINFER_EXT_DUMP: which calls leave a file, what it holds, how much at most, and that nothing is overwritten."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from dlinfer_ext import ops
from dlinfer_ext.ops import _registry, state_dump
from dlinfer_ext.version import __version__

from .state_calls import CALLS, NAN, put

pytestmark = pytest.mark.eager_only(reason="about what is recorded of a call, whichever form runs")


@pytest.fixture(autouse=True)
def _new_process() -> None:
    state_dump.reset()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DLINFER_EXT_DUMP", str(tmp_path / "dumps"))
    return tmp_path / "dumps"


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()[state_dump.HEADER])
        return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)


def call(name: str = "conv-update-ring", **changed: Any) -> dict[str, Any]:
    arguments = CALLS[name].arguments() | changed
    CALLS[name].function(**arguments)
    return arguments


# --- what a file holds ------------------------------------------------------------------------------------------------


def test_a_file_holds_the_slots_that_the_rows_touch(folder: Path) -> None:
    pool = CALLS["conv-update-ring"].arguments()["conv_state"]
    before = pool.clone()
    arguments = call(conv_state=pool)
    (path,) = folder.iterdir()
    header, tensors = read(path)
    # Of slot -1 of the PAD row code that takes it for a number would touch the last.
    assert tensors["slots.conv_state"].tolist() == [3, 2, 5]
    for when, held in (("before", before), ("after", pool)):
        assert torch.equal(tensors[f"{when}.conv_state"].nan_to_num(7.0), held[[3, 2, 5]].nan_to_num(7.0))
    assert torch.equal(tensors["cache_seqlens"], arguments["cache_seqlens"])
    assert torch.equal(tensors["x"].nan_to_num(7.0), arguments["x"].nan_to_num(7.0))
    assert tensors["out"].shape == arguments["x"].shape
    named = ("operator", "layout", "step", "pool", "rank", "pid", "fault", "ran", "left_out")
    assert [header[name] for name in named] == [
        "causal_conv1d_update", "ring", 0, 0, 0, os.getpid(), None, True, []
    ]  # fmt: skip
    assert header["versions"]["dlinfer_ext"] == __version__
    assert header["versions"]["torch"] == torch.__version__
    assert header["arguments"]["conv_state"] == {"shape": [6, 7, 3], "dtype": "float32"}
    assert header["arguments"]["pad_slot_id"] == -1
    assert header["arguments"]["num_accepted_tokens"] is None


@pytest.mark.parametrize("name", CALLS)
def test_every_operator_leaves_a_file_and_does_what_it_does_without(name: str, folder: Path) -> None:
    torch.manual_seed(3)
    on = call(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("DLINFER_EXT_DUMP")
        torch.manual_seed(3)
        off = call(name)
    for argument, value in on.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            assert torch.equal(value.nan_to_num(7.0), off[argument].nan_to_num(7.0)), argument
    (path,) = folder.iterdir()
    header, _ = read(path)
    assert (header["operator"], header["ran"]) == (CALLS[name].operator, True)


def test_what_is_large_is_left_out_and_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_dump, "TENSOR_BYTES", 100)
    monkeypatch.setattr(state_dump, "POOL_BYTES", 200)
    call("gdn-update-table")  # a slot has 96 bytes
    header, tensors = read(*folder.iterdir())
    assert len(tensors["before.state"]) == 2
    assert {"v", "g"} & set(tensors) == {"g"}
    assert header["left_out"] == ["3 slots of state", "out", "v"]
    assert {"state_indices", "num_accepted_tokens"} <= set(tensors)  # what tells the rows is always there


# --- which calls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "steps"), [("0-3,100", [0, 1, 2, 3, 100]), ("7", [7]), ("none", []), (" 1 - 2 , 4", None), ("2-1", [])]
)
def test_steps_are_numbers_and_ranges(text: str, steps: list[int] | None) -> None:
    if steps is None:
        with pytest.raises(ValueError, match="DLINFER_EXT_DUMP_STEPS"):
            state_dump.steps_of(text)
    else:
        assert [step for part in state_dump.steps_of(text) for step in part] == steps


@pytest.mark.parametrize("text", ["all", "1-", "-1", "1,,2", "1.5", "0:3", ","])
def test_other_steps_are_refused(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLINFER_EXT_DUMP_STEPS", text)
    with pytest.raises(
        ValueError, match=r"DLINFER_EXT_DUMP_STEPS='.*' is not supported: set it to none, or to numbers"
    ):
        call()


def test_steps_are_counted_for_each_pool(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLINFER_EXT_DUMP_STEPS", "1,3")
    pools = [CALLS["conv-update-ring"].arguments()["conv_state"] for _ in range(2)]
    for step in range(4):
        for pool in pools[: 1 + (step < 2)]:
            pool.nan_to_num_(1.0)
            call(conv_state=pool)
    headers = [read(path)[0] for path in folder.iterdir()]
    assert sorted((h["pool"], h["step"]) for h in headers) == [(0, 1), (0, 3), (1, 1)]


def test_prefill_and_decode_count_on_and_readers_do_not(folder: Path) -> None:
    pool = CALLS["conv-ring"].arguments()["conv_state"]
    call("conv-ring", conv_state=pool)
    call("conv-update-ring", conv_state=pool)
    cache = CALLS["latent-write"].arguments()["cache"]
    call("latent-write", cache=cache)
    call("latent-attention", cache=cache)
    call("latent-write", cache=cache)
    found = sorted((h["operator"], h["pool"], h["step"]) for h in (read(p)[0] for p in folder.iterdir()))
    assert found == [
        ("causal_conv1d", 0, 0), ("causal_conv1d_update", 0, 1), ("latent_attention", 1, 0), ("latent_write", 1, 0),
        ("latent_write", 1, 1),
    ]  # fmt: skip


def test_a_batch_without_a_live_row_is_no_step(folder: Path) -> None:
    call(conv_state_indices=torch.tensor([-1, -1, -1]))
    assert list(folder.iterdir()) == []


def test_a_convolution_without_a_pool_leaves_nothing(folder: Path) -> None:
    ops.causal_conv1d(torch.rand(2, 3), torch.rand(4, 3), cu_seqlens=torch.tensor([0, 2]))
    assert not folder.exists() or list(folder.iterdir()) == []


@pytest.mark.parametrize("steps", ["none", "0-3"])
def test_a_fault_is_written_in_any_step(steps: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLINFER_EXT_DUMP_STEPS", steps)
    monkeypatch.setenv("DLINFER_EXT_CHECK", "1")
    arguments = CALLS["conv-update-ring"].arguments()
    call()
    put("conv_state", (3, 6), NAN)(arguments)
    with pytest.raises(
        ValueError, match=r"^causal_conv1d_update: argument 'conv_state' is NaN .* Dumped: /.*"
    ) as error:
        call(**arguments)
    path = Path(str(error.value).rpartition("Dumped: ")[2])
    assert path.name.endswith("-fault.safetensors")
    header, tensors = read(path)
    assert header["fault"] == str(error.value).partition(". Dumped")[0]
    assert header["ran"] is False
    assert "after.conv_state" not in tensors
    assert len(list(folder.iterdir())) == (1 if steps == "none" else 2)


def test_a_call_that_fails_is_written_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(_registry, "chosen", lambda *_: fails)
    with pytest.raises(RuntimeError, match="no memory"):
        call()
    header, _ = read(*folder.iterdir())
    assert (header["fault"], header["ran"]) == ("RuntimeError: no memory", False)


# --- where, and how much ----------------------------------------------------------------------------------------------


def test_a_relative_folder_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DLINFER_EXT_DUMP", "some/where")
    call()
    assert len(list((tmp_path / "some" / "where").iterdir())) == 1


def test_what_is_no_folder_is_refused_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    for value in ("file", "file/below", "/proc/nothing/here", "a\0b"):
        if "\0" in value:
            continue  # an environment cannot hold it
        text = value if value.startswith("/") else str(tmp_path / value)
        monkeypatch.setenv("DLINFER_EXT_DUMP", text)
        arguments = CALLS["conv-update-ring"].arguments()
        before = arguments["conv_state"].clone()
        with pytest.raises(ValueError, match=rf"DLINFER_EXT_DUMP='{text}' is not supported: .*; set it to a folder"):
            call(**arguments)
        assert torch.equal(arguments["conv_state"].nan_to_num(7.0), before.nan_to_num(7.0))
    assert (tmp_path / "file").read_text() == "mine"


def test_nothing_is_overwritten_and_no_link_is_followed(folder: Path, tmp_path: Path) -> None:
    call()
    (first,) = folder.iterdir()
    held = first.read_bytes()
    state_dump.reset()  # the next call gets the same name
    other = tmp_path / "other"
    other.write_text("mine")
    first.with_name(first.name.replace(".safetensors", "-1.safetensors")).symlink_to(other)
    call()
    assert first.read_bytes() == held
    assert other.read_text() == "mine"
    assert first.with_name(first.name.replace(".safetensors", "-2.safetensors")).is_file()


@pytest.mark.parametrize(("bound", "most"), [("FOLDER_FILES", 3), ("FOLDER_BYTES", 8000)])
def test_a_forgotten_variable_fills_no_disk(
    bound: str, most: int, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(state_dump, bound, most)
    monkeypatch.setenv("DLINFER_EXT_DUMP_STEPS", "0-1000")
    with caplog.at_level(logging.WARNING, "dlinfer_ext"):
        for again in range(2):
            for _ in range(6):
                call()
            if not again:
                state_dump.reset()  # another process finds the folder as it is
    files = list(folder.iterdir())
    sizes = [f.stat().st_size for f in files]
    assert most <= (len(files) if bound == "FOLDER_FILES" else sum(sizes))
    assert sum(sizes) - max(sizes) < 8000
    assert len(files) < 6
    said = [m for m in caplog.messages if "no more is written" in m]
    assert len(said) == 2
    assert "Empty it, or unset DLINFER_EXT_DUMP" in said[0]


def test_faults_are_written_beyond_the_bounds_and_bounded_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_dump, "FOLDER_FILES", 0)
    monkeypatch.setattr(state_dump, "FAULT_FILES", 2)
    monkeypatch.setenv("DLINFER_EXT_CHECK", "1")
    said = []
    for _ in range(4):
        with pytest.raises(ValueError, match="cache_seqlens") as error:
            call(cache_seqlens=torch.tensor([-2, 0, 0]))
        said.append("Dumped" in str(error.value))
    assert said == [True, True, False, False]
    assert len(list(folder.iterdir())) == 2


def test_a_full_disk_does_not_end_the_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    folder.mkdir()
    monkeypatch.setattr(os, "open", full)
    with caplog.at_level(logging.ERROR, "dlinfer_ext"):
        call()
    assert "could not be written: No space left on device" in caplog.text
