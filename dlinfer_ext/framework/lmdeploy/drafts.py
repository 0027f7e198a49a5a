"""Which of LMDeploy's proposers drafts for a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

METHODS: Final = {"qwen3_5": "qwen3_5_mtp", "qwen3_5_moe": "qwen3_5_mtp", "glm5_next": "deepseek_mtp"}


def draft_method(checkpoint: Path) -> str:
    """Return the method for `SpeculativeConfig` and `--speculative-algorithm`, by config.json's model type.

    Raises:
        ValueError: a model type whose draft layer is not served.
    """
    kind = json.loads((checkpoint / "config.json").read_text(encoding="utf-8")).get("model_type")
    if kind not in METHODS:
        raise ValueError(
            f"drafts: {checkpoint} is of model type {kind!r}; wanted one of {', '.join(METHODS)}, or no drafts"
        )
    return METHODS[kind]
