"""`bench engine`: the tiny trained checkpoints through stock LMDeploy on the CPU vendor, all sides in turn.

An engine per number of drafts is started and kept. A round of a case asks every engine for the same requests, first
with our operators and then with a loop over requests in their place: every ratio is of one machine at one time.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from .. import envs
from ..e2e import prompts
from ..e2e.asking import tokenizer_of
from ..e2e.scenario import Request
from .bench_measure import LEAST_ROUNDS, beside, spread
from .bench_record import Counts, Engine, Result
from .demo import CHECKPOINTS

CHILD = "dlinfer_ext.cli.bench_engine_child"
SIDES = ("ours", "loop")
START_S = 180.0
ROUND_S = 180.0
BLOCK = 64  # tokens of a cache block
COUNTED_NEW = 6


class EngineFailed(RuntimeError):
    """An engine's process did not answer; the message holds the end of its output."""


class _Child:
    """An engine's process: rounds go in, answers come out."""

    def __init__(self, process: subprocess.Popen[bytes], answers: IO[str], log: Path) -> None:
        self.process, self.answers, self.log = process, answers, log

    def answer(self, patience_s: float) -> dict[str, Any]:
        ready, _, _ = select.select([self.answers], [], [], patience_s)
        line = self.answers.readline() if ready else ""
        if not line:
            how = f"no answer within {patience_s:.0f} s"
            if ready:  # the end of its answers: it has ended, or is about to
                with contextlib.suppress(subprocess.TimeoutExpired):
                    how = f"it ended with exit code {self.process.wait(30)}"
            raise EngineFailed(f"engine: {how}:\n{self.log.read_text(encoding='utf-8', errors='replace')[-4000:]}")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, side: str, requests: list[dict[str, Any]], *, count: bool = False) -> dict[str, Any]:
        assert self.process.stdin is not None
        order = {"side": side, "count": count, "requests": requests}
        with contextlib.suppress(BrokenPipeError):  # it has ended, and `answer` tells how
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()
        return self.answer(ROUND_S)


