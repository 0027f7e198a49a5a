"""Counter-based random numbers: the same (seed, position) gives the same draw in any batch and on any route."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_WORD: Final = 0xFFFFFFFF
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return the four words of Philox4x32-10 (Salmon et al., https://doi.org/10.1145/2063384.2063405).

    Args:
        counter: four int64 tensors of one shape, each a 32-bit word.
        key: two int64 tensors of that shape, each a 32-bit word.

    Returns:
        Four int64 tensors, each a 32-bit word.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The 64-bit product wraps into the sign; both halves are right once masked to 32 bits.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _WORD) ^ c1 ^ k0, p1 & _WORD, ((p0 >> 32) & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def to_uniform(word: Tensor) -> Tensor:
    """Return fp32 in the open interval (0, 1) from a 32-bit word; 23 bits, so that neither end can round to 0 or 1."""
    return ((word >> 9).to(torch.float32) + 0.5) * 2.0**-23


def split_words(value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the low and the high 32-bit word of an integer tensor, as int64."""
    v = value.long()
    return v & _WORD, (v >> 32) & _WORD
