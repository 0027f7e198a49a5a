"""Puts the model where LMDeploy looks for its own: the map of architectures, the builders, the moment of the dtype."""

from __future__ import annotations

from typing import Any, Final

from . import ARCHITECTURE, DRAFT_ARCHITECTURE, MODEL_TYPE

_HERE: Final = __name__.rpartition(".")[0]


def register_architectures(module: Any) -> str:
    """Add both classes to `lmdeploy.pytorch.models.module_map`."""
    module.MODULE_MAP[ARCHITECTURE] = f"{_HERE}.modeling.{ARCHITECTURE}"
    module.MODULE_MAP[DRAFT_ARCHITECTURE] = f"{_HERE}.mtp.{DRAFT_ARCHITECTURE}"
    return f"MODULE_MAP has {ARCHITECTURE} and {DRAFT_ARCHITECTURE}"


def register_builder(module: Any) -> str:
    """Make LMDeploy know the config builder; it registers itself when it is defined."""
    from . import config  # noqa: F401

    return f"AutoModelConfigBuilder knows {MODEL_TYPE}"


def follow_dtype(module: Any) -> str:
    """Wrap `_update_torch_dtype` of `lmdeploy.pytorch.config`: a config is built before the dtype is known."""
    original = module._update_torch_dtype

    def update(config: Any, dtype: str, device_type: str = "auto") -> Any:
        from .config import set_window_dtype  # it imports the module that is wrapped here

        return set_window_dtype(original(config, dtype, device_type=device_type))

    module._update_torch_dtype = update
    return "_update_torch_dtype gives the convolution's window of glm5_next the dtype of the activations"
