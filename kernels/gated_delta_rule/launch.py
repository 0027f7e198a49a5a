"""Gated delta rule: the launchers that `dlinfer_ext.ops` binds, each the eager form's arguments and the chip."""

from .chunk_launch import gated_delta_rule
from .gate_launch import gated_delta_gate
from .recurrent_launch import gated_delta_rule_update, sigmoid_gating_delta_rule_update

__all__ = ["gated_delta_gate", "gated_delta_rule", "gated_delta_rule_update", "sigmoid_gating_delta_rule_update"]
