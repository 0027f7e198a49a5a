"""Run requests through stock `lmdeploy.pipeline` in a process of its own, as a user would, and write what happened.

    python -m dlinfer_ext.framework.lmdeploy.session JOB.json RESULT.json

A job holds one or more engine runs, one after the other in this process. Nothing here installs anything: the adapter
has to get into this process and its workers by itself. What ran is taken from the counters of every process that ran a
model (DLINFER_EXT_COUNTERS), so the executor does not matter.

Job: {"plugins": [module, …], "runs": [run, …]} with run = {"model": path, "drafts": n, "engine": {fields of
PytorchEngineConfig}, "rounds": [[request, …], …], "top_logits": n, "lose_worker": bool} and request = {"text", "new",
"stop_token_ids", "cancel_after", "top_k", "temperature", "seed"}; all but text and new are optional. A plugin is
imported before the engine starts; tests plant faults that way.

Result: {"runs": [{"outputs": [{"tokens", "finish", "cached_tokens", "prompt_tokens", "top_logits", "error"}, …],
"processes": [records of counters.py of whoever ran the model], "own": that of this process, "executor", "seconds",
"ends"}, …]}.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ... import envs
from .drafts import draft_method


def _config(request: dict[str, Any], top_logits: int) -> Any:
    from lmdeploy import GenerationConfig

    sampled = request.get("top_k", 1) > 1
    return GenerationConfig(
        max_new_tokens=request["new"],
        do_sample=sampled,
        top_k=request.get("top_k", 1),
        temperature=request.get("temperature", 1.0),
        random_seed=request.get("seed"),
        ignore_eos=not request.get("stop_token_ids"),
        stop_token_ids=request.get("stop_token_ids") or None,
        logprobs=top_logits or None,
    )


class _Output:
    """What one request has given so far."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.last: Any = None
        self.logits: list[dict[str, float]] = []
        self.cancelled = False

    def add(self, response: Any) -> None:
        self.tokens += response.token_ids or []
        self.logits += response.logprobs or []
        self.last = response

    def result(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "top_logits": self.logits,
            "finish": self.last.finish_reason if self.last else None,
            "error": getattr(self.last, "error_message", None),
            "cached_tokens": getattr(self.last, "cached_tokens", 0) or 0,
            "prompt_tokens": getattr(self.last, "input_token_len", 0),
        }


def _whole_round(pipe: Any, requests: list[dict[str, Any]], configs: list[Any]) -> list[dict[str, Any]]:
    """Ask for a batch as most users do: one call, one list of answers."""
    results = []
    for response in pipe([r["text"] for r in requests], gen_config=configs, do_preprocess=False):
        output = _Output()
        output.add(response)
        results.append(output.result())
    return results


def _streamed_round(pipe: Any, requests: list[dict[str, Any]], configs: list[Any]) -> list[dict[str, Any]]:
    """Ask for a batch as a stream, and cancel the requests that say so."""
    outputs = [_Output() for _ in requests]
    sessions = [pipe.session_mgr.get() for _ in requests]
    stream = pipe.stream_infer(
        [r["text"] for r in requests], sessions=sessions, gen_config=configs, do_preprocess=False
    )
    for response in stream:
        output, request = outputs[response.index], requests[response.index]
        output.add(response)
        limit = request.get("cancel_after")
        if limit and len(output.tokens) >= limit and not output.cancelled:
            output.cancelled = True
            sessions[response.index].abort()
    return [o.result() for o in outputs]


def _worker_pids(pipe: Any) -> list[int]:
    """Return the process ids of a Ray or mp executor's workers, by rank."""
    executor = pipe.async_engine.engine.executor
    if type(executor).__name__ == "RayExecutor":
        import ray

        pids: list[int] = ray.get([w.__ray_call__.remote(lambda _: os.getpid()) for w in executor.workers], timeout=60)
        return pids
    return [proc._proc.pid for proc in executor.procs]


