"""GLM-5.3-Flash's config.json as LMDeploy's ModelConfig: layers, caches, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from lmdeploy.pytorch.config import ModelConfig, StateCacheSpec
from lmdeploy.pytorch.configurations.builder import AutoModelConfigBuilder

from . import DRAFT_ARCHITECTURE, METHOD, MODEL_TYPE

# State caches, for each KDA layer.
CONV: Final = "glm5_kda_conv"  # [W - 1, or W + drafts, channels], position-major, activation dtype
RECURRENT: Final = "glm5_kda_recurrent"  # [(1 + drafts,) heads, V, K] fp32
LINEAR: Final = "linear_attention"
# The released config says the first, transformers turns it into the second, and older ones say the third.
SPARSE: Final = ("deepseek_sparse_attention", "indexed_attention", "full_attention")


class ConfigError(ValueError):
    """A config.json that this model cannot serve; the message says which key, what came and what is wanted."""

    def __init__(self, key: str, came: object, wanted: str) -> None:
        super().__init__(f"{MODEL_TYPE}: config key '{key}' is {came}; wanted {wanted}")


def split_layers(text: Any) -> tuple[list[int], list[int]]:
    """Return the numbers of the KDA layers and of the sparse-attention layers."""
    kda = [i for i, kind in enumerate(text.layer_types) if kind == LINEAR]
    sparse = [i for i, kind in enumerate(text.layer_types) if kind in SPARSE]
    unknown = sorted(set(text.layer_types) - {LINEAR, *SPARSE})
    if unknown or len(text.layer_types) != text.num_hidden_layers:
        raise ConfigError(
            "layer_types",
            f"{len(text.layer_types)} entries" + (f" with {', '.join(unknown)}" if unknown else ""),
            f"{text.num_hidden_layers} entries, each {LINEAR} or one of {', '.join(SPARSE)}",
        )
    return kda, sparse


def draft_layers(text: Any, hf_config: Any) -> int:
    """Return how many MTP layers the checkpoint says it has."""
    for config in (text, hf_config):
        number = getattr(config, "num_nextn_predict_layers", None)
        if number is not None:
            return int(number)
    return 0


def _written(model_path: str | None) -> Mapping[str, Any]:
    """Return the text part of config.json as written: transformers fills what is missing with class defaults."""
    path = Path(model_path or "") / "config.json"
    if not model_path or not path.is_file():
        return {}
    raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    text: Mapping[str, Any] = raw.get("text_config", raw)
    return text


def _check(text: Any, model_path: str | None, tp: int) -> None:
    # A rotary part, and a choice that is no whole number of pools, are refused by transformers.
    written = _written(model_path)
    if written and "index_kpool" not in written:
        raise ConfigError("index_kpool", "missing", "the checkpoint's own value: no default fits the released model")
    if not text.index_kpool_always_select_tail:
        raise ConfigError("index_kpool_always_select_tail", False, "true")
    if text.n_group != 1 or text.topk_group != 1:
        raise ConfigError("n_group", f"{text.n_group} (topk_group {text.topk_group})", "1 and 1")
    if text.hidden_act != "silu":
        raise ConfigError("hidden_act", text.hidden_act, "silu")
    if text.attention_bias:
        raise ConfigError("attention_bias", True, "false")
    if text.indexer_types[split_layers(text)[1][0]] != "full":
        raise ConfigError("indexer_types", text.indexer_types, "'full' at the first sparse-attention layer")
    for key in ("num_attention_heads", "linear_num_heads", "intermediate_size", "moe_intermediate_size", "vocab_size"):
        if getattr(text, key) % tp:
            raise ConfigError(key, getattr(text, key), f"a multiple of tp, {tp}")


def take_quantization(hf_config: Any) -> tuple[int, int] | None:
    """Remove `quantization_config` and return the blocks of the checkpoint's FP8 weights, or None.

    They are dequantised as they are read (weights.py): A2 and A3 have no FP8 products. LMDeploy must not see the entry,
    or it would build FP8 layers.

    Raises:
        ConfigError: another quantisation, or FP8 that was asked for by `model_format`.
    """
    found = [getattr(config, "quantization_config", None) for config in (hf_config, hf_config.text_config)]
    for config in (hf_config, hf_config.text_config):
        if hasattr(config, "quantization_config"):
            del config.quantization_config
    quantization = next((q for q in found if q), None)
    if quantization is None:
        return None
    if not isinstance(quantization, Mapping):
        quantization = quantization.to_dict()
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method != "fp8" or not block or len(block) != 2 or quantization.get("lmdeploy_patched"):
        raise ConfigError(
            "quantization_config",
            {k: quantization.get(k) for k in ("quant_method", "weight_block_size", "lmdeploy_patched")},
            "none, or a checkpoint of block-FP8 weights (quant_method fp8 with weight_block_size), which are loaded as "
            "bf16; model_format='fp8' is not served",
        )
    return int(block[0]), int(block[1])


def keep_block_size(kpool: int, cache_config: Any) -> None:
    """Check the block size. Without such a function LMDeploy forces 32 on every model with keys of 512 and more.

    Raises:
        ConfigError: a block does not hold whole pools.
    """
    for key in ("block_size", "kernel_block_size"):
        if getattr(cache_config, key) % kpool:
            raise ConfigError(key, getattr(cache_config, key), f"a multiple of index_kpool, {kpool}")


def state_specs(text: Any, tp: int, drafts: int) -> list[StateCacheSpec]:
    """Return the state caches of one rank: a window and a state for each KDA layer, rings when there are drafts."""
    kda, _ = split_layers(text)
    heads, dim, width = text.linear_num_heads // tp, text.linear_head_dim, text.linear_conv_kernel_dim
    columns = width + drafts if drafts else width - 1
    ring = (1 + drafts,) if drafts else ()
    # The window's dtype is set when LMDeploy knows that of the activations (register.py).
    return [
        StateCacheSpec(CONV, (columns, 3 * heads * dim), torch.bfloat16, layer_ids=kda),
        StateCacheSpec(RECURRENT, (*ring, heads, dim, dim), torch.float32, layer_ids=kda),
    ]


def set_window_dtype(config: Any) -> Any:
    """Give the convolution's window the dtype of the activations, in place; return the config."""
    for spec in config.state_cache_specs:
        if spec.name == CONV:
            spec.dtype = config.dtype
    if any(spec.name == CONV for spec in config.state_cache_specs):
        config.states_shapes = [(spec.shape, spec.dtype) for spec in config.state_cache_specs]
    return config


