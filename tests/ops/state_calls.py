"""Valid calls of every operator that touches a state pool, and what can be wrong with each, as a table.

Every call has a row that goes on from a history (row 0), one that begins in a slot full of NaN (row 1, where the layout
knows beginnings), a PAD row whose tokens are NaN (row 2), and where it can a NaN token of no row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dlinfer_ext import ops

NAN, INF = float("nan"), float("inf")
D, W, H, HV, K, V, P = 3, 4, 1, 2, 4, 3, 2
Arguments = dict[str, Any]
Change = Callable[[Arguments], None]


@dataclass(frozen=True)
class Wrong:
    """A fault: how it is put into valid arguments, and which argument and row the error has to name."""

    change: Change
    argument: str
    row: int


@dataclass(frozen=True)
class StateCall:
    """A call and its faults, by kind."""

    function: Callable[..., Any]
    arguments: Callable[[], Arguments]
    faults: dict[str, Wrong] = field(default_factory=dict)

    @property
    def operator(self) -> str:
        return str(self.function.__name__)


def ints(*values: Any) -> Tensor:
    return torch.tensor(values)


def tokens(*shape: int) -> Tensor:
    """Return values of six packed tokens and one of no row: two of row 0, three of row 1, one of row 2 that is PAD."""
    x = torch.rand(7, *shape) + 0.1
    x[5:] = NAN
    return x


def batch(*shape: int) -> Tensor:
    """Return values [3, 2, ..] of which row 2 is PAD."""
    x = torch.rand(3, 2, *shape) + 0.1
    x[2] = NAN
    return x


def put(name: str, index: tuple[Any, ...] | int, value: Any) -> Change:
    def change(arguments: Arguments) -> None:
        arguments[name] = arguments[name].clone()
        arguments[name][index] = value

    return change


def give(**values: Any) -> Change:
    def change(arguments: Arguments) -> None:
        arguments.update(values)

    return change


ROWS = {"cu_seqlens": ints(0, 2, 5, 6)}


def conv_pool(columns: int) -> Tensor:
    pool = torch.randn(6, columns, D)
    pool[[0, 1, 2, 5]] = NAN  # row 0 has slot 3, row 1 slot 2
    return pool


def conv(layout: str) -> Arguments:
    columns = W - 1 if layout == "linear" else 7
    return {
        "x": tokens(D), "weight": torch.rand(W, D), "conv_state": conv_pool(columns), "state_indices": ints(3, 2, -1),
        "history_lens": ints(9, 0, 4), "layout": layout, **ROWS,
    }  # fmt: skip


def conv_columns() -> Arguments:
    arguments = conv("ring")
    del arguments["history_lens"], arguments["layout"]
    read, write = ints(6, 0, 1)[None].repeat(3, 1), ints(0, 1, 2, 3)[None].repeat(3, 1)
    return {**arguments, "bias": None, "read_columns": read, "write_columns": write, "has_history": ints(1, 0, 1)}


def conv_update(layout: str) -> Arguments:
    arguments: Arguments = {
        "x": batch(D), "conv_state": conv_pool(7), "weight": torch.rand(W, D), "conv_state_indices": ints(3, 2, -1)
    }  # fmt: skip
    if layout == "ring":
        return arguments | {"cache_seqlens": ints(9, 0, 4)}
    arguments["conv_state"][2] = 1.0  # these layouts are not told of beginnings
    return arguments | ({"num_accepted_tokens": ints(2, 1, 99)} if layout == "rewind" else {})


def gates(make: Callable[..., Tensor], channels: bool) -> Arguments:
    shape = (HV, K) if channels else (HV,)
    return {"g": -make(*shape), "beta": make(HV)}


def state(*outer: int) -> Tensor:
    pool = torch.randn(*outer, HV, V, K)
    pool[[0, 1, 2, 5]] = NAN
    return pool


def prompts(ring: bool = False, channels: bool = False) -> Arguments:
    qkv = {"q": tokens(H, K), "k": tokens(H, K), "v": tokens(HV, V)}
    return {
        **qkv, **gates(tokens, channels), "state": state(6, 4) if ring else state(6), "state_indices": ints(3, 2, -1),
        "history_lens": ints(9, 0, 4), **ROWS,
    }  # fmt: skip


def steps(layout: str, channels: bool = False, raw: bool = False) -> Arguments:
    arguments: Arguments = {"q": batch(H, K), "k": batch(H, K), "v": batch(HV, V), **gates(batch, channels)}
    if raw:
        arguments |= {"a": arguments.pop("g"), "b": arguments.pop("beta")}
        arguments |= {"neg_exp_A": -torch.rand(HV), "dt_bias": torch.rand(HV)}
    arguments |= {"history_lens": ints(9, 0, 4), "state_indices": ints(3, 2, -1)}
    if layout == "table":
        arguments |= {"state_indices": ints([0, 3, 6], [2, 4, 7], [-1, -1, -1]), "num_accepted_tokens": ints(2, 1, 99)}
        return arguments | {"state": state(8)}
    return arguments | {"state": state(6, 4) if layout == "ring" else state(6)}


def pages() -> Arguments:
    """Blocks of four tokens; row 0 after 5 tokens in blocks 3 and 0, row 1 begins in block 2."""
    table = ints([3, 0, 99], [2, -7, 99], [1, 1, 1])
    return {**ROWS, "block_offsets": table, "history_lens": ints(5, 0, -1)}


def cache(entries: int, dim: int) -> Tensor:
    pool = torch.full((5, entries, dim), NAN)
    pool[3], pool[0] = torch.rand(entries, dim), torch.rand(entries, dim)
    return pool


def kpool_update() -> Arguments:
    tail = cache(3, 2 * D)
    return {"k": tokens(D), "gate": tokens(D), "ape": torch.rand(P, D), "pool_cache": cache(2, D), "tail_cache": tail,
            **pages()}  # fmt: skip


def filled(entries: int, dim: int) -> Tensor:
    """Return a cache that holds the call's own tokens, as those that only read do."""
    pool = cache(entries, dim)
    pool[2] = torch.rand(entries, dim)
    return pool


