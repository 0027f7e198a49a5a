"""Run scenarios of the native route in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dlinfer_ext.toolchain import native

ROOT = Path(__file__).resolve().parents[2]
MISSING = native.missing()
needs_native = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def run(names: tuple[str, ...], cache: Path) -> dict[str, Any]:
    """Return what each scenario of `native_scenarios` returned, with Triton's cache in a folder of its own."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "tests.toolchain.native_scenarios", *names]
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    found = [row for row in done.stdout.splitlines() if row.startswith("RESULT ")]
    assert found, f"exit code {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    results: dict[str, Any] = json.loads(found[-1].removeprefix("RESULT "))
    return results
