r"""Train a tiny GLM-5.3-Flash language model and its multi-token-prediction (MTP) layer on a CPU.

A real checkpoint of a few megabytes, as train_tiny_qwen3_5.py makes one of Qwen3.5; the stages are those of
tiny_training.py. The base has 3 Kimi Delta Attention layers and 1 layer of sparse latent attention, one dense MLP and
three mixtures of experts, hyper-connections of four streams; the draft layer is one of sparse attention and experts.

Two things differ. No gradient of the cross-entropy reaches the indexer, which only chooses; it learns to rank pools as
the attention does (as in DeepSeek-V3.2's sparse training, https://arxiv.org/abs/2512.02556, section 2.1.1). And the
chunked rule that transformers has in PyTorch spends its time on a tensor of chunk x chunk x channels; while the base
trains a form with chunks of 16 takes its place.

    python -m examples.train_tiny_glm5_next --work build/tiny_glm5_next --out examples/checkpoints/tiny_glm5_next \
        --prompts tests/e2e/data/heldout_prompts_glm.json
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional as F
from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration, PreTrainedTokenizerFast
from transformers.models.glm5_next import modeling_glm5_next as modeling

from dlinfer_ext.e2e.glm_head import GlmMtpHead
from examples.tiny_training import VOCAB_SIZE, Recipe, next_token_loss, run, train_bpe

SPECIAL_TOKENS = (
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
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# GLM-4's and later tokenizers split like this before they merge.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CHUNK = 16  # exp(16 * 5) is well inside fp32


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE behind GLM's way of splitting."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern=Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    vocab, merges = train_bpe(backend, texts, SPECIAL_TOKENS)
    backend.model = models.BPE(vocab=vocab, merges=merges)
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
    )


def build_model(tokenizer: Any, seed: int) -> Glm5NextForConditionalGeneration:
    """Build the untrained model in the layout of the released checkpoint; its vision part is idle."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    end = ids["<|endoftext|>"]
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["indexed_attention"],
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 0,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "index_topk": 32,
        "index_kpool": 4,
        "index_n_heads": 32,
        "index_head_dim": 16,
        "linear_num_heads": 4,
        "linear_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "hc_mult": 4,
        "swiglu_limit": 2.0,
        "max_position_embeddings": 4096,
        "eos_token_id": [end],
        "pad_token_id": end,
        "num_nextn_predict_layers": 1,
        "index_share_for_mtp_iteration": True,
        "dtype": "float32",
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 128,
        "projection_intermediate_size": 64,
        "image_size": 56,
    }
    config = Glm5NextConfig(
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
    torch.manual_seed(seed)
    model = Glm5NextForConditionalGeneration(config)
    with torch.no_grad():  # transformers starts the padding token's embedding at zero and gives it no gradient
        model.model.language_model.embed_tokens.weight[end].normal_(std=0.02)
    model.generation_config.update(eos_token_id=[end], pad_token_id=end)
    return model


# --------------------------------------------------------------------------------------------------------- faster rule


def chunk_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    """Run Kimi Delta Attention from a zero state: q, k, v, g [B, T, H, D], beta [B, T, H], to [B, T, H, D].

    The chunked form of https://arxiv.org/abs/2510.26692, section 3.2, with the decay between two tokens of a chunk as
    a quotient, which is exact in fp32 as long as a chunk's decay stays above exp(-80).
    """
    batch, length, heads, dim = key.shape
    assert length % CHUNK == 0
    query, key = modeling.l2norm(query) * dim**-0.5, modeling.l2norm(key)
    parts = (query, key, value, g, beta[..., None])
    # [B, H, chunks, CHUNK, D]
    q, k, v, g, beta = (x.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2, 4) for x in parts)
    decay = g.cumsum(-2)
    since, until = decay.exp(), (-decay).exp()
    q_in, k_in, k_out = q * since, k * since, k * until
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    within = ((k_in @ k_out.mT) * beta).masked_fill(later.mT, 0)
    right = torch.cat([v, k_in], -1) * beta
    solved = torch.linalg.solve_triangular(within + torch.eye(CHUNK), right, upper=False, unitriangular=True)
    new, read = solved.split([dim, dim], -1)
    scores = (q_in @ k_out.mT).masked_fill(~later, 0)
    last = since[..., -1:, :]
    k_end = k_out * last
    state, outputs = torch.zeros(batch, heads, dim, dim), []
    for c in range(length // CHUNK):
        added = new[:, :, c] - read[:, :, c] @ state
        outputs.append(q_in[:, :, c] @ state + scores[:, :, c] @ added)
        state = state * last[:, :, c].mT + k_end[:, :, c].mT @ added
    return torch.stack(outputs, 2).permute(0, 2, 3, 1, 4).reshape(batch, length, heads, dim), None


@contextlib.contextmanager
def faster_rule() -> Iterator[None]:
    rule = modeling.chunk_kimi_delta_attention
    modeling.chunk_kimi_delta_attention = chunk_rule
    try:
        yield
    finally:
        modeling.chunk_kimi_delta_attention = rule


# ------------------------------------------------------------------------------------------------------------- indexer


def indexer_loss(attention: Any, x: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the indexer's choice among pools to what attention would give each: x [B, T, hidden].

    The attention is over all earlier tokens, its weights averaged over the heads; queries without a whole pool behind
    them are left out. Only the indexer gets a gradient.
    """
    indexer, x = attention.indexer, x.detach()
    batch, length = x.shape[:2]
    with torch.no_grad():
        q_resid = attention.q_a_layernorm(attention.q_a_proj(x))
        query = attention.q_b_proj(q_resid).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
        latent = attention.kv_a_layernorm(attention.kv_a_proj_with_mqa(x))[:, None]
        key, _ = attention.expand_kv(latent, latent[..., :0])
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        weights = (query @ key.mT * attention.scaling).masked_fill(~causal, -torch.inf).softmax(-1).mean(1)
        pools = length // indexer.index_kpool
        target = weights[..., : pools * indexer.index_kpool].unflatten(-1, (pools, -1)).sum(-1)
        whole = causal[:, indexer.index_kpool - 1 :: indexer.index_kpool][:, :pools]
        target = target * whole
        target = target / target.sum(-1, keepdim=True).clamp_min(1e-9)
    index_query = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, -1))
    gate = F.linear(x, indexer.index_kpool_compress_gate)
    packed = torch.cat([indexer.k_norm(indexer.wk(x)), gate, torch.ones(batch, length, 1)], -1)
    pool_keys = indexer.get_pooled_states(packed)[0]
    heads = F.relu(index_query @ pool_keys.mT[:, None] * indexer.softmax_scale)
    score = (indexer.weights_proj(x)[..., None, :] * indexer.n_heads**-0.5 @ heads).squeeze(-2)
    log_choice = score.masked_fill(~whole, -1e9).log_softmax(-1)
    each: torch.Tensor = -(target * log_choice).sum(-1)
    return each[:, indexer.index_kpool - 1 :].mean()


def loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Next-token cross-entropy and the indexers' own loss."""
    seen: list[tuple[Any, torch.Tensor]] = []

    def note(attention: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append((attention, kwargs["hidden_states"]))

    layers = [layer.self_attn for layer in model.model.language_model.layers if hasattr(layer.self_attn, "indexer")]
    hooks = [attention.register_forward_pre_hook(note, with_kwargs=True) for attention in layers]
    total = next_token_loss(model, tokens)
    for hook in hooks:
        hook.remove()
    for attention, x in seen:
        total = total + 0.3 * indexer_loss(attention, x)
    return total


# ---------------------------------------------------------------------------------------------------------------- save


def head_weights(model: Any, head: GlmMtpHead) -> dict[str, torch.Tensor]:
    return {GlmMtpHead.prefix(model) + name: value for name, value in head.released().items()}


def finish_config(config: dict[str, Any]) -> None:
    """Spell the layers as the release does, and add what it says and transformers does not keep."""
    kinds = config["text_config"]["layer_types"]
    config["text_config"] |= {
        "layer_types": ["deepseek_sparse_attention" if kind == "indexed_attention" else kind for kind in kinds],
        "first_k_dense_replace": config["text_config"]["mlp_layer_types"].count("dense"),
        "index_kpool_compress": True,
        "mhc": True,
        "mla_use_nope": True,
        "moe_router_dtype": "float32",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def main() -> None:
    recipe = Recipe(
        train_tokenizer,
        build_model,
        GlmMtpHead,
        head_weights,
        finish_config=finish_config,
        loss=loss,
        training=faster_rule,
        steps=1400,
        head_steps=1500,
    )
    run(recipe, __doc__)


if __name__ == "__main__":
    main()
