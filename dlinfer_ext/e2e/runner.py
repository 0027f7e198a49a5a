"""Run a scenario through stock LMDeploy and judge it: tokens, acceptance, and what has to have run."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch

from .. import envs
from . import acceptance, client, compare, prompts, server
from .compare import Verdict
from .prompts import Prompt
from .scenario import Law, Request, Run, Scenario
from .simulation import Acceptance

Ids = tuple[int, ...]
Logits = dict[int, float]  # the largest logits at a place, by token id; empty where no logits are compared

SESSION: Final = "dlinfer_ext.framework.lmdeploy.session"
TOP_LOGITS: Final = 10
KEPT_LOGITS: Final = 64  # of the reference's
# Ray sends no statistics, writes no token file to the home folder, and keeps its store small.
RAY: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": "200000000",
}
# Near ties and rounding of 16-bit types: of the largest logits, in logits and relative to their RMS.
LOGIT_MARGIN: Final = 0.75
LOGIT_ERROR: Final = 0.05


@dataclass(frozen=True)
class _Answer:
    """What the reference gives: tokens, and logits at their places where those are compared."""

    tokens: Ids
    logits: tuple[Logits, ...] = ()


class RunFailed(RuntimeError):
    """The engine's process ended without a result; the message holds the end of its output."""


