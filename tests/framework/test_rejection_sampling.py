"""Our sampler behind LMDeploy's spec: equal to LMDeploy's own where that is right, and distributed as the target.

R102 and B70 are reported faults: an impossible token accepted at a draw of 0, and a sampler that never rejects.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lmdeploy.pytorch.backends.default.rejection_sampling import DefaultRejectionSamplingImpl
from torch import Tensor

from dlinfer_ext.framework.lmdeploy import counters
from dlinfer_ext.framework.lmdeploy.rejection_sampling import RejectionSampling
from dlinfer_ext.framework.lmdeploy.seeds import MultinomialSampling
from dlinfer_ext.testing import no_host_reads

Verified = tuple[Tensor, Tensor, Tensor]
DRAWS = 20_000
# A right sampler exceeds them once in a million runs of other seeds; these seeds are fixed.
SIGMAS = 4.9
CHI_SQUARE = {3: 30.7, 4: 33.4}  # by degrees of freedom
P = torch.tensor([[0.4, 0.3, 0.2, 0.09, 0.01], [0.05, 0.15, 0.2, 0.25, 0.35]])  # target at two draft positions
Q = torch.tensor([[0.1, 0.2, 0.3, 0.3, 0.1], [0.4, 0.1, 0.1, 0.1, 0.3]])  # what drafts are sampled from


class AlwaysAccepts(RejectionSampling):
    """Negative control: as a sampler whose random numbers are all 0 (B70)."""

    def forward(self, target_logits: Tensor, draft_token_ids: Tensor, *rest: Any, **options: Any) -> Verified:
        sure = torch.full_like(target_logits, -torch.inf).scatter(-1, draft_token_ids[..., None], 0.0)
        options["draft_probs"] = None
        return super().forward(sure, draft_token_ids, *rest, **options)


class NeverAccepts(RejectionSampling):
    """Negative control: what is emitted is right one token at a time, but no draft is kept."""

    def forward(self, target_logits: Tensor, draft_token_ids: Tensor, *rest: Any, **options: Any) -> Verified:
        return super().forward(target_logits, torch.full_like(draft_token_ids, -1), *rest, **options)


def greedy_inputs(batch: int, num_drafts: int, agree: float, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, 50, (batch, num_drafts + 1), generator=generator)
    same = torch.rand((batch, num_drafts), generator=generator) < agree
    return target, torch.where(same, target[:, :-1], (target[:, :-1] + 1) % 50)


def sampled_inputs(batch: int, num_drafts: int, vocab: int = 40, seed: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((batch, num_drafts, vocab), generator=generator) * 3
    draft = torch.where(
        torch.rand((batch, num_drafts), generator=generator) < 0.6,
        logits.argmax(-1),
        torch.randint(0, vocab, (batch, num_drafts), generator=generator),
    )
    return logits, draft, torch.randint(0, vocab, (batch,), generator=generator)


def same(got: Sequence[Tensor], want: Sequence[Tensor]) -> bool:
    return all(g.dtype == w.dtype and torch.equal(g, w) for g, w in zip(got, want, strict=True))


# --- where LMDeploy's form is right -----------------------------------------------------------------------------------


BUILD = """
from lmdeploy.pytorch.backends.multinomial_sampling import MultinomialSamplingBuildSpec
from lmdeploy.pytorch.backends.rejection_sampling import RejectionSamplingBuildSpec
from lmdeploy.pytorch.backends.selector import get_backend
for spec in (RejectionSamplingBuildSpec(), MultinomialSamplingBuildSpec()):
    built = type(get_backend("ascend").build_op(spec))
    print("BUILT", built.__module__, built.__name__)
