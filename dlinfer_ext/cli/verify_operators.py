"""Every operator that serves on this machine against its definition, on small fixed cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


# The operator, its definition, and the argument that both mutate ("": none).
Forms = tuple[Callable[..., Any], Callable[..., Any], str]


@dataclass(frozen=True)
class Check:
    """One operator in one dtype: the larger RMS error of output and state over the fp64 definition's RMS."""

    operator: str
    case: str
    dtype: str
    route: str
    error: float
    limit: float

    @property
    def held(self) -> bool:
        return self.error <= self.limit


def checks() -> list[Check]:
    """Compare the route that serves each operator with the definition, in every dtype."""
    import torch

    torch.manual_seed(0)
    with torch.inference_mode():
        return [check for dtype in (torch.float32, torch.bfloat16, torch.float16) for check in _checks(dtype)]


def _compare(
    operator: str,
    family: str | None,
    case: str,
    call: Callable[..., Any],
    definition: Callable[..., Any],
    mutated: str,
    /,
    **arguments: Any,
) -> Check:
    """Run operator and definition on copies of the same arguments; the argument `mutated` is compared after the call.

    Without a family, results must be equal and the error is the number of elements that are not.
    """
    import torch

    from ..ops import _registry
    from ..testing import TOLERANCE, rms_error

    ours, exact = dict(arguments), dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            ours[name] = value.clone()
            exact[name] = value.double() if value.is_floating_point() else value.clone()
    got, want = (out if isinstance(out, tuple) else (out,) for out in (call(**ours), definition(**exact)))
    pairs = [p for p in zip(got, want, strict=True) if p[0] is not None]
    if mutated:
        pairs.append((ours[mutated], exact[mutated]))
    dtype = next(v.dtype for v in arguments.values() if isinstance(v, torch.Tensor) and v.is_floating_point())
    if family is None:
        error, limit = float(sum(int((g.double() != w.double()).sum()) for g, w in pairs)), 0.0
    else:
        error, limit = max(rms_error(g, w) for g, w in pairs), TOLERANCE[family, dtype]
    route = _registry.choose(operator, "cpu").route.name
    return Check(operator, case, str(dtype).removeprefix("torch."), route, error, limit)


def _checks(dtype: torch.dtype) -> Iterator[Check]:
    """Rows of mixed lengths, one empty, one padded, one fresh in a used slot; K ≠ V; HV = 2·H."""
    yield from _conv(dtype)
    yield from _delta_rule(dtype)
    yield from _kda(dtype)
    yield from _sparse_attention(dtype)
    yield from _norm(dtype)
    yield from _rejection(dtype)
    yield from _pools(dtype)


LENGTHS = (70, 1, 0, 3, 2)
DRAFTS = 3


def _batch() -> dict[str, torch.Tensor]:
    import torch

    return {
        "cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0),
        "state_indices": torch.tensor([3, 1, 4, -1, 0]),
        "history_lens": torch.tensor([5, 9, 2, 4, 0]),
    }


def _conv(dtype: torch.dtype) -> Iterator[Check]:
    import torch

    from .. import ops
    from ..kernels.causal_conv1d import reference as conv

    channels, width, batch = 48, 4, _batch()
    x = torch.randn(sum(LENGTHS), channels).to(dtype)
    taps = {"weight": torch.randn(width, channels).to(dtype), "bias": torch.randn(channels).to(dtype)}
    pool = torch.randn(6, width + DRAFTS, channels).to(dtype)
    same = {"conv_state": pool, **taps, "activation": "silu"}
    for layout in ("linear", "ring"):
        forms: Forms = (ops.causal_conv1d, conv.causal_conv1d, "conv_state")
        yield _compare("causal_conv1d", "conv", layout, *forms, x=x, **same, **batch, layout=layout)
    # Columns of a ring of width + drafts, as a caller that knows the histories would give them.
    history, length = batch["history_lens"][:, None], torch.tensor(LENGTHS)[:, None]
    read = history + torch.arange(1 - width, 0)
    write = history + length + torch.arange(-width, 0)
    columns = {
        "read_columns": torch.where(read >= 0, read % pool.shape[1], -1),
        "write_columns": torch.where(write >= 0, write % pool.shape[1], -1),
        "has_history": batch["history_lens"] > 0,
        "cu_seqlens": batch["cu_seqlens"],
        "state_indices": batch["state_indices"],
    }
    forms = (ops.causal_conv1d_columns, conv.causal_conv1d_columns, "conv_state")
    yield _compare("causal_conv1d_columns", "conv", "ring", *forms, x=x, **same, **columns)
    step = torch.randn(len(LENGTHS), 1 + DRAFTS, channels).to(dtype)
    counts: dict[str, dict[str, torch.Tensor]] = {
        "rewind": {"num_accepted_tokens": torch.tensor([1, 2, 3, 4, 1])},
        "ring": {"cache_seqlens": batch["history_lens"]},
        "linear": {},
    }
    for layout, count in counts.items():
        forms = (ops.causal_conv1d_update, conv.causal_conv1d_update, "conv_state")
        indices = {"conv_state_indices": batch["state_indices"], **count}
        yield _compare("causal_conv1d_update", "conv", layout, *forms, x=step, **same, **indices)