def kpool_select() -> Arguments:
    sizes = {"topk": 2, "kpool": P, "max_kv_len": 7}
    return {"q": tokens(H, D), "weights": tokens(H), "pool_cache": filled(2, D), **sizes, **pages()}


def latent_write() -> Arguments:
    return {"c": tokens(D), "cache": cache(4, D), **pages()}


def latent_attention() -> Arguments:
    sizes = {"value_dim": 2, "scale": 1.0, "max_kv_len": 7}
    return {"q": tokens(H, D), "cache": filled(4, D), **sizes, **pages()}


def slots(name: str) -> dict[str, Wrong]:
    return {
        "slot-beyond-the-pool": Wrong(put(name, 1, 6), name, 1),
        "shared-slot": Wrong(put(name, 1, 3), name, 1),
    }


def inputs(*names: str, at: tuple[int, ...], row: int) -> dict[str, Wrong]:
    """NaN in each input, infinity in each, at a token of a live row."""
    return {
        f"{value}-{name}": Wrong(put(name, at, float(value)), name, row) for name in names for value in ("nan", "inf")
    }


def block_faults() -> dict[str, Wrong]:
    return {
        "block-beyond-the-cache": Wrong(put("block_offsets", (1, 0), 5), "block_offsets", 1),
        "block-negative": Wrong(put("block_offsets", (0, 1), -1), "block_offsets", 0),
        "history-beyond-the-blocks": Wrong(put("history_lens", 1, 10), "history_lens", 1),
    }


SHARED_BLOCK = {"shared-block": Wrong(put("block_offsets", (1, 0), 0), "block_offsets", 1)}
QKV = ("q", "k", "v")


