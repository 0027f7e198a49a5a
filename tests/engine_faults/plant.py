"""Plant one known fault in a running engine, and count how often the planted code ran.

As a plugin of the engine's process (`Target.plugins`) this module plants the fault named by the variable ENGINE_FAULT
when it is imported. Workers of the mp executor import it too and plant the same. The planted code counts its calls as
"fault.NAME" in the counters of its process: a fault that never ran has not been caught by anything.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable
from typing import Any, Final

from dlinfer_ext.framework.lmdeploy import counters

VARIABLE: Final = "ENGINE_FAULT"
GROUPS: Final = ("operators", "adapter", "sampler", "host", "drafts", "glm")
SHARED: Final = ("causal_conv1d.eager", "gated_delta_rule.eager", "common.delta_chunks", "common.delta_steps")
_planted: list[str] = []


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with its calls counted under the name of the planted fault."""
    name = f"fault.{_planted[-1]}"

    @functools.wraps(function)
    def count(*args: Any, **kwargs: Any) -> Any:
        counters.add(name)
        return function(*args, **kwargs)

    return count


def instead(owner: Any, attribute: str, faulty: Callable[..., Any]) -> None:
    """Call `faulty(original, *args, **kwargs)` where `owner.attribute(*args, **kwargs)` is called.

    Args:
        owner: a module or class.
        attribute: a function of it; static and class methods stay so.
        faulty: gets the original function first.
    """
    raw = inspect.getattr_static(owner, attribute)
    kind = type(raw) if isinstance(raw, (staticmethod, classmethod)) else None
    original = raw.__func__ if kind else raw

    @counted
    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return faulty(original, *args, **kwargs)

    setattr(owner, attribute, kind(replaced) if kind else replaced)


def faults() -> dict[str, Callable[[], None]]:
    """Return every fault that can be planted in an engine, by name; those of tests/faults.py that run in it first."""
    found: dict[str, Callable[[], None]] = {name: functools.partial(_shared, name) for name in _of_operators()}
    for group in GROUPS:
        module = importlib.import_module(f"tests.engine_faults.{group}")
        found |= {f.__name__: f for f in module.FAULTS}
    return found


def changes_nothing() -> None:
    """Put an operator in its own place: a control, which no scenario may catch."""
    ops: Any = importlib.import_module("dlinfer_ext.ops")
    instead(ops, "verify_greedy", lambda original, *args: original(*args))


def pools_full_of_nan() -> None:
    """Let the pools of states hold NaN before anything is stored in them: a control too, as nobody may read that."""
    states: Any = importlib.import_module("lmdeploy.pytorch.engine.cache_engine.state")

    def init(original: Any, self: Any, *args: Any) -> None:
        original(self, *args)
        for pool in self.state_caches:
            pool.fill_(float("nan"))

    instead(states.StateCacheEngine, "__init__", init)


CONTROLS: Final[dict[str, Callable[[], None]]] = {f.__name__: f for f in (changes_nothing, pools_full_of_nan)}


def describe(name: str) -> str:
    """Return what a fault does, and its public source where it has one, in one line."""
    from tests.faults import FAULTS

    known = CONTROLS | faults() | {n: FAULTS[n] for n in _of_operators()}
    return " ".join((known[name].__doc__ or "").split())


def _of_operators() -> tuple[str, ...]:
    """Return the faults of tests/faults.py whose code the engine runs on a CPU (it has no rewind layout)."""
    return (
        "ring_gather_from_packed_batch",
        "recurrent_ring_slot_one_behind",
        "history_not_zeroed_on_reuse",
        "state_stored_transposed",
        "taps_in_reverse_order",
        "operands_through_fp16",
    )


def _shared(name: str) -> None:
    """Plant a fault of tests/faults.py and count the calls of whatever it replaced."""
    from tests.faults import FAULTS

    owners = [importlib.import_module(f"dlinfer_ext.kernels.{m}") for m in SHARED]
    owners.append(owners[0].Stores)
    before = [dict(vars(owner)) for owner in owners]
    FAULTS[name]()
    for owner, old in zip(owners, before, strict=True):
        for key, value in dict(vars(owner)).items():
            if value is old.get(key):
                continue
            kind = type(value) if isinstance(value, (staticmethod, classmethod)) else None
            setattr(owner, key, kind(counted(value.__func__)) if kind else counted(value))


def plant(name: str) -> None:
    """Put a fault into this process for good, and see to it that mp workers plant it as well.

    Raises:
        KeyError: no such fault.
    """
    _planted.append(name)
    (CONTROLS | faults())[name]()
    executor: Any = importlib.import_module("lmdeploy.pytorch.engine.executor.mp_executor")
    start = executor.ExecutorProc.start

    def start_planted(self: Any, **kwargs: Any) -> None:
        self._main_loop = functools.partial(in_worker, type(self)._main_loop, self.proc_id, self.mp_ctx)
        start(self, **kwargs)

    executor.ExecutorProc.start = start_planted


def in_worker(main_loop: Callable[..., None], number: int, mp_ctx: Any, **kwargs: Any) -> None:
    """Run a worker; that this function was found means that its module was imported, and the fault planted."""
    executor: Any = importlib.import_module("lmdeploy.pytorch.engine.executor.mp_executor")
    main_loop(executor.ExecutorProc(number, mp_ctx), **kwargs)


if os.environ.get(VARIABLE):
    plant(os.environ[VARIABLE])
