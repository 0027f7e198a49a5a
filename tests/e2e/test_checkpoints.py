from __future__ import annotations

import json
import sysconfig
import unicodedata
from collections.abc import Callable
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

from dlinfer_ext.e2e.simulation import accepted_drafts, hidden_states, load_head

from .checkpoints import (
    HELD_OUT,
    TRAINED,
    checkpoint,
    load_transformers,
    random_qwen3_5,
    random_qwen3_5_moe,
    random_qwen3_next,
    script,
    transformers_greedy,
    transformers_logits,
)

__all__ = ["checkpoint", "script"]

RANDOM: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "qwen3_5": (random_qwen3_5, {}),
    "qwen3_5-head256-gdn128": (
        random_qwen3_5,
        {"head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    ),
    "qwen3_5-K16-V32": (random_qwen3_5, {"linear_value_head_dim": 32}),
    "qwen3_5-HV=H": (random_qwen3_5, {"linear_num_value_heads": 2}),
    "qwen3_5-bf16": (random_qwen3_5, {"dtype": "bfloat16"}),
    "qwen3_5_moe": (random_qwen3_5_moe, {}),
    "qwen3_next": (random_qwen3_next, {}),
}
NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
PROJECTIONS = (
    *(f"self_attn.{part}_proj" for part in ("q", "k", "v", "o")),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
)
MTP_NAMES = {f"mtp.layers.0.{part}.weight" for part in NORMS + PROJECTIONS} | {
    f"mtp.{part}.weight" for part in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
}


@pytest.fixture(scope="module")
def training() -> dict[str, Any]:
    report: dict[str, Any] = json.loads((TRAINED / "TRAINING.json").read_text())
    return report


@pytest.fixture(scope="module")
def held_out() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(HELD_OUT.read_text())
    return data


# --------------------------------------------------------------------------------------------------------- tokenizers


def snippets(names: list[str]) -> list[str]:
    """Return 100 pieces of the held-out files, as this interpreter's library has them, and text that Qwen splits."""
    text = "".join(
        path.read_text(encoding="utf8", errors="ignore")
        for path in (Path(sysconfig.get_paths()["stdlib"]) / name for name in names)
        if path.exists()
    )
    step = len(text) // 100
    odd = [
        "e\u0301te\u0301",
        "x = 1234.5e-6",
        "they'll WE'RE",
        "\r\n\t\tif x:\r\n",
        "  trailing  ",
        "한국어 naïve 中文 🙂",
    ]
    return [text[i * step : i * step + 37 + i] for i in range(100)] + odd


def test_auto_tokenizer_and_saved_file_agree(training: dict[str, Any]) -> None:
    auto, file = AutoTokenizer.from_pretrained(TRAINED), Tokenizer.from_file(str(TRAINED / "tokenizer.json"))
    for text in snippets(training["text"]["held_out"]):
        ids = auto(text)["input_ids"]
        assert ids == file.encode(text).ids
        assert auto.decode(ids) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_random_tokenizer_is_one_token_a_byte(name: str, checkpoint: Callable[..., Path]) -> None:
    writer, options = RANDOM[name]
    path = checkpoint(writer, **options)
    auto, file = AutoTokenizer.from_pretrained(path), Tokenizer.from_file(str(path / "tokenizer.json"))
    for text in snippets(["site.py"]):
        ids = auto(text)["input_ids"]
        assert ids == file.encode(text).ids
        assert len(ids) == len(unicodedata.normalize("NFC", text).encode())
        assert auto.decode(ids) == unicodedata.normalize("NFC", text)


def test_chat_template_and_eos(checkpoint: Callable[..., Path]) -> None:
    for path in (TRAINED, checkpoint(random_qwen3_5), checkpoint(random_qwen3_5_moe), checkpoint(random_qwen3_next)):
        tokenizer = AutoTokenizer.from_pretrained(path)
        messages = [{"role": "user", "content": "hi"}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        config = json.loads((path / "config.json").read_text())
        (eos,) = tokenizer("<|im_end|>")["input_ids"]
        assert config.get("text_config", config)["eos_token_id"] == eos
        assert json.loads((path / "generation_config.json").read_text())["eos_token_id"] == eos


# -------------------------------------------------------------------------------------------------- trained checkpoint


def test_trained_layout() -> None:
    assert sum(f.stat().st_size for f in TRAINED.iterdir()) <= 6e6
    config = json.loads((TRAINED / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert config["model_type"] == "qwen3_5"
    assert config["text_config"]["mtp_num_hidden_layers"] == 1
    weights = load_file(TRAINED / "model.safetensors")
    assert {name for name in weights if name.startswith("mtp.")} == MTP_NAMES
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    _, info = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(TRAINED, output_loading_info=True)
    assert not any(info.values()), info


def test_recorded_loss(training: dict[str, Any], held_out: dict[str, Any]) -> None:
    losses = [
        F.cross_entropy(transformers_logits(TRAINED, ids)[:-1], torch.tensor(ids[1:])).item()
        for ids in held_out["excerpt"]
    ]
    assert sum(losses) / len(losses) == pytest.approx(training["base"]["excerpt_nats_per_token"], abs=1e-3)
    assert training["base"]["held_out_nats_per_token"] <= 2.85


def test_greedy_text_is_recorded_and_python_shaped(held_out: dict[str, Any]) -> None:
    greedy = transformers_greedy(TRAINED, held_out["prompts"], 128)
    assert greedy == held_out["greedy"]
    tokenizer = AutoTokenizer.from_pretrained(TRAINED)
    assert tokenizer.batch_decode(held_out["prompts"]) == held_out["text"]
    texts = tokenizer.batch_decode(greedy)
    whole = "".join(texts)
    assert all(word in whole for word in ("self.", "return ", "if not ", "def ", "raise ", "# ")), texts
    assert sum("    " in text for text in texts) >= 8, texts
    assert sum(text.isascii() for text in texts) >= 15, texts


def test_recorded_acceptance(training: dict[str, Any], held_out: dict[str, Any], script: ModuleType) -> None:
    model = load_transformers(TRAINED).requires_grad_(False)
    new = script.NEW_TOKENS + 4 * script.DRAFTS
    greedy = transformers_greedy(TRAINED, held_out["prompts"], new)
    tokens = torch.tensor([p + g for p, g in zip(held_out["prompts"], greedy, strict=True)])
    with torch.no_grad():
        figures = script.acceptance(load_head(model, TRAINED), model, tokens, script.hidden_states(model, tokens))
    head = training["head"]
    assert figures == {name: head[name] for name in figures}
    assert all(reach >= least for reach, least in zip(head["reach"], (0.60, 0.50, 0.42, 0.30), strict=True))
    assert head["mean"] >= 1.8


# -------------------------------------------------------------------------------------------------- random checkpoints


@pytest.mark.parametrize("name", RANDOM)
def test_random_checkpoint_loads_whole(name: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    writer, options = RANDOM[name]
    path = checkpoint(writer, **options)
    cls = getattr(transformers, json.loads((path / "config.json").read_text())["architectures"][0])
    _, info = cls.from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info
    first = load_file(path / "model.safetensors")
    again = load_file(writer(tmp_path, **options) / "model.safetensors")
    assert first.keys() == again.keys()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert {w.dtype for w in first.values()} == {getattr(torch, options.get("dtype", "float32"))}


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5-K16-V32", "qwen3_5_moe", "qwen3_next"])
@pytest.mark.parametrize("lost", ["recurrent_states", "conv_states"])
def test_lost_state_shows_in_the_tokens(name: str, lost: str, checkpoint: Callable[..., Path]) -> None:
    writer, options = RANDOM[name]
    path = checkpoint(writer, **options)
    prompts, new = (
        [list(text) for text in (b"def read(self):", b"  return x + 1.", b"import os, time", b"0123456789abcde")],
        24,
    )
    right = transformers_greedy(path, prompts, new)
    ids = prompts[0] + right[0]
    assert transformers_logits(path, ids)[len(prompts[0]) - 1 : -1].argmax(-1).tolist() == right[0]

    model = load_transformers(path)
    with torch.no_grad():
        out = model(torch.tensor(prompts), use_cache=True)
        for layer in out.cache.layers:
            for state in getattr(layer, lost, {}).values():
                state.zero_()
        tokens, cache = torch.tensor(prompts)[:, :0], out.cache
        for _ in range(new):
            tokens = torch.cat([tokens, out.logits[:, -1:].argmax(-1)], 1)
            out = model(tokens[:, -1:], use_cache=True, cache=cache)
    assert sum(a != b for a, b in zip(tokens.tolist(), right, strict=True)) >= 3


def test_good_drafts_are_accepted_and_random_ones_are_not(checkpoint: Callable[..., Path]) -> None:
    prompts = [list(b"%d: for x in range(%d):" % (i, i)) for i in range(8)]
    first = {}
    for good in (True, False):
        path = checkpoint(random_qwen3_5, good_mtp=good)
        model = load_transformers(path).requires_grad_(False)
        head = load_head(model, path)
        greedy = transformers_greedy(path, prompts, 64)
        tokens = torch.tensor([p + g for p, g in zip(prompts, greedy, strict=True)])
        with torch.no_grad():
            accepted = accepted_drafts(model, head, tokens, hidden_states(model, tokens), 4)
        first[good] = [float((accepted[:, -48:] >= k).float().mean()) for k in (1, 2, 3, 4)]
    assert 0.4 < first[True][0] < 0.9, first
    assert first[True][3] > 0.05, first
    assert first[False][0] < 0.05, first
