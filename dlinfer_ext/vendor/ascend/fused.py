"""Operators that a machine registers in torch.ops, as one more route of ours: one entry each.

Such an operator comes with somebody else's package and under somebody else's name, and its signature has changed before
without the name changing. So an entry says what signature it is written for; a machine that has another one, or none,
takes the next route and says so in one log line.

None is bound yet. The candidate, `_C_ascend::npu_causal_conv1d_custom` of vllm-ascend, has had four signatures so far
(host lists or tensors, with and without an output argument), takes one 16-bit type, widths 2 to 4 and D a multiple of
16 only, and knows the linear and the rewind layout but no ring, which is what LMDeploy keeps. A route is chosen once
for all calls of an operator, so that one serves ours only in part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dlinfer_ext.kernels.common.tiling import SoC
from dlinfer_ext.ops._registry import Route

from . import soc as chips


@dataclass(frozen=True)
class FusedOperator:
    """A registered operator that serves one of ours.

    Attributes:
        operator: our operator.
        name: "namespace::name" in torch.ops.
        schema: its arguments and results as `torch.library` takes them, such as "(Tensor x) -> Tensor".
        form: "module:function" with the signature of our eager form and the keyword `registered`, the operator's
            overload. It packs what the operator wants in another layout, weights with `packed`.
    """

    operator: str
    name: str
    schema: str
    form: str

    def registered(self) -> Any | None:
        """Return the operator's default overload, or None."""
        namespace, _, name = self.name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), name, None)
        return getattr(packet, "default", None)

    def mismatch(self, soc: SoC) -> str | None:
        """Return why it cannot serve on a chip with what this process has registered, or None."""
        why = withheld(soc)
        if why is not None:
            return why
        found = self.registered()
        if found is None:
            return f"this machine registers no torch.ops.{self.name.replace('::', '.')}"
        want = str(torch._C.parse_schema(self.name + self.schema))
        return (
            None
            if str(found._schema) == want
            else f"the signature differs: this machine has {found._schema}; wanted {want}"
        )

    def missing(self) -> str | None:
        """Return why it cannot serve on this machine, or None."""
        try:
            return self.mismatch(chips.this_soc())
        except (RuntimeError, ValueError, ImportError, OSError) as error:
            return str(error)

    def route(self) -> Route:
        return Route("fused", self.form, self.missing, lambda: {"registered": self.registered()})


def withheld(soc: SoC) -> str | None:
    """Return why registered operators are not used on a chip, or None."""
    return None if soc.fused else f"registered operators are withheld on {soc.name}"


_packed: Final = WeakTensorKeyDictionary()


def packed(weight: Tensor, pack: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `pack(weight)`, made once for as long as a weight lives and is not written to.

    Hand in the very weight that the model holds: a view of it is a tensor of its own each time it is taken.
    """
    version = 0 if weight.is_inference() else weight._version
    known: dict[Any, tuple[int, Tensor]] = _packed.setdefault(weight, {})
    if pack not in known or known[pack][0] != version:
        known[pack] = (version, pack(weight))
    return known[pack][1]


FUSED: Final[tuple[FusedOperator, ...]] = ()
