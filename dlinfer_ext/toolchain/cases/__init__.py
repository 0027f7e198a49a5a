"""What is run and compiled at a model's real sizes: one case per operator and phase, shared by every check.

A case holds everything that a check needs: inputs, the launcher, the definition, and the bytes that no kernel can do
without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import torch

from ...forms import kernel_form, load
from ...targets import Model

# One module for each, with `cases(model, tp, dtype)`.
FAMILIES: Final = ("conv", "delta_rule", "norm", "reject", "state_pool")


@dataclass(frozen=True)
class Case:
    """One launcher at one size.

    Attributes:
        operator: the operator's name in `python -m dlinfer_ext ops`.
        phase: "prefill-2048", "decode-32", "verify-32x5", ...: the shape in words.
        tolerance: family of `dlinfer_ext.testing.TOLERANCE`; None for exact equality.
        arguments: makes fresh inputs, the same every time it is called.
        launch: the launcher, called as `launch(**arguments, soc=soc)`; it launches Triton kernels and nothing slower.
        definition: called with the same arguments, floating-point tensors in fp64; the outputs that it returns and the
            arguments that it mutates are the right ones.
        mutated: names of the arguments that both mutate.
        read_bytes: every input and every addressed state row once.
        written_bytes: every output and every addressed state row once.
        bytes_limit: how many times read_bytes + written_bytes the kernel may move; None: no bound is set.
        blocks_limit: the same with each run rounded out to blocks of 32 bytes.
        counted: whether the counting build runs it; False for a case that would take it minutes and whose bytes a
            smaller case bounds.
    """

    operator: str
    phase: str
    tolerance: str | None
    arguments: Callable[[], dict[str, Any]]
    launch: Callable[..., Any]
    definition: Callable[..., Any]
    read_bytes: int
    written_bytes: int
    mutated: tuple[str, ...] = ()
    bytes_limit: float | None = None
    blocks_limit: float | None = None
    counted: bool = True

    @property
    def lower_bound(self) -> int:
        """Bytes that no kernel can do without."""
        return self.read_bytes + self.written_bytes


def launcher(operator: str) -> Callable[..., Any]:
    """Return the operator's launcher, imported when it is called.

    Its module imports Triton, which must not happen before a toolchain is chosen.
    """

    def launch(**arguments: Any) -> Any:
        return load(kernel_form(operator))(**arguments)

    return launch


def cases(model: Model, tp: int, dtype: torch.dtype) -> Iterator[Case]:
    """Return the cases of every operator that a model needs on one of `tp` ranks."""
    for family in FAMILIES:
        yield from import_module(f"{__name__}.{family}").cases(model, tp, dtype)
