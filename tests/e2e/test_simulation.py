"""The simulated draft head against its definition, what its exact histogram can see, and stock LMDeploy against it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, DynamicCache

from dlinfer_ext.e2e.simulation import (
    Acceptance,
    MtpHead,
    by_context,
    greedy_needed,
    hidden_states,
    load_head,
    simulate,
    summarise,
    walk,
)

from . import engine
from .checkpoints import HELD_OUT, TRAINED, load_transformers, transformers_greedy
from .engine import assert_identical

NEW, MOST_DRAFTS = 128, 7
RIGHT = (130, 90, 88, 52, 267)  # four drafts on the 16 held-out prompts


@cache
def trunk() -> Any:
    return load_transformers(TRAINED).requires_grad_(False)


@cache
def held_out() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(HELD_OUT.read_text(encoding="utf-8"))
    return data


@cache
def continuations() -> list[list[int]]:
    return transformers_greedy(TRAINED, held_out()["prompts"], greedy_needed(NEW, MOST_DRAFTS))


@cache
def head() -> MtpHead:
    loaded: MtpHead = load_head(trunk(), TRAINED)
    return loaded


@cache
def simulated(drafts: int) -> Acceptance:
    return simulate(trunk(), head(), held_out()["prompts"], continuations(), drafts, new_tokens=NEW)


# ------------------------------------------------------------------------------------------------------ the definition


@pytest.mark.parametrize("base", [0, 5, 24])
def test_head_unrolls_like_an_engine(base: int) -> None:
    """All bases at once give what a cache gives that holds one sequence and drafts from its last position."""
    drafts, mtp, embed = MOST_DRAFTS, head(), trunk().model.language_model
    tokens = torch.tensor(held_out()["excerpt"][:1])[:, :32]
    hidden = hidden_states(trunk(), tokens)
    batched = mtp.unroll(trunk(), tokens, hidden, 25, drafts)

    def layer(state: Tensor, first: int, position: int, cache: DynamicCache, causal: bool) -> Tensor:
        length = state.shape[1]
        embedding = mtp.pre_fc_norm_embedding(embed.embed_tokens(tokens[:, first : first + length]))
        x = mtp.fc(torch.cat([embedding, mtp.pre_fc_norm_hidden(state)], -1))
        rotary = embed.rotary_emb(x, torch.arange(position, position + length).view(1, 1, -1))
        mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None] if causal else None
        output: Tensor = mtp.norm(mtp.layers[0](x, rotary, attention_mask=mask, cache=cache))
        return output

    cache = DynamicCache()
    state = layer(hidden[:, : base + 1], 1, 0, cache, causal=True)[:, -1:]
    for k in range(1, drafts + 1):
        torch.testing.assert_close(batched[k - 1][:, base : base + 1], state, rtol=1e-4, atol=1e-4)
        if k < drafts:
            state = layer(state, base + k + 1, base + k, cache, causal=False)


def test_free_running_chains_accept_as_many() -> None:
    """One request, drafted as an engine does: each draft feeds the next, and verification decides what stays."""
    mtp, drafts, new = head(), 3, 24
    prompt, greedy = held_out()["prompts"][0], continuations()[0]
    tokens = prompt + greedy
    states = hidden_states(trunk(), torch.tensor([tokens]))
    base, histogram, last = len(prompt) - 1, [0] * (drafts + 1), False
    while not last:
        last = base + 2 - len(prompt) >= new
        cache, mask = DynamicCache(), torch.ones(base + 1, base + 1, dtype=torch.bool).tril()
        state = mtp(trunk(), torch.tensor([tokens[1 : base + 2]]), states[:, : base + 1], 0, mask, cache)[:, -1:]
        drafted = [int(trunk().lm_head(state).argmax())]
        for k in range(1, drafts):
            state = mtp(trunk(), torch.tensor([[drafted[-1]]]), state, base + k, None, cache)
            drafted.append(int(trunk().lm_head(state).argmax()))
        accepted = next((k for k, t in enumerate(drafted) if t != tokens[base + 2 + k]), drafts)
        histogram[accepted] += 1
        base += accepted + 1
    assert simulate(trunk(), mtp, [prompt], [greedy], drafts, new_tokens=new).histogram == tuple(histogram)
    assert sum(count > 0 for count in histogram) >= 3, histogram


def test_walk_counts_the_verification_after_the_last_token() -> None:
    accepted = [9, 9, 1, 9, 0, 2]  # by base position; the prompt has three tokens, so the first base is 2
    assert walk(accepted, 3, 4, 0) == [(2, 1), (4, 0)]
    assert walk(accepted, 3, 4, 1) == [(2, 1), (4, 0), (5, 2)]
    assert walk(accepted, 3, 3, 1) == [(2, 1), (4, 0)]
    assert walk(accepted, 3, 1, 0) == []  # the prompt gives the only token
    assert walk(accepted, 3, 1, 1) == [(2, 1)]


@pytest.mark.parametrize("drafts", [1, 2, 7])
def test_needed_length_is_the_least_that_does(drafts: int) -> None:
    """With every draft accepted a request that lacks one token before its last verification overshoots the most."""
    for new in range(1, 20):
        bases = 3 + greedy_needed(new, drafts) - drafts - 1
        assert walk([drafts] * bases, 3, new, 1)
        if new > 1 and (new - 2) % (drafts + 1) == 0:
            with pytest.raises(IndexError):
                walk([drafts] * (bases - 1), 3, new, 1)


def test_context_is_repeated_where_its_four_tokens_came_before() -> None:
    tokens = [1, 2, 3, 4, 5, 1, 2, 3, 4, 9]
    # up to the token after base 2: 1 2 3 4, new; base 6: 5 1 2 3, new; base 7: 1 2 3 4 again; base 0: less than four
    chains = [[(2, 1), (6, 2), (7, 3), (0, 4)]]
    assert by_context([tokens], chains) == {"novel": [1, 2, 4], "repeated": [3]}
    figures = summarise([tokens], chains, 4)
    assert figures == Acceptance(
        histogram=(0, 1, 1, 1, 1),
        reach=(1.0, 0.75, 0.5, 0.25),
        mean=2.5,
        mean_by_context={"novel": 7 / 3, "repeated": 3.0},
        steps_by_context={"novel": 3, "repeated": 1},
        verify_rows=4,
        tokens_per_step=3.5,
    )


def test_prompts_of_different_length_are_simulated_as_each_alone() -> None:
    rows = [(3, 64, 40), (4, 1, 25), (5, 3, 40), (6, 64, 25), (7, 64, 40)]
    prompts = [held_out()["prompts"][i][:length] for i, length, _ in rows]
    new = [n for *_, n in rows]
    greedy = transformers_greedy(TRAINED, prompts, greedy_needed(40, 3))

    def run(which: slice) -> tuple[int, ...]:
        return simulate(trunk(), head(), prompts[which], greedy[which], 3, new_tokens=new[which]).histogram

    alone = [run(slice(i, i + 1)) for i in range(len(rows))]
    assert run(slice(None)) == tuple(map(sum, zip(*alone, strict=True)))
    assert len(set(alone)) > 2


def test_wrong_arguments_are_named() -> None:
    prompts, greedy = held_out()["prompts"][:1], [continuations()[0][: greedy_needed(20, 2) - 1]]
    with pytest.raises(ValueError, match="request 0: the greedy continuation has 23 tokens; wanted 24"):
        simulate(trunk(), head(), prompts, greedy, 2, new_tokens=20)
    with pytest.raises(ValueError, match="drafts is 0"):
        simulate(trunk(), head(), prompts, greedy, 0, new_tokens=20)
    with pytest.raises(ValueError, match="extra is 2"):
        simulate(trunk(), head(), prompts, greedy, 1, new_tokens=20, extra=2)


def test_head_is_read_from_one_file_or_several(tmp_path: Path) -> None:
    weights = load_file(TRAINED / "model.safetensors")
    mine = [name for name in sorted(weights) if name.startswith("mtp.")]
    places = {name: f"part-{mine.index(name) % 2 if name in mine else 2}.safetensors" for name in weights}
    for file in set(places.values()):
        save_file({name: w for name, w in weights.items() if places[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    before = torch.get_rng_state()
    state, want = load_head(trunk(), tmp_path).state_dict(), head().state_dict()
    assert state.keys() == want.keys() == {name.removeprefix("mtp.") for name in mine}
    assert all(torch.equal(state[name], weights[f"mtp.{name}"]) for name in state)
    assert torch.equal(torch.get_rng_state(), before)


def test_checkpoint_without_a_head_is_refused(tmp_path: Path) -> None:
    shutil.copytree(TRAINED, tmp_path, dirs_exist_ok=True)
    weights = load_file(TRAINED / "model.safetensors")
    less = {name: w for name, w in weights.items() if name != "mtp.fc.weight"}
    save_file(less, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"fc\.weight"):
        load_head(trunk(), tmp_path)
    save_file({name: w for name, w in less.items() if not name.startswith("mtp.")}, tmp_path / "model.safetensors")
    with pytest.raises(KeyError, match="no weights named mtp"):
        load_head(trunk(), tmp_path)


# -------------------------------------------------------------------------------------------- what the histogram shows


class PreNormRecycled(MtpHead):
    """The last norm is taken for the output projection only."""

    def unroll(self, *args: Any) -> list[Tensor]:
        norm, self.norm = self.norm, nn.Identity()
        states = super().unroll(*args)
        self.norm = norm
        return [norm(state) for state in states]


class PositionNotAdvanced(MtpHead):
    def forward(self, model: Any, tokens: Tensor, state: Tensor, position: int, *rest: Any) -> Tensor:
        return super().forward(model, tokens, state, 0, *rest)


class ZeroRecycled(MtpHead):
    def forward(self, model: Any, tokens: Tensor, state: Tensor, position: int, *rest: Any) -> Tensor:
        return super().forward(model, tokens, state * (position == 0), position, *rest)


class TrunkRecycled(MtpHead):
    """Every step of a chain takes the trunk's hidden state at the base."""

    def forward(self, model: Any, tokens: Tensor, state: Tensor, position: int, *rest: Any) -> Tensor:
        if position == 0:
            self.trunk_state = state
        return super().forward(model, tokens, self.trunk_state, position, *rest)


