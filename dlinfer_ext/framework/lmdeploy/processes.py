"""What must cross the borders of the processes that LMDeploy starts."""

from __future__ import annotations

import functools
import os
from types import TracebackType
from typing import Any

from ... import envs


class _LeftCondition:
    """A manager's condition that may be released after the manager has gone."""

    def __init__(self, condition: Any) -> None:
        self._condition = condition

    def __enter__(self) -> Any:
        return self._condition.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._condition.__exit__(kind, error, at)
        except (EOFError, ConnectionError):
            # Whoever waited has read what it waited for and closed the manager; nobody is left to be told.
            if error is not None:
                raise error from None

    def notify(self) -> None:
        self._condition.notify()


def patch_engine_start(module: Any) -> str:
    """Let the server's engine process go on when its parent closes their manager first.

    The engine process publishes its port under a manager's condition; the parent leaves the manager as soon as it has
    read the port, which may be before the child's release of the condition is answered. The child then ends with
    EOFError and the server with it, the more often the more loaded the machine is.
    """
    original = module.ZMQMPEngine._mp_proc

    # Wrapped under its own name: a spawned process looks its target up by name, and finds this form there too.
    @functools.wraps(original)
    def mp_proc(shared_dict: Any, condition: Any, *args: Any, **kwargs: Any) -> Any:
        return original(shared_dict, _LeftCondition(condition), *args, **kwargs)

    module.ZMQMPEngine._mp_proc = staticmethod(mp_proc)
    return "ZMQMPEngine._mp_proc outlives the manager it publishes its port through"


def patch_ray_settings(module: Any) -> str:
    """Hand our variables to Ray's workers: they inherit from a Ray that may have been started before, elsewhere."""
    original = module._update_runtime_envs

    def update(runtime_env: dict[str, Any]) -> Any:
        runtime_env = original(runtime_env)
        runtime_env["env_vars"] |= {v.name: os.environ[v.name] for v in envs.ALL if v.name in os.environ}
        return runtime_env

    module._update_runtime_envs = update
    return "_update_runtime_envs hands on DLINFER_EXT_*"
