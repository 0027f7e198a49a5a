"""A plugin of a session: cut prompts into chunks of given sizes, which LMDeploy cuts by one limit only.

E2E_CHUNKS has lists of sizes, as in "2,1,3 20,13"; prompts take the lists in turn, and end with a chunk of what is
left. A prompt is cut if nothing else is prefilled with it and it is longer than its list. Chunks are counted by size.
"""

from __future__ import annotations

import importlib
import os
from itertools import accumulate
from typing import Any, Final

from dlinfer_ext.framework.lmdeploy import counters

VARIABLE: Final = "E2E_CHUNKS"
LISTS: Final = [[int(size) for size in sizes.split(",")] for sizes in os.environ[VARIABLE].split()]
maker: Any = importlib.import_module("lmdeploy.pytorch.engine.inputs_maker")


class UnevenChunker(maker.LongContextChunker):  # type: ignore[misc]
    """LMDeploy's, with a limit that changes from chunk to chunk."""

    seq: Any = None
    turn = 0

    @property
    def sizes(self) -> list[int]:
        return LISTS[self.turn % len(LISTS)]

    @property
    def max_prefill_num(self) -> int:
        """The limit of the next chunk, which LMDeploy sets once for a prompt."""
        if self.seq is None:
            return 0
        done: int = self.seq.num_history_ids
        return next((end - done for end in accumulate(self.sizes) if end > done), self.seq.num_token_ids)

    @max_prefill_num.setter
    def max_prefill_num(self, _: int) -> None: ...

    def is_long_context(self, seq: Any) -> bool:
        return bool(seq.num_history_ids == 0 and seq.num_token_ids > sum(self.sizes))

    def next_chunk_size(self) -> Any:
        size, more = super().next_chunk_size()
        counters.add(f"chunk_of_{size}")
        return size, more

    def clear(self) -> None:
        self.turn += self.seq is not None
        super().clear()


maker.LongContextChunker = UnevenChunker
