"""The doctor: what does not go together is named with its fix, and nothing else is."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlinfer_ext.cli import cann, doctor, stacks
from dlinfer_ext.cli.doctor import Facts, Finding, examine
from dlinfer_ext.cli.main import main
from dlinfer_ext.cli.stacks import Component

A3: dict[Component, str | None] = {
    "lmdeploy": "0.18.0",
    "python": "3.11.9",
    "torch": "2.9.0+cpu",
    "transformers": "5.24.0",
    "torch_npu": "2.9.0",
    "triton-ascend": "3.2.0",
    "cann": "8.5.0",
    "dlinfer-ascend": "0.3.0",
}
CPU: dict[Component, str | None] = dict.fromkeys(A3) | {
    "lmdeploy": "0.18.0",
    "python": "3.11.7",
    "torch": "2.13.0+cpu",
    "transformers": "5.24.0",
}


def found(facts: Facts) -> dict[str, Finding]:
    findings = examine(facts, stacks.load())
    assert len({f.component for f in findings}) == len(findings)
    return {f.component: f for f in findings}


def wrong(facts: Facts) -> set[str]:
    return {name for name, f in found(facts).items() if f.state != "fits"}


def card(machine: str | None = "a3", **changed: Any) -> Facts:
    return Facts("ascend", machine, A3 | {k.replace("__", "-"): v for k, v in changed.items()})  # type: ignore[arg-type]


@pytest.mark.parametrize("machine", ["a2", "a3", "a5", None])
def test_a_machine_as_in_the_table_has_nothing_to_mend(machine: str | None) -> None:
    assert wrong(card(machine)) == ({"SoC"} if machine is None else set())


def test_a_cpu_as_in_the_table_has_nothing_to_mend() -> None:
    assert wrong(Facts("cpu", "cpu", CPU)) == set()
    # What a card needs is not asked for.
    assert set(found(Facts("cpu", "cpu", CPU))) == {"lmdeploy", "python", "torch", "transformers"}


@pytest.mark.parametrize(
    ("component", "version", "state", "fix"),
    [
        ("lmdeploy", "0.17.0", "untried", "pip install --no-deps lmdeploy==0.18.0"),
        ("lmdeploy", None, "wrong", "pip install --no-deps lmdeploy==0.18.0"),
        ("torch", None, "wrong", "pip install --no-deps torch==2.9.0"),
        ("torch_npu", None, "wrong", "pip install --no-deps torch-npu==2.9.0"),
        ("triton-ascend", None, "missing", "pip install --no-deps triton-ascend==3.2.0"),
        ("triton-ascend", "3.2.0rc4", "untried", "pip install --no-deps triton-ascend==3.2.0"),
        ("cann", None, "wrong", "ASCEND_HOME_PATH"),
        ("cann", "8.3.RC1", "untried", "install CANN 8.5.0"),
        ("cann", "8.0.RC3.20", "untried", "install CANN 8.5.0"),  # no version of PEP 440
        ("dlinfer-ascend", None, "wrong", "env --dlinfer PATH"),
        ("dlinfer-ascend", "0.2.8", "wrong", "install a dlinfer that has both"),
        ("dlinfer-ascend", "0.2.5", "wrong", "DLINFER_EXT_VENDOR=cpu"),
        ("transformers", "4.57.0", "untried", "pip install --no-deps transformers==5.24.0"),
        ("transformers", None, "missing", "pip install --no-deps transformers==5.24.0"),
        ("python", "3.12.1", "untried", "python3.11 -m venv"),
    ],
)
def test_each_component_is_named_with_its_fix(component: Component, version: str | None, state: str, fix: str) -> None:
    finding = found(replace(card(), versions=A3 | {component: version}))[component]
    assert (finding.state, finding.found) == (state, version)
    assert fix in finding.fix
    assert finding.why
    assert finding.component in finding.line()
    assert finding.fix in finding.line()


def test_no_dlinfer_release_fits_and_the_doctor_says_why() -> None:
    finding = found(card(dlinfer__ascend="0.2.8"))["dlinfer-ascend"]
    assert "is_mla" in finding.why
    assert "no dlinfer release fits LMDeploy 0.18" in finding.why
    # Beside an older LMDeploy it is not known to be wrong.
    assert found(card(dlinfer__ascend="0.2.8", lmdeploy="0.16.0"))["dlinfer-ascend"].state == "untried"


def test_torch_npu_beside_another_torch_is_wrong() -> None:
    assert found(card(torch="2.8.0"))["torch_npu with torch"].fix == "pip install --no-deps torch==2.9.0"
    assert "torch_npu with torch" not in found(card(torch="2.9.0+cpu", torch_npu="2.9.0.post2"))


def test_torch_npu_beside_another_cann_is_named() -> None:
    finding = found(card(torch_npu="2.9.0.post2"))["torch_npu with CANN"]
    assert (finding.found, finding.wanted) == ("2.9.0.post2 with 8.5.0", "CANN ==9.0.0")
    assert "torch_npu with CANN" not in found(card(torch_npu="2.9.0.post2", cann="9.0.0"))


def test_two_packages_with_the_module_triton_are_wrong() -> None:
    finding = found(replace(card(), also=frozenset({"triton"})))["triton with triton-ascend"]
    assert finding.fix.startswith("pip uninstall -y triton && ")
    assert "triton with triton-ascend" not in found(replace(card(triton__ascend=None), also=frozenset({"triton"})))


def test_a_chip_without_kernels_is_named() -> None:
    finding = found(card("310p"))["SoC"]
    assert (finding.state, finding.found) == ("untried", "310p")
    assert "batched PyTorch form" in finding.why


@pytest.mark.parametrize(
    ("file", "text", "version"),
    [
        ("version.cfg", "# version: 1.0\nruntime_running_version=[7.7.0.1.238:8.3.RC1]\n", "8.3.RC1"),
        ("aarch64-linux/ascend_toolkit_install.info", "package_name=Ascend-cann-toolkit\nversion=8.5.0\n", "8.5.0"),
        ("aarch64-linux/ascend_toolkit_install.info", "version=8.1.RC1.alpha001\narch=aarch64\n", "8.1.RC1.alpha001"),
        ("compiler/version.info", "Version=7.7.0.1.238\nversion_dir=8.3.RC1\n", "8.3.RC1"),
        ("share/info/runtime/version.info", "Version=8.5.0\nversion_dir=cann-8.5.0\n", "8.5.0"),
        ("opp/version.info", "Version=7.7.0.1.238\n", None),  # a component's version is not CANN's
        ("version.cfg", "", None),
        ("version.cfg", "\x00\xff", None),
    ],
)
def test_cann_is_read_from_the_files_it_leaves(file: str, text: str, version: str | None, tmp_path: Path) -> None:
    place = tmp_path / file
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text, encoding="latin-1")
    got = cann.find({"ASCEND_HOME_PATH": str(tmp_path)})
    assert got is not None
    assert (got.version, got.file) == (version, str(place) if version else None)


def test_a_large_file_is_no_version_file(tmp_path: Path) -> None:
    (tmp_path / "version.cfg").write_text("version=8.5.0\n" + " " * (1 << 20))
    got = cann.find({"ASCEND_HOME_PATH": str(tmp_path)})
    assert got is not None
    assert got.version is None


def test_the_variable_wins_over_the_usual_place(tmp_path: Path) -> None:
    usual = tmp_path / "usual"
    usual.mkdir()
    (usual / "version.cfg").write_text("version=8.5.0\n")
    by_place = cann.find({}, (str(tmp_path / "none"), str(usual)))
    assert by_place is not None
    assert by_place.version == "8.5.0"
    named = cann.find({"ASCEND_TOOLKIT_HOME": str(tmp_path / "gone")}, (str(usual),))
    assert named == cann.Cann(str(tmp_path / "gone"), None, None)
    assert cann.find({}, ()) is None


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["env", "--json", *arguments])
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, record


def test_env_shows_the_doctor_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DLINFER_EXT_VENDOR", "cpu")
    code, record = report(capsys)
    assert code == 0
    assert record["doctor"]["machine"] == "cpu"
    assert {f["state"] for f in record["doctor"]["findings"]} == {"fits"}
    assert main(["env"]) == 0
    assert "doctor (cpu): lmdeploy, python, torch, transformers as in the table" in capsys.readouterr().out
    assert main(["env", "--doctor"]) == 0
    out = capsys.readouterr().out
    assert "doctor: torch 2.13.0+cpu: fits" in out or "doctor: torch 2.13.0: fits" in out
    assert out.endswith("no problems\n")


def test_another_version_is_shown_and_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DLINFER_EXT_VENDOR", "cpu")
    versions = {"transformers": "4.57.0", "torch": "2.13.0", "lmdeploy": "0.18.0"}
    monkeypatch.setattr("dlinfer_ext.cli.env._version", versions.get)
    code, record = report(capsys)
    states = {f["component"]: f["state"] for f in record["doctor"]["findings"]}
    assert states["transformers"] == "untried"
    assert (code, record["problems"]) == (0, [])


def test_a_card_without_what_it_needs_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DLINFER_EXT_VENDOR", "ascend")
    monkeypatch.setenv("ASCEND_HOME_PATH", "/nowhere")
    code, record = report(capsys)
    assert code == 1
    for component in ("torch_npu", "cann", "dlinfer-ascend"):
        assert any(p.startswith(f"{component} not found: wrong") for p in record["problems"])
    assert main(["env", "--doctor"]) == 1
    assert "source: https://" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "version", "state"), [("8.5.0", "8.5.0", "fits"), ("?", "unknown", "untried")])
def test_a_cann_on_disk_is_compared(
    text: str,
    version: str,
    state: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "version.cfg").write_text(f"toolkit_running_version=[7.7.0.1.238:{text}]\n")
    monkeypatch.setenv("DLINFER_EXT_VENDOR", "ascend")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    _, record = report(capsys)
    assert record["cann"]["folder"] == str(tmp_path)
    (finding,) = (f for f in record["doctor"]["findings"] if f["component"] == "cann")
    assert (finding["found"], finding["state"]) == (version, state)


def test_without_what_reads_the_table_env_still_reports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DLINFER_EXT_VENDOR", "cpu")
    for name in ("doctor", "stacks"):
        monkeypatch.delitem(sys.modules, f"dlinfer_ext.cli.{name}")
        monkeypatch.delattr(f"dlinfer_ext.cli.{name}")
    monkeypatch.setitem(sys.modules, "pydantic", None)
    code, record = report(capsys)
    assert (code, record["vendor"]) == (1, "cpu")
    assert record["problems"] == [
        "pydantic is not installed, so versions were not compared: pip install packaging pydantic"
    ]
    assert main(["env"]) == 1
    assert main(["env", "--doctor"]) == 1


def test_every_component_of_the_table_is_looked_at() -> None:
    assert set(doctor.COMPONENTS) == set(A3)
