"""A worker of the mp executor that ends by itself ends the engine; one that was told to does not."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dlinfer_ext.framework.lmdeploy import processes

CONTEXT = multiprocessing.get_context("spawn")


@pytest.fixture
def workers() -> Any:
    found = [CONTEXT.Process(target=time.sleep, args=(60,)) for _ in range(2)]
    for worker in found:
        worker.start()
    yield found
    for worker in found:
        worker.kill()
        worker.join(10)


def test_a_worker_that_is_killed_ends_the_others_and_says_which(workers: list[Any]) -> None:
    told: list[str] = []
    watch = threading.Thread(target=processes.end_with_a_worker, args=(workers, threading.Event(), told.append))
    watch.start()
    os.kill(workers[1].pid, signal.SIGKILL)
    watch.join(10)
    assert told == [f"worker 1 (pid {workers[1].pid}) ended with code -9: this engine cannot go on"]
    workers[0].join(10)
    assert workers[0].exitcode == -signal.SIGKILL


def test_workers_that_are_meant_to_end_end_nothing(workers: list[Any]) -> None:
    told: list[str] = []
    closing = threading.Event()
    watch = threading.Thread(target=processes.end_with_a_worker, args=(workers, closing, told.append))
    watch.start()
    closing.set()
    workers[1].terminate()
    watch.join(10)
    assert not told
    assert workers[0].is_alive()


SCRIPT = """
import multiprocessing, os, sys, time
from types import SimpleNamespace
from multiprocessing import shared_memory
from dlinfer_ext.framework.lmdeploy import processes

class MPExecutor:
    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self.procs = [SimpleNamespace(_proc=context.Process(target=time.sleep, args=(60,))) for _ in range(2)]
        for worker in self.procs:
            worker._proc.start()
        self.comm_buf = SimpleNamespace(shm=shared_memory.SharedMemory(create=True, size=64))
        self.ret_bufs = []
    def release(self):
        for worker in self.procs:
            worker._proc.terminate()
            worker._proc.join()
        self.comm_buf.shm.unlink()

if __name__ == "__main__":
    processes.patch_worker_watch(SimpleNamespace(MPExecutor=MPExecutor))
    executor = MPExecutor()
    print(executor.comm_buf.shm.name, flush=True)
    if sys.argv[1] == "release":
        executor.release()
    else:
        os.kill(executor.procs[0]._proc.pid, 9)
    time.sleep(2 if sys.argv[1] == "release" else 60)
"""


@pytest.mark.parametrize(("how", "code"), [("kill", 1), ("release", 0)])
def test_an_executor_ends_with_a_worker_and_leaves_no_shared_memory(how: str, code: int, tmp_path: Any) -> None:
    script = tmp_path / "engine.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script), how], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert ("worker 0" in done.stderr) == (how == "kill")
    assert not os.path.exists(f"/dev/shm/{done.stdout.strip()}")
    assert done.stdout.strip()


def test_the_patch_says_what_it_is_in_place_of() -> None:
    executor = type("MPExecutor", (), {"release": lambda self: None})
    assert "MPExecutor" in processes.patch_worker_watch(SimpleNamespace(MPExecutor=executor))
