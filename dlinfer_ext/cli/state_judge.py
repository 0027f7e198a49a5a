"""What cannot be in a dump: rows that clash, values that are no numbers, and whatever differs from the definition.

The call is made anew by its definition (`reference.py`, fp64) on the slots as they were before it, and its output and
the slots after it are held against that, entry by entry; entries that no row had to write must be as they were, bit for
bit. So a fault is found in the step that makes it, and a step that merely goes on from a spoilt state is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from ..ops._access import Row
from .state_definition import against_the_definition
from .state_file import Dump
from .state_values import Finding, about, held_by, live_rows, values_of

_BITS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def judge(dump: Dump) -> list[Finding]:
    """Return all findings about a dump, those of arguments first."""
    found = [Finding(p.row, f"argument '{p.argument}' is {p.got}; wanted {p.wanted}") for p in dump.plan.problems]
    if dump.header["fault"] and not found:
        found.append(Finding(None, f"recorded with it: {dump.header['fault']}"))
    if dump.plan.layout == "slots":  # whatever was never written in a slot is moved with it
        found += [*_changes(dump), *_moved(dump)] if dump.ran else []
    else:
        found += [*_inputs(dump), *_states_read(dump), *_windows(dump)]
        found += [*_changes(dump), *_written(dump), *against_the_definition(dump)] if dump.ran else []
    found += [Finding(None, f"not kept: {what}", fault=False) for what in dump.header["left_out"]]
    return list(dict.fromkeys(found))


# --- what the call was given ------------------------------------------------------------------------------------------


def _inputs(dump: Dump) -> Iterator[Finding]:
    for name in dump.kind.inputs:
        for row in live_rows(dump):
            for token in row.tokens:
                value = dump.token(name, token)
                if value is None:
                    continue
                bad = value.isnan() | (value == torch.inf) if name in dump.kind.resets else ~value.isfinite()
                if bool(bad.any()):
                    at = token - row.tokens.start
                    yield Finding(row.number, f"'{name}' holds NaN or infinity in token {at} of the row")
                    break


def _states_read(dump: Dump) -> Iterator[Finding]:
    """Look at what the rows go on from."""
    for row in live_rows(dump):
        for name, entries in row.reads.items():
            values = values_of(dump, "before", name, entries)
            for index, _, value in values:
                if not bool(value.isfinite().all()):
                    yield about(row.number, "before", name, index, "holds NaN or infinity, and the row goes on from it")
            state = dump.plan.layout != "pages" and (row.history or 0) > 0 and len(values) > 0
            if state and not any(bool(value.any()) for _, _, value in values):
                yield Finding(row.number, f"{name} is all zeros where the row goes on from {row.history} tokens")
            for index, position, value in values if name == "conv_state" else ():
                if row.history is not None and row.history + position < 0 and bool(value.any()):
                    yield Finding(
                        row.number, f"{name}{index} is not zero, and stands for a time before the first token"
                    )


def _windows(dump: Dump) -> Iterator[Finding]:
    """Note rows whose windows are the same: of one prompt in two rows, or of a slot that was copied."""
    if "conv_state" not in dump.pools:
        return
    seen: list[tuple[Row, Tensor]] = []
    for row in live_rows(dump):
        values = [value for _, _, value in values_of(dump, "before", "conv_state", row.reads["conv_state"])]
        if not values:
            continue
        window = torch.stack(values)
        for other, theirs in seen:
            if window.shape == theirs.shape and torch.equal(window, theirs) and bool(window.any()):
                same = f"right only if their last {len(values)} tokens are the same"
                yield Finding(row.number, f"its window is that of row {other.number}: {same}", fault=False)
        seen.append((row, window))


# --- what the call did ------------------------------------------------------------------------------------------------


def _changes(dump: Dump) -> Iterator[Finding]:
    """Find entries that changed although no live row had to write them."""
    for name in dump.pools:
        before, after = dump.tensors[f"before.{name}"], dump.tensors[f"after.{name}"]
        changed = _bits(before) != _bits(after)
        rank = _rank(dump, name)
        changed = changed.flatten(rank).any(rank) if changed.dim() > rank else changed
        where = dump.slots(name)
        for row in live_rows(dump):
            for index in row.writes[name].index.tolist() if name in row.writes else ():
                if index[0] in where:
                    changed[(where[index[0]], *index[1:])] = False
        owners, slots = _owners(dump, name), list(where)
        for at in changed.nonzero().tolist():
            index, owner = [slots[at[0]], *at[1:]], owners.get(slots[at[0]])
            now = f" with {_whose(dump, owner, after[tuple(at)])}" if owner is not None and name == "conv_state" else ""
            why = "no row has to write it" if owner is None or owner.live else "the row is PAD"
            yield about(None if owner is None else owner.number, "after", name, index, f"was written{now}: {why}")


def _written(dump: Dump) -> Iterator[Finding]:
    """Look at what the rows wrote: numbers, and of the convolution the very inputs."""
    for row in live_rows(dump):
        for name, entries in row.writes.items():
            for index, position, value in values_of(dump, "after", name, entries):
                if not bool(value.isfinite().all()):
                    yield about(row.number, "after", name, index, "holds NaN or infinity as the row wrote it")
                elif name == "conv_state":
                    want = _input(dump, row, position)
                    if want is not None and not torch.equal(value, want.to(value.dtype)):
                        wanted, held = held_by(row, name, position), _whose(dump, row, value)
                        yield about(row.number, "after", name, index, f"does not hold {wanted}, but {held}")


def _input(dump: Dump, row: Row, position: int) -> Tensor | None:
    """Return the input of a position, counted from the row's first new token, or None if it is not kept."""
    if position >= 0:
        return dump.token("x", row.tokens.start + position)
    channels = dump.arguments["x"].shape[-1]
    if row.history is not None and row.history + position < 0:
        return torch.zeros(channels)
    held = {p: value for _, p, value in values_of(dump, "before", "conv_state", row.reads["conv_state"])}
    # A column that the call was told to leave out reads zero.
    return held.get(position, torch.zeros(channels))


