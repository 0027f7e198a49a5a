"""Writers of tiny GLM-5.3-Flash checkpoints with block-FP8 weights, as released, and of what these stand for.

As in the release the projections of Kimi Delta Attention, the router, norms, embedding and LM head are not quantised;
those of latent attention, the indexer, the MLPs and the draft layer are.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from tests.e2e.glm_checkpoints import FP32, random_glm5_next

SCALE: Final = "_scale_inv"
LARGEST: Final = 448.0  # of float8_e4m3fn
PLAIN: Final = re.compile(r"norm|\.mlp\.gate\.weight$|conv1d|visual|weights_proj|embed_tokens|lm_head")
FILE: Final = "model.safetensors"
ORDERS: Final = ("one file", "scales first", "weights first")
Weights = dict[str, Tensor]


def is_quantised(name: str, weights: Weights) -> bool:
    """Say whether the release has this tensor in FP8."""
    linear = f"{name.partition('.self_attn.')[0]}.self_attn.A_log" in weights
    return (
        name.endswith(".weight")
        and weights[name].dim() == 2
        and not PLAIN.search(name)
        and not (linear and ".self_attn." in name)
    )


def quantised(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return FP8 values, a scale fp32 for each block, and the fp32 weight that they stand for."""
    rows, columns = (-(-n // side) for n, side in zip(weight.shape, block, strict=True))
    padding = (0, columns * block[1] - weight.size(1), 0, rows * block[0] - weight.size(0))
    blocks = pad(weight.float(), padding).view(rows, block[0], columns, block[1])
    scale = blocks.abs().amax((1, 3)) / LARGEST
    of_values = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    of_values = of_values[: weight.size(0), : weight.size(1)]
    values = (weight.float() / of_values).to(torch.float8_e4m3fn)
    return values, scale, values.float() * of_values


def _convert(path: Path, block: tuple[int, int]) -> tuple[Weights, Weights, Weights]:
    """Return the checkpoint with FP8 weights, their scales, and the checkpoint with what they stand for."""
    weights = load_file(path / FILE)
    small, scales, dense = dict(weights), Weights(), dict(weights)
    for name in weights:
        if is_quantised(name, weights):
            small[name], scales[name + SCALE], dense[name] = quantised(weights[name], block)
    assert scales
    return small, scales, dense


def shard(path: Path, *files: Weights) -> None:
    """Write a checkpoint's tensors in several files, read in this order, and their index."""
    (path / FILE).unlink(missing_ok=True)
    places: dict[str, str] = {}
    for i, weights in enumerate(files):
        name = f"model-{i + 1:05}-of-{len(files):05}.safetensors"
        save_file(weights, path / name, metadata={"format": "pt"})
        places |= dict.fromkeys(weights, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def random_glm5_next_fp8(
    path: Path, *, block: tuple[int, int] = (128, 128), inside: bool = False, order: str = "one file", **options: Any
) -> Path:
    """Write a random GLM-5.3-Flash with FP8 weights.

    Args:
        path: directory to write.
        block: sides of the part of a weight that has a scale of its own.
        inside: `quantization_config` stands in `text_config`.
        order: of ORDERS; the last two put weights and scales into different files.
        options: of `random_glm5_next`.
    """
    random_glm5_next(path, **options)
    small, scales, _ = _convert(path, block)
    if order == "one file":
        save_file(small | scales, path / FILE, metadata={"format": "pt"})
    else:
        shard(path, *((scales, small) if order == "scales first" else (small, scales)))
    config = json.loads((path / "config.json").read_text())
    place = config["text_config"] if inside else config
    place["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block),
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path


def random_glm5_next_dequantised(path: Path, *, block: tuple[int, int], to: str | None = None, **options: Any) -> Path:
    """Write what the FP8 checkpoint of that block stands for, in fp32; what can be of another type, in that type."""
    random_glm5_next(path, **options)
    _, _, dense = _convert(path, block)
    if to is not None:
        dense = {n: w if n.endswith((*FP32, "_fn")) else w.to(getattr(torch, to)) for n, w in dense.items()}
    save_file(dense, path / FILE, metadata={"format": "pt"})
    return path


def changed_tensors(path: Path, to: Path, change: Any) -> Path:
    """Copy a checkpoint of one file whose tensors `change` has changed in place."""
    shutil.copytree(path, to)
    weights = load_file(to / FILE)
    change(weights)
    save_file(weights, to / FILE, metadata={"format": "pt"})
    return to
