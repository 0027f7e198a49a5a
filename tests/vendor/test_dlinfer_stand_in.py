"""The host operators that the CPU vendor answers for, against plain formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dlinfer_ext.vendor.cpu.dlinfer import ops

H, HKV, D, BLOCK = 4, 2, 8, 4


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """Q [Q, H, D], k and v [KV, HKV, D]; the last query sees every key."""
    out = torch.empty(*q.shape[:-1], v.size(-1), dtype=torch.float64)
    for i in range(len(q)):
        for h in range(q.size(1)):
            last = len(k) - len(q) + i + 1 if causal else len(k)
            keys, values = k[:last, h * HKV // H].double(), v[:last, h * HKV // H].double()
            out[i, h] = (keys @ q[i, h].double() * scale).softmax(0) @ values
    return out.float()


def pages(lengths: list[int]) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Return caches, a block table with shuffled blocks, and each row's own keys and values."""
    blocks = sum(math.ceil(n / BLOCK) for n in lengths) + 1
    order = torch.randperm(blocks)
    k_cache, v_cache = torch.full((blocks, BLOCK, HKV, D), 9.0), torch.full((blocks, BLOCK, HKV, D), 9.0)
    table = torch.zeros(len(lengths), max(math.ceil(n / BLOCK) for n in lengths), dtype=torch.int32)
    keys, values, used = [], [], 0
    for row, n in enumerate(lengths):
        mine = order[used : used + math.ceil(n / BLOCK)]
        used += len(mine)
        table[row, : len(mine)] = mine.int()
        keys.append(torch.randn(n, HKV, D))
        values.append(torch.randn(n, HKV, D))
        slots = (mine[torch.arange(n) // BLOCK] * BLOCK + torch.arange(n) % BLOCK).int()
        ops.fill_kv_cache(keys[-1], values[-1], k_cache, v_cache, slots)
    return k_cache, v_cache, table, keys, values


@pytest.mark.parametrize("scale", [None, 0.3])
def test_paged_decode_sees_each_rows_own_pages(scale: float | None) -> None:
    lengths = [1, 5, 4, 11]
    k_cache, v_cache, table, keys, values = pages(lengths)
    query = torch.randn(len(lengths), H, D)
    got = ops.paged_decode_attention(
        query,
        k_cache,
        v_cache,
        table,
        BLOCK,
        torch.arange(1, 5),
        torch.tensor(lengths),
        11,
        H,
        HKV,
        softmax_scale=scale,
    )
    for row in range(len(lengths)):
        want = attend(query[row : row + 1], keys[row], values[row], scale or D**-0.5, causal=True)
        torch.testing.assert_close(got[row], want[0])


def test_paged_prefill_is_causal_over_history_and_chunk() -> None:
    lengths, chunks = [7, 3, 10], [2, 3, 0]
    k_cache, v_cache, table, keys, values = pages(lengths)
    query = torch.randn(sum(chunks), H, D)
    out = torch.full((sum(chunks), H, D), 5.0)
    got = ops.paged_prefill_attention(
        *(query, query, query, k_cache, v_cache, table, BLOCK),
        *(torch.tensor(chunks).cumsum(0), torch.tensor(lengths), 3, 10, H, HKV, [torch.zeros(1)]),
        attn_output=out,
    )
    assert got is out
    torch.testing.assert_close(got[:2], attend(query[:2], keys[0], values[0], D**-0.5, causal=True))
    torch.testing.assert_close(got[2:], attend(query[2:], keys[1], values[1], D**-0.5, causal=True))


@pytest.mark.parametrize("causal", [True, False], ids=["text", "vision"])
def test_prefill_attention_keeps_sequences_apart(causal: bool) -> None:
    """An empty mask list means full attention (vision), and the caller may read `attn_output` only."""
    query, key, value = torch.randn(5, H, D), torch.randn(5, HKV, D), torch.randn(5, HKV, D)
    out = torch.empty(5, H, D)
    ops.prefill_attention(
        *(query, key, value, None, None, torch.tensor([2, 3]), torch.tensor([2, 3]), 3, H, HKV),
        [torch.zeros(1)] if causal else [],
        attn_output=out,
        actual_seq_lengths_cpu=torch.tensor([2, 5]),
    )
    for rows in (slice(0, 2), slice(2, 5)):
        torch.testing.assert_close(out[rows], attend(query[rows], key[rows], value[rows], D**-0.5, causal))


def test_rotary_embedding_turns_only_its_channels() -> None:
    query, key, angle = torch.randn(1, 3, 2, 6), torch.randn(1, 3, 1, 6), torch.tensor([[0.5], [1.0], [2.0]])
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)  # two channels of six
    q, k = ops.apply_rotary_pos_emb(query, key, cos, sin)
    for t in range(3):
        c, s = math.cos(angle[t]), math.sin(angle[t])
        for got, was in ((q, query), (k, key)):
            x, y = was[0, t, :, 0], was[0, t, :, 1]
            torch.testing.assert_close(got[0, t, :, 0], x * c - y * s)
            torch.testing.assert_close(got[0, t, :, 1], y * c + x * s)
    assert torch.equal(q[..., 2:], query[..., 2:])


def test_norms_and_activation() -> None:
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    both = x + residual
    want = both / (both.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    got, summed = ops.add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(got, want)
    assert torch.equal(summed, both)
    torch.testing.assert_close(ops.silu_and_mul(x), x[:, :4] * x[:, :4].sigmoid() * x[:, 4:])


@pytest.mark.parametrize("renormalize", [True, False])
def test_mixture_of_experts(renormalize: bool) -> None:
    tokens, experts, inner, topk = 5, 4, 3, 2
    x, logits = torch.randn(tokens, D), torch.randn(tokens, experts)
    up, down = torch.randn(experts, 2 * inner, D), torch.randn(experts, D, inner)
    weights, ids = ops.moe_gating_topk_softmax(logits, topk)
    got = ops.fused_moe(x, up, down, weights, ids, topk, renormalize)
    probs = logits.softmax(-1)
    for t in range(tokens):
        best = probs[t].argsort(descending=True)[:topk]
        total = probs[t][best].sum() if renormalize else torch.tensor(1.0)
        want = sum(probs[t][e] / total * (down[e] @ ops.silu_and_mul(up[e] @ x[t])) for e in best)
        torch.testing.assert_close(got[t], want)


def test_an_operator_without_a_cpu_form_says_so() -> None:
    with pytest.raises(AttributeError, match=r"weight_quant_matmul has no CPU form.*DLINFER_EXT_VENDOR=cpu"):
        ops.weight_quant_matmul  # noqa: B018
    with pytest.raises(ValueError, match="quant_bits is 8"):
        ops.fill_kv_cache(*(torch.zeros(1),) * 5, quant_bits=8)
