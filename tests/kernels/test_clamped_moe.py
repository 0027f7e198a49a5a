"""Clamped SwiGLU and its mixture of experts against transformers' blocks, the fp64 definition and written-out values.

Inputs reach beyond the limit on both sides, as without that a clamp that is not there shows nowhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextMLP, Glm5NextTextMoE

from dlinfer_ext.cli.bench_cases import peak_bytes
from dlinfer_ext.kernels.clamped_moe import grouped, reference
from dlinfer_ext.ops import clamped_moe, clamped_silu_and_mul
from dlinfer_ext.testing import DTYPES, TOLERANCE, assert_close, no_host_reads

pytestmark = pytest.mark.eager_only(reason="no kernel is written for it yet")

NAN, INF = float("nan"), float("inf")
LIMIT = 1.0


class Layer(NamedTuple):
    """The inputs of a layer, the arguments of `clamped_moe` in order."""

    x: Tensor
    gate_up: Tensor
    down: Tensor
    topk_weights: Tensor
    topk_ids: Tensor

    def run(self, first_expert: int = 0) -> Tensor:
        return clamped_moe(*self, limit=LIMIT, first_expert=first_expert)

    def definition(self, first_expert: int = 0) -> Tensor:
        return reference.clamped_moe(*self, LIMIT, first_expert)

    def tokens(self, which: Any) -> Layer:
        return Layer(self.x[which], self.gate_up, self.down, self.topk_weights[which], self.topk_ids[which])

    def experts(self, which: slice) -> Layer:
        return self._replace(gate_up=self.gate_up[which], down=self.down[which])


def layer(
    tokens: int,
    experts: int = 6,
    choices: int = 2,
    hidden: int = 64,
    width: int = 32,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Layer:
    """A layer whose gates and ups are about as often beyond the limit as within it."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return Layer(
        (2 * normal(tokens, hidden)).to(dtype),
        (hidden**-0.5 * normal(experts, 2 * width, hidden)).to(dtype),
        normal(experts, hidden, width).to(dtype),
        torch.rand(tokens, choices, generator=generator),
        torch.rand(tokens, experts, generator=generator).topk(choices).indices,
    )


def check(layer: Layer, got: Tensor, first_expert: int = 0) -> None:
    assert got.dtype == layer.x.dtype
    assert_close("clamped_moe", got, layer.definition(first_expert), TOLERANCE["clamped_moe", layer.x.dtype])


# silu is -0.14227762 at -3, 0.31122967 at 0.5 and 0.73105858 at 1. Clamped from below too, the first gate would have
# silu(-1) = -0.26894142; clamped after SiLU, the last would give 1.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unit_written_out(dtype: torch.dtype) -> None:
    gate, up = [-3.0, 0.5, 4.0, 4.0], [-9.0, 0.25, 9.0, -9.0]
    got = clamped_silu_and_mul(torch.tensor([gate + up], dtype=dtype), LIMIT)
    want = torch.tensor([[0.142277620, 0.0778074164, 0.731058579, -0.731058579]]).to(dtype)
    torch.testing.assert_close(got, want, rtol=1e-6 if dtype == torch.float32 else 0.0, atol=0.0)


def test_a_gate_has_no_limit_from_below() -> None:
    got = clamped_silu_and_mul(torch.tensor([-20.0, 1.0]), 10.0)
    torch.testing.assert_close(got, torch.tensor([-4.12230724e-08]), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("limit", [0.5, 10.0])
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2,), (5, 14), (2, 3, 130)], ids=str)
def test_unit_matches_the_definition(shape: tuple[int, ...], limit: float, dtype: torch.dtype) -> None:
    x = (1.5 * limit * torch.randn(shape)).to(dtype)
    got = clamped_silu_and_mul(x, limit)
    assert got.dtype == dtype
    assert_close("unit", got, reference.clamped_silu_and_mul(x, limit), TOLERANCE["clamped_moe", dtype])


def test_unit_keeps_nan_in_its_place_and_honours_views() -> None:
    rows = torch.randn(4, 9, 12)[:, 2::3].transpose(0, 1)
    assert not rows.is_contiguous()
    before = rows.clone()
    want = clamped_silu_and_mul(before, LIMIT)
    assert torch.equal(clamped_silu_and_mul(rows, LIMIT), want)
    assert torch.equal(rows, before)
    rows[1, 2, 4] = NAN
    got = clamped_silu_and_mul(rows, LIMIT)
    assert bool(got[1, 2, 4].isnan())
    assert int(got.isnan().sum()) == 1


def config(**changed: Any) -> Glm5NextTextConfig:
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "swiglu_limit": LIMIT,
    }
    made = Glm5NextTextConfig(**{**sizes, **changed})
    made._experts_implementation = "eager"
    return made