class ChainKeysLost(MtpHead):
    """A later step sees the first step's keys and its own, but not those between."""

    def forward(
        self, model: Any, tokens: Tensor, state: Tensor, position: int, mask: Tensor | None, cache: Any
    ) -> Tensor:
        assert mask is not None
        bases = tokens.shape[1]
        if position > 1:
            mask = mask.clone()
            mask[:, bases : position * bases] = False
        return super().forward(model, tokens, state, position, mask, cache)


class TokenShifted(MtpHead):
    """A position is given its own token instead of the one after it."""

    def unroll(self, model: Any, tokens: Tensor, *rest: Any) -> list[Tensor]:
        return super().unroll(model, tokens.roll(1, 1), *rest)


def last_norm_without_one(mtp: MtpHead) -> None:
    mtp.norm.weight -= 1


def halves_of_fc_swapped(mtp: MtpHead) -> None:
    mtp.fc.weight.copy_(mtp.fc.weight.roll(mtp.fc.out_features, 1))


def nothing(mtp: MtpHead) -> None:
    """Leave the weights as they are."""


FAULTS: dict[str, tuple[type[MtpHead], Callable[[MtpHead], None]]] = {
    "pre-norm recycled": (PreNormRecycled, nothing),
    "position not advanced": (PositionNotAdvanced, nothing),
    "zero recycled": (ZeroRecycled, nothing),
    "trunk recycled": (TrunkRecycled, nothing),
    "chain keys lost": (ChainKeysLost, nothing),
    "token shifted": (TokenShifted, nothing),
    "last norm without + 1": (MtpHead, last_norm_without_one),
    "halves of fc swapped": (MtpHead, halves_of_fc_swapped),
}


