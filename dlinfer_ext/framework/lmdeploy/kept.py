"""Names of LMDeploy that have to stay LMDeploy's, or this package's: on a card dlinfer's start-up replaces them.

dlinfer 0.2.8 replaces them in `dlinfer/framework/lmdeploy_ext/device/__init__.py` with forms that were written for an
older LMDeploy: they read and write the state pools by another layout than the one this package gives them.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any, Final

logger = logging.getLogger("dlinfer_ext")

GATED_DELTA: Final = "lmdeploy.pytorch.nn.gated_delta"
LAYERS: Final = ("CausalConv1dFunc", "CausalConv1d", "GatedDelta", "GatedDeltaMetaBuilder")
NAMES: Final = {
    GATED_DELTA: LAYERS,
    "lmdeploy.pytorch.models.qwen3_5": (
        "Qwen3_5GatedDeltaNet.forward",
        "Qwen3_5ForConditionalGeneration.prepare_inputs_for_generation",
        "CausalConv1d",
        "GatedDelta",
    ),
    "lmdeploy.pytorch.models.qwen3_next": ("Qwen3NextGatedDeltaNet.forward", "CausalConv1d", "GatedDelta"),
    "lmdeploy.pytorch.configurations.qwen3_5": ("Qwen3_5ModelConfigBuilder.build",),
    "lmdeploy.pytorch.configurations.qwen3_next": ("Qwen3NextModelConfigBuilder.build",),
}

_first: dict[tuple[str, str], Any] = {}


def keep(module: Any, names: tuple[str, ...]) -> str:
    """Remember what stands under the names of a module when first asked, and put it back when asked again.

    Args:
        module: of LMDeploy; a name of `LAYERS` in it is an import of `nn.gated_delta`'s, and follows that.
        names: "Name" or "Class.attribute". The seams of H20 say that each is there, but for `LAYERS` that are
            imported from `nn.gated_delta`: a module that imports one no more has nothing to put back.

    Returns:
        what stands there now.
    """
    replaced = []
    for name in names:
        owner, _, attribute = name.rpartition(".")
        holder = getattr(module, owner) if owner else module
        source = GATED_DELTA if name in LAYERS else module.__name__
        found = inspect.getattr_static(holder, attribute, None)
        if found is None:
            continue
        # `nn.gated_delta` was imported before whoever imports from it, and remembered as it was imported.
        first = _first.setdefault((source, name), found)
        if found is not first:
            setattr(holder, attribute, first)
            replaced.append(name)
    if replaced:
        logger.warning("%s: put back %s, which another package had replaced", module.__name__, ", ".join(replaced))
    return f"{', '.join(names)}: as they were" + (f"; put back: {', '.join(replaced)}" if replaced else "")
