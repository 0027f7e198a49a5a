"""Run a scenario through stock LMDeploy and judge it."""

from __future__ import annotations

import time
from collections.abc import Callable

from . import acceptance, asking, compare, engines, judge, prompts
from .results import RunReport, ScenarioReport
from .scenario import Request, Scenario
from .target import Target


def run_scenario(scenario: Scenario, target: Target, say: Callable[[str], None] = lambda _: None) -> ScenarioReport:
    """Run every engine run of a scenario and judge it; engine failures end up in the report."""
    report = ScenarioReport(scenario.name, scenario.what, target.reference, target.dtype_of(scenario))
    started = time.monotonic()
    deadline = started + scenario.timeout_s * target.patience
    try:
        if scenario.law is not None:
            _run_law(scenario, target, report, deadline)
        else:
            _run_rounds(scenario, target, report, deadline, say)
    except (engines.RunFailed, RuntimeError, ValueError) as error:
        report.error = f"{type(error).__name__}: {error}"
    report.seconds = time.monotonic() - started
    return report


def _run_rounds(
    scenario: Scenario, target: Target, report: ScenarioReport, deadline: float, say: Callable[[str], None]
) -> None:
    asked = asking.ask_for(scenario, target, deadline)
    bodies = [[a.body() for a in requests] for requests in asked]
    runs = [r for r in scenario.runs() for _ in range(scenario.engines)]
    if scenario.via == "server":
        for run in runs:
            say(f"{scenario.name}: {run.label}, server")
            report.runs.append(
                judge.judge(scenario, target, run, asked, engines.through_server(scenario, target, run, bodies))
            )
        return
    say(f"{scenario.name}: {len(runs)} engine run{'s' if len(runs) > 1 else ''}")
    results = engines.session(scenario, target, [engines.job(r, target, scenario, bodies) for r in runs], deadline)
    for run, result in zip(runs, results, strict=True):
        report.runs.append(judge.judge(scenario, target, run, asked, result))


def _run_law(scenario: Scenario, target: Target, report: ScenarioReport, deadline: float) -> None:
    """Draw many short texts and compare their joint law with the exact one."""
    from . import reference

    law = scenario.law
    assert law is not None
    prompt = prompts.build(asking.tokenizer_of(target.model), Request(tokens=law.tokens), 1)
    chances = reference.law(target.model, prompt.ids, law.new, law.top_k, law.temperature)
    body = {"text": prompt.text, "new": law.new, "top_k": law.top_k, "temperature": law.temperature}
    for run in scenario.runs():
        size = int(run.engine.get("max_batch_size", 8))
        seeds = iter(range(law.requests))
        rounds = [
            [body | {"seed": next(seeds)} for _ in range(min(size, law.requests - start))]
            for start in range(0, law.requests, size)
        ]
        result = engines.session(scenario, target, [engines.job(run, target, scenario, rounds)], deadline)[0]
        rows: list[list[int]] = next((p["verify_rows"] for p in result["processes"] if p.get("verify_rows")), [])
        verdicts = [compare.law([o["tokens"] for o in result["outputs"]], chances, law.alpha)]
        if run.drafts:
            verdicts.append(judge.first_drafts(target, law, prompt.ids, chances, rows))
        counters = result["processes"][0]["counters"]
        failures = [f for v in verdicts for f in v.failures]
        if run.drafts and not counters.get("rejection_sample"):
            failures.append("rejection_sample is 0")
        report.runs.append(
            RunReport(
                label=run.label,
                drafts=run.drafts,
                verdicts=verdicts,
                failures=failures,
                counters={k: v for k, v in counters.items() if k != "pid"},
                acceptance=acceptance.measure(rows, run.drafts, []) if rows else None,
                seconds=result["seconds"],
                tokens=sum(len(o["tokens"]) for o in result["outputs"]),
                steps=judge.steps_of(counters),
                executor=result["executor"],
                records=result["processes"],
            )
        )
