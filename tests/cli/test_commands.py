"""The command line: exit code 0 only if what a command checks holds."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlinfer_ext.cli import bench, demo
from dlinfer_ext.cli.bench_cases import Case
from dlinfer_ext.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_what_it_does_and_when_it_fails(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert COMMANDS[command][1:] in text
    assert "Exit code 1" in text
    assert "--json" in text


def test_env_holds_with_a_vendor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("DLINFER_EXT_VENDOR", "cpu")
    assert main(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["vendor"] == "cpu"
    assert report["seams"]["found"] == report["seams"]["of"] > 0
    assert report["problems"] == []


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("DLINFER_EXT_VENDOR", "", "DLINFER_EXT_VENDOR=cpu"),
        ("DLINFER_EXT_VENDOR", "cuda", "DLINFER_EXT_VENDOR='cuda' is not supported"),
        ("DLINFER_EXT_ROUTE", "fast", "DLINFER_EXT_ROUTE='fast' is not supported"),
    ],
    ids=["no-vendor", "unknown-vendor", "unknown-route"],
)
def test_env_says_what_is_wrong(
    variable: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DLINFER_EXT_VENDOR", "cpu")
    monkeypatch.setenv(variable, value)
    assert main(["env", "--json"]) == 1
    assert says in " ".join(json.loads(capsys.readouterr().out)["problems"])


def test_env_names_a_seam_that_changed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from dlinfer_ext.framework.lmdeploy import contract

    monkeypatch.setenv("DLINFER_EXT_VENDOR", "cpu")
    gone = contract.Seam("H3", "lmdeploy.pytorch.config", "_gone", None, "a test")
    monkeypatch.setattr(contract, "SEAMS", (gone,))
    assert main(["env"]) == 1
    assert "lmdeploy.pytorch.config has no _gone" in capsys.readouterr().out


def test_ops_lists_every_operator_on_both_vendors(capsys: pytest.CaptureFixture[str]) -> None:
    from dlinfer_ext.ops._registry import OPERATORS

    assert main(["ops", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {(r["operator"], r["vendor"]) for r in rows} == {(o, v) for o in OPERATORS for v in ("ascend", "cpu")}


@pytest.mark.parametrize(("soc", "able"), [("a2", {"triton", "eager"}), ("a3", {"triton", "eager"}),
                                           ("a5", {"triton", "eager"}), ("310p", {"eager"})])  # fmt: skip
def test_ops_shows_the_routes_of_a_chip(soc: str, able: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    from dlinfer_ext.ops._registry import OPERATORS

    assert main(["ops", "--soc", soc, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {(r["operator"], r["route"]) for r in rows} == {
        (o, r) for o in OPERATORS for r in ("fused", "triton", "eager")
    }
    assert {r["route"] for r in rows if r["able"]} == able
    assert all(r["note"] for r in rows if not r["able"])


@pytest.mark.parametrize("fault", ["", "taps_in_reverse_order", "recurrent_ring_slot_one_behind"])
def test_verify_fails_with_a_fault(fault: str) -> None:
    plant = f"from tests.faults import plant; plant({fault!r}); " if fault else ""
    code = f"{plant}from dlinfer_ext.cli.main import main; raise SystemExit(main(['verify', '--json']))"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    held = [check["held"] for check in json.loads(done.stdout)]
    assert len(held) > 10
    assert (done.returncode, all(held)) == ((1, False) if fault else (0, True))


@pytest.mark.parametrize(("target", "limit", "code"), [(0.0, 9.0, 0), (1e9, 9.0, 1), (0.0, 0.5, 1)])
def test_bench_fails_where_a_case_misses_a_bound(
    target: float, limit: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing() -> None: ...

    case = Case("a case", nothing, {"plain": nothing}, nothing, target, None, lambda: 1.0, limit)
    monkeypatch.setattr(
        "dlinfer_ext.cli.bench.importlib.import_module", lambda _: SimpleNamespace(cases=lambda: [case])
    )
    assert main_bench(["ops", "--family", "conv", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["cases"][0]["held"] == (code == 0)


def main_bench(arguments: list[str]) -> int:
    """Run `bench` without `main`, which would look its module up through the patched importlib."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(arguments))


@pytest.mark.parametrize(
    ("identical", "accepted", "code"), [(True, 5, 0), (False, 5, 1), (True, 0, 1)], ids=["good", "differs", "no-draft"]
)
def test_demo_fails_on_any_no(
    identical: bool, accepted: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(*_: Any) -> dict[str, Any]:
        return {"token_identical": identical, "accepted": accepted}

    monkeypatch.setattr(demo, "_ask", ask)
    monkeypatch.setattr("dlinfer_ext.e2e.server.serving", lambda *_: nullcontext(SimpleNamespace(url="")))
    assert main(["demo", "--json", "--model", str(ROOT / demo.CHECKPOINTS["qwen"][0])]) == code
    assert json.loads(capsys.readouterr().out)["accepted"] == accepted


def test_demo_names_a_folder_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", str(tmp_path)]) == 1
    assert "holds no config.json" in capsys.readouterr().err


@pytest.mark.parametrize("check", ["--native", "--time", "--count"])
def test_verify_names_a_missing_compiler(
    check: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dlinfer_ext.toolchain.install.missing", lambda: None)
    monkeypatch.setattr("dlinfer_ext.toolchain.install.c_compiler", lambda: None)
    assert main(["verify", check]) == 2
    assert "no C compiler: install gcc" in capsys.readouterr().err


def test_verify_names_missing_wheels_and_what_brings_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DLINFER_EXT_TOOLCHAIN", str(tmp_path))
    assert main(["verify", "--soc", "a2"]) == 2
    assert "run `make toolchain`" in capsys.readouterr().err
