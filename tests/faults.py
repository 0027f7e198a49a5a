"""Known faults, put back by name: a suite that stays green with one of them planted proves nothing.

`plant(name)` patches the batched operators in this process. As a pytest plugin (`-p tests.faults`) this module plants
the fault named by the variable PLANT before any test is collected.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

# Patched by attribute, so their types do not apply.
conv: Any = importlib.import_module("dlinfer_ext.kernels.causal_conv1d.eager")
rule: Any = importlib.import_module("dlinfer_ext.kernels.gated_delta_rule.eager")
chunks: Any = importlib.import_module("dlinfer_ext.kernels.common.delta_chunks")
kda: Any = importlib.import_module("dlinfer_ext.kernels.kda.eager")
kda_chunks: Any = importlib.import_module("dlinfer_ext.kernels.kda.chunk_eager")
steps: Any = importlib.import_module("dlinfer_ext.kernels.common.delta_steps")
pages: Any = importlib.import_module("dlinfer_ext.kernels.common.pages")
kpool_select: Any = importlib.import_module("dlinfer_ext.kernels.kpool_indexer.select_eager")
kpool_update: Any = importlib.import_module("dlinfer_ext.kernels.kpool_indexer.update_eager")
indexer: Any = importlib.import_module("dlinfer_ext.kernels.kpool_indexer.eager")
latent: Any = importlib.import_module("dlinfer_ext.kernels.latent_attention.eager")
dense: Any = importlib.import_module("dlinfer_ext.kernels.latent_attention.dense_eager")
sparse: Any = importlib.import_module("dlinfer_ext.kernels.latent_attention.sparse_eager")
hyper: Any = importlib.import_module("dlinfer_ext.kernels.hyper_connection.eager")
moe: Any = importlib.import_module("dlinfer_ext.kernels.clamped_moe.eager")


def ring_gather_from_packed_batch() -> None:
    """Store a row's last inputs by gathering from the packed batch, clamped at 0 only (dlinfer `causal_conv1d_fn`)."""
    original = conv.Stores.build.__func__

    def build(cls: Any, cu_seqlens: Tensor, moves: Any, flat: Any, num_tokens: int) -> Any:
        stores = original(cls, cu_seqlens, moves, flat, num_tokens)
        history = moves.read_columns.numel()
        packed = history + torch.arange(stores.values.shape[0])
        return stores._replace(values=torch.where(stores.values < history, packed, stores.values))

    def ring_moves(*args: Any, keep_history: bool) -> Any:
        return moves(*args, keep_history=True)

    moves = conv.ring_moves
    conv.Stores.build = classmethod(build)
    conv.ring_moves = ring_moves


def recurrent_ring_slot_one_behind() -> None:
    """Write the state after token t where the state before it lives."""
    original: Callable[..., Tensor] = steps.ring_slot

    def ring_slot(history: Tensor, offset: int | Tensor, ring: int) -> Tensor:
        return original(history, offset - 1 if isinstance(offset, Tensor) else offset, ring)

    steps.ring_slot = ring_slot


def accepted_count_taken_as_row_count() -> None:
    """Convolve as many rows of this step as the last step accepted (the torch path of vllm-ascend PR 15885)."""
    original: Callable[..., Tensor] = conv.causal_conv1d_update

    def update(x: Tensor, *args: Any) -> Tensor:
        out = original(x, *args)
        accepted = args[5]
        if accepted is not None and x.dim() == 3:
            rest = torch.arange(x.shape[1])[None, :, None] >= accepted[:, None, None]
            out = torch.where(rest, x, out)
        return out

    conv.causal_conv1d_update = update


def rewind_ignores_accepted_count() -> None:
    """Read the history of a verify step from column 0 whatever was accepted."""
    original = conv.rewind_moves

    def moves(live: Tensor, source: Tensor, target: Tensor, lengths: Tensor, accepted: Tensor, *rest: int) -> Any:
        return original(live, source, target, lengths, torch.ones_like(accepted), *rest)

    conv.rewind_moves = moves


def history_not_zeroed_on_reuse() -> None:
    """Read what a reused slot holds as the history of a fresh row."""

    def read_history(state: Tensor, reads: Any) -> Tensor:
        return state.index_select(0, reads.places)

    def row_mask(keep: Tensor, dtype: torch.dtype) -> Tensor:
        return original(torch.ones_like(keep), dtype)

    original: Callable[..., Tensor] = chunks.row_mask
    conv.read_history = read_history
    chunks.row_mask = steps.row_mask = row_mask


