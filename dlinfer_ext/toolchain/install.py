"""Where the Ascend compiler wheels live, and how they come there and into a process.

They are kept out of the Python environment: triton-ascend and ascendnpu-ir install modules that would replace those of
another Triton. A process that needs them puts their folder first on its path.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from .. import envs


def folder() -> Path:
    """Return the folder of the toolchain: DLINFER_EXT_TOOLCHAIN, or one inside this Python environment."""
    given = envs.TOOLCHAIN.get()
    return Path(given).expanduser().absolute() if given else Path(sys.prefix) / "share" / "dlinfer_ext" / "toolchain"


def pins() -> dict[str, str]:
    """Return the version of each distribution wanted, by name."""
    text = files(__package__).joinpath("requirements.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w-]+)==(\S+)", text, re.MULTILINE))


def _installed(where: Path) -> dict[str, str]:
    """Return the version of each distribution in a folder, by name."""
    found = (path.name.removesuffix(".dist-info").rpartition("-") for path in where.glob("*.dist-info"))
    return {name.replace("_", "-").lower(): version for name, _, version in found}


def missing() -> str | None:
    """Return why the toolchain cannot be used here and what brings it, or None."""
    where, have = folder(), _installed(folder())
    wrong = [
        f"{name} {version}" + (f" (there is {have[name]})" if name in have else "")
        for name, version in pins().items()
        if have.get(name) != version
    ]
    if not wrong:
        return None
    return (
        f"the compiler wheels are not in {where}: {', '.join(wrong)} wanted; run `make toolchain` or "
        f"`python -m dlinfer_ext verify --install`, or set {envs.TOOLCHAIN.name}"
    )


def install() -> Path:
    """Install the wheels unless they are there; return their folder.

    They are installed beside the folder and renamed into place, so that an interrupted run leaves nothing half done.

    Raises:
        RuntimeError: pip failed, or the folder holds something that is not ours; the message has pip's words.
    """
    where = folder()
    if missing() is None:
        return where
    if where.exists() and any(where.iterdir()) and not _installed(where):
        raise RuntimeError(
            f"{where} is not empty and holds no packages: set {envs.TOOLCHAIN.name} to a folder of its own"
        )
    where.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".toolchain-", dir=where.parent) as scratch:
        fresh, old = Path(scratch) / "fresh", Path(scratch) / "old"
        wanted = [f"{name}=={version}" for name, version in pins().items()]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
        options = ["--no-deps", "--only-binary=:all:", "--target", str(fresh)]
        done = subprocess.run([*pip, *options, *wanted], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"pip could not install {', '.join(wanted)}: {done.stderr.strip()[-2000:]}")
        if where.exists():
            where.rename(old)
        try:
            fresh.rename(where)
        except OSError:
            # Another process was faster; its folder is as good as ours.
            if missing() is not None:
                raise
    return where


def enter() -> Path:
    """Put the toolchain's folder first on this process's path and return it; call it before `import triton`.

    Raises:
        RuntimeError: the toolchain is missing, or this process has imported another Triton.
    """
    why = missing()
    if why is not None:
        raise RuntimeError(why)
    where = folder()
    loaded = sys.modules.get("triton")
    if loaded is not None:
        origin = Path(getattr(loaded, "__file__", None) or "unknown")
        if not origin.is_relative_to(where) and not origin.resolve().is_relative_to(where.resolve()):
            raise RuntimeError(
                f"this process has already imported another Triton, from {origin}; the toolchain in {where} has to "
                f"come first: run the check in a process of its own, or put {where} on PYTHONPATH"
            )
    if sys.path[:1] != [str(where)]:
        sys.path.insert(0, str(where))
        importlib.invalidate_caches()
    return where


def c_compiler() -> str | None:
    """Return the C compiler that links native kernels: gcc, or what CC names; None if there is none."""
    return shutil.which(os.environ.get("CC", "").strip() or "gcc")
