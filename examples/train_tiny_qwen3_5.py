r"""Train a tiny Qwen3.5 language model and its multi-token-prediction (MTP) head on a CPU.

The result is a real checkpoint of a few megabytes: greedy text is Python-shaped and drafts of the head are accepted
at rates that vary by position, so a fault in a serving engine shows in the text or in the acceptance histogram. The
base has 3 Gated DeltaNet layers and 1 full-attention layer, the head one full-attention layer; the stages are those
of tiny_training.py.

    python -m examples.train_tiny_qwen3_5 --work build/tiny_qwen3_5 --out examples/checkpoints/tiny_qwen3_5 \
        --prompts tests/e2e/data/heldout_prompts.json
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from dlinfer_ext.e2e.simulation import MtpHead
from examples.tiny_training import VOCAB_SIZE, Recipe, run, train_bpe

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


def train_tokenizer(texts: list[str]) -> Qwen3_5Tokenizer:
    """Train a byte-level BPE behind Qwen3.5's own normaliser and pre-tokenizer.

    ``AutoTokenizer`` rebuilds both from the model type and ignores what a saved ``tokenizer.json`` says, so training
    behind any others would make the two disagree.
    """
    vocab, merges = train_bpe(Qwen3_5Tokenizer().backend_tokenizer, texts, SPECIAL_TOKENS)
    return Qwen3_5Tokenizer(
        vocab=vocab,
        merges=merges,
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIAL_TOKENS),
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
    )


def build_model(tokenizer: Any, seed: int) -> Qwen3_5ForConditionalGeneration:
    """Build the untrained model in the vision-language layout of Qwen3.5 checkpoints; its vision part is idle."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "attn_output_gate": True,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "mtp_num_hidden_layers": 1,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "dtype": "float32",
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 128,
        "num_position_embeddings": 64,
    }
    config = Qwen3_5Config(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen3_5ForConditionalGeneration(config)
    model.generation_config.update(eos_token_id=ids["<|im_end|>"], pad_token_id=ids["<|endoftext|>"])
    return model


def head_weights(model: Any, head: MtpHead) -> dict[str, torch.Tensor]:
    return {f"mtp.{name}": value for name, value in head.state_dict().items()}


def main() -> None:
    # The default chunk of 64 gives the same gradients and takes a third longer at this size.
    modeling.torch_chunk_gated_delta_rule = functools.partial(modeling.torch_chunk_gated_delta_rule, chunk_size=32)
    run(Recipe(train_tokenizer, build_model, MtpHead, head_weights), __doc__)


if __name__ == "__main__":
    main()
