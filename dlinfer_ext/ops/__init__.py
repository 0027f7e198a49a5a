"""The operators' public interface: one signature each, checked, declared to torch.library and sent to a route."""

from .causal_conv1d import causal_conv1d, causal_conv1d_columns, causal_conv1d_update
from .clamped_moe import clamped_moe, clamped_silu_and_mul
from .gated_delta_rule import (
    gated_delta_gate,
    gated_delta_rule,
    gated_delta_rule_update,
    sigmoid_gating_delta_rule_update,
)
from .gated_rms_norm import RMSNormGated, gated_rms_norm, rmsnorm_fn
from .hyper_connection import hyper_connection_post, hyper_connection_pre
from .kda import kda, kda_gate, kda_update
from .kpool_indexer import kpool_select, kpool_update
from .latent_attention import latent_attention, latent_write
from .rejection_sampling import rejection_sample, unusable_positions, verify, verify_greedy
from .state_pool import copy_slots, zero_slots

__all__ = [
    "RMSNormGated",
    "causal_conv1d",
    "causal_conv1d_columns",
    "causal_conv1d_update",
    "clamped_moe",
    "clamped_silu_and_mul",
    "copy_slots",
    "gated_delta_gate",
    "gated_delta_rule",
    "gated_delta_rule_update",
    "gated_rms_norm",
    "hyper_connection_post",
    "hyper_connection_pre",
    "kda",
    "kda_gate",
    "kda_update",
    "kpool_select",
    "kpool_update",
    "latent_attention",
    "latent_write",
    "rejection_sample",
    "rmsnorm_fn",
    "sigmoid_gating_delta_rule_update",
    "unusable_positions",
    "verify",
    "verify_greedy",
    "zero_slots",
]
