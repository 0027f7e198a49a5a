"""What every public operator promises about its arguments, from one table of calls."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dlinfer_ext import ops
from dlinfer_ext.forms import NO_KERNEL
from dlinfer_ext.ops import _registry
from dlinfer_ext.vendor.ascend import triton_ops


@dataclass(frozen=True)
class Call:
    """A valid call of a public function.

    Attributes:
        function: the public function.
        operator: the name that its errors start with.
        arguments: makes the keyword arguments afresh.
        required: tensor arguments that may not be None.
        unchecked: tensor arguments whose faults another call of the table shows.
    """

    function: Callable[..., Any]
    operator: str
    arguments: Callable[[], dict[str, Any]]
    required: tuple[str, ...]
    unchecked: tuple[str, ...] = ()

    @property
    def tensors(self) -> list[str]:
        return [n for n, a in self.arguments().items() if isinstance(a, Tensor) and n not in self.unchecked]


def ints(*values: object) -> Tensor:
    return torch.tensor(values)


def conv() -> dict[str, Any]:
    return {
        "x": torch.randn(5, 3),
        "weight": torch.randn(4, 3),
        "bias": torch.randn(3),
        "conv_state": torch.randn(4, 6, 3),
        "cu_seqlens": ints(0, 2, 5),
        "state_indices": ints(3, 1),
    }


def conv_update() -> dict[str, Any]:
    return {
        "x": torch.randn(5, 3),
        "conv_state": torch.randn(4, 6, 3),
        "weight": torch.randn(4, 3),
        "bias": torch.randn(3),
        "conv_state_indices": ints(3, 1),
        "query_start_loc": ints(0, 2, 5),
        "max_query_len": 3,
    }


def delta(*lead: int) -> dict[str, Any]:
    return {
        "q": torch.randn(*lead, 2, 3),
        "k": torch.randn(*lead, 2, 3),
        "v": torch.randn(*lead, 4, 5),
        "g": -torch.rand(*lead, 4),
        "beta": torch.rand(*lead, 4),
        "state": torch.randn(4, 4, 5, 3),
    }


def channels(*lead: int) -> dict[str, Any]:
    return {**delta(*lead), "g": -torch.rand(*lead, 4, 3)}


def gating(*lead: int) -> dict[str, Any]:
    arguments = {
        **delta(*lead),
        "a": torch.randn(*lead, 4),
        "b": torch.randn(*lead, 4),
        "neg_exp_A": -torch.rand(4),
        "dt_bias": torch.randn(4),
    }
    del arguments["g"], arguments["beta"]
    return arguments


def streams() -> dict[str, Any]:
    return {
        "streams": torch.randn(3, 2, 8),
        "fn": torch.randn(8, 16),
        "scale": torch.randn(3),
        "base": torch.randn(8),
        "norm_eps": 1e-5,
        "eps": 1e-6,
        "sinkhorn_iters": 3,
    }


def written() -> dict[str, Any]:
    return {
        "x": torch.randn(3, 8),
        "streams": torch.randn(3, 2, 8),
        "post": torch.rand(3, 2),
        "comb": torch.rand(3, 2, 2),
    }


def experts() -> dict[str, Any]:
    return {
        "x": torch.randn(3, 8),
        "gate_up": torch.randn(4, 24, 8),
        "down": torch.randn(4, 8, 12),
        "topk_weights": torch.rand(3, 2),
        "topk_ids": ints([2, 3], [1, 5], [0, 4]),
        "limit": 1.0,
        "first_expert": 2,
    }


def norm() -> dict[str, Any]:
    return {"x": torch.randn(2, 8), "gate": torch.randn(2, 8), "weight": torch.randn(8), "bias": torch.randn(8)}


def drafts() -> dict[str, Any]:
    return {
        "target_logits": torch.randn(2, 3, 7),
        "draft_token_ids": ints([1, 2, 3], [4, 5, 6]),
        "bonus_token_ids": ints(0, 1),
        "draft_probs": torch.softmax(torch.randn(2, 3, 7), -1),
    }


def paged() -> dict[str, Any]:
    return {
        "cu_seqlens": ints(0, 2, 5),
        "block_offsets": ints([3, 1], [0, 2]),
        "history_lens": ints(3, 1),
    }


def latents() -> dict[str, Any]:
    arguments = {"q": torch.randn(5, 2, 6), "cache": torch.randn(4, 4, 6), **paged()}
    return {**arguments, "value_dim": 4, "scale": 0.5, "max_kv_len": 7, "host_lengths": (2, 3)}


SAMPLING = SimpleNamespace(max_top_k=50, top_k=ints(1, 50), random_seeds=ints(1, 2), random_offsets=ints(5, 6))
DELTA_INPUTS = ("q", "k", "v", "g", "beta", "state")
GATING_INPUTS = ("q", "k", "v", "a", "b", "neg_exp_A", "dt_bias", "state")
CALLS: Mapping[str, Call] = {
    "causal_conv1d": Call(
        ops.causal_conv1d,
        "causal_conv1d",
        lambda: {**conv(), "history_lens": ints(0, 7), "layout": "ring", "activation": "silu"},
        ("x", "weight", "cu_seqlens"),
    ),
    "causal_conv1d_columns": Call(
        ops.causal_conv1d_columns,
        "causal_conv1d_columns",
        lambda: {
            **conv(),
            "has_history": ints(False, True),
            "read_columns": ints([0, 1, 2], [3, 4, 5]),
            "write_columns": ints([0, 1, 2, 3], [2, 3, 4, 5]),
        },
        ("x", "weight", "conv_state", "cu_seqlens", "read_columns", "write_columns"),
    ),
    "causal_conv1d_update-rewind": Call(
        ops.causal_conv1d_update,
        "causal_conv1d_update",
        lambda: {**conv_update(), "num_accepted_tokens": ints(1, 2)},
        ("x", "conv_state", "weight"),
    ),
    "causal_conv1d_update-ring": Call(
        ops.causal_conv1d_update,
        "causal_conv1d_update",
        lambda: {**conv_update(), "cache_seqlens": ints(4, 9)},
        ("x", "conv_state", "weight"),
    ),
    "causal_conv1d_update-blocks": Call(
        ops.causal_conv1d_update,
        "causal_conv1d_update",
        lambda: {
            **conv_update(),
            "conv_state_indices": ints([0, 1], [2, 3]),
            "block_idx_last_scheduled_token": ints(1, 0),
            "initial_state_idx": ints(0, 0),
        },
        ("x", "conv_state", "weight"),
        unchecked=("conv_state_indices",),
    ),
    "gated_delta_rule": Call(
        ops.gated_delta_rule,
        "gated_delta_rule",
        lambda: {
            **delta(5),
            "cu_seqlens": ints(0, 2, 5),
            "state_indices": ints(3, 1),
            "history_lens": ints(0, 9),
            "host_lengths": (2, 3),
        },
        (*DELTA_INPUTS, "cu_seqlens"),
    ),
    "gated_delta_rule_update": Call(
        ops.gated_delta_rule_update,
        "gated_delta_rule_update",
        lambda: {**delta(2, 2), "state_indices": ints(3, 1), "history_lens": ints(0, 9)},
        DELTA_INPUTS,
    ),
    "gated_delta_rule_update-table": Call(
        ops.gated_delta_rule_update,
        "gated_delta_rule_update",
        lambda: {
            **delta(4),
            "cu_seqlens": ints(0, 2, 4),
            "state_indices": ints([0, 1], [2, 3]),
            "num_accepted_tokens": ints(1, 2),
        },
        DELTA_INPUTS,
        unchecked=("state_indices",),
    ),
    "sigmoid_gating_delta_rule_update": Call(
        ops.sigmoid_gating_delta_rule_update,
        "sigmoid_gating_delta_rule_update",
        lambda: {**gating(2, 2), "state_indices": ints(3, 1), "history_lens": ints(0, 9)},
        GATING_INPUTS,
    ),
    "sigmoid_gating_delta_rule_update-table": Call(
        ops.sigmoid_gating_delta_rule_update,
        "sigmoid_gating_delta_rule_update",
        lambda: {
            **gating(4),
            "cu_seqlens": ints(0, 2, 4),
            "state_indices": ints([0, 1], [2, 3]),
            "num_accepted_tokens": ints(1, 2),
        },
        GATING_INPUTS,
        unchecked=("state_indices",),
    ),
    "gated_delta_gate": Call(
        ops.gated_delta_gate,
        "gated_delta_gate",
        lambda: {
            "a": torch.randn(5, 4),
            "b": torch.randn(5, 4),
            "neg_exp_A": -torch.rand(4),
            "dt_bias": torch.randn(4),
        },
        ("a", "b", "neg_exp_A", "dt_bias"),
    ),
    "kda": Call(
        ops.kda,
        "kda",
        lambda: {
            **channels(5),
            "cu_seqlens": ints(0, 2, 5),
            "state_indices": ints(3, 1),
            "history_lens": ints(0, 9),
            "host_lengths": (2, 3),
        },
        (*DELTA_INPUTS, "cu_seqlens"),
    ),
    "kda_update": Call(
        ops.kda_update,
        "kda_update",
        lambda: {**channels(2, 2), "state_indices": ints(3, 1), "history_lens": ints(0, 9)},
        DELTA_INPUTS,
    ),
    "kda_update-table": Call(
        ops.kda_update,
        "kda_update",
        lambda: {
            **channels(4),
            "cu_seqlens": ints(0, 2, 4),
            "state_indices": ints([0, 1], [2, 3]),
            "num_accepted_tokens": ints(1, 2),
        },
        DELTA_INPUTS,
        unchecked=("state_indices",),
    ),
    "kda_gate": Call(
        ops.kda_gate,
        "kda_gate",
        lambda: {
            "x": torch.randn(5, 4, 3),
            "A_log": torch.randn(4),
            "dt_bias": torch.randn(12),
            "lower_bound": -5.0,
        },
        ("x", "A_log", "dt_bias"),
    ),
    "hyper_connection_pre": Call(
        ops.hyper_connection_pre, "hyper_connection_pre", streams, ("streams", "fn", "scale", "base")
    ),
    "hyper_connection_post": Call(
        ops.hyper_connection_post, "hyper_connection_post", written, ("x", "streams", "post", "comb")
    ),
    "clamped_silu_and_mul": Call(
        ops.clamped_silu_and_mul, "clamped_silu_and_mul", lambda: {"x": torch.randn(5, 4), "limit": 1.0}, ("x",)
    ),
    "clamped_moe": Call(ops.clamped_moe, "clamped_moe", experts, ("x", "gate_up", "down", "topk_weights", "topk_ids")),
    "gated_rms_norm": Call(ops.gated_rms_norm, "gated_rms_norm", norm, ("x", "weight")),
    "kpool_update": Call(
        ops.kpool_update,
        "kpool_update",
        lambda: {
            "k": torch.randn(5, 3),
            "gate": torch.randn(5, 3),
            "ape": torch.randn(2, 3),
            "pool_cache": torch.randn(4, 2, 3),
            "tail_cache": torch.randn(4, 3, 6),
            **paged(),
            "host_lengths": (2, 3),
        },
        ("k", "gate", "ape", "pool_cache", "tail_cache", "cu_seqlens", "block_offsets", "history_lens"),
    ),
    "kpool_select": Call(
        ops.kpool_select,
        "kpool_select",
        lambda: {
            "q": torch.randn(5, 2, 3),
            "weights": torch.randn(5, 2),
            "pool_cache": torch.randn(4, 2, 3),
            **paged(),
            "topk": 2,
            "kpool": 2,
            "max_kv_len": 7,
            "host_lengths": (2, 3),
        },
        ("q", "weights", "pool_cache", "cu_seqlens", "block_offsets", "history_lens"),
    ),
    "latent_attention": Call(
        ops.latent_attention,
        "latent_attention",
        latents,
        ("q", "cache", "cu_seqlens", "block_offsets", "history_lens"),
    ),
    "latent_attention-selected": Call(
        ops.latent_attention,
        "latent_attention",
        lambda: {**latents(), "indices": ints(*[[0, 1, -1]] * 5).int()},
        ("q", "cache", "cu_seqlens", "block_offsets", "history_lens"),
    ),
    "latent_write": Call(
        ops.latent_write,
        "latent_write",
        lambda: {"c": torch.randn(5, 6), "cache": torch.randn(4, 4, 6), **paged()},
        ("c", "cache", "cu_seqlens", "block_offsets", "history_lens"),
    ),
    "rejection_sample-verify-seeds": Call(
        ops.verify,
        "rejection_sample",
        lambda: {**drafts(), "is_greedy": ints(True, False), "seeds": ints(1, 2), "offsets": ints(5, 6)},
        ("target_logits", "draft_token_ids", "bonus_token_ids"),
    ),
    "rejection_sample-verify-uniform": Call(
        ops.verify,
        "rejection_sample",
        lambda: {**drafts(), "uniform": torch.rand(2, 3, 2)},
        ("target_logits", "draft_token_ids", "bonus_token_ids"),
        unchecked=("draft_probs",),
    ),
    "rejection_sample": Call(
        ops.rejection_sample,
        "rejection_sample",
        lambda: {**drafts(), "sampling_inputs": SAMPLING},
        ("target_logits", "draft_token_ids", "bonus_token_ids"),
    ),
    "rejection_sample_greedy": Call(
        ops.verify_greedy,
        "rejection_sample_greedy",
        lambda: {"target_token_ids": ints([1, 2, 3], [4, 5, 6]), "draft_token_ids": ints([1, 2], [3, 4])},
        ("target_token_ids", "draft_token_ids"),
    ),
    "zero_slots": Call(
        ops.zero_slots, "zero_slots", lambda: {"pool": torch.randn(4, 3, 5), "slots": ints(3, -1, 1)}, ("pool", "slots")
    ),
    "copy_slots": Call(
        ops.copy_slots,
        "copy_slots",
        lambda: {"pool": torch.randn(4, 3, 5), "source": ints(3, -1), "target": ints(1, 2)},
        ("pool", "source", "target"),
    ),
}


def case(name: str, *rest: Any) -> Any:
    """Return a test's parameters; on a route of kernels it is left out where no kernel is written yet."""
    no_kernel = pytest.mark.eager_only(reason="no kernel is written for it yet")
    return pytest.param(name, *rest, marks=[no_kernel] if CALLS[name].operator in NO_KERNEL else [])