"""


def test_the_backend_answers_the_specs_with_ours() -> None:
    env = {**os.environ, "DLINFER_EXT_VENDOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", BUILD], env=env, capture_output=True, text=True, timeout=120)
    built = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("BUILT")]
    want = [RejectionSampling, MultinomialSampling]
    assert built == [[ours.__module__, ours.__name__] for ours in want], done.stderr[-3000:]


@pytest.mark.parametrize("agree", [0.0, 0.7, 1.0], ids=["none-accepted", "some", "all-accepted"])
@pytest.mark.parametrize("num_drafts", range(1, 8))
@pytest.mark.parametrize("batch", [1, 2, 33])
def test_greedy_batch_as_lmdeploy(batch: int, num_drafts: int, agree: float) -> None:
    for seed in range(5):
        inputs = greedy_inputs(batch, num_drafts, agree, seed)
        got = RejectionSampling().forward_greedy(*inputs)
        assert same(got, DefaultRejectionSamplingImpl().forward_greedy(*inputs))
        assert agree == 0.7 or set(got[1].tolist()) == {num_drafts if agree == 0 else 0}


@pytest.mark.parametrize("probs", [False, True], ids=["no-draft-probs", "draft-probs"])
def test_greedy_rows_of_a_mixed_batch_as_lmdeploy(probs: bool) -> None:
    logits, draft, bonus = sampled_inputs(64, 3)
    greedy = torch.arange(64) % 2 == 0
    q = torch.softmax(logits.flip(-1), -1) if probs else None
    got, want = (
        tuple(x[greedy] for x in sampler.forward(logits, draft, bonus, is_greedy=greedy, draft_probs=q))
        for sampler in (RejectionSampling(), DefaultRejectionSamplingImpl())
    )
    assert same(got, want)
    assert {0, 1, 2, 3} == set(got[1].tolist())


# --- distributions ----------------------------------------------------------------------------------------------------


def acceptance_is_the_targets(sampler: RejectionSampling, probability: float) -> bool:
    """Tell whether a draft of that target probability, drafted with certainty, is accepted as often (B70)."""
    torch.manual_seed(11)
    row = torch.tensor([probability, *[(1 - probability) / 4] * 4])
    logits = row.log().expand(DRAWS, 1, 5)
    draft, bonus = torch.zeros((DRAWS, 1), dtype=torch.int64), torch.full((DRAWS,), 4)
    _, rejected, _ = sampler.forward(logits, draft, bonus, is_greedy=None)
    rate = (rejected == 0).double().mean().item()
    return bool(abs(rate - probability) <= SIGMAS * (probability * (1 - probability) / DRAWS) ** 0.5)


def fits(tokens: Tensor, want: Tensor) -> bool:
    """Tell whether tokens are distributed as `want`, by chi-square."""
    count = torch.bincount(tokens, minlength=want.numel()).double()
    expected = want.double() * tokens.numel()
    return bool(((count - expected).square() / expected).sum() <= CHI_SQUARE[want.numel() - 1])


def output_is_distributed_as_the_target(sampler: RejectionSampling, probs: bool) -> bool:
    """Tell whether each emitted position follows the target, whatever was drafted, and drafts were kept at all."""
    torch.manual_seed(12)
    draft = torch.stack([torch.multinomial(q, DRAWS, replacement=True) for q in Q], dim=1)
    bonus = torch.zeros(DRAWS, dtype=torch.int64)
    q = Q.expand(DRAWS, 2, 5) if probs else None
    out, rejected, _ = sampler.forward(P.log().expand(DRAWS, 2, 5), draft, bonus, is_greedy=None, draft_probs=q)
    second = out[:, 1][rejected <= 1]  # there is one if the first draft was kept, and its choice is independent
    return 0 < second.numel() < DRAWS and fits(out[:, 0], P[0]) and fits(second, P[1])


@pytest.mark.parametrize("probability", [0.01, 0.3, 0.9])
def test_a_draft_is_accepted_as_often_as_the_target_says(probability: float) -> None:
    assert acceptance_is_the_targets(RejectionSampling(), probability)


@pytest.mark.parametrize("probs", [False, True], ids=["no-draft-probs", "draft-probs"])
def test_what_is_emitted_is_distributed_as_the_target(probs: bool) -> None:
    assert output_is_distributed_as_the_target(RejectionSampling(), probs)


@pytest.mark.parametrize("wrong", [AlwaysAccepts, NeverAccepts])
def test_the_statistics_find_a_wrong_sampler(wrong: type[RejectionSampling]) -> None:
    assert not acceptance_is_the_targets(wrong(), 0.3)
    for probs in (False, True):
        assert not output_is_distributed_as_the_target(wrong(), probs)


def test_the_token_after_a_rejection_is_never_the_rejected_draft() -> None:
    logits, draft, bonus = sampled_inputs(5000, 3, vocab=4)
    out, rejected, last = RejectionSampling().forward(logits, draft, bonus, is_greedy=None)
    at = (3 - rejected)[:, None]
    some = rejected > 0
    assert 100 < int(some.sum()) < 5000
    assert not (draft.gather(1, at.clamp(max=2))[:, 0] == last)[some].any()
    assert torch.equal(out.gather(1, at)[:, 0], last)


@pytest.mark.parametrize("probs", [False, True], ids=["no-draft-probs", "draft-probs"])
def test_a_draft_of_probability_zero_is_not_accepted_at_a_draw_of_zero(
    probs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R102: LMDeploy's portable form compares with >=, and so emits a token that a grammar or a filter forbade."""
    monkeypatch.setattr(torch, "rand", lambda *_, dtype, device: torch.zeros(_[0], dtype=dtype, device=device))
    logits = torch.tensor([[[0.0, -torch.inf, 0.0]]])
    arguments = (logits, torch.tensor([[1]]), torch.tensor([2]))
    options: dict[str, Any] = {"is_greedy": None, "draft_probs": torch.full((1, 1, 3), 1 / 3) if probs else None}
    assert DefaultRejectionSamplingImpl().forward(*arguments, **options)[0].tolist() == [[1, 2]]
    assert RejectionSampling().forward(*arguments, **options)[0].tolist() == [[0, -1]]