@dataclass(frozen=True)
class Target:
    """What scenarios are run on.

    Attributes:
        model: checkpoint folder.
        vendor: "cpu" or "ascend".
        reference: "transformers" (the definition, on this CPU) or "plain" (LMDeploy itself: one request at a time,
            no drafts, the prompt in one piece, no prefix cache).
        dtype: of the engine on a card, where LMDeploy has 16-bit types only; on a CPU the scenario's holds.
        plugins: modules to import in the engine's process first.
        env: further variables of the engine's process.
        patience: times the scenarios' time limits; a large model takes longer to start.
    """

    model: Path
    vendor: str = "cpu"
    reference: str = "transformers"
    dtype: str = "bfloat16"
    plugins: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    patience: float = 1.0

    def dtype_of(self, scenario: Scenario) -> str:
        return scenario.dtype if self.vendor == "cpu" else self.dtype

    def environment(self, scenario: Scenario) -> dict[str, str]:
        """Return the variables of an engine process; of ours only what is set here gets in."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith("DLINFER_EXT_") or k == envs.TOOLCHAIN.name}
        clean |= {envs.VENDOR.name: self.vendor, envs.STRICT.name: "1", "HF_HUB_OFFLINE": "1"}
        if self.vendor == "cpu":
            # One thread: the tiny models are faster so, and the order of sums is the reference's.
            clean |= {"OMP_NUM_THREADS": "1"}
            clean[envs.CPU_DTYPE.name] = "float32" if scenario.dtype == "float32" else "auto"
            if _on_ray(scenario):
                clean |= RAY
        if self.dtype_of(scenario) != "float32":
            clean["LMDEPLOY_FP32_MAMBA_SSM_DTYPE"] = "1"
        return clean | self.env


@dataclass
class RunReport:
    """One engine run and how it was judged."""

    label: str
    drafts: int
    verdicts: list[Verdict]
    failures: list[str]
    counters: dict[str, int]
    acceptance: Acceptance | None
    seconds: float
    tokens: int
    steps: int
    executor: str
    records: list[dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "drafts": self.drafts,
            "failures": self.failures,
            "rules": [{"rule": v.rule, **v.facts} for v in self.verdicts],
            "counters": self.counters,
            "acceptance": asdict(self.acceptance) if self.acceptance else None,
            "seconds": round(self.seconds, 2),
            "tokens": self.tokens,
            "steps": self.steps,
            "tokens_per_step": round(self.tokens / self.steps, 2) if self.steps else None,
            "tokens_per_second": round(self.tokens / self.seconds, 1) if self.seconds else 0.0,
            "executor": self.executor,
        }


@dataclass
class ScenarioReport:
    """One scenario on one target."""

    name: str
    what: str
    reference: str
    dtype: str
    seconds: float = 0.0
    runs: list[RunReport] = field(default_factory=list)
    error: str | None = None

    @property
    def failures(self) -> list[str]:
        lines = [f"{r.label}: {f}" for r in self.runs for f in r.failures]
        return lines if self.error is None else [*lines, self.error]

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "what": self.what,
            "reference": self.reference,
            "dtype": self.dtype,
            "holds": not self.failures,
            "seconds": round(self.seconds, 1),
            "error": self.error,
            "runs": [r.as_dict() for r in self.runs],
        }


@dataclass(frozen=True)
class _Asked:
    """A request with its prompt, what is expected of it, and its name in reports."""

    request: Request
    prompt: Prompt
    name: str
    new: int
    want: tuple[int, ...]
    want_logits: tuple[Logits, ...]
    stop: int | None

    def body(self) -> dict[str, Any]:
        return {
            "text": self.prompt.text,
            "new": self.new,
            "stop_token_ids": [self.stop] if self.stop is not None else None,
            "cancel_after": self.request.cancel_after,
            "wait": self.request.wait,
        }


def run_scenario(scenario: Scenario, target: Target, say: Callable[[str], None] = lambda _: None) -> ScenarioReport:
    """Run every engine run of a scenario and judge it; engine failures end up in the report."""
    report = ScenarioReport(scenario.name, scenario.what, target.reference, target.dtype_of(scenario))
    started = time.monotonic()
    deadline = started + scenario.timeout_s * target.patience
    try:
        if scenario.law is not None:
            _run_law(scenario, target, report, deadline)
        else:
            _run_rounds(scenario, target, report, deadline, say)
    except (RunFailed, RuntimeError, ValueError) as error:
        report.error = f"{type(error).__name__}: {error}"
    report.seconds = time.monotonic() - started
    return report


def _on_ray(scenario: Scenario) -> bool:
    return bool(scenario.engine.get("distributed_executor_backend") == "ray")


def cannot_run(scenario: Scenario, target: Target) -> str | None:
    """Return why a scenario cannot run on this target, or None."""
    if target.vendor == "cpu" and "cpu" not in scenario.where:
        return "it is for a card"
    if target.vendor == "ascend" and "npu" not in scenario.where:
        return "it is for a CPU"
    if target.vendor == "ascend" and importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed: no card here"
    if _on_ray(scenario) and importlib.util.find_spec("ray") is None:
        return "ray is not installed (requirements/ray.txt)"
    return None


def _tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def _drawn(scenario: Scenario) -> list[list[Request]]:
    """Return the scenario's rounds, a soak's drawn from its seed."""
    soak = scenario.soak
    if soak is None:
        return [list(r) for r in scenario.rounds]
    draw, at, requests = random.Random(soak.seed), 0.0, []
    for _ in range(soak.requests):
        at += draw.expovariate(soak.per_second)
        new = draw.choice(soak.new)
        gone = new > 4 and draw.random() < soak.cancelled
        tokens = draw.choice(soak.tokens)
        requests.append(Request(tokens=tokens, new=new, wait=at, cancel_after=draw.randint(1, 4) if gone else None))
    return [requests]


def _ask_for(scenario: Scenario, target: Target, deadline: float) -> list[list[_Asked]]:
    """Build the prompts and what the reference answers to them."""
    tokenizer = _tokenizer(target.model)
    rounds = _drawn(scenario)
    flat = [r for requests in rounds for r in requests]
    built = [prompts.build(tokenizer, r, number) for number, r in enumerate(flat)]
    lengths = [r.new or scenario.tokens for r in flat]
    unique: dict[Ids, int] = {}
    for prompt, new in zip(built, lengths, strict=True):
        unique[prompt.ids] = max(new, unique.get(prompt.ids, 0))
    if scenario.lose_worker:
        answers = {ids: _Answer(tuple(range(new))) for ids, new in unique.items()}  # nothing is compared
    elif target.reference == "transformers":
        answers = _by_transformers(scenario, target, unique)
    else:
        answers = _by_plain_run(scenario, target, built, unique, deadline)
    asked = []
    for number, (request, prompt, new) in enumerate(zip(flat, built, lengths, strict=True)):
        answer, stop = answers[prompt.ids].tokens[:new], None
        if request.stop_at is not None:
            stop = answer[request.stop_at - 1]
            answer = answer[: answer.index(stop)]  # LMDeploy leaves the stop token out
        name = f"request {number} ({request.tokens} tokens)"
        asked.append(_Asked(request, prompt, name, new, answer, answers[prompt.ids].logits, stop))
    cut = iter(asked)
    return [[next(cut) for _ in requests] for requests in rounds]


def _by_transformers(scenario: Scenario, target: Target, unique: dict[Ids, int]) -> dict[Ids, _Answer]:
    from . import reference

    dtype = target.dtype_of(scenario)
    answers: dict[Ids, _Answer] = {}
    for new in set(unique.values()):
        prompts_ids = [ids for ids, n in unique.items() if n == new]
        got = reference.greedy(target.model, prompts_ids, new, dtype)
        answers |= {ids: _Answer(tuple(tokens)) for ids, tokens in zip(prompts_ids, got, strict=True)}
    if dtype == "float32":
        return answers
    for ids, answer in answers.items():
        table = reference.logits(target.model, [*ids, *answer.tokens], dtype)[len(ids) - 1 : -1]
        values, tokens = (t.tolist() for t in table.topk(min(KEPT_LOGITS, table.size(1))))
        answers[ids] = _Answer(
            answer.tokens, tuple(dict(zip(*row, strict=True)) for row in zip(tokens, values, strict=True))
        )
    return answers


def _by_plain_run(
    scenario: Scenario, target: Target, built: Sequence[Prompt], unique: dict[Ids, int], deadline: float
) -> dict[Ids, _Answer]:
    """Let LMDeploy itself answer: one request at a time, no drafts, prompts in one piece."""
    texts = {p.ids: p.text for p in built}
    kept = {k: v for k, v in scenario.engine.items() if k in ("tp", "session_len", "distributed_executor_backend")}
    rounds = [[{"text": texts[ids], "new": new}] for ids, new in unique.items()]
    run = Run(label="plain", drafts=0, engine=kept)
    outputs = _session(scenario, target, [_job(run, target, scenario, rounds)], deadline)[0]["outputs"]
    return {ids: _Answer(tuple(o["tokens"]), _logits(o)) for ids, o in zip(unique, outputs, strict=True)}


def _logits(output: dict[str, Any]) -> tuple[Logits, ...]:
    return tuple({int(token): value for token, value in place.items()} for place in output.get("top_logits") or ())


def _job(run: Run, target: Target, scenario: Scenario, rounds: list[list[dict[str, Any]]]) -> dict[str, Any]:
    engine = dict(run.engine)
    if target.vendor == "cpu":
        engine.setdefault("num_gpu_blocks", 64)
    dtype = target.dtype_of(scenario)
    if dtype != "float32":
        engine.setdefault("dtype", dtype)
    return {
        "model": str(target.model),
        "drafts": run.drafts,
        "engine": engine,
        "rounds": rounds,
        "top_logits": 0 if dtype == "float32" else TOP_LOGITS,
        "lose_worker": scenario.lose_worker,
    }


def _session(scenario: Scenario, target: Target, runs: list[dict[str, Any]], deadline: float) -> list[dict[str, Any]]:
    """Run jobs in one process of their own, in a group that ends with it.

    Raises:
        RunFailed: no result in time.
    """
    with tempfile.TemporaryDirectory(prefix="dlinfer_ext_e2e_") as folder:
        job, out, log = (Path(folder) / n for n in ("job.json", "result.json", "log"))
        job.write_text(json.dumps({"plugins": target.plugins, "runs": runs}), encoding="utf-8")
        line = [sys.executable, "-m", SESSION, str(job), str(out)]
        with log.open("wb") as stream:
            process = subprocess.Popen(
                line, env=target.environment(scenario), stdout=stream, stderr=stream, start_new_session=True
            )
            try:
                code: int | None = process.wait(max(5.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end_group(process)
        if not out.is_file():
            how = (
                f"exit code {code}"
                if code is not None
                else f"no result within {scenario.timeout_s * target.patience:.0f} s"
            )
            raise RunFailed(f"{how}:\n{log.read_text(encoding='utf-8', errors='replace')[-4000:]}")
        results: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))["runs"]
    return results


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


def _run_rounds(
    scenario: Scenario, target: Target, report: ScenarioReport, deadline: float, say: Callable[[str], None]
) -> None:
    asked = _ask_for(scenario, target, deadline)
    bodies = [[a.body() for a in requests] for requests in asked]
    runs = [r for r in scenario.runs() for _ in range(scenario.engines)]
    if scenario.via == "server":
        for run in runs:
            say(f"{scenario.name}: {run.label}, server")
            report.runs.append(_judge(scenario, target, run, asked, _through_server(scenario, target, run, bodies)))
        return
    say(f"{scenario.name}: {len(runs)} engine run{'s' if len(runs) > 1 else ''}")
    results = _session(scenario, target, [_job(r, target, scenario, bodies) for r in runs], deadline)
    for run, result in zip(runs, results, strict=True):
        report.runs.append(_judge(scenario, target, run, asked, result))


def _through_server(scenario: Scenario, target: Target, run: Run, bodies: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Run the rounds through a stock server and read what its processes counted once it has ended."""
    port, flags = server.free_port(), []
    for name, value in run.engine.items():
        flags += [f"--{name.replace('_', '-')}"] if value is True else [f"--{name.replace('_', '-')}", str(value)]
    if target.dtype_of(scenario) != "float32":
        flags += ["--dtype", target.dtype_of(scenario), "--logprobs-mode", "raw_logits"]
        bodies = [[body | {"top_logits": TOP_LOGITS} for body in requests] for requests in bodies]
    line = server.command(target.model, "model", port, run.drafts, tuple(flags))
    with tempfile.TemporaryDirectory(prefix="dlinfer_ext_records_") as folder:
        env = target.environment(scenario) | {envs.COUNTERS.name: folder}
        started, outputs = time.monotonic(), []
        with server.serving(line, "model", port, env, 180 * target.patience) as running:
            started = time.monotonic()
            for requests in bodies:
                outputs += client.ask_all(running.url, requests, scenario.timeout_s * target.patience)
            seconds = time.monotonic() - started
        records = [json.loads(f.read_text(encoding="utf-8")) for f in sorted(Path(folder).glob("counters-*.json"))]
    return {"outputs": outputs, "processes": records, "executor": "server", "seconds": seconds, "ends": []}