EACH = pytest.mark.parametrize("name", [case(n) for n in CALLS])
EACH_TENSOR = pytest.mark.parametrize(("name", "arg"), [case(n, a) for n, c in CALLS.items() for a in c.tensors])


def refused(name: str, changed: Mapping[str, Any], error: type[Exception], arg: str) -> None:
    """Check that the call with `changed` arguments raises `error`, names operator and argument, and mutates nothing."""
    call = CALLS[name]
    arguments = {**call.arguments(), **changed}
    before = {n: a.detach().clone() for n, a in arguments.items() if isinstance(a, Tensor) and a.device.type == "cpu"}
    with pytest.raises(error, match=rf"^{re.escape(call.operator)}: argument '{re.escape(arg)}' .*(wanted|inference)"):
        call.function(**arguments)
    assert all(torch.equal(arguments[n].detach(), b) for n, b in before.items())


def outputs(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result or ())


def operator_call(call: Call) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the one call of an operator of this package that the public function makes: (overload, args, kwargs)."""
    seen: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    class Recorder(TorchDispatchMode):
        def __init__(self) -> None:
            TorchDispatchMode.__init__(self)

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func.namespace == "dlinfer_ext":
                seen.append((func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Recorder():
        call.function(**call.arguments())
    (only,) = seen
    return only


def test_the_table_covers_every_operator() -> None:
    assert {call.operator for call in CALLS.values()} == set(_registry.OPERATORS)


@EACH
def test_schema_fake_and_mutations_pass_opcheck(name: str) -> None:
    call = CALLS[name]
    func, args, kwargs = operator_call(call)
    assert func._schema.name == f"dlinfer_ext::{call.operator}"
    torch.library.opcheck(func, args, kwargs)


@EACH
def test_fake_gives_the_shapes_of_the_real_call(name: str) -> None:
    call = CALLS[name]
    real = outputs(call.function(**call.arguments()))
    on_meta = {n: a.to("meta") if isinstance(a, Tensor) else a for n, a in call.arguments().items()}
    if "sampling_inputs" in on_meta:
        on_meta["sampling_inputs"] = SimpleNamespace(
            **{n: a.to("meta") if isinstance(a, Tensor) else a for n, a in vars(SAMPLING).items()}
        )
    fake = outputs(call.function(**on_meta))
    assert [(t.shape, t.dtype, t.device.type) for t in fake] == [(t.shape, t.dtype, "meta") for t in real]


@EACH
def test_outputs_are_fresh_and_only_state_is_mutated(name: str) -> None:
    call = CALLS[name]
    arguments = call.arguments()
    before = {n: a.clone() for n, a in arguments.items() if isinstance(a, Tensor)}
    for out in outputs(call.function(**arguments)):
        out.zero_()
    changed = {n for n, b in before.items() if not torch.equal(arguments[n], b)}
    assert changed <= {"conv_state", "state", "pool", "pool_cache", "tail_cache", "cache"}


@EACH_TENSOR
def test_a_list_is_refused(name: str, arg: str) -> None:
    refused(name, {arg: [1, 2]}, TypeError, arg)


@pytest.mark.parametrize(("name", "arg"), [case(n, a) for n, c in CALLS.items() for a in c.required])
def test_none_is_refused_where_a_tensor_is_needed(name: str, arg: str) -> None:
    refused(name, {arg: None}, TypeError, arg)


@EACH_TENSOR
def test_a_wrong_rank_is_refused(name: str, arg: str) -> None:
    refused(name, {arg: torch.zeros((), dtype=CALLS[name].arguments()[arg].dtype)}, ValueError, arg)


@EACH_TENSOR
def test_a_wrong_dtype_is_refused(name: str, arg: str) -> None:
    refused(name, {arg: torch.zeros_like(CALLS[name].arguments()[arg], dtype=torch.complex64)}, TypeError, arg)


@pytest.mark.parametrize(
    ("name", "arg"),
    # All others are compared with the first tensor, so a wrong first one is reported as theirs.
    [
        case(n, a)
        for n, c in CALLS.items()
        for a in c.tensors
        if a not in ("x", "q", "a", "target_logits", "pool")
        and (n, a) != ("hyper_connection_pre", "streams")
        and (n, a) not in {("rejection_sample_greedy", "draft_token_ids"), ("kpool_update", "k"), ("latent_write", "c")}
    ],
)
def test_a_wrong_device_is_refused(name: str, arg: str) -> None:
    refused(name, {arg: CALLS[name].arguments()[arg].to("meta")}, ValueError, arg)


@pytest.mark.parametrize(
    ("name", "arg"),
    [
        case(n, a)
        for n, c in CALLS.items()
        for a in c.tensors
        if c.arguments()[a].is_floating_point() and a != "uniform"
    ],
)
def test_a_gradient_is_refused(name: str, arg: str) -> None:
    tensor = CALLS[name].arguments()[arg].requires_grad_()
    refused(name, {arg: tensor}, ValueError, arg)
    with torch.no_grad():
        CALLS[name].function(**{**CALLS[name].arguments(), arg: tensor})


WRONG_VALUES = [
    ("causal_conv1d", {"layout": "rewind"}, "layout"),
    ("causal_conv1d", {"activation": "gelu"}, "activation"),
    ("causal_conv1d", {"max_query_len": -1}, "max_query_len"),
    ("causal_conv1d", {"weight": torch.zeros(9, 3)}, "weight"),
    ("causal_conv1d", {"weight": torch.zeros(4, 2)}, "weight"),
    ("causal_conv1d", {"bias": torch.zeros(4)}, "bias"),
    ("causal_conv1d", {"conv_state": torch.zeros(4, 2, 3)}, "conv_state"),
    ("causal_conv1d", {"state_indices": ints(1)}, "state_indices"),
    ("causal_conv1d", {"history_lens": ints(1, 2, 3)}, "history_lens"),
    ("causal_conv1d_columns", {"read_columns": ints([0, 1], [2, 3])}, "read_columns"),
    ("causal_conv1d_columns", {"write_columns": ints([0, 1, 2], [3, 4, 5])}, "write_columns"),
    ("causal_conv1d_update-rewind", {"conv_state": torch.zeros(4, 4, 3)}, "conv_state"),
    ("causal_conv1d_update-rewind", {"cache_seqlens": ints(1, 2)}, "cache_seqlens"),
    ("causal_conv1d_update-rewind", {"activation": "relu"}, "activation"),
    ("causal_conv1d_update-ring", {"initial_state_idx": ints(0, 0)}, "initial_state_idx"),
    ("gated_delta_rule", {"v": torch.zeros(5, 3, 5)}, "v"),
    ("gated_delta_rule", {"k": torch.zeros(5, 2, 4)}, "k"),
    ("gated_delta_rule", {"state": torch.zeros(4, 4, 3, 5)}, "state"),
    ("gated_delta_rule", {"host_lengths": (2, 4)}, "host_lengths"),
    ("gated_delta_rule", {"host_lengths": (5,)}, "host_lengths"),
    ("gated_delta_rule", {"state_indices": ints(1)}, "state_indices"),
    ("gated_delta_rule_update", {"state": torch.zeros(4, 3, 4, 5, 3), "history_lens": None}, "history_lens"),
    ("gated_delta_rule_update", {"state": torch.zeros(4, 1, 4, 5, 3)}, "q"),
    ("gated_delta_rule_update", {"num_accepted_tokens": ints(1, 1)}, "num_accepted_tokens"),
    ("gated_delta_gate", {"dt_bias": torch.zeros(3)}, "dt_bias"),
    ("gated_delta_gate", {"softplus_beta": 0.0}, "softplus_beta"),
    ("sigmoid_gating_delta_rule_update", {"a": torch.zeros(2, 2, 3)}, "a"),
    ("sigmoid_gating_delta_rule_update", {"neg_exp_A": torch.zeros(3)}, "neg_exp_A"),
    ("sigmoid_gating_delta_rule_update", {"softplus_beta": 0.0}, "softplus_beta"),
    ("kda", {"g": -torch.rand(5, 4)}, "g"),
    ("kda", {"g": -torch.rand(5, 4, 5)}, "g"),
    ("kda", {"beta": torch.rand(5, 4, 3)}, "beta"),
    ("kda", {"v": torch.zeros(5, 3, 5)}, "v"),
    ("kda", {"state": torch.zeros(4, 4, 3, 5)}, "state"),
    ("kda", {"host_lengths": (2, 4)}, "host_lengths"),
    ("kda_update", {"g": -torch.rand(2, 2, 4)}, "g"),
    ("kda_update", {"state": torch.zeros(4, 3, 4, 5, 3), "history_lens": None}, "history_lens"),
    ("kda_update", {"state": torch.zeros(4, 1, 4, 5, 3)}, "q"),
    ("kda_update", {"num_accepted_tokens": ints(1, 1)}, "num_accepted_tokens"),
    ("kda_gate", {"A_log": torch.zeros(3)}, "A_log"),
    ("kda_gate", {"dt_bias": torch.zeros(4)}, "dt_bias"),
    ("kda_gate", {"dt_bias": torch.zeros(3, 4)}, "dt_bias"),
    ("kda_gate", {"lower_bound": 0.0}, "lower_bound"),
    ("kda_gate", {"lower_bound": -5.5}, "lower_bound"),
    ("kda_gate", {"lower_bound": float("nan")}, "lower_bound"),
    ("hyper_connection_pre", {"fn": torch.zeros(8, 8)}, "fn"),
    ("hyper_connection_pre", {"scale": torch.zeros(2)}, "scale"),
    ("hyper_connection_pre", {"base": torch.zeros(4)}, "base"),
    ("hyper_connection_pre", {"streams": torch.zeros(3, 0, 8)}, "streams"),
    ("hyper_connection_pre", {"norm_eps": 0.0}, "norm_eps"),
    ("hyper_connection_pre", {"norm_eps": float("nan")}, "norm_eps"),
    ("hyper_connection_pre", {"eps": -1e-6}, "eps"),
    ("hyper_connection_pre", {"sinkhorn_iters": 0}, "sinkhorn_iters"),
    ("hyper_connection_post", {"x": torch.zeros(3, 16)}, "x"),
    ("hyper_connection_post", {"post": torch.zeros(3, 3)}, "post"),
    ("hyper_connection_post", {"comb": torch.zeros(3, 4)}, "comb"),
    ("clamped_silu_and_mul", {"x": torch.zeros(2, 5)}, "x"),
    ("clamped_silu_and_mul", {"limit": 0.0}, "limit"),
    ("clamped_silu_and_mul", {"limit": float("nan")}, "limit"),
    ("clamped_moe", {"x": torch.zeros(3, 7)}, "gate_up"),
    ("clamped_moe", {"gate_up": torch.zeros(4, 23, 8)}, "gate_up"),
    ("clamped_moe", {"gate_up": torch.zeros(0, 24, 8)}, "gate_up"),
    ("clamped_moe", {"down": torch.zeros(4, 8, 24)}, "down"),
    ("clamped_moe", {"down": torch.zeros(3, 8, 12)}, "down"),
    ("clamped_moe", {"topk_weights": torch.zeros(3, 1)}, "topk_weights"),
    ("clamped_moe", {"topk_ids": ints([0], [1])}, "topk_ids"),
    ("clamped_moe", {"limit": -1.0}, "limit"),
    ("clamped_moe", {"first_expert": -1}, "first_expert"),
    ("gated_rms_norm", {"activation": "gelu"}, "activation"),
    ("gated_rms_norm", {"group_size": 3}, "group_size"),
    ("gated_rms_norm", {"group_size": 0}, "group_size"),
    ("gated_rms_norm", {"gate": torch.zeros(2, 4)}, "gate"),
    ("gated_rms_norm", {"weight": torch.zeros(7)}, "weight"),
    ("kpool_update", {"gate": torch.zeros(4, 3)}, "gate"),
    ("kpool_update", {"ape": torch.zeros(2, 4)}, "ape"),
    ("kpool_update", {"ape": torch.zeros(0, 3)}, "ape"),
    ("kpool_update", {"pool_cache": torch.zeros(4, 0, 3)}, "pool_cache"),
    ("kpool_update", {"pool_cache": torch.zeros(4, 2, 4)}, "pool_cache"),
    ("kpool_update", {"tail_cache": torch.zeros(3, 3, 6)}, "tail_cache"),
    ("kpool_update", {"tail_cache": torch.zeros(4, 3, 3)}, "tail_cache"),
    ("kpool_update", {"tail_cache": torch.zeros(4, 1, 6)}, "tail_cache"),
    ("kpool_update", {"cu_seqlens": torch.zeros(0, dtype=torch.int64)}, "cu_seqlens"),
    ("kpool_update", {"block_offsets": ints([0, 1])}, "block_offsets"),
    ("kpool_update", {"history_lens": ints(1)}, "history_lens"),
    ("kpool_update", {"host_lengths": (2,)}, "host_lengths"),
    ("kpool_update", {"host_lengths": (2, -3)}, "host_lengths"),
    ("kpool_select", {"weights": torch.zeros(5, 3)}, "weights"),
    ("kpool_select", {"pool_cache": torch.zeros(4, 2, 4)}, "pool_cache"),
    ("kpool_select", {"topk": 0}, "topk"),
    ("kpool_select", {"kpool": 0}, "kpool"),
    ("kpool_select", {"max_kv_len": -1}, "max_kv_len"),
    ("kpool_select", {"block_offsets": ints([0, 1])}, "block_offsets"),
    ("kpool_select", {"host_lengths": (5,)}, "host_lengths"),
    ("latent_attention", {"cache": torch.zeros(4, 4, 5)}, "cache"),
    ("latent_attention", {"value_dim": 0}, "value_dim"),
    ("latent_attention", {"value_dim": 7}, "value_dim"),
    ("latent_attention", {"max_kv_len": -1}, "max_kv_len"),
    ("latent_attention", {"history_lens": ints(1, 2, 3)}, "history_lens"),
    ("latent_attention", {"host_lengths": (5,)}, "host_lengths"),
    ("latent_attention-selected", {"indices": torch.zeros(4, 3, dtype=torch.int32)}, "indices"),
    ("latent_write", {"cache": torch.zeros(4, 0, 6)}, "cache"),
    ("latent_write", {"cache": torch.zeros(4, 4, 5)}, "cache"),
    ("latent_write", {"block_offsets": ints([0, 1])}, "block_offsets"),
    ("rejection_sample-verify-seeds", {"vocab_size": 0}, "vocab_size"),
    ("rejection_sample-verify-seeds", {"vocab_size": 8}, "vocab_size"),
    ("rejection_sample-verify-seeds", {"offsets": None}, "offsets"),
    ("rejection_sample-verify-seeds", {"seeds": None}, "offsets"),
    ("rejection_sample-verify-seeds", {"uniform": torch.zeros(2, 3, 2)}, "uniform"),
    ("rejection_sample-verify-seeds", {"target_logits": torch.zeros(2, 4, 7)}, "target_logits"),
    ("rejection_sample-verify-seeds", {"draft_probs": torch.zeros(2, 3, 6)}, "draft_probs"),
    ("rejection_sample-verify-seeds", {"bonus_token_ids": ints([0], [1])}, "bonus_token_ids"),
    ("rejection_sample_greedy", {"target_token_ids": ints([1, 2], [3, 4])}, "target_token_ids"),
]


@pytest.mark.parametrize(
    ("name", "changed", "arg"),
    [case(*w) for w in WRONG_VALUES],
    ids=[f"{n}-{i}-{a}" for i, (n, _, a) in enumerate(WRONG_VALUES)],
)
def test_a_wrong_value_is_refused(name: str, changed: dict[str, Any], arg: str) -> None:
    refused(name, changed, ValueError, arg)


def test_upcast_false_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^rmsnorm_fn: argument 'upcast' is False; wanted True"):
        ops.rmsnorm_fn(torch.zeros(1, 4), torch.ones(4), upcast=False)


def test_sampling_inputs_without_what_is_read_are_refused() -> None:
    with pytest.raises(
        TypeError, match=r"^rejection_sample: argument 'sampling_inputs' is SimpleNamespace without top_k"
    ):
        ops.rejection_sample(**drafts(), sampling_inputs=SimpleNamespace(max_top_k=2))


def test_the_message_says_what_came_and_what_is_wanted() -> None:
    with pytest.raises(ValueError, match=re.escape("argument 'weight' is of shape [7]; wanted [8]")):
        ops.gated_rms_norm(torch.zeros(2, 8), None, torch.ones(7))
    with pytest.raises(TypeError, match=re.escape("argument 'x' has dtype float64; wanted float32, bfloat16, float16")):
        ops.gated_rms_norm(torch.zeros(2, 8, dtype=torch.float64), None, torch.ones(8))


# Written out from the operator contract: what a user of the module replaced may pass by position or by name.
SIGNATURES = [
    "causal_conv1d_ref(x, weight, bias=None, initial_states=None, return_final_states=False, final_states_out=None,"
    " activation='silu')",
    "causal_conv1d_fn(x, weight, bias=None, activation='silu', conv_states=None, has_initial_state=None,"
    " cache_indices=None, query_start_loc=None, metadata=None, pad_slot_id=-1, read_conv_offsets=None,"
    " write_conv_offsets=None)",
    "causal_conv1d_update_npu(x, conv_state, weight, bias=None, activation='silu', conv_state_indices=None,"
    " num_accepted_tokens=None, query_start_loc=None, max_query_len=-1, pad_slot_id=-1,"
    " block_idx_last_scheduled_token=None, initial_state_idx=None, cache_seqlens=None, validate_data=False)",
    "chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,"
    " cu_seqlens=None, head_first=False, use_qk_l2norm_in_kernel=False)",
    "fused_recurrent_gated_delta_rule(q, k, v, g, beta=None, scale=None, initial_state=None, inplace_final_state=True,"
    " cu_seqlens=None, ssm_state_indices=None, num_accepted_tokens=None, cache_seqlens_rb=None, state_ids_rb=None,"
    " num_state=1, use_qk_l2norm_in_kernel=False)",
    "fused_sigmoid_gating_delta_rule_update(A_log, a, dt_bias, softplus_beta, softplus_threshold, q, k, v, b,"
    " initial_state_source, initial_state_indices, scale=None, use_qk_l2norm_in_kernel=False, cu_seqlens=None)",
    "RMSNormGated(hidden_size, eps=1e-05, group_size=None, norm_before_gate=True, device=None, dtype=None,"
    " activation='silu')",
    "rmsnorm_fn(x, weight, bias=None, z=None, eps=1e-06, group_size=None, norm_before_gate=True, upcast=True,"
    " activation='silu')",
    "chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,"
    " use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None, dt_bias=None, lower_bound=None,"
    " cu_seqlens=None, state_v_first=False)",
    "fused_recurrent_kda(q, k, v, g, beta=None, scale=None, initial_state=None, inplace_final_state=True,"
    " cu_seqlens=None, ssm_state_indices=None, num_accepted_tokens=None, cache_seqlens_rb=None, state_ids_rb=None,"
    " num_state=1, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None, dt_bias=None,"
    " lower_bound=None, state_v_first=True)",
    "kda_gate(x, A_log, dt_bias, lower_bound=None)",
    "rejection_sample(target_logits, draft_token_ids, bonus_token_ids, sampling_inputs, draft_probs=None)",
]


@pytest.mark.parametrize("wanted", SIGNATURES, ids=[s.partition("(")[0] for s in SIGNATURES])
def test_signature_is_the_contract(wanted: str) -> None:
    name = wanted.partition("(")[0]
    parameters = inspect.signature(getattr(triton_ops, name)).parameters.values()
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    shown = (p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)
    assert f"{name}({', '.join(shown)})" == wanted


def test_the_module_to_import_from_holds_the_contract_and_no_more() -> None:
    names = {n for n in vars(triton_ops) if not n.startswith("_") and n != "annotations"}
    assert names == {s.partition("(")[0] for s in SIGNATURES}


def test_the_package_exports_what_it_names() -> None:
    assert all(callable(getattr(ops, name)) for name in ops.__all__)
