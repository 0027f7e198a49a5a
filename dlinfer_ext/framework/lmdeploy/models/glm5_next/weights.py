"""A checkpoint's tensors into a model's parameters: names, FP8 pairs, and an account of what came."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import torch
from lmdeploy.pytorch.weight_loader.model_weight_loader import load_weight
from torch import Tensor, nn

from .parameters import Fp8Weight, Share, Source

SCALE: Final = "_scale_inv"
_FP8: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
_TEXT: Final = "model.language_model."
_EXPERT: Final = re.compile(r"^(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
_HYPER_CONNECTION: Final = re.compile(r"\.hc_(attn|ffn)_(fn|base|scale)$")
# Checkpoint name, our name, and the parts in order. Only the KDA blocks have merged q, k, v.
_MERGED: Final = (
    (re.compile(r"\.self_attn\.(q|k|v)_proj\.weight$"), ".self_attn.qkv_proj.weight", "qkv"),
    (re.compile(r"\.self_attn\.(q|k|v)_conv1d\.weight$"), ".self_attn.conv_weight", "qkv"),
    (re.compile(r"\.mlp\.(?:shared_experts\.)?(gate|up)_proj\.weight$"), None, ("gate", "up")),
)
_LISTED: Final = 8


class CheckpointError(ValueError):
    """A checkpoint whose tensors are not those of the model."""

    def __init__(self, what: str, names: Iterable[str], wanted: str) -> None:
        listed = sorted(names)
        more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
        super().__init__(f"glm5_next: {what}: {', '.join(listed[:_LISTED])}{more}; {wanted}")


def place_of(name: str) -> tuple[str, Any]:
    """Return the parameter that a checkpoint's tensor goes to, and its part in it (see `parameters.Share`)."""
    if expert := _EXPERT.match(name):
        kind = expert[3]
        part = 0 if kind in ("gate", "down") else 1
        return f"{expert[1]}.{'down' if kind == 'down' else 'gate_up'}", (int(expert[2]), part)
    for pattern, target, order in _MERGED:
        if found := pattern.search(name):
            if target is None:
                return f"{name[: found.start(1)]}gate_up_proj.weight", order.index(found[1])
            return name[: found.start()] + target, order.index(found[1])
    return _HYPER_CONNECTION.sub(r".\1_hc.\2", name), None


class WeightLoader:
    """Loads what belongs to `model`, in any order and any number of calls, and knows in the end what is missing.

    Args:
        model: parameters with a `share` (parameters.py) are filled by it, the others by LMDeploy's loader.
        block: sides of the blocks of FP8 weights; None if the checkpoint says that it has none.
    """

    def __init__(self, model: nn.Module, block: tuple[int, int] | None) -> None:
        self._parameters = dict(model.named_parameters())
        self._block = block
        self._waiting: dict[str, Tensor] = {}  # one of a weight and its scales, until the other comes
        self._filled: dict[str, set[Any]] = {name: set() for name in self._parameters}

    def load(self, name: str, tensor: Tensor) -> None:
        """Load a tensor by its name in the checkpoint, without the prefix of the text model.

        Raises:
            CheckpointError: no such parameter, it came twice, or its type or shape does not fit.
        """
        is_scale = name.endswith(SCALE)
        weight_name = name.removesuffix(SCALE)
        if not is_scale and tensor.dtype not in _FP8:
            self._fill(name, tensor)
            return
        if self._block is None:
            raise CheckpointError(
                "FP8 tensors without 'weight_block_size' in quantization_config", [name], "config.json has to give it"
            )
        if name in self._waiting:
            raise CheckpointError("tensors that came twice", [name], "each once")
        other = self._waiting.pop(weight_name if is_scale else name + SCALE, None)
        if other is None:
            self._waiting[name] = tensor
            return
        weight, scale = (other, tensor) if is_scale else (tensor, other)
        sides = [-(-n // side) for n, side in zip(weight.shape, self._block, strict=True)]
        if weight.dtype not in _FP8 or list(scale.shape) != sides:
            raise CheckpointError(
                f"scales of shape {list(scale.shape)} for a {weight.dtype} weight of shape {list(weight.shape)}",
                [weight_name],
                f"wanted FP8 and {sides}, one scale for each block of {self._block[0]}x{self._block[1]}",
            )
        self._fill(weight_name, Fp8Weight(weight, scale, self._block))

    def _fill(self, name: str, source: Source) -> None:
        target, part = place_of(name)
        param = self._parameters.get(target)
        if param is None:
            raise CheckpointError("tensors that the model has no place for", [name], "is this checkpoint a glm5_next?")
        if part in self._filled[target]:
            raise CheckpointError("tensors that came twice", [name], "each once")
        share: Share | None = getattr(param, "share", None)
        try:
            if share is not None:
                share(param, source, part)
            else:
                load_weight(param, source.dense() if isinstance(source, Fp8Weight) else source)
        except (AssertionError, IndexError, RuntimeError, ValueError, TypeError) as error:
            raise CheckpointError(f"a tensor that does not fit ({error})", [name], "see config.json") from error
        self._filled[target].add(part)

    def finish(self) -> None:
        """Check that every parameter was filled.

        Raises:
            CheckpointError: it names what is missing, or the weights whose scales did not come (or the reverse).
        """
        if self._waiting:
            raise CheckpointError("FP8 weights or scales without the other", self._waiting, "both are needed")
        missing = []
        for name, parts in self._filled.items():
            share: Share | None = getattr(self._parameters[name], "share", None)
            wanted = 1 if share is None else share.tensors
            if len(parts) != wanted:
                missing.append(name if wanted == 1 else f"{name} ({len(parts)} of {wanted} parts)")
        if missing:
            raise CheckpointError("parameters that the checkpoint does not fill", missing, "it is not complete")


def text_tensors(weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    """Give the tensors of the text model under "model." and "lm_head."; those of the vision part are left out."""
    for name, tensor in weights:
        if not name.startswith(("model.visual.", "visual.")):
            yield name.replace(_TEXT, "model.", 1) if name.startswith(_TEXT) else name, tensor
