"""Kimi Delta Attention, at the sizes of GLM-5.3-Flash over two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlinfer_ext.ops import kda, kda_update

from . import Case, public
from .rules import Rule, prefill, rule_cases


def _public() -> tuple[Callable[..., Any], Callable[..., Any]]:
    module = "models.glm5_next.modeling_glm5_next"
    return public(module, "chunk_kimi_delta_attention"), public(module, "recurrent_kimi_delta_attention")


# The form builds [rows, heads, chunks, 64, 64, K] in fp32: 6.4 GB for 16 prompts filled up to 328 tokens, three times.
TOO_LARGE = "a padded batch of transformers' form would take some 20 GB here; `loop` calls it once per request"
RULE = Rule("kda", "kda ", kda, kda_update, 32, 32, 128, True, _public, TOO_LARGE)


def cases() -> list[Case]:
    """Return the cases of the rule, and a prompt whose gates lie at their bound."""
    return [*rule_cases(RULE), prefill(RULE, (2048,), "1 prompt 2048 tokens, gates down to -20", gate=-20.0)]