def _judge(
    scenario: Scenario, target: Target, run: Run, asked: list[list[_Asked]], result: dict[str, Any]
) -> RunReport:
    flat = [a for requests in asked for a in requests]
    processes: list[dict[str, Any]] = sorted(result["processes"], key=lambda p: p.get("rank") or 0)
    counters: dict[str, int] = {k: v for k, v in processes[0]["counters"].items() if k != "pid"} if processes else {}
    rows: list[list[int]] = next((p["verify_rows"] for p in processes if p.get("verify_rows")), [])
    outputs = result["outputs"]
    verdicts: list[Verdict] = []
    failures: list[str] = []
    measured = None
    if scenario.lose_worker:
        failures += _how_it_ended(result["ends"])
    else:
        verdicts.append(_tokens(target.dtype_of(scenario), flat, outputs))
        failures += verdicts[0].failures
        failures += _wrong_ends(flat, outputs)
        failures += _did_not_run(scenario, run, flat, outputs, processes, rows)
        if run.drafts and rows:
            pairs = [(a.prompt.ids, o["tokens"]) for a, o in zip(flat, outputs, strict=True)]
            measured = acceptance.measure(rows, run.drafts, pairs)
        if scenario.simulated and run.drafts:
            failures += _not_as_simulated(scenario, target, run, flat, measured)
    return RunReport(
        label=run.label,
        drafts=run.drafts,
        verdicts=verdicts,
        failures=failures,
        counters=counters,
        acceptance=measured,
        seconds=result["seconds"],
        tokens=sum(len(o["tokens"]) for o in outputs),
        steps=_steps(counters),
        executor=result["executor"],
        records=processes,
    )


