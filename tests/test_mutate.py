"""The mutation suite itself: its map is whole, and it tells a caught fault from one that survives or never ran."""

from __future__ import annotations

from typing import Any

import pytest

from dlinfer_ext.e2e.results import RunReport, ScenarioReport
from tests import mutate
from tests.engine_faults import plant

QUICK = mutate.Cut("short_beside_long", 4, rounds=1, tokens=16)


def report(failures: list[str], counters: dict[str, int], error: str | None = None) -> ScenarioReport:
    run = RunReport("drafts 4", 4, [], failures, counters, None, 1.0, 10, 5, "UniExecutor", [])
    return ScenarioReport("short_beside_long", "", "transformers", "float32", 1.0, [] if error else [run], error)


def test_every_fault_has_a_scenario_that_catches_it() -> None:
    assert set(mutate.CAUGHT_BY) == set(plant.faults())
    assert len(mutate.CAUGHT_BY) >= 24


@pytest.mark.parametrize("fault", sorted(plant.faults()))
def test_every_fault_says_what_it_does(fault: str) -> None:
    assert len(plant.describe(fault)) > 20


@pytest.mark.parametrize("cut", sorted(set(mutate.CAUGHT_BY.values()), key=str), ids=str)
def test_a_cut_leaves_one_engine_run_of_a_shipped_scenario(cut: mutate.Cut) -> None:
    (run,) = cut.load().runs()
    assert run.drafts == cut.drafts
    assert run.engine.items() >= dict(cut.engine).items()


JUDGED: dict[str, tuple[ScenarioReport, str]] = {
    "wrong tokens": (report(["request 0: token 3 is 1; wanted 2"], {"fault.every_draft_accepted": 7}), "caught"),
    "right tokens": (report([], {"fault.every_draft_accepted": 7}), "survived"),
    "wrong tokens, but not by the fault": (report(["request 0: token 3 is 1; wanted 2"], {}), "error"),
    "an engine that gave up": (
        report(["request 0: token 0 is the end; wanted 2"], {"fault.every_draft_accepted": 1}),
        "error",
    ),
    "never called": (report([], {"fault.no_draft_accepted": 7}), "error"),
    "no engine": (report([], {}, "RunFailed: exit code 1:\nImportError"), "error"),
}


@pytest.mark.parametrize("case", JUDGED)
def test_only_a_fault_that_ran_and_shows_is_caught(case: str) -> None:
    given, state = JUDGED[case]
    outcome = mutate.judge("every_draft_accepted", QUICK, given)
    assert (outcome.state, outcome.good) == (state, state == "caught")


def test_a_scenario_that_fails_without_a_fault_is_an_error() -> None:
    assert mutate.judge("", QUICK, report([], {})).good
    assert not mutate.judge("", QUICK, report(["request 0: token 3 is 1; wanted 2"], {})).good


@pytest.mark.lmdeploy
@pytest.mark.long
def test_a_fault_that_changes_nothing_survives(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(mutate, "CAUGHT_BY", {**dict.fromkeys(plant.CONTROLS, QUICK), "every_draft_accepted": QUICK})
    assert mutate.main(["--jobs", "1"]) == 1
    rows = {line.split(" | ")[0].strip("| "): line for line in capsys.readouterr().out.splitlines() if " | " in line}
    assert all("**survived**" in rows[name] for name in plant.CONTROLS)
    assert "token" in rows["every_draft_accepted"]
    assert "**" not in rows["every_draft_accepted"] + rows["none"]
