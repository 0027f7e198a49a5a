"""Checkpoint tensors to parameters: every name, every rank's share, FP8 pairs in any order, and what is missing."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlinfer_ext.framework.lmdeploy.models.glm5_next import parameters
from dlinfer_ext.framework.lmdeploy.models.glm5_next.parameters import Fp8Weight, Share, parameter
from dlinfer_ext.framework.lmdeploy.models.glm5_next.weights import (
    CheckpointError,
    WeightLoader,
    place_of,
    text_tensors,
)

LAYER = "model.layers.5"


@pytest.mark.parametrize(
    ("name", "target", "part"),
    [
        (".self_attn.q_proj.weight", ".self_attn.qkv_proj.weight", 0),
        (".self_attn.v_proj.weight", ".self_attn.qkv_proj.weight", 2),
        (".self_attn.k_conv1d.weight", ".self_attn.conv_weight", 1),
        (".self_attn.q_a_proj.weight", ".self_attn.q_a_proj.weight", None),
        (".self_attn.o_proj.weight", ".self_attn.o_proj.weight", None),
        (".self_attn.indexer.k_norm.bias", ".self_attn.indexer.k_norm.bias", None),
        (".mlp.gate_proj.weight", ".mlp.gate_up_proj.weight", 0),
        (".mlp.shared_experts.up_proj.weight", ".mlp.shared_experts.gate_up_proj.weight", 1),
        (".mlp.gate.weight", ".mlp.gate.weight", None),
        (".mlp.experts.7.gate_proj.weight", ".mlp.experts.gate_up", (7, 0)),
        (".mlp.experts.12.up_proj.weight", ".mlp.experts.gate_up", (12, 1)),
        (".mlp.experts.0.down_proj.weight", ".mlp.experts.down", (0, 0)),
        (".hc_attn_fn", ".attn_hc.fn", None),
        (".hc_ffn_scale", ".ffn_hc.scale", None),
    ],
)
def test_where_a_name_goes(name: str, target: str, part: Any) -> None:
    assert place_of(LAYER + name) == (LAYER + target, part)


def test_the_vision_part_is_left_out_and_the_prefix_is_cut() -> None:
    names = ["model.visual.blocks.0.norm.weight", "model.language_model.norm.weight", "lm_head.weight"]
    assert [n for n, _ in text_tensors((n, torch.zeros(1)) for n in names)] == ["model.norm.weight", "lm_head.weight"]


def numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    def on(rank: int) -> None:
        monkeypatch.setattr(parameters, "get_tp_world_rank", lambda kind: (2, rank))

    return on


@pytest.mark.parametrize("rank", [0, 1])
def test_the_share_of_a_rank(two_ranks: Any, rank: int) -> None:
    two_ranks(rank)
    cpu: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    half = slice(4 * rank, 4 * rank + 4)

    # Each of q, k, v is split by itself: the rank's part of their concatenation would be all of q and half of k.
    merged = parameter(12, 3, share=Share(parts=3), **cpu)
    streams = [numbered(8, 3) + 100 * i for i in range(3)]
    for i in (2, 0, 1):
        merged.share(merged, streams[i], i)  # type: ignore[attr-defined]
    assert merged.equal(torch.cat([stream[half] for stream in streams]))

    conv = parameter(12, 4, share=Share(parts=3), **cpu)
    taps = [numbered(8, 1, 4) + 100 * i for i in range(3)]
    for i, tap in enumerate(taps):
        conv.share(conv, tap, i)  # type: ignore[attr-defined]
    assert conv.equal(torch.cat([tap[half, 0] for tap in taps]))

    row = parameter(3, 4, share=Share(dim=1), **cpu)
    row.share(row, numbered(3, 8), None)  # type: ignore[attr-defined]
    assert row.equal(numbered(3, 8)[:, half])

    experts = parameter(2, 8, 3, share=Share(parts=2, experts=2), **cpu)
    down = parameter(2, 3, 4, share=Share(dim=1, experts=2), **cpu)
    for e in range(2):
        for part in range(2):
            experts.share(experts, streams[part] + e, (e, part))  # type: ignore[attr-defined]
        down.share(down, numbered(3, 8) + e, (e, 0))  # type: ignore[attr-defined]
    assert experts[1].equal(torch.cat([streams[0][half], streams[1][half]]) + 1)
    assert down[1].equal(numbered(3, 8)[:, half] + 1)

    whole = parameter(8, 3, **cpu)
    whole.share(whole, numbered(8, 3), None)  # type: ignore[attr-defined]
    assert whole.equal(numbered(8, 3))


def quantised(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return FP8 values, scales, and what they stand for, computed one block at a time."""
    out = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    rows, columns = (-(-n // side) for n, side in zip(weight.shape, block, strict=True))
    scale, dense = torch.empty(rows, columns), torch.empty_like(weight)
    for i, j in itertools.product(range(rows), range(columns)):
        at = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
        scale[i, j] = weight[at].abs().max() / 448
        out[at] = (weight[at] / scale[i, j]).to(out.dtype)
        dense[at] = out[at].float() * scale[i, j]
    return out, scale, dense


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("block", [(4, 8), (3, 5), (16, 16)], ids=str)
def test_a_rank_dequantises_its_share(block: tuple[int, int], dim: int) -> None:
    weight, scale, dense = quantised(torch.randn(16, 32), block)
    size = dense.shape[dim] // 2
    for rank in range(2):
        share = Fp8Weight(weight, scale, block).share(dim, 2, rank)
        assert share.equal(dense.narrow(dim, rank * size, size))
    assert Fp8Weight(weight, scale, block).dense().equal(dense)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        cpu: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cpu"}
        self.a = parameters.Held(weight=parameter(6, 4, **cpu))
        self.layer = nn.ModuleDict({"mlp": nn.Module()})
        self.layer["mlp"].gate_up_proj = parameters.Held(weight=parameter(8, 4, share=Share(parts=2), **cpu))


GATE, UP, A = "layer.mlp.gate_proj.weight", "layer.mlp.up_proj.weight", "a.weight"


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {A: torch.randn(6, 4).bfloat16(), GATE: torch.randn(4, 4), UP: torch.randn(4, 4)}


def test_all_of_it_and_nothing_else() -> None:
    model, given = Model(), tensors()
    loader = WeightLoader(model, None)
    for name, tensor in given.items():
        loader.load(name, tensor)
    loader.finish()
    assert model.a.weight.equal(given[A])
    merged = torch.cat([given[GATE], given[UP]]).bfloat16()
    assert model.get_parameter("layer.mlp.gate_up_proj.weight").equal(merged)


@pytest.mark.parametrize("lacking", [A, GATE, UP])
def test_what_is_missing_is_named(lacking: str) -> None:
    loader = WeightLoader(Model(), None)
    for name, tensor in tensors().items():
        if name != lacking:
            loader.load(name, tensor)
    named = "a.weight" if lacking == A else r"layer\.mlp\.gate_up_proj\.weight \(1 of 2 parts\)"
    with pytest.raises(CheckpointError, match=f"does not fill: {named}; it is not complete"):
        loader.finish()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_weight_and_scales_in_any_order_and_call(order: tuple[int, ...]) -> None:
    weight, scale, dense = quantised(torch.randn(6, 4), (4, 2))
    parts = [(A, weight), (A + "_scale_inv", scale), (GATE, torch.ones(4, 4))]
    model = Model()
    loader = WeightLoader(model, (4, 2))
    for i in order:  # each as if it came in a file of its own
        loader.load(*parts[i])
    loader.load(UP, torch.ones(4, 4))
    loader.finish()
    assert model.a.weight.equal(dense.bfloat16())


@pytest.mark.parametrize("alone", [A, A + "_scale_inv"])
def test_half_of_a_pair_is_named(alone: str) -> None:
    weight, scale, _ = quantised(torch.randn(6, 4), (4, 2))
    loader = WeightLoader(Model(), (4, 2))
    loader.load(alone, weight if alone == A else scale)
    with pytest.raises(CheckpointError, match=f"without the other: {alone}; both are needed"):
        loader.finish()


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("b.weight", torch.ones(1), "no place for: b.weight"),
        ("a.bias", torch.ones(6), "no place for: a.bias"),
        (A, torch.ones(4, 6), r"does not fit .*\[4, 6\]; wanted \[6, 4\]"),
        (GATE, torch.ones(8, 4), "does not fit"),
        (A, torch.ones(6, 4, dtype=torch.float8_e4m3fn), "without 'weight_block_size'"),
    ],
)
def test_what_does_not_belong_is_refused(name: str, tensor: Tensor, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        WeightLoader(Model(), None).load(name, tensor)


def test_twice_is_refused() -> None:
    loader = WeightLoader(Model(), (4, 2))
    loader.load(A, torch.ones(6, 4))
    with pytest.raises(CheckpointError, match=r"came twice: a\.weight"):
        loader.load(A, torch.ones(6, 4))
    weight, _, _ = quantised(torch.randn(4, 4), (4, 2))
    loader.load(GATE, weight)
    with pytest.raises(CheckpointError, match="came twice"):
        loader.load(GATE, weight)


def test_scales_of_another_block_are_refused() -> None:
    weight, scale, _ = quantised(torch.randn(6, 4), (4, 2))
    loader = WeightLoader(Model(), (2, 2))
    loader.load(A, weight)
    with pytest.raises(CheckpointError, match=r"scales of shape \[2, 2\] .* wanted FP8 and \[3, 2\]"):
        loader.load(A + "_scale_inv", scale)
