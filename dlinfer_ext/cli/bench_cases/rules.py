"""Delta rules: prefill and decode, against transformers' PyTorch forms called once per request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from . import Case, peak_bytes

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
        form, _ = self.rule.public()
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
        self.host_slots = self.slots.tolist()
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

    def loop(self) -> list[Any]:
        # The state has to be in the pool when the step ends: without that store the loop would do less than the step.
        _, form = self.rule.public()
        outputs = []
        for i, slot in enumerate(self.host_slots):
            o, state = form(
                *(x[i : i + 1] for x in self.inputs),
                initial_state=self.pool[slot : slot + 1],
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            self.pool[slot] = state[0]
            outputs.append(o)
        return outputs

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
) -> Case:
    """Return a case of prompts; it has a baseline if it has a target."""
    case = Prefill(rule, lengths, gate)
    heads = f"HV{rule.value_heads}" if rule.heads == rule.value_heads else f"H{rule.heads} HV{rule.value_heads}"
    title = f"{rule.name} prefill {name} {heads} {rule.dim}x{rule.dim} fp32"
    return Case(title, case.run, case.loop if target else None, case.copy, target, growth)


def _decode(
    rule: Rule,
    rows: int,
    heads: int,
    dim: int,
    target: float | None = None,
    growth: str | None = None,
    memory_limit: float | None = None,
) -> Case:
    case = Decode(rule, rows, heads, dim)
    return Case(
        f"{rule.name}_update decode N{rows} HV{heads} {dim}x{dim} fp32",
        case.run,
        case.loop if target else None,
        case.copy,
        target,
        growth,
        case.extra_memory,
        memory_limit,
    )


def _verify(rule: Rule, rows: int, drafts: int) -> Case:
    case = Decode(rule, rows, 8, 64, steps=1 + drafts, ring=1 + drafts)
    name = f"{rule.name}_update verify N{rows} Q{1 + drafts} ring HV8 64x64 fp32"
    return Case(name, case.run, None, case.copy, growth=f"{rule.curve}verify rows")


def rule_cases(rule: Rule) -> list[Case]:
    """Return the four cases with a target, and points of growth curves over tokens and rows."""
    tokens, rows, decode = (f"{rule.curve}{what}" for what in ("prefill tokens", "prefill rows", "decode rows"))
    return [
        prefill(rule, MIXED, "16 prompts 2048 tokens", target=2.0),
        prefill(rule, (2048,), "1 prompt 2048 tokens", target=1.5),
        _decode(rule, 64, 8, 32, target=15.0, memory_limit=MEMORY_LIMIT),
        _decode(rule, 64, 32, 128, target=1.7, memory_limit=MEMORY_LIMIT),
        *(prefill(rule, (n,), f"1 prompt {n} tokens", growth=tokens) for n in (256, 512, 1024)),
        *(prefill(rule, (64,) * n, f"{n} prompts of 64", growth=rows) for n in (4, 8, 16)),
        *(_decode(rule, n, 16, 64, growth=decode) for n in (16, 32, 64, 128)),
        *(_verify(rule, n, 3) for n in (16, 32, 64)),
    ]
