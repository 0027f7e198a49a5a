"""The trained tiny GLM-5.3-Flash: its layout, and what TRAINING.json and the held-out prompts say of it."""

from __future__ import annotations

import json
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import AutoTokenizer
from transformers.models.glm5_next import modeling_glm5_next as modeling

from dlinfer_ext.e2e.simulation import load_head

from .checkpoints import (
    load_transformers,
    script,
    transformers_greedy,
    transformers_greedy_and_gap,
    transformers_logits,
)
from .glm_checkpoints import HELD_OUT_GLM, TRAINED_GLM, changed

__all__ = ["script"]

DRAFT = "model.language_model.layers.4."


@cache
def training() -> dict[str, Any]:
    report: dict[str, Any] = json.loads((TRAINED_GLM / "TRAINING.json").read_text())
    return report


@cache
def held_out() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(HELD_OUT_GLM.read_text())
    return data


def test_layout() -> None:
    assert sum(f.stat().st_size for f in TRAINED_GLM.iterdir()) <= 6e6
    config = json.loads((TRAINED_GLM / "config.json").read_text())
    assert config["architectures"] == ["Glm5NextForConditionalGeneration"]
    assert config["model_type"] == "glm5_next"
    assert config["text_config"]["layer_types"] == ["linear_attention"] * 3 + ["deepseek_sparse_attention"]
    assert config["text_config"]["num_nextn_predict_layers"] == 1
    weights = load_file(TRAINED_GLM / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    model, info = transformers.Glm5NextForConditionalGeneration.from_pretrained(TRAINED_GLM, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "mismatched_keys", "error_msgs")), info
    assert info["unexpected_keys"]
    assert all(name.startswith(DRAFT) for name in info["unexpected_keys"]), info
    # Loading refuses a draft layer with one weight more or less.
    assert {DRAFT + name for name in load_head(model, TRAINED_GLM).released()} == {
        name for name in weights if name.startswith(DRAFT)
    }


def test_tokenizer_as_loaded_and_as_saved_agree() -> None:
    auto, file = AutoTokenizer.from_pretrained(TRAINED_GLM), Tokenizer.from_file(str(TRAINED_GLM / "tokenizer.json"))
    text = (Path(sysconfig.get_paths()["stdlib"]) / "site.py").read_text(encoding="utf-8")
    odd = ["한국어 naïve 中文 🙂", "e\u0301te\u0301 they'll\r\n\t\tif x:  trailing  ", "x = 1234.5e-6"]
    for part in [text[i * 150 : i * 150 + 37 + i] for i in range(100)] + odd:
        ids = auto(part)["input_ids"]
        assert ids == file.encode(part).ids
        assert auto.decode(ids) == part
    chat = auto.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|user|>\nhi<|assistant|>\n"
    eos = auto("<|endoftext|>")["input_ids"]
    assert json.loads((TRAINED_GLM / "config.json").read_text())["text_config"]["eos_token_id"] == eos
    assert json.loads((TRAINED_GLM / "generation_config.json").read_text())["eos_token_id"] == eos


def test_recorded_loss() -> None:
    losses = [
        F.cross_entropy(transformers_logits(TRAINED_GLM, ids)[:-1], torch.tensor(ids[1:])).item()
        for ids in held_out()["excerpt"]
    ]
    assert sum(losses) / len(losses) == pytest.approx(training()["base"]["excerpt_nats_per_token"], abs=1e-3)
    assert training()["base"]["held_out_nats_per_token"] <= 2.85


def test_greedy_text_is_recorded_clear_and_python_shaped() -> None:
    greedy, gap = transformers_greedy_and_gap(TRAINED_GLM, held_out()["prompts"], 128)
    assert greedy == held_out()["greedy"]
    assert gap > 1e-4
    tokenizer = AutoTokenizer.from_pretrained(TRAINED_GLM)
    assert tokenizer.batch_decode(held_out()["prompts"]) == held_out()["text"]
    texts = tokenizer.batch_decode(greedy)
    whole = "".join(texts)
    assert all(word in whole for word in ("self.", "return ", "if not ", "import ", "raise ", "# ")), texts
    assert sum("    " in text for text in texts) >= 8, texts
    assert sum(text.isascii() for text in texts) >= 15, texts


def test_recorded_acceptance(script: ModuleType) -> None:
    model = load_transformers(TRAINED_GLM).requires_grad_(False)
    new = script.NEW_TOKENS + 4 * script.DRAFTS
    greedy = transformers_greedy(TRAINED_GLM, held_out()["prompts"], new)
    tokens = torch.tensor([p + g for p, g in zip(held_out()["prompts"], greedy, strict=True)])
    with torch.no_grad():
        head = load_head(model, TRAINED_GLM)
        figures = script.acceptance(head, model, tokens, script.hidden_states(model, tokens))
    recorded = training()["head"]
    assert figures == {name: recorded[name] for name in figures}
    assert all(reach >= least for reach, least in zip(recorded["reach"], (0.55, 0.42, 0.34, 0.24), strict=True))
    assert recorded["mean"] >= 1.6