def _lose_worker(pipe: Any, request: dict[str, Any], config: Any) -> list[dict[str, Any]]:
    """Kill the last worker during an answer; return how that answer and a later one end, and after how long."""
    pid = _worker_pids(pipe)[-1]

    def ask() -> Iterator[Any]:
        return iter(pipe.stream_infer(request["text"], gen_config=config, do_preprocess=False))

    def end(answer: Iterator[Any], since: float) -> dict[str, Any]:
        *_, last = answer
        return {"finish": last.finish_reason, "message": last.error_message, "seconds": time.monotonic() - since}

    answer = ask()
    for _ in range(3):
        next(answer)
    os.kill(pid, signal.SIGKILL)
    return [end(answer, time.monotonic()), end(ask(), time.monotonic())]


def _records_of_workers(folder: Path, own: int, ranks: int, patience_s: float = 20) -> list[dict[str, Any]]:
    """Return what the workers wrote at their end, which may be a little after the engine has closed."""
    deadline = time.monotonic() + patience_s
    while True:
        records = [json.loads(f.read_text(encoding="utf-8")) for f in sorted(folder.glob("counters-*.json"))]
        workers = [r for r in records if r["pid"] != own]
        if len(workers) >= ranks or time.monotonic() > deadline:
            return workers
        time.sleep(0.2)


def run_one(
    run: dict[str, Any], records: Path, each: Callable[[list[dict[str, Any]]], None] | None = None
) -> dict[str, Any]:
    """Start an engine, ask it, close it; `records` is the folder of its processes' counters.

    `each` is called with the outputs of every round before the next one is taken from `rounds`.

    Raises:
        Exception: whatever LMDeploy raises at start.
    """
    os.environ[envs.COUNTERS.name] = str(records)
    from lmdeploy import PytorchEngineConfig, pipeline
    from lmdeploy.messages import SpeculativeConfig

    from . import counters

    counters.reset()
    engine: dict[str, Any] = {
        "device_type": "ascend",
        "eager_mode": True,
        "max_batch_size": 8,
        "session_len": 1024,
        "language_model_only": True,
    } | run["engine"]
    top = run.get("top_logits", 0)
    if top:
        engine["logprobs_mode"] = "raw_logits"
    more: dict[str, Any] = {}
    if run["drafts"]:
        more["speculative_config"] = SpeculativeConfig(
            method=draft_method(Path(run["model"])), num_speculative_tokens=run["drafts"]
        )
    pipe = pipeline(run["model"], backend_config=PytorchEngineConfig(**engine), log_level="ERROR", **more)
    outputs: list[dict[str, Any]] = []
    ends: list[dict[str, Any]] = []
    started = time.monotonic()
    with pipe:
        executor = type(pipe.async_engine.engine.executor).__name__
        for requests in run["rounds"]:
            configs = [_config(r, top) for r in requests]
            if run.get("lose_worker"):
                ends = _lose_worker(pipe, requests[0], configs[0])
                break
            ask = _streamed_round if any(r.get("cancel_after") for r in requests) else _whole_round
            found = ask(pipe, requests, configs)
            outputs += found
            if each is not None:
                each(found)
        seconds = time.monotonic() - started
    own = counters.record()
    workers = _records_of_workers(records, own["pid"], engine.get("tp", 1) if executor != "UniExecutor" else 0)
    return {
        "outputs": outputs,
        "ends": ends,
        "processes": workers or [own],
        "executor": executor,
        "own": own,
        "seconds": seconds,
    }


def main(job_file: str, result_file: str) -> None:
    """Run the job and write its result."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    for plugin in job.get("plugins", []):
        importlib.import_module(plugin)
    with tempfile.TemporaryDirectory(prefix="dlinfer_ext_records_") as folder:
        results = []
        for number, run in enumerate(job["runs"]):
            records = Path(folder) / str(number)
            records.mkdir()
            results.append(run_one(run, records))
    Path(result_file).write_text(json.dumps({"runs": results}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:3])
