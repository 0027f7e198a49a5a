"""Kimi Delta Attention, at the sizes of GLM-5.3-Flash over two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlinfer_ext.ops import kda, kda_update

from . import Case
from .rules import Rule, prefill, rule_cases


def _public() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from transformers.models.glm5_next import modeling_glm5_next as public

    return public.chunk_kimi_delta_attention, public.recurrent_kimi_delta_attention


RULE = Rule("kda", "kda ", kda, kda_update, 32, 32, 128, True, _public)


def cases() -> list[Case]:
    """Return the cases of the rule, and a prompt whose gates lie at their bound."""
    return [*rule_cases(RULE), prefill(RULE, (2048,), "1 prompt 2048 tokens, gates down to -20", gate=-20.0)]
