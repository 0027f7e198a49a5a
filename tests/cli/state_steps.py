"""Steps of the fuzzer's worlds that touch every layout, each call of them dumped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

from dlinfer_ext.ops import state_dump
from tests.fuzz.layouts import make
from tests.fuzz.pages import Pages
from tests.fuzz.world import DENSE, NO_HISTORY, NO_SLOT, OTHER, PAD_SLOT, TAIL, Different, World


@contextmanager
def dumping(folder: Path, steps: str = "0-1000", check: str = "0") -> Iterator[None]:
    """Dump every call inside the block, counted from 0."""
    state_dump.reset()
    variables = {"DLINFER_EXT_DUMP": str(folder), "DLINFER_EXT_DUMP_STEPS": steps, "DLINFER_EXT_CHECK": check}
    with mock.patch.dict(os.environ, variables):
        yield


def dump_steps(layout: str, folder: Path, *, faulty: bool = False, **sizes: int | bool) -> list[Path]:
    """Make the same steps of a layout and return the dumps of their calls; with `faulty` steps may go wrong."""
    world = make(layout, **sizes)
    wrong = (Different, RuntimeError, IndexError, KeyError, AssertionError) if faulty else ()
    with dumping(folder):
        for name, *arguments in script(world):
            with suppress(*wrong):
                getattr(world, str(name))(*arguments)
    return sorted(folder.glob("*.safetensors"))


def script(world: World) -> Iterator[tuple[object, ...]]:
    """Chunks shorter than a window, rejected drafts, PAD rows, slots used before, blocks changed, a copied state."""
    yield "dirty", 2, float("nan")
    yield "dirty", 3, 777.0
    # For blocks a history of -1 is the only mark of a PAD row; elsewhere one with a slot is a caller's fault.
    yield "prefill", [(0, 9), (1, 1), (2, 3), (NO_HISTORY if isinstance(world, Pages) else NO_SLOT, 2)], TAIL
    yield "prefill", [(3, 5), (1, 2)]
    yield "prefill", [(0, 1), (4, 2), (PAD_SLOT, 3)], OTHER
    yield "verify", [(0, 4, 2), (1, 3, 3), (NO_SLOT, 2, 1)]
    yield "verify", [(0, 4, 1), (1, 4, 4), (3, 4, 3)], DENSE
    yield "verify", [(0, 3, 3), (1, 4, 1), (2, 1, 1), (PAD_SLOT, 2, 1)], OTHER
    yield "decode", [0, 1, 2, 3, 4]
    yield "finish", 1
    yield "prefill", [(1, 2), (0, 2)]
    yield "verify", [(1, 4, 2), (0, 4, 3)], OTHER
    yield "finish", 2
    yield "copy", 0, 2
    yield "verify", [(1, 4, 4), (0, 2, 1), (2, 4, 1)], DENSE
    yield "decode", [0, 1, 2], OTHER
