"""What a scenario file may say (configs/e2e/*.yaml), and the engine runs that it stands for.

A scenario is data: the same file is run on a CPU and on a card. Prompts are given by their number of tokens and built
from a text that ships with the package (`prompts.py`), so a scenario holds for every model and tokenizer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError, model_validator

Where = Literal["cpu", "npu"]
# What a run must have done besides giving the right tokens.
Expectation = Literal[
    "history",  # prefill chunks that continue a history
    "drafts_accepted",
    "drafts_rejected",
    "prefix_hits",
    "padded_rows",  # rows that a graph's bucket added
    "recomputed",  # a request was preempted and its prompt run again
]


MOST_BYTES: Final = 1 << 20  # the largest shipped file is below 2 KiB
# Fields of LMDeploy's PytorchEngineConfig that a scenario may set. With `via: server` they become flags of the server,
# so this is also what keeps a file from switching on code of the model folder, or another address to listen on.
ENGINE: Final = (
    *("tp", "dp", "ep", "attn_tp_size", "mlp_tp_size", "moe_tp_size", "distributed_executor_backend"),
    *("session_len", "max_batch_size", "max_prefill_token_num", "prefill_interval", "eager_mode"),
    *("cache_max_entry_count", "block_size", "kernel_block_size", "num_cpu_blocks", "num_gpu_blocks", "quant_policy"),
    *("enable_prefix_caching", "prefix_cache_state_budget", "prefix_cache_decode_state_interval"),
    *("cudagraph_capture_batch_sizes", "piecewise_cudagraph_max_tokens", "enable_microbatch", "enable_eplb"),
    *("enable_metrics", "language_model_only", "logprobs_mode", "model_format", "dtype"),
)


class ScenarioError(ValueError):
    """A scenario file that cannot be used; the message names the file and the setting."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Request(Strict):
    """One request.

    Attributes:
        tokens: length of the prompt.
        line: line of the shipped text at which the prompt starts; requests with one line share their first tokens.
        tail: after `shared` tokens the prompt goes on at this line instead.
        shared: see `tail`.
        new: tokens to generate; None takes the scenario's.
        stop_at: end at the token that the reference has at this place, counted from 1, given to the engine as a stop
            token. A verify step may have accepted more by then.
        cancel_after: cancelled by the client once it has this many tokens.
        give_up_after: seconds after which the client of the server hangs up, whatever it has.
        wait: seconds after the round's start at which it is sent (the server only).
        cached: whether some of the prompt must, or must not, come from the prefix cache.
    """

    tokens: PositiveInt
    line: NonNegativeInt | None = None
    tail: NonNegativeInt | None = None
    shared: PositiveInt | None = None
    new: PositiveInt | None = None
    stop_at: PositiveInt | None = None
    cancel_after: PositiveInt | None = None
    give_up_after: float | None = Field(default=None, gt=0)
    wait: float = Field(default=0.0, ge=0)
    cached: bool | None = None

    @property
    def goes_away(self) -> bool:
        """Whether its client does not wait for its end."""
        return self.cancel_after is not None or self.give_up_after is not None

    @model_validator(mode="after")
    def _tail_has_a_place(self) -> Request:
        if (self.tail is None) != (self.shared is None):
            raise ValueError("tail and shared belong together")
        if self.shared is not None and self.shared >= self.tokens:
            raise ValueError(f"shared is {self.shared}; wanted less than tokens, {self.tokens}")
        return self


class Span(Strict):
    """Whole numbers from `least` to `most`, each as likely."""

    least: PositiveInt
    most: PositiveInt

    @model_validator(mode="after")
    def _in_order(self) -> Span:
        if self.most < self.least:
            raise ValueError(f"most is {self.most}; wanted at least least, {self.least}")
        return self


class Soak(Strict):
    """Requests drawn from a seed that arrive over time.

    Attributes:
        requests: how many, malformed ones included.
        seed: of lengths, arrivals, cancellations and what is malformed.
        tokens: prompt lengths to draw from: a list, or a span.
        new: numbers of new tokens to draw from, likewise.
        per_second: mean arrivals a second (exponential gaps).
        cancelled: share of clients that go away after a few tokens.
        malformed: share of requests that the server has to refuse.
        again: share of requests for one of three prompts, so that they are found in the prefix cache.
        again_tokens: length of those prompts.
        warm_up_s: seconds from which on memory is judged.
        growth: the server's memory may grow by this share from the warm-up to the end; None does not judge it.
    """

    requests: PositiveInt
    seed: int
    tokens: list[PositiveInt] | Span
    new: list[PositiveInt] | Span
    per_second: float = Field(gt=0)
    cancelled: float = Field(default=0.0, ge=0, le=1)
    malformed: float = Field(default=0.0, ge=0, lt=1)
    again: float = Field(default=0.0, ge=0, le=1)
    again_tokens: PositiveInt = 449
    warm_up_s: float = Field(default=0.0, ge=0)
    growth: float | None = Field(default=None, gt=0)