# --- inputs -----------------------------------------------------------------------------------------------------------


def drawn(logits: Tensor, draft: Tensor, bonus: Tensor, **options: Any) -> Verified:
    torch.manual_seed(5)
    result: Verified = RejectionSampling().forward(logits, draft, bonus, **{"is_greedy": None, **options})
    return result


@pytest.mark.parametrize("probs", [False, True], ids=["no-draft-probs", "draft-probs"])
def test_inputs_are_not_changed(probs: bool) -> None:
    logits, draft, bonus = sampled_inputs(16, 3)
    inputs = [logits, draft, bonus, torch.arange(16) % 2 == 0, torch.softmax(-logits, -1)]
    before = [x.clone() for x in inputs]
    drawn(*inputs[:3], is_greedy=inputs[3], draft_probs=inputs[4] if probs else None)
    RejectionSampling().forward_greedy(draft, draft[:, :-1])
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


def test_strided_logits_give_what_contiguous_ones_give() -> None:
    logits, draft, bonus = sampled_inputs(16, 3)
    wide = torch.full((16, 4, 80), torch.inf)
    wide[:, :-1, ::2] = logits
    view = wide[:, :-1, ::2]
    assert not view.is_contiguous()
    assert same(drawn(view, draft, bonus), drawn(logits, draft, bonus))


def test_bf16_logits_give_what_their_values_in_fp32_give() -> None:
    logits, draft, bonus = sampled_inputs(64, 3)
    rounded = logits.bfloat16()
    got = drawn(rounded, draft, bonus)
    assert same(got, drawn(rounded.float(), draft, bonus))
    assert {0, 1, 2, 3} == set(got[1].tolist())


# --- host reads and the record ----------------------------------------------------------------------------------------


def both(sampler: RejectionSampling) -> list[Callable[[], Verified]]:
    logits, draft, bonus = sampled_inputs(8, 3)
    greedy = torch.arange(8) % 2 == 0
    return [
        lambda: sampler.forward(logits, draft, bonus, is_greedy=None),
        lambda: sampler.forward(logits, draft, bonus, is_greedy=greedy, draft_probs=torch.softmax(logits, -1)),
        lambda: sampler.forward_greedy(torch.cat((logits.argmax(-1), bonus[:, None]), 1), draft),
    ]


def test_nothing_is_read_on_the_host() -> None:
    for step in both(RejectionSampling()):
        with no_host_reads():
            step()


def test_each_form_is_counted() -> None:
    before = counters.snapshot()
    for step in both(RejectionSampling()):
        step()
    after = counters.snapshot()
    assert after["rejection_sample"] - before.get("rejection_sample", 0) == 2
    assert after["rejection_sample_greedy"] - before.get("rejection_sample_greedy", 0) == 1
