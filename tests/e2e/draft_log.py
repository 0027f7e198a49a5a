"""A plugin of a session: write down every draft of LMDeploy's proposer, by request.

At the end E2E_DRAFTS is a JSON list with an entry for each engine: a list of requests, {"begin": the ids that the draft
layer was first given, "drafts": [[base, token, token, …], …]}. A base is the position of the hidden state that a round
of drafts begins with.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
from pathlib import Path
from typing import Any, Final

VARIABLE: Final = "E2E_DRAFTS"
agent: Any = importlib.import_module("lmdeploy.pytorch.spec_decode.spec_agent").SpecModelAgent
_engines: dict[int, list[dict[str, Any]]] = {}
_kept: list[Any] = []  # so that no two engines have one id
_live: dict[tuple[int, int], dict[str, Any]] = {}


async def _forward(self: Any, inputs: Any, extra: Any, sampling: Any) -> Any:
    # The draft layer has no states: a request is known by its first block, which no other has (no prefix cache).
    lengths, blocks = inputs.seq_length.tolist(), inputs.block_offsets[:, 0].tolist()
    histories, ids = inputs.history_lengths.tolist(), inputs.input_ids.flatten().tolist()
    last = extra.last_token_indices.tolist()
    unfinished = inputs.is_chunk and not inputs.is_last_chunk
    out = await _original(self, inputs, extra, sampling)
    if id(self) not in _engines:
        _engines[id(self)] = []
        _kept.append(self)
    start = 0
    rows = zip(blocks, lengths, histories, last, out.output_draft_token_ids.tolist(), strict=True)
    for block, length, history, at, drafts in rows:
        if history == 0:
            request: dict[str, Any] = {"begin": ids[start : start + length], "drafts": []}
            _engines[id(self)].append(request)
            _live[id(self), block] = request
        if not unfinished:
            _live[id(self), block]["drafts"].append([history + at - start, *drafts])
        start += length
    return out


def _write() -> None:
    Path(os.environ[VARIABLE]).write_text(json.dumps(list(_engines.values())), encoding="utf-8")


_original = agent._async_autoregressive_model_forward
agent._async_autoregressive_model_forward = _forward
atexit.register(_write)
