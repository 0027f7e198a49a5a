"""What LMDeploy's scheduler holds: state slots, blocks, sequences; for whoever looks for what was not freed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ... import envs


def _nodes(trie: Any) -> Iterator[Any]:
    """Yield the nodes of a prefix cache; a root holds no block, but may hold a state."""
    waiting = list(trie._roots.values())
    while waiting:
        node = waiting.pop()
        waiting += node.children.values()
        yield node


def occupancy(scheduler: Any) -> dict[str, int]:
    """Return what a scheduler holds, in numbers of things.

    Returns:
        "slots": state slots that can be taken; "slots_free"; "slots_cached": those that the prefix cache holds, by its
        own nodes; "blocks", "blocks_free", "blocks_cached": the same of blocks of keys and values; "sequences" and
        "sessions" that it knows; "hit_tokens" and "asked_tokens" of the prefix cache; "steps" dispatched. A slot or
        block that is neither free nor cached belongs to a sequence.
    """
    states, blocks, trie = scheduler.state_manager, scheduler.block_manager, scheduler.block_trie
    nodes = list(_nodes(trie))
    checkpoints = [n.state_checkpoint for n in nodes if n.state_checkpoint is not None]
    return {
        "slots": states.allocator.num_states,
        "slots_free": states.get_num_free(),
        "slots_cached": sum(c.slot >= 0 for c in checkpoints),
        "blocks": blocks.num_gpu_blocks - scheduler.cache_config.num_reserved_gpu_blocks,
        "blocks_free": blocks.get_num_free_gpu_blocks(),
        "blocks_cached": len(({n.block_id for n in nodes} | {c.frozen_block_id for c in checkpoints}) - {-1}),
        "sequences": len(scheduler.seq_manager.get_all_sequences()),
        "sessions": len(scheduler.sessions),
        "hit_tokens": trie.stats.num_hit_tokens,
        "asked_tokens": trie.stats.num_query_tokens,
        "steps": scheduler.scheduler_tick,
    }


def write(scheduler: Any) -> None:
    """Write the occupancy into the folder of DLINFER_EXT_COUNTERS, if there is one, as paging-PID.json."""
    folder = Path(envs.COUNTERS.get())
    if not envs.COUNTERS.get() or not folder.is_dir():
        return
    part = folder / f".paging-{os.getpid()}.part"
    part.write_text(json.dumps({"time": time.time(), "pid": os.getpid()} | occupancy(scheduler)), encoding="utf-8")
    part.replace(folder / f"paging-{os.getpid()}.json")


def patch_metrics(module: Any) -> str:
    """Write the occupancy whenever the scheduler is asked for its metrics: a server asks every few seconds.

    Nothing is written, and nothing counted, without DLINFER_EXT_COUNTERS.
    """
    original = module.Scheduler.schedule_metrics.fget

    def schedule_metrics(self: Any) -> Any:
        write(self)
        return original(self)

    module.Scheduler.schedule_metrics = property(schedule_metrics, doc=original.__doc__)
    return "Scheduler.schedule_metrics leaves a record of what is held"
