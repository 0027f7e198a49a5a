"""What the forms of the gated delta rule are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """The inputs of a step, packed [T, ...] or by row [N, Q, ...].

    Attributes:
        q: [.., H, K].
        k: [.., H, K].
        v: [.., HV, V].
        g: [.., HV], log decay.
        beta: [.., HV], write strength.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def map(self, f: Callable[[Tensor], Tensor]) -> Tokens:
        return Tokens(f(self.q), f(self.k), f(self.v), f(self.g), f(self.beta))


@dataclass(frozen=True)
class Options:
    """Arguments of the rule that are not tensors; meanings as in `dlinfer_ext.ops.gated_delta_rule`."""

    scale: float
    use_qk_l2norm: bool
    state_v_first: bool
    pad_slot_id: int
