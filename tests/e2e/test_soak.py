"""A server under load: the short form of `make soak`, and faults in a running server that it has to find."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final

import pytest

from dlinfer_ext.e2e import runner, scenario
from dlinfer_ext.e2e.results import ScenarioReport
from dlinfer_ext.e2e.scenario import Scenario, Span
from dlinfer_ext.e2e.target import Target
from tests.e2e.engine import ROOT
from tests.e2e.glm_checkpoints import TRAINED_GLM

pytestmark = [pytest.mark.lmdeploy, pytest.mark.long, pytest.mark.xdist_group("ports")]
TRAINED: Final = ROOT / "examples" / "checkpoints" / "tiny_qwen3_5"
FAULTS: Final = Path(__file__).parent / "server_faults"
LOAD: Final = scenario.load(scenario.find("soak_load"))


def part(**settings: Any) -> Scenario:
    """Return soak_load with other settings of its soak."""
    assert LOAD.soak is not None
    return LOAD.model_copy(update={"name": "soak_part", "soak": LOAD.soak.model_copy(update=settings)})


# Half a minute says little about a share of 1 % of memory; all else is as in the full one.
SHORT: Final = part(requests=80, per_second=4, new=Span(least=1, most=16), malformed=0.1, warm_up_s=8, growth=0.03)
CUT: Final = part(
    requests=50,
    per_second=10,
    tokens=Span(least=1, most=100),
    new=Span(least=8, most=16),
    malformed=0.1,
    again=0.0,
    growth=None,
)
# Many requests of few tokens: a tenth of a MiB each is lost.
LEAK: Final = part(
    requests=400,
    per_second=10,
    tokens=Span(least=1, most=30),
    new=Span(least=1, most=4),
    malformed=0.0,
    again=0.0,
    cancelled=0.0,
    warm_up_s=10,
    growth=0.02,
).model_copy(update={"expect": ("drafts_accepted", "drafts_rejected")})


def run(one: Scenario, fault: str = "", model: Path = TRAINED) -> ScenarioReport:
    """Run a soak, with a fault in every process of its server."""
    paths = os.pathsep.join((str(FAULTS), str(ROOT)))
    env = {"PYTHONPATH": paths, "SERVER_FAULT": fault} if fault else {}
    done = runner.run_scenario(one, Target(model, env=env))
    assert done.runs, done.error
    return done


@pytest.mark.parametrize("model", [TRAINED, TRAINED_GLM], ids=["qwen", "glm"])
def test_short_soak_holds(model: Path) -> None:
    done = run(SHORT, model=model)
    assert not done.failures, "\n".join(done.failures)
    found = done.runs[0].soak
    assert found is not None
    assert found["requests"] == 80
    assert found["finished"] + found["cancelled"] + found["malformed"] == 80
    assert found["finished"] > 50
    for name in ("cancelled", "malformed", "prefix_hit_tokens"):
        assert found[name] > 0
    assert found["slots"] > found["slots_cached"] > 0


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("", None),
        ("slot_is_kept", r"1 of \d+ state slots are neither free nor cached"),
        ("block_is_kept", r"1 of \d+ blocks are neither free nor cached"),
        ("answers_are_mixed", r"request \d+ \(\d+ tokens\): token \d+ is "),
        ("nothing_is_refused", r"engine is unavailable"),
    ],
)
def test_a_fault_in_the_server_is_told(fault: str, told: str | None) -> None:
    """Without one the same load holds."""
    failures = run(CUT, fault).failures
    if told is None:
        assert not failures, "\n".join(failures)
    else:
        assert any(re.search(told, f) for f in failures), failures


@pytest.mark.parametrize("fault", ["", "list_grows"])
def test_a_list_that_grows_is_told(fault: str) -> None:
    failures = run(LEAK, fault).failures
    told = [f for f in failures if "memory grows by" in f]
    assert bool(told) == bool(fault), failures
    assert failures == told


def test_a_worker_that_nobody_watches_is_told() -> None:
    """LMDeploy's own: the answers of two ranks wait for good, here until their clients give up."""
    one = scenario.load(scenario.find("lost_worker")).model_copy(update={"timeout_s": 40})
    failures = run(one, "workers_are_not_watched").failures
    assert any(re.search(r"answer 0 under way took \d+ s to end; wanted 10", f) for f in failures), failures
