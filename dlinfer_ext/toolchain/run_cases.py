"""Run the cases of a model natively: results against the definition, bytes against the lower bound, time beside eager.

`results` runs them in a process of its own, so that a crash is one failed case and the caller's Triton stays its own.
`python -m dlinfer_ext.toolchain.run_cases KIND MODEL TP DTYPE SOC` is that process; it prints a line for each event.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ..forms import eager_form, load
from ..kernels.common.tiling import SoC
from ..targets import load_model
from ..testing import TOLERANCE, rms_error
from . import native
from .cases import Case, cases
from .count import Launch, counting

REPEATS: Final = 20


@dataclass(frozen=True)
class NativeCheck:
    """A native run of one case against its definition.

    Attributes:
        operator, phase: of the case.
        error: the largest RMS error over the definition's RMS among outputs and mutated arguments; for a case that
            must be exact, how many elements differ.
        limit: what it may be.
        seconds: of the launcher, kernels built.
        failure: why there is no result, or "".
    """

    operator: str
    phase: str
    error: float
    limit: float
    seconds: float
    failure: str = ""

    @property
    def held(self) -> bool:
        return not self.failure and self.error <= self.limit


@dataclass(frozen=True)
class CountCheck:
    """What the launches of one case moved and got wrong, added up.

    Attributes:
        operator, phase: of the case.
        bytes_ratio: bytes moved over the lower bound.
        blocks_ratio: the same with every run rounded out to blocks of 32 bytes.
        bytes_limit, blocks_limit: what they may be; None: not bounded.
        strays, leaks, unwritten, conflicts: as in `count.Launch`; all must be 0.
        failure: why there is no result, or "".
    """

    operator: str
    phase: str
    bytes_ratio: float
    blocks_ratio: float
    bytes_limit: float | None
    blocks_limit: float | None
    strays: int
    leaks: int
    unwritten: int
    conflicts: int
    failure: str = ""

    @property
    def held(self) -> bool:
        faults = self.strays or self.leaks or self.unwritten or self.conflicts
        pairs = ((self.bytes_ratio, self.bytes_limit), (self.blocks_ratio, self.blocks_limit))
        return not self.failure and not faults and all(limit is None or ratio <= limit for ratio, limit in pairs)


@dataclass(frozen=True)
class Timing:
    """Median seconds of the native kernel and of the eager form, called in turn on this CPU.

    Says what the native route costs here, and nothing of a card.
    """

    operator: str
    phase: str
    native_s: float
    eager_s: float
    failure: str = ""

    @property
    def held(self) -> bool:
        return not self.failure


Result = NativeCheck | CountCheck | Timing


def check_native(case: Case, soc: SoC) -> NativeCheck:
    """Run a case's kernels natively and compare outputs and mutated arguments with the definition in fp64."""
    native.activate(soc.name)
    given = case.arguments()
    exact = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in case.arguments().items()
    }
    case.launch(**case.arguments(), soc=soc)  # builds
    start = time.perf_counter()
    out = case.launch(**given, soc=soc)
    seconds = time.perf_counter() - start
    want = case.definition(**exact)
    pairs = [*zip(_tensors(out), _tensors(want), strict=True), *((given[n], exact[n]) for n in case.mutated)]
    error, limit = 0.0, 0.0
    for got, wanted in pairs:
        if got.shape != wanted.shape:
            return NativeCheck(case.operator, case.phase, 0.0, 0.0, seconds, f"shape {got.shape}, not {wanted.shape}")
        if case.tolerance is None:
            error += int((got.double() != wanted.double()).sum())
        else:
            limit = TOLERANCE[case.tolerance, pairs[0][0].dtype]
            # A NaN compares with nothing; it must not pass for a small error.
            one = rms_error(got, wanted)
            error = max(error, one if one == one else float("inf"))
    return NativeCheck(case.operator, case.phase, error, limit, seconds)


def count_case(case: Case, soc: SoC) -> CountCheck:
    """Run a case in the counting build and compare what it moved with the least that any kernel has to move."""
    native.activate(soc.name)
    arguments = case.arguments()
    with counting() as launches:
        case.launch(**arguments, soc=soc)

    def total(count: Callable[[Launch], int]) -> int:
        return sum(map(count, launches))

    return CountCheck(
        operator=case.operator,
        phase=case.phase,
        bytes_ratio=total(lambda c: c.bytes) / case.lower_bound,
        blocks_ratio=total(lambda c: c.blocks) / case.lower_bound,
        bytes_limit=case.bytes_limit,
        blocks_limit=case.blocks_limit,
        strays=total(lambda c: c.stray_read + c.stray_written),
        leaks=total(lambda c: c.leaked),
        unwritten=total(lambda c: c.unwritten),
        conflicts=total(lambda c: c.write_write + c.read_write),
        failure="" if launches else "no kernel was launched",
    )


