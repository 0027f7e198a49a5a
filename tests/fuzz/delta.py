"""The delta rules in their three layouts: the gated one, the one whose steps compute their gates, and KDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from dlinfer_ext import ops
from dlinfer_ext.kernels.common.delta_reference import run_row
from dlinfer_ext.kernels.gated_delta_rule.reference import gated_delta_gate
from dlinfer_ext.testing import TOLERANCE

from .world import DENSE, NO_HISTORY, OTHER, PAD_SLOT, SEATS, UNKNOWN, Batch, Row, Step, World

H, HV, K, V = 1, 2, 4, 3
PAD_ID = 1  # a slot that no seat has


class Rule(NamedTuple):
    """A delta rule: its operators, the shape of a token's gates, and whether a step computes g and beta of them."""

    family: str
    prefill: Callable[..., Tensor]
    update: Callable[..., Tensor]
    gate: tuple[int, ...] = (HV,)
    raw: bool = False


RULES: Final = {
    "gdr": Rule("delta_rule", ops.gated_delta_rule, ops.gated_delta_rule_update),
    "gating": Rule("delta_rule", ops.gated_delta_rule, ops.sigmoid_gating_delta_rule_update, raw=True),
    "kda": Rule("kda", ops.kda, ops.kda_update, gate=(HV, K)),
}