def drawn(module: Any) -> Any:
    """Redraw every parameter: some are zero as they are made."""
    generator = torch.Generator().manual_seed(5)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)
    return module.eval()


def test_unit_is_that_of_transformers() -> None:
    block = drawn(Glm5NextTextMLP(config()))
    x = 3 * torch.randn(7, 64)
    with torch.no_grad():
        want = block(x)
        both = torch.cat((block.gate_proj(x), block.up_proj(x)), dim=-1)
        assert (both.abs() > LIMIT).float().mean() > 0.3
        got = block.down_proj(clamped_silu_and_mul(both, LIMIT))
    assert_close("mlp", got, want, 1e-6)


def test_mixture_is_that_of_transformers() -> None:
    """Its block with router and shared expert, of which ours replaces the routed experts."""
    block = drawn(Glm5NextTextMoE(config()))
    assert block.experts.num_experts == 8
    x = 3 * torch.randn(11, 64)
    with torch.no_grad():
        want = block(x[None])[0]
        _, weights, ids = block.gate(x)
        experts = block.experts
        got = clamped_moe(x, experts.gate_up_proj, experts.down_proj, weights, ids, limit=LIMIT)
        got = got + block.shared_experts(x)
    assert_close("moe", got, want, 1e-6)


ALIGNED, ODD = (64, 32), (13, 5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("hidden", "width"), [ALIGNED, ODD], ids=str)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 2, 37])
def test_mixture_matches_the_definition(
    tokens: int, index: torch.dtype, hidden: int, width: int, dtype: torch.dtype
) -> None:
    case = layer(tokens, hidden=hidden, width=width, dtype=dtype)
    case = case._replace(topk_ids=case.topk_ids.to(index))
    check(case, case.run())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    tokens=st.integers(0, 40),
    experts=st.integers(1, 9),
    choices=st.integers(0, 4),
    hidden=st.sampled_from([8, 13, 16]),
    width=st.sampled_from([5, 8, 24]),
    first=st.integers(0, 4),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
def test_mixture_matches_the_definition_on_drawn_cases(
    tokens: int, experts: int, choices: int, hidden: int, width: int, first: int, dtype: torch.dtype, seed: int
) -> None:
    """Ids from -2 to beyond the last expert, chosen more than once by some tokens."""
    case = layer(tokens, experts, 1, hidden, width, dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-2, first + experts + 3, (tokens, choices), generator=generator)
    weights = torch.rand(tokens, choices, generator=generator) + 0.1
    case = case._replace(topk_ids=ids, topk_weights=weights)
    check(case, case.run(first), first)


@pytest.mark.parametrize(("hidden", "width"), [ALIGNED, ODD], ids=str)
@pytest.mark.parametrize("chosen", [0, 3, 5])
def test_all_tokens_choose_one_expert(chosen: int, hidden: int, width: int) -> None:
    case = layer(21, choices=1, hidden=hidden, width=width)
    case = case._replace(topk_ids=torch.full((21, 1), chosen))
    check(case, case.run())


