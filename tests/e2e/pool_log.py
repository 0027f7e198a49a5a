"""A plugin of a session: write down the bytes of every cache and of every weight that the engine holds, by engine.

At the end E2E_POOLS is a JSON object: lists of "states" (slots, bytes), "caches" (blocks, bytes of model and draft
layer) and "weights" (bytes of the model, of the draft layer beside it).
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
from pathlib import Path
from typing import Any, Final

VARIABLE: Final = "E2E_POOLS"
cache_engine: Any = importlib.import_module("lmdeploy.pytorch.engine.cache_engine.engine").CacheEngine
state_engine: Any = importlib.import_module("lmdeploy.pytorch.engine.cache_engine.state").StateCacheEngine
agent: Any = importlib.import_module("lmdeploy.pytorch.engine.model_agent.agent").BaseModelAgent
_log: dict[str, list[list[int]]] = {"states": [], "caches": [], "weights": []}


def _storages(tensors: Any) -> dict[int, int]:
    """Return the bytes behind tensors by address, so that what two of them share counts once."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def _states(self: Any, cache_config: Any, model_config: Any) -> None:
    _original_states(self, cache_config, model_config)
    held = _storages(pool.tensor for pool in self.allocation.pools)
    _log["states"].append([cache_config.num_state_caches, sum(held.values())])


def _caches(self: Any, *args: Any, **options: Any) -> Any:
    out = _original_caches(self, *args, **options)
    held = _storages(pool.tensor for pool in self.gpu_allocation.pools)
    _log["caches"].append([self.cache_config.num_gpu_blocks, sum(held.values())])
    return out


def _weights(self: Any) -> None:
    _original_weights(self)
    model, draft = self.patched_model, getattr(getattr(self.spec_agent, "proposer", None), "model", None)
    own = {id(t): t.nbytes for t in [*model.parameters(), *model.buffers()]}
    beside = {id(t): t.nbytes for t in [*draft.parameters(), *draft.buffers()]} if draft is not None else {}
    extra = {key: size for key, size in beside.items() if key not in own}
    _log["weights"].append([sum(own.values()), sum(extra.values())])


def _write() -> None:
    Path(os.environ[VARIABLE]).write_text(json.dumps(_log), encoding="utf-8")


_original_states, state_engine.__init__ = state_engine.__init__, _states
_original_caches, cache_engine.allocate_gpu_cache = cache_engine.allocate_gpu_cache, _caches
_original_weights, agent.build_model = agent.build_model, _weights
atexit.register(_write)
