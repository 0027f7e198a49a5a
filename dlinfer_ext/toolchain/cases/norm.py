"""The gated RMS norm as LMDeploy's models call it: the gate is a part of the layer's projection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...kernels.gated_rms_norm import reference
from ...targets import Model
from . import Case, launcher

ROWS = 32
PREFILL_TOKENS = 2048
# The weight is read once by each program.
LIMIT = 1.05


def cases(model: Model, tp: int, dtype: torch.dtype) -> Iterator[Case]:
    """Return the cases of a model on one of `tp` ranks; see `Case`."""
    steps = {
        f"decode-{ROWS}": ROWS,
        f"verify-{ROWS}x{1 + model.drafts}": ROWS * (1 + model.drafts),
        f"prefill-{PREFILL_TOKENS}": PREFILL_TOKENS,
    }
    for phase, tokens in steps.items():
        yield _case(phase, tokens, model.value_heads // tp, model.value_dim, model.norm_gate, dtype)


def _case(phase: str, tokens: int, heads: int, hidden: int, activation: str, dtype: torch.dtype) -> Case:
    def arguments() -> dict[str, Any]:
        generator = torch.Generator().manual_seed(tokens)
        projection = torch.randn(tokens, 3 * heads * hidden, generator=generator).to(dtype)
        return {
            "x": torch.randn(tokens, heads, hidden, generator=generator).to(dtype),
            "gate": projection[:, 2 * heads * hidden :].unflatten(-1, (heads, hidden)),
            "weight": torch.rand(hidden, generator=generator).add_(0.5).to(dtype),
            "bias": None,
            "eps": 1e-6,
            "activation": activation,
            "norm_before_gate": True,
            "group_size": hidden,
        }

    size = tokens * heads * hidden * dtype.itemsize
    return Case(
        operator="gated_rms_norm",
        phase=phase,
        tolerance="norm",
        arguments=arguments,
        launch=launcher("gated_rms_norm"),
        definition=reference.gated_rms_norm,
        read_bytes=2 * size + hidden * dtype.itemsize,
        written_bytes=size,
        bytes_limit=LIMIT,
        blocks_limit=LIMIT,
    )
