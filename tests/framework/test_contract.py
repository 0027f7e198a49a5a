"""The seams of LMDeploy: found in the installed wheel, and named when they are not as wanted."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import ModuleType

import pytest

from dlinfer_ext.framework.lmdeploy import contract, patches

SEAM_IDS = [f"{s.hook}-{s.name}" for s in contract.SEAMS]


@pytest.mark.parametrize("seam", contract.SEAMS, ids=SEAM_IDS)
def test_seam_is_in_the_installed_wheel(seam: contract.Seam) -> None:
    assert contract.check(seam, contract.host_root()) is None


def test_installed_version_is_one_that_was_tried() -> None:
    assert contract.host_version() in contract.known_hosts()["lmdeploy"]


def _host(tmp_path: Path, source: str) -> Path:
    file = tmp_path / "lmdeploy" / "pytorch" / "config.py"
    file.parent.mkdir(parents=True)
    file.write_text(source)
    return tmp_path


SEAM = contract.Seam("H8", "lmdeploy.pytorch.config", "_update_torch_dtype", ("config", "dtype", "device_type"), "fp32")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def _update_torch_dtype(config, dtype, device_type='auto'): ...", None),
        ("def _update_torch_dtype(config, dtype): ...", "takes (config, dtype); wanted (config, dtype, device_type)"),
        ("def renamed(config, dtype, device_type): ...", "has no _update_torch_dtype"),
    ],
    ids=["fits", "parameter-gone", "renamed"],
)
def test_check_says_what_differs(tmp_path: Path, source: str, says: str | None) -> None:
    why = contract.check(SEAM, _host(tmp_path, source))
    assert (why is None) if says is None else (why is not None and says in why)


def test_check_names_a_module_that_is_gone(tmp_path: Path) -> None:
    assert "module lmdeploy.pytorch.config does not exist" in str(contract.check(SEAM, tmp_path))


def test_check_reads_class_fields_and_star_arguments(tmp_path: Path) -> None:
    root = _host(tmp_path, "class C:\n    a: int\n    def f(self, x, *, y, **kw): ...\n    def g(self, *args): ...\n")
    fields = dataclasses.replace(SEAM, name="C", parameters=("a", "b"))
    assert str(contract.check(fields, root)).endswith("lacks the fields b")
    assert (
        contract.check(dataclasses.replace(SEAM, name="C.f", parameters=("self", "x", "*", "y", "**kw")), root) is None
    )
    assert contract.check(dataclasses.replace(SEAM, name="C.g", parameters=("self", "*args")), root) is None


def test_require_is_fatal_and_names_seam_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = dataclasses.replace(SEAM, name="_gone")
    monkeypatch.setattr(contract, "SEAMS", (gone,))
    with pytest.raises(contract.HostMismatch) as error:
        contract.require(("H8",))
    text = str(error.value)
    assert f"LMDeploy {contract.host_version()}" in text
    assert "has no _gone" in text
    assert "0.18.0" in text
    contract.require(("H2",))  # another hook's seams are not asked for


def test_every_seam_is_asked_for_by_what_rests_on_it() -> None:
    """A seam that nothing requires is not fatal when it changes. H14 is required where graphs are attached."""
    required = {hook for patch in patches.PATCHES for hook in (patch.hook, *patch.needs)} | {"H14"}
    assert {seam.hook for seam in contract.SEAMS} <= required


@pytest.mark.parametrize("hook", ["H2", "H3", "H4"])
def test_a_backend_that_lacks_a_seam_is_not_put_in(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "SEAMS", (dataclasses.replace(SEAM, hook=hook, name="_gone"),))
    (backend,) = (patch for patch in patches.PATCHES if patch.hook == "H2")
    module = ModuleType("ascend")
    with pytest.raises(contract.HostMismatch, match="has no _gone"):
        patches._apply(backend, module)
    assert not hasattr(module, "AscendOpsBackend")