def overflowing(name: str, *arguments: str) -> Change:
    """Make the pool fp16 and the tokens too large for it."""

    def change(given: Arguments) -> None:
        given[name] = given[name].half()
        for argument in arguments:
            given[argument] = given[argument] * 1e7

    return change


def exploding(given: Arguments) -> None:
    """Let finite inputs give a state that is beyond fp32."""
    given["k"], given["v"] = given["k"] * 1e20, given["v"] * 1e30


def conv_faults(indices: str, at: tuple[int, ...], history: str | None, read: tuple[int, ...]) -> dict[str, Wrong]:
    found = {
        **slots(indices),
        **inputs("x", at=at, row=0),
        "nan-state": Wrong(put("conv_state", read, NAN), "conv_state", 0),
        "inf-state-written": Wrong(overflowing("conv_state", "x"), "conv_state", 0),
    }
    return found | ({history: Wrong(put(history, 0, -2), history, 0)} if history else {})


def delta_faults(names: tuple[str, ...], at: tuple[int, ...], read: tuple[int, ...]) -> dict[str, Wrong]:
    resets = {"inf-g": Wrong(put("g", at, INF), "g", 0)} if "g" in names else {}
    return {
        **slots("state_indices"),
        **inputs(*names, at=at, row=0),
        **resets,
        "negative-history": Wrong(put("history_lens", 0, -2), "history_lens", 0),
        "nan-state": Wrong(put("state", read, NAN), "state", 0),
        "inf-state-written": Wrong(exploding, "state", 0),
    }


