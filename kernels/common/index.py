"""Index arithmetic for packed batches. Tensors in, tensors out: no host read."""

from __future__ import annotations

import torch
from torch import Tensor


def row_of_token(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Return the row that each packed token belongs to.

    Zero-length rows own no token. Tokens at or past the last offset (a padded tail) get the row number N.

    Args:
        cu_seqlens: int [N + 1], cumulative lengths that start at 0.
        num_tokens: T.

    Returns:
        int64 [T].
    """
    tokens = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True)


def live_rows(state_indices: Tensor, cu_seqlens: Tensor, pad_slot_id: int) -> Tensor:
    """Return bool [N]: rows that have tokens and a slot (not < 0 and not `pad_slot_id`)."""
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    return (state_indices >= 0) & (state_indices != pad_slot_id) & (lengths > 0)
