"""The random GLM-5.3-Flash writer against transformers: names, spellings, and that every part shows in the tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from .checkpoints import (
    checkpoint,
    load_transformers,
    transformers_greedy,
    transformers_greedy_and_gap,
    transformers_logits,
)
from .glm_checkpoints import FP32, LAYERS, changed, random_glm5_next

__all__ = ["checkpoint"]

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dense": {"index_topk": 2048},
    "released heads": {"kv_lora_rank": 512, "linear_head_dim": 128, "index_head_dim": 128},
    "softplus": {"lower_bound": None},
    "no drafts": {"mtp": False},
    "transformers' spelling": {"spelling": "indexed_attention"},
    "older spelling": {"spelling": "full_attention", "legacy_linear": True},
    "older softplus": {"lower_bound": None, "legacy_linear": True},
    "bf16": {"dtype": "bfloat16"},
    "shared choice": {"shared_choice": True},
}
PROMPTS = [list(b"def read(self):"), list(b"0123456789abcde"), list(b"  return x + 1.  # and so on" * 4)]
NEW = 40

TEXT = "model.language_model"
DSA = (
    *(f"self_attn.{part}.weight" for part in ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa")),
    *(f"self_attn.{part}.weight" for part in ("kv_a_layernorm", "kv_b_proj", "o_proj")),
    *(f"self_attn.indexer.{part}.weight" for part in ("wq_b", "wk", "k_norm", "weights_proj")),
    *(f"self_attn.indexer.{part}" for part in ("k_norm.bias", "index_kpool_compress_ape", "index_kpool_compress_gate")),
)
KDA = (
    *(f"self_attn.{part}_proj.weight" for part in ("q", "k", "v", "b", "f_a", "f_b", "g_a", "g_b", "o")),
    *(f"self_attn.{part}_conv1d.weight" for part in ("q", "k", "v")),
    *(f"self_attn.{part}" for part in ("A_log", "dt_bias", "o_norm.weight")),
)
DENSE = tuple(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
SPARSE = (
    "mlp.gate.weight",
    "mlp.gate.e_score_correction_bias",
    *(f"mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")),
    *(f"mlp.experts.{expert}.{part}_proj.weight" for expert in range(8) for part in ("gate", "up", "down")),
)
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
STREAMS = tuple(f"hc_{site}_{part}" for site in ("attn", "ffn") for part in ("fn", "base", "scale"))
DRAFT = tuple(f"{part}.weight" for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))


def sparse_layers(options: dict[str, Any]) -> tuple[int, ...]:
    return (3, 6, 7) if options.get("shared_choice") else (3, 7)


def released_names(options: dict[str, Any]) -> set[str]:
    """Return the names of the text weights as the release has them."""
    names = {f"{TEXT}.embed_tokens.weight", f"{TEXT}.norm.weight", "lm_head.weight"}
    for layer in range(LAYERS):
        attention = DSA if layer in sparse_layers(options) else KDA
        parts = (*attention, *(DENSE if layer < 3 else SPARSE), *NORMS, *STREAMS)
        names |= {f"{TEXT}.layers.{layer}.{part}" for part in parts}
    if options.get("shared_choice"):
        names = {name for name in names if f".{LAYERS - 1}.self_attn.indexer." not in name}
    if options.get("mtp", True):
        names |= {f"{TEXT}.layers.{LAYERS}.{part}" for part in (*DSA, *SPARSE, *NORMS, *DRAFT)}
    return names


@pytest.mark.parametrize("name", OPTIONS)
def test_checkpoint_loads_whole(name: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    options = OPTIONS[name]
    path = checkpoint(random_glm5_next, **options)
    weights = load_file(path / "model.safetensors")
    text = {weight for weight in weights if not weight.startswith("model.visual.")}
    assert text == released_names(options)
    dtype = getattr(torch, options.get("dtype", "float32"))
    assert {k: w.dtype for k, w in weights.items()} == {
        k: torch.float32 if k.endswith(FP32) else dtype for k in weights
    }

    # The draft layer is all that transformers leaves out; it ignores a name that contains shared_head by itself.
    _, info = transformers.Glm5NextForConditionalGeneration.from_pretrained(path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "mismatched_keys", "error_msgs")), info
    unexpected = {re.sub(r"experts\..*", "experts", key) for key in info["unexpected_keys"]}
    draft = {key for key in text if f".layers.{LAYERS}." in key and ".shared_head." not in key}
    assert unexpected == {re.sub(r"experts\..*", "experts", key) for key in draft}

    again = load_file(random_glm5_next(tmp_path, **options) / "model.safetensors")
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[key], again[key]) for key in weights)
    assert all(weight.float().std() > 0 for key, weight in weights.items() if not key.endswith(".enorm.weight"))


@pytest.mark.parametrize("name", OPTIONS)
def test_config_means_the_same_in_every_spelling(name: str, checkpoint: Callable[..., Path]) -> None:
    options = OPTIONS[name]
    path = checkpoint(random_glm5_next, **options)
    written = json.loads((path / "config.json").read_text())
    spelling, sparse = options.get("spelling", "deepseek_sparse_attention"), sparse_layers(options)
    assert written["text_config"]["layer_types"] == [
        spelling if layer in sparse else "linear_attention" for layer in range(LAYERS)
    ]
    assert ("linear_attn_config" in written["text_config"]) == options.get("legacy_linear", False)
    assert ("linear_head_dim" in written["text_config"]) != options.get("legacy_linear", False)
    assert written["text_config"]["num_nextn_predict_layers"] == int(options.get("mtp", True))
    assert written["model_type"] == "glm5_next"
    assert written["architectures"] == ["Glm5NextForConditionalGeneration"]

    config = transformers.AutoConfig.from_pretrained(path).text_config
    assert [i for i, kind in enumerate(config.layer_types) if kind == "indexed_attention"] == list(sparse)
    assert set(config.layer_types) == {"linear_attention", "indexed_attention"}
    assert config.indexer_types == ["full"] * 7 + ["shared" if options.get("shared_choice") else "full"]
    assert config.linear_head_dim == options.get("linear_head_dim", 16)
    assert config.linear_num_heads == 4
    assert config.linear_lower_bound == options.get("lower_bound", -5.0)
    assert config.mlp_layer_types == ["dense"] * 3 + ["sparse"] * 5


def test_tokenizer_is_one_token_a_byte_and_the_end_token_is_known(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint(random_glm5_next)
    auto, file = AutoTokenizer.from_pretrained(path), Tokenizer.from_file(str(path / "tokenizer.json"))
    texts = (
        Path(__file__).read_text()[:2000],
        "한국어 naïve 中文 🙂",
        "e\u0301te\u0301 they'll\r\n\t\tif x:  trailing  ",
        "",
    )
    for text in texts:
        ids = auto(text)["input_ids"]
        assert ids == file.encode(text).ids
        assert len(ids) == len(text.encode())
        assert auto.decode(ids) == text
    messages = [{"role": "user", "content": "hi"}]
    text = auto.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>\nhi<|assistant|>\n"
    eos = auto("<|endoftext|>")["input_ids"]
    assert json.loads((path / "config.json").read_text())["text_config"]["eos_token_id"] == eos
    assert json.loads((path / "generation_config.json").read_text())["eos_token_id"] == eos


@pytest.mark.parametrize("name", ["plain", "dense", "released heads", "softplus"])
def test_greedy_tokens_are_no_close_call(name: str, checkpoint: Callable[..., Path]) -> None:
    path = checkpoint(random_glm5_next, **OPTIONS[name])
    tokens, gap = transformers_greedy_and_gap(path, PROMPTS, NEW)
    assert gap > 1e-4, "two engines that round differently may give different tokens; take another seed"
    smallest = float("inf")
    for prompt, new in zip(PROMPTS, tokens, strict=True):
        logits = transformers_logits(path, prompt + new)[len(prompt) - 1 : -1]
        logits[:, transformers.AutoConfig.from_pretrained(path).text_config.eos_token_id] = -torch.inf
        assert logits.argmax(-1).tolist() == new
        best = logits.topk(2).values
        smallest = min(smallest, float((best[:, 0] - best[:, 1]).min()))
    assert gap == pytest.approx(smallest, abs=1e-4)
    assert sum(len(set(new)) for new in tokens) > NEW, "the text must not be one loop"


@cache
def right(path: Path) -> list[list[int]]:
    return transformers_greedy(path, PROMPTS, NEW)


CHANGES: dict[str, dict[str, Any]] = {
    "selection ignored": {"index_topk": 2048},
    "tail forgotten": {"index_kpool_always_select_tail": False},
    "clamp forgotten": {"swiglu_limit": 10.0},
    "other lower bound": {"linear_lower_bound": -4.5},
    "softplus gate": {"linear_lower_bound": None},
    "scaling of experts": {"routed_scaling_factor": 2.4},
    "one step of normalisation": {"hc_sinkhorn_iters": 1},
}


@pytest.mark.parametrize("name", ["none", *CHANGES])
def test_wrong_reading_of_the_config_shows_in_the_tokens(
    name: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    path = checkpoint(random_glm5_next)
    got = transformers_greedy(changed(path, tmp_path / "changed", **CHANGES.get(name, {})), PROMPTS, NEW)
    different = sum(a != b for a, b in zip(got, right(path), strict=True))
    assert different == 0 if name == "none" else different >= 2


@pytest.mark.parametrize("lost", ["nothing", "recurrent_states", "conv_states", "indexer_keys", "keys"])
def test_lost_state_shows_in_the_tokens(lost: str, checkpoint: Callable[..., Path]) -> None:
    path = checkpoint(random_glm5_next)
    model = load_transformers(path)
    end, touched, different = model.generation_config.eos_token_id, 0, 0
    for prompt, wanted in zip(PROMPTS, right(path), strict=True):
        tokens: list[int] = []
        with torch.no_grad():
            out = model(torch.tensor([prompt]), use_cache=True)
            for layer in out.cache.layers:
                held = getattr(layer, lost, None)
                for state in held.values() if isinstance(held, dict) else [] if held is None else [held]:
                    state[..., :-1].zero_()  # the last column of the indexer's keys says that they are there
                    touched += 1
            held_by = out.cache
            while len(tokens) < NEW:
                logits = out.logits[0, -1]
                logits[end] = -torch.inf
                tokens.append(int(logits.argmax()))
                out = model(torch.tensor([tokens[-1:]]), use_cache=True, cache=held_by)
        different += tokens != wanted
    assert touched == {"nothing": 0, "recurrent_states": 18, "conv_states": 18}.get(lost, 6)
    assert different == 0 if lost == "nothing" else different >= 2
