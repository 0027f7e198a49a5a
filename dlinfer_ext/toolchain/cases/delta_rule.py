"""Cases of the gated delta rule."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...targets import Model
from . import Case, delta_rule_decode, delta_rule_prefill


def cases(model: Model, tp: int, dtype: torch.dtype) -> Iterator[Case]:
    """Return the cases of a gated delta rule model on one of `tp` ranks; nothing for another rule."""
    if model.rule == "gdn":
        yield from delta_rule_decode.cases(model, tp, dtype)
        yield from delta_rule_prefill.cases(model, tp, dtype)
