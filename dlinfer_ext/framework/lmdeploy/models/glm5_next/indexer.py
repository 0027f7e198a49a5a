"""The indexer of sparse attention: keys pooled in groups of tokens, and the choice of pools for each query.

Both caches are LMDeploy's block caches, so they travel with a block: through prefix caching, and into the draft model,
which has no state caches. The raw keys of the open pool of a sequence lie in the block of their tokens; a block holds
whole pools, so an open pool never crosses one. Entries of rejected drafts are written again before they are read.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from lmdeploy.pytorch.engine.cache_engine.schema import BlockCacheRequest
from lmdeploy.pytorch.model_inputs import get_step_ctx_manager
from lmdeploy.pytorch.models.patch import get_build_model_context
from torch import Tensor, nn
from torch.nn import functional

from ..... import ops
from ... import counters
from .parameters import Held, column_linear, parameter
from .rows import PagedRows

POOLS: Final = "glm5_kpool_keys"  # [block / P, dim] of the activations' type
TAIL: Final = "glm5_kpool_tail"  # [P + drafts, 2 · dim] fp32: raw key and gate of a token
_NORM_EPS: Final = 1e-6  # transformers' and the released weights' own, not rms_norm_eps


class KPoolIndexer(nn.Module):
    """Chooses index_topk tokens for each query, in whole pools, and the query's own open pool.

    It is on every rank whole: all of them choose the same.
    """

    def __init__(self, config: Any, dtype: torch.dtype | None, device: Any) -> None:
        super().__init__()
        hidden, self.heads, self.dim = config.hidden_size, config.index_n_heads, config.index_head_dim
        self.topk, self.kpool, self.dtype = config.index_topk, config.index_kpool, dtype
        self.drafts: int = get_build_model_context().num_spec_tokens
        self.wq_b = column_linear(config.q_lora_rank, self.heads * self.dim, dtype, device, split=False)
        self.wk = column_linear(hidden, self.dim, dtype, device, split=False)
        self.weights_proj = column_linear(hidden, self.heads, dtype, device, split=False)
        self.k_norm = Held(
            weight=parameter(self.dim, dtype=dtype, device=device), bias=parameter(self.dim, dtype=dtype, device=device)
        )
        self.index_kpool_compress_ape = parameter(self.kpool, self.dim, dtype=dtype, device=device)
        self.index_kpool_compress_gate = parameter(self.dim, hidden, dtype=dtype, device=device)
        self._rows: dict[str, int] = {}

    def get_block_cache_requests(self, context: Any) -> list[BlockCacheRequest]:
        """Ask LMDeploy for the two caches of this layer (its collector calls this)."""
        block = context.geometry.kernel_block_size
        return [
            BlockCacheRequest(POOLS, (block // self.kpool, self.dim), self.dtype),
            BlockCacheRequest(TAIL, (self.kpool + self.drafts, 2 * self.dim), torch.float32),
        ]

    def bind_block_cache(self, binding: Any) -> None:
        """Learn which row of a cache is this layer's."""
        self._rows[binding.cache_name] = binding.consumer_row

    def forward(self, x: Tensor, q_resid: Tensor, rows: PagedRows) -> Tensor | None:
        """Write the caches and choose.

        Args:
            x: [1, T, hidden].
            q_resid: [1, T, q_lora_rank], the query before its second projection.
            rows: the step's.

        Returns:
            int32 [T, topk + P - 1], positions of each query's tokens, -1 behind them; None if no row can have more
            than `topk` tokens, so that all would be chosen.
        """
        blocks = get_step_ctx_manager().current_context().block_caches
        pools, tail = (blocks.row(name, self._rows[name]) for name in (POOLS, TAIL))
        k = functional.layer_norm(self.wk(x), (self.dim,), self.k_norm.weight, self.k_norm.bias, _NORM_EPS)[0]
        gate = functional.linear(x, self.index_kpool_compress_gate)[0]
        ape, lengths = self.index_kpool_compress_ape, rows.host_lengths
        counters.add("kpool_update")
        ops.kpool_update(k, gate, ape, pools, tail, host_lengths=lengths, **rows.paged())
        if rows.max_kv_len <= self.topk:
            return None
        counters.add("kpool_select")
        q = self.wq_b(q_resid)[0].unflatten(-1, (self.heads, self.dim))
        weights = self.weights_proj(x)[0].float() * self.heads**-0.5
        return ops.kpool_select(
            q, weights, pools,
            topk=self.topk, kpool=self.kpool, max_kv_len=rows.max_kv_len, host_lengths=lengths, **rows.paged(),
        )  # fmt: skip
