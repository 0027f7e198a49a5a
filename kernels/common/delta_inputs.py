"""What the batched forms of the delta rules are given."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """The inputs of a step, packed [T, ...] or by row [N, Q, ...].

    Attributes:
        q: [.., H, K].
        k: [.., H, K].
        v: [.., HV, V].
        g: [.., HV], log decay of a head; or [.., HV, K], of each key channel.
        beta: [.., HV], write strength.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


@dataclass(frozen=True)
class Options:
    """Arguments of a delta rule that are not tensors; meanings as in `dlinfer_ext.ops.gated_delta_rule`."""

    scale: float
    use_qk_l2norm: bool
    state_v_first: bool
    pad_slot_id: int
