"""Judge an engine run: its tokens, how requests ended, what was accepted, and what has to have run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch

from . import acceptance, compare
from . import soak as soaks
from .asking import Asked, Ids
from .compare import Verdict
from .engines import logits_of
from .results import RunReport
from .scenario import Law, Run, Scenario
from .simulation import Acceptance
from .target import Target

# Near ties and rounding of 16-bit types: of the largest logits, in logits and relative to their RMS.
LOGIT_MARGIN: Final = 0.75
LOGIT_ERROR: Final = 0.05


def judge(scenario: Scenario, target: Target, run: Run, asked: list[list[Asked]], result: dict[str, Any]) -> RunReport:
    flat = [a for requests in asked for a in requests]
    processes: list[dict[str, Any]] = sorted(result["processes"], key=lambda p: p.get("rank") or 0)
    counters: dict[str, int] = {k: v for k, v in processes[0]["counters"].items() if k != "pid"} if processes else {}
    rows: list[list[int]] = next((p["verify_rows"] for p in processes if p.get("verify_rows")), [])
    outputs = result["outputs"]
    verdicts: list[Verdict] = []
    failures: list[str] = []
    measured, figures = None, None
    if scenario.lose_worker:
        failures += _how_it_ended(result["ends"])
        failures += result.get("wrong", [])
    else:
        verdicts.append(_tokens(target.dtype_of(scenario), flat, outputs))
        failures += verdicts[0].failures
        failures += _wrong_ends(flat, outputs)
        failures += did_not_run(scenario, run, flat, outputs, processes, rows)
        if run.drafts and rows:
            pairs = [(a.prompt.ids, o["tokens"]) for a, o in zip(flat, outputs, strict=True)]
            measured = acceptance.measure(rows, run.drafts, pairs)
        if scenario.simulated and run.drafts:
            failures += not_as_simulated(scenario, target, run, flat, measured)
    if scenario.soak is not None:
        figures = soaks.figures(scenario.soak, outputs, result, counters)
        failures += soaks.judge(scenario.soak, figures, result)
    return RunReport(
        label=run.label,
        drafts=run.drafts,
        verdicts=verdicts,
        failures=failures,
        counters=counters,
        acceptance=measured,
        seconds=result["seconds"],
        tokens=sum(len(o["tokens"]) for o in outputs),
        steps=steps_of(counters),
        executor=result["executor"],
        records=processes,
        soak=figures,
    )


def _tokens(dtype: str, asked: Sequence[Asked], outputs: Sequence[dict[str, Any]]) -> Verdict:
    """Judge the tokens: identity in fp32; else logits up to the first divergence, and near ties there."""
    got = [o["tokens"] for o in outputs]
    # A cancelled request ends where the client's word reached the engine: what it gave must be right.
    want = [a.want[: len(tokens)] if a.request.goes_away else a.want for a, tokens in zip(asked, got, strict=True)]
    names = [a.name for a in asked]
    if dtype == "float32":
        return compare.identity(got, want, names)
    ours, theirs = [logits_of(o) for o in outputs], [a.want_logits for a in asked]
    return compare.divergence(got, ours, want, theirs, names, margin=LOGIT_MARGIN, error=LOGIT_ERROR)


def _wrong_ends(asked: Sequence[Asked], outputs: Sequence[dict[str, Any]]) -> list[str]:
    """Return what is wrong about how requests ended, and with their prompts and the prefix cache."""
    wrong = []
    for a, o in zip(asked, outputs, strict=True):
        if o["error"]:
            wrong.append(f"{a.name}: {o['error']}")
            continue
        if o["prompt_tokens"] and o["prompt_tokens"] != len(a.prompt.ids):
            wrong.append(f"{a.name}: the engine saw a prompt of {o['prompt_tokens']} tokens")
        if a.request.cancel_after:
            if len(o["tokens"]) < a.request.cancel_after:
                wrong.append(f"{a.name}: cancelled after {len(o['tokens'])} tokens; wanted {a.request.cancel_after}")
        elif a.stop is not None and o["finish"] != "stop" and tuple(o["tokens"][: len(a.want)]) == a.want:
            wrong.append(f"{a.name}: finished by {o['finish']}; wanted stop")
        if a.request.cached is not None and (o["cached_tokens"] > 0) != a.request.cached:
            wanted = "some" if a.request.cached else "none"
            wrong.append(f"{a.name}: {o['cached_tokens']} tokens from the prefix cache; wanted {wanted}")
    return wrong


def did_not_run(
    scenario: Scenario,
    run: Run,
    asked: Sequence[Asked],
    outputs: Sequence[dict[str, Any]],
    processes: Sequence[dict[str, Any]],
    rows: Sequence[Sequence[int]],
) -> list[str]:
    """Return what should have run and did not: a path that did not run proves nothing."""
    missing = []
    if len(processes) < run.ranks:
        missing.append(f"{len(processes)} processes ran a model; wanted {run.ranks}")
    wanted = {"causal_conv1d", "prefill_steps"}
    chunk = run.engine.get("max_prefill_token_num")
    expected = set(scenario.expect)
    if chunk and any(a.request.tokens > chunk for a in asked):
        expected.add("history")
    if "history" in expected:
        wanted.add("prefill_rows_with_history")
    if any(a.new > 1 for a in asked):
        wanted |= {"verify_steps", "rejection_sample_greedy"} if run.drafts else {"decode_steps"}
    if "padded_rows" in expected:
        wanted.add("padded_rows")
    for process in processes:
        rank = process.get("rank") or 0
        lacking = sorted(w for w in wanted if not process["counters"].get(w))
        if rank:  # one rank samples for all
            lacking = [w for w in lacking if not w.startswith("rejection")]
        missing += [f"rank {rank}: {w} is 0" for w in lacking]
    accepted = [r[2] for r in rows]
    if run.drafts:
        if "drafts_accepted" in expected and not any(accepted):
            missing.append("no draft was accepted")
        if "drafts_rejected" in expected and all(a == run.drafts for a in accepted):
            missing.append("no draft was rejected, so no rewind ran")
    cancelled = [(len(o["tokens"]), a.new) for a, o in zip(asked, outputs, strict=True) if a.request.goes_away]
    if cancelled and all(got >= new for got, new in cancelled):
        missing.append("every cancelled request had ended before")
    if "prefix_hits" in expected and not any(o["cached_tokens"] for o in outputs):
        missing.append("no prefix was found in the cache")
    if "recomputed" in expected and processes:
        prefilled = processes[0]["counters"].get("prefill_rows", 0)
        if prefilled <= len(asked):
            missing.append(f"{prefilled} prompts were run for {len(asked)} requests: none was preempted")
    return missing


def _how_it_ended(ends: Sequence[dict[str, Any]]) -> list[str]:
    wrong = []
    for number, end in enumerate(ends):
        which = end.get("which") or ("the answer under way", "a later answer")[number]
        if end["finish"] != "error" or not end["message"]:
            wrong.append(f"{which} ended with {end['finish']} ({end['message']}); wanted an error with a message")
        if end["seconds"] >= 30:
            wrong.append(f"{which} took {end['seconds']:.0f} s to end")
    return wrong


@lru_cache(maxsize=4)
def _simulated(model: Path, prompts_ids: tuple[tuple[int, ...], ...], new: int, drafts: int) -> Acceptance:
    from . import reference, simulation

    trunk = reference.load(model)
    greedy = reference.greedy(model, prompts_ids, simulation.greedy_needed(new, drafts))
    with reference.one_thread():
        return simulation.simulate(
            trunk, simulation.load_head(trunk, model), prompts_ids, greedy, drafts, new_tokens=new
        )


def not_as_simulated(
    scenario: Scenario, target: Target, run: Run, asked: Sequence[Asked], measured: Acceptance | None
) -> list[str]:
    want = _simulated(target.model, tuple(a.prompt.ids for a in asked), scenario.tokens, run.drafts)
    if measured is None or measured.histogram != want.histogram:
        got = measured.histogram if measured else "none"
        return [f"accepted drafts 0, 1, …: {got}; simulated {want.histogram}"]
    return []


def first_drafts(target: Target, law: Law, prompt: Ids, chances: Mapping[Ids, float], rows: list[list[int]]) -> Verdict:
    """Judge how often the first draft after the prompt was accepted: with the probability that the target gives it."""
    from . import reference, simulation

    trunk = reference.load(target.model)
    head = simulation.load_head(trunk, target.model)
    pairs: dict[Ids, float] = {}
    for tokens, chance in chances.items():
        pairs[tokens[:2]] = pairs.get(tokens[:2], 0.0) + chance
    first = sorted({pair[0] for pair in pairs})
    with reference.one_thread(), torch.no_grad():
        texts = torch.tensor([[*prompt, token] for token in first])
        hidden = simulation.hidden_states(trunk, texts)
        (states,) = head.unroll(trunk, texts, hidden, len(prompt), 1)
        drafts = trunk.lm_head(states[:, -1]).argmax(-1).tolist()
    chance = sum(pairs.get((token, draft), 0.0) for token, draft in zip(first, drafts, strict=True))
    firsts = [row[2] for row in rows if row[1] == len(prompt)]
    return compare.share("first draft accepted", sum(a > 0 for a in firsts), len(firsts), chance, law.alpha)


def steps_of(counters: Mapping[str, int]) -> int:
    """Return how often the engine ran the model."""
    return sum(counters.get(f"{kind}_steps", 0) for kind in ("prefill", "decode", "verify"))
