"""The Triton kernels of this package on CPU tensors, compiled natively from the IR that goes to the Ascend compiler."""

from __future__ import annotations

from typing import Any


def missing() -> str | None:
    """Return why kernels cannot be compiled natively here, or None."""
    return "not built yet"


def activate() -> dict[str, Any]:
    """Install the native driver in this process; return what launchers need to be told."""
    raise RuntimeError("not built yet")
