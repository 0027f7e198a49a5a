"""Run prompts through stock LMDeploy in a process of its own, and the reference they are compared with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tests.e2e.checkpoints import transformers_greedy

ROOT = Path(__file__).parents[2]
SHORT = ("ab", "x")  # two tokens and one: shorter than the convolution's window
PROMPTS = (
    "hello world",
    "ab",
    "The quick brown fox jumps over the lazy dog. " * 3,
    "x" * 70 + "yz",
    "0123456789 abcdefghijklmnopqrstuvwxyz",
)


def run(
    model: Path,
    batches: list[list[str]],
    *,
    tokens: int = 48,
    drafts: int = 0,
    top_logits: int = 0,
    lose_worker: bool = False,
    timeout_s: float = 240,
    env: dict[str, str] | None = None,
    **engine: Any,
) -> dict[str, Any]:
    """Run batches of prompts through stock LMDeploy and return what happened; in fp32 unless `env` says otherwise.

    Returns:
        "tokens", "finish", "cached_tokens", "top_logits" by prompt; "accepted", verify rows by number of accepted
        drafts; "counters" of the process that ran the model (of the first rank); "workers", the records of all of
        them; "executor". With `lose_worker` "ends" only: how the first answer ends while the last worker is killed,
        and how a later one does.

    Raises:
        AssertionError: the process failed; its output is in the message.
    """
    asked = [[{"text": text, "new": tokens} for text in batch] for batch in batches]
    job = {"model": str(model), "drafts": drafts, "engine": {"num_gpu_blocks": 64} | engine, "rounds": asked}
    more = {"top_logits": top_logits, "lose_worker": lose_worker}
    return run_many([job | more], timeout_s=timeout_s, env=env)[0]


def run_many(
    jobs: list[dict[str, Any]],
    *,
    timeout_s: float = 240,
    env: dict[str, str] | None = None,
    plugins: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    """Run several engines, one after the other in one process (see `session.py`); results as of `run`.

    `plugins` are modules that the process imports before the first engine starts.
    """
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DLINFER_EXT_") or k == "DLINFER_EXT_TOOLCHAIN"}
    clean |= {
        "DLINFER_EXT_VENDOR": "cpu",
        "DLINFER_EXT_CPU_DTYPE": "float32",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DLINFER_EXT_STRICT": "1",
        **(env or {}),
    }
    with tempfile.TemporaryDirectory(prefix="dlinfer_ext_e2e_") as folder:
        job, out = Path(folder) / "job.json", Path(folder) / "result.json"
        job.write_text(json.dumps({"plugins": plugins, "runs": jobs}), encoding="utf-8")
        line = [sys.executable, "-m", "dlinfer_ext.framework.lmdeploy.session", str(job), str(out)]
        code, stdout, stderr = _run_group(line, clean, timeout_s)
        assert out.is_file(), f"no result, exit code {code}:\n{stdout[-2000:]}\n{stderr[-6000:]}"
        results = json.loads(out.read_text(encoding="utf-8"))["runs"]
    return [_summary(one, bool(asked.get("lose_worker"))) for one, asked in zip(results, jobs, strict=True)]


def _summary(result: dict[str, Any], lost_worker: bool) -> dict[str, Any]:
    if lost_worker:
        return {"ends": result["ends"]}
    workers = sorted(result["processes"], key=lambda record: record["rank"])
    for worker in workers:
        assert worker["counters"].get("causal_conv1d", 0) > 0, "our operators did not run"
    accepted = Counter(row[2] for worker in workers for row in worker["verify_rows"])
    columns = {
        name: [o[name] for o in result["outputs"]] for name in ("tokens", "finish", "cached_tokens", "top_logits")
    }
    return columns | {
        "accepted": {str(n): times for n, times in sorted(accepted.items())},
        "counters": workers[0]["counters"],
        "workers": workers,
        "executor": result["executor"],
        "own": result["own"],
    }


def _run_group(line: list[str], env: dict[str, str], timeout_s: float) -> tuple[int | None, str, str]:
    """Run a command in a process group of its own; after `timeout_s` seconds end all of it. None: it was ended."""
    process = subprocess.Popen(
        line, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out = process.communicate(timeout=timeout_s)
        return process.returncode, *out
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, *process.communicate()


@cache
def expected(model: Path, prompts: tuple[str, ...], tokens: int) -> list[list[int]]:
    """Return transformers' greedy continuations."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    return transformers_greedy(model, [tokenizer(p).input_ids for p in prompts], tokens)


def first_difference(got: list[int], want: list[int]) -> int | None:
    """Return the position of the first token that differs, or None."""
    pairs = zip(got, want, strict=True)
    return next((i for i, (g, w) in enumerate(pairs) if g != w), None)


def assert_identical(result: dict[str, Any], want: list[list[int]]) -> None:
    """Fail with the first difference of every prompt that has one."""
    assert len(result["tokens"]) == len(want)
    different = {i: first_difference(g, w) for i, (g, w) in enumerate(zip(result["tokens"], want, strict=True))}
    wrong = {i: at for i, at in different.items() if at is not None}
    assert not wrong, f"prompt: first differing token = {wrong}; counters {result['counters']}"


def accepted(result: dict[str, Any]) -> int:
    """Return how many drafts were accepted."""
    return sum(int(n) * times for n, times in result["accepted"].items())
