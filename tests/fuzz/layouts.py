"""The layouts that are fuzzed, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from .conv import Linear, Rewind, Ring
from .delta import RULES, Delta
from .pages import Pages
from .world import World

LAYOUTS: Final[dict[str, Callable[..., World]]] = {
    "conv-linear": Linear,
    "conv-rewind": Rewind,
    "conv-ring": Ring,
    **{
        f"{rule}-{layout}": partial(Delta, rule=rule, layout=layout)
        for rule in RULES
        for layout in ("plain", "ring", "table")
    },
    "pages": Pages,
}


def make(layout: str, **sizes: Any) -> World:
    """Return an empty world of a layout; see `World` for the sizes."""
    return LAYOUTS[layout](**sizes)
