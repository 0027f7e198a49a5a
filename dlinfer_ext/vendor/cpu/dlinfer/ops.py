"""dlinfer's operators that LMDeploy calls for Qwen3.5, Qwen3.5-MoE and Qwen3-Next, in plain PyTorch.

Signatures are those of LMDeploy 0.18's wrappers (`lmdeploy/pytorch/kernels/dlinfer`). These are the host's operators,
not this project's: they are written to be right and short. Lengths arrive as CPU tensors, so reading them is no
device read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from .utils.type_annotation import MoeMetadata


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"dlinfer.ops.{name} has no CPU form in dlinfer_ext: this model or setting (quantised weights, sparse "
        "attention …) cannot run under DLINFER_EXT_VENDOR=cpu"
    )


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + epsilon)
    return (h * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    summed = x + residual
    return rms_norm(summed, weight, epsilon), summed


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, all_reduce: bool = False, group: str = "") -> Tensor:
    if all_reduce:
        raise ValueError("dlinfer.ops.linear: all_reduce=True is a fused operator of the card; wanted False on a CPU")
    return F.linear(x, weight, bias)


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def apply_rotary_pos_emb(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first cos.size(-1) channels of each head and leave the rest (partial RoPE)."""
    dim = cos.size(-1)
    cos, sin = cos.reshape(-1, 1, dim), sin.reshape(-1, 1, dim)

    def rotate(t: Tensor) -> Tensor:
        heads = t.reshape(-1, t.size(-2), t.size(-1))
        turned, kept = heads[..., :dim], heads[..., dim:]
        return torch.cat((turned * cos + _rotate_half(turned) * sin, kept), -1).to(t.dtype).reshape(t.shape)

    return rotate(query), rotate(key)


def fill_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    kv_indices: Tensor,
    k_scales_zeros: Sequence[Tensor | None] = (),
    v_scales_zeros: Sequence[Tensor | None] = (),
    quant_bits: int = 0,
) -> tuple[Tensor, Tensor]:
    """Write each token's key and value to its slot (block × block size + offset)."""
    if quant_bits:
        raise ValueError(f"dlinfer.ops.fill_kv_cache: quant_bits is {quant_bits}; the CPU vendor wants 0")
    index = kv_indices.long().flatten()
    for states, cache in ((key, key_cache), (value, value_cache)):
        rows = cache.view(-1, *cache.shape[-2:])
        rows.index_copy_(0, index, states.reshape(-1, *rows.shape[1:]).to(rows.dtype))
    return key_cache, value_cache


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None, mask: Tensor | None) -> Tensor:
    """Query [B, Q, H, D], key and value [B, KV, HKV, D]; mask broadcasts to [B, 1, Q, KV], True = seen."""
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def _causal(queries: int, keys: int) -> Tensor:
    """Right-aligned causal mask [Q, KV]: the last query sees every key."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor | None,
    value_cache: Tensor | None,
    q_seqlens: Tensor,
    kv_seqlens: Tensor,
    max_q_seq_len: int,
    num_q_heads: int,
    num_kv_heads: int,
    attn_mask: Sequence[Tensor | None],
    softmax_scale: float | None = None,
    attn_output: Tensor | None = None,
    actual_seq_lengths_cpu: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Attend within each packed sequence; an empty `attn_mask` means full attention (a vision tower).

    The caller may ignore the result and read `attn_output`, so it is written.
    """
    assert actual_seq_lengths_cpu is not None
    out = query.new_empty(*query.shape[:-1], value.size(-1)) if attn_output is None else attn_output
    start = 0
    for end in actual_seq_lengths_cpu.tolist():
        rows = slice(start, end)
        mask = _causal(end - start, end - start) if len(attn_mask) else None
        out[rows] = _attend(query[None, rows], key[None, rows], value[None, rows], softmax_scale, mask)[0]
        start = end
    return out


def _paged(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """Gather the first `length` positions of one or more sequences: [..., length, HKV, D]."""
    return cache[blocks.long()].flatten(-4, -3)[..., :length, :, :]


def paged_prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    block_size: int,
    actual_q_seqlens_cpu: Tensor,
    kv_seqlens_cpu: Tensor,
    max_q_seq_len: int,
    max_kv_seq_len: int,
    num_q_heads: int,
    num_kv_heads: int,
    attn_mask: Sequence[Tensor | None],
    head_size_v: int | None = None,
    softmax_scale: float | None = None,
    attn_output: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Attend from each packed chunk to its own pages; a verify step of MTP arrives here too."""
    out = query.new_empty(*query.shape[:-1], value_cache.size(-1)) if attn_output is None else attn_output
    start = 0
    for row, (end, length) in enumerate(zip(actual_q_seqlens_cpu.tolist(), kv_seqlens_cpu.tolist(), strict=True)):
        if end > start:
            blocks = block_table[row, : -(-length // block_size)]
            keys, values = _paged(key_cache, blocks, length), _paged(value_cache, blocks, length)
            mask = _causal(end - start, length)
            out[start:end] = _attend(query[None, start:end], keys[None], values[None], softmax_scale, mask)[0]
        start = end
    return out


def paged_decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    block_size: int,
    actual_q_seqlens_cpu: Tensor,
    kv_seqlens_cpu: Tensor,
    max_kv_seq_len: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_size_v: int | None = None,
    softmax_scale: float | None = None,
    attn_output: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Attend from one token per row to that row's pages, all rows at once under a length mask."""
    out = query.new_empty(*query.shape[:-1], value_cache.size(-1)) if attn_output is None else attn_output
    longest = int(kv_seqlens_cpu.max())
    blocks = block_table[:, : -(-longest // block_size)]
    keys, values = _paged(key_cache, blocks, longest), _paged(value_cache, blocks, longest)
    seen = (torch.arange(longest) < kv_seqlens_cpu[:, None])[:, None, None, :]
    out.copy_(_attend(query[:, None], keys, values, softmax_scale, seen)[:, 0])
    return out


def moe_gating_topk_softmax(
    router_logits: Tensor, topk: int, moe_metadata: MoeMetadata | None = None
) -> tuple[Tensor, Tensor]:
    """Return the weights [T, topk] (softmax over all experts, not renormalised) and ids [T, topk] of the best."""
    weights, ids = router_logits.float().softmax(-1).topk(topk, dim=-1)
    return weights, ids


def fused_moe(
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    down_weights: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    topk: int,
    renormalize: bool,
    moe_metadata: MoeMetadata | None = None,
    chunked_moe_layout: object = None,
) -> Tensor:
    """Run each token through its experts.

    hidden_states [T, D]; gate_up_weights [E, 2·I, D]; down_weights [E, D, I]; topk_weights and topk_ids [T, topk].
    """
    weights = topk_weights.float()
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros_like(hidden_states, dtype=torch.float32)
    for expert in range(gate_up_weights.size(0)):
        token, choice = (topk_ids == expert).nonzero(as_tuple=True)
        if len(token):
            inner = silu_and_mul(F.linear(hidden_states[token], gate_up_weights[expert]))
            result = F.linear(inner, down_weights[expert]).float() * weights[token, choice, None]
            out.index_add_(0, token, result)
    return out.to(hidden_states.dtype)
