"""What is installed, what importing does, and which room may import which."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "dlinfer_ext"
# A room may import those to its left and itself.
ROOMS = ("kernels", "targets", "ops", "toolchain", "vendor", "framework", "e2e", "cli")
SHARED = ("envs", "version", "testing", "forms")  # beside the rooms; what they import is checked like the lowest room


def run(code: str, *, cwd: Path, path: list[Path] | None = None, python: str = sys.executable) -> str:
    """Run Python code in a fresh process that sees no directory of this checkout by itself."""
    settings = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(map(str, path or []))}
    done = subprocess.run([python, "-c", code], cwd=cwd, env=settings, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def command(*arguments: object, cwd: Path) -> None:
    done = subprocess.run([*map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


# --- wheel, sdist, editable install -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build needs, symlinks kept, so that nothing is written into the checkout."""
    copy = tmp_path_factory.mktemp("source") / "checkout"
    copy.mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    for name in ("dlinfer_ext", "kernels", "configs", "tests"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(out)!r})"
    command(sys.executable, "-c", build, cwd=source)
    (archive,) = out.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from the sdist, so that what the sdist lacks the wheel lacks."""
    out = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    command(*pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", out, sdist, cwd=out)
    (archive,) = out.glob("*.whl")
    return archive


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds the wheel's content and nothing else."""
    target = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def shipped(*suffixes: str) -> set[str]:
    """Return the files of the checkout that a wheel must hold, as paths inside it."""
    found = set()
    for folder, prefix in (
        (PACKAGE, "dlinfer_ext"),
        (ROOT / "kernels", "dlinfer_ext/kernels"),
        (ROOT / "configs", "dlinfer_ext/configs"),
    ):
        for file in folder.rglob("*"):
            inside = file.relative_to(folder)
            # Before Python 3.13 rglob does not go through the two links; later versions would list their files twice.
            linked = prefix == "dlinfer_ext" and inside.parts[0] in ("kernels", "configs")
            if file.is_file() and file.suffix in suffixes and not linked and "__pycache__" not in inside.parts:
                found.add(f"{prefix}/{inside.as_posix()}")
    return found


