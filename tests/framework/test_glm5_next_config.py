"""GLM-5.3-Flash's config.json: what becomes of it in LMDeploy, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from lmdeploy.pytorch import config as host_config
from lmdeploy.pytorch.config import DistConfig, ModelConfig

from dlinfer_ext.framework.lmdeploy.models.glm5_next import ARCHITECTURE, DRAFT_ARCHITECTURE, METHOD, config, register

# As released; see docs/en/hosts.md for where the values come from.
RELEASED = {"index_kpool": 4, "num_nextn_predict_layers": 1, "index_share_for_mtp_iteration": True}


def outer(text: dict[str, Any] | None = None, **more: Any) -> Any:
    return transformers.Glm5NextConfig(text_config={**RELEASED, **(text or {})}, vision_config={}, **more)


def build(hf_config: Any, **options: Any) -> Any:
    return config.Glm5NextModelConfigBuilder.build(hf_config, **options)


def spelled(sparse: str) -> list[str]:
    return [sparse if i % 4 == 3 else "linear_attention" for i in range(45)]


@pytest.mark.parametrize("sparse", ["deepseek_sparse_attention", "indexed_attention", "full_attention"])
def test_every_spelling_of_the_layers(sparse: str) -> None:
    built = build(outer({"layer_types": spelled(sparse)}))
    assert built.num_layers == 11
    kda, sparse_layers = config.split_layers(built.llm_config)
    assert sparse_layers == list(range(3, 45, 4))
    assert len(kda) == 34
    assert [spec.layer_ids for spec in built.state_cache_specs] == [kda, kda]


def test_a_kind_of_layer_that_is_not_known() -> None:
    with pytest.raises(ValueError, match=r"'layer_types' is 2 entries with mamba; wanted 2 entries"):
        config.split_layers(SimpleNamespace(layer_types=["mamba", "linear_attention"], num_hidden_layers=2))


def test_nested_settings_of_the_linear_layers() -> None:
    nested = {"num_heads": 32, "head_dim": 64, "short_conv_kernel_size": 3, "gate_lower_bound": -4.0}
    built = build(outer({"linear_attn_config": nested}))
    window, state = built.state_cache_specs
    assert window.shape == (2, 3 * 32 * 64)
    assert state.shape == (32, 64, 64)
    assert built.llm_config.linear_lower_bound == -4.0


@pytest.mark.parametrize(
    ("tp", "drafts", "window", "state", "slot_mib"),
    [
        (1, 0, (3, 24576), (64, 128, 128), 136 + 34 * 3 * 24576 * 2 / 2**20),
        (1, 3, (7, 24576), (4, 64, 128, 128), 544 + 34 * 7 * 24576 * 2 / 2**20),
        (8, 3, (7, 3072), (4, 8, 128, 128), 68 + 34 * 7 * 3072 * 2 / 2**20),
    ],
)
def test_state_of_the_released_model(
    tp: int, drafts: int, window: tuple[int, ...], state: tuple[int, ...], slot_mib: float
) -> None:
    built = build(outer(), tp=tp, num_spec_tokens=drafts, spec_method=METHOD if drafts else None)
    specs = built.state_cache_specs
    assert [spec.shape for spec in specs] == [window, state]
    assert [spec.dtype for spec in specs] == [torch.bfloat16, torch.float32]
    size = sum(math.prod(s.shape) * s.dtype.itemsize * len(s.layer_ids) for s in specs)
    assert size / 2**20 == pytest.approx(slot_mib)
    assert built.states_shapes, "LMDeploy takes a model without these for one without states"
    assert (built.k_head_dim, built.v_head_dim, built.num_key_value_heads) == (512, 0, tp)
    assert not built.is_gated_delta


def test_the_mtp_layer() -> None:
    hf_config = outer()
    built = build(hf_config, is_draft_model=True, spec_method=METHOD, tp=2)
    assert hf_config.architectures == [DRAFT_ARCHITECTURE]
    assert (built.num_layers, built.model_paradigm, built.state_cache_specs) == (1, "ar_spec", [])


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ({"num_nextn_predict_layers": 0}, {"spec_method": METHOD}, "num_nextn_predict_layers' is 0; wanted 1"),
        ({}, {"spec_method": "eagle3"}, "speculative method' is eagle3; wanted deepseek_mtp"),
        ({}, {"tp": 3}, "num_attention_heads' is 64; wanted a multiple of tp, 3"),
        ({"n_group": 2, "topk_group": 1}, {}, "n_group' is 2"),
        ({"hidden_act": "gelu"}, {}, "hidden_act' is gelu"),
        ({"attention_bias": True}, {}, "attention_bias' is True"),
        ({"index_kpool_always_select_tail": False}, {}, "index_kpool_always_select_tail' is False; wanted true"),
        ({"indexer_types": ["shared"] * 45}, {}, "wanted 'full' at the first"),
    ],
)
def test_what_is_refused(text: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(outer(text), **options)


@pytest.mark.parametrize("nested", [True, False], ids=["in text_config", "flat"])
def test_the_size_of_a_pool_is_never_a_default(tmp_path: Path, nested: bool) -> None:
    hf_config = outer()
    text = hf_config.text_config.to_dict()
    del text["index_kpool"]
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text} if nested else text), encoding="utf-8")
    with pytest.raises(ValueError, match="'index_kpool' is missing; wanted the checkpoint's own value"):
        build(hf_config, model_path=str(tmp_path))
    text["index_kpool"] = 4
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}), encoding="utf-8")
    build(hf_config, model_path=str(tmp_path))


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}


@pytest.mark.parametrize("inside", [True, False], ids=["in text_config", "outside"])
def test_block_fp8_is_taken_out_of_the_hosts_sight(inside: bool) -> None:
    hf_config = outer()
    (hf_config.text_config if inside else hf_config).quantization_config = dict(FP8)
    build(hf_config)
    assert hf_config.fp8_block == (128, 128)
    assert not hasattr(hf_config, "quantization_config")
    assert not hasattr(hf_config.text_config, "quantization_config")


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "fp8"},  # one scale for a tensor
        {**FP8, "lmdeploy_patched": True},  # model_format="fp8": weights to be quantised as they are read
    ],
    ids=["awq", "per tensor", "online"],
)
def test_other_quantisation_is_refused(quantization: dict[str, Any]) -> None:
    hf_config = outer()
    hf_config.quantization_config = quantization
    with pytest.raises(ValueError, match=r"'quantization_config' is .*; wanted none, or a checkpoint of block-FP8"):
        build(hf_config)


def test_blocks_hold_whole_pools() -> None:
    check = build(outer()).update_cache_config_func
    cache = SimpleNamespace(block_size=128, kernel_block_size=128)
    check(cache)
    assert (cache.block_size, cache.kernel_block_size) == (128, 128)
    with pytest.raises(ValueError, match="'kernel_block_size' is 30; wanted a multiple of index_kpool, 4"):
        check(SimpleNamespace(block_size=120, kernel_block_size=30))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_window_has_the_dtype_of_the_activations(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_config, "_update_torch_dtype", host_config._update_torch_dtype)
    register.follow_dtype(host_config)
    hf_config = outer(dtype="bfloat16", architectures=[ARCHITECTURE])
    built = ModelConfig.from_hf_config(hf_config, dtype=dtype, dist_config=DistConfig(), device_type="ascend")
    assert built.dtype == getattr(torch, dtype)
    assert [spec.dtype for spec in built.state_cache_specs] == [built.dtype, torch.float32]
    assert [kind for _, kind in built.states_shapes] == [built.dtype, torch.float32]
