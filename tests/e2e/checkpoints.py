"""Tiny checkpoints for the end-to-end tests: writers of random ones, the trained one, and transformers as the judge.

Random weights are drawn so that a fault shows in the tokens: decays, time-step biases and convolution taps vary from
head to head, and a layer state lost after the prompt changes greedy text within a few tokens. The output projection
is a permuted embedding, so the next token often follows from the newest one alone, which is what the draft layer
says: about two drafts in three are accepted at the first position and one in five at the fourth. Compare tokens in
fp32 only: near ties make the bf16 greedy text of two correct engines differ.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

ROOT = Path(__file__).parents[2]
TRAINED = ROOT / "examples" / "checkpoints" / "tiny_qwen3_5"
HELD_OUT = Path(__file__).parent / "data" / "heldout_prompts.json"

VOCAB_SIZE = 320  # 256 bytes and the special tokens, rounded up so that two ranks can share it
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<think>",
    "</think>",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _tokenizer(cls: Any) -> Any:
    """Build a byte-level tokenizer without merges: one token per byte."""
    pieces = (*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL_TOKENS)
    return cls(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=[],
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIAL_TOKENS),
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
    )


def _text_config(
    tokenizer: Any,
    *,
    head_dim: int,
    linear_key_head_dim: int,
    linear_value_head_dim: int,
    linear_num_key_heads: int,
    linear_num_value_heads: int,
    dtype: str,
) -> dict[str, Any]:
    rotary = head_dim // 4  # partial rotary factor 1/4; half of it shared by the three sections of M-RoPE
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "attn_output_gate": True,
        "linear_num_key_heads": linear_num_key_heads,
        "linear_num_value_heads": linear_num_value_heads,
        "linear_key_head_dim": linear_key_head_dim,
        "linear_value_head_dim": linear_value_head_dim,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [rotary // 2 - 2 * (rotary // 8), rotary // 8, rotary // 8],
            "mrope_interleaved": True,
        },
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }


_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def _vision_language_config(cls: Any, tokenizer: Any, text: dict[str, Any]) -> Any:
    """Wrap a text config in the layout of Qwen3.5 checkpoints; the vision part is as small as it can be, and idle."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 64,
    }
    return cls(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
        dtype=text["dtype"],
    )


@torch.no_grad()
def _randomise(module: torch.nn.Module, generator: torch.Generator, residual: float) -> None:
    """Draw every weight anew; ``residual`` scales what the layers add to the residual stream."""
    for name, weight in module.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if "A_log" in name:
            weight.copy_(torch.empty(weight.shape).uniform_(0.1, 4, generator=generator).log())
        elif "dt_bias" in name:
            weight.copy_(noise / 2)
        elif "norm" in name and name.endswith("weight"):
            # Qwen's plain norms scale by 1 + weight, the gated and the vision norms by weight.
            weight.copy_(float("linear_attn.norm" in name or "visual" in name) + noise / 10)
        elif "embed_tokens" in name:
            weight.copy_(noise)
        elif "conv1d" in name:
            weight.copy_(noise * 0.6)
        elif weight.dim() >= 2:
            outward = name.removesuffix(".weight").endswith(("out_proj", "o_proj", "down_proj"))
            fan_in = weight[0].numel() if "experts" not in name else weight.shape[-1]  # experts are stacked
            weight.copy_(noise * (residual if outward else 1.0) * 1.4 / math.sqrt(fan_in))
        else:
            weight.copy_(noise / 20)


@torch.no_grad()
def _randomise_model(model: Any, seed: int, residual: float) -> torch.Generator:
    generator = torch.Generator().manual_seed(seed)
    _randomise(model, generator, residual)
    embedding = model.get_input_embeddings().weight
    order = torch.randperm(len(embedding), generator=generator)
    model.lm_head.weight.copy_(embedding[order] * 1.4 / math.sqrt(embedding.shape[1]))
    return generator


