"""A Kimi Delta Attention block: projections, short convolution, delta rule, gated norm.

Letters as in docs/en/operators.md: T tokens, H heads of this rank, K key and V value dimension (equal here), W width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..... import ops
from ... import counters
from ...gated_delta import GatedDeltaMetadata
from .config import CONV, RECURRENT
from .parameters import Held, Share, column_linear, merged_linear, parameter, row_linear


class KimiDeltaAttention(nn.Module):
    """x [1, T, hidden] to [1, T, hidden]; the caches of the layer are mutated."""

    def __init__(self, config: Any, layer: int, ranks: int, dtype: torch.dtype | None, device: Any) -> None:
        super().__init__()
        heads, dim, hidden = config.linear_num_heads, config.linear_head_dim, config.hidden_size
        width, channels = config.linear_conv_kernel_dim, heads * dim
        self.layer = layer
        self.heads, self.dim, self.channels = heads // ranks, dim, channels // ranks
        self.lower_bound: float | None = config.linear_lower_bound
        self.eps: float = config.rms_norm_eps
        self.qkv_proj = merged_linear(hidden, [channels] * 3, dtype, device)
        self.b_proj = column_linear(hidden, heads, dtype, device, split=True)
        # The first factors of the two low-rank projections are on every rank whole, the second ones split by head.
        self.f_a_proj = column_linear(hidden, dim, dtype, device, split=False)
        self.f_b_proj = column_linear(dim, channels, dtype, device, split=True)
        self.g_a_proj = column_linear(hidden, dim, dtype, device, split=False)
        self.g_b_proj = column_linear(dim, channels, dtype, device, split=True)
        self.o_proj = row_linear(channels, hidden, dtype, device)
        fp32: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.conv_weight = parameter(3 * self.channels, width, share=Share(parts=3), **fp32)
        self.A_log = parameter(self.heads, share=Share(), **fp32)
        self.dt_bias = parameter(self.channels, share=Share(), **fp32)
        self.o_norm = Held(weight=parameter(dim, dtype=dtype, device=device))

    def forward(self, x: Tensor, caches: Any, meta: GatedDeltaMetadata) -> Tensor:
        window, state = caches.layer(CONV, self.layer), caches.layer(RECURRENT, self.layer)
        rows: dict[str, Any] = {"state_indices": meta.state_indices, "history_lens": meta.history_lens}
        counters.add("causal_conv1d")
        qkv = ops.causal_conv1d(
            self.qkv_proj(x)[0],
            self.conv_weight.t(),
            None,
            window,
            cu_seqlens=meta.cu_seqlens,
            layout="ring" if meta.num_spec_tokens else "linear",
            activation="silu",
            **rows,
        )
        q, k, v = (t.unflatten(-1, (self.heads, self.dim)) for t in qkv.split(self.channels, -1))
        raw = self.f_b_proj(self.f_a_proj(x))[0].unflatten(-1, (self.heads, self.dim))
        g = ops.kda_gate(raw, self.A_log, self.dt_bias, self.lower_bound)
        beta = self.b_proj(x)[0].float().sigmoid()
        if meta.is_decoding:
            counters.add("kda_update")
            n = meta.state_indices.size(0)
            q, k, v, g, beta = (t.unflatten(0, (n, -1)) for t in (q, k, v, g, beta))
            out = ops.kda_update(q, k, v, g, beta, state, use_qk_l2norm=True, **rows).flatten(0, 1)
        else:
            counters.add("kda")
            out = ops.kda(
                q, k, v, g, beta, state,
                cu_seqlens=meta.cu_seqlens, use_qk_l2norm=True, host_lengths=meta.host_lengths, **rows,
            )  # fmt: skip
        gate = self.g_b_proj(self.g_a_proj(x))[0].unflatten(-1, (self.heads, self.dim))
        out = ops.gated_rms_norm(out, gate, self.o_norm.weight, eps=self.eps, activation="sigmoid")
        return self.o_proj(out.flatten(-2)[None])  # type: ignore[no-any-return]
