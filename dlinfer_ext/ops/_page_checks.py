"""Checks of the arguments that say which rows a packed batch has and in which blocks of a cache they live."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from .. import envs
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
    if envs.CHECK.flag():
        room = block_offsets.shape[1] * block_size
        limit = room if max_kv_len is None else min(room, max_kv_len)
        _check_values(op, x.shape[0], cu_seqlens, block_offsets, history_lens, blocks, block_size, limit, lengths)
    return lengths


def _check_values(
    op: str,
    tokens: int,
    cu_seqlens: Tensor,
    block_offsets: Tensor,
    history_lens: Tensor,
    blocks: int,
    block_size: int,
    limit: int,
    host_lengths: list[int] | None,
) -> None:
    """Check what only the device knows (DLINFER_EXT_CHECK=1); reads the host."""
    offsets = cu_seqlens.tolist()
    require(
        offsets[0] == 0 and offsets[-1] <= tokens, op, "cu_seqlens", str(offsets), f"offsets from 0 to at most {tokens}"
    )
    lengths = [b - a for a, b in pairwise(offsets)]
    table = block_offsets.tolist()
    for row, (n, history) in enumerate(zip(lengths, history_lens.tolist(), strict=True)):
        require(n >= 0, op, "cu_seqlens", f"falling by {-n} at row {row}", "offsets that do not fall")
        if host_lengths is not None:
            given = host_lengths[row]
            require(n <= given, op, "host_lengths", f"{given} at row {row}", f"at least {n}, its tokens")
        if history < 0 or n == 0:
            continue
        require(
            history + n <= limit, op, "history_lens", f"{history} at row {row} of {n} tokens", f"at most {limit} in all"
        )
        for block in table[row][: -(-(history + n) // block_size)]:
            require(0 <= block < blocks, op, "block_offsets", f"{block} at row {row}", f"0 to {blocks - 1}")
