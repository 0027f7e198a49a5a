"""What a call reads and writes in its state pools, row by row, worked out from its arguments: the layouts as data.

It is written from the tables of docs/en/operators.md and shares nothing with the operators' forms, so that it can be
held against what they did. It reads the host, needs of a pool its shape alone, and is used by `DLINFER_EXT_CHECK=1`
(`_value_checks`), by `DLINFER_EXT_DUMP` (`state_dump`) and by `python -m dlinfer_ext explain-state`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from torch import Tensor

from . import conv, delta, pages, slots
from .plan import Arguments, Entries, Plan, Problem, Row

__all__ = ["KINDS", "Arguments", "Entries", "Kind", "Plan", "Problem", "Row", "plan_call"]


class Kind(NamedTuple):
    """What is to be known of an operator beside its schema.

    Attributes:
        plan: fills a Plan from the arguments.
        pools: arguments that hold state.
        inputs: arguments with a leading dimension of tokens, or [N, Q, ..], whose values enter a state or meet one.
        metadata: int arguments that tell the rows.
        resets: inputs that are log decays, and so may be -inf.
    """

    plan: Callable[[Plan, Arguments], None]
    pools: tuple[str, ...]
    inputs: tuple[str, ...]
    metadata: tuple[str, ...]
    resets: tuple[str, ...] = ()

    def packed(self, name: str, arguments: Arguments) -> Tensor:
        """Return an input as [T, ..]."""
        values: Tensor = arguments[name]
        batch = arguments["x"].dim() == 3 if name == "x" else "q" in self.inputs and arguments["q"].dim() == 4
        return values.flatten(0, 1) if batch else values


_CONV_ROWS: Final = ("cu_seqlens", "state_indices")
_PAGE_ROWS: Final = ("cu_seqlens", "block_offsets", "history_lens")
_RULE: Final = Kind(
    delta.delta, ("state",), ("q", "k", "v", "g", "beta"), ("cu_seqlens", "state_indices", "history_lens"), ("g",)
)
_STEP: Final = _RULE._replace(metadata=(*_RULE.metadata, "num_accepted_tokens"))
KINDS: Final[Mapping[str, Kind]] = {
    "causal_conv1d": Kind(conv.conv, ("conv_state",), ("x",), (*_CONV_ROWS, "history_lens")),
    "causal_conv1d_columns": Kind(
        conv.conv_columns, ("conv_state",), ("x",), (*_CONV_ROWS, "has_history", "read_columns", "write_columns")
    ),
    "causal_conv1d_update": Kind(
        conv.conv_update,
        ("conv_state",),
        ("x",),
        ("conv_state_indices", "num_accepted_tokens", "query_start_loc", "block_idx_last_scheduled_token",
         "initial_state_idx", "cache_seqlens"),
    ),
    "gated_delta_rule": _RULE,
    "gated_delta_rule_update": _STEP,
    "sigmoid_gating_delta_rule_update": _STEP._replace(inputs=("q", "k", "v", "a", "b"), resets=()),
    "kda": _RULE,
    "kda_update": _STEP,
    "kpool_update": Kind(pages.kpool_update, ("pool_cache", "tail_cache"), ("k", "gate"), _PAGE_ROWS),
    "kpool_select": Kind(pages.kpool_select, ("pool_cache",), ("q", "weights"), _PAGE_ROWS),
    "latent_write": Kind(pages.latent_write, ("cache",), ("c",), _PAGE_ROWS),
    "latent_attention": Kind(pages.latent_attention, ("cache",), ("q",), _PAGE_ROWS),
    "zero_slots": Kind(slots.zero, ("pool",), (), ("slots",)),
    "copy_slots": Kind(slots.copy, ("pool",), (), ("source", "target")),
}  # fmt: skip


def plan_call(operator: str, arguments: Arguments) -> Plan:
    """Work out what a call does; reads the host.

    Args:
        operator: a key of `KINDS`.
        arguments: by the names of the operator's schema. Of pools and inputs the shapes suffice (meta tensors).

    Returns:
        the plan; a row about which something is wrong is not live, and has no entries.
    """
    plan = Plan(operator)
    KINDS[operator].plan(plan, arguments)
    return plan
