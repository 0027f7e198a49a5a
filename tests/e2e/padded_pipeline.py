"""Run one scenario with eager_mode=False, and say which memory it wrote; prints one JSON line.

Pools are filled with a pattern as they are made. What a step's real rows hold is taken from what LMDeploy hands to the
graph runner, before it pads; every other slot and block must keep the pattern.

The scenario has "model", "batches", "tokens", "drafts" and "engine" (as of tests/e2e/engine.py), and besides: "card"
(what the runner puts into a padded step, fields of cpu_graphs.Card), "guard" (compare steps, see capture_guard.py) and
"plant" (a fault of below, by name).

Usage: python -m tests.e2e.padded_pipeline SCENARIO.json
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

MARK: Final = "RESULT "
PATTERN: Final = 3.25  # exact in every dtype of a pool


class Pools:
    """The pools of this process, and what was asked of them.

    Attributes:
        states, blocks: each pool with the axis that its slots or blocks are on.
        slots, used: slots and blocks of real rows.
        padded: rows added so far, by model class and query length.
    """

    def __init__(self) -> None:
        self.states: list[tuple[Tensor, int]] = []
        self.blocks: list[tuple[Tensor, int]] = []
        self.slots: set[int] = set()
        self.used: set[int] = set()
        self.padded: Counter[str] = Counter()

    def watch(self) -> None:
        """Hook the makers of the pools and the graph runner."""
        from lmdeploy.pytorch.engine.cache_engine.engine import CacheEngine
        from lmdeploy.pytorch.engine.cache_engine.state import StateCacheEngine

        from dlinfer_ext.framework.lmdeploy.cpu_graphs import Bucket, PaddedGraphRunner

        def states(engine: Any) -> list[tuple[Tensor, int]]:
            return [(pool.tensor, pool.entry_axis) for pool in engine.allocation.pools]

        def blocks(engine: Any) -> list[tuple[Tensor, int]]:
            return [(t, 0) for layer in engine.gpu_cache for t in layer if t.numel()]

        for cls, pools, get in ((StateCacheEngine, self.states, states), (CacheEngine, self.blocks, blocks)):
            self._watch_maker(cls, pools, get)
        call, run = PaddedGraphRunner.__call__, Bucket.run

        def noting_call(runner: Any, **kwargs: Any) -> Any:
            self._note(kwargs)
            return call(runner, **kwargs)

        def noting_run(bucket: Any, *args: Any, **kwargs: Any) -> Any:
            rows, query = kwargs["attn_metadata"].q_seqlens.size(0), bucket.meta.decode_query_len
            self.padded[f"{type(bucket.model).__name__} {query}"] += bucket.meta.max_batchs - rows
            return run(bucket, *args, **kwargs)

        runner: Any = PaddedGraphRunner
        runner.__call__ = noting_call
        setattr(Bucket, "run", noting_run)  # noqa: B010  (a method, for mypy)

    @staticmethod
    def _watch_maker(cls: Any, pools: list[tuple[Tensor, int]], get: Any) -> None:
        make = cls.__init__

        def init(engine: Any, *args: Any, **kwargs: Any) -> None:
            make(engine, *args, **kwargs)
            for tensor, axis in get(engine):
                tensor.fill_(PATTERN)
                pools.append((tensor, axis))

        cls.__init__ = init

    def _note(self, kwargs: dict[str, Any]) -> None:
        meta = kwargs["attn_metadata"]
        size = meta.block_size
        for table, length in zip(meta.block_offsets.tolist(), meta.kv_seqlens.tolist(), strict=True):
            self.used.update(table[: -(-length // size)])
        if kwargs.get("state_ids") is not None:
            self.slots.update(i for i in kwargs["state_ids"].tolist() if i >= 0)

    def report(self) -> dict[str, Any]:
        """Return the slots and blocks that changed: those of real rows, the reserved ones, and others."""
        changed = {"slots": _changed(self.states), "blocks": _changed(self.blocks)}
        held = {"slots": self.slots - {0}, "blocks": self.used - {0}}
        return {
            kind: {
                "held": len(held[kind]),
                "held_changed": len(changed[kind] & held[kind]),
                "reserved_changed": 0 in changed[kind],
                "stray": sorted(changed[kind] - held[kind] - {0}),
                "pools": len(self.states if kind == "slots" else self.blocks),
                "size": min(t.size(axis) for t, axis in (self.states if kind == "slots" else self.blocks)),
            }
            for kind in changed
        } | {"padded": dict(self.padded)}


def _changed(pools: list[tuple[Tensor, int]]) -> set[int]:
    found: set[int] = set()
    for tensor, axis in pools:
        if tensor.dtype == torch.uint8:  # one allocation for several tensors: compare with the pattern as it was laid
            raise AssertionError("a pool of bytes cannot hold the pattern")
        entries = tensor.movedim(axis, 0).flatten(1)
        found.update(int(i) for i in (entries != PATTERN).any(1).nonzero())
    return found


def pad_with_a_live_slot() -> None:
    """Give padded rows the state slot of the first real row."""
    from dlinfer_ext.framework.lmdeploy.graph_rows import GraphRows

    original = GraphRows.fill

    def fill(rows: GraphRows, history_lens: Tensor, state_ids: Tensor) -> None:
        original(rows, history_lens, state_ids)
        rows.state_indices[state_ids.size(0) :] = state_ids[0]

    setattr(GraphRows, "fill", fill)  # noqa: B010


def pad_with_a_free_slot() -> None:
    """Give padded rows the pool's last slot, which no request holds."""
    from dlinfer_ext.framework.lmdeploy.graph_rows import GraphRows

    original = GraphRows.fill

    def fill(rows: GraphRows, history_lens: Tensor, state_ids: Tensor) -> None:
        original(rows, history_lens, state_ids)
        rows.state_indices[state_ids.size(0) :] = 7

    setattr(GraphRows, "fill", fill)  # noqa: B010