@torch.no_grad()
def _mtp_weights(model: Any, layer_cls: Any, norm_cls: Any, generator: torch.Generator, good: bool) -> dict[str, Any]:
    """Draw an MTP layer; a ``good`` one drafts from the newest token's embedding, which the trunk often follows."""
    config = model.config.text_config
    hidden = config.hidden_size
    fc, norm, norm_embedding = torch.nn.Linear(2 * hidden, hidden, bias=False), norm_cls(hidden), norm_cls(hidden)
    head = torch.nn.ModuleDict(
        {
            "fc": fc,
            "layers": torch.nn.ModuleList([layer_cls(config, config.layer_types.index("full_attention"))]),
            "pre_fc_norm_embedding": norm_embedding,
            "pre_fc_norm_hidden": norm_cls(hidden),
            "norm": norm,
        }
    )
    _randomise(head, generator, residual=0.1 if good else 1.0)
    if good:
        fc.weight.copy_(torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1))
        norm_embedding.weight.zero_()
        norm.load_state_dict(model.model.language_model.norm.state_dict())
    return {f"mtp.{name}": weight for name, weight in head.state_dict().items()}


def _write(path: Path, model: Any, tokenizer: Any, extra: dict[str, torch.Tensor], dtype: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    model.generation_config.update(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    weights = load_file(path / "model.safetensors")
    weights |= {name: weight.to(getattr(torch, dtype)).contiguous() for name, weight in extra.items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(path)
    return path


def random_qwen3_5(
    path: Path,
    *,
    head_dim: int = 32,
    linear_key_head_dim: int = 16,
    linear_value_head_dim: int = 16,
    linear_num_key_heads: int = 2,
    linear_num_value_heads: int = 4,
    mtp: bool = True,
    good_mtp: bool = True,
    dtype: str = "float32",
    seed: int = 0,
    residual: float = 0.5,
) -> Path:
    """Write a random Qwen3.5 (three Gated DeltaNet layers and a full-attention one, hidden size 64) to ``path``.

    Args:
        path: directory to write; made if absent.
        head_dim: of the full-attention layers.
        linear_key_head_dim: K of the Gated DeltaNet layers.
        linear_value_head_dim: V; may differ from K.
        linear_num_key_heads: H.
        linear_num_value_heads: HV, a multiple of H.
        mtp: write a draft layer too.
        good_mtp: let its drafts be accepted often; a random one's never are.
        dtype: of every weight.
        seed: of every weight.
        residual: what the layers add to the residual stream, relative to the embedding.

    Returns:
        ``path``.
    """
    tokenizer = _tokenizer(Qwen3_5Tokenizer)
    text = _text_config(
        tokenizer,
        head_dim=head_dim,
        linear_key_head_dim=linear_key_head_dim,
        linear_value_head_dim=linear_value_head_dim,
        linear_num_key_heads=linear_num_key_heads,
        linear_num_value_heads=linear_num_value_heads,
        dtype=dtype,
    )
    config = _vision_language_config(
        transformers.Qwen3_5Config, tokenizer, text | {"mtp_num_hidden_layers": 1 if mtp else 0}
    )
    model = transformers.Qwen3_5ForConditionalGeneration(config).float()
    generator = _randomise_model(model, seed, residual)
    classes = modeling_qwen3_5.Qwen3_5DecoderLayer, modeling_qwen3_5.Qwen3_5RMSNorm
    extra = _mtp_weights(model, *classes, generator, good_mtp) if mtp else {}
    return _write(path, model, tokenizer, extra, dtype)


def random_qwen3_5_moe(
    path: Path,
    *,
    mtp: bool = True,
    good_mtp: bool = True,
    dtype: str = "float32",
    seed: int = 0,
    residual: float = 0.5,
) -> Path:
    """Write a random Qwen3.5 mixture of experts: four experts, two per token, and a shared one, in every layer."""
    tokenizer = _tokenizer(Qwen3_5Tokenizer)
    text = _text_config(
        tokenizer,
        head_dim=32,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        dtype=dtype,
    )
    del text["intermediate_size"]
    config = _vision_language_config(
        transformers.Qwen3_5MoeConfig, tokenizer, text | _MOE | {"mtp_num_hidden_layers": 1 if mtp else 0}
    )
    model = transformers.Qwen3_5MoeForConditionalGeneration(config).float()
    generator = _randomise_model(model, seed, residual)
    classes = modeling_qwen3_5_moe.Qwen3_5MoeDecoderLayer, modeling_qwen3_5_moe.Qwen3_5MoeRMSNorm
    extra = _mtp_weights(model, *classes, generator, good_mtp) if mtp else {}
    return _write(path, model, tokenizer, extra, dtype)


def random_qwen3_next(path: Path, *, dtype: str = "float32", seed: int = 0, residual: float = 0.5) -> Path:
    """Write a random Qwen3-Next: text only, fused projections, experts as in `random_qwen3_5_moe`, no draft layer."""
    tokenizer = _tokenizer(Qwen2Tokenizer)
    text = _text_config(
        tokenizer,
        head_dim=32,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        dtype=dtype,
    )
    rope = {key: value for key, value in text["rope_parameters"].items() if not key.startswith("mrope")}
    # LMDeploy counts the layers by the interval, transformers by the list.
    config = transformers.Qwen3NextConfig(**(text | _MOE | {"rope_parameters": rope, "full_attention_interval": 4}))
    model = transformers.Qwen3NextForCausalLM(config).float()
    _randomise_model(model, seed, residual)
    return _write(path, model, tokenizer, {}, dtype)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a random checkpoint once a session: ``checkpoint(random_qwen3_5, head_dim=256)`` gives its directory."""
    root, made = tmp_path_factory.mktemp("checkpoints"), dict[str, Path]()

    def get(writer: Callable[..., Path], **options: Any) -> Path:
        key = f"{writer.__name__} {json.dumps(options, sort_keys=True)}"
        if key not in made:
            made[key] = writer(root / str(len(made)), **options)
        return made[key]

    return get


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """What the training scripts share; they run as modules, from the root of the repository."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        yield importlib.import_module("examples.tiny_training")


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def load_transformers(path: Path, dtype: str = "float32") -> Any:
    """Load the model class that the checkpoint's config names."""
    config = transformers.AutoConfig.from_pretrained(path)
    cls = getattr(transformers, config.architectures[0])
    return cls.from_pretrained(path, dtype=getattr(torch, dtype)).eval()


def transformers_greedy(path: Path, prompts_ids: list[list[int]], n: int) -> list[list[int]]:
    """Greedy continuations by transformers; see `transformers_greedy_and_gap`."""
    return transformers_greedy_and_gap(path, prompts_ids, n)[0]


def transformers_greedy_and_gap(path: Path, prompts_ids: list[list[int]], n: int) -> tuple[list[list[int]], float]:
    """Greedy continuations by transformers in fp32 on one thread, each exactly ``n`` tokens, and how clear they are.

    The end token is never chosen, which is what LMDeploy's ``ignore_eos`` does (it masks the end token's logit).
    Prompts of one length go as one batch; none is padded.

    Returns:
        The continuations, and the smallest distance of the best logit to the second over all their tokens: where it
        is of the size of rounding, another right engine may give other tokens.
    """
    model, new, gaps = load_transformers(path), dict[int, list[int]](), list[float]()
    end = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = None
    model.generation_config.suppress_tokens = end if isinstance(end, list) else [end]
    options = {"max_new_tokens": n, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    with _one_thread():
        for length in {len(prompt) for prompt in prompts_ids}:
            rows = [i for i, prompt in enumerate(prompts_ids) if len(prompt) == length]
            ids = torch.tensor([prompts_ids[i] for i in rows])
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            new |= dict(zip(rows, out.sequences[:, length:].tolist(), strict=True))
            best = torch.stack(out.scores).topk(2).values
            gaps.append(float((best[..., 0] - best[..., 1]).min()))
    return [new[i] for i in range(len(prompts_ids))], min(gaps)


def transformers_logits(path: Path, ids: list[int], dtype: str = "float32") -> torch.Tensor:
    """Teacher-forced logits by transformers, fp32 [len(ids), vocabulary]; ``dtype`` is that of the weights."""
    model = load_transformers(path, dtype)
    with _one_thread(), torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits.float()
