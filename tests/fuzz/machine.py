"""The state machine of hypothesis that drives a world, and the script that a difference is shrunk to."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar, Final
from zlib import crc32

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from .layouts import make
from .world import FORMS, NAN, NO_HISTORY, NO_SLOT, PAD_SLOT, SEATS

STEPS: Final = 50  # of one example

SEAT: Final = st.integers(0, SEATS - 1)
ANY_ROW: Final = st.sampled_from((*range(SEATS), *range(SEATS), NO_SLOT, PAD_SLOT, NO_HISTORY))
FORM: Final = st.integers(0, FORMS - 1)


SCRIPT: Final = """# python - < this file, in the folder of the repository
from tests.fuzz.layouts import make

nan, inf = float("nan"), float("inf")
{lines}"""


def replay(lines: Sequence[str]) -> Exception | None:
    """Run a script; return what it ended with."""
    try:
        exec(SCRIPT.format(lines="\n".join(lines)), {})
    except Exception as error:
        return error
    return None


def least(lines: Sequence[str]) -> tuple[list[str], Exception | None]:
    """Leave out every step without which a script still ends as it did.

    Hypothesis stops at scripts from which it cannot take a step by its own moves, such as one with a step of another
    request.

    Returns:
        the lines kept, and what they end with.
    """
    kept, ended = list(lines), replay(lines)
    at = len(kept) - 1 if ended else 0
    while at > 0:
        fewer = kept[:at] + kept[at + 1 :]
        if type(outcome := replay(fewer)) is type(ended):
            kept, ended, at = fewer, outcome, len(fewer)
        at -= 1
    return kept, ended


def rows_of(*numbers: st.SearchStrategy[int]) -> st.SearchStrategy[list[tuple[int, ...]]]:
    """Rows of a batch: a seat, which has one row at most, or a PAD row, and numbers."""

    def once(drawn: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        return [row for i, row in enumerate(drawn) if row[0] < 0 or row[0] not in [seat for seat, *_ in drawn[:i]]]

    return st.lists(st.tuples(ANY_ROW, *numbers), min_size=1, max_size=SEATS).map(once)


@dataclass
class Tally:
    """What was done.

    Attributes:
        steps: by layout and rule.
        calls: of operators.
        seen: what the steps held.
    """

    steps: dict[str, Counter[str]] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return sum(rules.total() for rules in self.steps.values())

    @property
    def rules(self) -> Counter[str]:
        return sum(self.steps.values(), Counter())


class Machine(RuleBasedStateMachine):
    """Any interleaving of what an engine does with the slots of its requests."""

    layout: ClassVar[str]
    tally: ClassVar[Tally]
    # What the last world that differed was asked; after shrinking, that of the least example.
    script: ClassVar[tuple[str, ...]] = ()

    @initialize(
        width=st.integers(1, 4), drafts=st.sampled_from((2, 3, 1, 0)), spare=st.integers(0, 1), flip=st.booleans()
    )
    def begin(self, **sizes: Any) -> None:
        self.world = make(self.layout, **sizes)
        arguments = ", ".join([repr(self.layout), *(f"{name}={value}" for name, value in sizes.items())])
        self.lines = [f"world = make({arguments})"]

    def do(self, name: str, *args: Any) -> None:
        self.lines.append(f"world.{name}({', '.join(map(repr, args))})")
        try:
            getattr(self.world, name)(*args)
        except Exception:
            type(self).script = tuple(self.lines)
            raise
        self.tally.steps[self.layout][name] += 1

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.tally.calls += self.world.calls
            self.tally.seen += self.world.seen

    def taken(self) -> list[int]:
        return sorted(self.world.requests)

    def free(self) -> list[int]:
        return [seat for seat in range(SEATS) if seat not in self.world.requests]

    @rule(rows=rows_of(st.sampled_from((1, 2, 3, 4, 5, 6, 9, 0))), form=FORM)
    def prefill(self, rows: list[tuple[int, int]], form: int) -> None:
        self.do("prefill", rows, form)

    @rule(rows=rows_of(st.sampled_from((4, 3, 2, 1, 0)), st.integers(1, 4)), form=FORM)
    def verify(self, rows: list[tuple[int, int, int]], form: int) -> None:
        self.do("verify", rows, form)

    @rule(rows=rows_of(), form=FORM)
    def decode(self, rows: list[tuple[int]], form: int) -> None:
        self.do("decode", [seat for (seat,) in rows], form)

    @precondition(lambda self: bool(self.taken()))
    @rule(number=SEAT)
    def finish(self, number: int) -> None:
        self.do("finish", self.taken()[number % len(self.taken())])

    @precondition(lambda self: bool(self.free()))
    @rule(number=SEAT, value=st.sampled_from((NAN, float("inf"), 777.0, 0.0)))
    def dirty(self, number: int, value: float) -> None:
        self.do("dirty", self.free()[number % len(self.free())], value)

    @precondition(lambda self: bool(self.taken() and self.free()))
    @rule(source=SEAT, onto=SEAT)
    def copy(self, source: int, onto: int) -> None:
        self.do("copy", self.taken()[source % len(self.taken())], self.free()[onto % len(self.free())])


RULES: Final = ("prefill", "verify", "decode", "finish", "dirty", "copy")


def run_examples(layout: str, tally: Tally, number: int, examples: int, *, shrink: bool) -> str:
    """Run some examples of one layout, the same for the same number; return the script of a difference, or ""."""
    machine: type[Machine] = type("Machine", (Machine,), {"layout": layout, "tally": tally})
    chosen = settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        phases=[Phase.generate, *([Phase.shrink] if shrink else [])],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    try:
        run_state_machine_as_test(seed(number)(machine), settings=chosen)
    except Exception as error:
        if not machine.script:
            raise
        lines, ended = least(machine.script) if shrink else (machine.script, error)
        # One that does not end so again is still the script of a difference.
        said = str(error if ended is None else ended)
        return SCRIPT.format(lines="\n".join(lines)) + "".join(f"\n# {line}" for line in said.splitlines())
    return ""


def fuzz(layouts: Sequence[str], steps: int, number: int, seconds: float, examples: int = 8) -> tuple[Tally, str]:
    """Step worlds of every layout in turn until each has its share of the steps, or the time is over.

    Args:
        layouts: names in `LAYOUTS`.
        steps: how many in all.
        number: the seed.
        seconds: after which no further examples begin.
        examples: of one layout, between two looks at the clock.

    Returns:
        what was done, and the script of the first difference or "".
    """
    tally, begun, share = Tally({layout: Counter() for layout in layouts}), time.monotonic(), -(-steps // len(layouts))
    for turn in count():
        late = [layout for layout in layouts if tally.steps[layout].total() < share]
        for layout in late:
            if time.monotonic() - begun > seconds:
                return tally, ""
            script = run_examples(layout, tally, crc32(f"{number} {layout} {turn}".encode()), examples, shrink=True)
            if script:
                return tally, script
        if not late:
            return tally, ""
    raise AssertionError
