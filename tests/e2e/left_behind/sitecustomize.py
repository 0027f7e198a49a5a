"""Each process of an engine leaves behind what it counted and its rows' states: mp workers cannot be asked.

Python imports this by its name where the folder is on PYTHONPATH, in spawned processes too. One file per process that
ran a model, named by its rank, in the folder that E2E_LEFT_BEHIND names.

A row is known by the length of its prompt, its state by the tokens that it has seen. It is taken at the start of the
row's first verify steps. How many drafts a step accepts is not the same in every run with two ranks, nor is how far the
engine runs ahead before it is stopped: neither changes the state after n tokens.
"""

from __future__ import annotations

import atexit
import os
from multiprocessing import current_process, util
from typing import Any

from wrapt.importer import when_imported

VERIFY_STEPS = 16
WIDTH = 4  # of the convolution: the state of a row is its last WIDTH - 1 inputs
POOLS: list[Any] = []
PROMPTS: dict[int, int] = {}  # slot -> length of the prompt in it
ROWS: dict[int, dict[int, list[Any]]] = {}  # length of the prompt -> tokens seen -> state in each pool


def watch_pools(module: Any) -> None:
    original = module.StateCacheEngine.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        POOLS.extend((pool.tensor, pool.entry_axis) for pool in self.allocation.pools)

    module.StateCacheEngine.__init__ = init


def state(row: Any, seen: int) -> Any:
    """Return a ring row's state after `seen` tokens: of [layers, columns, channels] or of [layers, slots, HV, V, K]."""
    if row.dim() == 3:
        return row[:, [position % row.size(1) for position in range(max(0, seen - WIDTH + 1), seen)]]
    return row[:, seen % row.size(1)].clone()


def watch_steps(module: Any) -> None:
    original = module.GatedDeltaMetadata.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not self.is_decoding:
            return
        for slot, seen in zip(self.state_indices.tolist(), self.history_lens.tolist(), strict=True):
            if slot >= 0:
                states = ROWS.setdefault(PROMPTS.setdefault(slot, seen), {})
                if len(states) < VERIFY_STEPS:
                    states[seen] = [state(pool.select(axis, slot), seen) for pool, axis in POOLS]

    module.GatedDeltaMetadata.__init__ = init


def leave() -> None:
    if not POOLS:
        return
    POOLS.clear()
    import torch

    from dlinfer_ext.framework.lmdeploy import counters

    # LMDeploy's mp executor names a worker's process by its rank.
    name = current_process().name
    rank = int(name.rpartition("-")[2]) if name.startswith("ExecutorProc-") else 0
    path = os.path.join(os.environ["E2E_LEFT_BEHIND"], f"{rank}.pt")
    torch.save({"counters": counters.snapshot(), "rows": ROWS}, path)


if os.environ.get("E2E_LEFT_BEHIND"):
    when_imported("lmdeploy.pytorch.engine.cache_engine.state")(watch_pools)
    when_imported("dlinfer_ext.framework.lmdeploy.gated_delta")(watch_steps)
    atexit.register(leave)
    util.Finalize(None, leave, exitpriority=100)  # what a child of multiprocessing runs when it is told to end