def _whose(dump: Dump, row: Row, value: Tensor) -> str:
    """Say whose input a column holds."""
    for other in sorted(dump.plan.rows, key=lambda other: other is not row):
        for token in other.tokens:
            x = dump.token("x", token)
            if x is not None and torch.equal(x.to(value.dtype), value):
                which = held_by(other, "conv_state", token - other.tokens.start)
                return f"{which} of row {other.number}" if other is not row else which
    for _, position, old in values_of(dump, "before", "conv_state", row.reads["conv_state"]):
        if torch.equal(old, value):
            return held_by(row, "conv_state", position)
    return "zeros" if not bool(value.any()) else "another value"


def _moved(dump: Dump) -> Iterator[Finding]:
    """Check that slots were cleared, or copied, bit for bit."""
    before, after, where = dump.tensors["before.pool"], dump.tensors["after.pool"], dump.slots("pool")
    for row in live_rows(dump):
        target = where.get(row.slots[-1])
        source = where.get(row.slots[0])
        if target is None or source is None:
            continue
        copied = dump.plan.operator == "copy_slots"
        want = before[source] if copied else torch.zeros_like(after[target])
        if not torch.equal(_bits(after[target]), _bits(want)):
            text = f"pool[{row.slots[-1]}] is not " + (f"what pool[{row.slots[0]}] was" if copied else "zero")
            yield Finding(row.number, text)


def _owners(dump: Dump, pool: str) -> dict[int, Row]:
    """Return the row that each kept slot is of: one that has it, or a PAD row whose number would reach it."""
    found: dict[int, Row] = {}
    for row in live_rows(dump):
        for part in (row.writes, row.reads):
            found |= dict.fromkeys(part[pool].slots() if pool in part else (), row)
    for row in dump.plan.rows:
        for slot in row.witnesses.get(pool, ()):
            found.setdefault(slot, row)
    return found


def _rank(dump: Dump, pool: str) -> int:
    found = [
        e.index.shape[1] for row in dump.plan.rows for p in (row.writes, row.reads) for n, e in p.items() if n == pool
    ]
    return max(found, default=1)


def _bits(t: Tensor) -> Tensor:
    return t.view(_BITS[t.element_size()])
