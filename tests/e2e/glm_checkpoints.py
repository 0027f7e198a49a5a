"""A writer of tiny random GLM-5.3-Flash checkpoints, named and spelled as the released one, and where the trained is.

Every weight is drawn: transformers' own start leaves the pool positions, the biases and the hyper-connections without
effect. The clamp of SwiGLU is small enough to bite, 32 index heads keep the scores of pools from tying at zero, and a
short ``index_topk`` makes the selection leave tokens out within a hundred. As in the other writers the output
projection is a permuted embedding, which is what the draft layer says: about half of the drafts are accepted at the
first position and one in twelve at the fourth. Compare tokens in fp32 only.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
TRAINED_GLM = ROOT / "examples" / "checkpoints" / "tiny_glm5_next"
HELD_OUT_GLM = Path(__file__).parent / "data" / "heldout_prompts_glm.json"

GLM_SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|user|>",
    "<|assistant|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|image|>",
    "<|video|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<think>",
    "</think>",
)
GLM_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
VOCAB_SIZE = 320  # 256 bytes and the special tokens, rounded up so that two ranks can share it
LAYERS, SPARSE_ATTENTION = 8, 7  # the second of the two layers with sparse attention has experts too
FIRST_SPARSE_ATTENTION = 3
TEXT = "model.language_model."
# What the released checkpoint keeps in fp32 whatever its dtype.
FP32 = ("mlp.gate.weight", "e_score_correction_bias", "conv1d.weight", "dt_bias", "A_log", "_base", "_scale")


def glm_tokenizer() -> Any:
    """Build a byte-level tokenizer without merges: one token per byte."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(GLM_SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        chat_template=GLM_CHAT_TEMPLATE,
        model_max_length=4096,
    )


def _config(tokenizer: Any, text: dict[str, Any]) -> Any:
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in GLM_SPECIAL_TOKENS}
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 48,
        "qk_rope_head_dim": 0,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "index_n_heads": 32,
        "index_kpool": 4,
        "linear_num_heads": 4,
        "linear_conv_kernel_dim": 4,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "max_position_embeddings": 4096,
        "swiglu_limit": 1.0,
        "eos_token_id": [tokenizer.eos_token_id],
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    } | text
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "projection_intermediate_size": 64,
        "image_size": 56,
    }
    return transformers.Glm5NextConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image|>"],
        video_token_id=ids["<|video|>"],
        image_start_token_id=ids["<|begin_of_image|>"],
        image_end_token_id=ids["<|end_of_image|>"],
        video_start_token_id=ids["<|begin_of_video|>"],
        video_end_token_id=ids["<|end_of_video|>"],
        tie_word_embeddings=False,
        dtype="float32",
    )


def _draw(name: str, shape: torch.Size, generator: torch.Generator, residual: float) -> torch.Tensor:
    """Draw one weight by its name, transformers' or the released one."""
    noise = torch.randn(shape, generator=generator)
    if name.endswith("A_log"):
        return noise / 2
    if name.endswith("dt_bias"):
        return noise - 2
    if "norm" in name:
        return float(name.endswith("weight")) + noise / 10
    if name.endswith(("hc.scale", "hc_attn_scale", "hc_ffn_scale")):
        return 1 + noise / 10
    if name.endswith(("hc.base", "hc_attn_base", "hc_ffn_base", "compress_ape")):
        return noise / 2
    if name.endswith(("hc.fn", "hc_attn_fn", "hc_ffn_fn")):
        return noise / 20  # of a vector of length sqrt(streams * hidden)
    if name.endswith("e_score_correction_bias"):
        return noise / 10
    if name.endswith("embed_tokens.weight"):
        return noise
    if "conv1d" in name:
        return noise * 0.6
    if len(shape) < 2:
        return noise / 20
    outward = name.removesuffix(".weight").endswith(("o_proj", "down_proj"))
    fan_in = shape[-1] if len(shape) == 3 else shape[1:].numel()  # experts are stacked
    return noise * (residual if outward else 1.0) * 1.4 / math.sqrt(fan_in)