class Glm5NextModelConfigBuilder(AutoModelConfigBuilder):  # type: ignore[misc]
    """Builds the configs of the model and of its MTP layer; LMDeploy finds it by the model type."""

    @classmethod
    def condition(cls, hf_config: Any) -> bool:
        return bool(hf_config.model_type == MODEL_TYPE)

    @classmethod
    def build(
        cls,
        hf_config: Any,
        model_path: str | None = None,
        tp: int = 1,
        is_draft_model: bool = False,
        spec_method: str | None = None,
        num_spec_tokens: int = 0,
        **kwargs: Any,
    ) -> Any:
        """Return the ModelConfig; `hf_config` loses its quantisation entry and gains `fp8_block`.

        Raises:
            ConfigError: what this model cannot serve.
        """
        text = hf_config.text_config
        hf_config.fp8_block = take_quantization(hf_config)
        _check(text, model_path, tp)
        if spec_method not in (None, METHOD):
            raise ConfigError("speculative method", spec_method, METHOD)
        layers = draft_layers(text, hf_config)
        if (spec_method or is_draft_model) and layers != 1:
            raise ConfigError("num_nextn_predict_layers", layers, "1: drafts come from the checkpoint's MTP layer")
        _, sparse = split_layers(text)
        heads = max(1, tp)  # one latent head, on every rank
        config = ModelConfig(
            hidden_size=text.hidden_size,
            num_layers=len(sparse),
            num_attention_heads=text.num_attention_heads,
            num_key_value_heads=heads,
            bos_token_id=text.bos_token_id,
            eos_token_id=_end_tokens(text, hf_config),
            head_dim=text.kv_lora_rank,
            k_head_dim=text.kv_lora_rank,
            v_head_dim=0,
            vocab_size=text.vocab_size,
            model_paradigm="ar_spec" if spec_method or is_draft_model else "ar",
        )
        config.llm_config = text
        config.update_cache_config_func = partial(keep_block_size, text.index_kpool)
        # LMDeploy reads this one from the text config. `num_key_value_heads` there stays: its class checks it.
        text.num_replicate_key_value_heads = heads
        if is_draft_model:
            hf_config.architectures = [DRAFT_ARCHITECTURE]
            config.num_layers = layers
            return config
        config.state_cache_specs = state_specs(text, tp, num_spec_tokens)
        config.states_shapes = [(spec.shape, spec.dtype) for spec in config.state_cache_specs]
        return config


def _end_tokens(text: Any, hf_config: Any) -> Any:
    end = text.eos_token_id
    return getattr(hf_config, "eos_token_id", None) if end is None else end
