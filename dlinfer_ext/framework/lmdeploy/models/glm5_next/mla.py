"""Latent attention without rotary positions, in the absorbed form, over the tokens that the indexer chose.

LMDeploy's attention is not used: its sparse form for Ascend refuses a query that is no wider than the value, and
dlinfer takes equal widths of key and value for plain attention. Both see a rotary part where this model has none.
"""

from __future__ import annotations

from typing import Any

import torch
from lmdeploy.pytorch.nn import RMSNorm
from torch import Tensor, nn

from ..... import ops
from ... import counters
from .indexer import KPoolIndexer
from .parameters import Held, Share, column_linear, parameter, row_linear
from .rows import PagedRows


class LatentAttention(nn.Module):
    """x [1, T, hidden] to [1, T, hidden]; the layer's latent cache and its indexer's caches are mutated."""

    def __init__(
        self, config: Any, ranks: int, dtype: torch.dtype | None, device: Any, *, own_indexer: bool = True
    ) -> None:
        super().__init__()
        heads, hidden, eps = config.num_attention_heads, config.hidden_size, config.rms_norm_eps
        self.heads = heads // ranks
        self.key_dim, self.value_dim, self.latent = config.qk_nope_head_dim, config.v_head_dim, config.kv_lora_rank
        self.scale = self.key_dim**-0.5
        self.q_a_proj = column_linear(hidden, config.q_lora_rank, dtype, device, split=False)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps, dtype=dtype, device=device)
        self.q_b_proj = column_linear(config.q_lora_rank, heads * self.key_dim, dtype, device, split=True)
        self.kv_a_proj_with_mqa = column_linear(hidden, self.latent, dtype, device, split=False)
        self.kv_a_layernorm = RMSNorm(self.latent, eps, dtype=dtype, device=device)
        # By head: rows that make keys of a latent, then rows that make values. Never multiplied with a latent here.
        outputs = self.heads * (self.key_dim + self.value_dim)
        self.kv_b_proj = Held(weight=parameter(outputs, self.latent, dtype=dtype, device=device, share=Share()))
        self.o_proj = row_linear(heads * self.value_dim, hidden, dtype, device)
        self.indexer = KPoolIndexer(config, dtype, device) if own_indexer else None

    def select(self, x: Tensor, q_resid: Tensor, rows: PagedRows) -> Tensor | None:
        """Return the indexer's choice."""
        assert self.indexer is not None
        choice: Tensor | None = self.indexer(x, q_resid, rows)
        return choice

    def forward(self, x: Tensor, cache: Tensor, rows: PagedRows, choose: Any) -> Tensor:
        """Attend.

        Args:
            x: [1, T, hidden].
            cache: [blocks, block, 1, latent], LMDeploy's key cache.
            rows: the step's.
            choose: called with (self, x, q_resid); returns positions int32 [T, n], or None for all of them.
        """
        latents = cache.squeeze(2)
        q_resid = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(q_resid)[0].unflatten(-1, (self.heads, self.key_dim))
        latent = self.kv_a_layernorm(self.kv_a_proj_with_mqa(x))[0]
        ops.latent_write(latent, latents, **rows.paged())
        indices = choose(self, x, q_resid)
        counters.add("latent_attention" if indices is None else "sparse_latent_attention")
        to_keys, to_values = self.kv_b_proj.weight.unflatten(0, (self.heads, -1)).split(
            [self.key_dim, self.value_dim], 1
        )
        out = ops.latent_attention(
            torch.bmm(q.transpose(0, 1), to_keys).transpose(0, 1),
            latents,
            value_dim=self.latent,
            scale=self.scale,
            max_kv_len=rows.max_kv_len,
            indices=indices,
            host_lengths=rows.host_lengths,
            **rows.paged(),
        )
        values = torch.bmm(out.transpose(0, 1), to_values.transpose(1, 2)).transpose(0, 1)
        return self.o_proj(values.flatten(-2)[None])  # type: ignore[no-any-return]