def _steps(counters: Mapping[str, int]) -> int:
    """Return how often the engine ran the model."""
    return sum(counters.get(f"{kind}_steps", 0) for kind in ("prefill", "decode", "verify"))


def _tokens(dtype: str, asked: Sequence[_Asked], outputs: Sequence[dict[str, Any]]) -> Verdict:
    """Judge the tokens: identity in fp32; else logits up to the first divergence, and near ties there."""
    got = [o["tokens"] for o in outputs]
    # A cancelled request ends where the client's word reached the engine: what it gave must be right.
    want = [a.want[: len(tokens)] if a.request.cancel_after else a.want for a, tokens in zip(asked, got, strict=True)]
    names = [a.name for a in asked]
    if dtype == "float32":
        return compare.identity(got, want, names)
    ours, theirs = [_logits(o) for o in outputs], [a.want_logits for a in asked]
    return compare.divergence(got, ours, want, theirs, names, margin=LOGIT_MARGIN, error=LOGIT_ERROR)


def _wrong_ends(asked: Sequence[_Asked], outputs: Sequence[dict[str, Any]]) -> list[str]:
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


def _did_not_run(
    scenario: Scenario,
    run: Run,
    asked: Sequence[_Asked],
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
    cancelled = [(len(o["tokens"]), a.new) for a, o in zip(asked, outputs, strict=True) if a.request.cancel_after]
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
    for which, end in zip(("the answer under way", "a later answer"), ends, strict=True):
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


def _not_as_simulated(
    scenario: Scenario, target: Target, run: Run, asked: Sequence[_Asked], measured: Acceptance | None
) -> list[str]:
    want = _simulated(target.model, tuple(a.prompt.ids for a in asked), scenario.tokens, run.drafts)
    if measured is None or measured.histogram != want.histogram:
        got = measured.histogram if measured else "none"
        return [f"accepted drafts 0, 1, …: {got}; simulated {want.histogram}"]
    return []


def _first_drafts(
    target: Target, law: Law, prompt: Ids, chances: Mapping[Ids, float], rows: list[list[int]]
) -> Verdict:
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


def _run_law(scenario: Scenario, target: Target, report: ScenarioReport, deadline: float) -> None:
    """Draw many short texts and compare their joint law with the exact one."""
    from . import reference

    law = scenario.law
    assert law is not None
    prompt = prompts.build(_tokenizer(target.model), Request(tokens=law.tokens), 1)
    chances = reference.law(target.model, prompt.ids, law.new, law.top_k, law.temperature)
    body = {"text": prompt.text, "new": law.new, "top_k": law.top_k, "temperature": law.temperature}
    for run in scenario.runs():
        size = int(run.engine.get("max_batch_size", 8))
        seeds = iter(range(law.requests))
        rounds = [
            [body | {"seed": next(seeds)} for _ in range(min(size, law.requests - start))]
            for start in range(0, law.requests, size)
        ]
        result = _session(scenario, target, [_job(run, target, scenario, rounds)], deadline)[0]
        rows: list[list[int]] = next((p["verify_rows"] for p in result["processes"] if p.get("verify_rows")), [])
        verdicts = [compare.law([o["tokens"] for o in result["outputs"]], chances, law.alpha)]
        if run.drafts:
            verdicts.append(_first_drafts(target, law, prompt.ids, chances, rows))
        counters = result["processes"][0]["counters"]
        failures = [f for v in verdicts for f in v.failures]
        if run.drafts and not counters.get("rejection_sample"):
            failures.append("rejection_sample is 0")
        report.runs.append(
            RunReport(
                label=run.label,
                drafts=run.drafts,
                verdicts=verdicts,
                failures=failures,
                counters={k: v for k, v in counters.items() if k != "pid"},
                acceptance=acceptance.measure(rows, run.drafts, []) if rows else None,
                seconds=result["seconds"],
                tokens=sum(len(o["tokens"]) for o in result["outputs"]),
                steps=_steps(counters),
                executor=result["executor"],
                records=result["processes"],
            )
        )
