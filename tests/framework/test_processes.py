"""What crosses LMDeploy's process borders: the engine process's start, and our settings in Ray's workers."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from dlinfer_ext.framework.lmdeploy import processes


class Condition:
    """A manager's condition whose release is answered by nobody: the parent has read the port and closed it."""

    def __init__(self, at_exit: type[Exception] | None) -> None:
        self.at_exit, self.notified, self.entered = at_exit, False, False

    def __enter__(self) -> bool:
        self.entered = True
        return True

    def __exit__(self, *_: object) -> None:
        if self.at_exit is not None:
            raise self.at_exit

    def notify(self) -> None:
        self.notified = True


class Engine:
    """Stands in for `ZMQMPEngine`: publishes its port, then goes on."""

    ran = False
    fail: type[Exception] | None = None

    @staticmethod
    def _mp_proc(shared: dict[str, int], condition: Any, model_path: str, **kwargs: Any) -> None:
        with condition:
            shared["rpc_server_port"] = 7
            condition.notify()
            if Engine.fail is not None:
                raise Engine.fail
        Engine.ran = True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    monkeypatch.setattr(Engine, "_mp_proc", staticmethod(Engine._mp_proc))
    monkeypatch.setattr(Engine, "ran", False)
    monkeypatch.setattr(Engine, "fail", None)
    return Engine


@pytest.mark.parametrize("at_exit", [None, EOFError, ConnectionResetError, BrokenPipeError])
def test_engine_process_outlives_the_manager_it_published_its_port_through(
    engine: type[Engine], at_exit: type[Exception] | None
) -> None:
    processes.patch_engine_start(SimpleNamespace(ZMQMPEngine=engine))
    condition, shared = Condition(at_exit), dict[str, int]()
    engine._mp_proc(shared, condition, model_path="x")
    assert engine.ran
    assert shared == {"rpc_server_port": 7}
    assert condition.notified


def test_other_errors_and_errors_inside_still_end_the_process(
    engine: type[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    processes.patch_engine_start(SimpleNamespace(ZMQMPEngine=engine))
    with pytest.raises(ZeroDivisionError):
        engine._mp_proc({}, Condition(ZeroDivisionError), model_path="x")
    monkeypatch.setattr(engine, "fail", EOFError)
    with pytest.raises(EOFError):
        engine._mp_proc({}, Condition(None), model_path="x")
    with pytest.raises(EOFError):
        engine._mp_proc({}, Condition(ConnectionResetError), model_path="x")
    assert not engine.ran


def test_the_patched_target_is_still_found_by_name_in_a_spawned_process(engine: type[Engine]) -> None:
    processes.patch_engine_start(SimpleNamespace(ZMQMPEngine=engine))
    assert engine._mp_proc.__qualname__ == "Engine._mp_proc"
    assert engine._mp_proc.__module__ == Engine.__module__


def test_ray_workers_get_our_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(_update_runtime_envs=lambda runtime: runtime | {"env_vars": {"LMDEPLOY": "1"}})
    processes.patch_ray_settings(module)
    monkeypatch.setenv("DLINFER_EXT_VENDOR", "cpu")
    assert module._update_runtime_envs({}) == {"env_vars": {"LMDEPLOY": "1", "DLINFER_EXT_VENDOR": "cpu"}}
    assert pickle.dumps(module._update_runtime_envs({}))
