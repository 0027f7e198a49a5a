"""Hyper-connections against transformers' module, the fp64 definition, written-out values, and their own laws.

Where the two epsilons stand only shows on streams whose root mean square is below the root of the first, as embeddings
of GLM-5.3-Flash are; so most inputs here are that small.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextHyperConnection

from dlinfer_ext.kernels.hyper_connection import eager, reference
from dlinfer_ext.ops import hyper_connection_post, hyper_connection_pre
from dlinfer_ext.testing import DTYPES, TOLERANCE, assert_close, no_host_reads

pytestmark = pytest.mark.eager_only(reason="no kernel is written for it yet")

# Those of GLM-5.3-Flash.
NORM_EPS, EPS, ITERS = 1e-5, 1e-6, 20
TINY = 1e-4
NAN, INF = float("nan"), float("inf")


class Site(NamedTuple):
    """The inputs of one site: streams, and the parameters of `hyper_connection_pre` in order."""

    streams: Tensor
    fn: Tensor
    scale: Tensor
    base: Tensor

    def pre(self, **changed: Any) -> tuple[Tensor, Tensor, Tensor]:
        numbers = {"norm_eps": NORM_EPS, "eps": EPS, "sinkhorn_iters": ITERS, **changed}
        return hyper_connection_pre(*self, **numbers)

    def definition(self, **changed: Any) -> tuple[Tensor, Tensor, Tensor]:
        numbers = {"norm_eps": NORM_EPS, "eps": EPS, "sinkhorn_iters": ITERS, **changed}
        return reference.hyper_connection_pre(*self, **numbers)


def site(
    tokens: int, n: int = 4, hidden: int = 32, dtype: torch.dtype = torch.float32, size: float = TINY, seed: int = 0
) -> Site:
    """Streams of about the root mean square `size`, and weights for which every part of the result varies."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    streams = (size * normal(tokens, n, hidden)).to(dtype)
    # What is left of a tiny input after the norm is small, so the weights are large.
    gain = (1 + NORM_EPS / size**2) ** 0.5 * (n * hidden) ** -0.5
    return Site(streams, gain * normal(n * (2 + n), n * hidden), 1 + normal(3).abs(), normal(n * (2 + n)))


def written(site: Site, seed: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the arguments of `hyper_connection_post` after a site."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(site.streams.shape[0], site.streams.shape[2], generator=generator).to(site.streams.dtype)
    _, post, comb = site.definition()
    return x, site.streams, post.float(), comb.float()


def check_pre(site: Site, got: tuple[Tensor, Tensor, Tensor], **numbers: Any) -> None:
    want = site.definition(**numbers)
    limits = (TOLERANCE["hyper_connection", site.streams.dtype], *[TOLERANCE["hyper_connection", torch.float32]] * 2)
    assert [t.dtype for t in got] == [site.streams.dtype, torch.float32, torch.float32]
    for name, value, exact, limit in zip(("x", "post", "comb"), got, want, limits, strict=True):
        assert_close(name, value, exact, limit)


# Root mean square 0.003168201 with the epsilon; r = [0.03156365, 0.0631273, 0.09469095, -0.03156365]. The matrix is
# [[0.29032335, 0.70967865], [0.99968996, 0.00031204]] after the softmax and [[0.22505436, 0.99955909], [0.77494486,
# 0.0004395]] after the first columns. The other epsilon in the root makes the root mean square 0.0010188 and x
# [0.000293, -0.0000118]; columns and rows the other way round make comb[0, 0] 0.1562.
HALVES = torch.tensor([[[1.0, 2.0], [3.0, -1.0]]])
WRITTEN_SITE = Site(
    TINY * HALVES,
    torch.cat((10 * torch.eye(4), 20 * torch.eye(4))),
    torch.tensor([1.0, 2.0, 3.0]),
    torch.tensor([0.1, -0.2, 0.3, -0.4, 0.5, -0.5, 0.25, -0.25]),
)
WRITTEN_POST = [[1.79938616, 0.52567476]]
WRITTEN_COMB = [[[0.15531977, 0.99930482], [0.84467938, 0.00069395]]]


def test_pre_written_out() -> None:
    got = WRITTEN_SITE.pre(sinkhorn_iters=2)
    want = [[0.000242097546, 0.0000598700657]], WRITTEN_POST, WRITTEN_COMB
    for value, numbers in zip(got, want, strict=True):
        torch.testing.assert_close(value, torch.tensor(numbers), rtol=2e-6, atol=1e-8)


def test_post_written_out() -> None:
    post, comb = torch.tensor(WRITTEN_POST), torch.tensor(WRITTEN_COMB)
    got = hyper_connection_post(torch.tensor([[1.0, -2.0]]), HALVES, post, comb)
    want = [[[4.48874408, -4.13281216], [1.52706144, 0.94656617]]]
    torch.testing.assert_close(got, torch.tensor(want), rtol=2e-6, atol=1e-6)


def transformers_module(site: Site) -> Any:
    _, n, hidden = site.streams.shape
    module = Glm5NextTextHyperConnection(
        SimpleNamespace(hc_mult=n, hc_sinkhorn_iters=ITERS, hc_eps=EPS, rms_norm_eps=NORM_EPS, hidden_size=hidden)
    )
    module.load_state_dict({"fn": site.fn, "scale": site.scale, "base": site.base})
    return module


@pytest.mark.parametrize("size", [1e-6, TINY, 1.0, 30.0], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pre_is_that_of_transformers(dtype: torch.dtype, size: float) -> None:
    case = site(9, dtype=dtype, size=size)
    with torch.no_grad():
        post, comb, x = transformers_module(case)(case.streams[None])
    for name, got, want in zip(("x", "post", "comb"), case.pre(), (x, post, comb), strict=True):
        step = dtype if name == "x" else torch.float32
        assert_close(name, got, want[0], TOLERANCE["hyper_connection", step])


def test_post_is_that_of_transformers() -> None:
    x, streams, post, comb = written(site(9, size=1.0))
    # As its decoder layer writes it.
    want = post.unsqueeze(-1) * x.unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), streams)
    assert_close("streams", hyper_connection_post(x, streams, post, comb), want, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 4, 5])