@dataclass
class Delta(World):
    """A rule and where its states live; `flip`: [K, V] instead of [V, K].

    The other way of a verify step in slots that are not a ring: no histories are given.

    Attributes:
        rule: of `RULES`.
        layout: "plain", a state for each slot; "ring", R of them; "table", a slot for each token of a step.
    """

    rule: str = "gdr"
    layout: str = "plain"

    def build(self) -> None:
        self.of = RULES[self.rule]
        self.rewinds = self.layout != "plain"
        self.limit = TOLERANCE[self.of.family, torch.float32]
        self.length = 1 + self.drafts + self.spare if self.rewinds else 1
        outer = (2 + SEATS, self.length) if self.layout == "ring" else (2 + SEATS * self.length,)
        self.state = self.pool("state", (*outer, HV, *((K, V) if self.flip else (V, K))))
        self.shapes = ((H, K), (H, K), (HV, V), self.of.gate, (HV,))
        self.neg_exp_A = -torch.rand(HV, generator=self.generator) - 0.1
        self.dt_bias = torch.randn(HV, generator=self.generator)

    def draw(self, count: int) -> Tensor:
        sizes = [prod(shape) for shape in self.shapes]
        x = torch.randn(count, sum(sizes), generator=self.generator)
        if not self.of.raw:
            *_, g, beta = x.split(sizes, 1)
            g.abs_().neg_()
            beta.sigmoid_()
        return x

    def split(self, tokens: Tensor) -> list[Tensor]:
        """Return q, k, v and the two gates of tokens [.., F]."""
        parts = tokens.split([prod(shape) for shape in self.shapes], -1)
        return [x.unflatten(-1, shape) for x, shape in zip(parts, self.shapes, strict=True)]

    def slots_of(self, seat: int) -> list[int]:
        """Return the slots of a seat, in another order than the seats; slots 0 and 1 belong to none."""
        return [2 + (3 * seat) % SEATS + SEATS * i for i in range(self.length if self.layout == "table" else 1)]

    def slots(self, row: Row) -> list[int]:
        if row.seat >= 0 or row.seat == NO_HISTORY:
            return self.slots_of(max(row.seat, 0))
        return [PAD_ID if row.seat == PAD_SLOT else -1] * len(self.slots_of(0))

    def source(self, row: Row) -> int:
        """Return which of its slots holds a row's state."""
        return row.request.accepted - 1 if row.request is not None and self.layout == "table" else 0

    def run(self, batch: Batch, *, update: bool) -> list[Tensor]:
        return [self.run_update(batch) if update else self.run_prefill(batch)]

    def run_prefill(self, batch: Batch) -> Tensor:
        self.calls[self.of.prefill.__name__] += 1
        inputs = self.split(batch.packed)
        if self.of.raw:
            inputs[3:] = ops.gated_delta_gate(inputs[3], inputs[4], self.neg_exp_A, self.dt_bias)
        return self.of.prefill(
            *inputs, self.state, cu_seqlens=batch.cu_seqlens, history_lens=batch.histories, pad_slot_id=PAD_ID,
            state_indices=batch.ints([self.slots(row)[self.source(row)] for row in batch.rows]),
            host_lengths=None if batch.form & UNKNOWN else batch.lengths, state_v_first=not self.flip,
            use_qk_l2norm=True,
        )  # fmt: skip

    def run_update(self, batch: Batch) -> Tensor:
        self.calls[self.of.update.__name__] += 1
        tokens, given = batch.packed, dict[str, Any]()
        if batch.form & DENSE:
            tokens = tokens.view(len(batch.rows), -1, tokens.shape[1])
        else:
            given["cu_seqlens"] = batch.cu_seqlens
        if not self.without_histories(batch):
            given["history_lens"] = batch.histories
        slots = [self.slots(row) for row in batch.rows]
        if self.layout == "table":
            counts = [1 if row.request is None else row.request.accepted for row in batch.rows]
            given |= {"state_indices": batch.ints(slots), "num_accepted_tokens": batch.ints(counts)}
        else:
            given["state_indices"] = batch.ints([first for first, *_ in slots])
        raw = (self.neg_exp_A, self.dt_bias) if self.of.raw else ()
        out = self.of.update(
            *self.split(tokens), *raw, self.state, pad_slot_id=PAD_ID, state_v_first=not self.flip, use_qk_l2norm=True,
            **given,
        )  # fmt: skip
        return out.reshape(-1, HV, V)

    def without_histories(self, batch: Batch) -> bool:
        """A fresh row and a PAD row that only its history tells need them, and so does a ring."""
        needed = any(row.seat == NO_HISTORY or (row.live is not None and not row.history) for row in batch.rows)
        return bool(batch.form & OTHER) and self.layout != "ring" and not needed

    def define(self, batch: Batch, *, update: bool) -> Step:
        outputs = []
        written: dict[tuple[int, ...], Tensor] = {}
        for row in batch.rows:
            if row.live is None:
                outputs.append(torch.zeros(len(row.new), HV, V, dtype=torch.float64))
                continue
            o, states = self.from_the_first(row.whole)
            outputs.append(o[row.history :])
            for t, index in self.stored(row, update=update).items():
                state = states[row.history + t]
                written[index] = state if self.flip else state.transpose(-1, -2)
        outputs.append(torch.zeros(len(batch.outside), HV, V, dtype=torch.float64))
        return Step([torch.cat(outputs)], {"state": written})

    def from_the_first(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the outputs of a whole request [n, HV, V], and the state after each token [HV, K, V], in fp64."""
        q, k, v, g, beta = self.split(tokens.double())
        if self.of.raw:
            g, beta = gated_delta_gate(g, beta, self.neg_exp_A, self.dt_bias)
        states: list[Tensor] = []
        zero = torch.zeros(HV, K, V, dtype=torch.float64)
        return run_row(q, k, v, g, beta, zero, None, True, lambda t, state: states.append(state)), states

    def stored(self, row: Row, *, update: bool) -> dict[int, tuple[int, ...]]:
        """Return where the state after each token of a row goes; those of other tokens go nowhere."""
        slots, count = self.slots(row), len(row.new)
        if self.layout == "plain" or (self.layout == "table" and not update):
            return {count - 1: (slots[self.source(row)],)}
        if self.layout == "table":
            return {t: (slots[t],) for t in range(count)}
        kept = range(count) if update else [count - 1]
        return {t: (slots[0], (row.history + t + 1) % self.length) for t in kept}
