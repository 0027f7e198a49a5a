"""Rejection sampling where a kernel shares a vocabulary out to several programs, and draws in blocks of ids."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from dlinfer_ext.kernels.rejection_sampling import reference
from dlinfer_ext.ops import rejection_sample, verify

NAN, INF = float("nan"), float("inf")
# The last of three parts of the vocabulary is short, and so is its last block of ids.
VOCAB = 40_000


def same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def live(places: list[int], values: list[float], vocab: int = VOCAB) -> Tensor:
    """Return logits [vocab] that are -inf but at a few places."""
    logits = torch.full((vocab,), -INF)
    logits[torch.tensor(places)] = torch.tensor(values)
    return logits


def one(logits: Tensor, draft: int, u: float, v: float, q: Tensor | None = None, greedy: bool = False) -> int:
    """Return the first emitted token of one position."""
    out, _, _ = verify(
        logits[None, None],
        torch.tensor([[draft]]),
        torch.tensor([0]),
        is_greedy=torch.tensor([greedy]),
        draft_probs=None if q is None else q[None, None],
        uniform=torch.tensor([[[u, v]]]),
    )
    return int(out[0, 0])


@pytest.mark.parametrize("places", [[2047, 2048], [16383, 16384], [39_999, 39_998], [0, 39_999], [5, 35_000]], ids=str)
def test_the_first_of_equal_logits_is_taken_across_blocks_and_parts(places: list[int]) -> None:
    """B72."""
    assert one(live(places, [1.5, 1.5]), min(places), 0.0, 0.0, greedy=True) == min(places)
    assert one(live(places, [1.5, 1.5]), max(places), 0.0, 0.0, greedy=True) == min(places)
    assert one(live(places, [1.5, 1.75]), 1, 0.0, 0.0, greedy=True) == places[1]


def test_the_largest_logit_is_found_in_many_long_rows() -> None:
    """B72: one known maximum in each of 1000 rows of 4096."""
    places = torch.randint(0, 4096, (1000,), generator=torch.Generator().manual_seed(1))
    logits = torch.zeros(1000, 1, 4096).scatter_(-1, places[:, None, None], 1.0)
    zeros = torch.zeros(1000, dtype=torch.int64)
    greedy = SimpleNamespace(max_top_k=1, top_k=None, random_seeds=None, random_offsets=None)
    every = torch.ones(1000, dtype=torch.bool)
    for out, rejected, _ in (
        rejection_sample(logits, places[:, None], zeros, greedy),
        verify(logits, places[:, None], zeros, is_greedy=every, uniform=torch.zeros(1000, 1, 2)),
    ):
        assert torch.equal(out[:, 0], places)
        assert not bool(rejected.any())


@pytest.mark.parametrize("with_q", [False, True], ids=["no-draft-probs", "draft-probs"])
@pytest.mark.parametrize("bad", [NAN, INF], ids=str)
@pytest.mark.parametrize("at", [0, 16_384, 39_999])
def test_a_bad_logit_anywhere_makes_its_position_unusable(at: int, bad: float, with_q: bool) -> None:
    logits = live([7, 20_000], [3.0, 2.0])
    logits[at] = bad
    q = torch.softmax(live([7, 20_000], [3.0, 2.0]), -1) if with_q else None
    for greedy in (False, True):
        assert one(logits, 7, 0.0, 0.9, q, greedy) == 0


@pytest.mark.parametrize("with_q", [False, True], ids=["no-draft-probs", "draft-probs"])
def test_a_token_is_drawn_from_every_block(with_q: bool) -> None:
    """Weights .1 to .4 at the ends of blocks, and 1 at the id of the draft: left out, or first without a proposal."""
    places, weights = [1023, 1024, 16_384, 39_999], [0.1, 0.2, 0.3, 0.4]
    logits = live([*places, 5], [*torch.tensor(weights).log().tolist(), 0.0])
    q = torch.zeros(VOCAB) if with_q else None
    if q is not None:
        q[5] = 1.0
    for v, want in ((0.01, 0), (0.09, 0), (0.11, 1), (0.29, 1), (0.31, 2), (0.59, 2), (0.61, 3), (0.999999, 3)):
        assert one(logits, 5, 0.75, v, q) == places[want]
        assert one(logits, -1, 0.0, 0.5 + v / 2, q) == places[want]
        assert one(logits, -1, 0.0, 0.49 * v, q) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_large_vocabulary_matches_the_definition(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (4, 2, VOCAB)
    logits = torch.randn(shape, generator=generator)
    logits = logits.masked_fill(torch.rand(shape, generator=generator) > 40 / VOCAB, -INF).to(dtype)
    q = torch.softmax(logits.float() * 0.5, -1)
    draft = torch.where(torch.rand(4, 2, generator=generator) < 0.6, logits.argmax(-1), 17)
    bonus, uniform = torch.arange(4), torch.rand(4, 2, 2, generator=generator)
    mask = torch.arange(4) % 2 == 0
    for greedy in (None, mask):
        for probs in (None, q, q.to(dtype)):
            got = verify(logits, draft, bonus, is_greedy=greedy, draft_probs=probs, uniform=uniform)
            assert same(got, reference.rejection_sample(logits, draft, bonus, uniform, greedy, probs, VOCAB))


def test_columns_with_a_stride() -> None:
    generator = torch.Generator().manual_seed(2)
    logits, q = (torch.randn(5, 700, 2, 3, generator=generator)[..., 1].transpose(1, 2) for _ in range(2))
    q = torch.softmax(q, -1).transpose(1, 2).contiguous().transpose(1, 2)
    draft, bonus = torch.randint(0, 700, (5, 2), generator=generator), torch.arange(10)[::2]
    uniform = torch.rand(2, 5, 2, generator=generator).permute(1, 2, 0)
    got = verify(logits, draft, bonus, draft_probs=q, uniform=uniform)
    assert same(got, reference.rejection_sample(logits, draft, bonus, uniform, None, q, 700))


def test_a_request_is_the_same_in_any_batch_of_a_large_vocabulary() -> None:
    """A flat distribution: the token drawn depends on the last bits of every sum."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(9, 2, VOCAB, generator=generator)
    draft, bonus = torch.zeros(9, 2, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)
    uniform = torch.rand(9, 2, 2, generator=generator)
    whole = verify(logits, draft, bonus, uniform=uniform)
    for i in range(9):
        row = slice(i, i + 1)
        alone = verify(logits[row], draft[row], bonus[row], uniform=uniform[row])
        assert same(alone, tuple(t[row] for t in whole))