@contextlib.contextmanager
def _started(job: dict[str, Any]) -> Iterator[_Child]:
    """Start an engine's process in a group that ends with the context."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DLINFER_EXT_")}
    kept = {v.name: os.environ[v.name] for v in (envs.ROUTE, envs.TOOLCHAIN) if v.name in os.environ}
    variables = {envs.VENDOR.name: "cpu", envs.STRICT.name: "1", envs.CPU_DTYPE.name: "float32"}
    variables |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory(prefix="dlinfer_ext_bench_") as folder:
        file, log = Path(folder) / "job.json", Path(folder) / "log"
        file.write_text(json.dumps(job), encoding="utf-8")
        reading, writing = os.pipe()
        with log.open("wb") as stream, os.fdopen(reading, encoding="utf-8") as answers:
            process = subprocess.Popen(
                [sys.executable, "-m", CHILD, str(file), str(writing)],
                env=clean | kept | variables,
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
                pass_fds=(writing,),
                start_new_session=True,
            )
            os.close(writing)
            try:
                yield _Child(process, answers, log)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(30)


def _job(folder: Path, drafts: int, batch: int, length: int) -> dict[str, Any]:
    blocks = batch * (-(-length // BLOCK) + 1) + 16
    engine = {"max_batch_size": batch, "num_gpu_blocks": blocks, "session_len": max(1024, length)}
    return {"model": str(folder.resolve()), "drafts": drafts, "engine": engine}


def measure(
    model: str,
    drafts: Sequence[int],
    batches: Sequence[int],
    lengths: Sequence[int],
    new: int,
    rounds: int,
    seconds: float,
    *,
    quiet: bool = False,
) -> tuple[list[Result], list[str]]:
    """Measure a checkpoint, and return what was measured and the cases for which no time was left.

    Args:
        model: "qwen" or "glm".
        drafts: numbers of drafts, an engine each.
        batches: requests at once.
        lengths: tokens of their prompts.
        new: tokens of each answer.
        rounds: most rounds of a case.
        seconds: for all of it, starts of engines included; a case that has begun gets its `LEAST_ROUNDS`.
        quiet: show no progress.

    Raises:
        EngineFailed: there is no checkpoint, or an engine did not start or answer.
    """
    from rich.progress import Progress

    folder = CHECKPOINTS[model][0]
    if not (folder / "config.json").is_file():
        raise EngineFailed(f"engine: {folder} holds no config.json; run from the root of the checkout")
    tokenizer = tokenizer_of(folder)
    cases = [(batch, length) for length in lengths for batch in batches]
    longest = max(lengths) + new + max(drafts) + 1
    results: list[Result] = []
    skipped: list[str] = []
    end = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(Progress(transient=True, disable=quiet))
        bar = progress.add_task(f"{model}: start", total=len(drafts) + len(cases))
        jobs = {number: _job(folder, number, max(batches), longest) for number in drafts}
        engines = {number: stack.enter_context(_started(job)) for number, job in jobs.items()}
        for engine in engines.values():
            engine.answer(START_S)
            progress.advance(bar)
        for done, (batch, length) in enumerate(cases):
            progress.update(bar, description=f"{model}: batch {batch} prompt {length}")
            left = end - time.monotonic()
            if done and left <= 0:
                skipped.append(f"{model} batch {batch} prompt {length}")
                continue
            share = time.monotonic() + left / (len(cases) - done)
            texts = [prompts.build(tokenizer, Request(tokens=length), n).text for n in range(batch)]
            requests = [{"text": text, "new": new} for text in texts]
            results += _case(model, engines, batch, length, requests, rounds, share)
            progress.advance(bar)
    return results, skipped


def _case(
    model: str,
    engines: dict[int, _Child],
    batch: int,
    length: int,
    requests: list[dict[str, Any]],
    rounds: int,
    end: float,
) -> list[Result]:
    sides = [(number, side) for number in engines for side in SIDES]
    # The counted round comes first, so that nothing is made for the first time in a timed one; a few steps will do.
    few = [r | {"new": min(r["new"], COUNTED_NEW)} for r in requests]
    counted = {(number, side): engines[number].ask(side, few, count=True) for number, side in sides}
    timed: dict[tuple[int, str], list[dict[str, Any]]] = {key: [] for key in sides}
    done = 0
    while done < rounds and (done < LEAST_ROUNDS or time.monotonic() < end):
        for number, side in sides:
            timed[number, side].append(engines[number].ask(side, requests))
        done += 1
    wanted = timed[sides[0]][0]["tokens"]
    identical = all(
        answer["tokens"] == [tokens[: len(given)] for tokens, given in zip(wanted, answer["tokens"], strict=True)]
        for key in sides
        for answer in (counted[key], *timed[key])
    ) and all(len(t) == r["new"] for t, r in zip(wanted, requests, strict=True))
    none = [r["seconds"] * 1e3 for r in timed.get((0, "ours"), [])]
    return [
        _result(f"{model} drafts {number} batch {batch} prompt {length}", number, counted, timed, none, identical)
        for number in engines
    ]


def _result(
    name: str,
    drafts: int,
    counted: dict[tuple[int, str], dict[str, Any]],
    timed: dict[tuple[int, str], list[dict[str, Any]]],
    none: list[float],
    identical: bool,
) -> Result:
    own, loop = ([r["seconds"] * 1e3 for r in timed[drafts, side]] for side in SIDES)
    counts = {side: _per_step(counted[drafts, side]) for side in SIDES}
    baselines = {"loop": beside(own, loop).model_copy(update={"counts": counts["loop"]})}
    if drafts and none:
        baselines["no drafts"] = beside(own, none)
    first = timed[drafts, "ours"][0]
    tokens = sum(len(t) for t in first["tokens"])
    accepted = statistics.mean(first["accepted"]) if first["accepted"] else 0.0
    return Result(
        name=name,
        family=name.partition(" ")[0],
        runs=len(own),
        tokens=tokens,
        ms=statistics.median(own),
        spread=spread(own),
        counts=counts["ours"],
        baselines=baselines,
        engine=Engine(
            tokens_per_second=tokens / statistics.median(own) * 1e3,
            steps=_decoding(first),
            tokens_per_step=1 + accepted,
            accepted=accepted if drafts else None,
            identical=identical,
        ),
    )


def _decoding(answer: dict[str, Any]) -> int:
    """Return the decode and verify steps of a round."""
    steps: dict[str, int] = answer["steps"]
    return steps["decode_steps"] + steps["verify_steps"]


def _per_step(answer: dict[str, Any]) -> Counts:
    steps = max(1, _decoding(answer))
    return Counts(**{name: value / steps for name, value in answer["counts"].items()})
