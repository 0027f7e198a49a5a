"""Cases of a model's delta rule: the gated one, or Kimi Delta Attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...targets import Model
from . import Case, delta_rule_decode, delta_rule_gates, delta_rule_prefill


def cases(model: Model, tp: int, dtype: torch.dtype) -> Iterator[Case]:
    """Return the cases of a model's delta rule on one of `tp` ranks."""
    for part in (delta_rule_decode, delta_rule_gates, delta_rule_prefill):
        yield from part.cases(model, tp, dtype)
