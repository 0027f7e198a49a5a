"""Every shipped scenario through stock LMDeploy: on this CPU (marker `cpu`), or on a card (marker `npu`).

On a card: `make e2e-npu MODEL=PATH`. Where E2E_OUT names a folder, the report of the run is written there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlinfer_ext.e2e import asking, judge, report, runner, scenario
from dlinfer_ext.e2e.results import ScenarioReport
from dlinfer_ext.e2e.scenario import Request, Scenario
from dlinfer_ext.e2e.target import Target, cannot_run
from tests.e2e.engine import ROOT

TRAINED = ROOT / "examples" / "checkpoints" / "tiny_qwen3_5"
CPU = Target(model=TRAINED)
SCENARIOS = [s for f in scenario.shipped() if not (s := scenario.load(f)).by_name]
# The server and more than one rank take ports that are free when they look.
PORTS = pytest.mark.xdist_group("ports")
LONG = {
    "acceptance",  # test_simulation.py has it with other prompts
    "lost_engine",
    "lost_worker",
}
pytestmark = [pytest.mark.lmdeploy]


def params(where: str) -> list[object]:
    found = [s for s in SCENARIOS if where in s.where]
    marks = {s.name: [PORTS] if s.via == "server" or s.engine.get("tp", 1) > 1 else [] for s in found}
    for name in LONG & marks.keys():
        marks[name].append(pytest.mark.long)
    return [pytest.param(s, id=s.name, marks=marks[s.name]) for s in found]


@pytest.fixture(scope="session")
def reports() -> Iterator[list[ScenarioReport]]:
    """Collect what ran, and write it at the end."""
    done: list[ScenarioReport] = []
    yield done
    out = os.environ.get("E2E_OUT")
    if out and done:
        report.write(report.summary(done, {}, npu_target() or CPU, "pytest tests/e2e/test_scenarios.py"), Path(out))
        report.write_records(done, Path(out))


def check(one: Scenario, target: Target, reports: list[ScenarioReport]) -> ScenarioReport:
    why = cannot_run(one, target)
    if why is not None:
        pytest.skip(why)
    done = runner.run_scenario(one, target)
    reports.append(done)
    assert not done.failures, "\n".join(done.failures)
    assert done.runs
    return done


@pytest.mark.cpu
@pytest.mark.parametrize("one", params("cpu"))
def test_scenario_holds_on_a_cpu(one: Scenario, reports: list[ScenarioReport]) -> None:
    check(one, CPU, reports)


def npu_target() -> Target | None:
    model = os.environ.get("E2E_MODEL")
    dtype = os.environ.get("E2E_DTYPE") or "bfloat16"
    if not model:
        return None
    return Target(Path(model).resolve(), vendor="ascend", reference="plain", dtype=dtype, patience=10)


@pytest.mark.npu
@pytest.mark.timeout(0)  # the scenarios' own limits hold
@pytest.mark.parametrize("one", params("npu"))
def test_scenario_holds_on_a_card(one: Scenario, reports: list[ScenarioReport]) -> None:
    target = npu_target()
    if target is None:
        pytest.skip("no model for a card: make e2e-npu MODEL=PATH")
    check(one, target, reports)


# ------------------------------------------------------------- what a card's run does, and that the runner can say no


def small(**settings: object) -> Scenario:
    given = {"name": "small", "what": "a small one", "tokens": 16, "rounds": ((Request(tokens=40), Request(tokens=1)),)}
    return Scenario.model_validate(given | settings)


def test_the_rule_of_a_card_holds_here_too() -> None:
    """bfloat16 with drafts against LMDeploy itself, one request at a time: logits and near ties."""
    done = runner.run_scenario(small(dtype="bfloat16", drafts=(3,)), Target(TRAINED, reference="plain"))
    assert not done.failures
    assert done.runs[0].verdicts[0].rule == "divergence"
    steps = done.runs[0].counters["prefill_steps"] + done.runs[0].counters["verify_steps"]
    assert done.runs[0].steps == steps > 0
    assert done.runs[0].as_dict()["tokens_per_step"] == round(32 / steps, 2)
    assert done.runs[0].verdicts[0].facts["logits"] > 100
    assert done.runs[0].counters["verify_steps"] > 0


@PORTS
def test_the_rule_of_a_card_holds_through_the_server() -> None:
    done = runner.run_scenario(small(dtype="bfloat16", drafts=(3,), via="server"), Target(TRAINED, reference="plain"))
    assert not done.failures
    assert done.runs[0].verdicts[0].facts["logits"] > 100
    assert done.runs[0].executor == "server"


def test_a_planted_fault_is_told(tmp_path: Path) -> None:
    plugin = tmp_path / "reversed_taps.py"
    plugin.write_text("from tests.faults import plant\nplant('taps_in_reverse_order')\n")
    env = {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    done = runner.run_scenario(small(), Target(TRAINED, plugins=("reversed_taps",), env=env))
    assert any("request 0 (40 tokens): token" in f for f in done.failures), done.failures


def test_what_did_not_run_is_told() -> None:
    """Right tokens are not enough: no prompt was in the cache, none preempted, no batch padded, one rank only."""
    expect = ("history", "prefix_hits", "padded_rows", "recomputed")
    done = runner.run_scenario(small(expect=expect), CPU)
    assert not done.runs[0].verdicts[0].failures
    told = "\n".join(done.failures)
    assert "prefill_rows_with_history is 0" in told
    assert "padded_rows is 0" in told
    assert "no prefix was found in the cache" in told
    assert "none was preempted" in told


def test_a_run_of_more_ranks_than_left_a_record_is_told() -> None:
    run = next(small(engine={"tp": 2}).runs())
    assert run.ranks == 2
    assert "1 processes ran a model; wanted 2" in judge.did_not_run(
        small(), run, [], [], [{"counters": {}, "rank": 0}], []
    )


def test_an_engine_that_cannot_start_is_told() -> None:
    done = runner.run_scenario(small(engine={"num_gpu_blocks": 3}), CPU)
    assert done.error is not None
    assert "num_gpu_blocks should be greater than 16" in done.error
    assert done.failures


def test_a_wrong_histogram_is_told() -> None:
    one = small(drafts=(3,), tokens=24, simulated=True, rounds=((Request(tokens=30), Request(tokens=31)),))
    done = runner.run_scenario(one, CPU)
    assert not done.failures
    measured = done.runs[0].acceptance
    assert measured is not None
    wrong = judge.not_as_simulated(
        one.model_copy(update={"tokens": 23}), CPU, next(one.runs()), asked_for(one), measured
    )
    assert wrong
    assert "simulated" in wrong[0]


def asked_for(one: Scenario) -> list[asking.Asked]:
    return [a for requests in asking.ask_for(one, CPU, float("inf")) for a in requests]
