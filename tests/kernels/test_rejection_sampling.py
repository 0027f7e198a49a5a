"""Rejection sampling against written-out results, the fp64 definition, and the distributions that it promises."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlinfer_ext.kernels.common.random import philox, to_uniform
from dlinfer_ext.kernels.rejection_sampling import eager, reference
from dlinfer_ext.ops import _registry
from dlinfer_ext.ops.rejection_sampling import rejection_sample, unusable_positions, verify, verify_greedy
from dlinfer_ext.testing import no_host_reads

NAN, INF = float("nan"), float("inf")
Verified = tuple[Tensor, Tensor, Tensor]
EAGER_ONLY = pytest.mark.eager_only(reason="about a step inside the PyTorch form")


def same(got: Verified, want: Verified) -> bool:
    return all(g.dtype == w.dtype and torch.equal(g, w) for g, w in zip(got, want, strict=True))


class Batch:
    """Drawn inputs of a verify step."""

    def __init__(self, batch: int, num_drafts: int, vocab: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (batch, num_drafts, vocab)
        self.logits = torch.randn(shape, generator=generator) * 2
        self.probs = torch.softmax(torch.randn(shape, generator=generator), -1)
        self.draft = torch.randint(0, vocab, (batch, num_drafts), generator=generator)
        self.bonus = torch.randint(0, vocab, (batch,), generator=generator)
        self.uniform = torch.rand((batch, num_drafts, 2), generator=generator)
        self.greedy = torch.rand(batch, generator=generator) < 0.5
        # Half of the drafts are the target's own choice, so that prefixes of every length are accepted.
        chosen = torch.rand((batch, num_drafts), generator=generator) < 0.5
        if vocab and num_drafts:
            self.draft = torch.where(chosen, self.logits.argmax(-1), self.draft)

    def verify(self, rows: slice = slice(None), *, greedy: bool = False, probs: bool = False) -> Verified:
        return verify(
            self.logits[rows],
            self.draft[rows],
            self.bonus[rows],
            is_greedy=self.greedy[rows] if greedy else None,
            draft_probs=self.probs[rows] if probs else None,
            uniform=self.uniform[rows],
        )

    def definition(self, *, greedy: bool = False, probs: bool = False) -> Verified:
        return reference.rejection_sample(
            self.logits,
            self.draft,
            self.bonus,
            self.uniform,
            self.greedy if greedy else None,
            self.probs if probs else None,
            self.logits.shape[-1],
        )


def log_probs(*rows: list[float]) -> Tensor:
    """Return logits [1, N, V] with the given softmax."""
    return torch.tensor([rows], dtype=torch.float64).log().float()


def fixed(u: list[float], v: list[float]) -> Tensor:
    return torch.tensor([u, v]).T[None].contiguous()


# --- written out ------------------------------------------------------------------------------------------------------


def test_greedy_written_out() -> None:
    target = torch.tensor([[1, 2, 3, 7], [1, 2, 3, 7], [4, 2, 3, 7], [1, 2, 3, 7]])
    draft = torch.tensor([[1, 2, 3], [1, 9, 3], [1, 2, 3], [1, 2, 9]])
    out, rejected, last = verify_greedy(target, draft)
    assert out.tolist() == [[1, 2, 3, 7], [1, 2, -1, -1], [4, -1, -1, -1], [1, 2, 3, -1]]
    assert rejected.tolist() == [0, 2, 3, 1]
    assert last.tolist() == [7, 2, 4, 3]


SAMPLED = [
    pytest.param([0.5, 0.9], [0.0, 0.0], [1, 2, 0], 0, id="all-accepted-then-bonus"),
    pytest.param([0.7, 0.0], [0.1, 0.0], [0, -1, -1], 2, id="first-rejected-low-draw"),
    pytest.param([0.7, 0.0], [0.9, 0.0], [2, -1, -1], 2, id="first-rejected-high-draw"),
    pytest.param([0.5, 0.96], [0.0, 0.4], [1, 0, -1], 1, id="second-rejected-low-draw"),
    pytest.param([0.5, 0.96], [0.0, 0.6], [1, 1, -1], 1, id="second-rejected-high-draw"),
]


@pytest.mark.parametrize(("u", "v", "want", "rejected"), SAMPLED)
def test_sampled_written_out(u: list[float], v: list[float], want: list[int], rejected: int) -> None:
    """Without the draft's own id, the target [.2, .6, .2] leaves ids 0 and 2 in equal parts; [.025, .025, .95] too."""
    logits = log_probs([0.2, 0.6, 0.2], [0.025, 0.025, 0.95])
    got = verify(logits, torch.tensor([[1, 2]]), torch.tensor([0]), uniform=fixed(u, v))
    assert got[0].tolist() == [want]
    assert got[1].tolist() == [rejected]
    assert got[2].tolist() == [want[2 - rejected]]