@pytest.mark.parametrize(("tokens", "hidden"), [(0, 8), (9, 1), (1, 64), (7, 33)], ids=str)
def test_both_match_the_definition(tokens: int, hidden: int, n: int, dtype: torch.dtype) -> None:
    # Half of 1e-4 has fewer digits in fp16 than its tolerance asks for.
    case = site(tokens, n, hidden, dtype, 1e-2 if dtype == torch.float16 else TINY)
    check_pre(case, case.pre())
    arguments = written(case)
    got = hyper_connection_post(*arguments)
    assert got.dtype == dtype
    limit = TOLERANCE["hyper_connection", dtype]
    assert_close("streams", got, reference.hyper_connection_post(*arguments), limit)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    tokens=st.integers(0, 6),
    n=st.integers(1, 5),
    hidden=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    weight_dtype=st.sampled_from(DTYPES),
    size=st.sampled_from([1e-4, 1e-2, 1.0]),
    iters=st.integers(1, 6),
    eps=st.sampled_from([0.0, 1e-6, 1e-3]),
    norm_eps=st.sampled_from([1e-8, 1e-5, 1e-2]),
    seed=st.integers(0, 2**16),
)
def test_pre_matches_the_definition_on_drawn_cases(
    tokens: int,
    n: int,
    hidden: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    size: float,
    iters: int,
    eps: float,
    norm_eps: float,
    seed: int,
) -> None:
    case = site(tokens, n, hidden, dtype, size, seed)
    # Weights drawn for the epsilon of the model; bounded, as an epsilon far below it makes the same ones steep.
    fn = (case.fn / case.fn.abs().max().clamp(min=1)).to(weight_dtype)
    case = Site(case.streams, fn, case.scale.to(weight_dtype), case.base.to(weight_dtype))
    numbers = {"norm_eps": norm_eps, "eps": eps, "sinkhorn_iters": iters}
    check_pre(case, case.pre(**numbers), **numbers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_both_are_rounded_once(dtype: torch.dtype) -> None:
    """Rounding post and comb to the dtype first, as transformers does, moves about a third of the results by a step."""
    case = site(64, hidden=128, dtype=dtype, size=1.0)
    arguments = written(case)
    for got, want in (
        (case.pre()[0], case.definition()[0]),
        (hyper_connection_post(*arguments), reference.hyper_connection_post(*arguments)),
    ):
        assert (got == want.to(dtype)).float().mean() > 0.995


def test_the_combination_is_doubly_stochastic() -> None:
    _, _, comb = site(50, size=1.0).pre()
    assert bool((comb > 0).all())
    for dim in (1, 2):
        torch.testing.assert_close(comb.sum(dim), torch.ones(50, 4), rtol=0, atol=5e-2)
    # The columns come last, so they are what holds after any number of steps.
    _, _, comb = site(50, size=1.0).pre(sinkhorn_iters=1)
    torch.testing.assert_close(comb.sum(1), torch.ones(50, 4), rtol=0, atol=1e-3)
    assert (comb.sum(2) - 1).abs().max() > 0.1


def test_what_a_doubly_stochastic_matrix_keeps() -> None:
    """The sum over streams grows by what is written, whatever the mixing: its rows sum to 1."""
    case = site(5, size=1.0)
    comb = torch.stack([torch.eye(4).roll(i, 0) for i in range(5)]) * 0.75 + 0.0625
    x, post = torch.randn(5, 32), 2 * torch.rand(5, 4)
    out = hyper_connection_post(x, case.streams, post, comb)
    want = case.streams.sum(1) + post.sum(1, keepdim=True) * x
    torch.testing.assert_close(out.sum(1), want, rtol=1e-5, atol=1e-5)


def test_one_stream_that_is_kept_goes_where_the_matrix_says() -> None:
    """comb[i, j] leads from stream i to stream j: with a 1 at [0, 2] the first stream becomes the third."""
    comb = torch.zeros(1, 3, 3)
    comb[0, 0, 2] = 1.0
    streams = torch.arange(1.0, 7.0).view(1, 3, 2)
    out = hyper_connection_post(torch.zeros(1, 2), streams, torch.zeros(1, 3), comb)
    assert out.tolist() == [[[0.0, 0.0], [0.0, 0.0], [1.0, 2.0]]]


def test_steep_logits_and_zero_streams_stay_finite() -> None:
    case = site(3)
    steep = Site(torch.zeros_like(case.streams), case.fn, case.scale, 300.0 * torch.randn(24))
    check_pre(steep, steep.pre())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_bad_token_leaves_the_others_alone(bad: float, dtype: torch.dtype) -> None:
    case = site(7, dtype=dtype)
    arguments = written(case)
    clean = *case.pre(), hyper_connection_post(*arguments)
    case.streams[3, 1, 5] = bad
    arguments[0][3] = bad
    dirty = *case.pre(), hyper_connection_post(*arguments)
    others = [0, 1, 2, 4, 5, 6]
    for before, after in zip(clean, dirty, strict=True):
        assert torch.equal(before[others], after[others])
        assert not bool(torch.isfinite(after[3]).all())


def test_a_token_does_not_depend_on_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the batch is taken in several blocks, the last of them shorter."""
    monkeypatch.setattr(eager, "_BLOCK", 3 * 4 * 32)
    case = site(11)
    arguments = written(case)
    whole = *case.pre(), hyper_connection_post(*arguments)
    check_pre(case, (whole[0], whole[1], whole[2]))
    for i in range(11):
        one = slice(i, i + 1)
        alone = case._replace(streams=case.streams[one])
        parts = *alone.pre(), hyper_connection_post(*(a[one] for a in arguments))
        for part, full in zip(parts, whole, strict=True):
            torch.testing.assert_close(part, full[one], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_views_are_honoured_and_nothing_is_mutated(dtype: torch.dtype) -> None:
    case = site(6, dtype=dtype)
    arguments = written(case)

    def spread(t: Tensor) -> Tensor:
        """Return a view of equal values whose strides are those of a larger tensor laid out the other way round."""
        flipped = t.permute(*reversed(range(t.dim())))
        larger = torch.full([s + 3 for s in flipped.shape], 9.0, dtype=t.dtype)
        view = larger[tuple(slice(1, 1 + s) for s in flipped.shape)]
        view.copy_(flipped)
        return view.permute(*reversed(range(t.dim())))

    views = Site(*(spread(t) for t in case))
    assert not views.streams.is_contiguous()
    check_pre(case, views.pre())
    spread_arguments = [spread(t) for t in arguments]
    got = hyper_connection_post(*spread_arguments)
    limit = TOLERANCE["hyper_connection", dtype]
    assert_close("streams", got, reference.hyper_connection_post(*arguments), limit)
    for view, kept in zip((*views, *spread_arguments), (*case, *arguments), strict=True):
        assert torch.equal(view, kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_is_read_on_the_host(dtype: torch.dtype) -> None:
    case = site(5, dtype=dtype)
    arguments = written(case)
    with no_host_reads():
        case.pre()
        hyper_connection_post(*arguments)
