"""A request's draws depend on its seed and its positions alone: not on its batch, nor on how many drafts were kept."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dlinfer_ext.framework.lmdeploy.rejection_sampling import RejectionSampling
from dlinfer_ext.framework.lmdeploy.seeds import MultinomialSampling, patch_spec_agent, within_policy
from dlinfer_ext.kernels.rejection_sampling import eager
from dlinfer_ext.testing import no_host_reads

SCORES = torch.tensor([0.5, 0.3, 0.15, 0.05])
IDS = torch.tensor([7, 2, 9, 4])


def draw(seeds: Tensor | None, offsets: Tensor | None, rows: int) -> Tensor:
    with no_host_reads():
        return MultinomialSampling().forward(SCORES.expand(rows, 4), seeds, offsets, IDS.expand(rows, 4))


@pytest.mark.parametrize("seeded", [True, False])
def test_tokens_are_drawn_by_their_probability(seeded: bool) -> None:
    rows = 20_000
    torch.manual_seed(3)
    seeds = torch.full((rows,), 7) if seeded else None
    got = Counter(draw(seeds, torch.arange(rows), rows).tolist())
    chi = sum((got[int(t)] - rows * float(p)) ** 2 / (rows * float(p)) for t, p in zip(IDS, SCORES, strict=True))
    assert chi <= 30.7, got  # 3 degrees of freedom, one in a million


def test_a_row_alone_draws_what_it_draws_in_a_batch() -> None:
    seeds, offsets = torch.arange(64) % 5, torch.arange(64)
    together = draw(seeds, offsets, 64)
    alone = torch.cat([draw(seeds[i : i + 1], offsets[i : i + 1], 1) for i in range(64)])
    assert torch.equal(together, alone)
    assert len(set(together.tolist())) == 4


def test_more_candidates_of_probability_zero_change_nothing() -> None:
    """Another request's larger top_k widens the row."""
    seeds, offsets = torch.full((64,), 7), torch.arange(64)
    wide, ids = torch.nn.functional.pad(SCORES, (0, 600)).expand(64, -1), torch.arange(604).expand(64, -1)
    got = MultinomialSampling().forward(wide, seeds, offsets, ids)
    assert torch.equal(IDS[got], draw(seeds, offsets, 64))


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ({"max_top_k": 2, "top_k": 2}, [0, 2]),
        ({"max_top_k": 3, "top_k": 1}, [0]),  # beside a request with a larger one
        ({"max_top_k": 0, "top_p": 0.8}, [0, 2]),  # 0.5 and 0.3 reach it
        ({"max_top_k": 0, "min_p": 0.4}, [0, 2]),  # at least 0.4 of 0.5
        ({"max_top_k": 0}, [0, 1, 2, 3]),
    ],
)
def test_the_policy_holds_at_the_draft_positions(policy: dict[str, float], kept: list[int]) -> None:
    logits = torch.tensor([0.5, 0.15, 0.3, 0.05]).log().expand(2, 3, 4).contiguous()
    before = logits.clone()
    inputs = SimpleNamespace(
        max_top_k=policy["max_top_k"],
        **{n: torch.full((6,), policy[n]) if n in policy else None for n in ("top_k", "top_p", "min_p")},
    )
    with no_host_reads():
        got = within_policy(logits, inputs)
    assert torch.equal(logits, before)
    assert torch.equal(got[:, -1], before[:, -1]), "LMDeploy filters the bonus position itself"
    rest = [i for i in range(4) if i not in kept]
    assert torch.equal(got[:, :-1, kept], before[:, :-1, kept])
    assert bool((got[:, :-1, rest] == -torch.inf).all())


@dataclasses.dataclass
class Inputs:
    """What is read of LMDeploy's sampling inputs; the policy is every token's."""

    random_seeds: Tensor | None
    random_offsets: Tensor | None
    max_top_k: int = 0
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None


def patched() -> tuple[Any, list[Inputs], list[Any]]:
    """Return (module, what the agent's sampling got, what the sampler's `_impl` held while it ran)."""
    agent_got: list[Inputs] = []
    held: list[Any] = []

    class SpecModelAgent:
        async def _rejection_sampling(self, model_inputs: Any, extra_inputs: Any, sampling_inputs: Any) -> str:
            agent_got.append(sampling_inputs)
            return "result"

    class RejectionSampler:
        def __init__(self, impl: Any) -> None:
            self._impl = impl

        def forward(self, logits: Tensor, drafts: Tensor, inputs: Inputs, draft_probs: Any = None) -> str:
            held.append(getattr(self._impl, "_seeds", "not ours"))
            return "sampled"

    module = SimpleNamespace(SpecModelAgent=SpecModelAgent, RejectionSampler=RejectionSampler)
    patch_spec_agent(module)
    return module, agent_got, held


