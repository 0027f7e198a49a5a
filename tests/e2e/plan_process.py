"""`plan` in a process of its own: it hooks LMDeploy, which the tests' own process keeps as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from dlinfer_ext.framework.lmdeploy.plan import Card, Pool

ROOT = Path(__file__).parents[2]
GIB = 2**30


def ask(config: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command; its exit code and what it wrote."""
    line = [sys.executable, "-m", "dlinfer_ext", "plan", "--config", str(config), *arguments]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DLINFER_EXT_", "LMDEPLOY_"))}
    clean |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **env}
    return subprocess.run(line, cwd=ROOT, env=clean, capture_output=True, text=True, timeout=120)


def report(config: Path, *arguments: str, **env: str) -> dict[str, Any]:
    done = ask(config, "--json", *arguments, **env)
    assert done.returncode in (0, 1), done.stdout[-2000:] + done.stderr[-4000:]
    read: dict[str, Any] = json.loads(done.stdout)
    return read


def planned(config: Path, *, memory: int, **settings: Any) -> Card:
    """Return the card of the command's report for `memory` bytes, none of them reserved, without a vision part."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    card = report(
        config,
        f"--memory-gib={memory / GIB!r}",
        "--reserved-gib=0",
        "--language-model-only",
        *options,
        DLINFER_EXT_CPU_DTYPE="float32",
    )["card"]
    states = tuple(Pool(**(pool | {"shape": tuple(pool["shape"])})) for pool in card["states"])
    return Card(**({k: v for k, v in card.items() if k != "tokens"} | {"states": states}))