def rows_of_the_host() -> None:
    """Do without buffers of our own: take the rows from what the runner bound."""
    from dlinfer_ext.framework.lmdeploy import graph_rows

    graph_rows.attach = lambda runner: runner


def capture_with_real_rows() -> None:
    """Capture a graph with the rows of its first step."""
    from dlinfer_ext.framework.lmdeploy.graph_rows import GraphRows, RowBinder

    original = RowBinder.fill

    def fill(binder: RowBinder, graph_meta: Any, **kwargs: Any) -> Any:
        attention = kwargs["attn_metadata"]
        history_lens = attention.kv_seqlens - attention.q_seqlens
        filled = original(binder, graph_meta, **kwargs)
        rows: GraphRows | None = getattr(attention, "gated_delta_rows", None)
        if binder.awaited is not None and rows is not None:
            rows.fill(history_lens, kwargs["state_ids"])
        return filled

    setattr(RowBinder, "fill", fill)  # noqa: B010


def fill_from_its_own_buffers() -> None:
    """Fill for the replay from what the capture's fill has left in the metadata."""
    from dlinfer_ext.framework.lmdeploy import graph_rows

    setattr(graph_rows._Found, "put_back", lambda _: None)  # noqa: B010


def capture_without_a_replay() -> None:
    """Take what the captured run gives for the step, as a runner of CUDA does."""
    from dlinfer_ext.framework.lmdeploy.cpu_graphs import Bucket

    original, ran = Bucket.run, set[int]()

    def run(bucket: Bucket, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if id(bucket) in ran:
            return original(bucket, *args, **kwargs)
        ran.add(id(bucket))
        cut: dict[str, Any] = bucket.model.get_outputs_cudagraph(bucket.outputs, **kwargs)
        return cut

    setattr(Bucket, "run", run)  # noqa: B010


def pad_with_a_free_block() -> None:
    """Let padded rows write their keys and values to a block that no request holds."""
    from dlinfer_ext.framework.lmdeploy.cpu_graphs import Bucket

    original = Bucket._bind_ascend_fields

    def bind(self: Bucket, attention: Any) -> None:
        real = attention.kv_start_indices.size(0)
        original(self, attention)
        attention.kv_start_indices[real:] += 63 * attention.block_size

    setattr(Bucket, "_bind_ascend_fields", bind)  # noqa: B010


def host_read() -> None:
    """Read a length on the host in every step."""
    from dlinfer_ext.framework.lmdeploy import gated_delta

    original = gated_delta.CausalConv1d.forward

    def forward(self: Any, x: Tensor, weight: Tensor, bias: Any, pool: Tensor, meta: Any, activation: Any) -> Tensor:
        meta.history_lens[0].item()
        return original(self, x, weight, bias, pool, meta, activation)

    setattr(gated_delta.CausalConv1d, "forward", forward)  # noqa: B010


def columns_by_length() -> None:
    """Allocate as many columns as the longest history has tokens (its length from a copy on the host)."""
    from dlinfer_ext.framework.lmdeploy import gated_delta

    original = gated_delta.CausalConv1d.forward

    def forward(self: Any, x: Tensor, weight: Tensor, bias: Any, pool: Tensor, meta: Any, activation: Any) -> Tensor:
        x.new_empty(1, meta.longest)
        return original(self, x, weight, bias, pool, meta, activation)

    class Metadata(gated_delta.GatedDeltaMetadata):
        def __init__(self, num_tokens: int, width: int, state_ids: Tensor, attention: Any) -> None:
            super().__init__(num_tokens, width, state_ids, attention)
            import ctypes

            lengths = attention.kv_seqlens_cpu
            raw = (ctypes.c_int32 * lengths.size(0)).from_address(lengths.data_ptr())
            self.longest = max(raw)

    setattr(gated_delta, "GatedDeltaMetadata", Metadata)  # noqa: B010
    setattr(gated_delta.CausalConv1d, "forward", forward)  # noqa: B010


def metadata_of_the_step() -> None:
    """Take the histories from a tensor of this step's own instead of from static buffers."""
    from dlinfer_ext.framework.lmdeploy.graph_rows import GraphRows

    original = GraphRows.fill
    kept: list[Tensor] = []

    def fill(rows: GraphRows, history_lens: Tensor, state_ids: Tensor) -> None:
        rows.history_lens = rows.history_lens.clone()
        kept.append(rows.history_lens)
        original(rows, history_lens, state_ids)

    setattr(GraphRows, "fill", fill)  # noqa: B010


FAULTS: Final = {
    f.__name__: f
    for f in (
        pad_with_a_live_slot,
        pad_with_a_free_slot,
        pad_with_a_free_block,
        rows_of_the_host,
        capture_with_real_rows,
        fill_from_its_own_buffers,
        capture_without_a_replay,
        host_read,
        columns_by_length,
        metadata_of_the_step,
    )
}


def run(scenario: dict[str, Any]) -> dict[str, Any]:
    import lmdeploy  # noqa: F401  (the adapter gets in by itself)

    from dlinfer_ext.framework.lmdeploy import capture_guard, cpu_graphs, session

    pools = Pools()
    pools.watch()
    cpu_graphs.PaddedGraphRunner.card = cpu_graphs.Card(**scenario.get("card", {}))
    if scenario.get("plant"):
        FAULTS[scenario["plant"]]()
    seen = capture_guard.enable() if scenario.get("guard") else None
    job = {
        "model": scenario["model"],
        "drafts": scenario.get("drafts", 0),
        "engine": {"eager_mode": False, "num_gpu_blocks": 64} | scenario.get("engine", {}),
        "rounds": [[{"text": t, "new": scenario["tokens"]} for t in batch] for batch in scenario["batches"]],
    }
    with tempfile.TemporaryDirectory(prefix="dlinfer_ext_records_") as folder:
        ran = session.run_one(job, Path(folder))
    result = {"tokens": [o["tokens"] for o in ran["outputs"]], "counters": ran["own"]["counters"]}
    result["memory"] = pools.report()
    if seen:
        shapes = sorted({len(s.calls) for s in seen.first.values()})
        result["guard"] = {k: v for k, v in dataclasses.asdict(seen).items() if k != "first"} | {
            "shapes": len(seen.first),
            "calls": shapes,
        }
    return result


if __name__ == "__main__":
    answer = run(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    sys.stdout.write(MARK + json.dumps(answer) + "\n")
