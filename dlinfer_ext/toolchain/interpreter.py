"""The Triton kernels of this package on CPU tensors, through a mended interpreter."""

from __future__ import annotations

from typing import Any


def missing() -> str | None:
    """Return why kernels cannot be interpreted here, or None."""
    return "not built yet"


def activate() -> dict[str, Any]:
    """Install the interpreter in this process; return what launchers need to be told."""
    raise RuntimeError("not built yet")


def launches() -> int:
    """Return how many kernels this process has interpreted."""
    return 0
