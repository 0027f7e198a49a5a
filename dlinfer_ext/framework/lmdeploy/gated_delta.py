"""LMDeploy's gated-delta specs over our operators. Index maths only: what runs here is what a card runs.

Letters as in docs/en/operators.md: T tokens, N rows, W width, R state slots of a ring (1 + drafts), HV value heads.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from lmdeploy.pytorch.backends.causal_conv1d import CausalConv1dImpl
from lmdeploy.pytorch.backends.gated_delta_rule import GatedDeltaMeta, GatedDeltaMetaImpl, GatedDeltaRuleImpl
from lmdeploy.pytorch.model_inputs import get_step_ctx_manager
from torch import Tensor

from ... import ops
from . import counters
from .graph_rows import ROWS, GraphRows


class GatedDeltaMetadata(GatedDeltaMeta):  # type: ignore[misc]
    """One step's rows, for the convolution and the rule of every layer.

    The base class's constructor is not called: its indices are wrong for chunks shorter than W - 1 and fail on an
    empty last row, and the operators need none of them. A step in a graph's shape has its rows in static buffers
    (graph_rows.py), and nothing else of its metadata is used.

    Attributes:
        is_decoding: True for a decode and for an MTP verify (LMDeploy's Ascend metadata has two flags for them).
        cu_seqlens: int [N + 1].
        history_lens: int [N], tokens of each row before this step.
        cache_seqlens: the same, under the name LMDeploy uses.
        state_indices: int64 [N], slot of each row, -1 for a padded row.
        num_spec_tokens: drafts per step; the pools are rings iff it is > 0.
        host_lengths: row lengths as Python ints in prefill, so that the operators read nothing from the device.
    """

    cu_seqlens: Tensor
    history_lens: Tensor

    def __init__(self, num_tokens: int, conv_kernel_size: int, state_ids: Tensor, attn_metadata: Any) -> None:
        multi_token = bool(getattr(attn_metadata, "is_multi_token_decoding", False))
        self.is_decoding = bool(attn_metadata.is_decoding) or multi_token
        self.num_spec_tokens: int = get_step_ctx_manager().build_ctx.num_spec_tokens
        self.host_lengths: tuple[int, ...] | None = None
        rows: GraphRows | None = getattr(attn_metadata, ROWS, None)
        if rows is not None:  # counted as they were filled: a replay does not come here
            self.cu_seqlens, self.history_lens = rows.cu_seqlens, rows.history_lens
            self.cache_seqlens, self.state_indices = rows.history_lens, rows.state_indices
            return
        self.cu_seqlens = attn_metadata.cu_seqlens_q
        self.history_lens = attn_metadata.kv_seqlens - attn_metadata.q_seqlens
        self.cache_seqlens = self.history_lens
        self.state_indices = state_ids.to(torch.int64)
        if not self.is_decoding and attn_metadata.cu_seqlens_q_cpu is not None:
            # A CPU tensor that the backend made for its attention operators: no device read.
            ends = attn_metadata.cu_seqlens_q_cpu.tolist()
            self.host_lengths = tuple(b - a for a, b in pairwise(ends))
        counters.count_step(self, attn_metadata)


class GatedDeltaMetadataBuilder(GatedDeltaMetaImpl):  # type: ignore[misc]
    def forward(
        self, num_tokens: int, conv_kernel_size: int, state_ids: Tensor, attn_metadata: Any
    ) -> GatedDeltaMetadata:
        return GatedDeltaMetadata(num_tokens, conv_kernel_size, state_ids, attn_metadata)


class CausalConv1d:
    """CausalConv1dBuildSpec: x [1, T, C], weight [C, 1, W], conv_state [S, L, C] (position-major), in place."""

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        conv_state: Tensor,
        gated_delta_meta: GatedDeltaMetadata,
        activation: str | None,
    ) -> Tensor:
        meta = gated_delta_meta
        if conv_state.size(-1) != x.size(-1):
            raise ValueError(
                f"causal_conv1d: argument 'conv_state' is of shape {list(conv_state.shape)}; wanted "
                f"[slots, columns, {x.size(-1)}]. The pool is not position-major: dlinfer_ext was installed after "
                "the model's config was built; install it before LMDeploy is imported"
            )
        counters.add("causal_conv1d")
        out = ops.causal_conv1d(
            x[0],
            weight.reshape(weight.size(0), -1).t(),  # a view: the operators take any strides
            bias,
            conv_state,
            cu_seqlens=meta.cu_seqlens,
            state_indices=meta.state_indices,
            history_lens=meta.history_lens,
            layout="ring" if meta.num_spec_tokens else "linear",
            activation=activation,
        )
        return out[None]


class GatedDeltaRule:
    """GatedDeltaRuleBuildSpec: q, k [1, T, H, K], v [1, T, HV, V], state [S, (R,) HV, V, K], in place."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        b: Tensor,
        a: Tensor,
        dt_bias: Tensor,
        a_log_exp: Tensor,
        recurrent_state: Tensor,
        gated_delta_meta: GatedDeltaMetadata,
        kv_ratio: int,
        use_qk_l2norm_in_kernel: bool,
    ) -> Tensor:
        meta = gated_delta_meta
        # Qwen3-Next hands over [1, T, H, HV / H], Qwen3.5 [1, T, HV]; `a_log_exp` is -exp(A_log).
        heads = value.size(-2)
        a, b = a[0].reshape(-1, heads), b[0].reshape(-1, heads)
        q, k, v = query[0], key[0], value[0]
        if not meta.is_decoding:
            counters.add("gated_delta_rule")
            g, beta = ops.gated_delta_gate(a, b, a_log_exp, dt_bias)
            out = ops.gated_delta_rule(
                q,
                k,
                v,
                g,
                beta,
                recurrent_state,
                cu_seqlens=meta.cu_seqlens,
                state_indices=meta.state_indices,
                history_lens=meta.history_lens,
                use_qk_l2norm=use_qk_l2norm_in_kernel,
                host_lengths=meta.host_lengths,
            )
            return out[None]
        counters.add("gated_delta_rule_update")
        rows = meta.state_indices.size(0)
        q, k, v, a, b = (t.unflatten(0, (rows, -1)) for t in (q, k, v, a, b))
        out = ops.sigmoid_gating_delta_rule_update(
            q,
            k,
            v,
            a,
            b,
            a_log_exp,
            dt_bias,
            recurrent_state,
            state_indices=meta.state_indices,
            history_lens=meta.history_lens,
            use_qk_l2norm=use_qk_l2norm_in_kernel,
        )
        return out.flatten(0, 1)[None]


# Virtual subclasses: the host's abstract methods are steps of its own prefill and decode, which `forward` replaces.
CausalConv1dImpl.register(CausalConv1d)
GatedDeltaRuleImpl.register(GatedDeltaRule)
