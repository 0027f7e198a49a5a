"""Run one scenario through stock `lmdeploy.pipeline` in a process of its own, and print one JSON line.

The part that serves is what a user writes: no import of this package before the answers are there. Faults for negative
controls are put in from outside, by name. What ran, and how many drafts were accepted, is what every process of the
engine records under DLINFER_EXT_COUNTERS.

Usage: python -m tests.e2e.run_pipeline SCENARIO.json
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MARK = "RESULT "


def accepted(record: dict[str, Any]) -> dict[str, int]:
    """Return how many rows of verify steps accepted how many drafts, from a record of counters.py."""
    histogram = Counter(row[2] for row in record["verify_rows"])
    return {str(n): times for n, times in sorted(histogram.items())}


def left_behind() -> list[dict[str, Any]]:
    """Return what the processes that have ended recorded, by rank."""
    files = Path(os.environ["DLINFER_EXT_COUNTERS"]).glob("counters-*.json")
    return sorted((json.loads(f.read_text(encoding="utf-8")) for f in files), key=lambda r: int(r["rank"]))


def in_workers(pipe: Any, call: Callable[[Any], Any]) -> list[Any]:
    """Return `call(worker)` of every Ray worker by rank, run in the worker; [] for the other executors."""
    executor = pipe.async_engine.engine.executor
    if type(executor).__name__ != "RayExecutor":
        return []
    import ray

    results: list[Any] = ray.get([worker.__ray_call__.remote(call) for worker in executor.workers], timeout=60)
    return results


def report(_: Any) -> dict[str, Any]:
    from dlinfer_ext.framework.lmdeploy import counters, status

    return {**counters.record(), "status": status()}


def lose_worker(pipe: Any, prompt: str, config: Any) -> list[dict[str, Any]]:
    """Kill the last worker during an answer; return how that answer and a later one end, and after how long."""
    pid = in_workers(pipe, lambda _: os.getpid())[-1]

    def ask() -> Iterator[Any]:
        return iter(pipe.stream_infer(prompt, gen_config=config, do_preprocess=False))

    def end(answer: Iterator[Any], since: float) -> dict[str, Any]:
        *_, last = answer
        return {"finish": last.finish_reason, "message": last.error_message, "seconds": time.monotonic() - since}

    answer = ask()
    for _ in range(3):
        next(answer)
    os.kill(pid, signal.SIGKILL)
    return [end(answer, time.monotonic()), end(ask(), time.monotonic())]


def run(scenario: dict[str, Any]) -> dict[str, Any]:
    from lmdeploy import GenerationConfig, PytorchEngineConfig, pipeline
    from lmdeploy.messages import SpeculativeConfig

    if scenario.get("fault"):
        from tests.faults import plant

        plant(scenario["fault"])
    engine = {
        "device_type": "ascend",
        "eager_mode": True,
        "max_batch_size": 8,
        "num_gpu_blocks": 64,
        "session_len": 1024,
        "language_model_only": True,
        **scenario.get("engine", {}),
    }
    if scenario.get("top_logits"):
        engine["logprobs_mode"] = "raw_logits"
    more: dict[str, Any] = {}
    if scenario.get("drafts"):
        more["speculative_config"] = SpeculativeConfig(method="qwen3_5_mtp", num_speculative_tokens=scenario["drafts"])
    pipe = pipeline(scenario["model"], backend_config=PytorchEngineConfig(**engine), log_level="ERROR", **more)
    config = GenerationConfig(
        max_new_tokens=scenario["tokens"],
        do_sample=False,
        ignore_eos=True,
        logprobs=scenario.get("top_logits") or None,
    )
    outputs: list[Any] = []
    with pipe:
        if scenario.get("lose_worker"):
            return {"ends": lose_worker(pipe, scenario["batches"][0][0], config)}
        for batch in scenario["batches"]:
            outputs += pipe(batch, gen_config=config, do_preprocess=False)
        workers = in_workers(pipe, report)
        executor = type(pipe.async_engine.engine.executor).__name__
    own = report(None)
    if executor == "MPExecutor":  # its workers cannot be asked; they have left their records
        workers = left_behind()
    return {
        "tokens": [o.token_ids for o in outputs],
        "finish": [o.finish_reason for o in outputs],
        "cached_tokens": [o.cached_tokens for o in outputs],
        "top_logits": [o.logprobs for o in outputs],
        "accepted": accepted((workers or [own])[0]),
        "executor": executor,
        "workers": [{k: v for k, v in w.items() if k != "verify_rows"} for w in workers],
        "counters": own["counters"],
        "status": own["status"],
    }


if __name__ == "__main__":
    result = run(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    sys.stdout.write(MARK + json.dumps(result) + "\n")
