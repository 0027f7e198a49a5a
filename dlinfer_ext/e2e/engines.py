"""Start stock LMDeploy in processes of its own, ask it, and bring back what it answered and counted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from .. import envs
from . import client, lost, server, soak
from .scenario import Run, Scenario
from .target import Target

Logits = dict[int, float]  # the largest logits at a place, by token id; empty where no logits are compared
SESSION: Final = "dlinfer_ext.framework.lmdeploy.session"
TOP_LOGITS: Final = 10


class RunFailed(RuntimeError):
    """The engine's process ended without a result; the message holds the end of its output."""


def job(run: Run, target: Target, scenario: Scenario, rounds: list[list[dict[str, Any]]]) -> dict[str, Any]:
    engine = dict(run.engine)
    if target.vendor == "cpu":
        engine.setdefault("num_gpu_blocks", 64)
    dtype = target.dtype_of(scenario)
    if dtype != "float32":
        engine.setdefault("dtype", dtype)
    return {
        "model": str(target.model),
        "drafts": run.drafts,
        "engine": engine,
        "rounds": rounds,
        "top_logits": 0 if dtype == "float32" else TOP_LOGITS,
        "lose_worker": scenario.lose_worker,
    }


def session(scenario: Scenario, target: Target, runs: list[dict[str, Any]], deadline: float) -> list[dict[str, Any]]:
    """Run jobs in one process of their own, in a group that ends with it.

    Raises:
        RunFailed: no result in time.
    """
    with tempfile.TemporaryDirectory(prefix="dlinfer_ext_e2e_") as folder:
        job, out, log = (Path(folder) / n for n in ("job.json", "result.json", "log"))
        job.write_text(json.dumps({"plugins": target.plugins, "runs": runs}), encoding="utf-8")
        line = [sys.executable, "-m", SESSION, str(job), str(out)]
        with log.open("wb") as stream:
            process = subprocess.Popen(
                line, env=target.environment(scenario), stdout=stream, stderr=stream, start_new_session=True
            )
            try:
                code: int | None = process.wait(max(5.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end_group(process)
        if not out.is_file():
            how = (
                f"exit code {code}"
                if code is not None
                else f"no result within {scenario.timeout_s * target.patience:.0f} s"
            )
            raise RunFailed(f"{how}:\n{log.read_text(encoding='utf-8', errors='replace')[-4000:]}")
        results: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))["runs"]
    return results


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


def through_server(scenario: Scenario, target: Target, run: Run, bodies: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Run the rounds through a stock server and read what its processes counted once it has ended.

    Of a soak there are besides: "refused", the replies to its malformed requests; "held", what the engine held once it
    was idle; "memory", samples of the server's processes. Where a worker is to be lost, "ends" tells how answers ended,
    and "wrong" what the server got wrong beside that.
    """
    port, flags = server.free_port(), []
    for name, value in run.engine.items():
        flags += [f"--{name.replace('_', '-')}"] if value is True else [f"--{name.replace('_', '-')}", str(value)]
    if target.dtype_of(scenario) != "float32":
        flags += ["--dtype", target.dtype_of(scenario), "--logprobs-mode", "raw_logits"]
        bodies = [[body | {"top_logits": TOP_LOGITS} for body in requests] for requests in bodies]
    line = server.command(target.model, "model", port, run.drafts, tuple(flags))
    with tempfile.TemporaryDirectory(prefix="dlinfer_ext_records_") as folder:
        env = target.environment(scenario) | {envs.COUNTERS.name: folder}
        outputs: list[dict[str, Any]] = []
        more: dict[str, Any] = {}
        limit = scenario.timeout_s * target.patience
        if scenario.soak is not None:
            env |= soak.PROBES
        with server.serving(line, "model", port, env, 180 * target.patience) as running:
            started = time.monotonic()
            if scenario.soak is not None:
                outputs, more = soak.ask(scenario.soak, running, bodies[0], limit, Path(folder))
            elif scenario.lose_worker:
                ends, wrong = lost.kill_under_load(running, bodies[0], limit, Path(folder))
                more = {"ends": ends, "wrong": wrong}
            else:
                for requests in bodies:
                    outputs += client.ask_all(running.url, requests, limit)
            seconds = time.monotonic() - started
        if scenario.lose_worker:
            more["wrong"] += server.left_behind(running, port)
        records = [json.loads(f.read_text(encoding="utf-8")) for f in sorted(Path(folder).glob("counters-*.json"))]
    return {"outputs": outputs, "processes": records, "executor": "server", "seconds": seconds, "ends": []} | more


def logits_of(output: dict[str, Any]) -> tuple[Logits, ...]:
    return tuple({int(token): value for token, value in place.items()} for place in output.get("top_logits") or ())