PLAIN, CHANNELS, RAW = (*QKV, "g", "beta"), (*QKV, "g", "beta"), (*QKV, "a", "b")
TABLE_SLOTS = {
    "slot-beyond-the-pool": Wrong(put("state_indices", (1, 1), 8), "state_indices", 1),
    "shared-slot": Wrong(put("state_indices", (1, 1), 3), "state_indices", 1),
    "accepted-beyond-the-row": Wrong(put("num_accepted_tokens", 0, 4), "num_accepted_tokens", 0),
    "accepted-none": Wrong(put("num_accepted_tokens", 0, 0), "num_accepted_tokens", 0),
}
CALLS: dict[str, StateCall] = {
    "conv-linear": StateCall(
        ops.causal_conv1d,
        lambda: conv("linear"),
        {
            **conv_faults("state_indices", (0,), "history_lens", (3, 2)),
            "row-beyond-the-bound": Wrong(give(max_query_len=2), "cu_seqlens", 1),
            "offsets-fall": Wrong(put("cu_seqlens", 2, 1), "cu_seqlens", 1),
        },
    ),
    "conv-ring": StateCall(
        ops.causal_conv1d, lambda: conv("ring"), conv_faults("state_indices", (4,), "history_lens", (3, 6)) | {
            "nan-x": Wrong(put("x", (4, 1), NAN), "x", 1), "inf-x": Wrong(put("x", (1, 1), INF), "x", 0),
        }
    ),
    "conv-columns": StateCall(
        ops.causal_conv1d_columns, conv_columns, conv_faults("state_indices", (0,), None, (3, 6)) | {
            "column-beyond-the-slot": Wrong(put("write_columns", (1, 2), 7), "write_columns", 1),
        }
    ),
    "conv-update-linear": StateCall(
        ops.causal_conv1d_update, lambda: conv_update("linear"),
        conv_faults("conv_state_indices", (0, 1), None, (3, 0)),
    ),
    "conv-update-rewind": StateCall(
        ops.causal_conv1d_update, lambda: conv_update("rewind"),
        conv_faults("conv_state_indices", (0, 1), None, (3, 3)) | {
            "accepted-beyond-the-row": Wrong(put("num_accepted_tokens", 0, 6), "num_accepted_tokens", 0),
        },
    ),
    "conv-update-ring": StateCall(
        ops.causal_conv1d_update, lambda: conv_update("ring"),
        conv_faults("conv_state_indices", (0, 1), "cache_seqlens", (3, 6)),
    ),
    "gdn-plain": StateCall(ops.gated_delta_rule, prompts, delta_faults(PLAIN, (0, 0), (3, 1)) | {
        "host-lengths-disagree": Wrong(give(host_lengths=[2, 2, 1]), "host_lengths", 1),
    }),
    "gdn-ring": StateCall(ops.gated_delta_rule, lambda: prompts(ring=True), delta_faults(PLAIN, (1, 0), (3, 1))),
    "gdn-update-plain": StateCall(
        ops.gated_delta_rule_update, lambda: steps("plain"), delta_faults(PLAIN, (0, 1), (3, 1))
    ),
    "gdn-update-ring": StateCall(
        ops.gated_delta_rule_update, lambda: steps("ring"), delta_faults(PLAIN, (0, 1), (3, 1))
    ),
    "gdn-update-table": StateCall(
        ops.gated_delta_rule_update, lambda: steps("table"), delta_faults(PLAIN, (0, 1), (3, 1)) | TABLE_SLOTS
    ),
    "gating-update-ring": StateCall(
        ops.sigmoid_gating_delta_rule_update, lambda: steps("ring", raw=True), delta_faults(RAW, (0, 1), (3, 1))
    ),
    "kda-plain": StateCall(ops.kda, lambda: prompts(channels=True), delta_faults(CHANNELS, (0, 0), (3, 1))),
    "kda-ring": StateCall(ops.kda, lambda: prompts(True, True), delta_faults(CHANNELS, (0, 0), (3, 1))),
    "kda-update-ring": StateCall(
        ops.kda_update, lambda: steps("ring", channels=True), delta_faults(CHANNELS, (0, 1), (3, 1))
    ),
    "kda-update-table": StateCall(
        ops.kda_update, lambda: steps("table", channels=True), delta_faults(CHANNELS, (0, 1), (3, 1)) | TABLE_SLOTS
    ),
    "kpool-update": StateCall(ops.kpool_update, kpool_update, {
        **block_faults(), **SHARED_BLOCK, **inputs("k", "gate", at=(0, 1), row=0),
        "nan-state": Wrong(put("tail_cache", (0, 1), NAN), "tail_cache", 0),
        "inf-state-written": Wrong(overflowing("pool_cache", "k"), "pool_cache", 0),
    }),
    "kpool-select": StateCall(ops.kpool_select, kpool_select, {
        **block_faults(), **inputs("q", "weights", at=(0, 0), row=0),
        "nan-state": Wrong(put("pool_cache", (3, 1), NAN), "pool_cache", 0),
    }),
    "latent-write": StateCall(ops.latent_write, latent_write, {
        **block_faults(), **SHARED_BLOCK, **inputs("c", at=(0, 1), row=0),
        "inf-state-written": Wrong(overflowing("cache", "c"), "cache", 0),
    }),
    "latent-attention": StateCall(ops.latent_attention, latent_attention, {
        **block_faults(), **inputs("q", at=(0, 0), row=0),
        "nan-state": Wrong(put("cache", (3, 2), NAN), "cache", 0),
    }),
    "zero-slots": StateCall(ops.zero_slots, lambda: {"pool": state(6), "slots": ints(3, -1, 3)}, {
        "slot-beyond-the-pool": Wrong(put("slots", 1, 6), "slots", 1),
    }),
    "copy-slots": StateCall(ops.copy_slots, lambda: {
        "pool": state(6), "source": ints(3, 4, -1), "target": ints(0, 1, 5)
    }, {
        "slot-beyond-the-pool": Wrong(put("target", 1, 6), "target", 1),
        "source-beyond-the-pool": Wrong(put("source", 1, 6), "source", 1),
        "shared-slot": Wrong(put("target", 1, 0), "target", 1),
        "target-is-a-source": Wrong(put("target", 1, 3), "target", 1),
    }),
}  # fmt: skip
FAULTS = [(call, kind) for call, made in CALLS.items() for kind in made.faults]
