"""What a command prints and ends with is what docs/*/cli.md says."""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, get_args

import pytest

from dlinfer_ext.cli import completion, dlinfer_contract, doctor
from dlinfer_ext.cli.main import COMMANDS, build_parser, main

ROOT: Final = Path(__file__).parents[2]
BOTH_TREES = pytest.mark.parametrize("tree", ["en", "zh_cn"])


def rows(tree: str, section: int) -> list[list[str]]:
    """Return the rows of the first table of a section, less its head."""
    text = re.split(r"^## ", (ROOT / "docs" / tree / "cli.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[section]
    lines = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def codes_of_the_help(command: str) -> set[int]:
    epilog = completion.subparsers(build_parser())[command].epilog or ""
    said = epilog[epilog.index("Exit code 1") :]
    return {0, 1} | ({2} if re.search(r"\b2:", said) else set())


def codes_of_the_code(command: str) -> set[int]:
    """Return the codes written out in a command's module: in `run`, and in functions that `run` hands on to."""
    file = importlib.import_module(f"dlinfer_ext.cli.{command.replace('-', '_')}").__file__
    assert file is not None
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    functions = {f.name: f for f in tree.body if isinstance(f, ast.FunctionDef)}
    todo, codes, seen = ["run"], set[int](), set[str]()
    while todo:
        name = todo.pop()
        seen.add(name)
        for statement in ast.walk(functions[name]):
            if not isinstance(statement, ast.Return) or statement.value is None:
                continue
            value = statement.value
            parts = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
            codes |= {p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, int)}
            called = {ast.unparse(p.func) for p in parts if isinstance(p, ast.Call)}
            todo += [c for c in called if c in functions and c not in seen]
    return codes


@BOTH_TREES
def test_every_command_has_its_codes_in_the_table(tree: str) -> None:
    table = {row[0].strip("`"): row[1:] for row in rows(tree, 1)}
    assert list(table) == list(COMMANDS)
    for command, (zero, one, two, printed) in table.items():
        assert zero
        assert one != "–"
        assert printed
        documented = {0, 1} | ({2} if two != "–" else set())
        assert documented == codes_of_the_help(command), command
        assert codes_of_the_code(command) <= documented, command
        assert (2 in codes_of_the_code(command)) == (two != "–"), command


@BOTH_TREES
def test_states_and_kinds_are_those_of_the_code(tree: str) -> None:
    states = list(get_args(doctor.State))
    assert [row[0].strip("`") for row in rows(tree, 2)] == states
    assert [row[2] for row in rows(tree, 2)] == ["1" if state == "wrong" else "0" for state in states]
    kinds = list(get_args(dlinfer_contract.Kind))
    assert [row[0].strip("`") for row in rows(tree, 3)] == kinds


# --- one JSON value, and nothing else on the standard output ----------------------------------------------------------

# Small calls of each command: arguments, exit code, kind of value (None: nothing is printed).
JSON: Final[dict[str, tuple[list[str], int, type | None]]] = {
    "env": (["env"], 0, dict),
    "env --doctor": (["env", "--doctor"], 0, dict),
    "env without a dlinfer": (["env", "--dlinfer", "configs"], 2, None),
    "ops": (["ops"], 0, list),
    "ops of a chip": (["ops", "--soc", "a2"], 0, list),
    "bench without a case": (["bench", "ops", "--family", "conv", "--only", "no such case"], 1, dict),
    "e2e list": (["e2e", "--list"], 0, list),
    "e2e without a scenario": (["e2e", "--config", "no_such"], 2, None),
    "e2e without a model": (["e2e", "--model", "configs"], 2, None),
    "plan": (["plan", "--config", "examples/checkpoints/tiny_qwen3_5", "--drafts", "2", "--batch", "4"], 0, dict),
    "plan that does not fit": (
        ["plan", "--config", "examples/checkpoints/tiny_qwen3_5", "--memory-gib", "0.001", "--reserved-gib", "0"],
        1,
        dict,
    ),
    "plan without a model": (["plan", "--config", "configs"], 2, None),
    "demo without a model": (["demo", "--model", "configs"], 1, None),
    "explain-state of no dump": (["explain-state", "configs/hosts.json"], 2, None),
    "completion": (["completion", "bash"], 0, dict),
}
# Calls that take long: their own tests read the whole of the output as JSON.
ELSEWHERE: Final = {
    "verify": ("tests/cli/test_commands.py", "test_verify_fails_with_a_fault"),
    "demo": ("tests/packaging/test_security.py", "test_demo_runs_nothing_and_asks_nobody"),
    "demo --serve": ("tests/packaging/test_security.py", "test_demo_leaves_a_server_on_loopback_only"),
    "e2e": ("tests/packaging/test_security.py", "test_e2e_runs_nothing_and_asks_nobody"),
}


@pytest.mark.parametrize("call", JSON)
def test_json_is_all_there_is_on_the_standard_output(
    call: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments, code, kind = JSON[call]
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("DLINFER_EXT_VENDOR", "cpu")
    assert main([*arguments, "--json"]) == code
    out, err = capfd.readouterr()
    if kind is None:
        assert out == ""
        assert err  # says why
        return
    value = json.loads(out)  # raises for a second value or a line of text
    assert isinstance(value, kind)


def test_no_command_is_left_out() -> None:
    here = {arguments[0] for arguments, _, _ in JSON.values()}
    assert here | {name.partition(" ")[0] for name in ELSEWHERE} == set(COMMANDS)
    for file, name in ELSEWHERE.values():
        text = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^def test_\w*{name.removeprefix('test_')}", text, re.MULTILINE), f"{file} has no {name}"
        assert "json.loads" in text


def test_a_line_beside_the_json_is_seen(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A negative control: what LMDeploy's logger writes would be on the standard output."""
    from dlinfer_ext.cli import ops

    original: Callable[[Any], int] = ops.run

    def noisy(args: Any) -> int:
        sys.stdout.write("a log line\n")
        return original(args)

    monkeypatch.setattr(ops, "run", noisy)
    main(["ops", "--json"])
    with pytest.raises(json.JSONDecodeError):
        json.loads(capfd.readouterr().out)
