"""The rules that judge an engine run, without an engine: what they let pass and what they do not."""

from __future__ import annotations

import math
import random

import pytest

from dlinfer_ext.e2e import acceptance, compare, judge


def test_identity_names_the_first_difference() -> None:
    names = ["a", "b", "c"]
    assert compare.identity([[1, 2], [3], [4, 5]], [[1, 2], [3], [4, 5]], names).failures == ()
    wrong = compare.identity([[1, 9, 8], [3], [4, 5, 6]], [[1, 2, 3], [3, 7], [4, 5]], names)
    assert wrong.facts["first_difference"] == {"a": 1, "b": 1, "c": 2}
    assert wrong.failures == (
        "a: token 1 is 9; wanted 2",
        "b: token 1 is the end; wanted 7",
        "c: token 2 is 6; wanted the end",
    )


def logits(*places: dict[int, float]) -> list[dict[int, float]]:
    return list(places)


def test_divergence_lets_a_near_tie_pass_and_nothing_else() -> None:
    want, ours = logits({1: 5.0, 2: 1.0}, {3: 4.0, 4: 3.9}), logits({1: 5.01, 2: 1.0}, {3: 3.9, 4: 3.95})

    def judge(got: list[int], margin: float = 0.2, error: float = 0.05) -> compare.Verdict:
        return compare.divergence([got], [ours], [[1, 3]], [want], ["r"], margin=margin, error=error)

    assert judge([1, 3]).failures == ()
    near = judge([1, 4])
    assert near.failures == ()
    assert near.facts["first_difference"]["r"]["at"] == 1
    assert near.facts["first_difference"]["r"]["gap"] == pytest.approx(0.1)
    assert "logit is 0.100 away" in judge([1, 4], margin=0.05).failures[0]
    assert "logit is 4.000 away" in judge([2, 3]).failures[0], "no near tie"
    assert "logit is inf away" in judge([7, 3]).failures[0], "not among the largest logits"
    assert "logits differ by" in judge([1, 3], error=0.001).failures[0]
    assert judge([1]).failures == ("r: 1 tokens; wanted 2",)


def test_divergence_compares_logits_of_equal_contexts_only() -> None:
    """After the first difference the logits belong to different texts."""
    want, ours = logits({1: 5.0, 2: 4.9}, {1: 9.0}), logits({1: 4.9, 2: 5.0}, {1: -9.0})
    verdict = compare.divergence([[2, 1]], [ours], [[1, 1]], [want], ["r"], margin=0.2, error=0.05)
    assert verdict.failures == ()
    assert verdict.facts["logits"] == 2


def test_divergence_without_logits_is_no_proof() -> None:
    verdict = compare.divergence([[1]], [[]], [[1]], [[]], ["r"], margin=1, error=1)
    assert verdict.failures == ("no logits to compare",)


def test_chi_square_tail() -> None:
    # Textbook values: 3.841 leaves 5 % at one degree of freedom, 18.307 at ten.
    assert compare.chi_square_tail(3.841, 1) == pytest.approx(0.05, abs=1e-4)
    assert compare.chi_square_tail(18.307, 10) == pytest.approx(0.05, abs=1e-4)


def test_law_tells_a_right_sampler_from_wrong_ones() -> None:
    chances: dict[tuple[int, ...], float] = {(1, 1): 0.5, (1, 2): 0.3, (2, 1): 0.15, (2, 2): 0.05}
    draw = random.Random(3)
    right = [list(x) for x in draw.choices(list(chances), list(chances.values()), k=2000)]
    assert compare.law(right, chances, 1e-4).failures == ()
    biased = [list(x) for x in draw.choices(list(chances), [0.4, 0.4, 0.15, 0.05], k=2000)]
    assert "chi-square" in compare.law(biased, chances, 1e-4).failures[0]
    independent = [[draw.choices([1, 2], [0.8, 0.2])[0], draw.choices([1, 2], [0.65, 0.35])[0]] for _ in range(4000)]
    assert compare.law(independent, chances, 1e-4).failures, "right marginals, wrong joint law"
    assert compare.law([*right, [3, 3]], chances, 1e-4).failures == ("drew [3, 3], which has probability 0",)
    assert "too few" in compare.law(right[:3], chances, 1e-4).failures[0]


def test_share() -> None:
    assert compare.share("accepted", 520, 1000, 0.5, 1e-4).failures == ()
    assert compare.share("accepted", 600, 1000, 0.5, 1e-4).failures
    assert compare.share("accepted", 1, 1000, 0.0, 1e-4).failures
    assert math.isclose(compare.share("accepted", 500, 1000, 0.5, 1e-4).facts["probability"], 1.0)


def test_verify_rows_are_matched_with_their_requests() -> None:
    """Two requests in turn in one slot, and a third beside them: slot, history, accepted, last token."""
    prompt, first, second = [1, 2, 3, 4], [5, 6, 7, 8, 9, 10], [6, 6, 6, 6]
    other, third = [9, 9], [7, 8, 7, 8, 7, 8]
    rows = [
        [1, 4, 2, 8],  # after 1 2 3 4, fed 5: accepts 6 7, gives 8
        [2, 2, 0, 8],
        [1, 7, 1, 10],
        [2, 3, 0, 7],
        [1, 4, 0, 6],  # the second request: histories do not go on
        [2, 4, 3, 7],
        [1, 5, 1, 6],
    ]
    found = acceptance.chains(rows)
    assert sorted(chain[0].history for chain in found) == [2, 4, 4]
    measured = acceptance.measure(rows, 3, [(prompt, second), (prompt, first), (other, third)])
    assert measured.histogram == (3, 2, 1, 1)
    assert measured.verify_rows == 7
    assert measured.reach == pytest.approx((4 / 7, 2 / 7, 1 / 7))
    # 7 8 7 8 was never there before, and no other context is seen twice.
    assert measured.steps_by_context == {"novel": 7, "repeated": 0}
    unknown = acceptance.measure(rows, 3, [])
    assert unknown.histogram == measured.histogram
    assert sum(unknown.steps_by_context.values()) == 0


def test_engine_steps_are_those_of_every_kind() -> None:
    counters = {"prefill_steps": 2, "decode_steps": 3, "verify_steps": 5, "padded_steps": 7}
    assert judge.steps_of(counters) == 10


def test_a_chain_of_another_text_does_not_fit() -> None:
    (chain,) = acceptance.chains([[1, 4, 2, 8]])
    assert acceptance.fits(chain, 4, [5, 6, 7, 8, 9])
    assert not acceptance.fits(chain, 4, [5, 6, 7, 9, 9])
    assert not acceptance.fits(chain, 5, [5, 6, 7, 8, 9])
    assert not acceptance.fits(chain, 4, [5, 6]), "nothing of it is known"