def _delta_rule(dtype: torch.dtype) -> Iterator[Check]:
    import torch

    from .. import ops
    from ..kernels.gated_delta_rule import reference as rule

    heads, keys, values, batch, rows = 2, 32, 16, _batch(), len(LENGTHS)

    def qkv(*leading: int) -> dict[str, torch.Tensor]:
        return {
            "q": torch.randn(*leading, heads, keys).to(dtype),
            "k": torch.randn(*leading, heads, keys).to(dtype),
            "v": torch.randn(*leading, 2 * heads, values).to(dtype),
        }

    def gates(*leading: int) -> dict[str, torch.Tensor]:
        return {"g": -torch.rand(*leading, 2 * heads), "beta": torch.rand(*leading, 2 * heads)}

    raw = {
        "a": 4 * torch.randn(rows, 1 + DRAFTS, 2 * heads).to(dtype),
        "b": torch.randn(rows, 1 + DRAFTS, 2 * heads).to(dtype),
        "neg_exp_A": -torch.rand(2 * heads),
        "dt_bias": torch.randn(2 * heads),
    }
    yield _compare("gated_delta_gate", "delta_rule", "step", ops.gated_delta_gate, rule.gated_delta_gate, "", **raw)
    step = {name: value for name, value in batch.items() if name != "cu_seqlens"}
    for layout, inner in (("plain", ()), ("ring", (1 + DRAFTS,))):
        state = torch.randn(6, *inner, 2 * heads, values, keys)
        same = {"state": state, "use_qk_l2norm": True}
        forms: Forms = (ops.gated_delta_rule, rule.gated_delta_rule, "state")
        tokens = sum(LENGTHS)
        yield _compare(
            "gated_delta_rule", "delta_rule", layout, *forms, **qkv(tokens), **gates(tokens), **same, **batch
        )
        forms = (ops.gated_delta_rule_update, rule.gated_delta_rule_update, "state")
        lead = (rows, 1 + DRAFTS)
        yield _compare(
            "gated_delta_rule_update", "delta_rule", layout, *forms, **qkv(*lead), **gates(*lead), **same, **step
        )
        forms = (ops.sigmoid_gating_delta_rule_update, rule.sigmoid_gating_delta_rule_update, "state")
        yield _compare(
            "sigmoid_gating_delta_rule_update", "delta_rule", layout, *forms, **qkv(*lead), **raw, **same, **step
        )


def _kda(dtype: torch.dtype) -> Iterator[Check]:
    import torch

    from .. import ops
    from ..kernels.kda import reference as rule

    heads, keys, values, rows, tokens = 2, 32, 48, len(LENGTHS), sum(LENGTHS)
    batch = _batch()
    step = {name: value for name, value in batch.items() if name != "cu_seqlens"}

    def inputs(*leading: int) -> dict[str, torch.Tensor]:
        # A channel in two decays by exp(-5), the others hardly: the gates that a careless split cannot hold.
        gate = torch.where(torch.arange(keys) % 2 == 0, -5.0, -0.01 * torch.rand(*leading, 2 * heads, keys))
        return {
            "q": torch.randn(*leading, heads, keys).to(dtype),
            "k": torch.randn(*leading, heads, keys).to(dtype),
            "v": torch.randn(*leading, 2 * heads, values).to(dtype),
            "g": gate,
            "beta": torch.rand(*leading, 2 * heads),
        }

    raw = {
        "x": 4 * torch.randn(rows, 1 + DRAFTS, 2 * heads, keys).to(dtype),
        "A_log": torch.randn(2 * heads),
        "dt_bias": torch.randn(2 * heads, keys),
    }
    for case, bound in (("softplus", None), ("bound", -5.0)):
        yield _compare("kda_gate", "kda", case, ops.kda_gate, rule.kda_gate, "", **raw, lower_bound=bound)
    for layout, ring in (("plain", ()), ("ring", (1 + DRAFTS,))):
        same = {"state": torch.randn(6, *ring, 2 * heads, values, keys), "use_qk_l2norm": True}
        yield _compare("kda", "kda", layout, ops.kda, rule.kda, "state", **inputs(tokens), **same, **batch)
        lead = (rows, 1 + DRAFTS)
        yield _compare(
            "kda_update", "kda", layout, ops.kda_update, rule.kda_update, "state", **inputs(*lead), **same, **step
        )


