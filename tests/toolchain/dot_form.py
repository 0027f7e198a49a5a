"""The chunked form of the gated delta rule as cases of the compile route, by columns of V in a block.

Loaded by the process that has the compiler, never imported by a test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dlinfer_ext.kernels.common.tiling import SoC
from dlinfer_ext.targets import Model
from dlinfer_ext.toolchain.cases import Case
from dlinfer_ext.toolchain.cases.delta_rule_prefill import cases as prefill

BLOCKS = (32, 64, 128)


def _with_tiles(launch: Callable[..., Any], values: int) -> Callable[..., Any]:
    tiles = {"gated_delta_rule": {"dot": 1, "dot_values": values}}

    def run(*, soc: SoC, **arguments: Any) -> Any:
        return launch(**arguments, soc=dataclasses.replace(soc, tiles=tiles))

    return run


def cases(model: Model, tp: int, dtype: torch.dtype) -> Iterator[Case]:
    """Yield the prompt of 2048 tokens for each block."""
    (case,) = (c for c in prefill(model, tp, dtype) if c.phase == "prefill-2048")
    for values in BLOCKS:
        yield dataclasses.replace(case, phase=f"V{values}", launch=_with_tiles(case.launch, values))
