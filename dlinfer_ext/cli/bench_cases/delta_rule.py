"""Gated delta rule: prefill and decode, against transformers' PyTorch forms called once per request."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dlinfer_ext.ops import gated_delta_rule, gated_delta_rule_update

from . import Case, peak_bytes

# 16 prompts, 2048 tokens in all.
MIXED = (1, 7, 17, 33, 64, 65, 90, 100, 128, 150, 180, 200, 215, 230, 240, 328)
# Of the bytes of the states addressed.
MEMORY_LIMIT = 0.25


def _public() -> Any:
    from transformers.models.qwen3_5 import modeling_qwen3_5

    return modeling_qwen3_5


class Prefill:
    """Fresh prompts of the given lengths; the pool is a per-layer slice, as the engine passes it."""

    def __init__(self, lengths: tuple[int, ...], heads: int = 16, value_heads: int = 32, dim: int = 128) -> None:
        generator = torch.Generator().manual_seed(0)
        tokens, rows = sum(lengths), len(lengths)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.lengths = lengths
        self.starts = torch.tensor([0, *lengths]).cumsum(0)
        self.host_starts = self.starts.tolist()
        self.q, self.k = normal(tokens, heads, dim), normal(tokens, heads, dim)
        self.v = normal(tokens, value_heads, dim)
        self.g = -torch.rand(tokens, value_heads, generator=generator)
        self.beta = torch.rand(tokens, value_heads, generator=generator)
        self.pool = torch.zeros(rows + 1, 2, value_heads, dim, dim)[:, 1]
        self.slots = torch.arange(rows) + 1
        self.history = torch.zeros(rows, dtype=torch.int64)

    def run(self) -> Tensor:
        return gated_delta_rule(
            self.q,
            self.k,
            self.v,
            self.g,
            self.beta,
            self.pool,
            cu_seqlens=self.starts,
            state_indices=self.slots,
            history_lens=self.history,
            use_qk_l2norm=True,
            host_lengths=self.lengths,
        )

    def loop(self) -> list[Any]:
        rule = _public().torch_chunk_gated_delta_rule
        inputs = (self.q, self.k, self.v, self.g, self.beta)
        return [
            rule(*(x[None, lo:hi] for x in inputs), output_final_state=True, use_qk_l2norm_in_kernel=True)
            for lo, hi in pairwise(self.host_starts)
        ]

    def copy(self) -> list[Tensor]:
        return [x.clone() for x in (self.q, self.k, self.v, self.v, self.pool[1:])]


class Decode:
    """A decode or verify step of rows that all have a history."""

    def __init__(self, rows: int, heads: int, dim: int, *, steps: int = 1, ring: int | None = None) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.q, self.k, self.v = (normal(rows, steps, heads, dim) for _ in range(3))
        self.g = -torch.rand(rows, steps, heads, generator=generator)
        self.beta = torch.rand(rows, steps, heads, generator=generator)
        inner = (heads, dim, dim) if ring is None else (ring, heads, dim, dim)
        self.pool = normal(rows + 1, 2, *inner)[:, 1]
        self.states = normal(rows, heads, dim, dim)
        self.slots = torch.randperm(rows, generator=generator) + 1
        self.history = torch.arange(rows) + 5

    def run(self) -> Tensor:
        return gated_delta_rule_update(
            self.q,
            self.k,
            self.v,
            self.g,
            self.beta,
            self.pool,
            state_indices=self.slots,
            history_lens=self.history,
            use_qk_l2norm=True,
        )

    def loop(self) -> list[Any]:
        rule = _public().torch_recurrent_gated_delta_rule
        inputs = (self.q, self.k, self.v, self.g, self.beta)
        return [
            rule(
                *(x[i : i + 1] for x in inputs),
                initial_state=self.states[i : i + 1],
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            for i in range(self.states.shape[0])
        ]

    def copy(self) -> Tensor:
        return self.states.clone()

    def extra_memory(self) -> float:
        """Return the peak of fresh bytes, the output aside, over the bytes of the states addressed."""
        return (peak_bytes(self.run) - self.v.nbytes) / self.states.nbytes


def _prefill(lengths: tuple[int, ...], name: str, target: float | None = None, growth: str | None = None) -> Case:
    case = Prefill(lengths)
    baseline: Callable[[], object] | None = case.loop if target else None
    return Case(f"gated_delta_rule prefill {name} H16 HV32 128x128 fp32", case.run, baseline, case.copy, target, growth)


def _decode(
    rows: int,
    heads: int,
    dim: int,
    target: float | None = None,
    growth: str | None = None,
    memory_limit: float | None = None,
) -> Case:
    case = Decode(rows, heads, dim)
    return Case(
        f"gated_delta_rule_update decode N{rows} HV{heads} {dim}x{dim} fp32",
        case.run,
        case.loop if target else None,
        case.copy,
        target,
        growth,
        case.extra_memory,
        memory_limit,
    )


def _verify(rows: int, drafts: int) -> Case:
    case = Decode(rows, 8, 64, steps=1 + drafts, ring=1 + drafts)
    name = f"gated_delta_rule_update verify N{rows} Q{1 + drafts} ring HV8 64x64 fp32"
    return Case(name, case.run, None, case.copy, growth="verify rows")


def cases() -> list[Case]:
    """Return the cases: the four with a target, and points of growth curves over tokens and rows."""
    return [
        _prefill(MIXED, "16 prompts 2048 tokens", target=2.0),
        _prefill((2048,), "1 prompt 2048 tokens", target=1.5),
        _decode(64, 8, 32, target=15.0, memory_limit=MEMORY_LIMIT),
        _decode(64, 32, 128, target=1.7, memory_limit=MEMORY_LIMIT),
        *(_prefill((tokens,), f"1 prompt {tokens} tokens", growth="prefill tokens") for tokens in (256, 512, 1024)),
        *(_prefill((64,) * rows, f"{rows} prompts of 64", growth="prefill rows") for rows in (4, 8, 16)),
        *(_decode(rows, 16, 64, growth="decode rows") for rows in (16, 32, 64, 128)),
        *(_verify(rows, 3) for rows in (16, 32, 64)),
    ]
