"""Decode and verify steps through the adapter are the same calls on the same memory, whatever lengths and slots say."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dlinfer_ext import ops
from dlinfer_ext.framework.lmdeploy import gated_delta
from dlinfer_ext.framework.lmdeploy.capture_guard import CaptureUnsafe, Value, assert_capturable, differences, record

W, H, HV, K, V = 4, 2, 4, 16, 8
CHANNELS = 2 * H * K + HV * V
SLOTS, ROWS = 6, 3


class Buffers:
    """The static buffers of a step of three rows, one layer's pools and weights; `step` runs metadata, conv and rule.

    `drafts` > 0: ring pools and 1 + drafts tokens a row; else linear pools and one token a row.
    """

    def __init__(self, drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
        build = SimpleNamespace(build_ctx=SimpleNamespace(num_spec_tokens=drafts))
        monkeypatch.setattr(gated_delta, "get_step_ctx_manager", lambda: build)
        self.tokens = ROWS * (1 + drafts)
        self.drafts = drafts
        ring = (1 + drafts,) if drafts else ()
        self.conv = torch.randn(SLOTS, 2, W + drafts, CHANNELS)[:, 1]  # a layer's part of the pool
        self.state = torch.randn(SLOTS, 2, *ring, HV, V, K)[:, 1]
        self.weight = torch.randn(CHANNELS, 1, W)
        self.x = torch.randn(1, self.tokens, CHANNELS)
        self.gates = torch.randn(2, 1, self.tokens, HV)
        self.a_log_exp, self.dt_bias = -torch.rand(HV), torch.randn(HV)
        self.q_lens = torch.full((ROWS,), 1 + drafts, dtype=torch.int32)
        self.kv_lens = self.q_lens + torch.tensor([9, 2, 30], dtype=torch.int32)
        self.cu = torch.arange(ROWS + 1, dtype=torch.int32) * (1 + drafts)
        self.slots = torch.tensor([4, 2, 1])

    def metadata(self) -> gated_delta.GatedDeltaMetadata:
        attention = SimpleNamespace(
            is_decoding=not self.drafts,
            is_multi_token_decoding=bool(self.drafts),
            cu_seqlens_q=self.cu,
            q_seqlens=self.q_lens,
            kv_seqlens=self.kv_lens,
            cu_seqlens_q_cpu=None,
            kv_seqlens_cpu=None,
        )
        return gated_delta.GatedDeltaMetadata(self.tokens, W, self.slots, attention)

    def step(self) -> Tensor:
        meta = self.metadata()
        out = gated_delta.CausalConv1d().forward(self.x, self.weight, None, self.conv, meta, "silu")
        q, k, v = out.split([H * K, H * K, HV * V], -1)
        heads = (q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V)))
        rest = (*self.gates, self.dt_bias, self.a_log_exp, self.state, meta, HV // H, True)
        call: Callable[..., Tensor] = gated_delta.GatedDeltaRule().forward
        return call(*heads, *rest)

    def change(self, histories: list[int], slots: list[int]) -> Callable[[], None]:
        """Return what writes other contents: tokens at random, histories (what was accepted, with them) and slots."""

        def write() -> None:
            self.x.normal_()
            self.gates.normal_()
            self.kv_lens.copy_(self.q_lens + torch.tensor(histories, dtype=torch.int32))
            self.slots.copy_(torch.tensor(slots))

        return write

    def changes(self) -> list[Callable[[], None]]:
        return [
            self.change([10, 7, 31], [4, 2, 1]),  # one, all and one accepted
            self.change([1000, 0, 3], [1, 5, 3]),  # other requests, one of them fresh
            self.change([0, 0, 0], [-1, 0, -1]),  # padded rows, of both kinds
            self.change([2047, 2048, 2049], [3, -1, 4]),
        ]


states = pytest.mark.parametrize("drafts", [0, 1, 4], ids=["linear", "ring-1", "ring-4"])


@states
def test_step_is_the_same_calls_on_the_same_memory(drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = Buffers(drafts, monkeypatch)
    before = buffers.state.clone()
    assert assert_capturable(buffers.step, *buffers.changes()) > 20, "the insides of the operators were not seen"
    assert not torch.equal(buffers.state, before)


@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_rejection_sampling_is_the_same_calls_on_the_same_memory(drafts: int) -> None:
    rows, vocab = 3, 50
    logits, tokens = torch.randn(rows, 1 + drafts, vocab), torch.randint(vocab, (rows, drafts))

    def accept(n: int) -> Callable[[], None]:
        def write() -> None:
            tokens.copy_(logits[:, :drafts].argmax(-1))
            tokens[:, n:] += 1
            tokens.remainder_(vocab)

        return write

    def step() -> object:
        return ops.verify_greedy(logits.argmax(-1), tokens)

    calls = assert_capturable(step, *(accept(n) for n in range(drafts + 1)))
    assert calls > 3


# --- negative controls: each is red, by its own message --------------------------------------------------------------


def red(step: Callable[[], object], *changes: Callable[[], None]) -> str:
    with pytest.raises(CaptureUnsafe) as error:
        assert_capturable(step, *changes)
    return str(error.value)


@states
def test_control_item(drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = Buffers(drafts, monkeypatch)

    def step() -> None:
        buffers.step()
        buffers.kv_lens[0].item()

    text = red(step)
    assert text.startswith("host read: call ")
    assert text.endswith("Tensor.item() reads a device value on the host")


def test_control_columns_by_the_longest_row(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = Buffers(0, monkeypatch)
    longest = [int(buffers.kv_lens.max())]  # read outside the step, as a host may; inside it is a second fault

    def change() -> None:
        buffers.change([20, 1, 1], [4, 2, 1])()
        longest[0] = int(buffers.kv_lens.max())

    text = red(lambda: buffers.x.new_empty(1, longest[0]), change)
    assert "result 0 is float32 [1, 21], in the first step float32 [1, 31]" in text
    inside = red(lambda: buffers.x.new_empty(1, int(buffers.kv_lens.max())), change)
    assert "Tensor.__int__() reads a device value" in inside


@pytest.mark.parametrize("pool", ["conv", "state"])
@states
def test_control_pool_swapped_for_a_copy(pool: str, drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = Buffers(drafts, monkeypatch)
    kept: list[Tensor] = []

    def swap() -> None:
        kept.append(getattr(buffers, pool))  # or its memory might be given to the copy
        setattr(buffers, pool, kept[0].clone())

    text = red(buffers.step, swap)
    assert "outside the step, has moved: a graph keeps the first address" in text
    assert "allocates" not in text


def test_control_other_calls_and_other_numbers() -> None:
    x, turn = torch.randn(4), [0]

    def next_turn() -> None:
        turn[0] += 1

    text = red(lambda: x.mul(2) if turn[0] else x.add(2), next_turn)
    assert text == "call 0 is aten.mul.Tensor, in the first step aten.add.Tensor"
    turn[0] = 0
    assert "argument 1 is 1, in the first step 0: a graph keeps the first" in red(lambda: x.add(turn[0]), next_turn)
    turn[0] = 0
    text = red(lambda: [x.neg() for _ in range(1 + turn[0])], next_turn)
    assert text == "2 calls, in the first step 1"
    turn[0] = 0
    views = (x[:2], x[::2])
    text = red(lambda: views[turn[0]].neg(), next_turn)
    assert text.splitlines()[0].endswith("argument 0 has strides [2], in the first step [1]")
    turn[0] = 0
    text = red(lambda: torch.tensor([turn[0], 5]) + 1, next_turn)
    assert "a tensor of Python numbers: argument 1 is 1, in the first step 0" in text


def test_control_allocation_of_another_size() -> None:
    """Equal shapes over memory of another size, as a view of a larger buffer is."""
    x, columns = torch.randn(4), [8]

    def grow() -> None:
        columns[0] = 16

    text = red(lambda: torch.empty_strided((4,), (columns[0],), dtype=x.dtype), grow)
    assert "result 0 allocates 196 bytes, in the first step 100" in text


def test_memory_made_in_a_step_may_lie_anywhere() -> None:
    x, kept = torch.randn(1000), list[Tensor]()
    assert_capturable(lambda: kept.append(x.mul(2).add(1)), lambda: None, lambda: None)
    assert len({t.data_ptr() for t in kept}) == 3


def test_stand_ins_that_read_lengths_count_as_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = torch.tensor([3, 1])

    def attention(lengths: Tensor, longest: int) -> Tensor:
        return torch.zeros(2, int(lengths.max()))[:, :1]

    stand_in: Any = SimpleNamespace(attention=attention, other=attention)
    monkeypatch.setitem(sys.modules, "dlinfer.ops", stand_in)
    with record(("attention",)) as step:
        stand_in.attention(lengths, 3)
    assert [c.name for c in step.calls] == ["dlinfer.ops.attention"]
    assert not step.reads
    (place, *_) = step.calls[0].inputs
    assert isinstance(place, Value)
    assert place.place == lengths.data_ptr()
    with record(("attention",)) as other:
        stand_in.other(lengths, 3)
    assert other.reads
    assert differences(step, other)
