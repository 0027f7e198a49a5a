"""Counts of what ran in this process: a path that did not run must not pass a test for having been right.

Plain Python ints, added to from values the host already has; nothing is read from the device.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from ...toolchain import native

if TYPE_CHECKING:
    from .gated_delta import GatedDeltaMetadata

_counts: Final[Counter[str]] = Counter()


def add(name: str, n: int = 1) -> None:
    _counts[name] += n


def count_step(meta: GatedDeltaMetadata, attn_metadata: Any) -> None:
    """Count one step by phase, and the prefill rows that continue a history."""
    if meta.is_decoding:
        multi = getattr(attn_metadata, "is_multi_token_decoding", False)
        add("verify_steps" if multi else "decode_steps")
        return
    add("prefill_steps")
    lengths, kv = meta.host_lengths, attn_metadata.kv_seqlens_cpu
    if lengths is not None and kv is not None:
        pairs = list(zip(lengths, kv.tolist(), strict=True))
        add("prefill_rows", len(pairs))
        add("prefill_rows_with_history", sum(total > q > 0 for q, total in pairs))


def snapshot() -> dict[str, int]:
    """Return the counts of this process, the launches of each native kernel as "native.NAME", and its pid as "pid"."""
    launched = {f"native.{name}": times for name, times in native.kernels().items()}
    return {**_counts, **launched, "pid": os.getpid()}


def reset() -> None:
    _counts.clear()
