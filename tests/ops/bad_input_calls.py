"""A valid call of every public function, with all its arguments in one call or another."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

from dlinfer_ext import ops
from dlinfer_ext.vendor.ascend import triton_ops

from .test_interface import CALLS, ints, norm

Arguments = dict[str, Any]
# Tensors that a function changes.
POOLS: Final = frozenset(
    {"conv_state", "conv_states", "state", "pool", "pool_cache", "tail_cache", "cache", "initial_state",
     "initial_state_source", "final_states_out"}
)  # fmt: skip
# Those and others without a dimension of rows or tokens.
FIXED: Final = POOLS | {
    "weight", "bias", "neg_exp_A", "A_log", "dt_bias", "fn", "scale", "base", "gate_up", "down", "ape",
}  # fmt: skip
OFFSETS: Final = frozenset({"cu_seqlens", "query_start_loc"})


signature: Final = cache(inspect.signature)


@dataclass(frozen=True)
class Call:
    """A valid call.

    Attributes:
        function: the public function.
        operators: what its errors may begin with: its own name, or that of the operator it is made of.
        arguments: makes the keyword arguments afresh.
        known_as: what an argument is called by that operator.
        rows: of a tensor the dimension of its rows or tokens, where it is not 0 or the tensor is in `FIXED`.
    """

    function: Callable[..., Any]
    operators: tuple[str, ...]
    arguments: Callable[[], Arguments]
    known_as: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rows: Mapping[str, int] = field(default_factory=dict)

    @property
    def public(self) -> Callable[..., Any]:
        """The name of a public module that is called: the function, or the class of a method."""
        return type(self.function.__self__) if inspect.ismethod(self.function) else self.function

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return signature(self.function).parameters

    def complete(self) -> Arguments:
        """Return all arguments, what is left out by its default."""
        # Not `torch.manual_seed`, which takes a millisecond for the devices that are not there.
        torch.default_generator.manual_seed(0)
        return {n: p.default for n, p in self.parameters.items()} | self.arguments()

    def empty(self) -> Arguments:
        """Return the arguments of a batch without a row or token."""
        arguments = self.complete()
        for name, value in arguments.items():
            if isinstance(value, Tensor) and name in OFFSETS:
                arguments[name] = value[:1]
            elif isinstance(value, Tensor) and (name not in FIXED or name in self.rows):
                arguments[name] = value.narrow(self.rows.get(name, 0), 0, 0)
            elif name == "host_lengths":
                arguments[name] = value and ()
            elif name == "sampling_inputs":
                arguments[name] = SimpleNamespace(
                    **{n: x[:0] if isinstance(x, Tensor) else x for n, x in vars(value).items()}
                )
        return arguments


def prompts(**more: Any) -> Arguments:
    """Prompts as flash-linear-attention takes them, [B, T, ..] with states [N, HV, K, V]."""
    return {
        "q": torch.randn(1, 5, 2, 3), "k": torch.randn(1, 5, 2, 3), "v": torch.randn(1, 5, 4, 6),
        "g": -torch.rand(1, 5, 4), "beta": torch.rand(1, 5, 4), "initial_state": torch.randn(2, 4, 3, 6),
        "output_final_state": True, "cu_seqlens": ints(0, 2, 5), **more,
    }  # fmt: skip


def steps(states: Tensor, **more: Any) -> Arguments:
    return {
        "q": torch.randn(2, 2, 2, 3), "k": torch.randn(2, 2, 2, 3), "v": torch.randn(2, 2, 4, 6),
        "g": -torch.rand(2, 2, 4), "beta": torch.rand(2, 2, 4), "initial_state": states, **more,
    }  # fmt: skip


def packed_steps(states: Tensor, **more: Any) -> Arguments:
    arguments = steps(states, **more) | {"cu_seqlens": ints(0, 2, 4)}
    return {n: x.view(1, 4, *x.shape[2:]) if n in ("q", "k", "v", "g", "beta") else x for n, x in arguments.items()}


def channels(arguments: Arguments, **more: Any) -> Arguments:
    """Make a call of KDA of one of the gated delta rule; more: with its gate in the kernel."""
    lead = arguments["g"].shape
    return arguments | {"g": -torch.rand(*lead, 3)} | more


def gate() -> Arguments:
    return {
        "use_gate_in_kernel": True, "A_log": torch.randn(4), "dt_bias": torch.randn(4, 3), "lower_bound": -5.0,
    }  # fmt: skip


def channels_first(**more: Any) -> Arguments:
    return {
        "x": torch.randn(3, 5), "weight": torch.randn(3, 4), "bias": torch.randn(3),
        "conv_states": torch.randn(4, 3, 6), "has_initial_state": ints(False, True), "cache_indices": ints(3, 1),
        "query_start_loc": ints(0, 2, 5), **more,
    }  # fmt: skip


def gating_steps() -> Arguments:
    arguments = steps(torch.randn(4, 4, 3, 6))
    return {
        "A_log": torch.randn(4), "a": torch.randn(2, 2, 4), "dt_bias": torch.randn(4), "softplus_beta": 1.0,
        "softplus_threshold": 20.0, "q": arguments["q"], "k": arguments["k"], "v": arguments["v"],
        "b": torch.randn(2, 2, 4), "initial_state_source": arguments["initial_state"],
        "initial_state_indices": ints(3, 1),
    }  # fmt: skip


FN_NAMES: Final = {
    "conv_states": ("conv_state",), "cache_indices": ("state_indices",), "query_start_loc": ("cu_seqlens",),
    "has_initial_state": ("has_history", "history_lens"), "read_conv_offsets": ("read_columns",),
    "write_conv_offsets": ("write_columns",),
}  # fmt: skip
STEP_NAMES: Final = {
    "initial_state": ("state",), "ssm_state_indices": ("state_indices",), "state_ids_rb": ("state_indices",),
    "cache_seqlens_rb": ("history_lens",), "use_qk_l2norm_in_kernel": ("use_qk_l2norm",),
    "dt_bias": ("dt_bias",), "g": ("x",),
}  # fmt: skip
PROMPT_NAMES: Final = {"use_qk_l2norm_in_kernel": ("use_qk_l2norm",), "g": ("x",), "initial_state": ("state",)}
TOKENS: Final = dict.fromkeys(("q", "k", "v", "g", "beta"), 1)
IN_FN: Final = ("causal_conv1d_fn", "causal_conv1d", "causal_conv1d_columns")
RECURRENT: Final = ("fused_recurrent_gated_delta_rule", "gated_delta_rule_update")
RECURRENT_KDA: Final = ("fused_recurrent_kda", "kda_update", "kda_gate")
NORM: Final = ops.RMSNormGated(8, group_size=4)

TABLE: Final[dict[str, Call]] = {
    **{
        name: Call(call.function, (call.operator,), call.arguments)
        for name, call in CALLS.items()
        if name != "rejection_sample"
    },
    "rejection_sample": Call(
        ops.rejection_sample, ("rejection_sample",), CALLS["rejection_sample"].arguments,
        known_as={"sampling_inputs": ("is_greedy", "seeds", "offsets")},
    ),
    "unusable_positions": Call(
        ops.unusable_positions, ("unusable_positions", "rejection_sample"),
        lambda: {"target_logits": torch.randn(2, 3, 7)},
    ),
    "rmsnorm_fn": Call(
        ops.rmsnorm_fn, ("rmsnorm_fn", "gated_rms_norm"),
        lambda: {"z" if n == "gate" else n: x for n, x in norm().items()}, known_as={"z": ("gate",)},
    ),
    "RMSNormGated": Call(ops.RMSNormGated, ("RMSNormGated",), lambda: {"hidden_size": 8}),
    # The module's weight stays where it is.
    "RMSNormGated.forward": Call(
        NORM.forward, ("gated_rms_norm",), lambda: {"x": torch.randn(2, 8), "z": torch.randn(2, 8)},
        known_as={"z": ("gate",)},
    ),
    "causal_conv1d_ref": Call(
        triton_ops.causal_conv1d_ref, ("causal_conv1d_ref", "causal_conv1d"),
        lambda: {
            "x": torch.randn(2, 3, 5), "weight": torch.randn(3, 4), "bias": torch.randn(3),
            "initial_states": torch.randn(2, 3, 3), "return_final_states": True,
            "final_states_out": torch.zeros(2, 3, 3),
        },
        known_as={"initial_states": ("conv_state",)}, rows={"final_states_out": 0},
    ),
    "causal_conv1d_fn": Call(
        triton_ops.causal_conv1d_fn, IN_FN, channels_first, known_as=FN_NAMES, rows={"x": 1},
    ),
    "causal_conv1d_fn-ring": Call(
        triton_ops.causal_conv1d_fn, IN_FN,
        lambda: channels_first(
            read_conv_offsets=ints([0, 1, 2], [3, 4, 5]), write_conv_offsets=ints([0, 1, 2, 3], [2, 3, 4, 5]),
        ),
        known_as=FN_NAMES, rows={"x": 1},
    ),
    **{
        name.replace("update", "update_npu"): Call(
            triton_ops.causal_conv1d_update_npu, ("causal_conv1d_update",), call.arguments
        )
        for name, call in CALLS.items()
        if call.function is ops.causal_conv1d_update
    },
    "chunk_gated_delta_rule": Call(
        triton_ops.chunk_gated_delta_rule, ("chunk_gated_delta_rule", "gated_delta_rule"), prompts,
        known_as=PROMPT_NAMES, rows=TOKENS | {"initial_state": 0},
    ),
    "fused_recurrent_gated_delta_rule-slots": Call(
        triton_ops.fused_recurrent_gated_delta_rule, RECURRENT,
        lambda: packed_steps(torch.randn(4, 4, 6, 3), ssm_state_indices=ints(3, 1)), known_as=STEP_NAMES, rows=TOKENS,
    ),
    "fused_recurrent_gated_delta_rule-table": Call(
        triton_ops.fused_recurrent_gated_delta_rule, RECURRENT,
        lambda: steps(
            torch.randn(4, 4, 6, 3), ssm_state_indices=ints([3, 1], [0, 2]), num_accepted_tokens=ints(1, 2)
        ),
        known_as=STEP_NAMES,
    ),
    "fused_recurrent_gated_delta_rule-ring": Call(
        triton_ops.fused_recurrent_gated_delta_rule, RECURRENT,
        lambda: steps(
            torch.randn(6, 4, 6, 3), state_ids_rb=ints(1, 0), cache_seqlens_rb=ints(0, 5), num_state=3
        ),
        known_as=STEP_NAMES,
    ),
    "fused_sigmoid_gating_delta_rule_update": Call(
        triton_ops.fused_sigmoid_gating_delta_rule_update,
        ("fused_sigmoid_gating_delta_rule_update", "sigmoid_gating_delta_rule_update"), gating_steps,
        known_as={
            "initial_state_source": ("state",), "initial_state_indices": ("state_indices",), "A_log": ("neg_exp_A",),
            "use_qk_l2norm_in_kernel": ("use_qk_l2norm",),
        },
    ),
    "fused_sigmoid_gating_delta_rule_update-packed": Call(
        triton_ops.fused_sigmoid_gating_delta_rule_update,
        ("fused_sigmoid_gating_delta_rule_update", "sigmoid_gating_delta_rule_update"),
        lambda: {
            n: x.view(1, 4, *x.shape[2:]) if n in ("q", "k", "v", "a", "b") else x for n, x in gating_steps().items()
        } | {"cu_seqlens": ints(0, 2, 4)},
        known_as={
            "initial_state_source": ("state",), "initial_state_indices": ("state_indices",), "A_log": ("neg_exp_A",),
            "use_qk_l2norm_in_kernel": ("use_qk_l2norm",),
        },
        rows=dict.fromkeys(("q", "k", "v", "a", "b"), 1),
    ),
    "chunk_kda": Call(
        triton_ops.chunk_kda, ("chunk_kda", "kda", "kda_gate"), lambda: channels(prompts()),
        known_as=PROMPT_NAMES, rows=TOKENS | {"initial_state": 0},
    ),
    "chunk_kda-gate": Call(
        triton_ops.chunk_kda, ("chunk_kda", "kda", "kda_gate"), lambda: channels(prompts(), **gate()),
        known_as=PROMPT_NAMES, rows=TOKENS | {"initial_state": 0},
    ),
    "fused_recurrent_kda-slots": Call(
        triton_ops.fused_recurrent_kda, RECURRENT_KDA,
        lambda: channels(packed_steps(torch.randn(4, 4, 6, 3), ssm_state_indices=ints(3, 1)), **gate()),
        known_as=STEP_NAMES, rows=TOKENS,
    ),
    "fused_recurrent_kda-table": Call(
        triton_ops.fused_recurrent_kda, RECURRENT_KDA,
        lambda: channels(
            steps(torch.randn(4, 4, 6, 3), ssm_state_indices=ints([3, 1], [0, 2]), num_accepted_tokens=ints(1, 2))
        ),
        known_as=STEP_NAMES,
    ),
    "fused_recurrent_kda-ring": Call(
        triton_ops.fused_recurrent_kda, RECURRENT_KDA,
        lambda: channels(
            steps(torch.randn(6, 4, 6, 3), state_ids_rb=ints(1, 0), cache_seqlens_rb=ints(0, 5), num_state=3)
        ),
        known_as=STEP_NAMES,
    ),
}  # fmt: skip
PUBLIC: Final = {
    **{f"ops.{name}": getattr(ops, name) for name in ops.__all__},
    **{f"triton_ops.{n}": f for n, f in vars(triton_ops).items() if not n.startswith("_")},
}
