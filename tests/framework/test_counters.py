"""The record of a process: nothing is read or kept unless it is asked for, and what is written is complete."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlinfer_ext import envs
from dlinfer_ext.framework.lmdeploy import counters
from dlinfer_ext.framework.lmdeploy.rejection_sampling import RejectionSampling
from dlinfer_ext.testing import HostRead, no_host_reads

DRAFT = torch.tensor([[4, 5], [4, 9], [9, 5]])
TARGET = torch.tensor([[4, 5, 6], [4, 5, 6], [4, 5, 6]])


@pytest.fixture(autouse=True)
def _no_counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(counters, "_writer", os.getpid())  # this process is to write nothing at its end
    counters.reset()
    yield
    counters.reset()


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(envs.COUNTERS.name, str(tmp_path))
    return tmp_path


def step(slots: list[int], histories: list[int], decoding: bool = True) -> None:
    meta: Any = SimpleNamespace(
        is_decoding=decoding,
        state_indices=torch.tensor(slots),
        history_lens=torch.tensor(histories),
        host_lengths=None,
    )
    counters.count_step(meta, SimpleNamespace(is_multi_token_decoding=decoding, kv_seqlens_cpu=None))


def test_rows_of_a_verify_step(asked: Path) -> None:
    step([3, -1, 1, -1], [7, 0, 12, 0])  # the second row is padded, as is the fourth, which the sampler does not get
    RejectionSampling().forward_greedy(TARGET, DRAFT)
    step([3], [10])
    RejectionSampling().forward_greedy(TARGET[:1], DRAFT[:1])
    record = counters.record()
    assert record["verify_rows"] == [[3, 7, 2, 6], [1, 12, 0, 4], [3, 10, 2, 6]]
    assert record["counters"]["verify_steps"] == 2
    assert (record["pid"], record["rank"], record["dropped_rows"]) == (os.getpid(), 0, 0)


def test_sampled_rows_are_recorded(asked: Path) -> None:
    step([3], [7])
    sure = torch.full((1, 2, 10), -torch.inf)
    sure[0, 0, 4] = sure[0, 1, 5] = 0
    RejectionSampling().forward(sure, DRAFT[1:2], torch.tensor([6]), is_greedy=None)
    assert counters.record()["verify_rows"] == [[3, 7, 1, 5]]


def test_nothing_is_read_or_kept_unless_asked() -> None:
    with no_host_reads():
        step([3, 1, 2], [7, 12, 1])
        assert counters._step is None
        RejectionSampling().forward_greedy(TARGET, DRAFT)
    assert counters.record()["verify_rows"] == []


def test_the_guard_sees_the_reads_of_a_record(asked: Path) -> None:
    step([3, 1, 2], [7, 12, 1])
    with pytest.raises(HostRead), no_host_reads():
        RejectionSampling().forward_greedy(TARGET, DRAFT)


def test_a_sampled_step_is_not_kept_and_a_prompt_is_none(asked: Path) -> None:
    step([3, 1, 2], [7, 12, 1])
    RejectionSampling().forward_greedy(TARGET, DRAFT)
    assert counters._step is None
    step([3], [0], decoding=False)
    assert counters._step is None


def test_the_record_is_bounded_and_says_so(asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "MAX_ROWS", 4)
    for _ in range(3):
        step([3, 1, 2], [7, 12, 1])
        RejectionSampling().forward_greedy(TARGET, DRAFT)
    record = counters.record()
    assert len(record["verify_rows"]) == 4
    assert record["dropped_rows"] == 5


def test_reset_forgets_everything(asked: Path) -> None:
    step([3, 1, 2], [7, 12, 1])
    RejectionSampling().forward_greedy(TARGET, DRAFT)
    counters.reset()
    assert counters.record()["verify_rows"] == []
    assert set(counters.record()["counters"]) == {"pid"}


RUN = """
import multiprocessing, os, signal, sys, time
sys.path.insert(0, {root!r})
from tests.framework import test_counters as t
from dlinfer_ext.framework.lmdeploy import counters
def work(how):
    t.step([3], [7]); t.RejectionSampling().forward_greedy(t.TARGET[:1], t.DRAFT[:1])
    if how == "terminated":
        signal.signal(signal.SIGTERM, lambda *_: exit(0))  # as LMDeploy's mp workers do
        open(sys.argv[2], "w").close()
        time.sleep(60)
    if how == "folder-gone":
        os.rmdir(os.environ["DLINFER_EXT_COUNTERS"])
if __name__ == "__main__":
    if sys.argv[1] in ("terminated", "child"):
        child = multiprocessing.get_context("spawn").Process(target=work, args=(sys.argv[1],))
        child.start()
        while sys.argv[1] == "terminated" and not os.path.exists(sys.argv[2]):
            time.sleep(0.05)
            assert child.is_alive()
        if sys.argv[1] == "terminated":
            child.terminate()
        child.join(30)
        print("PID", child.pid)
    elif sys.argv[1] != "idle":
        work(sys.argv[1])
        print("PID", os.getpid())
"""


@pytest.mark.parametrize("how", ["main", "child", "terminated", "idle", "folder-gone"])
def test_a_process_that_ran_a_model_leaves_its_record(how: str, tmp_path: Path) -> None:
    script, folder = tmp_path / "run.py", tmp_path / "deep" / "counters"
    script.write_text(RUN.format(root=str(Path(__file__).parents[2])))
    env = {**os.environ, "DLINFER_EXT_COUNTERS": str(folder)}
    line = [sys.executable, str(script), how, str(tmp_path / "started")]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    if how in ("idle", "folder-gone"):
        assert files == []
        return
    pid = int(done.stdout.split("PID ")[1])
    assert [f.name for f in files] == [f"counters-engine-{pid}.json"]
    record = json.loads(files[0].read_text())
    assert record["verify_rows"] == [[3, 7, 2, 6]]
    assert record["pid"] == record["counters"]["pid"] == pid
    assert record["counters"]["rejection_sample_greedy"] == 1
