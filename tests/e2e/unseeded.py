"""A plugin of a session for a negative control: seeds and positions do not reach the sampler."""

from __future__ import annotations

from typing import Any

from dlinfer_ext.framework.lmdeploy import seeds


def _nothing(module: Any) -> str:
    return "left as it was"


seeds.patch_spec_agent = _nothing
