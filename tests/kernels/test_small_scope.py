"""The small scope, exhaustively: every sequence of steps of a slot, in every layout of convolution and delta rules.

A step is a prefill, a verify step with each number of accepted drafts, a decode step, or the end of the request, after
which a new one has the slot. Widths 2 to 4, 0 to 3 drafts.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from tests.fuzz.faults import planted
from tests.fuzz.world import Different

from .small_scope import Letter, Tree, alphabet
from .small_scope_layouts import conv_layouts, delta_layouts

WIDTHS: Final = (2, 3, 4)
DRAFTS: Final = (0, 1, 2, 3)
Record = Callable[[str, object], None]


def conv(width: int, drafts: int, depth: int, *, fewer: bool = False) -> Tree:
    """Prompts of a token, of one less than the width, and of more than any layout keeps."""
    letters = alphabet((1, width - 1, width + drafts), drafts, fewer=fewer)
    return Tree(conv_layouts(width, drafts), letters, depth)


def delta(rule: str, drafts: int, depth: int, *, fewer: bool = False) -> Tree:
    """Prompts of a token, and of more than a ring keeps."""
    return Tree(delta_layouts(rule, drafts), alphabet((1, drafts + 2), drafts, fewer=fewer), depth)


def trees(family: str, depth: int, *, fewer: bool = False) -> Iterator[tuple[str, Tree]]:
    for drafts in DRAFTS:
        if family != "conv":
            yield f"{family}, {drafts} drafts", delta(family, drafts, depth, fewer=fewer)
            continue
        for width in WIDTHS:
            yield f"conv of width {width}, {drafts} drafts", conv(width, drafts, depth, fewer=fewer)


def sequences(letters: list[Letter], depth: int) -> int:
    """Count the sequences of up to `depth` letters that end with a step and finish nothing but what has begun."""
    steps, free, busy, total = len(letters) - 1, 1, 0, 0
    for _ in range(depth):
        free, busy = busy, (free + busy) * steps
        total += busy
    return total


def walk_all(family: str, depth: int, record: Record, *, widest: bool = False, fewer: bool = False) -> Counter[str]:
    """Walk every tree of a family, or the widest alone, and say how much that was; return the sequences by layout."""
    checked, agreed = Counter[str](), Counter[tuple[str, str]]()
    for name, tree in list(trees(family, depth, fewer=fewer))[-1 if widest else 0 :]:
        tree.walk()
        # A ring allows every sequence, so it tells that none was left out.
        assert tree.checked["ring"] == sequences(tree.letters, depth), name
        checked += tree.checked
        agreed += tree.agreed
    said = f"{family}: {checked.total()} sequences of up to {depth} steps ({dict(checked)})"
    pairs = ", ".join(f"{' = '.join(pair)} {n}" for pair, n in agreed.items())
    sys.stdout.write(f"{said}\noutputs compared between layouts: {pairs}\n")
    record(f"sequences of up to {depth} steps", checked.total())
    # Two layouts were compared wherever both were checked, but for what a third was not asked.
    assert agreed["rewind", "ring"] == checked["rewind"]
    assert agreed["ring", "table"] == checked["table"]
    return checked


# Counted once; a change of the alphabet has to be a change here.
PLAIN: Final = {"conv": 44_000, "gdr": 15_000, "kda": 15_000}
FULL: Final = {"conv": 2_400_000, "gdr": 740_000, "kda": 740_000}
FEWER: Final = {"conv": 157_000, "gdr": 70_000, "kda": 70_000}


@pytest.mark.parametrize("family", ["conv", "gdr", "kda"])
def test_every_sequence_of_four_steps_is_the_definition(family: str, route: str, record_property: Record) -> None:
    # Fewer on the routes of kernels; interpreted, a row takes a millisecond.
    depth = {"native": 3, "interpret": 2}.get(route, 4)
    checked = walk_all(family, depth, record_property, widest=route == "interpret")
    assert depth < 4 or checked.total() >= PLAIN[family]


@pytest.mark.long
@pytest.mark.eager_only(reason="a million rows of a token each")
@pytest.mark.parametrize("family", ["conv", "gdr", "kda"])
def test_every_sequence_of_six_steps_is_the_definition(family: str, record_property: Record) -> None:
    assert walk_all(family, 6, record_property).total() >= FULL[family]


@pytest.mark.long
@pytest.mark.eager_only(reason="a million rows of a token each")
@pytest.mark.parametrize("family", ["conv", "gdr", "kda"])
def test_every_sequence_of_four_steps_with_any_number_of_drafts(family: str, record_property: Record) -> None:
    """A scheduler may let a row verify fewer drafts than its slot has room for."""
    assert walk_all(family, 4, record_property, fewer=True).total() >= FEWER[family]


# --- negative controls ------------------------------------------------------------------------------------------------

# The rules of the tree in which it is found, and the steps of the sequence.
FOUND_AFTER: Final = {
    "ring_gather_from_packed_batch": ("conv", 1),
    "ring_reads_before_the_start": ("conv", 2),
    "pad_row_written": ("conv", 1),
    "short_chunk_forgets_its_history": ("conv", 2),
    "taps_in_reverse_order": ("conv", 1),
    "accepted_count_taken_as_row_count": ("conv", 2),
    "rewind_ignores_accepted_count": ("conv", 3),
    "rewind_window_one_late": ("conv", 2),
    "history_not_zeroed_on_reuse": ("gdr", 1),
    "pad_rows_of_a_prefill_written": ("gdr", 1),
    "recurrent_ring_slot_one_behind": ("gdr", 1),
    "verify_keeps_the_last_state_only": ("gdr", 1),
    "table_reads_its_first_column": ("gdr", 2),
    "kda_reset_by_a_gate": ("kda", 1),
    "kda_state_stored_transposed": ("kda", 1),
}


@pytest.mark.eager_only(reason="faults are planted in the PyTorch form")
@pytest.mark.parametrize("fault", FOUND_AFTER)
def test_a_planted_fault_is_found_by_one_of_the_shortest_sequences(fault: str) -> None:
    family, steps = FOUND_AFTER[fault]
    tree = conv(4, 3, 3) if family == "conv" else delta(family, 3, 3)
    with planted(fault), pytest.raises(Different) as found:
        tree.walk()
    sys.stdout.write(f"{found.value}\n")
    assert len(tree.levels) == steps
