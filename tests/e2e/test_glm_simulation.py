"""GLM-5.3-Flash's simulated draft layer against its definition, and stock LMDeploy against the simulation."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer

from dlinfer_ext.e2e.glm_head import GlmMtpHead
from dlinfer_ext.e2e.simulation import accepted_drafts, greedy_needed, hidden_states, load_head, simulate

from . import engine
from .checkpoints import checkpoint, load_transformers, transformers_greedy
from .engine import assert_identical
from .glm_checkpoints import HELD_OUT_GLM, LAYERS, TRAINED_GLM, random_glm5_next

__all__ = ["checkpoint"]

PREFIX = f"model.language_model.layers.{LAYERS}."
PROMPTS = [list(b"%d: for x in range(%d):" % (i, i))[:20] for i in range(12, 20)]
DRAFTS, NEW = 4, 64
MOST_DRAFTS = 7
RIGHT = (156, 100, 145, 75, 203)  # four drafts of the trained checkpoint on the 16 held-out prompts


@cache
def trunk(path: Path) -> Any:
    return load_transformers(path).requires_grad_(False)


@cache
def head(path: Path) -> GlmMtpHead:
    loaded: GlmMtpHead = load_head(trunk(path), path)
    return loaded


@cache
def continuations(path: Path) -> list[list[int]]:
    return transformers_greedy(path, PROMPTS, greedy_needed(NEW, DRAFTS))


@cache
def held_out() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(HELD_OUT_GLM.read_text())
    return data


@cache
def trained_continuations() -> list[list[int]]:
    return transformers_greedy(TRAINED_GLM, held_out()["prompts"], greedy_needed(128, MOST_DRAFTS))


# ------------------------------------------------------------------------------------------------------ the definition


class WrittenOut:
    """The layer for one sequence in fp64: every norm, product and sum from the checkpoint's tensors by name."""

    def __init__(self, path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        self.w: dict[str, Tensor] = {
            name.removeprefix(PREFIX): t.double() for name, t in tensors.items() if name.startswith(PREFIX)
        }
        self.embedding: Tensor = tensors["model.language_model.embed_tokens.weight"].double()
        self.c = json.loads((path / "config.json").read_text())["text_config"]
        self.latents: list[Tensor] = []

    def norm(self, x: Tensor, name: str) -> Tensor:
        mean: Tensor = x.square().mean(-1, keepdim=True) + self.c["rms_norm_eps"]
        return x / mean.sqrt() * self.w[f"{name}.weight"]

    def mix(self, token: int, state: Tensor) -> Tensor:
        """The layer's input for a position: the token after it and the hidden state of it."""
        both = torch.cat([self.norm(self.embedding[token], "enorm"), self.norm(state.double(), "hnorm")])
        return self.w["eh_proj.weight"] @ both

    def choose(self, inputs: list[Tensor]) -> list[int]:
        """Positions that the last of the inputs sees: the best pools, then the open one."""
        pool, heads, dim = self.c["index_kpool"], self.c["index_n_heads"], self.c["index_head_dim"]
        x = self.norm(torch.stack(inputs), "input_layernorm")
        ix = "self_attn.indexer."
        key = F.layer_norm(
            x @ self.w[ix + "wk.weight"].T, [dim], self.w[ix + "k_norm.weight"], self.w[ix + "k_norm.bias"], 1e-6
        )
        gate = x @ self.w[ix + "index_kpool_compress_gate"].T
        q = self.w[ix + "wq_b.weight"] @ self.query_latent(x[-1])
        weight = self.w[ix + "weights_proj.weight"] @ x[-1] * heads**-0.5
        scores = []
        for first in range(0, len(inputs) // pool * pool, pool):
            part = slice(first, first + pool)
            share = (gate[part] + self.w[ix + "index_kpool_compress_ape"]).softmax(0)
            pooled = (share * key[part]).sum(0)
            scores.append(float(weight @ (q.view(heads, dim) @ pooled * dim**-0.5).relu()))
        best = sorted(range(len(scores)), key=lambda p: -scores[p])[: self.c["index_topk"] // pool]
        tokens = [p * pool + i for p in best for i in range(pool)]
        return tokens + list(range(len(inputs) // pool * pool, len(inputs)))

    def attend(self, x: Tensor, seen: list[int]) -> Tensor:
        heads, nope, value = self.c["num_attention_heads"], self.c["qk_nope_head_dim"], self.c["v_head_dim"]
        q = self.w["self_attn.q_b_proj.weight"] @ self.query_latent(x)
        kv = torch.stack([self.latents[i] for i in seen]) @ self.w["self_attn.kv_b_proj.weight"].T
        k, v = kv.view(len(seen), heads, nope + value).split([nope, value], -1)
        share = (torch.einsum("hd,thd->ht", q.view(heads, nope), k) * nope**-0.5).softmax(-1)
        return self.w["self_attn.o_proj.weight"] @ torch.einsum("ht,thd->hd", share, v).flatten()

    def expert(self, x: Tensor, name: str) -> Tensor:
        limit = self.c["swiglu_limit"]
        gate = (self.w[f"{name}.gate_proj.weight"] @ x).clamp(max=limit)
        up = (self.w[f"{name}.up_proj.weight"] @ x).clamp(-limit, limit)
        return self.w[f"{name}.down_proj.weight"] @ (gate * gate.sigmoid() * up)

    def feed_forward(self, x: Tensor) -> Tensor:
        score = (self.w["mlp.gate.weight"] @ x).sigmoid()
        best = (score + self.w["mlp.gate.e_score_correction_bias"]).topk(self.c["num_experts_per_tok"]).indices.tolist()
        total = sum(float(score[e]) for e in best)
        out = self.expert(x, "mlp.shared_experts")
        for e in best:
            out = out + self.c["routed_scaling_factor"] * score[e] / total * self.expert(x, f"mlp.experts.{e}")
        return out

    def draft(self, tokens: list[int], hidden: Tensor, drafts: int) -> list[Tensor]:
        """Hidden states of `drafts` steps from the last position of `hidden`; tokens[i + 1] follows position i."""
        inputs = [self.mix(token, state) for token, state in zip(tokens[1:], hidden, strict=False)]
        self.latents = [self.latent(x) for x in inputs]
        base, outputs, x = len(inputs) - 1, [], inputs[-1]
        chosen = self.choose(inputs)
        for k in range(1, drafts + 1):
            seen = chosen if base >= self.c["index_topk"] else list(range(base + k))
            y = x + self.attend(self.norm(x, "input_layernorm"), seen)
            y = y + self.feed_forward(self.norm(y, "post_attention_layernorm"))
            outputs.append(self.norm(y, "shared_head.norm"))
            x = self.mix(tokens[min(base + k + 1, len(tokens) - 1)], outputs[-1])
            self.latents.append(self.latent(x))
        return outputs

    def query_latent(self, x: Tensor) -> Tensor:
        return self.norm(self.w["self_attn.q_a_proj.weight"] @ x, "self_attn.q_a_layernorm")

    def latent(self, x: Tensor) -> Tensor:
        down = self.w["self_attn.kv_a_proj_with_mqa.weight"] @ self.norm(x, "input_layernorm")
        return self.norm(down, "self_attn.kv_a_layernorm")


@pytest.mark.parametrize("good", [True, False], ids=["good", "random"])
@pytest.mark.parametrize("base", [0, 5, 14, 15, 16, 17, 26, 39])
def test_head_unrolls_as_written_out(base: int, good: bool, checkpoint: Callable[..., Path]) -> None:
    """Sixteen tokens are chosen: up to base 15 the chain sees all, from 16 on what the first step chose."""
    path = checkpoint(random_glm5_next, good_mtp=good)
    drafts = 7
    tokens = torch.tensor([[(7 * i * i + 3 * i) % 256 for i in range(48)], [(5 * i * i + i) % 256 for i in range(48)]])
    hidden = hidden_states(trunk(path), tokens)
    batched = head(path).unroll(trunk(path), tokens, hidden, 40, drafts)
    assert len(batched) == drafts
    for row in range(2):
        wanted = WrittenOut(path).draft(tokens[row].tolist(), hidden[row, : base + 1], drafts)
        for got, right in zip(batched, wanted, strict=True):
            torch.testing.assert_close(got[row, base].double(), right, rtol=1e-4, atol=1e-4)


def test_free_running_chains_accept_as_many(checkpoint: Callable[..., Path]) -> None:
    """One request, drafted as an engine does: each draft feeds the next, and verification decides what stays."""
    path, layer = checkpoint(random_glm5_next), WrittenOut(checkpoint(random_glm5_next))
    lm_head = trunk(path).lm_head.weight.double()
    histogram = [0] * (DRAFTS + 1)
    for prompt, greedy in zip(PROMPTS[:4], continuations(path)[:4], strict=True):
        tokens, base, last = prompt + greedy, len(prompt) - 1, False
        states = hidden_states(trunk(path), torch.tensor([tokens]))[0]
        while not last:
            last = base + 2 - len(prompt) >= 24
            drafted: list[int] = []
            for k in range(1, DRAFTS + 1):
                state = layer.draft(tokens[: base + 2] + drafted, states[: base + 1], k)[-1]
                drafted.append(int((lm_head @ state).argmax()))
            accepted = next((k for k, t in enumerate(drafted) if t != tokens[base + 2 + k]), DRAFTS)
            histogram[accepted] += 1
            base += accepted + 1
    figures = simulate(trunk(path), head(path), PROMPTS[:4], continuations(path)[:4], DRAFTS, new_tokens=24)
    assert figures.histogram == tuple(histogram)
    assert sum(count > 0 for count in histogram) >= 4, histogram


def test_good_drafts_are_accepted_and_random_ones_are_not(checkpoint: Callable[..., Path]) -> None:
    first = {}
    for good in (True, False):
        path = checkpoint(random_glm5_next, good_mtp=good)
        tokens = torch.tensor([p + g for p, g in zip(PROMPTS, continuations(path), strict=True)])
        accepted = accepted_drafts(trunk(path), head(path), tokens, hidden_states(trunk(path), tokens), DRAFTS)
        first[good] = [float((accepted[:, -48:] >= k).float().mean()) for k in (1, 2, 3, 4)]
    assert 0.4 < first[True][0] < 0.9, first
    assert first[True][3] > 0.03, first
    assert first[False][0] < 0.05, first


# ------------------------------------------------------------------------------------------------------------- loading


def test_head_is_read_from_one_file_or_several(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    path = checkpoint(random_glm5_next)
    weights = load_file(path / "model.safetensors")
    mine = [name for name in sorted(weights) if name.startswith(PREFIX)]
    places = {name: f"part-{mine.index(name) % 2 if name in mine else 2}.safetensors" for name in weights}
    for file in set(places.values()):
        save_file({name: w for name, w in weights.items() if places[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    before = torch.get_rng_state()
    for place in (path, tmp_path):
        read = load_head(trunk(path), place).released()
        assert read.keys() == {name.removeprefix(PREFIX) for name in mine}
        assert all(torch.equal(read[name], weights[PREFIX + name]) for name in read)
    assert torch.equal(torch.get_rng_state(), before)


def test_checkpoint_without_a_head_or_with_another_is_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    path = checkpoint(random_glm5_next)
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    weights = load_file(path / "model.safetensors")
    for name in ("eh_proj.weight", "mlp.experts.3.up_proj.weight", "shared_head.norm.weight"):
        save_file({k: w for k, w in weights.items() if k != PREFIX + name}, tmp_path / "model.safetensors")
        with pytest.raises(RuntimeError, match=name.replace(".", r"\.")):
            load_head(trunk(path), tmp_path)
    for name in ("self_attn.extra.weight", "mlp.experts.8.up_proj.weight"):
        save_file(weights | {PREFIX + name: torch.zeros(2)}, tmp_path / "model.safetensors")
        with pytest.raises(RuntimeError, match=name.replace(".", r"\.")):
            load_head(trunk(path), tmp_path)
    save_file({k: w for k, w in weights.items() if not k.startswith(PREFIX)}, tmp_path / "model.safetensors")
    with pytest.raises(KeyError, match=r"no weights named model\.language_model\.layers\.8\."):
        load_head(trunk(path), tmp_path)


def test_drafts_that_each_choose_anew_are_refused(checkpoint: Callable[..., Path]) -> None:
    model = copy.copy(trunk(checkpoint(random_glm5_next)))
    model.config = copy.deepcopy(model.config)
    model.config.text_config.index_share_for_mtp_iteration = False
    with pytest.raises(ValueError, match="index_share_for_mtp_iteration is not set"):
        GlmMtpHead(model)


def test_head_of_a_trunk_whose_last_layer_takes_its_choice(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint(random_glm5_next, shared_choice=True)
    tokens = torch.tensor([[(7 * i * i + 3 * i) % 256 for i in range(28)]])
    hidden = hidden_states(trunk(path), tokens)
    batched = head(path).unroll(trunk(path), tokens, hidden, 24, 3)
    wanted = WrittenOut(path).draft(tokens[0].tolist(), hidden[0, :24], 3)
    for got, right in zip(batched, wanted, strict=True):
        torch.testing.assert_close(got[0, -1].double(), right, rtol=1e-4, atol=1e-4)


def test_new_head_starts_from_the_trunk_and_shares_nothing_with_it(checkpoint: Callable[..., Path]) -> None:
    model = trunk(checkpoint(random_glm5_next))
    made, layer = GlmMtpHead(model), model.model.language_model.layers[LAYERS - 1]
    for part in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"):
        mine, theirs = getattr(made, part).state_dict(), getattr(layer, part).state_dict()
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert all(mine[name].data_ptr() != theirs[name].data_ptr() for name in mine)
    assert all(p.requires_grad for p in made.parameters())


# -------------------------------------------------------------------------------------------- what the histogram shows


class PreNormRecycled(GlmMtpHead):
    """The last norm is taken for the output projection only."""

    def unroll(self, *args: Any) -> list[Tensor]:
        norm, self.shared_head["norm"] = self.shared_head["norm"], torch.nn.Identity()
        states = super().unroll(*args)
        self.shared_head["norm"] = norm
        return [norm(state) for state in states]


class ZeroRecycled(GlmMtpHead):
    def forward(self, model: Any, tokens: Tensor, state: Tensor, chosen: Any, cache: Any) -> tuple[Tensor, Tensor]:
        return super().forward(model, tokens, state * (chosen is None), chosen, cache)


class TrunkRecycled(GlmMtpHead):
    """Every step of a chain takes the trunk's hidden state at the base."""

    def forward(self, model: Any, tokens: Tensor, state: Tensor, chosen: Any, cache: Any) -> tuple[Tensor, Tensor]:
        if chosen is None:
            self.trunk_state = state
        return super().forward(model, tokens, self.trunk_state, chosen, cache)


class TokenShifted(GlmMtpHead):
    """A position is given its own token instead of the one after it."""

    def unroll(self, model: Any, tokens: Tensor, *rest: Any) -> list[Tensor]:
        return super().unroll(model, tokens.roll(1, 1), *rest)


class ChoiceIgnored(GlmMtpHead):
    """Every step sees all tokens, its chain's too."""

    def forward(self, model: Any, tokens: Tensor, state: Tensor, chosen: Any, cache: Any) -> tuple[Tensor, Tensor]:
        step = 0 if chosen is None else cache.layers[0].get_seq_length() // tokens.size(1)
        base = torch.arange(tokens.size(1))
        context = torch.where(base <= base[:, None], base, -1)
        own = torch.stack([base + tokens.size(1) * k for k in range(step + 1)], -1)
        everything = torch.cat([context, own], -1).expand(len(tokens), -1, -1)
        return super().forward(model, tokens, state, everything, cache)


class ChainSeen(GlmMtpHead):
    """A later step sees itself and the steps before it beside the first step's choice, at every base."""

    seen_up_to = 1 << 20  # tokens

    def unroll(self, *args: Any) -> list[Tensor]:
        whole, self.config = self.config, copy.copy(self.config)
        self.config.index_topk = self.seen_up_to
        states = super().unroll(*args)
        self.config = whole
        return states


class ChainHidden(ChainSeen):
    """A later step never sees itself, not even where the first had nothing to choose."""

    seen_up_to = 0


def nothing(mtp: GlmMtpHead) -> None:
    """Leave the weights as they are."""


def halves_of_eh_proj_swapped(mtp: GlmMtpHead) -> None:
    mtp.eh_proj.weight.copy_(mtp.eh_proj.weight.roll(mtp.eh_proj.out_features, 1))


def input_norms_swapped(mtp: GlmMtpHead) -> None:
    mtp.enorm, mtp.hnorm = mtp.hnorm, mtp.enorm


def experts_shifted(mtp: GlmMtpHead) -> None:
    for weight in mtp.mlp.experts.parameters():
        weight.copy_(weight.roll(1, 0))


def pool_positions_forgotten(mtp: GlmMtpHead) -> None:
    mtp.self_attn.indexer.index_kpool_compress_ape.zero_()


FAULTS: dict[str, tuple[type[GlmMtpHead], Callable[[GlmMtpHead], None]]] = {
    "pre-norm recycled": (PreNormRecycled, nothing),
    "zero recycled": (ZeroRecycled, nothing),
    "trunk recycled": (TrunkRecycled, nothing),
    "token shifted": (TokenShifted, nothing),
    "choice ignored": (ChoiceIgnored, nothing),
    "chain seen": (ChainSeen, nothing),
    "halves of eh_proj swapped": (GlmMtpHead, halves_of_eh_proj_swapped),
    "input norms swapped": (GlmMtpHead, input_norms_swapped),
    "experts shifted": (GlmMtpHead, experts_shifted),
    "pool positions forgotten": (GlmMtpHead, pool_positions_forgotten),
}


def as_head(kind: type[GlmMtpHead]) -> GlmMtpHead:
    """Return the trained head as another kind."""
    made = kind(trunk(TRAINED_GLM))
    made.load_state_dict(head(TRAINED_GLM).state_dict())
    return made


@pytest.mark.parametrize("name", ["none", *FAULTS])
def test_fault_in_the_head_changes_the_histogram(name: str) -> None:
    kind, change = FAULTS.get(name, (GlmMtpHead, nothing))
    model = trunk(TRAINED_GLM)
    faulty = as_head(kind)
    with torch.no_grad():
        change(faulty)
    got = simulate(model, faulty, held_out()["prompts"], trained_continuations(), DRAFTS, new_tokens=128)
    assert (got.histogram == RIGHT) == (name == "none"), got
    if name == "none":
        assert min(got.steps_by_context.values()) > 100, "both kinds of context must occur"


# ---------------------------------------------------------------------------------------------------------- the engine


def engine_histogram(result: dict[str, Any], drafts: int) -> tuple[int, ...]:
    assert set(result["accepted"]) <= {str(n) for n in range(drafts + 1)}
    return tuple(result["accepted"].get(str(n), 0) for n in range(drafts + 1))


CASES = [(1, 512), (2, 32), (4, 512), (4, 32), (7, 32)]


@pytest.fixture(scope="module")
def measured() -> dict[tuple[int, int], dict[str, Any]]:
    """Two batches of eight prompts of 64 tokens by drafts and chunk, all engines in one process."""
    text = held_out()["text"]
    rounds = [[{"text": t, "new": 128} for t in batch] for batch in (text[:8], text[8:])]
    jobs = [
        {
            "model": str(TRAINED_GLM),
            "drafts": drafts,
            "engine": {"num_gpu_blocks": 64, "max_prefill_token_num": chunk},
            "rounds": rounds,
        }
        for drafts, chunk in CASES
    ]
    return dict(zip(CASES, engine.run_many(jobs, timeout_s=500), strict=True))


@pytest.mark.lmdeploy
@pytest.mark.xdist_group("glm_simulation")
@pytest.mark.parametrize(("drafts", "chunk"), CASES)
def test_engine_accepts_exactly_the_simulated_drafts(
    drafts: int, chunk: int, measured: dict[tuple[int, int], dict[str, Any]]
) -> None:
    result = measured[drafts, chunk]
    assert_identical(result, held_out()["greedy"])
    assert result["counters"]["verify_steps"] > 0
    assert result["counters"]["kpool_select"] > 0
    assert (result["counters"].get("prefill_rows_with_history", 0) > 0) == (chunk == 32)
    assert (result["counters"].get("shared_choice", 0) > 0) == (drafts > 1)
    want = simulate(
        trunk(TRAINED_GLM), head(TRAINED_GLM), held_out()["prompts"], trained_continuations(), drafts, new_tokens=128
    )
    assert engine_histogram(result, drafts) == want.histogram


@pytest.mark.lmdeploy
def test_engine_accepts_exactly_the_simulated_drafts_of_prompts_of_different_length() -> None:
    """One batch of prompts of 1 to 192 tokens: some have nothing to choose yet while others in the batch choose."""
    t = held_out()["text"]
    prompts = [t[0] + t[1], t[2][:7], t[3][:1], t[4][:90], t[5] + t[6] + t[7], t[8][:40]]
    tokenizer = AutoTokenizer.from_pretrained(TRAINED_GLM)
    ids = [tokenizer(prompt).input_ids for prompt in prompts]
    assert len({len(i) for i in ids}) == len(ids)
    assert sum(len(i) < 24 for i in ids) >= 2
    greedy = transformers_greedy(TRAINED_GLM, ids, greedy_needed(48, DRAFTS))
    result = engine.run(TRAINED_GLM, [prompts], tokens=48, drafts=DRAFTS, max_prefill_token_num=32)
    assert_identical(result, [g[:48] for g in greedy])
    assert result["counters"]["prefill_rows_with_history"] > 0
    want = simulate(trunk(TRAINED_GLM), head(TRAINED_GLM), ids, greedy, DRAFTS, new_tokens=48)
    assert engine_histogram(result, DRAFTS) == want.histogram
    for kind in (ChainSeen, ChainHidden):
        other = simulate(trunk(TRAINED_GLM), as_head(kind), ids, greedy, DRAFTS, new_tokens=48)
        assert other.histogram != want.histogram, "the prompts do not show which tokens a chain sees"
