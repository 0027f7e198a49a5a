"""Rejection sampling: which drafts of a verify step are kept, and which token follows them.

`verify` and `verify_greedy` have the arguments and results of LMDeploy's `RejectionSamplingImpl.forward` and
`forward_greedy`; `rejection_sample` takes the engine's sampling inputs instead.
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor

from ..kernels.rejection_sampling.eager import draws
from ._checks import (
    FLOATS,
    INTS,
    require,
    require_dtype,
    require_inference,
    require_int,
    require_same_device,
    require_shape,
    require_tensor,
)
from ._registry import Operator

_NAME: Final = "rejection_sample"
_GREEDY: Final = "rejection_sample_greedy"
Verified = tuple[Tensor, Tensor, Tensor]


class SamplingInputs(Protocol):
    """What is read of the engine's sampling inputs, one entry per request.

    Attributes:
        max_top_k: 1 if every request is greedy (a Python int, so that no device value is read).
        top_k: int [B], 1 for a greedy request; None if every request samples.
        random_seeds: int [B] or None (then draws come from torch's generator).
        random_offsets: int [B], the position of the first draft in its request; None without seeds.
    """

    max_top_k: int
    top_k: Tensor | None
    random_seeds: Tensor | None
    random_offsets: Tensor | None


def _outputs(draft_token_ids: Tensor) -> Verified:
    batch, num_drafts = draft_token_ids.shape
    return (
        draft_token_ids.new_empty((batch, num_drafts + 1), dtype=torch.int64),
        draft_token_ids.new_empty((batch,), dtype=torch.int64),
        draft_token_ids.new_empty((batch,), dtype=torch.int64),
    )


def _fake(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    bonus_token_ids: Tensor,
    uniform: Tensor | None,
    is_greedy: Tensor | None,
    draft_probs: Tensor | None,
    vocab_size: int,
) -> Verified:
    return _outputs(draft_token_ids)


def _fake_greedy(target_token_ids: Tensor, draft_token_ids: Tensor) -> Verified:
    return _outputs(draft_token_ids)


OPERATOR: Final = Operator.define(
    _NAME,
    "(Tensor target_logits, Tensor draft_token_ids, Tensor bonus_token_ids, Tensor? uniform, Tensor? is_greedy,"
    " Tensor? draft_probs, int vocab_size) -> (Tensor, Tensor, Tensor)",
    _fake,
    summary="speculative verification of greedy, sampling and mixed batches",
    dtypes=FLOATS,
)
GREEDY_OPERATOR: Final = Operator.define(
    _GREEDY,
    "(Tensor target_token_ids, Tensor draft_token_ids) -> (Tensor, Tensor, Tensor)",
    _fake_greedy,
    summary="speculative verification of a greedy batch from the target's ids",
    dtypes=INTS,
)


def verify(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    bonus_token_ids: Tensor,
    *,
    is_greedy: Tensor | None = None,
    draft_probs: Tensor | None = None,
    seeds: Tensor | None = None,
    offsets: Tensor | None = None,
    uniform: Tensor | None = None,
    vocab_size: int | None = None,
) -> Verified:
    """Verify drafts against the target's processed logits.

    A request that samples accepts draft x with probability min(1, p(x) / q(x)) and, at its first rejection, draws from
    max(p - q, 0) normalised (Leviathan et al., https://arxiv.org/abs/2211.17192), so that what is emitted is
    distributed as p; q = 1 at the draft itself without `draft_probs`, and p itself is used where the difference is
    degenerate (zero or not finite). A greedy request keeps the longest prefix that equals the target's argmax. A draft
    id outside the vocabulary means that nothing was proposed: it is rejected and the token comes from p.

    A position whose logits hold a NaN or +inf, or nothing above -inf, is unusable: its draft is rejected and id 0 is
    emitted in its place; `unusable_positions` finds such positions. No other request changes. No host value is read.

    Args:
        target_logits: [B, N, V] fp32, bf16 or fp16, at the draft positions, any strides.
        draft_token_ids: int32 or int64 [B, N].
        bonus_token_ids: int32 or int64 [B], emitted after N accepted drafts (id 0 if outside the vocabulary).
        is_greedy: bool [B]; None if every request samples.
        draft_probs: float [B, N, V], the distributions that the drafts were sampled from; None if they were not.
        seeds: int [B]. A request's draws depend on its seed and its positions alone: not on the batch, nor on the
            route. None: torch's generator of the device.
        offsets: int [B], position of the first draft in its request; needed with `seeds`.
        uniform: fp32 [B, N, 2], the draws in [0, 1) themselves (acceptance, token); excludes `seeds`.
        vocab_size: ids at or above it are never emitted (a padded vocabulary); None means V.

    Returns:
        (output_token_ids int64 [B, N + 1], the emitted tokens and then -1; num_rejected int64 [B], N + 1 less the
        number of emitted tokens; last_token_ids int64 [B], the last emitted token). Every request emits a token.

    Raises:
        TypeError: not a tensor, or an unsupported dtype.
        ValueError: a shape, device or vocabulary that does not fit, or seeds without offsets.
    """
    _check(target_logits, draft_token_ids, bonus_token_ids, draft_probs)
    batch, num_drafts = draft_token_ids.shape
    if is_greedy is not None:
        require_shape(_NAME, "is_greedy", is_greedy, [batch])
        require_dtype(_NAME, "is_greedy", is_greedy, [torch.bool])
    for name, value in (("seeds", seeds), ("offsets", offsets)):
        if value is not None:
            require_shape(_NAME, name, value, [batch])
            require_dtype(_NAME, name, value, INTS)
    if seeds is None:
        require(offsets is None, _NAME, "offsets", "given without seeds", "both or neither")
    else:
        require(
            offsets is not None, _NAME, "offsets", "None with seeds given", "int [B]: equal draws in every step else"
        )
        require(uniform is None, _NAME, "uniform", "given with seeds", "one of them")
    if uniform is not None:
        require_shape(_NAME, "uniform", uniform, [batch, num_drafts, 2])
        require_dtype(_NAME, "uniform", uniform, [torch.float32])
    require_same_device(
        _NAME, "target_logits", target_logits, is_greedy=is_greedy, seeds=seeds, offsets=offsets, uniform=uniform
    )
    if uniform is None:
        if seeds is not None and offsets is not None:
            uniform = draws(seeds, offsets, num_drafts)
        else:
            uniform = torch.rand((batch, num_drafts, 2), dtype=torch.float32, device=target_logits.device)
    return torch.ops.dlinfer_ext.rejection_sample(  # type: ignore[no-any-return]
        target_logits,
        draft_token_ids,
        bonus_token_ids,
        uniform,
        is_greedy,
        draft_probs,
        _vocabulary(target_logits, vocab_size),
    )


def verify_greedy(target_token_ids: Tensor, draft_token_ids: Tensor) -> Verified:
    """Verify the drafts of a greedy batch against the target's token ids.

    Args:
        target_token_ids: int32 or int64 [B, N + 1], the target's token at each draft position and then the bonus token.
            A negative id stands for no token: the draft is rejected and id 0 is emitted.
        draft_token_ids: int32 or int64 [B, N].

    Returns:
        As `verify`.

    Raises:
        TypeError: not a tensor, or an unsupported dtype.
        ValueError: a shape or device that does not fit.
    """
    require_shape(_GREEDY, "draft_token_ids", draft_token_ids, ["B", "N"])
    require_dtype(_GREEDY, "draft_token_ids", draft_token_ids, INTS)
    batch, num_drafts = draft_token_ids.shape
    require_shape(_GREEDY, "target_token_ids", target_token_ids, [batch, num_drafts + 1])
    require_dtype(_GREEDY, "target_token_ids", target_token_ids, INTS)
    require_same_device(_GREEDY, "draft_token_ids", draft_token_ids, target_token_ids=target_token_ids)
    return torch.ops.dlinfer_ext.rejection_sample_greedy(  # type: ignore[no-any-return]
        target_token_ids, draft_token_ids
    )


def rejection_sample(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    bonus_token_ids: Tensor,
    sampling_inputs: SamplingInputs,
    draft_probs: Tensor | None = None,
) -> Verified:
    """Verify drafts as `verify` does, with the policy and the seeds of LMDeploy's sampling inputs.

    Args:
        target_logits: [B, N, V].
        draft_token_ids: int [B, N].
        bonus_token_ids: int [B].
        sampling_inputs: one entry per request; read are max_top_k, top_k, random_seeds and random_offsets.
        draft_probs: [B, N, V] or None.

    Returns:
        As `verify`.

    Raises:
        TypeError: as `verify`, or sampling_inputs lacks what is read of it.
        ValueError: as `verify`.
    """
    for name in ("max_top_k", "top_k", "random_seeds", "random_offsets"):
        if not hasattr(sampling_inputs, name):
            raise TypeError(
                f"{_NAME}: argument 'sampling_inputs' is {type(sampling_inputs).__name__} without {name}; "
                "wanted an object with max_top_k, top_k, random_seeds and random_offsets"
            )
    require_int(_NAME, "sampling_inputs.max_top_k", sampling_inputs.max_top_k)
    if sampling_inputs.max_top_k == 1:
        _check(target_logits, draft_token_ids, bonus_token_ids, draft_probs)
        return torch.ops.dlinfer_ext.rejection_sample(  # type: ignore[no-any-return]
            target_logits, draft_token_ids, bonus_token_ids, None, None, None, _vocabulary(target_logits, None)
        )
    is_greedy = None
    if sampling_inputs.top_k is not None:
        require_tensor(_NAME, "sampling_inputs.top_k", sampling_inputs.top_k)
        require_dtype(_NAME, "sampling_inputs.top_k", sampling_inputs.top_k, INTS)
        is_greedy = sampling_inputs.top_k == 1
    seeds = sampling_inputs.random_seeds
    return verify(
        target_logits,
        draft_token_ids,
        bonus_token_ids,
        is_greedy=is_greedy,
        draft_probs=draft_probs,
        seeds=seeds,
        offsets=None if seeds is None else sampling_inputs.random_offsets,
    )


def unusable_positions(target_logits: Tensor, vocab_size: int | None = None) -> Tensor:
    """Return bool [B, N]: positions without a distribution, where `verify` emits id 0.

    That is where the logits hold a NaN or +inf, or nothing above -inf.

    Args:
        target_logits: [B, N, V] as given to `verify`.
        vocab_size: as given to `verify`.
    """
    require_shape("unusable_positions", "target_logits", target_logits, ["B", "N", "V"])
    require_dtype("unusable_positions", "target_logits", target_logits, FLOATS)
    return ~torch.isfinite(target_logits[..., : _vocabulary(target_logits, vocab_size)].logsumexp(-1))


def _check(target_logits: Tensor, draft_token_ids: Tensor, bonus_token_ids: Tensor, draft_probs: Tensor | None) -> None:
    require_shape(_NAME, "draft_token_ids", draft_token_ids, ["B", "N"])
    require_dtype(_NAME, "draft_token_ids", draft_token_ids, INTS)
    batch, num_drafts = draft_token_ids.shape
    require_shape(_NAME, "target_logits", target_logits, [batch, num_drafts, "V"])
    require_dtype(_NAME, "target_logits", target_logits, FLOATS)
    require_shape(_NAME, "bonus_token_ids", bonus_token_ids, [batch])
    require_dtype(_NAME, "bonus_token_ids", bonus_token_ids, INTS)
    if draft_probs is not None:
        require_shape(_NAME, "draft_probs", draft_probs, target_logits.shape)
        require_dtype(_NAME, "draft_probs", draft_probs, FLOATS)
    require_same_device(
        _NAME,
        "target_logits",
        target_logits,
        draft_token_ids=draft_token_ids,
        bonus_token_ids=bonus_token_ids,
        draft_probs=draft_probs,
    )
    require_inference(_NAME, target_logits=target_logits, draft_probs=draft_probs)


def _vocabulary(target_logits: Tensor, vocab_size: int | None) -> int:
    columns = target_logits.shape[-1]
    require_int(_NAME, "vocab_size", vocab_size, optional=True)
    size = columns if vocab_size is None else vocab_size
    require(1 <= size <= columns, _NAME, "vocab_size", str(size), f"1 to {columns}, the columns of target_logits")
    return size
