"""The routes of the Ascend vendor, best first: data only."""

from __future__ import annotations

from typing import Final

from dlinfer_ext.ops._registry import Route

ROUTES: Final[dict[str, tuple[Route, ...]]] = {
    "causal_conv1d": (Route("eager", "dlinfer_ext.kernels.causal_conv1d.eager:causal_conv1d"),),
    "causal_conv1d_columns": (Route("eager", "dlinfer_ext.kernels.causal_conv1d.eager:causal_conv1d_columns"),),
    "causal_conv1d_update": (Route("eager", "dlinfer_ext.kernels.causal_conv1d.eager:causal_conv1d_update"),),
    "gated_delta_gate": (Route("eager", "dlinfer_ext.kernels.gated_delta_rule.eager:gated_delta_gate"),),
    "gated_delta_rule": (Route("eager", "dlinfer_ext.kernels.gated_delta_rule.eager:gated_delta_rule"),),
    "gated_delta_rule_update": (Route("eager", "dlinfer_ext.kernels.gated_delta_rule.eager:gated_delta_rule_update"),),
    "gated_rms_norm": (Route("eager", "dlinfer_ext.kernels.gated_rms_norm.eager:gated_rms_norm"),),
    "rejection_sample": (Route("eager", "dlinfer_ext.kernels.rejection_sampling.eager:rejection_sample"),),
    "rejection_sample_greedy": (
        Route("eager", "dlinfer_ext.kernels.rejection_sampling.eager:rejection_sample_greedy"),
    ),
}
