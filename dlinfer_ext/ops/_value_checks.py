"""What DLINFER_EXT_CHECK=1 checks of a call beside its shapes: what only the device knows. It reads the host.

Before the call: slots in the pool and of one row each, lengths, histories and accepted counts that can be, and no NaN
or infinity in what enters a state: the tokens of live rows, and the entries that a row goes on from. After it: none in
what was written. What PAD rows hold, what lies in a slot whose row begins, and tokens of no row may be anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from torch import Tensor, inf
from torch import bool as bool_

from ._access import KINDS, Arguments, Entries, Plan, Problem, plan_call
from ._checks import require

_AT_ONCE: Final = 1 << 16  # entries gathered at a time: a long context need not fit twice
_WHOLE_SLOTS: Final = ("zero_slots", "copy_slots")  # a slot is moved with whatever was never written in it


def raise_first(operator: str, problems: Sequence[Problem]) -> None:
    """Raise the first problem as the operators' ValueError, and say how many more there are."""
    if problems:
        argument, got, wanted, _ = problems[0]
        more = f" (and {len(problems) - 1} more like it)" if len(problems) > 1 else ""
        require(False, operator, argument, got, wanted + more)


def require_rows(operator: str, arguments: Arguments) -> None:
    """Check lengths, slots, histories and counts of a call, by the names of its schema.

    Raises:
        ValueError: naming operator, argument, what came, what is wanted, and the row.
    """
    raise_first(operator, plan_call(operator, arguments).problems)


def before_call(plan: Plan, arguments: Arguments) -> list[Problem]:
    """Return what is wrong with a call before it is made, the rows' places first."""
    if plan.problems or plan.operator in _WHOLE_SLOTS:
        return plan.problems
    return [*_inputs(plan, arguments), *_entries(plan, arguments, written=False)]


def after_call(plan: Plan, arguments: Arguments) -> list[Problem]:
    """Return what is wrong with what a call wrote."""
    return [] if plan.operator in _WHOLE_SLOTS else list(_entries(plan, arguments, written=True))


def _inputs(plan: Plan, arguments: Arguments) -> Iterator[Problem]:
    """Yield the live rows with a value that must not enter a state; -inf is a full reset where it is a log decay."""
    kind = KINDS[plan.operator]
    for name in kind.inputs:
        values = kind.packed(name, arguments)
        if not values.numel():
            continue
        tokens = _bad(values, resets=name in kind.resets).tolist()
        for row in plan.rows:
            hit = [t for t in row.tokens if tokens[t]] if row.live else []
            if hit:
                got = f"{_what(values[hit[0]])} in token {hit[0] - row.tokens.start} at row {row.number}"
                yield Problem(name, got, "finite values" + (" or -inf" * (name in kind.resets)), row.number)


def _entries(plan: Plan, arguments: Arguments, *, written: bool) -> Iterator[Problem]:
    """Yield the rows that go on from, or have written, an entry of a pool that is not finite."""
    for row in plan.rows:
        for name, entries in (row.writes if written else row.reads).items():
            pool = arguments[name]
            bad = None if pool is None else not_finite(entries, pool)
            if bad is not None:
                place = entries.index[bad]
                held = _what(pool[tuple(place.tolist())])
                after = "" if row.history is None else f" after {row.history} tokens"
                did = "as the row wrote it" if written else f"which goes on from it{after}"
                got = f"{held} in entry {place.tolist()} at row {row.number}, {did}"
                yield Problem(name, got, "finite values", row.number)


def not_finite(entries: Entries, pool: Tensor) -> int | None:
    """Return the first of some entries of a pool that holds NaN or infinity, or None."""
    if not pool.is_floating_point():
        return None
    for at in range(0, len(entries.index), _AT_ONCE):
        part = Entries(entries.index[at : at + _AT_ONCE], entries.positions[at : at + _AT_ONCE])
        bad = _bad(part.take(pool))
        if bool(bad.any()):
            return at + int(bad.int().argmax())
    return None


def _bad(values: Tensor, *, resets: bool = False) -> Tensor:
    """Return bool [n], which of n values [n, ..] are not all finite; with `resets` -inf may be.

    Largest and least are taken because they pass NaN on, and make no copy of a whole state.
    """
    flat = values.reshape(len(values), -1)
    if not flat.numel():
        return flat.new_zeros(len(flat), dtype=bool_)
    good = flat.amax(1) < inf
    return ~good if resets else ~(good & (flat.amin(1) > -inf))


def _what(values: Tensor) -> str:
    return "NaN" if bool(values.isnan().any()) else "infinity"
