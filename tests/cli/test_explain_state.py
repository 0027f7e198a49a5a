"""`explain-state`: right calls pass in every layout, known faults are found by name, and what is no dump is named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dlinfer_ext import ops
from dlinfer_ext.cli.main import main
from dlinfer_ext.cli.state_file import NotADump, load
from dlinfer_ext.cli.state_judge import judge
from dlinfer_ext.cli.state_values import Finding
from dlinfer_ext.ops._access import KINDS
from dlinfer_ext.ops.state_dump import HEADER
from tests.fuzz.faults import planted
from tests.fuzz.layouts import LAYOUTS
from tests.fuzz.test_fuzz import FOUND_BY
from tests.ops import check_cost
from tests.ops.state_calls import CALLS, FAULTS

from .state_steps import dump_steps, dumping

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.eager_only(reason="faults are planted in the PyTorch form")


def faults(path: Path) -> list[Finding]:
    return [finding for finding in judge(load(path)) if finding.fault]


# --- every layout, right and wrong ------------------------------------------------------------------------------------


def assert_right(dumps: list[Path]) -> Counter[str]:
    """Judge dumps, of which none may be wrong and all must have been made anew; return how many each operator has."""
    operators: Counter[str] = Counter()
    for path in dumps:
        dump = load(path)
        found = judge(dump)
        operators[dump.plan.operator] += 1
        assert [f for f in found if f.fault or "not held against" in f.text] == [], path.name
    return operators


QUICK = ("conv-linear", "conv-rewind", "conv-ring", "gdr-ring", "gating-table", "kda-plain", "pages")


@pytest.mark.parametrize("layout", [pytest.param(x, marks=() if x in QUICK else pytest.mark.long) for x in LAYOUTS])
def test_right_steps_pass(layout: str, tmp_path: Path) -> None:
    operators = assert_right(dump_steps(layout, tmp_path))
    assert {"copy_slots"} < set(operators)
    assert operators.total() >= 12


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_right_steps_of_other_sizes_pass(layout: str, tmp_path: Path) -> None:
    assert assert_right(dump_steps(layout, tmp_path, width=2, drafts=1, spare=1, flip=True)).total() >= 12


# The fault this project began with, in its two halves, and two others, each with what is said of it.
TOLD = {
    "ring_gather_from_packed_batch": (1, r"conv_state[5, 0] was written with the input of position 4 of row 0: no row"),
    "ring_reads_before_the_start": (
        1,
        "its result is that of reading what its slot held before the first of its 1 tokens",
    ),
    "rewind_ignores_accepted_count": (
        0,
        "conv_state[2, 0] does not hold the input 2 before its first token, but the input 3 ",
    ),
    "recurrent_ring_slot_one_behind": (
        0,
        "state[2, 3] does not hold the state after 11 tokens, but the state after 12 tokens",
    ),
    "pad_row_written": (3, "conv_state[11, 1] was written with another value: the row is PAD"),
}


@pytest.mark.parametrize("fault", TOLD)
def test_a_known_fault_is_told(fault: str, tmp_path: Path) -> None:
    row, text = TOLD[fault]
    with planted(fault):
        found = [f for path in dump_steps(FOUND_BY[fault], tmp_path, faulty=True) for f in faults(path)]
    assert any(f.row == row and text in f.text for f in found), found


@pytest.mark.long
@pytest.mark.parametrize("fault", FOUND_BY)
def test_every_known_fault_of_state_is_found(fault: str, tmp_path: Path) -> None:
    with planted(fault):
        dumps = dump_steps(FOUND_BY[fault], tmp_path, faulty=True)
    assert any(faults(path) for path in dumps)


def test_a_state_stored_transposed_is_told(tmp_path: Path) -> None:
    """With K = V no shape gives it away."""
    q, k, v = (torch.randn(3, 1, 4) for _ in range(3))
    with planted("state_stored_transposed"), dumping(tmp_path):
        ops.gated_delta_rule(
            q, k, v, -torch.rand(3, 1), torch.rand(3, 1), torch.zeros(2, 1, 4, 4), cu_seqlens=torch.tensor([0, 3]),
            history_lens=torch.tensor([0]), state_indices=torch.tensor([1]),
        )  # fmt: skip
    (path,) = tmp_path.glob("*")
    assert [f.text for f in faults(path)] == ["state[1] does not hold the state after 3 tokens, but one transposed"]


@pytest.mark.parametrize("name", CALLS)
def test_what_the_check_refuses_is_flagged_at_the_same_row(name: str, tmp_path: Path) -> None:
    call = CALLS[name]
    for kind, wrong in call.faults.items():
        arguments = call.arguments()
        wrong.change(arguments)
        with dumping(tmp_path, "none", check="1"), pytest.raises(ValueError, match=r"\. Dumped: ") as raised:
            call.function(**arguments)
        path = Path(str(raised.value).rpartition("Dumped: ")[2])
        assert any(f.row == wrong.row for f in faults(path)), kind
        path.unlink()
    with dumping(tmp_path):
        call.function(**call.arguments())
    (path,) = tmp_path.glob("*")
    assert faults(path) == []


def test_the_table_has_every_fault() -> None:
    assert len(FAULTS) > 150


# --- single findings --------------------------------------------------------------------------------------------------


def ring(pool: Tensor, slots: list[int], history: list[int], x: Tensor) -> None:
    rows: dict[str, Any] = {"conv_state_indices": torch.tensor(slots), "cache_seqlens": torch.tensor(history)}
    ops.causal_conv1d_update(x, pool, torch.rand(4, x.shape[-1]), **rows)


def only(folder: Path) -> Path:
    (path,) = folder.glob("*.safetensors")
    return path


def test_a_state_of_zeros_behind_a_history_is_flagged(tmp_path: Path) -> None:
    with dumping(tmp_path):
        ring(torch.zeros(3, 7, 2), [1, 2], [5, 0], torch.randn(2, 1, 2))
    (found,) = faults(only(tmp_path))
    assert found == Finding(0, "conv_state is all zeros where the row goes on from 5 tokens")


def test_equal_windows_are_noted_and_may_be(tmp_path: Path) -> None:
    with dumping(tmp_path):
        ring(torch.ones(3, 7, 2), [1, 2], [7, 7], torch.randn(2, 1, 2))
    (found,) = judge(load(only(tmp_path)))
    assert found == Finding(
        1, "its window is that of row 0: right only if their last 3 tokens are the same", fault=False
    )


def test_zeros_before_the_start_are_wanted_in_a_linear_window(tmp_path: Path) -> None:
    pool = torch.ones(2, 3, 2)
    with dumping(tmp_path):
        ops.causal_conv1d(
            torch.randn(2, 2), torch.rand(4, 2), conv_state=pool, cu_seqlens=torch.tensor([0, 2]),
            history_lens=torch.tensor([1]),
        )  # fmt: skip
    texts = [f.text for f in faults(only(tmp_path))]
    assert texts == [f"conv_state[0, {i}] is not zero, and stands for a time before the first token" for i in (0, 1)]


def test_of_a_long_prompt_the_stored_inputs_are_held_against_the_columns(tmp_path: Path) -> None:
    """All of x is more than a dump keeps; the last of each row is enough."""
    x = torch.randn(4096, 80)
    rows: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 4094, 4096]), "history_lens": torch.tensor([0, 1])}
    for fault in ("", "ring_gather_from_packed_batch"):
        folder = tmp_path / f"fault{fault}"
        with planted(fault) if fault else nullcontext(), dumping(folder):
            ops.causal_conv1d(x, torch.rand(4, 80), conv_state=torch.ones(2, 6, 80), layout="ring", **rows)
        assert len(load(only(folder)).tensors["tokens.x"]) == 8
        assert only(folder).stat().st_size < 50_000
        found = faults(only(folder))
        assert bool(found) == bool(fault)
        assert all(f.row == 1 for f in found)


# --- the command ------------------------------------------------------------------------------------------------------

# As in docs/en/operators.md: W = 4, L = 7, after 9 tokens a verify step of 4.
RING = """\
row 0: slot 1; history 9, 4 new
┏━━━━━━━━━━━━━━━┳━━━━┳━━━━┳━━━━┳━━━━━┳━━━━━┳━━━━━┳━━━━┓
┃ conv_state[1] ┃ 0  ┃ 1  ┃ 2  ┃ 3   ┃ 4   ┃ 5   ┃ 6  ┃
┡━━━━━━━━━━━━━━━╇━━━━╇━━━━╇━━━━╇━━━━━╇━━━━━╇━━━━━╇━━━━┩
│ before        │ p7 │ p8 │ ·  │ ·   │ ·   │ ·   │ p6 │
│ read          │ ^  │ ^  │    │     │     │     │ ^  │
│ written       │    │    │ *  │ *   │ *   │ *   │    │
│ after         │ p7 │ p8 │ p9 │ p10 │ p11 │ p12 │ p6 │
│ next read     │    │    │    │ ^   │ ^   │ ^   │    │
└───────────────┴────┴────┴────┴─────┴─────┴─────┴────┘
nothing is wrong
"""


@pytest.fixture
def right(tmp_path: Path) -> Path:
    with dumping(tmp_path / "right"):
        ring(torch.rand(3, 7, 2), [1], [9], torch.rand(1, 4, 2))
    return only(tmp_path / "right")


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    """Return a dump of three rows of which row 1 goes on from NaN."""
    pool = torch.rand(4, 7, 2)
    pool[3, 1] = torch.nan
    with dumping(tmp_path / "wrong"):
        ring(pool, [1, 3, 2], [9, 4, 0], torch.rand(3, 1, 2))
    return only(tmp_path / "wrong")


def test_a_ring_is_drawn_in_slot_order(right: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain-state", str(right)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{right.name}: causal_conv1d_update, ring, step 0 of pool 0\nrank 0, pid {os.getpid()}, ")
    assert RING in said


def test_what_cannot_be_makes_the_exit_code_1(wrong: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain-state", str(wrong)]) == 1
    said = capsys.readouterr().out
    assert "  ! row 1: conv_state[3, 1] holds NaN or infinity, and the row goes on from it\n" in said
    assert "p1 NaN" in said
    assert "1 thing cannot be\n" in said


@pytest.mark.parametrize(("row", "code"), [("0", 0), ("1", 1), ("2", 0)])
def test_one_row_can_be_asked_for(row: str, code: int, wrong: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain-state", str(wrong), "--row", row]) == code
    assert capsys.readouterr().out.count("\nrow ") == 1


def test_a_row_that_is_not_there_is_named(wrong: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain-state", str(wrong), "--row", "3"]) == 2
    assert "has 3 rows; wanted --row from 0 to 2" in capsys.readouterr().err


def test_json_holds_what_is_drawn(right: Path, wrong: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain-state", str(right), str(wrong), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["held"] is False
    assert [dump["held"] for dump in report["dumps"]] == [True, False]
    first, second = report["dumps"]
    assert (first["operator"], first["layout"], first["step"]) == ("causal_conv1d_update", "ring", 0)
    entries = first["rows"][0]["pools"]["conv_state"]
    assert [e["after"] for e in entries] == ["p7", "p8", "p9", "p10", "p11", "p12", "p6"]
    assert [e["entry"] for e in entries if e["next"]] == [[1, 3], [1, 4], [1, 5]]
    assert {f["row"] for f in second["findings"] if f["fault"]} == {1}


def test_quiet_says_one_line_of_a_right_dump(right: Path, wrong: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain-state", "--quiet", str(right), str(wrong)]) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"{right.name}: nothing is wrong\n{wrong.name}: causal_conv1d_update")


# --- what is no dump --------------------------------------------------------------------------------------------------


class Bomb:
    """Something that must not be unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("unpickled",)


