"""The shape of the convolution pool: LMDeploy asks for [layer, channel, column], we store [layer, column, channel].

A position is then one contiguous run, for a card's DMA and for a CPU's gather; with channels outermost it is one
element per cache line. LMDeploy zeroes and copies whole slots, so it does not care (`StateCacheEngine`).
"""

from __future__ import annotations

from typing import Any


def position_major(config: Any) -> Any:
    """Swap the last two dimensions of a gated-delta config's first state shape, in place; return the config."""
    if config.is_gated_delta and config.states_shapes:
        ((layers, channels, columns), dtype), *others = config.states_shapes
        config.states_shapes = [((layers, columns, channels), dtype), *others]
    return config


def patch_builder(module: Any, name: str) -> str:
    """Wrap `build` of the config builder `name` of a module."""
    builder = getattr(module, name)
    original = builder.build.__func__

    def build(cls: type, *args: Any, **kwargs: Any) -> Any:
        return position_major(original(cls, *args, **kwargs))

    builder.build = classmethod(build)
    return f"{name}.build gives a position-major convolution pool"
