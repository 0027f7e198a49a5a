"""What a scheduler holds, in numbers, from LMDeploy's own allocators and prefix cache."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlinfer_ext import envs
from dlinfer_ext.framework.lmdeploy import paging

pytestmark = pytest.mark.lmdeploy


def scheduler() -> Any:
    """LMDeploy's, with 16 blocks of 4 tokens, of which it keeps one, and 6 state slots, of which it keeps one."""
    from lmdeploy.pytorch.config import CacheConfig, SchedulerConfig
    from lmdeploy.pytorch.paging.scheduler import Scheduler

    cache = CacheConfig(
        max_batches=4,
        block_size=4,
        num_cpu_blocks=0,
        num_gpu_blocks=16,
        enable_prefix_caching=True,
        num_reserved_gpu_blocks=1,
        states_shapes=[((1,), None)],
        num_state_caches=6,
        prefix_cache_state_budget=2,
    )
    return Scheduler(SchedulerConfig(max_batches=4, max_session_len=64, max_request_output_len=64), cache)


def test_an_idle_scheduler_has_everything_free() -> None:
    held = paging.occupancy(scheduler())
    assert (held["slots"], held["slots_free"], held["slots_cached"]) == (5, 5, 0)
    assert (held["blocks"], held["blocks_free"], held["blocks_cached"]) == (15, 15, 0)
    assert (held["sequences"], held["sessions"]) == (0, 0)


def test_what_is_taken_is_counted_once() -> None:
    one = scheduler()
    one.state_manager.allocate_state()
    one.block_manager.allocator.allocate(3, "gpu")
    one.add_session(7)
    held = paging.occupancy(one)
    assert held["slots_free"] == 4
    assert held["blocks_free"] == 12
    assert held["sessions"] == 1


def test_what_the_prefix_cache_holds_is_told_apart() -> None:
    """A node with a block and a state, one of its children with a block, and a root with a state and a frozen block."""
    one = scheduler()
    states, blocks = one.state_manager, one.block_manager.allocator
    ids = [int(i) for i in blocks.allocate(3, "gpu")]
    slots = [states.allocate_checkpoint_state() for _ in range(2)]

    def node(block: int, state: Any = None, *children: Any) -> Any:
        return SimpleNamespace(block_id=block, state_checkpoint=state, children=dict(enumerate(children)))

    def state(slot: int, frozen: int = -1) -> Any:
        return SimpleNamespace(slot=slot, frozen_block_id=frozen)

    one.block_trie._roots[""] = node(-1, state(slots[1], ids[2]), node(ids[0], state(slots[0]), node(ids[1])))
    held = paging.occupancy(one)
    assert (held["slots_free"], held["slots_cached"]) == (3, 2)
    assert (held["blocks_free"], held["blocks_cached"]) == (12, 3)


def test_a_record_is_written_when_the_metrics_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Scheduler:
        asked = 0

        @property
        def schedule_metrics(self) -> int:
            self.asked += 1
            return self.asked

    monkeypatch.setattr(paging, "occupancy", lambda _: {"slots": 5})
    paging.patch_metrics(SimpleNamespace(Scheduler=Scheduler))
    one = Scheduler()
    monkeypatch.setenv(envs.COUNTERS.name, "")
    assert one.schedule_metrics == 1
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv(envs.COUNTERS.name, str(tmp_path))
    assert one.schedule_metrics == 2
    (file,) = tmp_path.iterdir()
    assert file.name == f"paging-{os.getpid()}.json"
    assert json.loads(file.read_text())["slots"] == 5
    monkeypatch.setenv(envs.COUNTERS.name, str(tmp_path / "gone"))
    assert one.schedule_metrics == 3
