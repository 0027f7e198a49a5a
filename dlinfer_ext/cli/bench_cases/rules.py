"""Delta rules: prefill, decode and verify, against transformers' PyTorch forms and the naive recurrence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from . import Case, Form, MissingBaseline, naive, peak_bytes

# 16 prompts, 2048 tokens in all.
MIXED = (1, 7, 17, 33, 64, 65, 90, 100, 128, 150, 180, 200, 215, 230, 240, 328)
# Of the bytes of the states addressed.
MEMORY_LIMIT = 0.25


@dataclass(frozen=True)
class Rule:
    """A delta rule and its public form.

    Attributes:
        name: of the cases.
        curve: what its growth curves are called by.
        prefill, update: our operators.
        heads, value_heads, dim: the sizes of its prompts.
        channel_gate: each key channel has a decay of its own; otherwise each head has one.
        public: transformers' forms for a prompt and for a step, imported when first called.
        unpadded: why transformers' form for prompts cannot take a batch of uneven ones here, or "".
    """

    name: str
    curve: str
    prefill: Callable[..., Tensor]
    update: Callable[..., Tensor]
    heads: int
    value_heads: int
    dim: int
    channel_gate: bool
    public: Callable[[], tuple[Callable[..., Any], Callable[..., Any]]]
    unpadded: str = ""

    def gate_shape(self, *shape: int) -> tuple[int, ...]:
        """Return the shape of the decays of values whose heads and key channels are the last two of `shape`."""
        return shape if self.channel_gate else shape[:-1]


class Prefill:
    """Fresh prompts of the given lengths; the pool is a per-layer slice, as the engine passes it.

    Args:
        rule: which rule.
        lengths: of the prompts.
        gate: the least log decay; the gates are drawn evenly from there to 0.
    """

    def __init__(self, rule: Rule, lengths: tuple[int, ...], gate: float = -1.0) -> None:
        generator = torch.Generator().manual_seed(0)
        tokens, rows, dim = sum(lengths), len(lengths), rule.dim

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.rule, self.lengths = rule, lengths
        self.starts = torch.tensor([0, *lengths]).cumsum(0)
        self.host_starts = self.starts.tolist()
        self.q, self.k = normal(tokens, rule.heads, dim), normal(tokens, rule.heads, dim)
        self.v = normal(tokens, rule.value_heads, dim)
        self.g = gate * torch.rand(rule.gate_shape(tokens, rule.value_heads, dim), generator=generator)
        self.beta = torch.rand(tokens, rule.value_heads, generator=generator)
        self.pool = torch.zeros(rows + 1, 2, rule.value_heads, dim, dim)[:, 1]
        self.slots = torch.arange(rows) + 1
        self.history = torch.zeros(rows, dtype=torch.int64)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.g, self.beta

    def run(self) -> Tensor:
        return self.rule.prefill(
            *self.inputs,
            self.pool,
            cu_seqlens=self.starts,
            state_indices=self.slots,
            history_lens=self.history,
            use_qk_l2norm=True,
            host_lengths=self.lengths,
        )

    def loop(self) -> list[Any]:
        return self._loop(self.rule.public()[0])

    def _loop(self, form: Callable[..., Any]) -> list[Any]:
        outputs = []
        for slot, (lo, hi) in enumerate(pairwise(self.host_starts), start=1):
            o, state = form(
                *(x[None, lo:hi] for x in self.inputs),
                initial_state=None,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            self.pool[slot] = state[0]
            outputs.append(o)
        return outputs

    def padded(self) -> Any:
        """Run one batch, each prompt filled up with zeros on its left as `generate` of transformers does."""
        if self.rule.unpadded and len(set(self.lengths)) > 1:
            raise MissingBaseline(self.rule.unpadded)
        form, _ = self.rule.public()
        longest = max(self.lengths)
        batch = []
        for x in self.inputs:
            whole = x.new_zeros(len(self.lengths), longest, *x.shape[1:])
            for row, (lo, hi) in enumerate(pairwise(self.host_starts)):
                whole[row, longest - (hi - lo) :] = x[lo:hi]
            batch.append(whole)
        o, state = form(*batch, initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True)
        self.pool[1:] = state
        return [o[row, longest - n :] for row, n in enumerate(self.lengths)]

    def naive(self) -> list[Any]:
        return self._loop(naive.recurrent)

    def copy(self) -> list[Tensor]:
        return [x.clone() for x in (self.q, self.k, self.v, self.g, self.v, self.pool[1:])]


class Decode:
    """A decode or verify step of rows that all have a history."""

    def __init__(self, rule: Rule, rows: int, heads: int, dim: int, *, steps: int = 1, ring: int | None = None) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.rule = rule
        self.q, self.k, self.v = (normal(rows, steps, heads, dim) for _ in range(3))
        self.g = -torch.rand(rule.gate_shape(rows, steps, heads, dim), generator=generator)
        self.beta = torch.rand(rows, steps, heads, generator=generator)
        inner = (heads, dim, dim) if ring is None else (ring, heads, dim, dim)
        self.pool = normal(rows + 1, 2, *inner)[:, 1]
        self.slots = torch.randperm(rows, generator=generator) + 1
        self.history = torch.arange(rows) + 5
        self.state_bytes = rows * heads * dim * dim * self.pool.itemsize

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.g, self.beta

    def run(self) -> Tensor:
        return self.rule.update(
            *self.inputs,
            self.pool,
            state_indices=self.slots,
            history_lens=self.history,
            use_qk_l2norm=True,
        )

    def _states(self, after: int) -> tuple[Tensor, ...]:
        """Return the index of every row's state after its history and `after` more tokens."""
        if self.pool.dim() == 4:
            return (self.slots,)
        return self.slots, (self.history + after) % self.pool.shape[1]

    def loop(self) -> list[Any]:
        # The state has to be in the pool when the step ends: without that store the loop would do less than the step.
        _, form = self.rule.public()
        places = [torch.stack(self._states(t), 1).tolist() for t in range(self.q.shape[1] + 1)]
        return [self._steps(form, [p[row] for p in places], row) for row in range(len(places[0]))]

    def _steps(self, form: Callable[..., Any], places: list[list[int]], row: int) -> list[Tensor]:
        outputs = []
        for t, (before, after) in enumerate(pairwise(places)):
            o, state = form(
                *(x[row : row + 1, t : t + 1] for x in self.inputs),
                initial_state=self.pool[tuple(before)][None],
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            self.pool[tuple(after)] = state[0]
            outputs.append(o)
        return outputs

    def _batched(self, form: Callable[..., Any]) -> list[Tensor]:
        outputs = []
        for t in range(self.q.shape[1]):
            o, state = form(
                *(x[:, t : t + 1] for x in self.inputs),
                initial_state=self.pool[self._states(t)],
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            self.pool[self._states(t + 1)] = state
            outputs.append(o)
        return outputs

    def transformers(self) -> list[Tensor]:
        """Step all requests at once, their states gathered from the pool and scattered into it."""
        return self._batched(self.rule.public()[1])

    def naive(self) -> list[Tensor]:
        return self._batched(naive.recurrent)

    @property
    def baselines(self) -> dict[str, Form]:
        return {"loop": self.loop, "transformers": self.transformers, "fla-naive": self.naive}

    def copy(self) -> Tensor:
        return self.pool[1:].clone()

    def extra_memory(self) -> float:
        """Return the peak of fresh bytes, the output aside, over the bytes of the states addressed."""
        return (peak_bytes(self.run) - self.v.nbytes) / self.state_bytes


def prefill(
    rule: Rule,
    lengths: tuple[int, ...],
    name: str,
    target: float | None = None,
    growth: str | None = None,
    gate: float = -1.0,
    *,
    point: int | None = None,
    baselines: tuple[str, ...] = (),
) -> Case:
    """Return a case of prompts with the baselines named; the first bears the target."""
    case = Prefill(rule, lengths, gate)
    heads = f"HV{rule.value_heads}" if rule.heads == rule.value_heads else f"H{rule.heads} HV{rule.value_heads}"
    title = f"{rule.name} prefill {name} {heads} {rule.dim}x{rule.dim} fp32"
    forms: dict[str, Form] = {"loop": case.loop, "transformers": case.padded, "fla-naive": case.naive}
    chosen = {name: forms[name] for name in baselines}
    return Case(title, case.run, chosen, case.copy, target, growth, tokens=sum(lengths), point=point)


def _decode(
    rule: Rule,
    rows: int,
    heads: int,
    dim: int,
    target: float | None = None,
    growth: str | None = None,
    memory_limit: float | None = None,
    point: int | None = None,
) -> Case:
    case = Decode(rule, rows, heads, dim)
    return Case(
        f"{rule.name}_update decode N{rows} HV{heads} {dim}x{dim} fp32",
        case.run,
        case.baselines if target else {},
        case.copy,
        target,
        growth,
        case.extra_memory,
        memory_limit,
        tokens=rows,
        point=point,
    )


def _verify(rule: Rule, rows: int, drafts: int, growth: str, point: int) -> Case:
    case = Decode(rule, rows, 8, 64, steps=1 + drafts, ring=1 + drafts)
    name = f"{rule.name}_update verify N{rows} Q{1 + drafts} ring HV8 64x64 fp32"
    # One of them has baselines: on the others they would only show the same again.
    baselines = case.baselines if rows == 16 else {}
    return Case(name, case.run, baselines, case.copy, growth=growth, tokens=rows * (1 + drafts), point=point)


def rule_cases(rule: Rule) -> list[Case]:
    """Return the four cases with a target, and points of growth curves over tokens, rows, drafts and dimension."""
    tokens, rows, decode, dims, verify, drafts = (
        f"{rule.curve}{what}"
        for what in ("prefill tokens", "prefill rows", "decode rows", "decode dim", "verify rows", "verify drafts")
    )
    naive_too = {256: ("loop", "fla-naive")}
    return [
        prefill(rule, MIXED, "16 prompts 2048 tokens", target=2.0, baselines=("loop", "transformers")),
        prefill(rule, (2048,), "1 prompt 2048 tokens", target=1.5, baselines=("transformers",)),
        _decode(rule, 64, 8, 32, target=15.0, memory_limit=MEMORY_LIMIT),
        _decode(rule, 64, 32, 128, target=1.7, memory_limit=MEMORY_LIMIT),
        *(
            prefill(rule, (n,), f"1 prompt {n} tokens", growth=tokens, point=n, baselines=naive_too.get(n, ()))
            for n in (256, 512, 1024)
        ),
        *(prefill(rule, (64,) * n, f"{n} prompts of 64", growth=rows, point=n) for n in (4, 8, 16)),
        *(_decode(rule, n, 16, 64, growth=decode, point=n) for n in (16, 32, 64, 128)),
        *(_decode(rule, 32, 8, n, growth=dims, point=n) for n in (32, 64, 128)),
        *(_verify(rule, n, 3, verify, n) for n in (16, 32, 64)),
        *(_verify(rule, 24, n, drafts, n) for n in (1, 3, 7)),
    ]