@torch.no_grad()
def _draw_model(model: Any, generator: torch.Generator, residual: float) -> None:
    named = dict(model.named_parameters())
    named |= {name: b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")}
    for name in sorted(named):
        named[name].copy_(_draw(name, named[name].shape, generator, residual))
    embedding = model.get_input_embeddings().weight
    order = torch.randperm(len(embedding), generator=generator)
    model.lm_head.weight.copy_(embedding[order] * 1.4 / math.sqrt(embedding.shape[1]))


def _mtp_weights(weights: dict[str, torch.Tensor], generator: torch.Generator, good: bool) -> dict[str, torch.Tensor]:
    """Draw the draft layer: a layer with sparse attention and experts, without hyper-connections.

    A ``good`` one drafts from the newest token's embedding, which the trunk often follows.
    """
    like, prefix = f"{TEXT}layers.{SPARSE_ATTENTION}.", f"{TEXT}layers.{LAYERS}."
    choice = f"{TEXT}layers.{FIRST_SPARSE_ATTENTION}."  # the other layer may have none of its own
    hidden = weights["lm_head.weight"].shape[1]
    shapes = {
        name.removeprefix(layer): weight.shape
        for layer, part in ((like, ""), (choice, "self_attn.indexer."))
        for name, weight in weights.items()
        if name.startswith(layer + part) and ".hc_" not in name
    }
    shapes = dict(sorted(shapes.items()))
    shapes |= {f"{part}.weight": torch.Size([hidden]) for part in ("enorm", "hnorm", "shared_head.norm")}
    shapes["eh_proj.weight"] = torch.Size([hidden, 2 * hidden])
    mtp = {name: _draw(name, shape, generator, 0.1 if good else 1.0) for name, shape in shapes.items()}
    if good:
        mtp["eh_proj.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1)
        mtp["enorm.weight"] = torch.ones(hidden)
        mtp["shared_head.norm.weight"] = weights[f"{TEXT}norm.weight"].clone()
    return {prefix + name: weight for name, weight in mtp.items()}


def release_spelling(
    config: dict[str, Any],
    *,
    spelling: str = "deepseek_sparse_attention",
    legacy_linear: bool = False,
    mtp: bool = True,
) -> None:
    """Rewrite transformers' config.json, in place, as released ones are spelled.

    Args:
        config: the file's content.
        spelling: name of the sparse layers in ``layer_types``; ``deepseek_sparse_attention`` in the release,
            ``full_attention`` in older files and ``indexed_attention`` in what transformers writes.
        legacy_linear: give the shape of the KDA layers in a dict of its own, as Kimi Linear does.
        mtp: the checkpoint has a draft layer.
    """
    text = config["text_config"]
    sparse = [kind != "linear_attention" for kind in text["layer_types"]]
    text["layer_types"] = [spelling if it else "linear_attention" for it in sparse]
    text |= {
        "first_k_dense_replace": text["mlp_layer_types"].count("dense"),
        "index_kpool_compress": True,
        "index_share_for_mtp_iteration": True,
        "mhc": True,
        "mla_use_nope": True,
        "moe_router_dtype": "float32",
        "num_nextn_predict_layers": int(mtp),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    if legacy_linear:
        bound = text.pop("linear_lower_bound")
        text["linear_attn_config"] = {
            "num_heads": text.pop("linear_num_heads"),
            "head_dim": text.pop("linear_head_dim"),
            "short_conv_kernel_size": text.pop("linear_conv_kernel_dim"),
            "gate_lower_bound": bound,
            "safe_gate": bound is not None,
            "kda_layers": [i for i, it in enumerate(sparse) if not it],
            "full_attn_layers": [i for i, it in enumerate(sparse) if it],
        }


def random_glm5_next(
    path: Path,
    *,
    index_topk: int = 16,
    kv_lora_rank: int = 32,
    linear_head_dim: int = 16,
    index_head_dim: int = 16,
    lower_bound: float | None = -5.0,
    swiglu_limit: float = 1.0,
    shared_choice: bool = False,
    mtp: bool = True,
    good_mtp: bool = True,
    spelling: str = "deepseek_sparse_attention",
    legacy_linear: bool = False,
    dtype: str = "float32",
    seed: int = 0,
    residual: float = 0.7,
) -> Path:
    """Write a random GLM-5.3-Flash to ``path``: hidden size 64, eight layers, every fourth with sparse attention.

    The first three layers are dense, the others have eight experts, two per token, and a shared one.

    Args:
        path: directory to write; made if absent.
        index_topk: tokens that a query sees besides its open pool.
        kv_lora_rank: width of the cached latent.
        linear_head_dim: K and V of the Kimi Delta Attention layers.
        index_head_dim: of the indexer.
        lower_bound: of the decay; None for the softplus gate.
        swiglu_limit: clamp of every MLP.
        shared_choice: three layers have sparse attention, and the last attends to what the one before chose.
        mtp: write a draft layer too.
        good_mtp: let its drafts be accepted often; a random one's never are.
        spelling: of the sparse layers in ``layer_types``.
        legacy_linear: write the older ``linear_attn_config`` instead of ``linear_*``.
        dtype: of every weight but those that the release keeps in fp32.
        seed: of every weight.
        residual: what the layers add to the residual streams, relative to the embedding.

    Returns:
        ``path``.
    """
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = glm_tokenizer()
    shape: dict[str, Any] = {
        "index_topk": index_topk,
        "kv_lora_rank": kv_lora_rank,
        "linear_head_dim": linear_head_dim,
        "index_head_dim": index_head_dim,
        "linear_lower_bound": lower_bound,
        "swiglu_limit": swiglu_limit,
    }
    if shared_choice:
        # transformers hands a choice on to the very next layer, so the one before has sparse attention too.
        shape["indexer_types"] = ["full"] * SPARSE_ATTENTION + ["shared"]
        sparse = (FIRST_SPARSE_ATTENTION, SPARSE_ATTENTION - 1, SPARSE_ATTENTION)
        shape["layer_types"] = ["indexed_attention" if i in sparse else "linear_attention" for i in range(LAYERS)]
    model = transformers.Glm5NextForConditionalGeneration(_config(tokenizer, shape))
    model.generation_config.update(eos_token_id=[tokenizer.eos_token_id], pad_token_id=tokenizer.pad_token_id)
    generator = torch.Generator().manual_seed(seed)
    _draw_model(model, generator, residual)
    model.save_pretrained(path)  # under the released names
    tokenizer.save_pretrained(path)

    weights = load_file(path / "model.safetensors")
    if mtp:
        weights |= _mtp_weights(weights, generator, good_mtp)
    cast = {name: w if name.endswith(FP32) else w.to(getattr(torch, dtype)) for name, w in weights.items()}
    save_file({name: w.contiguous() for name, w in cast.items()}, path / "model.safetensors", metadata={"format": "pt"})

    config = json.loads((path / "config.json").read_text())
    release_spelling(config, spelling=spelling, legacy_linear=legacy_linear, mtp=mtp)
    config["dtype"] = config["text_config"]["dtype"] = config["vision_config"]["dtype"] = dtype
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return path


def changed(path: Path, to: Path, **text: Any) -> Path:
    """Copy a checkpoint with other values in the config's text part."""
    shutil.copytree(path, to)
    config = json.loads((to / "config.json").read_text())
    assert text.keys() <= config["text_config"].keys()
    config["text_config"] |= text
    (to / "config.json").write_text(json.dumps(config))
    return to