def state_stored_transposed() -> None:
    """Prefill stores [K, V] where decode reads [V, K] (hidden by K = V)."""
    original: Callable[..., Tensor] = rule.gated_delta_rule

    def prefill(*args: Any) -> Tensor:
        flags = [i for i, a in enumerate(args) if isinstance(a, bool)]
        flipped = list(args)
        flipped[flags[-1]] = not flipped[flags[-1]]
        return original(*flipped)

    rule.gated_delta_rule = prefill


def kda_reset_by_a_gate() -> None:
    """Start a fresh row from what its slot holds, with a gate of -1e6 on its first token (LMDeploy 0.18's prefill)."""
    original: Callable[..., Tensor] = kda.kda

    def prefill(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *rest: Any) -> Tensor:
        beta, state, cu_seqlens, slots, history, *options = rest
        if history is not None:
            first = cu_seqlens[:-1][(cu_seqlens.diff() > 0) & (history == 0)].long()
            g = g.clone()
            g[first] = -1e6
            history = history + (history == 0) * (state.shape[1] if state.dim() == 5 else 1)
        return original(q, k, v, g, beta, state, cu_seqlens, slots, history, *options)

    kda.kda = prefill


def kda_reference_at_the_middle_row() -> None:
    """Split decays at the middle row of a tile of 16, as differences of running sums (attention-gym issue 337)."""

    def decay_runs(read: Tensor, key: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
        total, (rows, size, _) = decay.log().cumsum(1), key.shape
        left, products = read / decay[:, :, None], read.new_zeros(rows, size, 2, size)
        for i in range(0, size, 16):
            at, r = slice(i, i + 16), total[:, min(i + 8, size - 1), None]
            writers = key[:, : i + 16] * (r - total[:, : i + 16]).exp()
            readers = left[:, at] * (total[:, at] - r).exp()[:, :, None]
            products[:, at, :, : i + 16] = (readers.flatten(1, 2) @ writers.transpose(1, 2)).unflatten(1, (-1, 2))
        products.movedim(2, 1).tril_(-1)
        read.copy_(left * total.exp()[:, :, None])
        key.mul_((total[:, -1:] - total).exp())
        return products, total[:, -1:].exp()

    kda_chunks.decay_runs = decay_runs


def kda_gate_clamped() -> None:
    """Take the lower bound of KDA's gate for a clamp of the softplus form."""
    original: Callable[..., Tensor] = kda.kda_gate

    def gate(x: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
        g = original(x, A_log, dt_bias, None)
        return g if lower_bound is None else g.clamp(min=lower_bound)

    kda.kda_gate = gate


def kda_state_stored_transposed() -> None:
    """KDA's prefill stores the state in the other orientation (vLLM issue 41292)."""
    original: Callable[..., Tensor] = kda.kda

    def prefill(*args: Any) -> Tensor:
        *inputs, state, cu_seqlens, slots, history, scale, norm, v_first, pad, lengths = args
        swapped = state.transpose(-1, -2).contiguous()
        out = original(*inputs, swapped, cu_seqlens, slots, history, scale, norm, not v_first, pad, lengths)
        state.copy_(swapped.reshape(state.shape))
        return out

    kda.kda = prefill


def kpool_tail_without_room_for_drafts() -> None:
    """Keep as many raw tokens as a pool has, so that a rejected draft takes an open one's place (vLLM pull 622)."""
    original: Callable[..., None] = indexer.kpool_update

    def update(k: Tensor, gate: Tensor, ape: Tensor, pools: Tensor, tails: Tensor, *rest: Any) -> None:
        original(k, gate, ape, pools, tails[:, : ape.shape[0]], *rest)

    indexer.kpool_update = update


def kpool_open_pool_forgotten() -> None:
    """Take the tokens before this call for absent, as if every chunk began a pool."""
    original: Callable[..., None] = kpool_update.write_pools

    def write(*args: Any) -> None:
        k, gate, ape, pools, tails, *rest = args
        original(k, gate, ape, pools, dataclasses.replace(tails, view=torch.zeros_like(tails.view)), *rest)

    kpool_update.write_pools = write


def kpool_position_counted_from_the_chunk() -> None:
    """Add the positions' term by the place in the chunk and not in the pool."""
    original: Callable[..., None] = indexer.kpool_update

    def update(k: Tensor, gate: Tensor, ape: Tensor, *rest: Any) -> None:
        place = torch.arange(ape.shape[0]) - rest[4][:1].sum()
        original(k, gate, ape[place % ape.shape[0]], *rest)

    indexer.kpool_update = update


def kpool_open_pool_is_a_candidate() -> None:
    """Choose among the pools that the table has room for, complete or not (vLLM pull 55201)."""
    original: Callable[..., Tensor] = kpool_select.best_pools

    def best(scores: Tensor, complete: Tensor, most: int) -> Tensor:
        return original(scores, complete + 1, most)

    kpool_select.best_pools = best


def kpool_ties_as_they_come() -> None:
    """Take the pools that topk lists: which of several equal ones it lists is not defined."""

    def best(scores: Tensor, complete: Tensor, most: int) -> Tensor:
        candidate = torch.arange(scores.shape[1]) < complete[:, None]
        return scores.masked_fill(~candidate, -torch.inf).topk(most, 1).indices.sort(1).values

    kpool_select.best_pools = best


def kpool_weights_before_the_relu() -> None:
    """Sum over the heads first."""

    def scores(query: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        one = (query * weight[..., None]).sum(2, keepdim=True)
        found: Tensor = original(one, torch.ones_like(weight[..., :1]), *rest)
        return found

    original = kpool_select.pool_scores
    kpool_select.pool_scores = scores


def latent_stale_values_weighed() -> None:
    """Leave what lies past the context in the values: a probability of zero times NaN is NaN."""
    dense.clear_absent = sparse.clear_absent = lambda held, absent: held


def latent_own_token_hidden() -> None:
    """Let a query see the tokens before it only."""
    for module in (dense, latent):
        original = module.packed_tokens

        def packed(*args: Any, original: Any = original) -> Any:
            at = original(*args)
            return type("Shifted", (), {**vars(at), "visible": at.position})

        module.packed_tokens = packed


def latent_sum_not_rescaled() -> None:
    """Keep the running sums when a later part of the context has a larger score."""
    original = dense.RunningSoftmax.add

    def add(self: Any, scores: Tensor, values: Tensor) -> None:
        seen = self.peak > -torch.inf
        self.peak = torch.where(seen, torch.maximum(self.peak, scores.amax(-1)), self.peak)
        original(self, scores, values)

    dense.RunningSoftmax.add = add


def entries_of_pad_rows_written() -> None:
    """Write where a PAD row's table points."""
    original: Callable[..., None] = pages.write_entries

    def write(cache: Any, places: Tensor, values: Tensor, writes: Tensor) -> None:
        original(cache, places, values, torch.ones_like(writes))

    latent.write_entries = kpool_update.write_entries = write


def pad_row_written() -> None:
    """Take slot -1 for the last slot."""
    run: Callable[..., Tensor] = conv.run

    def rows_with_tokens(state_indices: Tensor, cu_seqlens: Tensor, pad_slot_id: int) -> Tensor:
        return cu_seqlens[1:] > cu_seqlens[:-1]

    def faulty(
        x: Tensor, weight: Tensor, bias: Any, pool: Any, cu_seqlens: Tensor, moves: Any, activation: Any
    ) -> Tensor:
        if pool is not None and pool.shape[0]:
            slots = {k: getattr(moves, k).remainder(pool.shape[0]) for k in ("read_slots", "write_slots")}
            moves = moves._replace(**slots)
        return run(x, weight, bias, pool, cu_seqlens, moves, activation)

    conv.live_rows = rows_with_tokens
    conv.run = faulty


def taps_in_reverse_order() -> None:
    """Pair the newest weight with the oldest input."""
    run: Callable[..., Tensor] = conv.run

    def faulty(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        return run(x, weight.flip(0), *rest)

    conv.run = faulty


def operands_through_fp16() -> None:
    """Cast inputs to fp16 on the way (dlinfer's and vllm-ascend's update kernels)."""
    run: Callable[..., Tensor] = conv.run

    def faulty(x: Tensor, *rest: Any) -> Tensor:
        return run(x.half().to(x.dtype), *rest)

    conv.run = faulty


def hyper_connection_epsilons_swapped() -> None:
    """Put the epsilon of the streams' weights into the root of their norm (code written for equal epsilons)."""
    original: Callable[..., tuple[Tensor, ...]] = hyper.hyper_connection_pre

    def pre(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_eps: float, eps: float, iters: int) -> Any:
        return original(streams, fn, scale, base, eps, norm_eps, iters)

    hyper.hyper_connection_pre = pre


def hyper_connection_sigmoid_not_doubled() -> None:
    """Write a block's output with sigmoid where twice that is wanted."""
    original: Callable[..., tuple[Tensor, Tensor, Tensor]] = hyper.hyper_connection_pre

    def pre(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, post, comb = original(*args)
        return x, post / 2, comb

    hyper.hyper_connection_pre = pre


def hyper_connection_not_transposed() -> None:
    """Sum over the second index of the combination."""
    original: Callable[..., Tensor] = hyper.hyper_connection_post

    def post(x: Tensor, streams: Tensor, weights: Tensor, comb: Tensor) -> Tensor:
        return original(x, streams, weights, comb.transpose(1, 2).contiguous())

    hyper.hyper_connection_post = post


def hyper_connection_rows_for_columns() -> None:
    """Normalise a row where a column is wanted and the other way round; softmax stays one of rows."""

    def combination(logits: Tensor, eps: float, iters: int) -> Tensor:
        comb = torch.softmax(logits, dim=1) + eps
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        for _ in range(iters - 1):
            comb = comb / (comb.sum(0, keepdim=True) + eps)
            comb = comb / (comb.sum(1, keepdim=True) + eps)
        return comb.permute(2, 0, 1)

    hyper.combination = combination


def hyper_connection_last_columns_left_out() -> None:
    """End with the rows of the last round."""
    original: Callable[..., Tensor] = hyper.combination

    def combination(logits: Tensor, eps: float, iters: int) -> Tensor:
        comb = original(logits, eps, max(1, iters - 1))
        return comb / (comb.sum(2, keepdim=True) + eps)

    hyper.combination = combination


def swiglu_not_clamped() -> None:
    """Leave the clamp out, as an expert layer that ignores its activation's name does."""
    original: Callable[..., Tensor] = moe.clamped_silu_and_mul
    moe.clamped_silu_and_mul = lambda x, limit: original(x, float("inf"))


def swiglu_clamped_after_silu() -> None:
    """Clamp what SiLU gives instead of what it gets."""

    def unit(x: Tensor, limit: float) -> Tensor:
        gate, up = x.float().chunk(2, dim=-1)
        gate = torch.nn.functional.silu(gate).clamp(max=limit)
        return (gate * up.clamp(-limit, limit)).to(x.dtype)

    moe.clamped_silu_and_mul = unit


def swiglu_gate_clamped_from_below() -> None:
    """Clamp the gate on both sides, as up is."""
    original: Callable[..., Tensor] = moe.clamped_silu_and_mul
    moe.clamped_silu_and_mul = lambda x, limit: original(x.clamp(min=-limit), limit)


FAULTS: Final[dict[str, Callable[[], None]]] = {
    f.__name__: f
    for f in (
        ring_gather_from_packed_batch,
        recurrent_ring_slot_one_behind,
        accepted_count_taken_as_row_count,
        rewind_ignores_accepted_count,
        history_not_zeroed_on_reuse,
        state_stored_transposed,
        kda_reset_by_a_gate,
        kda_reference_at_the_middle_row,
        kda_gate_clamped,
        kda_state_stored_transposed,
        hyper_connection_epsilons_swapped,
        hyper_connection_sigmoid_not_doubled,
        hyper_connection_not_transposed,
        hyper_connection_rows_for_columns,
        hyper_connection_last_columns_left_out,
        swiglu_not_clamped,
        swiglu_clamped_after_silu,
        swiglu_gate_clamped_from_below,
        kpool_tail_without_room_for_drafts,
        kpool_open_pool_forgotten,
        kpool_position_counted_from_the_chunk,
        kpool_open_pool_is_a_candidate,
        kpool_ties_as_they_come,
        kpool_weights_before_the_relu,
        latent_stale_values_weighed,
        latent_own_token_hidden,
        latent_sum_not_rescaled,
        entries_of_pad_rows_written,
        pad_row_written,
        taps_in_reverse_order,
        operands_through_fp16,
    )
}


def plant(name: str) -> None:
    """Put a fault back, in this process, for good."""
    FAULTS[name]()


def pytest_configure() -> None:
    if "PLANT" in os.environ:
        plant(os.environ["PLANT"])