def attention_to_chosen_pools(model: Any) -> tuple[float, float, float]:
    """Attention that the chosen pools get, that any as many would get, and that the best would get."""
    seen: list[torch.Tensor] = []
    attention = model.model.language_model.layers[3].self_attn
    indexer, scale = attention.indexer, attention.scaling
    hook = attention.register_forward_pre_hook(lambda _, a, kw: seen.append(kw["hidden_states"]), with_kwargs=True)
    with torch.no_grad():
        model(torch.tensor(held_out()["excerpt"]), use_cache=False)
        hook.remove()
        x, length, pool = seen[0], seen[0].size(1), indexer.index_kpool
        q_resid = attention.q_a_layernorm(attention.q_a_proj(x))
        query = attention.q_b_proj(q_resid).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
        latent = attention.kv_a_layernorm(attention.kv_a_proj_with_mqa(x))[:, None]
        key, _ = attention.expand_kv(latent, latent[..., :0])
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        share = (query @ key.mT * scale).masked_fill(~causal, -torch.inf).softmax(-1).mean(1)
        chosen = indexer(x, q_resid, torch.ones(x.shape[:2], dtype=torch.bool), None).long()
    last = list(range(length // 2 - 1, length, pool))  # the last tokens of pools: 32 or more to choose from, none open
    count = indexer.index_topk // pool
    pools = share[:, last].unflatten(-1, (-1, pool)).sum(-1)
    got = share[:, last].gather(-1, chosen[:, last].clamp_min(0)).masked_fill(chosen[:, last] < 0, 0).sum(-1)
    any_of_them = torch.tensor([count * pool / (t + 1) for t in last])
    return float(got.mean()), float(any_of_them.mean()), float(pools.topk(count).values.sum(-1).mean())


def test_indexer_has_learnt_what_the_attention_wants() -> None:
    model = load_transformers(TRAINED_GLM)
    got, any_of_them, best = attention_to_chosen_pools(model)
    assert got - any_of_them > 0.6 * (best - any_of_them)
    wk = model.model.language_model.layers[3].self_attn.indexer.wk.weight
    with torch.no_grad():
        wk.copy_(wk[torch.randperm(len(wk), generator=torch.Generator().manual_seed(0))])
    worse, _, _ = attention_to_chosen_pools(model)
    assert worse - any_of_them < 0.3 * (best - any_of_them)


@pytest.mark.parametrize(
    ("name", "values", "least"),
    [
        ("none", {}, 0),
        ("selection ignored", {"index_topk": 2048}, 4),
        ("tail forgotten", {"index_kpool_always_select_tail": False}, 1),
        ("clamp forgotten", {"swiglu_limit": 10.0}, 8),
        ("one pool less", {"index_topk": 28}, 3),
    ],
)
def test_wrong_reading_of_the_config_shows_in_the_text(
    name: str, values: dict[str, Any], least: int, tmp_path: Path
) -> None:
    got = transformers_greedy(changed(TRAINED_GLM, tmp_path / "changed", **values), held_out()["prompts"], 128)
    different = sum(a != b for a, b in zip(got, held_out()["greedy"], strict=True))
    assert different == 0 if name == "none" else different >= least


@pytest.mark.parametrize("length", [16, 64, 160])
def test_rule_that_trained_is_transformers_rule(script: ModuleType, length: int) -> None:
    """With decays of every size, down to the bound on every channel of a whole chunk."""
    import importlib

    rule = importlib.import_module("examples.train_tiny_glm5_next").chunk_rule
    generator = torch.Generator().manual_seed(length)
    query, key, value = (torch.randn(2, length, 3, 32, generator=generator) for _ in range(3))
    for low in (-5.0, -0.5):
        g = low * torch.rand(2, length, 3, 32, generator=generator).round(decimals=1 if low < -1 else 3)
        g[0, : length // 2] = low
        beta = torch.rand(2, length, 3, generator=generator)
        want, _ = modeling.recurrent_kimi_delta_attention(
            *(x.double() for x in (query, key, value)),
            g=g.double(),
            beta=beta.double(),
            initial_state=None,
            output_final_state=False,
            use_qk_l2norm_in_kernel=True,
        )
        got, _ = rule(query, key, value, g, beta)
        torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=2e-6)
