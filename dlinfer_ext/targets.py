"""The chips and the models that kernels are built for, read from `configs/`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from .kernels.common.tiling import SoC


def _names(folder: str) -> tuple[str, ...]:
    place = files("dlinfer_ext").joinpath("configs", folder)
    entries = place.iterdir() if place.is_dir() else ()
    return tuple(sorted(e.name.removesuffix(".json") for e in entries if e.name.endswith(".json")))


def _record(folder: str, kind: str, name: str) -> dict[str, Any]:
    if name not in _names(folder):
        raise ValueError(f"{kind} {name!r} is not known: take one of {', '.join(_names(folder))} (configs/{folder})")
    text = files("dlinfer_ext").joinpath("configs", folder, f"{name}.json").read_text(encoding="utf-8")
    record: dict[str, Any] = json.loads(text)
    return record


def soc_names() -> tuple[str, ...]:
    """Return the chips of configs/soc."""
    return _names("soc")


@cache
def load_soc(name: str) -> SoC:
    """Return the record of a chip with its measured tiles.

    Args:
        name: "a2", "a3", "a5" or "310p".

    Raises:
        ValueError: no such chip.
    """
    record = _record("soc", "chip", name)
    del record["source"], record["devices"]
    tiles = _record("tiles", "tiles of", name)["tiles"] if name in _names("tiles") else {}
    return SoC(**record, tiles=tiles)


def soc_of_device(device_name: str) -> str:
    """Return the chip that a device name such as "Ascend910_9382" belongs to.

    Raises:
        ValueError: no chip of configs/soc claims it.
    """
    owners = {prefix: name for name in soc_names() for prefix in _record("soc", "chip", name)["devices"]}
    for prefix in sorted(owners, key=len, reverse=True):
        if device_name.startswith(prefix):
            return owners[prefix]
    raise ValueError(
        f"device {device_name!r} is not known: its name starts with none of {', '.join(sorted(owners))}; "
        "add a record to configs/soc"
    )


@dataclass(frozen=True)
class Model:
    """The sizes of a model's linear-attention layers, before tensor parallelism.

    Attributes:
        name: as in configs/models.
        rule: "gdn" or "kda".
        heads: H, query/key heads.
        value_heads: HV.
        key_dim: K.
        value_dim: V.
        conv_width: W.
        hidden: of the residual stream.
        vocab: logits per position.
        drafts: draft tokens of a usual MTP setting.
        norm_gate: "silu" or "sigmoid".
    """

    name: str
    rule: str
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    hidden: int
    vocab: int
    drafts: int
    norm_gate: str

    def channels(self, tp: int) -> int:
        """Return D of the convolution on one of `tp` ranks: q, k and v side by side."""
        return (2 * self.heads * self.key_dim + self.value_heads * self.value_dim) // tp


def model_names() -> tuple[str, ...]:
    """Return the models of configs/models."""
    return _names("models")


@cache
def load_model(name: str) -> Model:
    """Return the sizes of a model.

    Raises:
        ValueError: no such model.
    """
    record: Mapping[str, Any] = _record("models", "model", name)
    return Model(**{key: value for key, value in record.items() if key != "source"})