def _sparse_attention(dtype: torch.dtype) -> Iterator[Check]:
    import torch

    from .. import ops
    from ..kernels.kpool_indexer import reference as indexer
    from ..kernels.latent_attention import reference as latent

    tokens, pool, block, heads, dim = sum(LENGTHS), 4, 16, 3, 16
    # Two rows begin in the middle of a pool, one is PAD; blocks in no order.
    rows: dict[str, Any] = {
        "cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0),
        "block_offsets": torch.randperm(30).view(5, 6),
        "history_lens": torch.tensor([5, 18, 2, -1, 0]),
    }
    update = {
        "k": torch.randn(tokens, dim).to(dtype),
        "gate": torch.randn(tokens, dim).to(dtype),
        "ape": torch.randn(pool, dim),
        "pool_cache": torch.randn(30, block // pool, dim).to(dtype),
        "tail_cache": torch.randn(30, pool + DRAFTS, 2 * dim),
    }
    for cache in ("pool_cache", "tail_cache"):
        forms: Forms = (ops.kpool_update, indexer.kpool_update, cache)
        yield _compare("kpool_update", "kpool", cache, *forms, **update, **rows)
    # Scores of small integers are exact, and many are equal: the choice has to be the same, index by index.
    select: dict[str, Any] = {
        "q": torch.randn(tokens, heads, dim).round().to(dtype),
        "weights": torch.randn(tokens, heads).round(),
        "pool_cache": torch.randn(30, block // pool, dim).round().to(dtype),
        "max_kv_len": 80,
        "kpool": pool,
    }
    for case, topk in (("chosen", 24), ("all", 80)):
        forms = (ops.kpool_select, indexer.kpool_select, "")
        yield _compare("kpool_select", None, case, *forms, **select, **rows, topk=topk)
    latents = torch.randn(30, block, 24).to(dtype)
    forms = (ops.latent_write, latent.latent_write, "cache")
    yield _compare("latent_write", None, "", *forms, c=torch.randn(tokens, 24).to(dtype), cache=latents, **rows)
    chosen = indexer.kpool_select(**select, **rows, topk=24)
    q, options = torch.randn(tokens, heads, 24).to(dtype), {"value_dim": 16, "scale": 0.2, "max_kv_len": 80}
    for case, indices in (("dense", None), ("sparse", chosen)):
        forms = (ops.latent_attention, latent.latent_attention, "")
        yield _compare(
            "latent_attention", "latent", case, *forms, q=q, cache=latents, **rows, **options, indices=indices
        )


def _norm(dtype: torch.dtype) -> Iterator[Check]:
    import torch

    from .. import ops
    from ..kernels.gated_rms_norm import reference as norm

    rows = {name: torch.randn(sum(LENGTHS), 64).to(dtype) for name in ("x", "gate")}
    for activation in ("silu", "sigmoid"):
        yield _compare(
            "gated_rms_norm",
            "norm",
            activation,
            ops.gated_rms_norm,
            norm.gated_rms_norm,
            "",
            **rows,
            weight=torch.randn(64).to(dtype),
            bias=None,
            eps=1e-6,
            activation=activation,
            norm_before_gate=True,
            group_size=64,
        )


def _rejection(dtype: torch.dtype) -> Iterator[Check]:
    import torch

    from ..kernels.rejection_sampling import reference

    batch, vocab = 6, 300
    logits = torch.randn(batch, DRAFTS, vocab).to(dtype)
    ids = {
        "draft_token_ids": torch.where(torch.rand(batch, DRAFTS) < 0.7, logits.argmax(-1), 7),
        "bonus_token_ids": torch.arange(batch),
    }
    sampled = {"uniform": torch.rand(batch, DRAFTS, 2), "is_greedy": None, "draft_probs": None}
    for case, how in (("greedy", dict.fromkeys(sampled)), ("sampled", sampled)):
        arguments = {"target_logits": logits, **ids, **how, "vocab_size": vocab}
        call = torch.ops.dlinfer_ext.rejection_sample
        yield _compare("rejection_sample", None, case, call, reference.rejection_sample, "", **arguments)


def _pools(dtype: torch.dtype) -> Iterator[Check]:
    import torch

    from .. import ops
    from ..kernels.state_pool import reference

    pool, slots = torch.randn(6, 3, 5).to(dtype), torch.tensor([4, -1, 0])
    yield _compare("zero_slots", None, "", ops.zero_slots, reference.zero_slots, "pool", pool=pool, slots=slots)
    pairs = {"source": slots, "target": torch.tensor([1, 2, 5])}
    yield _compare("copy_slots", None, "", ops.copy_slots, reference.copy_slots, "pool", pool=pool, **pairs)
