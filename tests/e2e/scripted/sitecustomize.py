"""A server that says what a script tells, and keeps the prompts that it was given: for tests of what is around a model.

Python imports this by its name where the folder is on PYTHONPATH, in spawned processes too. E2E_SCRIPT names a folder:
`SEED.json` in it holds the token ids that a request with that seed gets, whatever the model says; each prompt's ids are
added to `prompts.jsonl` as a line.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

from wrapt.importer import when_imported

FOLDER = Path(os.environ.get("E2E_SCRIPT", ""))
STARTED: dict[int, int] = {}  # seed -> position of its first token


def say(module: Any) -> None:
    original = module.FusedLogitsProcessor.sampling

    @functools.wraps(original)
    def sampling(self: Any, logits: Any) -> Any:
        tokens = original(self, logits)
        seeds, offsets = self.sampling_inputs.random_seeds, self.sampling_inputs.random_offsets
        for row, seed in enumerate([] if seeds is None else seeds.tolist()):
            script = FOLDER / f"{seed}.json"
            if script.is_file():
                at, ids = int(offsets[row]), json.loads(script.read_text())
                # The engine is a step ahead of what it knows to be the end.
                tokens[row] = ids[min(at - STARTED.setdefault(seed, at), len(ids) - 1)]
        return tokens

    module.FusedLogitsProcessor.sampling = sampling


def keep(module: Any) -> None:
    original = module.AsyncEngine.preprocess

    @functools.wraps(original)
    async def preprocess(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = await original(self, *args, **kwargs)
        with (FOLDER / "prompts.jsonl").open("a") as file:
            file.write(json.dumps(request.inputs["input_ids"]) + "\n")
        return request

    module.AsyncEngine.preprocess = preprocess


if os.environ.get("E2E_SCRIPT"):
    when_imported("lmdeploy.pytorch.engine.logits_process")(say)
    when_imported("lmdeploy.serve.core.async_engine")(keep)
