"""One engine of `bench engine`, in a process of its own: reads rounds as JSON lines, writes what each of them took.

    python -m dlinfer_ext.cli.bench_engine_child JOB.json RESULT_FD

Every operator of this package goes through `_Sides.chosen`, so that one engine can run with ours and with the loops of
bench_loops.py by turns. A counted round is not timed. A round is {"side": "ours" or "loop", "count": bool, "requests":
[{"text", "new"}, …]}; its answer {"seconds", "tokens": [[id, …], …], "steps": {phase: steps}, "accepted": [drafts
accepted by each row of each verify step], "counts": {"calls", "host_reads"} of decode and verify steps}. The first line
written is {"ready": true}.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from dlinfer_ext.framework.lmdeploy import counters, session
from dlinfer_ext.ops import _registry

from . import bench_loops
from .bench_counts import counting, launches


class _Sides:
    """Which form of an operator runs, and what it calls."""

    def __init__(self) -> None:
        self.loops = bench_loops.forms()
        self.ours = _registry.chosen
        self.side = "ours"
        self.count = False
        self.reset()

    def reset(self) -> None:
        self.calls = self.host_reads = 0
        self._phase, self._seen = "", _steps()

    def chosen(self, name: str, vendor: str) -> Callable[..., Any]:
        loop = self.loops.get(name) if self.side == "loop" else None
        form = loop or self.ours(name, vendor)
        return (lambda *args: self._counted(form, args)) if self.count else form

    def _counted(self, form: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        seen = _steps()
        for phase, steps in seen.items():
            if steps > self._seen[phase]:
                self._phase = phase
        self._seen = seen
        with counting() as counter:
            out = form(*args)
        if self._phase != "prefill_steps":
            self.calls += counter.calls
            self.host_reads += counter.host_reads
        return out


def _steps() -> dict[str, int]:
    snapshot = counters.snapshot()
    return {name: snapshot.get(name, 0) for name in ("prefill_steps", "decode_steps", "verify_steps")}


class _Rounds:
    """The rounds of an engine's one run: read when the engine asks for the next, answered when it has done one."""

    def __init__(self, sides: _Sides, orders: TextIO, answers: TextIO) -> None:
        self.sides, self.orders, self.answers = sides, orders, answers

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        self._write({"ready": True})
        for line in self.orders:
            order = json.loads(line)
            self.sides.side, self.sides.count = order["side"], order["count"]
            self.sides.reset()
            self.steps, self.rows, self.launched = _steps(), len(counters.record()["verify_rows"]), launches()
            self.started = time.perf_counter()
            yield order["requests"]

    def done(self, outputs: list[dict[str, Any]]) -> None:
        seconds = time.perf_counter() - self.started
        steps = {name: now - self.steps[name] for name, now in _steps().items()}
        self._write(
            {
                "seconds": seconds,
                "tokens": [o["tokens"] for o in outputs],
                "steps": steps,
                "accepted": [row[2] for row in counters.record()["verify_rows"][self.rows :]],
                "counts": {
                    "calls": self.sides.calls,
                    "host_reads": self.sides.host_reads,
                    "launches": launches() - self.launched,
                },
            }
        )

    def _write(self, answer: dict[str, Any]) -> None:
        self.answers.write(json.dumps(answer) + "\n")
        self.answers.flush()


def main(job_file: str, descriptor: str) -> None:
    """Run the engine of a job until no more rounds come."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    sides = _Sides()
    _registry.chosen = sides.chosen  # type: ignore[assignment]
    with os.fdopen(int(descriptor), "w", encoding="utf-8") as answers, tempfile.TemporaryDirectory() as records:
        rounds = _Rounds(sides, sys.stdin, answers)
        session.run_one(job | {"rounds": rounds}, Path(records), rounds.done)


if __name__ == "__main__":
    main(*sys.argv[1:3])
