"""Types that LMDeploy's MoE code takes from dlinfer (field names are dlinfer's)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any


class MoECommType(Enum):
    """How tokens reach their experts across ranks."""

    NAIVE = auto()
    ALLGATHER = auto()
    ALLTOALL = auto()
    MC2 = auto()
    TP = auto()
    UNDEFINED = auto()


@dataclass
class MoeMetadata:
    """What one step's MoE layers need to know of the ranks."""

    max_tokens_across_dp: int = 1
    pad_size: int = 0
    dp_size: int = 1
    tp_size: int = 1
    ep_size: int = 1
    tp_rank: int = 0
    ep_rank: int = 0
    tp_group: Any = None
    ep_group: Any = None
    moe_comm_type: MoECommType = MoECommType.UNDEFINED
    x_active_mask: Any = None
    moe_group_name: str | None = None
    expert_ids_per_ep_rank: Any = None
    router_n_groups: int = -1
