"""The routes of the Ascend vendor, best first: data only."""

from __future__ import annotations

from typing import Final

from dlinfer_ext.forms import FOLDERS, NO_KERNEL, eager_form, kernel_form
from dlinfer_ext.ops._registry import Route

from . import soc
from .fused import FUSED


def _kernel(operator: str) -> tuple[Route, ...]:
    if operator in NO_KERNEL:
        return ()
    return (Route("triton", kernel_form(operator), soc.triton_missing, soc.given),)


ROUTES: Final[dict[str, tuple[Route, ...]]] = {
    operator: (
        *(entry.route() for entry in FUSED if entry.operator == operator),
        *_kernel(operator),
        Route("eager", eager_form(operator)),
    )
    for operator in FOLDERS
}
