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

import hypothesis
import pytest
import torch
from hypothesis import is_hypothesis_test

from dlinfer_ext import envs

# The routes that launch kernels on CPU tensors, and the module that counts the launches.
KERNEL_ROUTES: Final = {
    "native": "dlinfer_ext.toolchain.native",
    "interpret": "dlinfer_ext.toolchain.interpreter",
}
# Beginnings of the ids of tests that take seconds when a kernel is interpreted; --route native runs them all. What is
# left covers every operator, dtype, layout and form, and every reported fault but B105, a batch of 70,000 rows.
LONG_INTERPRETED: Final = tuple(
    f"tests/kernels/test_{beginning}"
    for beginning in (
        "causal_conv1d_faults.py::test_reported_fault[B105]",
        *(f"causal_conv1d.py::test_chunks_equal_one_shot_at_every_split[{case}-" for case in
          ("2-257", "4-63", "4-65", "4-257", "8-1", "8-63", "8-65", "8-257")),
        "causal_conv1d.py::test_long_chunks_equal_one_shot",
        "causal_conv1d.py::test_more_than_2_to_the_24_elements",
        *(f"rejection_sampling.py::test_every_batch_size_matches_the_definition[{probs}-R55-B{batch}]"
          for probs in ("draft-probs", "no-draft-probs") for batch in (40, 41, 50, 81)),
        *(f"gated_delta_rule.py::test_prefill_at_every_split_equals_one_shot[{case}" for case in ("T20-ring3", "T70")),
        *(f"gated_delta_rule.py::test_prefill_faults_of_peers[{order}-B48-many-documents]" for order in ("KV", "VK")),
        "rejection_sampling.py::test_an_unlikely_draft_is_accepted_as_rarely_as_the_target_says",
        "rejection_sampling.py::test_greedy_rows_leave_sampling_rows_alone",
        "rejection_sampling.py::test_nothing_is_read_on_the_host",
        "rejection_sampling.py::test_draws_depend_on_seed_and_position_alone",
        "rejection_sampling.py::test_a_nan_row_leaves_the_others_alone[B68-greedy]",
        "rejection_sampling.py::test_a_batch_equals_its_requests_alone",
        "rejection_sampling.py::test_what_is_emitted_is_distributed_as_the_target",
        *(f"rejection_sampling_kernel.py::test_{name}" for name in
          ("the_largest_logit_is_found_in_many_long_rows", "a_token_is_drawn_from_every_block",
           "a_large_vocabulary_matches_the_definition", "a_drawn_token_follows_the_weights",
           "a_request_is_the_same_in_any_batch_of_a_large_vocabulary")),
    )
)  # fmt: skip
# Of the cases that hypothesis draws.
EXAMPLES_INTERPRETED: Final = 12
LEFT_OUT: Final[Counter[str]] = Counter()
LAUNCHED: Final[Counter[str]] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--route",
        choices=("eager", *KERNEL_ROUTES),
        help="the form of the operators that is tested, with DLINFER_EXT_STRICT=1; unset: the route of the vendor",
    )
    parser.addoption(
        "--at-most", type=int, metavar="N", help="of each test function only N cases, evenly spaced, always the same"
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


def reason_to_leave_out(item: pytest.Item, route: str) -> str | None:
    """Return why a test is not run on a route that launches kernels, or None."""
    marker = item.get_closest_marker("eager_only")
    if marker is not None:
        return str(marker.kwargs["reason"])
    if route == "interpret" and item.nodeid.startswith(LONG_INTERPRETED):
        return "takes seconds when interpreted"
    return None


def thinned(items: list[pytest.Item], most: int) -> list[pytest.Item]:
    """Return at most `most` cases of each test function, evenly spaced and in order; of reported faults all."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        name = item.nodeid.partition("[")[0]
        cases.setdefault(item.nodeid if name.endswith("::test_reported_fault") else name, []).append(item)
    kept = {id(c[i * len(c) // n]) for c in cases.values() for n in (min(most, len(c)),) for i in range(n)}
    return [item for item in items if id(item) in kept]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    select_for_route(config, items)
    most = config.getoption("--at-most")
    if most is not None:
        kept = thinned(items, most)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def select_for_route(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what a route that launches kernels does not run."""
    route = config.getoption("--route")
    if route not in KERNEL_ROUTES:
        return
    left_out = []
    for item in items:
        reason = reason_to_leave_out(item, route)
        if reason is not None:
            left_out.append(item)
            LEFT_OUT[reason] += 1
        elif route == "interpret" and is_hypothesis_test(getattr(item, "obj", None)):
            draw_fewer_examples(item.obj)  # type: ignore[attr-defined]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def draw_fewer_examples(test: Any) -> None:
    """Bound the examples of a hypothesis test; its decorator outranks any profile, so it is changed in place."""
    wanted = test._hypothesis_internal_use_settings
    if wanted.max_examples > EXAMPLES_INTERPRETED:
        test._hypothesis_internal_use_settings = hypothesis.settings(wanted, max_examples=EXAMPLES_INTERPRETED)


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