def test_offsets_of_a_verify_step_are_the_positions_of_its_tokens() -> None:
    module, got, _ = patched()
    given = Inputs(torch.tensor([7, 8]), torch.tensor([100, 100]))
    model = SimpleNamespace(is_decoding=True, history_lengths=torch.tensor([5, 40]))
    assert asyncio.run(module.SpecModelAgent()._rejection_sampling(model, None, given)) == "result"
    assert got[0].random_offsets is not None
    assert got[0].random_offsets.tolist() == [6, 41]
    assert given.random_offsets is not None
    assert given.random_offsets.tolist() == [100, 100], "the engine's own were changed"


@pytest.mark.parametrize(
    ("decoding", "given"),
    [(False, Inputs(torch.tensor([7]), torch.tensor([5]))), (True, Inputs(None, torch.tensor([5]))), (True, None)],
    ids=["prompt", "greedy", "dummy"],
)
def test_other_steps_are_passed_on(decoding: bool, given: Inputs | None) -> None:
    module, got, _ = patched()
    model = SimpleNamespace(is_decoding=decoding, history_lengths=torch.tensor([5]))
    asyncio.run(module.SpecModelAgent()._rejection_sampling(model, None, given))
    assert got == [given] or got[0] is given


def test_the_sampler_gets_one_seed_and_position_per_request_while_it_runs() -> None:
    module, _, held = patched()
    impl = RejectionSampling()
    expanded = Inputs(torch.tensor([7, 7, 7, 8, 8, 8]), torch.tensor([6, 7, 8, 41, 42, 43]))
    sampler = module.RejectionSampler(impl)
    assert sampler.forward(torch.zeros(2, 3, 4), torch.zeros(2, 2), expanded) == "sampled"
    assert [x.tolist() for x in held[0]] == [[7, 8], [6, 41]]
    assert impl._seeds is None
    sampler.forward(torch.zeros(2, 3, 4), torch.zeros(2, 2), Inputs(None, None))
    assert held[1] is None
    module.RejectionSampler(object()).forward(torch.zeros(2, 3, 4), torch.zeros(2, 2), expanded)
    assert held[2] == "not ours"


def emitted(seed: int, count_steps: bool) -> list[int]:
    """Emit 40 tokens with two drafts a step, each the likelier of two ids; offsets by step or by position."""
    sampler, steps = RejectionSampling(), 0
    tokens: list[int] = []
    row = torch.tensor([0.6, 0.4])
    while len(tokens) < 40:
        offset = torch.tensor([steps if count_steps else len(tokens)])
        draw_of_bonus = eager.draws(torch.tensor([seed]), offset + 2, 1)[0, 0, 1]
        bonus = (draw_of_bonus >= 0.6).long()[None]
        with sampler.seeded(torch.tensor([seed]), offset):
            out, _, _ = sampler.forward(
                row.log().expand(1, 2, 2), torch.zeros((1, 2), dtype=torch.int64), bonus, is_greedy=None
            )
        tokens += [t for t in out[0].tolist() if t >= 0]
        steps += 1
    return tokens[:40]


def test_offsets_that_count_steps_would_tie_tokens_to_earlier_ones() -> None:
    """Negative control of the positions: LMDeploy's offsets use a draw again after a step that kept drafts."""

    def sigmas(count_steps: bool) -> float:
        """Return how far tokens at distance 1 to 3 are from being equal by chance alone, at most."""
        texts = [emitted(seed, count_steps) for seed in range(100)]
        worst = 0.0
        for distance in (1, 2, 3):
            pairs = [(a, b) for text in texts for a, b in zip(text, text[distance:], strict=False)]
            share = sum(a == b for a, b in pairs) / len(pairs)
            worst = max(worst, abs(share - 0.52) / (0.52 * 0.48 / len(pairs)) ** 0.5)
        return worst

    assert sigmas(count_steps=False) < 4
    assert sigmas(count_steps=True) > 8
