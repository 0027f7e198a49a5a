"""Checks of the arguments that say which rows a packed batch has and in which blocks of a cache they live."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ._checks import FLOATS, INTS, require, require_dtype, require_inference, require_same_device, require_shape


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
    *,
    blocks: int,
    block_size: int,
    max_kv_len: int | None = None,
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
    require(max_kv_len is None or max_kv_len >= 0, op, "max_kv_len", max_kv_len, "at least 0")
    lengths = None if host_lengths is None else [int(n) for n in host_lengths]
    if lengths is not None:
        require(
            len(lengths) == rows and min(lengths, default=0) >= 0,
            op,
            "host_lengths",
            str(lengths),
            f"{rows} lengths >= 0",
        )
    return lengths
