"""Sparse latent attention, against transformers' expressions called once per request on contiguous keys."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from dlinfer_ext.ops import kpool_select, kpool_update, latent_attention

from . import Case, Form, peak_bytes

# Of GLM-5.3-Flash over eight ranks; the indexer is on every rank.
HEADS, LATENT, INDEX_HEADS, INDEX_DIM, POOL, TOPK, BLOCK = 8, 512, 32, 128, 4, 2048, 128
SCALE = 256**-0.5


class Step:
    """Rows that each have `past` tokens in the caches, and `tokens` new ones; blocks in no order."""

    def __init__(self, rows: int, tokens: int, past: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.count, self.past, self.context = tokens, past, past + tokens
        pages = -(-self.context // BLOCK)
        self.table = torch.randperm(rows * pages, generator=generator).view(rows, pages).int()
        self.starts = torch.arange(rows + 1) * tokens
        self.history = torch.full((rows,), past)
        self.lengths = [tokens] * rows
        total = rows * tokens
        self.k, self.gate = normal(total, INDEX_DIM), normal(total, INDEX_DIM)
        self.ape = normal(POOL, INDEX_DIM)
        self.query, self.weights = normal(total, INDEX_HEADS, INDEX_DIM), normal(total, INDEX_HEADS)
        self.q = normal(total, HEADS, LATENT)
        self.latents = normal(rows * pages, BLOCK, LATENT)
        self.pools = normal(rows * pages, BLOCK // POOL, INDEX_DIM)
        self.tails = normal(rows * pages, POOL + 3, 2 * INDEX_DIM)
        # The same keys, contiguous per request, for the public formulation.
        self.keys = self.pools[self.table.long()].flatten(1, 2)[:, : self.context // POOL].contiguous()
        self.values = self.latents[self.table.long()].flatten(1, 2)[:, : self.context].contiguous()
        self.visible = torch.arange(past, self.context)[:, None] + 1
        self.indices = self.select()

    def update(self) -> None:
        kpool_update(
            self.k,
            self.gate,
            self.ape,
            self.pools,
            self.tails,
            cu_seqlens=self.starts,
            block_offsets=self.table,
            history_lens=self.history,
            host_lengths=self.lengths,
        )

    def update_loop(self) -> list[Tensor]:
        """Pool fresh prompts one by one."""
        found = []
        for k, gate in zip(self.k.split(self.count), self.gate.split(self.count), strict=True):
            whole = self.count // POOL * POOL
            keys, logits = (x[:whole].unflatten(0, (-1, POOL)) for x in (k, gate))
            found.append(((logits + self.ape).softmax(1) * keys).sum(1))
        return found

    def select(self) -> Tensor:
        return kpool_select(
            self.query,
            self.weights,
            self.pools,
            cu_seqlens=self.starts,
            block_offsets=self.table,
            history_lens=self.history,
            topk=TOPK,
            kpool=POOL,
            max_kv_len=self.context,
            host_lengths=self.lengths,
        )

    def select_loop(self) -> list[Tensor]:
        found = []
        for row, (q, w) in enumerate(zip(self.query.split(self.count), self.weights.split(self.count), strict=True)):
            products = F.relu(torch.matmul(q, self.keys[row].T) * INDEX_DIM**-0.5)
            scores = torch.matmul(w[:, None], products)[:, 0]
            ends = torch.arange(1, scores.shape[1] + 1) * POOL
            scores = scores.masked_fill(ends > self.visible, torch.finfo(scores.dtype).min)
            chosen = scores.topk(min(TOPK // POOL, scores.shape[1])).indices
            found.append((chosen[..., None] * POOL + torch.arange(POOL)).flatten(1))
        return found

    def attend(self, indices: Tensor | None) -> Tensor:
        return latent_attention(
            self.q,
            self.latents,
            cu_seqlens=self.starts,
            block_offsets=self.table,
            history_lens=self.history,
            value_dim=LATENT,
            scale=SCALE,
            max_kv_len=self.context,
            indices=indices,
            host_lengths=self.lengths,
        )

    def attend_loop(self, sparse: bool) -> list[Tensor]:
        """Attend with a mask over the whole context, whether it is sparse or causal."""
        found, positions = [], torch.arange(self.context)
        chosen = self.indices.long().split(self.count)
        for row, q in enumerate(self.q.split(self.count)):
            mask = positions < self.visible
            if sparse:
                counts = torch.zeros(self.count, self.context, dtype=torch.int32)
                counts.scatter_add_(1, chosen[row].clamp(min=0), (chosen[row] >= 0).int())
                mask = counts != 0
            key = self.values[row].expand(HEADS, -1, -1)
            found.append(F.scaled_dot_product_attention(q.transpose(0, 1), key, key, attn_mask=mask, scale=SCALE))
        return found

    def extra_memory(self, indices: Tensor | None) -> float:
        """Return the peak of fresh bytes over the bytes of a step of 32 MiB and of the output twice."""
        return peak_bytes(lambda: self.attend(indices)) / (2 * self.q.nbytes + (32 << 20))


def _update(rows: int, tokens: int, past: int) -> Case:
    """Return a case without a target: the public formulation of fresh prompts takes nothing from caches and to them."""
    step = Step(rows, tokens, past)
    baselines: dict[str, Form] = {"loop": step.update_loop} if past == 0 else {}
    name = f"kpool_update {rows}x{tokens} after {past} fp32"
    return Case(name, step.update, baselines, lambda: (step.k.clone(), step.gate.clone()), tokens=rows * tokens)


def _select(rows: int, tokens: int, past: int, target: float | None = None, growth: str | None = None) -> Case:
    step = Step(rows, tokens, past)
    baselines: dict[str, Form] = {"loop": step.select_loop} if target else {}
    name = f"kpool_select {rows}x{tokens} after {past} fp32{', growth' if growth else ''}"
    point = rows if growth else None
    return Case(name, step.select, baselines, step.keys.clone, target, growth, tokens=rows * tokens, point=point)


def _attend(rows: int, tokens: int, past: int, *, sparse: bool, target: float | None = None) -> Case:
    step = Step(rows, tokens, past)
    indices = step.indices if sparse else None
    return Case(
        f"latent_attention {'sparse' if sparse else 'dense'} {rows}x{tokens} after {past} H{HEADS} C{LATENT} fp32",
        lambda: step.attend(indices),
        {"loop": partial(step.attend_loop, sparse)} if target else {},
        step.values.clone,
        target,
        extra_memory=lambda: step.extra_memory(indices),
        memory_limit=1.5,
        tokens=rows * tokens,
    )


def cases() -> list[Case]:
    """Return the cases; each owns its tensors.

    A target below 1 is a bound on what pages cost: the public formulation has its keys contiguous, and over a prompt a
    mask on the whole context is cheaper on a CPU than to gather what each query has selected.
    """
    return [
        _update(16, 128, 0),
        _update(32, 1, 1021),
        _select(16, 1, 4095, target=0.5),
        _select(16, 4, 4092, target=0.5),
        _select(1, 256, 3840, target=1.0),
        *(_select(rows, 1, 4095, growth="kpool select rows") for rows in (4, 8, 16, 32)),
        _attend(16, 1, 2047, sparse=False, target=3.0),
        _attend(1, 512, 0, sparse=False, target=0.4),
        _attend(16, 1, 4095, sparse=True, target=3.0),
        _attend(1, 128, 3968, sparse=True, target=0.3),
    ]
