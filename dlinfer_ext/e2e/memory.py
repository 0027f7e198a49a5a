"""The memory of a process and of those that it started, over time."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

MIB: Final = 2**20
WINDOWS: Final = 6  # after the warm-up

Sample = tuple[float, float]  # seconds since the start, MiB


def of_tree(pid: int) -> float:
    """Return the resident memory (RSS) of a process and its descendants in MiB, shared pages counted in each.

    PSS would count a shared page once, but changes with what other users of the same libraries do.
    """
    import psutil

    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    total = 0
    for process in processes:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / MIB


@contextmanager
def watched(pid: int, every_s: float = 1.0) -> Iterator[list[Sample]]:
    """Sample the memory of a process tree in a thread while the block runs; the list grows meanwhile."""
    samples: list[Sample] = []
    started, over = time.monotonic(), threading.Event()

    def watch() -> None:
        while not over.wait(every_s):
            samples.append((time.monotonic() - started, of_tree(pid)))

    thread = threading.Thread(target=watch, name="memory", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


def medians(samples: Sequence[Sample], warm_up_s: float, windows: int = WINDOWS) -> list[float]:
    """Return the median of each of `windows` equal spans of the time after the warm-up, in MiB.

    A median hears nothing of a request that was large for a moment, nor of a collector that is about to run.

    Raises:
        ValueError: a span without a sample.
    """
    kept = [s for s in samples if s[0] >= warm_up_s]
    if not kept:
        raise ValueError(f"no sample after a warm-up of {warm_up_s:.0f} s; wanted a longer run")
    end = kept[-1][0] + 1e-9
    width = (end - warm_up_s) / windows
    spans: list[list[float]] = [[] for _ in range(windows)]
    for at, mib in kept:
        spans[int((at - warm_up_s) / width)].append(mib)
    if not all(spans):
        raise ValueError(f"{len(kept)} samples in {windows} windows: one has none; wanted a longer run")
    return [statistics.median(span) for span in spans]


def growth(per_window: Sequence[float]) -> float:
    """Return the growth from the first window to the last by the median slope (Theil-Sen), relative to the first.

    Each pair of windows has a slope; their median is that of a steady leak, however one window may stand out.
    """
    pairs = [
        (j - i, per_window[j] - per_window[i]) for i in range(len(per_window)) for j in range(i + 1, len(per_window))
    ]
    slope = statistics.median(rise / run for run, rise in pairs)
    return slope * (len(per_window) - 1) / per_window[0]