def test_the_wheel_holds_kernels_and_configs_inside_the_package_only(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert shipped(".py", ".json", ".yaml") | {"dlinfer_ext/py.typed"} <= names
    top = {name.partition("/")[0] for name in names}
    assert {t for t in top if not t.endswith(".dist-info")} == {"dlinfer_ext"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_sdist_holds_kernels_and_configs_inside_the_package_only(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert shipped(".py", ".json", ".yaml") | {"dlinfer_ext/py.typed", "LICENSE", "README.md", "setup.py"} <= names
    assert not {"kernels", "configs", "tests"} & {name.partition("/")[0] for name in names}


def test_the_wheel_declares_how_it_is_loaded(installed: Path) -> None:
    (entry_points,) = installed.glob("*.dist-info/entry_points.txt")
    text = entry_points.read_text()
    assert "[torch.backends]\ndlinfer_ext = dlinfer_ext.framework.lmdeploy.autoload:register" in text
    assert "dlinfer-ext = dlinfer_ext.cli.main:main" in text


USE = """
import importlib.util, json, pathlib, torch, dlinfer_ext, dlinfer_ext.configs
from dlinfer_ext.ops import gated_rms_norm
value = gated_rms_norm(torch.tensor([[3.0, 4.0]]), None, torch.ones(2), eps=0.0)[0, 0].item()
spec = importlib.util.find_spec("kernels")
data = sorted(p.name for root in dlinfer_ext.configs.__path__ for p in pathlib.Path(root).rglob("*.json"))
print(json.dumps([dlinfer_ext.__file__, value, spec is None or spec.origin, data]))
"""


FIND = """
import json, dlinfer_ext
from importlib.util import find_spec
ours, theirs = find_spec("dlinfer_ext.kernels.gated_rms_norm.eager"), find_spec("kernels")
print(json.dumps([dlinfer_ext.__file__, ours.origin, theirs and theirs.origin]))
"""


def test_the_installed_wheel_works_and_claims_no_top_level_kernels(installed: Path, tmp_path: Path) -> None:
    file, value, kernels, data = json.loads(run(USE, cwd=tmp_path, path=[installed]))
    assert Path(file).is_relative_to(installed)
    assert value == pytest.approx(0.8485281)
    assert kernels is True or Path(kernels).is_relative_to(sysconfig.get_paths()["purelib"])
    assert data == sorted(f.name for f in (ROOT / "configs").rglob("*.json"))


@pytest.mark.parametrize("mode", ["lenient", "strict"])
def test_an_editable_install_works_and_finds_new_kernels(mode: str, source: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    command(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    # The packages that run these tests, without a second installation of this one: .pth files are not followed twice.
    (environment / "lib" / version / "site-packages" / "host.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    checkout = tmp_path / "checkout"
    shutil.copytree(source, checkout, symlinks=True, ignore=shutil.ignore_patterns("*.egg-info", "build"))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--config-settings", f"editable_mode={mode}")
    command(*pip, "install", *options, "-e", checkout, cwd=tmp_path)
    file, ours, theirs = json.loads(run(FIND, cwd=tmp_path, python=str(python)))
    assert Path(file).is_relative_to(checkout)
    assert Path(ours).is_relative_to(checkout)
    assert theirs is None  # no such package, or a namespace portion, which any real one overrides
    if mode == "lenient":
        (checkout / "kernels" / "another").mkdir()
        (checkout / "kernels" / "another" / "eager.py").write_text("VALUE = 7\n")
        code = "from dlinfer_ext.kernels.another.eager import VALUE; print(VALUE)"
        assert run(code, cwd=tmp_path, python=str(python)) == "7"


def test_another_distribution_called_kernels_wins(tmp_path: Path) -> None:
    """The checkout comes first on the path, as under `python -m pytest`; its folder is only a namespace portion."""
    other = tmp_path / "site"
    (other / "kernels").mkdir(parents=True)
    (other / "kernels" / "__init__.py").write_text("NAME = 'the other one'\n")
    assert run("import kernels; print(kernels.NAME)", cwd=tmp_path, path=[ROOT, other]) == "the other one"
    _, ours, theirs = json.loads(run(FIND, cwd=tmp_path, path=[ROOT, other]))
    assert Path(ours).resolve() == ROOT / "kernels" / "gated_rms_norm" / "eager.py"
    assert Path(theirs) == other / "kernels" / "__init__.py"


def test_the_checkout_works_without_installation(tmp_path: Path) -> None:
    file, value, _, _ = json.loads(run(USE, cwd=tmp_path, path=[ROOT]))
    assert Path(file) == PACKAGE / "__init__.py"
    assert value == pytest.approx(0.8485281)


def test_the_mounts_are_relative_links() -> None:
    for name in ("kernels", "configs"):
        assert (PACKAGE / name).readlink() == Path("..") / name
        assert not (ROOT / name / "__init__.py").exists()


# --- importing changes nothing ----------------------------------------------------------------------------------------


def test_importing_the_package_imports_no_torch_and_no_engine(tmp_path: Path) -> None:
    code = (
        "import sys; before = set(sys.modules); import dlinfer_ext\n"
        "print(sorted({m.partition('.')[0] for m in set(sys.modules) - before} - sys.stdlib_module_names))"
    )
    assert run(code, cwd=tmp_path, path=[ROOT]) == "['dlinfer_ext']"


UNCHANGED = """
import os, sys, types, warnings
import torch, torch.nn.functional
WATCHED = [torch, torch.Tensor, torch.nn.functional, torch.cuda, torch.backends, torch.distributed, torch.library]
def state():
    # Submodules are left out: any import may bind one to its parent.
    names = {(w.__name__, n): id(v) for w in WATCHED for n, v in vars(w).items() if not isinstance(v, types.ModuleType)}
    settings = torch.get_num_threads(), torch.get_default_dtype(), sys.path[:], list(warnings.filters)
    return names, dict(os.environ), settings
before = state()
import dlinfer_ext.ops, dlinfer_ext.vendor.ascend.triton_ops
import dlinfer_ext.vendor.cpu.bindings, dlinfer_ext.vendor.ascend.bindings
import dlinfer_ext.testing, dlinfer_ext.envs
after = state()
changed = [k for k, v in before[0].items() if after[0].get(k) != v] + [k for k in after[0] if k not in before[0]]
print(changed, before[1:] == after[1:], [m for m in ("lmdeploy", "dlinfer", "triton", "torch_npu") if m in sys.modules])
"""


def test_importing_the_operators_changes_nothing_in_the_world(tmp_path: Path) -> None:
    assert run(UNCHANGED, cwd=tmp_path, path=[ROOT]) == "[] True []"


# --- who imports whom -------------------------------------------------------------------------------------------------


def sources(*folders: Path) -> list[Path]:
    return sorted(f for folder in folders for f in folder.rglob("*.py") if "__pycache__" not in f.parts)


def imports(file: Path, module: str) -> Iterator[str]:
    """Yield the absolute name of everything that a file imports; `module` is the file's own name."""
    parts = module.split(".")
    package = parts if file.name == "__init__.py" else parts[:-1]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{start}.{alias.name}" for alias in node.names)


def module_name(file: Path) -> str:
    inside = ("dlinfer_ext", *file.relative_to(ROOT).parts) if file.is_relative_to(ROOT / "kernels") else None
    parts = inside or file.relative_to(ROOT).parts
    name = ".".join(parts).removesuffix(".py")
    return name.removesuffix(".__init__")


def all_imports() -> list[tuple[str, str]]:
    files = [f for f in sources(PACKAGE) if not {"kernels", "configs"} & set(f.relative_to(PACKAGE).parts[:1])]
    return [(module_name(f), name) for f in files + sources(ROOT / "kernels") for name in imports(f, module_name(f))]


IMPORTS = all_imports()


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def test_kernels_import_torch_and_triton_only() -> None:
    outside = {
        (importer, name)
        for importer, name in IMPORTS
        if room(importer) == "kernels"
        and not name.startswith("dlinfer_ext.kernels.")
        and name.partition(".")[0] not in {*sys.stdlib_module_names, "torch", "triton"}
    }
    assert outside == set()


def test_kernels_import_each_other_relatively() -> None:
    absolute = [
        (f.name, node.lineno)
        for f in sources(ROOT / "kernels")
        for node in ast.walk(ast.parse(f.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("dlinfer_ext", "kernels")
    ]
    assert absolute == []


def test_kernels_read_no_environment() -> None:
    assert not [i for i in IMPORTS if room(i[0]) == "kernels" and i[1].partition(".")[0] in ("os", "subprocess")]


def test_only_the_adapter_imports_the_engine() -> None:
    engines = {
        importer
        for importer, name in IMPORTS
        if name.partition(".")[0] == "lmdeploy" and not importer.startswith("dlinfer_ext.framework.lmdeploy")
    }
    assert engines == set()


def test_imports_go_one_way() -> None:
    upward = set()
    for importer, name in IMPORTS:
        if not name.startswith("dlinfer_ext.") or importer == "dlinfer_ext.__main__":
            continue
        source, target = room(importer), room(name)
        if target in SHARED or target.startswith("__"):
            # Kernels take nothing from the package, not even its settings.
            if source == "kernels":
                upward.add((importer, name))
        elif target not in ROOMS or source not in ROOMS or ROOMS.index(target) > ROOMS.index(source):
            upward.add((importer, name))
    assert upward == set()


def test_the_scan_sees_every_kind_of_import(tmp_path: Path) -> None:
    """The checks above hold nothing if names are resolved wrongly."""
    file = tmp_path / "eager.py"
    file.write_text(
        "import os.path\nfrom ..common.index import a\nfrom . import b\nfrom ...ops import c\nfrom x import d\n"
    )
    assert list(imports(file, "dlinfer_ext.kernels.op.eager")) == [
        "os.path",
        "dlinfer_ext.kernels.common.index.a",
        "dlinfer_ext.kernels.op.b",
        "dlinfer_ext.ops.c",
        "x.d",
    ]
    assert ("dlinfer_ext.ops.gated_rms_norm", "dlinfer_ext.ops._registry.Operator") in IMPORTS
    assert ("dlinfer_ext.kernels.rejection_sampling.eager", "dlinfer_ext.kernels.common.random.philox") in IMPORTS