@pytest.mark.parametrize(("hidden", "width"), [ALIGNED, ODD], ids=str)
def test_experts_held_elsewhere_add_nothing(hidden: int, width: int) -> None:
    """Ranks that hold two experts each sum up to the whole; what is not held may have any weight, NaN included."""
    case = layer(19, hidden=hidden, width=width)
    whole = case.run()
    parts = [case.experts(slice(i, i + 2)).run(first_expert=i) for i in (0, 2, 4)]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-5)
    nowhere = case._replace(topk_ids=case.topk_ids - 100, topk_weights=torch.full_like(case.topk_weights, NAN))
    assert torch.equal(nowhere.run(), torch.zeros_like(whole))
    mixed = case._replace(topk_ids=case.topk_ids.clone(), topk_weights=case.topk_weights.clone())
    mixed.topk_ids[4, 0] = -1
    mixed.topk_weights[4, 0] = NAN
    alone = Layer(case.x[4:5], case.gate_up, case.down, case.topk_weights[4:5, 1:], case.topk_ids[4:5, 1:])
    torch.testing.assert_close(mixed.run()[4:5], alone.run(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("hidden", "width"), [ALIGNED, ODD], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_bad_token_leaves_the_others_alone(bad: float, dtype: torch.dtype, hidden: int, width: int) -> None:
    case = layer(23, hidden=hidden, width=width, dtype=dtype)
    clean = case.run()
    for token in (0, 11, 22):
        others = [i for i in range(23) if i != token]
        dirty = case._replace(x=case.x.clone())
        dirty.x[token] = bad
        got = dirty.run()
        assert torch.equal(got[others], clean[others])
        assert bool(got[token].isnan().any())


@pytest.mark.parametrize(("hidden", "width"), [ALIGNED, ODD], ids=str)
def test_a_token_does_not_depend_on_its_batch(hidden: int, width: int) -> None:
    case = layer(40, hidden=hidden, width=width)
    whole = case.run()
    limit = TOLERANCE["clamped_moe", torch.float32]
    for token in range(40):
        assert_close("alone", case.tokens(slice(token, token + 1)).run(), whole[token : token + 1], limit)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    assert_close("permuted", case.tokens(order).run(), whole[order], limit)
    assert torch.equal(case.run(), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_views_are_honoured_and_nothing_is_mutated(dtype: torch.dtype) -> None:
    """Rows of a larger buffer, experts of a fused parameter, and weights stored the other way round."""
    case = layer(9, dtype=dtype)
    buffer, fused = torch.zeros(9, 3, 64, dtype=dtype), torch.zeros(6, 100, 64, dtype=dtype)
    buffer[:, 1], fused[:, 30:94] = case.x, case.gate_up
    views = Layer(
        buffer[:, 1],
        fused[:, 30:94],
        case.down.transpose(1, 2).contiguous().transpose(1, 2),
        case.topk_weights.t().contiguous().t(),
        case.topk_ids.t().contiguous().t(),
    )
    assert not any(t.is_contiguous() for t in views)
    check(case, views.run())
    assert all(torch.equal(view, kept) for view, kept in zip(views, case, strict=True))


@pytest.mark.parametrize(("hidden", "width"), [ALIGNED, ODD], ids=str)
def test_nothing_is_read_on_the_host(hidden: int, width: int) -> None:
    case = layer(9, hidden=hidden, width=width)
    with no_host_reads():
        case.run()
        clamped_silu_and_mul(case.x[:, :4], LIMIT)


def count_products(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record which form each product of groups takes."""
    taken: list[str] = []
    for module, name in ((F, "grouped_mm"), (grouped, "blocked_product")):
        form = getattr(module, name)

        def record(*args: Any, name: str = name, form: Any = form, **kwargs: Any) -> Tensor:
            taken.append(name)
            product: Tensor = form(*args, **kwargs)
            return product

        monkeypatch.setattr(module, name, record)
    return taken


def test_weights_of_a_model_are_multiplied_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    case = layer(3, experts=16, hidden=128, width=256)
    taken = count_products(monkeypatch)
    weights = case.gate_up.nbytes + case.down.nbytes
    assert peak_bytes(case.run) < weights / 20
    assert taken == ["grouped_mm", "grouped_mm"]


def test_sizes_that_are_not_aligned_take_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so do weights that stand at an odd address; the copies that are held at one time are bounded."""
    taken = count_products(monkeypatch)
    layer(3, hidden=13, width=5).run()
    assert taken == ["blocked_product", "blocked_product"]
    case = layer(30)
    shifted = torch.empty(case.gate_up.numel() + 1)[1:].view(case.gate_up.shape).copy_(case.gate_up)
    monkeypatch.setattr(grouped, "_GATHERED", 2 * case.gate_up[0].numel())
    check(case, case._replace(gate_up=shifted).run())
    assert taken[2:] == ["blocked_product", "grouped_mm"]


@pytest.mark.parametrize("gathered", [1, 1 << 24], ids=["one-at-a-time", "at-once"])
@pytest.mark.parametrize(
    "sizes",
    [(1,), (0, 1), (3, 0, 0, 5), (0, 0, 17), (8, 8, 8), (1, 1, 1, 1), (40, 1, 0, 2), (5, 0, 0)],
    ids=lambda s: "-".join(map(str, s)),
)
@pytest.mark.parametrize("rest", [0, 1, 9])
def test_blocks_of_rows_give_the_products_of_groups(
    sizes: tuple[int, ...], rest: int, gathered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of no rows, of less than a block, of several blocks; and rows of no group behind them."""
    monkeypatch.setattr(grouped, "_GATHERED", gathered)
    rows, matrices = torch.randn(sum(sizes) + rest, 7), torch.randn(len(sizes), 5, 7)
    got = grouped.blocked_product(rows, matrices, torch.tensor(sizes).cumsum(0))
    assert got.shape == (sum(sizes) + rest, 5)
    groups = [g for g, size in enumerate(sizes) for _ in range(size)]
    want = torch.stack([matrices[g].double() @ rows[p].double() for p, g in enumerate(groups)])
    assert_close("product", got[: sum(sizes)], want, 2e-6)