def test_four_drafts_are_accepted_as_recorded() -> None:
    figures = simulated(4)
    assert figures.histogram == RIGHT
    assert figures.verify_rows == 627
    # A checkpoint that is trained again must reach .55 .42 .34 .24 and a mean of 1.6.
    assert all(got >= least for got, least in zip(figures.reach, (0.60, 0.50, 0.42, 0.30), strict=True))
    assert figures.mean >= 1.8
    assert min(figures.steps_by_context.values()) > 100, "both kinds of context must occur"


@pytest.mark.parametrize("name", ["none", *FAULTS])
def test_fault_in_the_head_changes_the_histogram(name: str) -> None:
    kind, change = FAULTS.get(name, (MtpHead, nothing))
    with torch.no_grad():
        faulty = kind(trunk())
        faulty.load_state_dict(head().state_dict())
        change(faulty)
        got = simulate(trunk(), faulty, held_out()["prompts"], continuations(), 4, new_tokens=NEW)
    assert (got.histogram == RIGHT) == (name == "none"), got


# ---------------------------------------------------------------------------------------------------------- the engine


def engine_histogram(result: dict[str, Any], drafts: int) -> tuple[int, ...]:
    assert set(result["accepted"]) <= {str(n) for n in range(drafts + 1)}
    return tuple(result["accepted"].get(str(n), 0) for n in range(drafts + 1))


