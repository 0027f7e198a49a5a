"""Gated delta rule, at the sizes of Qwen3.5-9B."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlinfer_ext.ops import gated_delta_rule, gated_delta_rule_update

from . import Case, public
from .rules import Rule, rule_cases


def _public() -> tuple[Callable[..., Any], Callable[..., Any]]:
    module = "models.qwen3_5.modeling_qwen3_5"
    return public(module, "torch_chunk_gated_delta_rule"), public(module, "torch_recurrent_gated_delta_rule")


RULE = Rule("gated_delta_rule", "", gated_delta_rule, gated_delta_rule_update, 16, 32, 128, False, _public)


def cases() -> list[Case]:
    """Return the cases of the rule."""
    return rule_cases(RULE)