def time_case(case: Case, soc: SoC, eager: Callable[..., Any] | None = None, repeats: int = REPEATS) -> Timing:
    """Time the native kernel and the eager form in turn, on one thread.

    Args:
        case: taken as it is; both forms mutate one set of arguments over and over.
        soc: the chip that tiles are chosen for.
        eager: called like the launcher, without `soc`; None: the operator's own eager form.
        repeats: calls of each, at least 20 for a figure that is quoted.
    """
    native.activate(soc.name)
    torch.set_num_threads(1)  # a native kernel has one
    form = eager or load(eager_form(case.operator))
    arguments = case.arguments()
    forms: tuple[Callable[[], Any], Callable[[], Any]] = (
        lambda: case.launch(**arguments, soc=soc),
        lambda: form(**arguments),
    )
    seconds: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 2):
        for call, taken in zip(forms, seconds, strict=True):
            start = time.perf_counter()
            call()
            if repeat >= 2:  # the first calls build and warm up
                taken.append(time.perf_counter() - start)
    return Timing(case.operator, case.phase, statistics.median(seconds[0]), statistics.median(seconds[1]))


_Run = Callable[[Case, SoC], Result]
KINDS: Final[Mapping[str, tuple[_Run, type[Result]]]] = {
    "check": (check_native, NativeCheck),
    "count": (count_case, CountCheck),
    "time": (time_case, Timing),
}


def results(
    kind: str, model: str, tp: int, dtype: str, soc: str, *, operator: str = "", timeout_s: float = 1800
) -> Iterator[Result]:
    """Run every case of a model in a process of its own and yield a result for each.

    Args:
        kind: "check", "count" or "time".
        model: of configs/models.
        tp: ranks.
        dtype: "float32", "bfloat16" or "float16".
        soc: of configs/soc.
        operator: only cases of this one; "": all.
        timeout_s: for all of them together.

    Raises:
        RuntimeError: the process failed outside a case, or all of them took too long.
    """
    # The child may run from a source tree that is not installed.
    root = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": paths}
    record, deadline, seen = KINDS[kind][1], time.monotonic() + timeout_s, 0
    while True:
        line = [sys.executable, "-m", __name__, kind, model, str(tp), dtype, soc, operator, str(seen)]
        try:
            left = max(1.0, deadline - time.monotonic())
            done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=left)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the {kind} run of {model} did not end within {timeout_s:g} s") from None
        started: list[str] = []
        for event, _, text in (row.partition(" ") for row in done.stdout.splitlines()):
            if event == "START":
                started, seen = json.loads(text), seen + 1
            elif event == "RESULT":
                started = []
                yield record(**json.loads(text))
        if started:  # a crash: the cases after it are left to another process
            yield _failed(record, started[0], started[1], f"exit code {done.returncode}: {done.stderr.strip()[-1500:]}")
        elif done.returncode:
            raise RuntimeError(f"the {kind} run of {model} failed ({done.returncode}): {done.stderr.strip()[-3000:]}")
        else:
            return


def _failed(record: type[Result], operator: str, phase: str, failure: str) -> Result:
    numbers = [field.name for field in fields(record) if field.name not in ("operator", "phase", "failure")]
    return record(operator=operator, phase=phase, failure=failure, **dict.fromkeys(numbers, 0))


def _tensors(out: Any) -> list[Tensor]:
    return [t for t in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(t, Tensor)]


def _main(kind: str, model: str, tp: str, dtype: str, soc: str, operator: str = "", skip: str = "0") -> None:
    run, record = KINDS[kind]
    # The real output is kept for events: a library that prints must not be taken for one.
    events, sys.stdout = sys.stdout, sys.stderr
    chip = native.activate(soc)["soc"]
    with torch.inference_mode():
        every = cases(load_model(model), int(tp), getattr(torch, dtype))
        wanted = (c for c in every if operator in ("", c.operator) and (c.counted or kind != "count"))
        for case in islice(wanted, int(skip), None):
            events.write(f"START {json.dumps([case.operator, case.phase])}\n")
            events.flush()
            try:
                result: Result = run(case, chip)
            except Exception as error:  # the other cases still run
                result = _failed(record, case.operator, case.phase, f"{type(error).__name__}: {error}"[:1500])
            events.write(f"RESULT {json.dumps(asdict(result))}\n")
            events.flush()


if __name__ == "__main__":
    _main(*sys.argv[1:])
