"""The routes of the CPU vendor, best first: data only.

The Triton kernels run on CPU tensors too, compiled natively or interpreted; both are checks and serve only when asked.
"""

from __future__ import annotations

from typing import Final

from dlinfer_ext.forms import FOLDERS, NO_KERNEL, eager_form, kernel_form
from dlinfer_ext.ops._registry import Route
from dlinfer_ext.toolchain import interpreter, native


def _kernel(operator: str) -> tuple[Route, ...]:
    if operator in NO_KERNEL:
        return ()
    return (
        Route("native", kernel_form(operator), native.missing, native.activate, on_request=True),
        Route("interpret", kernel_form(operator), interpreter.missing, interpreter.activate, on_request=True),
    )


ROUTES: Final[dict[str, tuple[Route, ...]]] = {
    operator: (
        Route("eager", eager_form(operator)),
        *_kernel(operator),
    )
    for operator in FOLDERS
}
