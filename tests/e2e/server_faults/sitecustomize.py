"""Plant a fault in every process of a server: with this folder first in PYTHONPATH, Python imports this file at start.

The fault is named by SERVER_FAULT. Each is put into LMDeploy's module right after that is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count
from typing import Any

from wrapt.importer import when_imported

KEPT: list[bytes] = []


def _slot_is_kept(module: Any) -> None:
    """Forget to free one state slot."""
    free, calls = module.StateManager.free, count()

    def faulty(self: Any, seq: Any) -> None:
        if seq.logical_state >= 0 and next(calls) == 5:
            seq.logical_state = -1
        else:
            free(self, seq)

    module.StateManager.free = faulty


def _block_is_kept(module: Any) -> None:
    """Take a block that nobody gives back."""
    free, calls = module.DefaultBlockManager.free, count()

    def faulty(self: Any, msg: Any) -> None:
        free(self, msg)
        if next(calls) == 5:
            self.allocator.allocate(1, "gpu")

    module.DefaultBlockManager.free = faulty


def _list_grows(module: Any) -> None:
    """Keep 1 MiB of every tenth request."""
    add, calls = module.Scheduler.add_session, count(1)

    def faulty(self: Any, session_id: int) -> Any:
        if next(calls) % 10 == 0:
            KEPT.append(os.urandom(2**20))
        return add(self, session_id)

    module.Scheduler.add_session = faulty


def _answers_are_mixed(module: Any) -> None:
    """Give two clients each other's tokens, now and then."""
    make, calls = module.EngineLoop._make_infer_outputs, count(1)

    def faulty(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = make(self, *args, **kwargs)
        if len(outputs) > 1 and next(calls) % 20 == 0:
            one, other = list(outputs.values())[:2]
            one.token_ids, other.token_ids = other.token_ids, one.token_ids
        return outputs

    module.EngineLoop._make_infer_outputs = faulty


def _nothing_is_refused(module: Any) -> None:
    """Let every request through to the engine, as LMDeploy does."""
    from dlinfer_ext.framework.lmdeploy import requests

    requests.wrong_with = lambda *_: None


def _workers_are_not_watched(module: Any) -> None:
    """Let a worker end without anybody hearing of it, as LMDeploy does."""
    from dlinfer_ext.framework.lmdeploy import processes

    processes.end_with_a_worker = lambda *_: None


FAULTS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "slot_is_kept": ("lmdeploy.pytorch.paging.state_manager", _slot_is_kept),
    "block_is_kept": ("lmdeploy.pytorch.paging.block_manager.default_block_manager", _block_is_kept),
    "list_grows": ("lmdeploy.pytorch.paging.scheduler", _list_grows),
    "answers_are_mixed": ("lmdeploy.pytorch.engine.engine_loop", _answers_are_mixed),
    "workers_are_not_watched": ("lmdeploy.pytorch.engine.executor.base", _workers_are_not_watched),
    "nothing_is_refused": ("lmdeploy.serve.core.async_engine", _nothing_is_refused),
}

if os.environ.get("SERVER_FAULT"):
    _module, _plant = FAULTS[os.environ["SERVER_FAULT"]]
    when_imported(_module)(_plant)
