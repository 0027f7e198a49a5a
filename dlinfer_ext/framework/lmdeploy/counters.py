"""Counts of what ran in this process: a path that did not run must not pass a test for having been right.

Plain Python ints, added to from values the host already has; nothing is read from the device. Only where
DLINFER_EXT_COUNTERS names a folder, the verify steps are read too, and the process leaves its
record there, now and then and at its end.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from collections import Counter
from multiprocessing import util
from pathlib import Path
from typing import Any, Final, Protocol

import torch.distributed as dist
from torch import Tensor

from ... import envs
from ...toolchain import native

MAX_ROWS: Final = 1_000_000
WRITE_EVERY_S: Final = 0.5

_counts: Final[Counter[str]] = Counter()
_rows: Final[list[list[int]]] = []
_step: tuple[Tensor, Tensor] | None = None  # slots and histories of the verify step that is to be sampled next
_rank: int | None = None
_dropped = 0
_warming_up = False
_written = 0.0
_writer: int | None = None  # the process that writes at its end: a forked child is another one


class StepRows(Protocol):
    """The rows of one step: GatedDeltaMetadata, or the GraphRows of a step in a graph's shape."""

    @property
    def is_decoding(self) -> bool: ...
    @property
    def state_indices(self) -> Tensor: ...
    @property
    def history_lens(self) -> Tensor: ...
    @property
    def host_lengths(self) -> tuple[int, ...] | None: ...


def add(name: str, n: int = 1) -> None:
    """Add to a count, but for what the engine runs to warm up: that proves nothing of a request."""
    if not _warming_up:
        _counts[name] += n


def _is_warm_up() -> bool:
    from lmdeploy.pytorch.model_inputs import get_step_ctx_manager

    manager = get_step_ctx_manager()
    return bool(getattr(manager.current_context(), "is_dummy", False)) if manager is not None else False


def count_step(meta: StepRows, attn_metadata: Any) -> None:
    """Count one step by phase, and the prefill rows that continue a history."""
    global _warming_up
    _warming_up = _is_warm_up()
    if envs.COUNTERS.get():
        _watch(meta)
    if meta.is_decoding:
        multi = getattr(attn_metadata, "is_multi_token_decoding", False)
        add("verify_steps" if multi else "decode_steps")
        return
    add("prefill_steps")
    lengths, kv = meta.host_lengths, attn_metadata.kv_seqlens_cpu
    if lengths is not None and kv is not None:
        pairs = list(zip(lengths, kv.tolist(), strict=True))
        add("prefill_rows", len(pairs))
        add("prefill_rows_with_history", sum(total > q > 0 for q, total in pairs))


def _watch(meta: StepRows) -> None:
    """Keep a step's rows until they are sampled, and see to it that this process writes its record at its end."""
    global _step, _rank, _writer
    _step = (meta.state_indices, meta.history_lens) if meta.is_decoding else None
    if dist.is_initialized():  # asked now: it is no longer so when the process ends
        _rank = dist.get_rank()
    if _writer != os.getpid():
        _writer = os.getpid()
        Path(envs.COUNTERS.get()).mkdir(parents=True, exist_ok=True)
        atexit.register(write)
        util.Finalize(None, write, exitpriority=100)  # what a child of multiprocessing runs instead
    if time.monotonic() > _written + WRITE_EVERY_S:
        write()  # a worker that is killed at the engine's end writes nothing then


def verified(num_drafts: int, num_rejected: Tensor, last_token_ids: Tensor) -> None:
    """Record the rows of the step that was just sampled; reads nothing unless DLINFER_EXT_COUNTERS is set.

    Args:
        num_drafts: N.
        num_rejected: int [B], N less the number of accepted drafts.
        last_token_ids: int [B], the last emitted token.
    """
    global _step, _dropped
    step, _step = _step, None
    if step is None or not envs.COUNTERS.get():
        return
    # A captured step may be padded: its rows come first, and a padded row has no slot.
    batch = num_rejected.size(0)
    columns = (step[0][:batch], step[1][:batch], num_drafts - num_rejected, last_token_ids)
    rows = [list(row) for row in zip(*(c.tolist() for c in columns), strict=True) if row[0] >= 0]
    kept = rows[: MAX_ROWS - len(_rows)]
    _rows.extend(kept)
    _dropped += len(rows) - len(kept)


def snapshot() -> dict[str, int]:
    """Return the counts of this process, the launches of each native kernel as "native.NAME", and its pid as "pid"."""
    launched = {f"native.{name}": times for name, times in native.kernels().items()}
    return {**_counts, **launched, "pid": os.getpid()}


def record() -> dict[str, Any]:
    """Return what this process did so far, as it is written at its end.

    Returns:
        "counters": the snapshot; "verify_rows": [slot, history, accepted, last_token] of each live row of each verify
        step in order, on the rank that samples (the first of a group), [] without DLINFER_EXT_COUNTERS;
        "dropped_rows": how many more there were than `MAX_ROWS`; "status": what was replaced in LMDeploy; "pid";
        "rank".
    """
    from . import status

    return {
        "counters": snapshot(),
        "verify_rows": [list(row) for row in _rows],
        "dropped_rows": _dropped,
        "status": status(),
        "pid": os.getpid(),
        "rank": _rank or 0,
    }


def write() -> None:
    """Write the record of a process that ran a model into the folder of DLINFER_EXT_COUNTERS, if both are there still.

    The file is counters-RANK-PID.json, or counters-engine-PID.json where the model runs in one process; it is complete
    whenever it can be seen.
    """
    global _written
    _written = time.monotonic()
    folder = Path(envs.COUNTERS.get())
    if _writer != os.getpid() or not envs.COUNTERS.get() or not folder.is_dir() or not _counts:
        return
    name = f"counters-{'engine' if _rank is None else _rank}-{os.getpid()}.json"
    part = folder / f".{name}.part"
    part.write_text(json.dumps(record()), encoding="utf-8")
    part.replace(folder / name)


def reset() -> None:
    """Forget all counts and rows."""
    global _step, _rank, _dropped, _warming_up
    _counts.clear()
    _rows.clear()
    _step, _rank, _dropped, _warming_up = None, None, 0, False