def test_a_drawn_token_follows_the_weights() -> None:
    """Six ids spread over blocks, drawn twenty thousand times."""
    places = torch.tensor([0, 255, 256, 511, 512, 699])
    weights = torch.tensor([0.30, 0.25, 0.20, 0.15, 0.07, 0.03])
    logits = live(places.tolist(), weights.log().tolist(), 700).expand(20_000, 1, 700)
    generator = torch.Generator().manual_seed(4)
    out, _, _ = verify(
        logits,
        torch.full((20_000, 1), -1),
        torch.zeros(20_000, dtype=torch.int64),
        uniform=torch.rand(20_000, 1, 2, generator=generator),
    )
    counts = out[:, 0].bincount(minlength=700)[places].double()
    assert int(counts.sum()) == 20_000
    want = weights.double() * 20_000
    assert float(((counts - want) ** 2 / want).sum()) < 25.74  # exceeded with probability 1e-4


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_a_step_without_drafts_emits_the_bonus_token(batch: int) -> None:
    out, rejected, last = verify(
        torch.empty(batch, 0, 9),
        torch.empty(batch, 0, dtype=torch.int32),
        torch.tensor([4, 9, -1])[:batch],
        uniform=torch.empty(batch, 0, 2),
    )
    assert out.tolist() == [[4], [0], [0]][:batch]
    assert rejected.tolist() == [0] * batch
    assert last.tolist() == [4, 0, 0][:batch]
