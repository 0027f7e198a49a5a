"""The Triton kernels of this package on CPU tensors, through a mended interpreter.

Triton's own interpreter takes a kernel statement by statement with numpy. As it stands it is wrong without saying so:
a bf16 product multiplies bit patterns, fp32 is cut off to bf16 instead of rounded, and a loop counter is a Python int.
`interpreter_mends` puts that right and adds what a CPU can check for little: every access must fall into a tensor
that was given to the launch.

A process either interprets kernels or compiles them, for Triton decides when a kernel's module is imported. The
variable TRITON_INTERPRET is set only while Triton is imported, so that child processes do not inherit it.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Final

from ..kernels.common.tiling import SoC
from ..targets import load_soc
from . import install

# The chip whose tiles the kernels take: the smallest buffers of those that are built for.
CHIP: Final = "a2"
_VARIABLE: Final = "TRITON_INTERPRET"
_MENDS: Final = f"{__package__}.interpreter_mends"


def active() -> bool:
    """Tell whether this process interprets its kernels."""
    return _MENDS in sys.modules


def missing() -> str | None:
    """Return why kernels cannot be interpreted here, or None."""
    why = install.missing()
    if why is not None:
        return why
    if not active() and "triton" in sys.modules:
        return (
            "this process has already imported Triton to compile kernels, and interprets none: ask for one of the "
            "routes native and interpret in a process"
        )
    return None


def activate() -> dict[str, SoC]:
    """Interpret every kernel that this process imports from now on; return what launchers need to be told.

    Raises:
        RuntimeError: the toolchain is missing, or this process has imported Triton for another route.
    """
    why = missing()
    if why is not None:
        raise RuntimeError(why)
    if not active():
        install.enter()
        before = os.environ.get(_VARIABLE)
        os.environ[_VARIABLE] = "1"
        try:
            importlib.import_module(_MENDS)
        finally:
            if before is None:
                del os.environ[_VARIABLE]
            else:
                os.environ[_VARIABLE] = before
    return {"soc": load_soc(CHIP)}


def launches() -> int:
    """Return how many kernels this process has interpreted."""
    return sum(kernels().values())


def kernels() -> dict[str, int]:
    """Return how often this process has interpreted each kernel, by its name."""
    return dict(sys.modules[_MENDS].COUNTS) if active() else {}