@pytest.fixture(scope="module")
def measured() -> dict[tuple[int, int], dict[str, Any]]:
    """Two batches of eight prompts of 64 tokens by drafts and chunk, all engines in one process."""
    text = held_out()["text"]
    rounds = [[{"text": t, "new": NEW} for t in batch] for batch in (text[:8], text[8:])]
    cases = [(drafts, chunk) for drafts in (1, 2, 3, 4, 7) for chunk in (512, 32)]
    jobs = [
        {
            "model": str(TRAINED),
            "drafts": drafts,
            "engine": {"num_gpu_blocks": 64, "max_prefill_token_num": chunk},
            "rounds": rounds,
        }
        for drafts, chunk in cases
    ]
    return dict(zip(cases, engine.run_many(jobs, timeout_s=400), strict=True))


@pytest.mark.lmdeploy
@pytest.mark.xdist_group("simulation")
@pytest.mark.parametrize("chunk", [512, 32], ids=["one-shot", "chunked"])
@pytest.mark.parametrize("drafts", [1, 2, 3, 4, 7])
def test_engine_accepts_exactly_the_simulated_drafts(
    drafts: int, chunk: int, measured: dict[tuple[int, int], dict[str, Any]]
) -> None:
    result = measured[drafts, chunk]
    assert_identical(result, held_out()["greedy"])
    assert result["counters"]["verify_steps"] > 0
    assert (result["counters"].get("prefill_rows_with_history", 0) > 0) == (chunk == 32)
    assert engine_histogram(result, drafts) == simulated(drafts).histogram


@pytest.mark.lmdeploy
def test_engine_accepts_exactly_the_simulated_drafts_of_prompts_of_different_length() -> None:
    """One batch of prompts of 1 to 192 tokens, in chunks of 32: requests end at different steps."""
    t = held_out()["text"]
    prompts = [t[0] + t[1], t[2][:7], t[3][:1], t[4][:90], t[5] + t[6] + t[7], t[8][:40]]
    tokenizer = AutoTokenizer.from_pretrained(TRAINED)
    ids = [tokenizer(prompt).input_ids for prompt in prompts]
    assert len({len(i) for i in ids}) == len(ids)
    greedy = transformers_greedy(TRAINED, ids, greedy_needed(48, 4))
    result = engine.run(TRAINED, [prompts], tokens=48, drafts=4, max_prefill_token_num=32)
    assert_identical(result, [g[:48] for g in greedy])
    assert result["counters"]["prefill_rows_with_history"] > 0
    want = simulate(trunk(), head(), ids, greedy, 4, new_tokens=48)
    assert engine_histogram(result, 4) == want.histogram
    assert want.histogram != simulate(trunk(), head(), ids, greedy, 4, new_tokens=48, extra=0).histogram