def test_sampled_against_draft_probabilities_written_out() -> None:
    """Target .5/.3/.2 and draft .2/.7/.1: id 1 is accepted below 3/7, and the rest is .3/0/.1."""
    p, q = log_probs([0.5, 0.3, 0.2]), torch.tensor([[[0.2, 0.7, 0.1]]])
    draft, bonus = torch.tensor([[1]]), torch.tensor([0])
    results = {
        (0.42, 0.5): [1, 0],
        (0.43, 0.74): [0, -1],
        (0.43, 0.76): [2, -1],
    }
    for (u, v), want in results.items():
        assert verify(p, draft, bonus, draft_probs=q, uniform=fixed([u], [v]))[0].tolist() == [want]


# --- against the definition -------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    batch=st.integers(0, 7),
    num_drafts=st.integers(0, 5),
    vocab=st.one_of(st.integers(1, 40), st.sampled_from([511, 512, 513, 1100])),
    greedy=st.booleans(),
    probs=st.booleans(),
    spoil=st.sampled_from(["", "nan", "inf", "-inf", "draft", "q-nan"]),
    hidden=st.integers(0, 3),
    seed=st.integers(0, 2**16),
)
def test_matches_the_definition_on_drawn_cases(
    batch: int, num_drafts: int, vocab: int, greedy: bool, probs: bool, spoil: str, hidden: int, seed: int
) -> None:
    drawn = Batch(batch, num_drafts, vocab, seed)
    if batch and num_drafts:
        if spoil in ("nan", "inf"):
            drawn.logits[-1, num_drafts // 2, vocab // 2] = float(spoil)
        elif spoil == "-inf":
            drawn.logits[-1, 0] = -INF
        elif spoil == "draft":
            drawn.draft[0, -1], drawn.draft[-1, 0] = -1, vocab
        elif spoil == "q-nan":
            drawn.probs[0, 0, 0] = NAN
    size = max(1, vocab - hidden)
    arguments = (
        drawn.logits,
        drawn.draft,
        drawn.bonus,
        drawn.uniform,
        drawn.greedy if greedy else None,
        drawn.probs if probs else None,
        size,
    )
    got = torch.ops.dlinfer_ext.rejection_sample(*arguments)
    assert same(got, reference.rejection_sample(*arguments))
    assert int(got[0].amax(-1).ge(size).sum()) == 0


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_views_and_types_as_the_engine_passes_them(dtype: torch.dtype, ids: torch.dtype) -> None:
    whole = Batch(5, 4, 300)
    logits = whole.logits.to(dtype)
    draft, bonus = whole.draft[:, :3].to(ids), whole.bonus.to(ids)
    uniform = whole.uniform[:, :3].contiguous()
    got = verify(logits[:, :-1], draft, bonus, uniform=uniform)
    assert same(got, reference.rejection_sample(logits[:, :-1], draft, bonus, uniform, None, None, 300))


def test_greedy_forms_agree() -> None:
    drawn = Batch(16, 3, 50)
    target = torch.cat([drawn.logits.argmax(-1), drawn.bonus[:, None]], dim=1)
    want = reference.rejection_sample(drawn.logits, drawn.draft, drawn.bonus, None, None, None, 50)
    inputs = SimpleNamespace(max_top_k=1, top_k=None, random_seeds=None, random_offsets=None)
    assert same(verify_greedy(target, drawn.draft), want)
    assert same(rejection_sample(drawn.logits, drawn.draft, drawn.bonus, inputs), want)
    every = torch.ones(16, dtype=torch.bool)
    assert same(verify(drawn.logits, drawn.draft, drawn.bonus, is_greedy=every, uniform=drawn.uniform), want)


# --- public faults ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 40, 41, 50, 81], ids=lambda b: f"R55-B{b}")
@pytest.mark.parametrize("probs", [False, True], ids=["no-draft-probs", "draft-probs"])
def test_every_batch_size_matches_the_definition(batch: int, probs: bool) -> None:
    drawn = Batch(batch, 3, 20)
    assert same(drawn.verify(greedy=True, probs=probs), drawn.definition(greedy=True, probs=probs))


def test_greedy_rows_leave_sampling_rows_alone() -> None:
    """R56: 50 requests, half of them greedy: each row is what it is in a batch of its own kind."""
    drawn = Batch(50, 3, 20)
    mixed, sampled = drawn.verify(greedy=True), drawn.verify()
    greedy = verify_greedy(torch.cat([drawn.logits.argmax(-1), drawn.bonus[:, None]], 1), drawn.draft)
    for got, g, s in zip(mixed, greedy, sampled, strict=True):
        keep = drawn.greedy if got.dim() == 1 else drawn.greedy[:, None]
        assert torch.equal(got, torch.where(keep, g, s))


@pytest.mark.parametrize("probs", [False, True], ids=["R57-no-draft-probs", "R57-draft-probs"])
def test_a_draft_of_probability_zero_is_never_accepted(probs: bool) -> None:
    p, q = log_probs([0.0, 0.5, 0.5]), torch.tensor([[[1.0, 0.0, 0.0]]]) if probs else None
    for v in (0.0, 0.25, 0.75):
        out = verify(p, torch.tensor([[0]]), torch.tensor([1]), draft_probs=q, uniform=fixed([0.0], [v]))[0]
        assert out.tolist() == [[1 if v < 0.5 else 2, -1]]


def test_a_row_without_any_target_token_emits_a_valid_one() -> None:
    """R58: placeholders (-1) as targets are not taken for a match of a draft -1, nor read from the end."""
    out, rejected, last = verify_greedy(torch.tensor([[-1, -1, -1], [3, -1, 5]]), torch.tensor([[-1, -1], [3, -1]]))
    assert out.tolist() == [[0, -1, -1], [3, 0, -1]]
    assert rejected.tolist() == [2, 1]
    assert last.tolist() == [0, 0]


@pytest.mark.parametrize("greedy", [False, True], ids=["R59-sampling", "R59-greedy"])
@pytest.mark.parametrize("bad", [NAN, INF], ids=str)
def test_an_unusable_row_emits_id_0_and_is_found(greedy: bool, bad: float) -> None:
    logits = torch.zeros(2, 2, 6)
    logits[:, :, 4] = 30.0
    logits[0, 1, 5] = bad
    draft, bonus = torch.full((2, 2), 4), torch.tensor([3, 3])
    mask = torch.full((2,), greedy)
    out, rejected, last = verify(logits, draft, bonus, is_greedy=mask, uniform=torch.full((2, 2, 2), 0.5))
    assert out.tolist() == [[4, 0, -1], [4, 4, 3]]
    assert rejected.tolist() == [1, 0]
    assert last.tolist() == [0, 3]
    assert unusable_positions(logits).tolist() == [[False, True], [False, False]]


def test_nothing_is_read_on_the_host() -> None:
    """R60: all-greedy, all-sampling and mixed batches, with and without seeds and draft probabilities."""
    drawn = Batch(8, 3, 700)
    top_k = torch.where(drawn.greedy, 1, 50)
    seeds, offsets = torch.arange(8), torch.arange(8) * 10
    with no_host_reads():
        for max_top_k, k in ((1, None), (50, top_k), (50, None)):
            for s, o in ((None, None), (seeds, offsets)):
                inputs = SimpleNamespace(max_top_k=max_top_k, top_k=k, random_seeds=s, random_offsets=o)
                for probs in (None, drawn.probs):
                    rejection_sample(drawn.logits, drawn.draft, drawn.bonus, inputs, probs)
        verify_greedy(drawn.draft, drawn.draft[:, 1:])
        unusable_positions(drawn.logits)


@pytest.mark.eager_only(reason="about the choice of a route")
def test_asking_for_triton_without_it_still_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """R61: the PyTorch form serves and the choice says why."""
    monkeypatch.setenv("DLINFER_EXT_ROUTE", "triton")
    choice = _registry.choose("rejection_sample", "cpu")
    assert choice.route.name == "eager"
    assert choice.passed_over[0][0] == "triton"


def test_draws_depend_on_seed_and_position_alone() -> None:
    """R62: a request repeats itself in any batch, at any row, and on a second call."""
    drawn = Batch(6, 3, 600)
    seeds, offsets = torch.tensor([7, 8, 7, 2**40, -1, 0]), torch.tensor([5, 5, 900, 5, 2**33, 0])

    def run(rows: list[int]) -> Verified:
        return verify(
            drawn.logits[rows], drawn.draft[rows], drawn.bonus[rows], seeds=seeds[rows], offsets=offsets[rows]
        )

    whole, again, order = run([0, 1, 2, 3, 4, 5]), run([0, 1, 2, 3, 4, 5]), [4, 2, 0, 5, 1, 3]
    assert same(whole, again)
    assert all(torch.equal(part, full[order]) for part, full in zip(run(order), whole, strict=True))
    for i in range(6):
        assert all(torch.equal(one, full[[i]]) for one, full in zip(run([i]), whole, strict=True))


@EAGER_ONLY
def test_draws_are_those_of_the_definition() -> None:
    seeds, offsets = torch.tensor([7, 8, 7, 2**40, -1, 0]), torch.tensor([5, 5, 900, 5, 2**33, 0])
    table = eager.draws(seeds, offsets, 3)
    want = [[reference.draws(int(s), int(o) + n) for n in range(3)] for s, o in zip(seeds, offsets, strict=True)]
    assert torch.equal(table.double(), torch.tensor(want, dtype=torch.float64))
    assert len(table.flatten().unique()) == table.numel()


@EAGER_ONLY
@pytest.mark.parametrize(("v", "want"), [(0.4999999, 0), (0.5000001, 1)], ids=["R63-below", "R63-above"])
def test_close_candidates_are_told_apart(v: float, want: int) -> None:
    weights = torch.zeros(1, 1024)
    weights[0, 3] = weights[0, 900] = 0.5
    assert eager.pick(weights, torch.tensor([v])).tolist() == [(3, 900)[want]]


@pytest.mark.parametrize("greedy", [False, True], ids=["B67-sampling", "B67-greedy"])
def test_a_padded_vocabulary_is_never_emitted(greedy: bool) -> None:
    logits = torch.full((2, 1, 8), NAN)
    logits[1, 0, :5] = torch.tensor([0.0, 0.0, 0.0, 9.0, 0.0])
    logits[1, 0, 5:] = 99.0
    mask = torch.full((2,), greedy)
    for v in (0.0, 0.5, 0.999999):
        out, rejected, last = verify(
            logits,
            torch.tensor([[6], [7]]),
            torch.tensor([1, 1]),
            is_greedy=mask,
            uniform=torch.full((2, 1, 2), v),
            vocab_size=5,
        )
        assert int(out.max()) < 5
        assert rejected.tolist() == [1, 1]
        assert last[0] == 0
    assert unusable_positions(logits, 5).tolist() == [[True], [False]]


@pytest.mark.parametrize("greedy", [False, True], ids=["B68-sampling", "B68-greedy"])
def test_a_nan_row_leaves_the_others_alone(greedy: bool) -> None:
    drawn = Batch(6, 3, 1024)
    clean = drawn.verify(greedy=greedy)
    drawn.logits[2, 0, 700] = NAN
    drawn.logits[2, 1:] = NAN
    got = drawn.verify(greedy=greedy)
    others = [0, 1, 3, 4, 5]
    assert all(torch.equal(g[others], c[others]) for g, c in zip(got, clean, strict=True))
    assert got[0][2].tolist() == [0, -1, -1, -1]
    assert unusable_positions(drawn.logits).nonzero().tolist() == [[2, 0], [2, 1], [2, 2]]


@pytest.mark.parametrize("fill", [NAN, INF, -INF, 1.0], ids=["B69-nan", "B69-inf", "B69-minus-inf", "B69-no-rest"])
def test_a_degenerate_difference_falls_back_to_the_target(fill: float) -> None:
    p = log_probs([1e-22, 0.25, 0.75])
    q = torch.full((1, 1, 3), fill)
    for v, want in ((0.2, 1), (0.3, 2)):
        out = verify(p, torch.tensor([[0]]), torch.tensor([1]), draft_probs=q, uniform=fixed([0.5], [v]))[0]
        assert out.tolist() == [[want, -1]]


def test_inputs_are_unchanged_by_two_calls() -> None:
    """B71."""
    drawn = Batch(9, 3, 40)
    names = ("logits", "probs", "draft", "bonus", "uniform", "greedy")
    before = {name: getattr(drawn, name).clone() for name in names}
    for probs in (False, True):
        first, second = drawn.verify(greedy=True, probs=probs), drawn.verify(greedy=True, probs=probs)
        assert same(first, second)
    assert all(torch.equal(getattr(drawn, name), before[name]) for name in names)


@EAGER_ONLY
def test_the_largest_logit_is_found_in_a_long_row() -> None:
    """B72: one known maximum in each of 1000 rows of 4096, and the first of equal ones."""
    places = torch.randint(0, 4096, (1000,), generator=torch.Generator().manual_seed(1))
    logits = torch.zeros(1000, 4096)
    logits[torch.arange(1000), places] = 1.0
    ids, usable = eager.greedy_tokens(logits)
    assert torch.equal(ids, places)
    assert bool(usable.all())
    assert eager.greedy_tokens(torch.tensor([[0.0, 5.0, 5.0]]))[0].tolist() == [1]


@pytest.mark.parametrize("batch", [1, 40, 41, 81], ids=lambda b: f"B73-B{b}")
def test_one_draft_is_no_special_case(batch: int) -> None:
    drawn = Batch(batch, 1, 30)
    assert same(drawn.verify(greedy=True, probs=True), drawn.definition(greedy=True, probs=True))


@pytest.mark.parametrize("probs", [False, True], ids=["B74-no-draft-probs", "B74-draft-probs"])
def test_a_batch_equals_its_requests_alone(probs: bool) -> None:
    drawn = Batch(81, 2, 600)
    whole = drawn.verify(greedy=True, probs=probs)
    alone = [drawn.verify(slice(i, i + 1), greedy=True, probs=probs) for i in range(81)]
    assert same(
        whole, (torch.cat([a[0] for a in alone]), torch.cat([a[1] for a in alone]), torch.cat([a[2] for a in alone]))
    )


@pytest.mark.parametrize("draft", [-1, -7, 5, 2**31 - 1])
def test_a_draft_outside_the_vocabulary_means_nothing_was_proposed(draft: int) -> None:
    p = log_probs([0.2, 0.3, 0.1, 0.3, 0.1])
    for probs in (None, torch.full((1, 1, 5), 0.2)):
        out = verify(p, torch.tensor([[draft]]), torch.tensor([1]), draft_probs=probs, uniform=fixed([0.0], [0.4]))[0]
        assert out.tolist() == [[1, -1]]
    assert verify_greedy(torch.tensor([[1, 2]]), torch.tensor([[draft]]))[0].tolist() == [[1, -1]]


def test_a_bonus_outside_the_vocabulary_is_not_emitted() -> None:
    out = verify(log_probs([0.0, 1.0]), torch.tensor([[1]]), torch.tensor([2]), uniform=fixed([0.5], [0.5]))[0]
    assert out.tolist() == [[1, 0]]


# --- random numbers and statistics ------------------------------------------------------------------------------------

# Known answers of Philox4x32-10, from the Random123 distribution (kat_vectors).
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_philox_gives_the_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], want: tuple[int, ...]
) -> None:
    assert reference.philox(counter, key) == want
    c0, c1, c2, c3, k0, k1 = (torch.tensor([word]) for word in (*counter, *key))
    assert tuple(int(word) for word in philox((c0, c1, c2, c3), (k0, k1))) == want


