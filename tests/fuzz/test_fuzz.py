"""The fuzzer: a short run is clean, known faults are found, a difference comes as a script, too few steps fail."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from .__main__ import main
from .faults import OWN, planted
from .layouts import LAYOUTS
from .machine import RULES, Tally, fuzz, least, replay, run_examples
from .world import Different

pytestmark = [pytest.mark.eager_only(reason="faults are planted in the PyTorch form"), pytest.mark.long]

FOUND_BY = {
    "ring_gather_from_packed_batch": "conv-ring",
    "ring_reads_before_the_start": "conv-ring",
    "block_begun_without_its_history": "conv-ring",
    "pad_row_written": "conv-linear",
    "short_chunk_forgets_its_history": "conv-linear",
    "taps_in_reverse_order": "conv-linear",
    "accepted_count_taken_as_row_count": "conv-rewind",
    "rewind_ignores_accepted_count": "conv-rewind",
    "rewind_window_one_late": "conv-rewind",
    "history_not_zeroed_on_reuse": "gdr-plain",
    "state_stored_transposed": "gdr-plain",
    "pad_rows_of_a_prefill_written": "kda-plain",
    "kda_reset_by_a_gate": "kda-plain",
    "kda_state_stored_transposed": "kda-table",
    "recurrent_ring_slot_one_behind": "gdr-ring",
    "ring_goes_on_from_the_last_draft": "gating-ring",
    "verify_keeps_the_last_state_only": "kda-ring",
    "table_reads_its_first_column": "gating-table",
    "kpool_tail_without_room_for_drafts": "pages",
    "kpool_open_pool_forgotten": "pages",
    "kpool_open_pool_is_a_candidate": "pages",
    "kpool_position_counted_from_the_chunk": "pages",
    "kpool_ties_as_they_come": "pages",
    "pool_of_a_rejected_draft_stays": "pages",
    "latent_stale_values_weighed": "pages",
    "entries_of_pad_rows_written": "pages",
}


# Of a seed hypothesis makes other examples where other modules of the project are loaded (it tries their constants), so
# no test may rest on what one seed finds. Most faults show in the first two examples, all have in fifteen.
EXAMPLES = 200


def test_every_layout_steps_without_a_difference() -> None:
    tally, script = fuzz(list(LAYOUTS), steps=150 * len(LAYOUTS), number=0, seconds=120, examples=3)
    assert script == ""
    assert set(tally.steps) == set(LAYOUTS)
    assert all(done.total() >= 140 for done in tally.steps.values())
    assert all(tally.rules[name] for name in RULES)
    assert all(
        tally.seen[what] for what in ("rows", "PAD rows", "empty rows", "rejected tokens", "requests in a used slot")
    )
    assert set(tally.calls) >= {"causal_conv1d_columns", "kda_update", "kpool_select", "latent_attention", "copy_slots"}


@pytest.mark.parametrize("fault", FOUND_BY)
def test_a_known_fault_is_found(fault: str) -> None:
    layout = FOUND_BY[fault]
    with planted(fault):
        script = run_examples(layout, Tally({layout: Counter()}), 7, EXAMPLES, shrink=False)
        assert script, f"{fault} was not found"
        lines = [line for line in script.splitlines() if line.startswith("world")]
        assert isinstance(replay(lines), Different | RuntimeError | IndexError)
    assert replay(lines) is None


def test_every_fault_of_its_own_is_planted() -> None:
    assert set(OWN) <= set(FOUND_BY)


def test_a_difference_comes_as_the_least_script() -> None:
    with planted("rewind_ignores_accepted_count"):
        script = run_examples("conv-rewind", Tally({"conv-rewind": Counter()}), 1, EXAMPLES, shrink=True)
        lines = [line for line in script.splitlines() if line.startswith("world")]
        # One to begin, one of which a draft stands, one that goes on from there.
        assert re.findall(r"^world\.(\w+)", "\n".join(lines), re.MULTILINE)[:2] == ["prefill", "verify"]
        assert 4 <= len(lines) <= 5
        assert isinstance(replay(lines), Different)
        for at in range(1, len(lines)):
            assert not isinstance(replay(lines[:at] + lines[at + 1 :]), Different)


def test_steps_that_have_no_part_in_a_difference_are_left_out() -> None:
    lines = [
        "world = make('conv-rewind', width=3, drafts=2, spare=0, flip=False)",
        "world.prefill([(3, 4)], 0)",
        "world.prefill([(1, 4)], 0)",
        "world.decode([3], 0)",
        "world.verify([(1, 3, 2)], 0)",
        "world.finish(3)",
        "world.verify([(1, 3, 2)], 0)",
        "world.decode([1], 0)",
    ]
    assert least(lines) == (lines, None)
    with planted("rewind_ignores_accepted_count"):
        kept, ended = least(lines)
    assert kept in ([lines[i] for i in (0, 2, 4, 6)], [lines[i] for i in (0, 2, 4, 7)])
    assert isinstance(ended, Different)


def test_too_few_steps_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--steps", "1000000", "--seconds", "0.1", "--seed", "3", "--layout", "conv-ring"]) == 1
    assert "TOO FEW, wanted 1000000" in capsys.readouterr().out


def test_the_command_says_its_seed_and_its_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--steps", "100", "--seed", "3", "--layout", "gdr-ring"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("seed 3\n")
    assert re.search(r"^no difference in \d+ steps", said, re.MULTILINE)


def test_the_command_prints_the_script_of_a_difference(capsys: pytest.CaptureFixture[str]) -> None:
    with planted("recurrent_ring_slot_one_behind"):
        assert main(["--steps", "100", "--seed", "3", "--layout", "gdr-ring"]) == 1
    assert "world = make('gdr-ring'" in capsys.readouterr().out


def test_the_same_seed_makes_the_same_steps() -> None:
    first, again, other = (fuzz(["conv-ring"], 100, number, 60, examples=3)[0].steps for number in (5, 5, 6))
    assert first == again != other
