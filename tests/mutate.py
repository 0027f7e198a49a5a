"""Put every known fault into a running engine, one at a time, and see which scenario of configs/e2e catches it.

    python -m tests.mutate [--fault NAME] [--json] [--jobs 2]

A fault is caught if the scenario fails by its tokens, its acceptance or its counters while the planted code ran. An
engine that did not start, or a fault that was never called, proves nothing and counts as an error. Each scenario is
also run without a fault, and has to hold. Exit code 1 if a fault survives or something proves nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from dlinfer_ext.e2e import runner
from dlinfer_ext.e2e.results import ScenarioReport
from dlinfer_ext.e2e.scenario import Scenario, find, load
from dlinfer_ext.e2e.target import Target
from tests.e2e.checkpoints import random_qwen3_5
from tests.e2e.glm_checkpoints import TRAINED_GLM, random_glm5_next
from tests.engine_faults import plant

ROOT: Final = Path(__file__).parents[1]
TRAINED: Final = ROOT / "examples" / "checkpoints" / "tiny_qwen3_5"
TIMEOUT_S: Final = 150  # for a run that takes ten seconds: a fault must not hang the suite
PLUGIN: Final = "tests.engine_faults.plant"


@dataclass(frozen=True)
class Cut:
    """The part of a shipped scenario that is run: enough to catch the faults mapped to it, and quick.

    Attributes:
        scenario: name in configs/e2e.
        drafts: the only number of drafts run.
        engine: values for what the scenario varies.
        rounds: how many of its first rounds; None is all.
        tokens: new tokens per request; None is the scenario's.
        draws: of a law; None is the scenario's.
        model: "random" or "trained". A state that is lost changes the text of the random one within a few tokens; that
            of the trained one, which has its attention to go by, may not change at all. The trained one's drafts are
            accepted as often as a real one's. "random_glm" and "trained_glm" are GLM-5.3-Flash, the others Qwen3.5.
    """

    scenario: str
    drafts: int
    engine: tuple[tuple[str, Any], ...] = ()
    rounds: int | None = None
    tokens: int | None = None
    draws: int | None = None
    model: Literal["random", "trained", "random_glm", "trained_glm"] = "random"

    def load(self) -> Scenario:
        """Return the scenario with one run left."""
        whole = load(find(self.scenario))
        changes: dict[str, Any] = {
            "drafts": (self.drafts,),
            "vary": {},
            "engine": whole.engine | dict(self.engine),
            "rounds": whole.rounds[: self.rounds],
            "tokens": self.tokens or whole.tokens,
            "timeout_s": TIMEOUT_S,
        }
        if self.draws and whole.law is not None:
            changes["law"] = whole.law.model_copy(update={"requests": self.draws})
        return whole.model_copy(update=changes)

    def __str__(self) -> str:
        parts = [self.model, f"drafts {self.drafts}", *(f"{k} {v}" for k, v in self.engine)]
        return f"{self.scenario} ({', '.join(parts)})"


BESIDE: Final = Cut("short_beside_long", 4)
LONGER: Final = Cut("batch_equals_alone", 3, tokens=64)
TAILS: Final = Cut("short_tails", 4)
REUSE: Final = Cut("ends_and_reuse", 4)
# With drafts LMDeploy computes the last 256 tokens of a hit again, after which little is left of a wrong state.
PREFIX: Final = Cut("prefix_cache", 0, (("max_prefill_token_num", 64),))
EXACT: Final = Cut("acceptance", 4, (("max_prefill_token_num", 512),), model="trained")
EXACT_CHUNKS: Final = Cut("acceptance", 4, (("max_prefill_token_num", 32),), model="trained")
PADDED: Final = Cut("padded_batch", 4)
RANKS: Final = Cut("two_ranks", 3)
LAW: Final = Cut("sampling", 2, draws=800)
PREEMPTED: Final = Cut("preemption", 0, model="trained")
GLM: Final = Cut("short_beside_long", 4, rounds=1, model="random_glm")
GLM_TAILS: Final = Cut("short_tails", 4, model="random_glm")
# Prompts of 449 tokens: what is kept of one ends within a block and within a pool.
GLM_PREFIX: Final = Cut("prefix_cache", 0, (("max_prefill_token_num", 512),), rounds=2, model="random_glm")
GLM_EXACT: Final = Cut("acceptance", 4, (("max_prefill_token_num", 512),), model="trained_glm")

CAUGHT_BY: Final[dict[str, Cut]] = {
    "ring_gather_from_packed_batch": BESIDE,
    "recurrent_ring_slot_one_behind": BESIDE,
    "history_not_zeroed_on_reuse": REUSE,
    "state_stored_transposed": BESIDE,
    "taps_in_reverse_order": BESIDE,
    "operands_through_fp16": LONGER,
    "positions_before_the_prompt_taken_modulo": REUSE,
    "recurrent_state_not_zeroed_on_reuse": REUSE,
    "one_token_prompt_taken_for_decode": REUSE,
    "fresh_state_reset_by_a_gate": BESIDE,
    "recurrent_ring_one_entry_short": BESIDE,
    "convolution_ring_as_long_as_the_layers_are_many": BESIDE,
    "convolution_history_one_column_late": BESIDE,
    "verify_rows_left_unconvolved": BESIDE,
    "verify_step_run_as_prefill": BESIDE,
    "chunk_drops_convolution_history": TAILS,
    "chunk_starts_from_a_zero_state": TAILS,
    "ring_lengths_of_prefill_and_verify_differ": TAILS,
    "activation_left_out_in_verify": BESIDE,
    "qk_norm_left_out_in_verify": BESIDE,
    "gates_swapped": BESIDE,
    "gates_read_as_dense": BESIDE,
    "value_heads_share_keys_in_turn": BESIDE,
    "rows_one_token_short": BESIDE,
    "multiple_of_the_ring_taken_for_fresh": BESIDE,
    "slots_in_the_order_of_the_step_before": REUSE,
    "two_slots_for_one": BESIDE,
    "every_draft_accepted": BESIDE,
    "no_draft_accepted": BESIDE,
    "rejected_draft_emitted": BESIDE,
    "bonus_token_of_the_row_before": BESIDE,
    "bonus_token_missing": EXACT,
    "acceptance_drawn_at_zero": LAW,
    "rejected_draft_drawn_again": LAW,
    "top_k_for_the_bonus_token_only": LAW,
    "preempted_state_kept": PREEMPTED,
    "prefix_state_saved_before_the_step": PREFIX,
    "prefix_state_under_an_earlier_boundary": PREFIX,
    "prefix_hit_without_its_state": PREFIX,
    "prefix_copy_misses_the_convolution": PREFIX,
    "prefix_copy_misses_a_layer": PREFIX,
    "histories_in_the_order_of_the_step_before": REUSE,
    "padded_rows_in_a_live_slot": PADDED,
    "convolution_split_in_one_piece": RANKS,
    "draft_hidden_shifted_by_one": EXACT,
    "draft_tokens_not_shifted": EXACT,
    "draft_position_not_advanced": EXACT,
    "draft_keys_of_the_prompt_lost": EXACT,
    "recycled_hidden_before_the_norm": EXACT,
    "trunk_hidden_instead_of_the_recycled": EXACT,
    "drafts_begin_at_the_last_row": EXACT,
    "draft_history_not_rewound": EXACT,
    "draft_projection_halves_swapped": EXACT,
    "draft_carry_between_chunks_lost": EXACT_CHUNKS,
    "swiglu_not_clamped": GLM,
    "kda_state_a_hundredth_too_small": GLM,
    "kda_state_of_a_prompt_transposed": GLM,
    "kda_chunk_drops_convolution_history": GLM_TAILS,
    "streams_mixed_by_the_transpose": GLM,
    "open_pool_forgotten": GLM,
    "selection_ignored": GLM,
    "tail_without_room_for_drafts": GLM,
    "tail_left_behind_by_a_copied_block": GLM_PREFIX,
    "draft_hidden_before_the_final_norm": GLM_EXACT,
    "draft_chooses_anew": GLM_EXACT,
    "draft_goes_by_the_last_rows_choice": GLM_EXACT,
}


@dataclass(frozen=True)
class Outcome:
    """What one run showed.

    Attributes:
        fault: its name; "" for a run without one.
        what: its description.
        cut: the run.
        state: "caught", "survived", "holds" (no fault, as wanted) or "error" (proves nothing).
        how: the first thing that was wrong, or why it proves nothing.
        calls: how often the planted code ran, in the first process that ran a model.
        seconds: of the run.
    """

    fault: str
    what: str
    cut: str
    state: str
    how: str
    calls: int
    seconds: float

    @property
    def good(self) -> bool:
        return self.state == ("caught" if self.fault else "holds")


def judge(fault: str, cut: Cut, report: ScenarioReport) -> Outcome:
    """Say what a run with a fault planted ("" for none) shows."""
    calls = sum(run.counters.get(f"fault.{fault}", 0) for run in report.runs)
    wrong = [f for run in report.runs for f in run.failures]
    tokens = [w for w in wrong if re.search(r": token \d+ is ", w)]
    if report.error is not None or not report.runs:
        state, how = "error", (report.error or "nothing ran").strip().splitlines()[-1]
    elif not fault:
        state, how = ("error", wrong[0]) if wrong else ("holds", "")
    elif not calls:
        state, how = "error", "the planted code was never called"
    elif tokens and all("is the end; wanted" in w for w in tokens):
        state, how = "error", f"the engine gave up: {wrong[-1]}"
    else:
        state, how = ("caught", wrong[0]) if wrong else ("survived", "the scenario holds with it")
    what = plant.describe(fault) if fault else ""
    return Outcome(fault, what, str(cut), state, how, calls, round(report.seconds, 1))


def run(fault: str, cut: Cut, models: Mapping[str, Path]) -> Outcome:
    """Run a part of a scenario with a fault planted ("" for none)."""
    target = Target(models[cut.model], plugins=(PLUGIN,), env={plant.VARIABLE: fault})
    return judge(fault, cut, runner.run_scenario(cut.load(), target))


@contextlib.contextmanager
def remembered_references() -> Iterator[None]:
    """Compute each reference once inside the block: it does not depend on the fault."""
    from dlinfer_ext.e2e import reference

    known: dict[str, Any] = {}
    lock = threading.Lock()

    def remember(name: str) -> Callable[..., Any]:
        original = getattr(reference, name)

        def once(*args: Any) -> Any:
            key = f"{name}{args}"
            with lock:
                if key not in known:
                    known[key] = original(*args)
                return known[key]

        return once

    originals = {name: getattr(reference, name) for name in ("greedy", "law")}
    for name in originals:
        setattr(reference, name, remember(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(reference, name, original)


def run_all(faults: Sequence[str], jobs: int, say: Callable[[str], None]) -> list[Outcome]:
    """Run every scenario without a fault, then every fault; the order of the results is that of the faults."""
    cuts = list(dict.fromkeys(CAUGHT_BY[f] for f in faults))
    pairs = [("", cut) for cut in cuts] + [(f, CAUGHT_BY[f]) for f in faults]

    def one(pair: tuple[str, Cut]) -> Outcome:
        done = run(*pair, models)
        say(f"{done.state:8} {done.fault or 'no fault'}: {done.cut}, {done.seconds:.0f} s")
        return done

    with remembered_references(), tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        models = {
            "trained": TRAINED,
            "random": random_qwen3_5(Path(folder) / "qwen3_5"),
            "trained_glm": TRAINED_GLM,
            "random_glm": random_glm5_next(Path(folder) / "glm5_next"),
        }
        return list(pool.map(one, pairs))


def table(outcomes: Iterable[Outcome]) -> str:
    """Return the results as a Markdown table."""
    rows = ["| fault | what | caught by | how | planted code ran |", "|---|---|---|---|---|"]
    for o in outcomes:
        how = o.how if o.state in ("caught", "holds") else f"**{o.state}**: {o.how}"
        rows.append(f"| {o.fault or 'none'} | {o.what or 'holds'} | {o.cut} | {how} | {o.calls} |".replace("\n", " "))
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--fault", action="append", choices=sorted(CAUGHT_BY), metavar="NAME", help="only this one")
    parser.add_argument("--jobs", type=int, default=2, help="engines at a time (default 2)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    args = parser.parse_args(argv)
    started = time.monotonic()

    def say(line: str) -> None:
        sys.stderr.write(f"[{time.monotonic() - started:5.0f} s] {line}\n")
        sys.stderr.flush()

    outcomes = run_all(args.fault or list(CAUGHT_BY), args.jobs, say)
    bad = [o for o in outcomes if not o.good]
    if args.json:
        sys.stdout.write(json.dumps([asdict(o) for o in outcomes], indent=2) + "\n")
    else:
        caught = sum(o.state == "caught" for o in outcomes)
        planted = sum(bool(o.fault) for o in outcomes)
        seconds = time.monotonic() - started
        sys.stdout.write(f"{table(outcomes)}\n\n{caught} of {planted} faults caught in {seconds:.0f} s\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