def test_a_uniform_is_neither_0_nor_1() -> None:
    ends = to_uniform(torch.tensor([0, 0xFFFFFFFF]))
    assert ends.tolist() == [2.0**-24, 1 - 2.0**-24]


TARGET = [0.30, 0.25, 0.20, 0.15, 0.07, 0.03]
DRAFT = [0.05, 0.45, 0.10, 0.10, 0.25, 0.05]
CHI_SQUARE_5 = 25.74  # exceeded with probability 1e-4 at 5 degrees of freedom
DRAWS = 20_000


def chi_square(counts: Tensor, p: list[float]) -> float:
    want = torch.tensor(p, dtype=torch.float64) * counts.sum()
    return float(((counts - want) ** 2 / want).sum())


@pytest.mark.parametrize("sampled", [True, False], ids=["draft-probs", "no-draft-probs"])
@pytest.mark.parametrize("seeded", [True, False], ids=["seeds", "generator"])
def test_what_is_emitted_is_distributed_as_the_target(sampled: bool, seeded: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    q = torch.tensor(DRAFT)
    draft = torch.multinomial(q, DRAWS * 2, True, generator=generator).view(DRAWS, 2)
    if not sampled:
        draft.fill_(1)
    torch.manual_seed(4)
    out, rejected, _ = verify(
        torch.tensor(TARGET).log().expand(DRAWS, 2, 6),
        draft,
        torch.zeros(DRAWS, dtype=torch.int64),
        draft_probs=q.expand(DRAWS, 2, 6) if sampled else None,
        seeds=torch.arange(DRAWS) if seeded else None,
        offsets=torch.full((DRAWS,), 17) if seeded else None,
    )
    rate = sum(min(p, d) for p, d in zip(TARGET, DRAFT, strict=True)) if sampled else TARGET[1]
    first = (rejected < 2).double()
    assert abs(float(first.mean()) - rate) < 4 * (rate * (1 - rate) / DRAWS) ** 0.5
    assert chi_square(out[:, 0].bincount(minlength=6), TARGET) < CHI_SQUARE_5
    second = out[rejected < 2, 1]
    assert chi_square(second.bincount(minlength=6), TARGET) < CHI_SQUARE_5
    both = float((rejected[rejected < 2] == 0).double().mean())
    assert abs(both - rate) < 4 * (rate * (1 - rate) / len(second)) ** 0.5


def test_an_unlikely_draft_is_accepted_as_rarely_as_the_target_says() -> None:
    """B70: target probability 0.01 against draft probability 1 over 10,000 draws."""
    n = 10_000
    p, q = torch.tensor([0.01, 0.99]), torch.tensor([1.0, 0.0])
    zeros = torch.zeros(n, dtype=torch.int64)
    for probs in (q.expand(n, 1, 2), None):
        rejected = verify(
            p.log().expand(n, 1, 2), zeros[:, None], zeros, draft_probs=probs, seeds=torch.arange(n), offsets=zeros
        )[1]
        assert abs(float((rejected == 0).double().mean()) - 0.01) < 4 * (0.01 * 0.99 / n) ** 0.5


@EAGER_ONLY
def test_picks_over_several_blocks_follow_the_weights() -> None:
    """Six live ids spread over three blocks of the vocabulary, zeros everywhere else."""
    places = torch.tensor([0, 511, 512, 700, 1023, 1099])
    weights = torch.zeros(1100)
    weights[places] = torch.tensor(TARGET)
    v = eager.draws(torch.full((DRAWS,), 5), torch.arange(DRAWS), 1)[:, 0, 1]
    counts = eager.pick(weights.expand(DRAWS, 1100), v).bincount(minlength=1100)
    assert int(counts.sum() - counts[places].sum()) == 0
    assert chi_square(counts[places], TARGET) < CHI_SQUARE_5


@EAGER_ONLY
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    vocab=st.integers(1, 1600),
    live=st.integers(1, 5),
    v=st.one_of(st.sampled_from([0.0, 2.0**-24, 0.5, 1 - 2.0**-24]), st.floats(0, 1, exclude_max=True, width=32)),
    exponent=st.integers(-37, 0),
    seed=st.integers(0, 2**16),
)
def test_an_id_of_weight_zero_is_never_picked(vocab: int, live: int, v: float, exponent: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.zeros(1, vocab)
    places = torch.randint(0, vocab, (live,), generator=generator)
    weights[0, places] = torch.rand(live, generator=generator).add_(1e-3).mul_(10.0**exponent)
    token = int(eager.pick(weights, torch.tensor([v])))
    assert weights[0, token] > 0


@EAGER_ONLY
@pytest.mark.parametrize(
    ("threshold", "running", "want"),
    [
        pytest.param(-1e-9, [0.0, 1.0, 1.0, 2.0], 1, id="below-zero"),
        pytest.param(2.0, [0.0, 1.0, 1.0, 2.0], 3, id="at-the-total"),
        pytest.param(0.5, [0.6, 0.4, 1.0, 2.0], 3, id="sums-that-fall"),
    ],
)
def test_rounded_sums_still_lead_to_a_positive_weight(threshold: float, running: list[float], want: int) -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 1.0]])
    assert eager.first_above(torch.tensor([running]), torch.tensor([threshold]), weights).tolist() == [want]
