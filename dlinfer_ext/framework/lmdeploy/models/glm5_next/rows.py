"""The rows of a step as the paged operators want them, the same for every layer of the model and of its MTP layer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class PagedRows:
    """Rows of one step: where they begin, what came before, and their blocks.

    Attributes:
        cu_seqlens: int [N + 1].
        history_lens: int [N], tokens of each row before this step.
        block_offsets: int [N, M], the blocks of each row.
        max_kv_len: at least the longest history and step together; a bound, so that nothing is read from the device.
        host_lengths: the row lengths as Python ints.
    """

    cu_seqlens: Tensor
    history_lens: Tensor
    block_offsets: Tensor
    max_kv_len: int
    host_lengths: tuple[int, ...]

    @classmethod
    def of(cls, metadata: Any, num_tokens: int) -> PagedRows:
        """Take them from LMDeploy's attention metadata of a step of `num_tokens` tokens."""
        rows = metadata.q_seqlens.size(0)
        if metadata.is_decoding or metadata.is_multi_token_decoding:
            lengths = (num_tokens // rows,) * rows
        else:
            # A CPU tensor that the backend made for its attention operators: no device read.
            lengths = tuple(b - a for a, b in pairwise(metadata.cu_seqlens_q_cpu.tolist()))
        return cls(
            metadata.cu_seqlens_q,
            metadata.kv_seqlens - metadata.q_seqlens,
            metadata.block_offsets,
            int(metadata.max_kv_seq_len),
            lengths,
        )

    def paged(self) -> dict[str, Any]:
        """Return the arguments that every paged operator takes."""
        return {
            "cu_seqlens": self.cu_seqlens,
            "history_lens": self.history_lens,
            "block_offsets": self.block_offsets,
        }
