"""Settings of every test: no variable of the caller's environment, a seed, and unwritten memory that shows.

`--route native` and `--route interpret` run the same tests through the Triton kernels. Such a run fails if no kernel
was launched, so that a route that is quietly not taken cannot pass for one that works.
"""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch

from dlinfer_ext import envs

# The routes that launch kernels on CPU tensors, and the module that counts the launches.
KERNEL_ROUTES: Final = {
    "native": "dlinfer_ext.toolchain.native",
    "interpret": "dlinfer_ext.toolchain.interpreter",
}
LEFT_OUT: Final[Counter[str]] = Counter()
LAUNCHED: Final[Counter[str]] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--route",
        choices=("eager", *KERNEL_ROUTES),
        help="the form of the operators that is tested, with DLINFER_EXT_STRICT=1; unset: the route of the vendor",
    )


@pytest.fixture(scope="session")
def route(request: pytest.FixtureRequest) -> str:
    """The route of --route, "auto" if unset."""
    return str(request.config.getoption("--route") or "auto")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, route: str) -> Iterator[None]:
    for var in envs.ALL:
        # The folder of the compiler is a place on this machine, like PATH, and no setting of a test.
        if var is not envs.TOOLCHAIN:
            monkeypatch.delenv(var.name, raising=False)
    if route != "auto":
        monkeypatch.setenv(envs.ROUTE.name, route)
        monkeypatch.setenv(envs.STRICT.name, "1")
    torch.manual_seed(0)
    # torch.empty is filled with NaN, so an output that is not written fails (an idea of flash-linear-attention).
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--route") not in KERNEL_ROUTES:
        return
    left_out = [item for item in items if item.get_closest_marker("eager_only")]
    for item in left_out:
        marker = item.get_closest_marker("eager_only")
        assert marker is not None
        LEFT_OUT[marker.kwargs["reason"]] += 1
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def launches(route: str) -> dict[str, int]:
    """Return how often this process launched each kernel on a route."""
    return dict(importlib.import_module(KERNEL_ROUTES[route]).kernels())


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take over what a worker of pytest-xdist counted."""
    given = getattr(node, "workeroutput", {})
    LAUNCHED.update(given.get("launched", {}))
    LEFT_OUT.update(given.get("left_out", {}))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config, asked = session.config, session.config.getoption("--route")
    if asked not in KERNEL_ROUTES or config.option.collectonly:
        return
    if hasattr(config, "workeroutput"):
        config.workeroutput["launched"] = launches(asked)
        # Every worker collects all tests, so one of them tells.
        config.workeroutput["left_out"] = dict(LEFT_OUT) if os.environ.get("PYTEST_XDIST_WORKER") == "gw0" else {}
        return
    if not config.getoption("numprocesses", None):
        LAUNCHED.update(launches(asked))
    if LAUNCHED.total() == 0 and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    asked = config.getoption("--route")
    if asked not in KERNEL_ROUTES or config.option.collectonly:
        return
    for reason, count in sorted(LEFT_OUT.items()):
        terminalreporter.write_line(f"route {asked}: {count} tests left out: {reason}")
    if LAUNCHED:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(LAUNCHED.items()))
        terminalreporter.write_line(f"route {asked}: kernels launched in the test processes: {counts}")
    else:
        terminalreporter.write_line(f"route {asked}: no kernel was launched, nothing was tested: it fails", red=True)
