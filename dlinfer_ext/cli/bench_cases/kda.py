"""Kimi Delta Attention: prefill and decode, against transformers' PyTorch forms called once per request."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dlinfer_ext.ops import kda, kda_update

from . import Case, peak_bytes
from .delta_rule import MEMORY_LIMIT, MIXED

# Of GLM-5.3-Flash over two ranks.
HEADS, DIM = 32, 128


def _public() -> Any:
    from transformers.models.glm5_next import modeling_glm5_next

    return modeling_glm5_next


class Prefill:
    """Fresh prompts of the given lengths; the pool is a per-layer slice, as the engine passes it.

    Args:
        lengths: of the prompts.
        gate: the least log decay; the gates are drawn evenly from there to 0.
    """

    def __init__(self, lengths: tuple[int, ...], gate: float = -1.0) -> None:
        generator = torch.Generator().manual_seed(0)
        tokens, rows = sum(lengths), len(lengths)
        self.lengths = lengths
        self.starts = torch.tensor([0, *lengths]).cumsum(0)
        self.host_starts = self.starts.tolist()
        self.q, self.k, self.v = (torch.randn(tokens, HEADS, DIM, generator=generator) for _ in range(3))
        self.g = gate * torch.rand(tokens, HEADS, DIM, generator=generator)
        self.beta = torch.rand(tokens, HEADS, generator=generator)
        self.pool = torch.zeros(rows + 1, 2, HEADS, DIM, DIM)[:, 1]
        self.slots = torch.arange(rows) + 1
        self.history = torch.zeros(rows, dtype=torch.int64)

    def run(self) -> Tensor:
        return kda(
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
        rule = _public().chunk_kimi_delta_attention
        inputs = (self.q, self.k, self.v, self.g, self.beta)
        return [
            rule(
                *(x[None, lo:hi] for x in inputs),
                initial_state=None,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            for lo, hi in pairwise(self.host_starts)
        ]

    def copy(self) -> list[Tensor]:
        return [x.clone() for x in (self.q, self.k, self.v, self.g, self.v, self.pool[1:])]


class Decode:
    """A decode or verify step of rows that all have a history."""

    def __init__(self, rows: int, heads: int, dim: int, *, steps: int = 1, ring: int | None = None) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.q, self.k, self.v = (normal(rows, steps, heads, dim) for _ in range(3))
        self.g = -torch.rand(rows, steps, heads, dim, generator=generator)
        self.beta = torch.rand(rows, steps, heads, generator=generator)
        inner = (heads, dim, dim) if ring is None else (ring, heads, dim, dim)
        self.pool = normal(rows + 1, 2, *inner)[:, 1]
        self.states = normal(rows, heads, dim, dim)
        self.slots = torch.randperm(rows, generator=generator) + 1
        self.history = torch.arange(rows) + 5

    def run(self) -> Tensor:
        return kda_update(
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
        rule = _public().recurrent_kimi_delta_attention
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


def _prefill(
    lengths: tuple[int, ...], name: str, target: float | None = None, growth: str | None = None, gate: float = -1.0
) -> Case:
    case = Prefill(lengths, gate)
    baseline: Callable[[], object] | None = case.loop if target else None
    return Case(f"kda prefill {name} HV{HEADS} {DIM}x{DIM} fp32", case.run, baseline, case.copy, target, growth)


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
        f"kda_update decode N{rows} HV{heads} {dim}x{dim} fp32",
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
    name = f"kda_update verify N{rows} Q{1 + drafts} ring HV8 64x64 fp32"
    return Case(name, case.run, None, case.copy, growth="kda verify rows")


def cases() -> list[Case]:
    """Return the cases: the four with a target, gates at their bound, and points of growth curves."""
    return [
        _prefill(MIXED, "16 prompts 2048 tokens", target=2.0),
        _prefill((2048,), "1 prompt 2048 tokens", target=1.5),
        _prefill((2048,), "1 prompt 2048 tokens, gates down to -20", gate=-20.0),
        _decode(64, 8, 32, target=15.0, memory_limit=MEMORY_LIMIT),
        _decode(64, 32, 128, target=1.7, memory_limit=MEMORY_LIMIT),
        *(_prefill((n,), f"1 prompt {n} tokens", growth="kda prefill tokens") for n in (256, 512, 1024)),
        *(_prefill((64,) * rows, f"{rows} prompts of 64", growth="kda prefill rows") for rows in (4, 8, 16)),
        *(_decode(rows, 16, 64, growth="kda decode rows") for rows in (16, 32, 64, 128)),
        *(_verify(rows, 3) for rows in (16, 32, 64)),
    ]
