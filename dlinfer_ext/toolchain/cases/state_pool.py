"""Clearing and copying slots of a model's convolution and recurrent pools, each with gaps between the slots."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from ...kernels.state_pool import reference
from ...targets import Model
from . import Case, launcher

SLOTS = 4
GAP = 64  # elements between the slots
# Slot numbers are read by each task that moves a part of the slot.
LIMIT = 1.02


def cases(model: Model, tp: int, dtype: torch.dtype) -> Iterator[Case]:
    """Return the cases of a model on one of `tp` ranks; the recurrent states are fp32."""
    convolution = (model.conv_width + model.drafts, model.channels(tp))
    recurrent = (1 + model.drafts, model.value_heads // tp, model.value_dim, model.key_dim)
    for name, shape, kind in (("convolution", convolution, dtype), ("recurrent", recurrent, torch.float32)):
        yield _case("zero_slots", name, shape, kind)
        yield _case("copy_slots", name, shape, kind)


def _case(operator: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Case:
    copied, elements = operator == "copy_slots", math.prod(shape)
    pairs = {"source": torch.arange(SLOTS), "target": torch.arange(SLOTS) + SLOTS}

    def arguments() -> dict[str, Any]:
        storage = torch.randn(2 * SLOTS, elements + GAP, generator=torch.Generator().manual_seed(0)).to(dtype)
        pool = storage[:, :elements].unflatten(1, shape)
        return {
            "pool": pool,
            **({n: p.clone() for n, p in pairs.items()} if copied else {"slots": pairs["source"] + 2}),
        }

    size = SLOTS * elements * dtype.itemsize
    return Case(
        operator=operator,
        phase=f"{name}-{SLOTS}",
        tolerance=None,
        arguments=arguments,
        launch=launcher(operator),
        definition=reference.copy_slots if copied else reference.zero_slots,
        read_bytes=size + 2 * SLOTS * 8 if copied else SLOTS * 8,
        written_bytes=size,
        mutated=("pool",),
        bytes_limit=LIMIT,
        blocks_limit=LIMIT,
    )
