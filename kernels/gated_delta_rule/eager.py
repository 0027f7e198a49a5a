"""Gated delta rule, batched PyTorch form: the routes that `dlinfer_ext.ops` binds."""

from .chunk_eager import gated_delta_rule
from .gate_eager import gated_delta_gate
from .recurrent_eager import gated_delta_rule_update, sigmoid_gating_delta_rule_update

__all__ = ["gated_delta_gate", "gated_delta_rule", "gated_delta_rule_update", "sigmoid_gating_delta_rule_update"]
