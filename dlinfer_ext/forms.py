"""Where each operator's forms live, for every vendor: one line for an operator."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final

FOLDERS: Final[dict[str, str]] = {
    "causal_conv1d": "causal_conv1d",
    "causal_conv1d_columns": "causal_conv1d",
    "causal_conv1d_update": "causal_conv1d",
    "clamped_moe": "clamped_moe",
    "clamped_silu_and_mul": "clamped_moe",
    "copy_slots": "state_pool",
    "gated_delta_gate": "gated_delta_rule",
    "gated_delta_rule": "gated_delta_rule",
    "gated_delta_rule_update": "gated_delta_rule",
    "gated_rms_norm": "gated_rms_norm",
    "hyper_connection_post": "hyper_connection",
    "hyper_connection_pre": "hyper_connection",
    "kda": "kda",
    "kda_gate": "kda",
    "kda_update": "kda",
    "kpool_select": "kpool_indexer",
    "kpool_update": "kpool_indexer",
    "latent_attention": "latent_attention",
    "latent_write": "latent_attention",
    "rejection_sample": "rejection_sampling",
    "rejection_sample_greedy": "rejection_sampling",
    "sigmoid_gating_delta_rule_update": "gated_delta_rule",
    "zero_slots": "state_pool",
}
# Operators whose folder has no launch.py yet: vendors bind no kernel to them, and the batched form serves.
NO_KERNEL: Final = frozenset(
    {
        "clamped_moe",
        "clamped_silu_and_mul",
        "hyper_connection_post",
        "hyper_connection_pre",
        "kpool_select",
        "kpool_update",
        "latent_attention",
        "latent_write",
    }
)


def eager_form(operator: str) -> str:
    """Return "module:function" of the batched PyTorch form."""
    return f"dlinfer_ext.kernels.{FOLDERS[operator]}.eager:{operator}"


def kernel_form(operator: str) -> str:
    """Return "module:function" of the launcher of the Triton kernel."""
    return f"dlinfer_ext.kernels.{FOLDERS[operator]}.launch:{operator}"


def load(target: str) -> Callable[..., Any]:
    """Import the function that "module:function" names."""
    module, _, function = target.partition(":")
    form: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return form
