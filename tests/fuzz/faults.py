"""Known faults of state, for a while: those of `tests.faults`, and others that show over several steps only."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from dlinfer_ext.ops import _registry
from tests import faults
from tests.faults import chunks, conv, kpool_update, pages, steps

from .pages import DIM


def ring_reads_before_the_start() -> None:
    """Take positions before the start of a request modulo the ring: columns of the request before it."""
    original = conv.ring_moves

    def moves(live: Tensor, *args: Any, **kept: bool) -> Any:
        history, width, columns = args[3:6]
        read = (history[:, None] + torch.arange(1 - width, 0)) % columns
        began = (live & (history > 0))[:, None]
        return original(live, *args, **kept)._replace(read_columns=torch.where(began, read, -1))

    conv.ring_moves = moves


def rewind_window_one_late() -> None:
    """Begin the window of a verify step one column after the last accepted token's."""
    original = conv.rewind_moves

    def moves(live: Tensor, source: Tensor, target: Tensor, lengths: Tensor, accepted: Tensor, *sizes: int) -> Any:
        return original(live, source, target, lengths, accepted + 1, *sizes)

    conv.rewind_moves = moves


def short_chunk_forgets_its_history() -> None:
    """Store zeros where a chunk shorter than W - 1 has to keep inputs from before it."""
    original = conv.linear_moves

    def moves(live: Tensor, slots: Tensor, lengths: Tensor, has_history: Tensor, width: int) -> Any:
        return original(live, slots, lengths, has_history & (lengths >= width - 1), width)

    conv.linear_moves = moves


def block_begun_without_its_history() -> None:
    """Write the new inputs alone where a step goes from one block to another."""
    original = conv.ring_moves
    conv.ring_moves = lambda *args, keep_history: original(*args, keep_history=False)


def ring_goes_on_from_the_last_draft() -> None:
    """Read the newest entry that was written, accepted or not, for the entry of the history."""
    written: dict[int, int] = {}
    original: Callable[..., Any] = steps.plan_rows

    def plan(pool: Any, rows: int, count: int, slots: Tensor, history: Tensor, *rest: Any) -> Any:
        found = original(pool, rows, count, slots, history, *rest)
        length = rest[2]
        if pool.ring is None:
            return found
        read = found.read.clone()
        for row, (slot, live) in enumerate(zip(slots.tolist(), found.live.tolist(), strict=True)):
            if live:
                if int(history[row]) > 0:
                    read[row] = written.get(slot, int(read[row]))
                last = count if length is None else int(length[row])
                written[slot] = int(found.write[last - 1, row])
        return type(found)(**(vars(found) | {"read": read}))

    steps.plan_rows = plan


def table_reads_its_first_column() -> None:
    """Go on from the state after the first token of the last step, whatever was accepted."""
    original: Callable[..., Tensor] = steps.accepted_column
    steps.accepted_column = lambda accepted, *sizes: original(None, *sizes)


def pad_rows_of_a_prefill_written() -> None:
    """Take every row with tokens for live, those without a slot too."""
    original: Callable[..., Any] = chunks.state_places

    def places(pool: Any, cu: Tensor, *rest: Any) -> Any:
        read, write, fresh, _ = original(pool, cu, *rest)
        return read, write, fresh, cu.diff() > 0

    chunks.state_places = places


def verify_keeps_the_last_state_only() -> None:
    """Leave no state behind the tokens of a verify step but the last, as if all were accepted."""
    original: Callable[..., Any] = steps.plan_rows

    def plan(*args: Any) -> Any:
        found = original(*args)
        write = found.write if found.write is None else found.write[-1:].expand_as(found.write).contiguous()
        return type(found)(**(vars(found) | {"write": write}))

    steps.plan_rows = plan


def pool_of_a_rejected_draft_stays() -> None:
    """Write a pool once: what a rejected draft completed is not written anew."""
    original: Callable[..., None] = pages.write_entries

    def write(cache: Any, places: Tensor, values: Tensor, writes: Tensor) -> None:
        # Of the two caches of the indexer that of the pools is the narrower.
        if cache.view.shape[-1] == DIM:
            writes = writes & ~cache.view.index_select(0, places).isfinite().all(-1)
        original(cache, places, values, writes)

    kpool_update.write_entries = write


OWN: Final = {
    f.__name__: f
    for f in (
        ring_reads_before_the_start,
        rewind_window_one_late,
        short_chunk_forgets_its_history,
        block_begun_without_its_history,
        ring_goes_on_from_the_last_draft,
        table_reads_its_first_column,
        pad_rows_of_a_prefill_written,
        verify_keeps_the_last_state_only,
        pool_of_a_rejected_draft_stays,
    )
}
FAULTS: Final[dict[str, Callable[[], None]]] = faults.FAULTS | OWN


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Put a fault back inside the block; the operators choose their forms anew before and after it."""
    modules = [m for m in vars(faults).values() if inspect.ismodule(m) and ".kernels." in m.__name__]
    classes = [c for m in modules for c in vars(m).values() if inspect.isclass(c) and c.__module__ == m.__name__]
    owners: list[Any] = [*modules, *classes]
    before = [(owner, dict(vars(owner))) for owner in owners]
    _registry.chosen.cache_clear()
    FAULTS[name]()
    try:
        yield
    finally:
        for owner, names in before:
            for key, value in names.items():
                if vars(owner)[key] is not value:
                    setattr(owner, key, value)
        _registry.chosen.cache_clear()
