"""What must cross the borders of the processes that LMDeploy starts."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from multiprocessing import connection
from types import TracebackType
from typing import Any

from ... import envs

logger = logging.getLogger("dlinfer_ext")


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


def end_with_a_worker(processes: Sequence[Any], closing: threading.Event, end: Callable[[str], None]) -> None:
    """Wait until one of the workers ends; unless the executor is being closed, kill the others and call `end`.

    Args:
        processes: multiprocessing's, started.
        closing: set when workers are meant to end.
        end: gets what happened, in words.
    """
    ended = connection.wait([process.sentinel for process in processes])
    if closing.is_set():
        return
    rank, process = next((i, p) for i, p in enumerate(processes) if p.sentinel in ended)
    process.join(1)  # so that its exit code is there
    for other in processes:
        other.kill()  # it waits for an answer that never comes, in code that hears no other signal
    end(f"worker {rank} (pid {process.pid}) ended with code {process.exitcode}: this engine cannot go on")


def patch_worker_watch(module: Any) -> str:
    """End the engine's process when a worker of the mp executor is gone.

    LMDeploy hears of a worker's exceptions, by a signal that the worker sends, but not of one that is killed: the other
    ranks wait for it, and so does every answer, for good. With the engine's process gone the server gives every client
    an error at once, and its /health says so. As for an exception, a pipeline's process ends with code 1.
    """
    executor = module.MPExecutor
    started, released = executor.__init__, executor.release

    @functools.wraps(started)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        started(self, *args, **kwargs)
        self._dlinfer_ext_closing = threading.Event()

        def end(why: str) -> None:
            logger.error("%s", why)
            for buffer in (self.comm_buf, *self.ret_bufs):
                with contextlib.suppress(OSError):
                    buffer.shm.unlink()
            os._exit(1)  # as LMDeploy does; its own clean-up would wait for locks that a killed worker may hold

        processes = [worker._proc for worker in self.procs]
        watch = (processes, self._dlinfer_ext_closing, end)
        threading.Thread(target=end_with_a_worker, args=watch, name="worker-watch", daemon=True).start()

    @functools.wraps(released)
    def release(self: Any) -> None:
        self._dlinfer_ext_closing.set()
        released(self)

    executor.__init__, executor.release = init, release
    return "MPExecutor ends with any of its workers"
