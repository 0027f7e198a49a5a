"""Writes down which tensors fill how many parts of which parameters: a plugin of a session (session.py).

One line for each model of the process in the file that E2E_LOADED names: {"taken": tensors, "parameters": parameters,
"elements": {parameter: elements}}.
"""

from __future__ import annotations

import json
import os
from typing import Any

from wrapt.importer import when_imported


def count(module: Any) -> None:
    original = module.WeightLoader.finish

    def finish(self: Any) -> None:
        original(self)
        record = {
            "taken": sum(len(parts) for parts in self._filled.values()),
            "parameters": len(self._filled),
            "draft": any(name.startswith("layers.") for name in self._filled),
        }
        with open(os.environ["E2E_LOADED"], "a") as file:
            file.write(json.dumps(record) + "\n")

    module.WeightLoader.finish = finish


when_imported("dlinfer_ext.framework.lmdeploy.models.glm5_next.weights")(count)
