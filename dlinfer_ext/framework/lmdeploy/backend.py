"""LMDeploy's Ascend backend with our operators behind its specs for gated delta models, verification and sampling."""

from __future__ import annotations

from typing import Any

from lmdeploy.pytorch.backends.causal_conv1d import CausalConv1dBuildSpec
from lmdeploy.pytorch.backends.dlinfer.ascend.op_backend import AscendOpsBackend
from lmdeploy.pytorch.backends.gated_delta_rule import GatedDeltaMetaBuildSpec, GatedDeltaRuleBuildSpec
from lmdeploy.pytorch.backends.multinomial_sampling import MultinomialSamplingBuildSpec
from lmdeploy.pytorch.backends.rejection_sampling import RejectionSamplingBuildSpec

from . import graph_rows
from .gated_delta import CausalConv1d, GatedDeltaMetadataBuilder, GatedDeltaRule
from .rejection_sampling import RejectionSampling
from .seeds import MultinomialSampling

_IMPLEMENTATIONS = {
    GatedDeltaMetaBuildSpec: GatedDeltaMetadataBuilder,
    GatedDeltaRuleBuildSpec: GatedDeltaRule,
    CausalConv1dBuildSpec: CausalConv1d,
    RejectionSamplingBuildSpec: RejectionSampling,
    MultinomialSamplingBuildSpec: MultinomialSampling,
}


class GatedDeltaAscendBackend(AscendOpsBackend):  # type: ignore[misc]
    """The Ascend backend; every spec that is not ours goes to LMDeploy's own."""

    @classmethod
    def build_op(cls, spec: Any, *, enable_deterministic: bool = False) -> Any:
        implementation = _IMPLEMENTATIONS.get(type(spec))
        if implementation is not None:
            return implementation()
        return super().build_op(spec, enable_deterministic=enable_deterministic)

    @classmethod
    def update_step_context(cls, step_context: Any) -> Any:
        """Build the step's metadata without LMDeploy's ring offsets.

        LMDeploy reads the length of a convolution row as `states_shapes[0][0][0]`, which is the number of delta layers
        under its own 0.18 shapes: wrong offsets, and a crash when there are fewer layers than drafts. Our metadata
        computes them itself; only `cache_seqlens` and `has_initial_state` are set here, which the card's graph
        runner copies.
        """
        config = step_context.model_config
        gated = config.is_gated_delta
        config.is_gated_delta = False
        try:
            context = super().update_step_context(step_context)
        finally:
            config.is_gated_delta = gated
        if gated:
            meta = context.attn_metadata
            meta.cache_seqlens = (context.kv_seqlens - context.q_seqlens).contiguous()
            if not (meta.is_decoding or meta.is_multi_token_decoding):
                meta.has_initial_state = meta.cache_seqlens > 0
        return context

    @staticmethod
    def build_graph_runner(model: Any, model_config: Any, cache_config: Any, backend_config: Any, device: Any) -> Any:
        """Build the host's runner; under a graph, gated delta layers take their rows from buffers of ours."""
        runner = AscendOpsBackend.build_graph_runner(model, model_config, cache_config, backend_config, device)
        return graph_rows.attach(runner) if model_config.is_gated_delta else runner

    @staticmethod
    def init() -> None:
        """Let the vendor initialise, then put our patches on top: dlinfer's older ones would win otherwise."""
        from .patches import reapply

        AscendOpsBackend.init()
        reapply()