class Law(Strict):
    """Sampling: the law of the first tokens over many seeds, against the exact one from the reference's logits.

    Attributes:
        requests: draws.
        tokens: length of the prompt.
        new: tokens per draw; the joint law of all of them is tested.
        top_k: tokens that may be drawn at each place.
        temperature: of the law.
        alpha: the test fails where a right sampler would fail with less than this probability.
    """

    requests: PositiveInt
    tokens: PositiveInt
    new: PositiveInt = 3
    top_k: PositiveInt = 4
    temperature: float = Field(default=1.0, gt=0)
    alpha: float = Field(default=1e-4, gt=0, lt=1)


class Scenario(Strict):
    """One file of configs/e2e.

    Attributes:
        name: the file's name.
        what: one line for reports.
        where: where it can run.
        dtype: of the engine. float32 is compared token by token, others by logits up to the first divergence.
        via: LMDeploy's pipeline or its server.
        tokens: tokens to generate per request.
        drafts: numbers of draft tokens, one run each; 0 is without MTP.
        engine: fields of LMDeploy's PytorchEngineConfig.
        vary: fields of it, one run per value (and per combination).
        rounds: batches; a batch is sent when the one before has ended. Exactly one of rounds, soak, law.
        engines: how often the whole run is repeated in one process, each time with a new engine.
        simulated: the histogram of accepted drafts must equal the simulation's.
        lose_worker: kill the last worker during the first answer: the answer and a later one must end with an error.
        expect: what a run must have done.
        by_name: is run only where it is asked for by its name.
        timeout_s: for the whole scenario.
    """

    name: str
    what: str
    where: tuple[Where, ...] = ("cpu", "npu")
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    via: Literal["pipeline", "server"] = "pipeline"
    tokens: PositiveInt = 48
    drafts: tuple[NonNegativeInt, ...] = (4,)
    engine: dict[str, Any] = {}
    vary: dict[str, list[Any]] = {}
    rounds: tuple[tuple[Request, ...], ...] = ()
    soak: Soak | None = None
    law: Law | None = None
    engines: PositiveInt = 1
    simulated: bool = False
    lose_worker: bool = False
    expect: tuple[Expectation, ...] = ()
    by_name: bool = False
    timeout_s: PositiveInt = 240

    @model_validator(mode="after")
    def _one_kind(self) -> Scenario:
        kinds = [bool(self.rounds), self.soak is not None, self.law is not None]
        if sum(kinds) != 1:
            raise ValueError("wanted exactly one of rounds, soak and law")
        if self.soak is not None and self.via != "server":
            raise ValueError("soak needs via: server")
        if self.via != "server" and any(r.give_up_after for batch in self.rounds for r in batch):
            raise ValueError("give_up_after needs via: server")
        if any(not r for r in self.rounds):
            raise ValueError("a round has no request")
        return self

    def runs(self) -> Iterator[Run]:
        """Yield every engine run: drafts × the values of `vary`."""
        names = list(self.vary)
        for drafts in self.drafts:
            for values in itertools.product(*self.vary.values()):
                varied = dict(zip(names, values, strict=True))
                label = ", ".join([f"drafts {drafts}", *(f"{k} {v}" for k, v in varied.items())])
                yield Run(label=label, drafts=drafts, engine=self.engine | varied)


class Run(Strict):
    """One engine: its settings, and the name it has in reports."""

    label: str
    drafts: int
    engine: dict[str, Any]

    @property
    def ranks(self) -> int:
        return int(self.engine.get("tp", 1))


def shipped() -> list[Path]:
    """Return the files of configs/e2e."""
    # Of a namespace package only a file has a path of its own.
    folder = Path(str(files("dlinfer_ext.configs") / "hosts.json")).parent / "e2e"
    return sorted(folder.glob("*.yaml"))


def find(name: str) -> Path:
    """Return the file of a shipped scenario, or `name` itself where it is a path.

    Raises:
        ScenarioError: neither; the message lists the shipped ones.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return path
    for file in shipped():
        if file.stem == name:
            return file
    raise ScenarioError(f"scenario {name!r}: no such file; shipped are {', '.join(f.stem for f in shipped())}")


def load(path: Path) -> Scenario:
    """Read and check a scenario file.

    Raises:
        ScenarioError: not YAML, or a setting that does not fit; the message says where and what is wanted.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ScenarioError(f"{path}: has {path.stat().st_size} bytes; wanted at most {MOST_BYTES}")
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ScenarioError(f"{path}: {error}") from None
    if not isinstance(data, dict):
        raise ScenarioError(f"{path}: holds {type(data).__name__}; wanted settings by name")
    for group in ("engine", "vary"):
        unknown = sorted(set(map(str, data.get(group) or {})) - set(ENGINE))
        if unknown:
            raise ScenarioError(
                f"{path}: {group}.{unknown[0]} is no setting of a scenario; wanted one of {', '.join(ENGINE)}"
            )
    try:
        return Scenario(name=path.stem, **data)
    except (ValidationError, TypeError) as error:
        lines = error.errors() if isinstance(error, ValidationError) else [{"loc": (), "msg": str(error)}]
        what = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'scenario'}: {e['msg']}" for e in lines)
        raise ScenarioError(f"{path}: {what}") from None