def tampered(path: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], None]) -> Path:
    """Write a dump anew with another header or other tensors."""
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()[HEADER])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    change(header, tensors)
    target = path.with_name("tampered.safetensors")
    save_file(tensors, target, metadata={HEADER: json.dumps(header)})
    return target


NO_DUMPS: dict[str, tuple[Any, str]] = {
    "text": (lambda p: (p / "a").write_text("hello"), "is no dump"),
    "empty": (lambda p: (p / "a").write_bytes(b""), "is no dump"),
    "pickle": (lambda p: torch.save(Bomb(), p / "a"), "is no dump"),
    "folder": (lambda p: (p / "a").mkdir(), "is no dump"),
    "missing": (lambda p: None, "is no dump"),
    "other-tensors": (lambda p: save_file({"x": torch.zeros(2)}, p / "a"), f"its metadata has no '{HEADER}'"),
    "no-json": (lambda p: save_file({"x": torch.zeros(2)}, p / "a", metadata={HEADER: "{"}), "is a damaged dump"),
    "a-list": (lambda p: save_file({"x": torch.zeros(2)}, p / "a", metadata={HEADER: "[]"}), "is a damaged dump"),
}


@pytest.mark.parametrize("kind", NO_DUMPS)
def test_what_is_no_dump_is_named(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, says = NO_DUMPS[kind]
    make(tmp_path)
    assert main(["explain-state", str(tmp_path / "a"), "--json"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err
    assert str(tmp_path / "a") in said.err


Header = dict[str, Any]


def without(name: str) -> Callable[[Header, dict[str, Tensor]], None]:
    """Leave out a key of the header, an argument, or a tensor."""

    def change(header: Header, tensors: dict[str, Tensor]) -> None:
        for part in (header, header["arguments"], tensors):
            part.pop(name, None)

    return change


TAMPERED: dict[str, Callable[[Header, dict[str, Tensor]], None]] = {
    "other-format": lambda h, t: h.update(format=99),
    "unknown-operator": lambda h, t: h.update(operator="softmax"),
    "no-arguments": lambda h, t: h.update(arguments=3),
    "an-argument-less": without("pad_slot_id"),
    "no-step": without("step"),
    "a-slot-less": lambda h, t: t.update({"slots.conv_state": t["slots.conv_state"][:0]}),
    "no-state-after": without("after.conv_state"),
    "other-shape": lambda h, t: t.update({"before.conv_state": t["before.conv_state"][..., :1].clone()}),
    "no-slots-given": without("conv_state_indices"),
    "odd-dtype": lambda h, t: h["arguments"]["conv_state"].update(dtype="Tensor"),
}


@pytest.mark.parametrize("kind", TAMPERED)
def test_a_damaged_dump_is_named(kind: str, right: Path) -> None:
    path = tampered(right, TAMPERED[kind])
    with pytest.raises(NotADump, match=r"tampered\.safetensors"):
        load(path)


def test_a_dump_written_anew_is_read(right: Path) -> None:
    """The control of the above."""
    assert faults(tampered(right, lambda header, tensors: None)) == []


def test_every_operator_has_a_definition_or_is_a_move() -> None:
    from dlinfer_ext.cli.state_definition import DEFINITIONS

    assert set(DEFINITIONS) | {"zero_slots", "copy_slots"} == set(KINDS)


# --- the page ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", ["en", "zh_cn"])
def test_the_page_shows_what_its_snippet_prints(language: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / language / "debugging.md").read_text(encoding="utf-8")
    snippet, shown = re.findall(r"^```python run\n(.*?)^```$.*?^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", snippet], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
        check=True,
    )  # fmt: skip
    first, second, *lines = done.stdout.splitlines()
    assert second.startswith("rank 0, pid ")
    assert "\n".join([re.sub(r"pid\d+", "pid4711", first), *lines]).strip() == shown.strip()


@pytest.mark.lmdeploy
@pytest.mark.long
def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "en" / "debugging.md").read_text(encoding="utf-8")
    blocks = [b for b in re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) if "examples/" in b]
    assert len(blocks) == 2
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for block in blocks:
        line = block.replace("dumps", str(tmp_path / "dumps"))
        environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            ["bash", "-ec", line], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count(": nothing is wrong\n") > 20


@pytest.mark.long
def test_the_cost_is_printed_as_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_cost.main(["--rounds", "1", "--rows", "1"]) == 0
    said = capsys.readouterr().out
    assert len(re.findall(r"check × \d+\.\d\d, dump × \d+\.\d\d", said)) == 2
    assert re.search(r"\d µs a call, nothing read from the device", said)
