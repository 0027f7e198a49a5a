"""Two ranks on LMDeploy's Ray executor, each a process that Ray starts: the adapter has to get there by itself.

`make test-ray` runs these and the scenarios `two_ranks_ray` and `lost_rank` with Ray installed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dlinfer_ext.e2e.server import free_port
from tests.e2e import engine
from tests.e2e.checkpoints import checkpoint, random_qwen3_5  # noqa: F401
from tests.e2e.engine import PROMPTS, accepted, assert_identical, expected

pytestmark = [pytest.mark.lmdeploy, pytest.mark.xdist_group("ray")]

HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="ray is not installed: make test-ray")
Checkpoint = Callable[..., Path]
Env = dict[str, str]


def started_with(name: str, value: str) -> list[psutil.Process]:
    """Return this user's processes that have `name=value` in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) == value:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.fixture
def ray_env() -> Iterator[Env]:
    """Give Ray a folder of its own, by which its processes are known: none may outlive the run."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # short: the paths of its sockets have 107 bytes
    yield {
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": "200000000",
    }
    _, left = psutil.wait_procs(started_with("RAY_TMPDIR", folder), timeout=20)
    names = [process.name() for process in left]
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=10)
    shutil.rmtree(folder, ignore_errors=True)
    assert not names, "processes of Ray outlived the run"


def run(model: Path, batches: list[list[str]], env: Env, **options: Any) -> dict[str, Any]:
    """Run a scenario on two ranks that names no executor, and check that every worker ran our operators, ours alone."""
    result = engine.run(model, batches, tp=2, env=env, timeout_s=400, **options)
    assert result["executor"] == "RayExecutor"
    assert "causal_conv1d" not in result["own"]["counters"], "the engine's own process ran the model"
    workers = result["workers"]
    assert len({w["counters"]["pid"] for w in workers} | {result["own"]["pid"]}) == 3
    for worker in workers:
        assert worker["status"]["vendor"] == "cpu"
        applied = {row["hook"] for row in worker["status"]["patches"] if row["state"] == "applied"}
        assert {"H2", "H5", "H8"} <= applied
        assert worker["counters"]["prefill_steps"] > 0
    return result


def test_executor_follows_what_is_installed() -> None:
    """Where ray cannot be imported, two ranks run on LMDeploy's own processes."""
    code = (
        "from lmdeploy.pytorch.engine.executor import get_distributed_executor_backend as get\n"
        "print('EXECUTOR', get(2, 1, 'ascend'))"
    )
    env = {**os.environ, "DLINFER_EXT_VENDOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=180)
    want = "ray" if HAS_RAY else "mp"
    assert f"EXECUTOR {want}" in done.stdout, done.stderr[-3000:]


@needs_ray
def test_speculative_decoding_with_chunks(ray_env: Env, checkpoint: Checkpoint) -> None:  # noqa: F811
    """Also with a device list of the caller's: Ray refuses more NPUs than it names."""
    model = checkpoint(random_qwen3_5)
    env = {**ray_env, "ASCEND_RT_VISIBLE_DEVICES": "0,1"}
    result = run(model, [list(PROMPTS)], env, drafts=3, max_prefill_token_num=32)
    assert_identical(result, expected(model, PROMPTS, 48))
    for worker in result["workers"]:
        assert worker["counters"]["prefill_rows_with_history"] > 0
        assert worker["counters"]["verify_steps"] > 0
    assert accepted(result) > 0


@needs_ray
def test_ray_that_was_running_before(ray_env: Env, checkpoint: Checkpoint) -> None:  # noqa: F811
    """Its environment lacks our settings: the engine hands them to its workers."""
    model = checkpoint(random_qwen3_5)
    address = f"127.0.0.1:{free_port()}"
    options = ["--head", "--block", f"--port={address.split(':')[1]}", "--num-cpus=2", "--include-dashboard=false"]
    options += ['--resources={"NPU": 2}', "--object-store-memory=200000000"]
    line = [sys.executable, "-m", "ray.scripts.scripts", "start", *options]
    cluster = subprocess.Popen(line, env={**os.environ, **ray_env}, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    try:
        result = run(model, [list(PROMPTS)], {**ray_env, "RAY_ADDRESS": address}, tokens=16)
    finally:
        cluster.terminate()
        cluster.wait(timeout=30)
    assert_identical(result, expected(model, PROMPTS, 16))


@needs_ray
def test_too_few_npus_is_an_error(ray_env: Env, checkpoint: Checkpoint) -> None:  # noqa: F811
    """A Ray with fewer NPUs than ranks: LMDeploy would wait 1,800 s."""
    env = {**ray_env, "RAY_OVERRIDE_RESOURCES": '{"NPU": 1}'}
    with pytest.raises(AssertionError, match="Cannot provide a placement group"):
        engine.run(checkpoint(random_qwen3_5), [["x"]], tp=2, tokens=1, env=env, timeout_s=300)
