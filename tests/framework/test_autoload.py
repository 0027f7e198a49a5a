"""How the adapter reaches a process: by `import torch` alone, lazily, and never to the CPU by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MODULES = "[m for m in sys.modules if m.split('.')[0] in ('lmdeploy', 'dlinfer')]"


def python(code: str, tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, away from the source tree."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DLINFER_EXT_")}
    return subprocess.run(
        [sys.executable, "-c", code], env={**clean, **env}, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )


def test_import_torch_hooks_and_loads_nothing(tmp_path: Path) -> None:
    out = python(
        f"import sys, torch; print('dlinfer_ext.framework.lmdeploy.autoload' in sys.modules, {MODULES}, "
        "'dlinfer_ext.framework.lmdeploy.patches' in sys.modules, torch.empty.__name__, torch.cuda.Stream.__module__)",
        tmp_path,
        DLINFER_EXT_VENDOR="cpu",
    )
    assert out.stdout.split() == ["True", "[]", "False", "empty", "torch.cuda.streams"], out.stderr


def test_autoload_can_be_turned_off(tmp_path: Path) -> None:
    code = (
        "import torch, sys, lmdeploy; from dlinfer_ext.framework.lmdeploy import status; "
        "print(status()['vendor'], torch.cuda.Stream.__module__)"
    )
    off = python(code, tmp_path, DLINFER_EXT_VENDOR="cpu", DLINFER_EXT_AUTOLOAD="0")
    assert off.stdout.split() == ["None", "torch.cuda.streams"], off.stderr
    on = python(code, tmp_path, DLINFER_EXT_VENDOR="cpu")
    assert on.stdout.split() == ["cpu", "dlinfer_ext.vendor.cpu.cuda_names"], on.stderr


BACKEND = "import torch; from lmdeploy.pytorch.backends import get_backend; print(get_backend('ascend').__name__)"


def test_cpu_vendor_answers_for_the_ascend_backend(tmp_path: Path) -> None:
    out = python(BACKEND, tmp_path, DLINFER_EXT_VENDOR="cpu")
    assert out.stdout.strip() == "CpuOpsBackend", out.stderr


def test_no_vendor_says_what_to_set_and_never_takes_the_cpu(tmp_path: Path) -> None:
    out = python(BACKEND, tmp_path)
    assert out.returncode != 0
    assert "DLINFER_EXT_VENDOR=cpu" in out.stderr
    assert "CpuOpsBackend" not in out.stdout


def test_a_vendor_installed_after_the_import_is_served(tmp_path: Path) -> None:
    later = "import torch, lmdeploy; from dlinfer_ext.framework.lmdeploy import install; install('cpu'); "
    out = python(later + BACKEND, tmp_path)
    assert out.stdout.strip() == "CpuOpsBackend", out.stderr


def test_no_vendor_through_pipeline_names_the_setting(tmp_path: Path) -> None:
    """LMDeploy's own start-up logs the error of `import dlinfer` and exits."""
    out = python("from lmdeploy.utils import try_import_deeplink; try_import_deeplink('ascend')", tmp_path)
    assert out.returncode == 1
    assert "DLINFER_EXT_VENDOR=cpu" in out.stdout + out.stderr


def test_unknown_vendor_is_refused(tmp_path: Path) -> None:
    out = python("import torch, lmdeploy", tmp_path, DLINFER_EXT_VENDOR="cuda")
    assert out.returncode != 0
    assert "DLINFER_EXT_VENDOR='cuda' is not supported" in out.stderr


CHILD = """
import multiprocessing, sys
def child(queue):
    import torch
    from lmdeploy.pytorch.backends import get_backend
    queue.put((get_backend('ascend').__name__, multiprocessing.current_process().name))
if __name__ == '__main__':
    context = multiprocessing.get_context('spawn')
    queue = context.Queue()
    p = context.Process(target=child, args=(queue,), name='worker')
    p.start(); print(*queue.get(timeout=90)); p.join(30)
"""


def test_a_spawned_process_is_reached_too(tmp_path: Path) -> None:
    script = tmp_path / "user_script.py"
    script.write_text(CHILD)
    env = {k: v for k, v in os.environ.items() if not k.startswith("DLINFER_EXT_")} | {"DLINFER_EXT_VENDOR": "cpu"}
    out = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=120)
    assert out.stdout.split() == ["CpuOpsBackend", "worker"], out.stderr


def test_install_is_idempotent_and_status_tells(tmp_path: Path) -> None:
    out = python(
        "import torch, json, lmdeploy\n"
        "from dlinfer_ext.framework.lmdeploy import install, status\n"
        "install(); install('cpu')\n"
        "from lmdeploy.pytorch.backends import get_backend; get_backend('ascend')\n"
        "import lmdeploy.pytorch.configurations, lmdeploy.pytorch.models.qwen3_next\n"
        "print(json.dumps(status()))\n"
        "try: install('ascend')\n"
        "except RuntimeError as e: print(e)\n",
        tmp_path,
        DLINFER_EXT_VENDOR="cpu",
    )
    first, second = out.stdout.strip().splitlines()
    status = json.loads(first)
    states = {(p["hook"], p["module"].rsplit(".", 1)[-1]): p["state"] for p in status["patches"]}
    assert status["vendor"] == "cpu"
    for key in (("H2", "ascend"), ("H9", "qwen3_5"), ("H9", "qwen3_next"), ("H8", "config"), ("H5", "qwen3_next")):
        assert states[key] == "applied", states
    assert all(p["why"] and p["until"] for p in status["patches"])
    assert "vendor cpu is installed" in second


@pytest.mark.parametrize("broken", ["wrapt"])
def test_a_broken_environment_never_breaks_import_torch(tmp_path: Path, broken: str) -> None:
    (tmp_path / f"{broken}.py").write_text("raise ImportError('broken on purpose')")
    out = python("import torch; print(torch.zeros(1).item())", tmp_path)
    assert out.stdout.strip() == "0.0", out.stderr
    assert "could not hook LMDeploy" in out.stderr
