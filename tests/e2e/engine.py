"""Run a scenario of `run_pipeline.py` in a process of its own, and the reference it is compared with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
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
    fault: str = "",
    top_logits: int = 0,
    lose_worker: bool = False,
    timeout_s: float = 240,
    env: dict[str, str] | None = None,
    **engine: Any,
) -> dict[str, Any]:
    """Run one scenario and return what `run_pipeline.run` returns; in fp32 unless `env` says otherwise.

    With `top_logits` the result holds that many of the largest logits of every generated token, by id. With
    `lose_worker` it holds only how the first prompt ends while a Ray worker is killed, and how it ends afterwards.

    Raises:
        AssertionError: the process failed or printed no result; its output is in the message.
    """
    scenario = {
        "model": str(model),
        "batches": batches,
        "tokens": tokens,
        "drafts": drafts,
        "fault": fault,
        "top_logits": top_logits,
        "lose_worker": lose_worker,
        "engine": engine,
    }
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DLINFER_EXT_")}
    clean |= {
        "DLINFER_EXT_VENDOR": "cpu",
        "DLINFER_EXT_CPU_DTYPE": "float32",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DLINFER_EXT_STRICT": "1",
        **(env or {}),
    }
    with tempfile.TemporaryDirectory(prefix="dlinfer_ext_e2e_") as folder:
        file = Path(folder) / "scenario.json"
        file.write_text(json.dumps(scenario), encoding="utf-8")
        clean.setdefault("DLINFER_EXT_COUNTERS", str(Path(folder) / "counters"))
        line = [sys.executable, "-m", "tests.e2e.run_pipeline", str(file)]
        code, stdout, stderr = _run_group(line, clean, timeout_s)
    results = [line for line in stdout.splitlines() if line.startswith("RESULT ")]
    assert results, f"no result, exit code {code}:\n{stdout[-2000:]}\n{stderr[-6000:]}"
    result: dict[str, Any] = json.loads(results[-1].removeprefix("RESULT "))
    if lose_worker:
        return result
    assert result["workers"] or result["executor"] == "UniExecutor", "the workers left no record"
    for process in result["workers"] or [result]:
        assert process["counters"].get("causal_conv1d", 0) > 0, "our operators did not run"
    return result


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
