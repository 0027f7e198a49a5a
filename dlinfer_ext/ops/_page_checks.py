"""Checks of the arguments that say which rows a packed batch has and in which blocks of a cache they live."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ._checks import (
    FLOATS,
    INTS,
    MOST_POSITIONS,
    require,
    require_dtype,
    require_inference,
    require_int,
    require_lengths,
    require_same_device,
    require_shape,
)


def require_cache(op: str, name: str, cache: Tensor, width: int) -> None:
    """Check a cache [B, E >= 1, width]."""
    require_shape(op, name, cache, ["B", "E", width])
    require_dtype(op, name, cache, FLOATS)
    require(cache.shape[1] >= 1, op, name, f"of shape {list(cache.shape)}", f"[B, E >= 1, {width}]")
    require_inference(op, **{name: cache})


def require_rows(
    op: str,
    first: str,
    x: Tensor,
    cu_seqlens: Tensor,
    block_offsets: Tensor,
    history_lens: Tensor,
    host_lengths: Sequence[int] | None = None,
) -> list[int] | None:
    """Check what tells the rows of the packed tokens x, named `first`; return the row lengths as ints, or None."""
    require_shape(op, "cu_seqlens", cu_seqlens, ["N + 1"])
    require(cu_seqlens.shape[0] >= 1, op, "cu_seqlens", "empty", "[N + 1] offsets that start at 0")
    rows = cu_seqlens.shape[0] - 1
    require_shape(op, "block_offsets", block_offsets, [rows, "M"])
    require_shape(op, "history_lens", history_lens, [rows])
    given = {"cu_seqlens": cu_seqlens, "block_offsets": block_offsets, "history_lens": history_lens}
    for name, t in given.items():
        require_dtype(op, name, t, INTS)
    require_same_device(op, first, x, **given)
    return require_lengths(op, host_lengths, rows)


def require_positions(op: str, name: str, value: int, least: int, most: int = MOST_POSITIONS) -> None:
    """Check a number of tokens."""
    require_int(op, name, value)
    require(least <= value <= most, op, name, value, f"{least} to {most}")
