"""What LMDeploy's mp executor needs on a CPU: closing ends, whatever became of the workers."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from typing import Any

import pytest
from lmdeploy.pytorch.engine.executor import mp_executor

from dlinfer_ext.framework.lmdeploy import cpu_host


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patch, with a short bound, on the installed LMDeploy for the length of a test."""
    monkeypatch.setattr(cpu_host, "SHUTDOWN_S", 0.5)
    for owner, name in (
        (mp_executor.Notifier, "wait_async"),
        (mp_executor.Notifier, "close"),
        (mp_executor.ExecutorProc, "join"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back afterwards
    cpu_host.patch_notifier(mp_executor)


def notifier_with_a_sleeper_that_is_gone() -> Any:
    context: Any = multiprocessing.get_context("fork")
    notifier = mp_executor.Notifier(1, context)
    sleeper = context.Process(target=notifier.events[0].wait)
    sleeper.start()
    time.sleep(0.5)
    sleeper.kill()
    sleeper.join()
    return notifier


def test_lmdeploys_own_close_waits_for_good() -> None:
    """The fault that the bound is for; if this fails, LMDeploy or Python mended it and the patch may go."""
    notifier = notifier_with_a_sleeper_that_is_gone()
    closing = threading.Thread(target=notifier.close, daemon=True)
    closing.start()
    closing.join(2)
    assert closing.is_alive()


@pytest.mark.usefixtures("bounded")
def test_close_ends_though_a_sleeper_is_gone() -> None:
    notifier = notifier_with_a_sleeper_that_is_gone()
    started = time.monotonic()
    notifier.close()
    assert time.monotonic() - started < 5


@pytest.mark.usefixtures("bounded")
def test_close_still_wakes_those_who_sleep() -> None:
    context: Any = multiprocessing.get_context("fork")
    notifier = mp_executor.Notifier(1, context)
    sleeper = context.Process(target=notifier.events[3].wait)
    sleeper.start()
    time.sleep(0.3)
    notifier.close()
    sleeper.join(5)
    assert sleeper.exitcode == 0


def deaf() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


@pytest.mark.usefixtures("bounded")
def test_a_worker_that_does_not_end_is_ended() -> None:
    context: Any = multiprocessing.get_context("fork")
    worker = mp_executor.ExecutorProc(0, context)
    worker.join()  # never started
    worker._proc = context.Process(target=deaf)
    worker._proc.start()
    time.sleep(0.3)
    worker.close()
    started = time.monotonic()
    worker.join()
    assert time.monotonic() - started < 10
    assert worker._proc.exitcode == -signal.SIGKILL
