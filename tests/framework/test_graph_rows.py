"""Rows of captured steps: fixed addresses, values of the step as it came, and nothing done while a graph is captured.

The runner here is dlinfer's as its sources (0.2.7 and later) have it: a record and buffers for each bucket, the
metadata's tensors replaced by the buffers, and the second fill of the first step reading what the first one has bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dlinfer_ext.framework.lmdeploy import counters, gated_delta, graph_rows
from dlinfer_ext.testing import HostRead, no_host_reads

ROWS = 4


class Model:
    """A model with dlinfer's buffer methods, as far as rows go; it notes the rows of each run."""

    def __init__(self) -> None:
        self.moe = moe = SimpleNamespace(x_active_mask=None)
        self.ctx_mgr = SimpleNamespace(current_context=lambda: SimpleNamespace(moe_metadata=moe))
        self.runs: list[tuple[list[int], list[int], list[int]]] = []
        self.seen: list[Tensor] = []
        self.kv: list[list[int]] = []

    def make_buffers_cudagraph(self, graph_meta: Any, **kwargs: Any) -> dict[str, Tensor]:
        rows = graph_meta.max_batchs
        return {
            "q_seqlens": torch.arange(1, rows + 1, dtype=torch.int32) * (graph_meta.max_tokens // rows),
            "kv_seqlens": torch.ones(rows, dtype=torch.int32),
            "state_ids": torch.zeros(rows, dtype=torch.int64),
            "x_active_mask": torch.zeros(rows, dtype=torch.bool),
        }

    def fill_buffers_cudagraph(self, graph_meta: Any, **kwargs: Any) -> dict[str, Any]:
        buffers, attention = graph_meta.input_buffers, kwargs["attn_metadata"]
        kv_seqlens = attention.kv_seqlens
        buffers["kv_seqlens"].fill_(0)
        buffers["kv_seqlens"][: kv_seqlens.size(0)] = kv_seqlens
        attention.kv_seqlens, attention.q_seqlens = buffers["kv_seqlens"], buffers["q_seqlens"]
        self.moe.x_active_mask = buffers["x_active_mask"]
        filled = dict(kwargs)
        if kwargs.get("state_ids") is not None:
            buffers["state_ids"].fill_(0)
            buffers["state_ids"][: kwargs["state_ids"].size(0)] = kwargs["state_ids"]
            filled["state_ids"] = buffers["state_ids"]
        return filled

    def __call__(self, *, attn_metadata: Any, state_ids: Tensor | None, **_: Any) -> None:
        if state_ids is None:
            return
        meta = gated_delta.GatedDeltaMetadata(0, 4, state_ids, attn_metadata)
        assert meta.is_decoding
        assert meta.host_lengths is None
        self.seen = [meta.cu_seqlens, meta.history_lens, meta.state_indices]
        self.kv.append(attn_metadata.kv_seqlens.tolist())
        self.runs.append((meta.cu_seqlens.tolist(), meta.history_lens.tolist(), meta.state_indices.tolist()))


class Runner:
    """dlinfer's order: capture (two runs), then in every step a fill and a replay."""

    replays = True

    def __init__(self, model: Model, eager_mode: bool = False, tokens: int | None = None) -> None:
        self.model = model
        self.backend_config = SimpleNamespace(eager_mode=eager_mode)
        self.metas: dict[int, Any] = {}
        self.tokens = tokens

    def __call__(self, **kwargs: Any) -> None:
        query_len = kwargs["input_ids"].size(-1) // kwargs["attn_metadata"].q_seqlens.size(0)
        meta = self.metas.get(query_len)
        if meta is None:
            tokens = self.tokens or ROWS * query_len
            meta = self.metas[query_len] = SimpleNamespace(max_batchs=ROWS, max_tokens=tokens)
            meta.input_buffers = self.model.make_buffers_cudagraph(meta, **kwargs)
            padded = self.model.fill_buffers_cudagraph(meta, **kwargs)
            self.model(**padded)
            self.model(**padded)
            if not self.replays:
                return
        self.model(**self.model.fill_buffers_cudagraph(meta, **kwargs))


@pytest.fixture(autouse=True)
def _step_context(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    build = SimpleNamespace(build_ctx=SimpleNamespace(num_spec_tokens=0))
    monkeypatch.setattr(gated_delta, "get_step_ctx_manager", lambda: build)
    counters.reset()
    yield
    counters.reset()


@pytest.fixture
def runner() -> Any:
    return graph_rows.attach(Runner(Model()))


def step(histories: list[int], slots: list[int], query_len: int = 1, states: bool = True) -> dict[str, Any]:
    q = torch.full((len(slots),), query_len, dtype=torch.int32)
    attention = SimpleNamespace(
        is_decoding=query_len == 1,
        is_multi_token_decoding=query_len > 1,
        q_seqlens=q,
        kv_seqlens=q + torch.tensor(histories, dtype=torch.int32),
        cu_seqlens_q=torch.arange(len(slots) + 1) * query_len,
        cu_seqlens_q_cpu=None,
        kv_seqlens_cpu=None,
    )
    state_ids = torch.tensor(slots) if states else None
    return {"input_ids": torch.zeros(1, len(slots) * query_len), "attn_metadata": attention, "state_ids": state_ids}


@pytest.mark.parametrize("query_len", [1, 5])
def test_rows_are_those_of_the_step_and_padding_has_no_slot(runner: Any, query_len: int) -> None:
    ends = [i * query_len for i in range(ROWS + 1)]
    nothing = (ends, [0] * ROWS, [-1] * ROWS)
    runner(**step([9, 2, 30], [4, 0, 1], query_len))
    assert runner.model.runs == [nothing, nothing, (ends, [9, 2, 30, 0], [4, 0, 1, -1])]
    # The replay has the lengths of the step too, not what the capture's fill has left of them.
    assert runner.model.kv[-1] == [9 + query_len, 2 + query_len, 30 + query_len, 0]
    runner(**step([7], [-1], query_len))
    assert runner.model.runs[3:] == [(ends, [7, 0, 0, 0], [-1, -1, -1, -1])]
    runner(**step([1, 2, 3, 4], [5, 6, 7, 8], query_len))
    assert runner.model.runs[4:] == [(ends, [1, 2, 3, 4], [5, 6, 7, 8])]
    counts = counters.snapshot()
    assert counts["verify_steps" if query_len > 1 else "decode_steps"] == 3


def test_addresses_are_kept_and_buckets_have_their_own(runner: Any) -> None:
    places, kept = [], []
    for histories, slots, query_len in (([9, 2], [4, 1], 1), ([1], [3], 1), ([5, 6, 7], [2, 1, 3], 1), ([5], [1], 5)):
        runner(**step(histories, slots, query_len))
        kept += runner.model.seen  # so that no address is given twice
        places.append([t.data_ptr() for t in runner.model.seen])
    assert places[0] == places[1] == places[2]
    assert not set(places[0]) & set(places[3])
    assert [(t.dtype, t.size(0)) for t in runner.model.seen] == [
        (torch.int32, ROWS + 1),
        (torch.int32, ROWS),
        (torch.int64, ROWS),
    ]


def test_control_the_hosts_own_rows_are_others() -> None:
    """What the rows are for: without them the same runner gives lengths that no step has."""
    runner = Runner(Model())
    runner(**step([9, 2, 30], [4, 0, 1]))
    runner(**step([9, 2, 30], [4, 0, 1]))
    assert runner.model.runs[0][1:] == ([9, 1, 28, -4], [4, 0, 1, 0])
    assert runner.model.kv[2] == [0] * ROWS, "filled from its own buffer, cleared before"
    assert runner.model.runs[3] == ([0, 1, 2, 3], [9, 1, 28, -4], [4, 0, 1, 0])


def test_nothing_is_read_on_the_host(runner: Any) -> None:
    runner(**step([9, 2, 30], [4, 0, 1]))
    meta, later, model = runner.metas[1], step([7, 8], [1, 2]), runner.model
    with no_host_reads():
        model.fill_buffers_cudagraph(meta, **later)
    rows = later["attn_metadata"].gated_delta_rows
    assert (rows.history_lens.tolist(), rows.state_indices.tolist()) == ([7, 8, 0, 0], [1, 2, -1, -1])
    with pytest.raises(HostRead), no_host_reads():
        rows.history_lens.tolist()


def test_a_model_without_states_has_no_rows_but_its_lengths_back(runner: Any) -> None:
    """The draft layer of MTP: attention only."""
    first = step([9, 2], [4, 0], states=False)
    runner(**first)
    assert not hasattr(first["attn_metadata"], "gated_delta_rows")
    assert runner.metas[1].input_buffers["kv_seqlens"].tolist() == [10, 3, 0, 0]
    assert "decode_steps" not in counters.snapshot()


def test_a_runner_that_takes_the_capture_for_the_step_is_refused(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner(**step([9], [4], 5))
    monkeypatch.setattr(Runner, "replays", False)
    runner(**step([9], [4], 5))  # captured before
    with pytest.raises(RuntimeError, match=r"Runner captured a graph and did not replay it"):
        runner(**step([9], [4]))


def test_a_bucket_without_room_for_drafts_is_refused() -> None:
    """As dlinfer 0.2.7 does: as many rows as tokens."""
    runner = graph_rows.attach(Runner(Model(), tokens=ROWS))
    runner(**step([9], [4]))
    with pytest.raises(ValueError, match="4 rows of 4 tokens in all for a step of 5 tokens a row"):
        runner(**step([9], [4], 5))


def test_attached_twice_or_eagerly(runner: Any) -> None:
    """LMDeploy may build a runner anew for the same model."""
    again = graph_rows.attach(Runner(runner.model))
    again(**step([9], [4]))
    assert again.model.runs[-1][1:] == ([9, 0, 0, 0], [4, -1, -1, -1])
    assert counters.snapshot()["decode_steps"] == 1
    model = Model()
    eager = Runner(model, eager_mode=True)
    assert graph_rows.attach(eager) is eager
    assert type(eager) is Runner
    assert set(vars(model)) == set(vars(Model()))
