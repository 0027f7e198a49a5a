"""The causal convolution as LMDeploy's adapter and vLLM-style callers call it, at a model's sizes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ...kernels.causal_conv1d import reference
from ...targets import Model
from . import Case, launcher

ROWS = 32
PREFILL_TOKENS = 2048
# Of a prompt's last chunk, two whole prompts, and a remainder shorter than the width.
MIXED_ROWS = ((700, 4096), (1040, 0), (305, 0), (3, 2048))
DECODE_LIMITS = (1.10, 1.20)
PREFILL_LIMITS = (1.08, 1.10)


def _definition(**arguments: Any) -> Tensor:
    """Run the definition of the packed form; the bound of the row lengths has no bearing on it."""
    del arguments["max_query_len"]
    return reference.causal_conv1d(**arguments)


def _update_definition(**arguments: Any) -> Tensor:
    del arguments["max_query_len"]
    return reference.causal_conv1d_update(**arguments)


class _Sizes:
    """What all cases of a model on one rank share."""

    def __init__(self, model: Model, tp: int, dtype: torch.dtype) -> None:
        self.width, self.channels, self.drafts, self.dtype = model.conv_width, model.channels(tp), model.drafts, dtype

    def operands(self, tokens: int, rows: int, columns: int) -> dict[str, Any]:
        """Make x, the taps as a view of LMDeploy's [D, 1, W], and one layer's part of a pool with a slot to spare."""
        generator = torch.Generator().manual_seed(tokens)

        def values(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        weight = values(self.channels, 1, self.width)
        return {
            "x": values(tokens, self.channels),
            "weight": weight.reshape(self.channels, -1).t(),
            "bias": None,
            "conv_state": values(rows + 1, 2, columns, self.channels)[:, 1],
            "activation": "silu",
            "pad_slot_id": -1,
        }

    def bytes(self, inputs: int) -> int:
        """Bytes of so many inputs of all channels."""
        return inputs * self.channels * self.dtype.itemsize


def _slots(rows: int) -> Tensor:
    return torch.arange(rows, 0, -1)


def _packed(
    sizes: _Sizes, phase: str, rows: tuple[tuple[int, int], ...], layout: str, limits: tuple[float, float]
) -> Case:
    """Return the case of `causal_conv1d` for rows of (tokens, history)."""
    tokens = sum(q for q, _ in rows)
    columns = sizes.width + (sizes.drafts if layout == "ring" else 0)

    def arguments() -> dict[str, Any]:
        return {
            **sizes.operands(tokens, len(rows), columns),
            "cu_seqlens": torch.tensor([0, *accumulate(q for q, _ in rows)], dtype=torch.int32),
            "state_indices": _slots(len(rows)),
            "history_lens": torch.tensor([history for _, history in rows], dtype=torch.int32),
            "layout": layout,
            "max_query_len": None,
        }

    history = sum(min(before, sizes.width - 1) for _, before in rows)
    stored = sum(min(q, columns) if layout == "ring" else sizes.width - 1 for q, _ in rows)
    return Case(
        operator="causal_conv1d",
        phase=phase,
        tolerance="conv",
        arguments=arguments,
        launch=launcher("causal_conv1d"),
        definition=_definition,
        read_bytes=sizes.bytes(tokens + sizes.width + history) + 4 * (len(rows) + 1) + (8 + 4) * len(rows),
        written_bytes=sizes.bytes(tokens + stored),
        mutated=("conv_state",),
        bytes_limit=limits[0],
        blocks_limit=limits[1],
    )


def _update(sizes: _Sizes, phase: str, each: int, layout: str) -> Case:
    """Return the case of `causal_conv1d_update` for ROWS rows of `each` tokens, given as [N, D] or [N, q, D]."""
    columns = {"linear": sizes.width - 1, "rewind": sizes.width + each - 2, "ring": sizes.width + sizes.drafts}[layout]
    stored = {"linear": sizes.width - 1, "rewind": sizes.width + each - 2, "ring": each}[layout]

    def arguments() -> dict[str, Any]:
        given = sizes.operands(ROWS * each, ROWS, columns)
        if each > 1:
            given["x"] = given["x"].unflatten(0, (ROWS, each))
        return {
            **given,
            "conv_state_indices": _slots(ROWS),
            "num_accepted_tokens": torch.arange(ROWS, dtype=torch.int32) % each + 1 if layout == "rewind" else None,
            "query_start_loc": None,
            "max_query_len": -1,
            "block_idx_last_scheduled_token": None,
            "initial_state_idx": None,
            "cache_seqlens": torch.arange(ROWS, dtype=torch.int32) * 37 + sizes.width if layout == "ring" else None,
        }

    return Case(
        operator="causal_conv1d_update",
        phase=phase,
        tolerance="conv",
        arguments=arguments,
        launch=launcher("causal_conv1d_update"),
        definition=_update_definition,
        read_bytes=sizes.bytes(ROWS * (each + sizes.width - 1) + sizes.width)
        + (8 + (0 if layout == "linear" else 4)) * ROWS,
        written_bytes=sizes.bytes(ROWS * (each + stored)),
        mutated=("conv_state",),
        bytes_limit=DECODE_LIMITS[0],
        blocks_limit=DECODE_LIMITS[1],
    )


def cases(model: Model, tp: int, dtype: torch.dtype) -> Iterator[Case]:
    """Return the decode, verify and prefill cases of a model on one of `tp` ranks."""
    sizes = _Sizes(model, tp, dtype)
    verify = model.drafts + 1
    for rows in (8, ROWS):
        step = tuple((1, 37 * row + model.conv_width) for row in range(rows))
        yield _packed(sizes, f"decode-{rows}", step, "linear", DECODE_LIMITS)
    step = tuple((verify, 37 * row + model.conv_width) for row in range(ROWS))
    yield _packed(sizes, f"verify-{ROWS}x{verify}", step, "ring", DECODE_LIMITS)
    yield _packed(sizes, f"prefill-{PREFILL_TOKENS}", ((PREFILL_TOKENS, 4096),), "linear", PREFILL_LIMITS)
    yield _packed(sizes, f"prefill-{PREFILL_TOKENS}-mixed", MIXED_ROWS, "ring", PREFILL_LIMITS)
    yield _update(sizes, f"decode-{ROWS}", 1, "linear")
    yield _update(sizes, f"verify-{ROWS}x{verify}-rewind", verify, "rewind")
    yield _update(sizes, f"verify-{ROWS}x{verify}-ring", verify, "ring")
