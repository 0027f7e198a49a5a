"""The table of bad input: a valid call of every public function, and what may be wrong with an argument of each type.

Every argument of every function, with every kind of its type, is a case. What has to come of it is told by the kind,
or by `OTHERWISE` where an argument has a meaning of its own there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

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


class Outcome(Enum):
    """What has to come of a case."""

    REFUSED = "a ValueError or TypeError that begins with the operator and the argument"
    REFUSED_SOMEWHERE = "the same, of this argument or of one that it has to fit"
    EQUAL = "what the valid call gives and leaves in the pools"
    SERVED = "finite outputs of the shapes that torch.library is told of; nothing but the pools is changed"
    DEFINED = "outputs of these shapes; nothing but the pools is changed"
    UNFIT = "refused, naming an argument, unless it makes another valid call, which is served"
    EITHER = "refused, naming an argument, or served"
    DUTY = "anything: the caller's duty, and not tried"


R, RS, EQ, S, D, UN, E, DUTY = Outcome


class Kind(NamedTuple):
    """A fault: its name, what the argument becomes, and what has to come of it without and with DLINFER_EXT_CHECK=1."""

    name: str
    change: Callable[[Any], Any]
    outcome: Outcome
    checked: Outcome | None = None


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

# --- kinds ------------------------------------------------------------------------------------------------------------

SLOT: Final = {"negative": (S, S), "large": (DUTY, R)}
HISTORY: Final = {"negative": (S, E), "large": (S, S)}
CALLERS: Final = {"negative": (DUTY, R), "large": (DUTY, R)}
SERVED: Final = {"negative": (S, S), "large": (S, S)}
# What numbers mean that lie outside their range, without and with DLINFER_EXT_CHECK=1.
NUMBERS: Final = {
    **dict.fromkeys(("state_indices", "conv_state_indices", "cache_indices", "ssm_state_indices", "state_ids_rb",
                     "initial_state_indices", "slots", "source", "target"), SLOT),
    **dict.fromkeys(("history_lens", "cache_seqlens", "cache_seqlens_rb"), HISTORY),
    **dict.fromkeys(("cu_seqlens", "query_start_loc", "block_offsets", "initial_state_idx",
                     "block_idx_last_scheduled_token"), CALLERS),
    **dict.fromkeys(("read_columns", "write_columns", "read_conv_offsets", "write_conv_offsets"), SLOT),
    **dict.fromkeys(("topk_ids", "indices", "draft_token_ids", "bonus_token_ids", "target_token_ids", "seeds",
                     "offsets", "has_history", "has_initial_state"), SERVED),
    "num_accepted_tokens": {"negative": (S, R), "large": (S, R)},
}  # fmt: skip


def strided(t: Tensor) -> Tensor:
    """Return the same numbers, every second of a wider tensor, in another order of dimensions."""
    wide = t.new_empty(*reversed(t.shape), 2)
    view = wide[..., 0].permute(*reversed(range(t.dim())))
    return view.copy_(t)


def spread(t: Tensor) -> Tensor:
    """Return the same numbers, every third of a longer tensor."""
    view = t.new_empty(*t.shape[:-1], t.shape[-1] * 3)[..., ::3]
    return view.copy_(t)


def grown(dim: int) -> Callable[[Tensor], Tensor]:
    return lambda t: torch.cat((t, t.narrow(dim, 0, 1)), dim)


def emptied(dim: int) -> Callable[[Tensor], Tensor]:
    return lambda t: t.narrow(dim, 0, 0)


def number_at(name: str, value: int) -> Callable[[Tensor], Tensor]:
    """Return a change of one number: of offsets the last but one, or of others the first."""

    def change(t: Tensor) -> Tensor:
        t = t.clone()
        t.view(-1)[-2 if name in OFFSETS and t.numel() > 1 else 0] = value
        return t

    return change


def constant(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def of_tensor(name: str, t: Tensor, optional: bool) -> Iterator[Kind]:
    yield Kind("None", constant(None), UN if optional else R)
    yield Kind("list", Tensor.tolist, R)
    yield Kind("number", constant(1.0), R)
    yield Kind("of rank 0", lambda t: t.new_zeros(()), R)
    yield Kind("of a rank more", lambda t: t[None], UN)
    yield Kind("of a rank less", lambda t: t.flatten(0, 1) if t.dim() > 1 else t[0], UN)
    for dim in range(t.dim()):
        yield Kind(f"longer in dimension {dim}", grown(dim), UN)
        yield Kind(f"empty in dimension {dim}", emptied(dim), UN)
    yield Kind("complex", lambda t: t.to(torch.complex64), R)
    if t.is_floating_point():
        yield Kind("of int64", Tensor.long, R)
        yield Kind("of float64", Tensor.double, R)
        yield Kind("of bool", Tensor.bool, R)
    elif t.dtype == torch.int64:
        yield Kind("of float32", Tensor.float, R)
        yield Kind("of int16", Tensor.short, R)
        yield Kind("of int32", Tensor.int, EQ)
    elif t.dtype == torch.int32:
        yield Kind("of float32", Tensor.float, R)
        yield Kind("of int64", Tensor.long, EQ)
    else:
        yield Kind("of float32", Tensor.float, R)
    yield Kind("on meta", lambda t: t.to("meta"), RS)
    if t.dim():
        yield Kind("strided", strided, EQ)
        yield Kind("spread", spread, EQ)
    if not t.is_floating_point() and t.dtype != torch.bool:
        values = {"negative": -7, "large": 2**31 - 9 if t.dtype == torch.int32 else 2**40}
        for kind, value in values.items():
            yield Kind(kind, number_at(name, value), *NUMBERS[name][kind])


def of_number(optional: bool, *, whole: bool) -> Iterator[Kind]:
    yield Kind("None", constant(None), UN if optional else R)
    yield Kind("text", constant("1"), R)
    yield Kind("list", constant([1]), R)
    yield Kind("complex", constant(1j), R)
    if whole:
        yield Kind("fraction", constant(1.5), R)
        yield Kind("beyond 64 bits", constant(2**70), R)
        yield Kind("large", constant(2**40), UN)
    else:
        yield Kind("NaN", constant(float("nan")), D)
        yield Kind("infinite", constant(float("inf")), D)
    yield Kind("negative", constant(-3), UN if whole else D)
    yield Kind("zero", constant(0), UN if whole else D)


def of_text(optional: bool) -> Iterator[Kind]:
    yield Kind("None", constant(None), UN if optional else R)
    for name, value in (("unknown", "nonsense"), ("empty", ""), ("number", 3), ("list", ["silu"])):
        yield Kind(name, constant(value), R)


def of_flag() -> Iterator[Kind]:
    for name, value in (("None", None), ("text", "no"), ("number", 3), ("list", [])):
        yield Kind(name, constant(value), R)


def of_lengths() -> Iterator[Kind]:
    yield Kind("None", constant(None), EQ)
    for name, value in (
        ("empty", ()), ("number", 3), ("text", "23"), ("texts", ("2", "3")), ("fractions", (2.5, 2.5)),
        ("Nones", (None, None)), ("negative", (-2, 5)), ("one more", (2, 3, 0)), ("beyond 64 bits", (2, 2**70)),
    ):  # fmt: skip
        yield Kind(name, constant(value), R)


def of_object() -> Iterator[Kind]:
    for name, value in (("None", None), ("number", 3), ("object", SimpleNamespace())):
        yield Kind(name, constant(value), EQ)
    for name, history in (
        ("a list", [0, 7]), ("of a row more", ints(0, 7, 7)), ("of floats", torch.ones(2)),
        ("on meta", ints(0, 7).to("meta")),
    ):  # fmt: skip
        yield Kind(f"with histories {name}", constant(SimpleNamespace(cache_seqlens=history)), R)


def of_sampling() -> Iterator[Kind]:
    def changed(**more: Any) -> Callable[[Any], Any]:
        return lambda s: SimpleNamespace(**vars(s) | more)

    for name, change in (
        ("None", constant(None)), ("number", constant(3)), ("empty", constant(SimpleNamespace())),
        ("top_k a list", changed(top_k=[1, 2])), ("top_k of a row more", changed(top_k=ints(1, 2, 3))),
        ("top_k of floats", changed(top_k=torch.ones(2))), ("top_k on meta", changed(top_k=ints(1, 2).to("meta"))),
        ("seeds a list", changed(random_seeds=[1, 2])), ("no offsets", changed(random_offsets=None)),
        ("offsets of a row more", changed(random_offsets=ints(1, 2, 3))), ("max_top_k text", changed(max_top_k="1")),
        ("max_top_k None", changed(max_top_k=None)),
    ):  # fmt: skip
        yield Kind(name, change, RS)


def of_device() -> Iterator[Kind]:
    for name, value in (("unknown", "nonsense"), ("number", 1.5)):
        yield Kind(name, constant(value), R)


def of_dtype() -> Iterator[Kind]:
    for name, value in (("text", "float32"), ("of int64", torch.int64), ("of float64", torch.float64)):
        yield Kind(name, constant(value), R)


def kinds(name: str, annotation: str, value: Any) -> list[Kind]:
    """Return the kinds of an argument by its annotation."""
    optional = "None" in annotation
    by_type: dict[str, Callable[[], Iterator[Kind]]] = {
        "Tensor": lambda: of_tensor(name, value, optional),
        "int": lambda: of_number(optional, whole=True),
        "float": lambda: of_number(optional, whole=False),
        "bool": of_flag,
        "str": lambda: of_text(optional),
        "Layout": lambda: of_text(optional),
        "str | bool": lambda: of_text(optional),
        "Sequence[int]": of_lengths,
        "object": of_object,
        "SamplingInputs": of_sampling,
        "torch.device | str": of_device,
        "torch.dtype": of_dtype,
    }
    return list(by_type[annotation.removesuffix(" | None")]())


# Where an argument has a meaning of its own: (call, argument, kind) → outcomes; "" stands for every call.
OTHERWISE: Final[Mapping[tuple[str, str, str], tuple[Outcome, Outcome]]] = {
    **{("", "softplus_beta", kind): (R, R) for kind in ("NaN", "infinite", "zero")},
    ("", "softplus_threshold", "NaN"): (R, R),
    # A count below 1 reads as 1.
    **{(f"{name}-rewind", "num_accepted_tokens", "negative"): (S, S) for name in
       ("causal_conv1d_update", "causal_conv1d_update_npu")},
    # Beyond the blocks of its row: finite all the same.
    **{(name, "history_lens", "large"): (S, R) for name in
       ("kpool_update", "kpool_select", "latent_attention", "latent_attention-selected", "latent_write")},
    # Read for a ring only.
    **{("causal_conv1d_fn", "metadata", f"with histories {kind}"): (EQ, EQ) for kind in
       ("a list", "of a row more", "of floats", "on meta")},
    **{("", "lower_bound", kind): (R, R) for kind in ("NaN", "infinite", "zero")},
    # Of a log decay that is given, there is no bound.
    **{(name, "lower_bound", "negative"): (R, R) for name in
       ("chunk_kda", "fused_recurrent_kda-table", "fused_recurrent_kda-ring")},
    **{("", "limit", kind): (R, R) for kind in ("NaN", "negative", "zero")},
    **{("hyper_connection_pre", "eps", kind): (R, R) for kind in ("NaN", "negative")},
    **{("hyper_connection_pre", "norm_eps", kind): (R, R) for kind in ("NaN", "negative", "zero")},
    # A ring or pool of fewer slots than are named.
    **{("", name, "of a rank more"): (DUTY, E) for name in ("state", "pool")},
    # No token is selected: outputs of zero.
    ("latent_attention-selected", "indices", "empty in dimension 1"): (S, S),
    # Pools that are moved only.
    **{("", "pool", kind): (S, S) for kind in ("of int64", "of float64")},
    # The only tensor: all is on meta.
    ("clamped_silu_and_mul", "x", "on meta"): (S, S),
    ("unusable_positions", "target_logits", "on meta"): (S, S),
}  # fmt: skip


def forms(names: tuple[str, ...], *kinds: str) -> tuple[str, ...]:
    return tuple(f"{name}-{kind}" for name in names for kind in kinds)


NOWHERE: Final = ("nowhere",)
EVERYWHERE: Final = ("",)
STEP: Final = "fused_recurrent_"
STEPS: Final = ("fused_recurrent_gated_delta_rule", "fused_recurrent_kda")
UPDATES: Final = ("causal_conv1d_update", "causal_conv1d_update_npu")
ALONE: Final = ("unusable_positions",)
CONV: Final = ("causal_conv1d-", "causal_conv1d_columns", "causal_conv1d_update")
# Changes that make another valid call, by argument and kind: calls whose names begin so.
VALID: Final[Mapping[tuple[str, str], tuple[str, ...]]] = {
    **{(name, "None"): EVERYWHERE for name in (
        "activation", "beta", "bias", "cache_indices", "cache_seqlens", "conv_state", "draft_probs", "dt_bias",
        "final_states_out", "gate", "group_size", "has_history", "has_initial_state", "history_lens", "indices",
        "initial_state_indices", "initial_states", "is_greedy", "lower_bound", "max_query_len", "num_accepted_tokens",
        "scale", "uniform", "vocab_size", "z",
    )},
    ("conv_state_indices", "None"): forms(UPDATES, "rewind", "ring"),
    ("conv_states", "None"): ("causal_conv1d_fn.",),
    ("initial_state", "None"): ("chunk_",),
    ("ssm_state_indices", "None"): forms(STEPS, "slots"),
    ("state_indices", "None"): (
        "causal_conv1d", "gated_delta_rule.", "gated_delta_rule_update.", "kda.", "kda_update.",
        "sigmoid_gating_delta_rule_update.",
    ),
    # More slots, blocks, columns, entries; a wider convolution; tokens of no row.
    **{(name, f"{change} in dimension 0"): EVERYWHERE for change in ("longer", "empty") for name in (
        "c", "cache", "conv_state", "conv_states", "initial_state_source", "pool", "slots", "state",
    )},
    ("ape", "longer in dimension 0"): EVERYWHERE,
    **{(name, "longer in dimension 1"): EVERYWHERE for name in (
        "block_offsets", "cache", "conv_state", "conv_state_indices", "indices", "pool", "pool_cache",
        "ssm_state_indices", "state_indices", "tail_cache",
    )},
    **{("pool", f"{change} in dimension {dim}"): EVERYWHERE for change in ("longer", "empty") for dim in (1, 2)},
    ("pool", "of a rank less"): EVERYWHERE,
    ("block_offsets", "empty in dimension 1"): EVERYWHERE,
    ("conv_states", "longer in dimension 2"): EVERYWHERE,
    ("initial_state", "empty in dimension 0"): (STEP,),
    ("initial_state", "longer in dimension 0"): forms(STEPS, "slots", "table"),
    **{("pool_cache", f"{change} in dimension 0"): ("kpool_select",) for change in ("longer", "empty")},
    **{("q", f"{change} in dimension 0"): ("latent_attention.",) for change in ("longer", "empty")},
    ("q", "longer in dimension 1"): ("latent_attention",),
    **{("streams", f"{change} in dimension 0"): ("hyper_connection_pre",) for change in ("longer", "empty")},
    **{("target_logits", f"{change} in dimension {dim}"): ALONE for change in ("longer", "empty") for dim in (0, 1)},
    ("target_logits", "longer in dimension 2"): ALONE,
    ("weight", "longer in dimension 0"): ("causal_conv1d.", "causal_conv1d_update"),
    ("weight", "longer in dimension 1"): ("causal_conv1d_fn.",),
    **{("x", f"{change} in dimension 0"): (*CONV, "causal_conv1d.", "kda_gate", "clamped_silu_and_mul")
       for change in ("longer", "empty")},
    ("x", "empty in dimension 1"): ("clamped_silu_and_mul", "causal_conv1d_fn"),
    ("x", "longer in dimension 1"): ("causal_conv1d_fn",),
    **{("x", f"{change} in dimension 2"): ("causal_conv1d_ref",) for change in ("longer", "empty")},
    ("x", "of a rank less"): ("clamped_silu_and_mul",),
    ("x", "of a rank more"): ("clamped_silu_and_mul", "kda_gate"),
    # Any leading dimensions; HV numbers in any shape, as in checkpoints.
    **{(name, f"of a rank {change}"): ("fused_sigmoid",) for name in ("a", "b") for change in ("more", "less")},
    ("A_log", "of a rank more"): ("chunk_kda", STEP),
    ("dt_bias", "of a rank less"): ("chunk_kda", STEP),
    **{(name, "zero"): EVERYWHERE for name in ("first_expert", "max_kv_len", "max_query_len", "pad_slot_id")},
    **{(name, "large"): EVERYWHERE for name in ("first_expert", "pad_slot_id")},
    ("pad_slot_id", "negative"): EVERYWHERE,
    ("max_query_len", "large"): ("causal_conv1d.", *forms(UPDATES, "ring", "blocks")),
    ("max_query_len", "negative"): forms(UPDATES, "ring", "blocks"),
    # It is the size of a ring.
    **{("num_state", kind): forms(STEPS, "slots", "table") for kind in ("large", "negative", "zero")},
}  # fmt: skip


class Case(NamedTuple):
    call: str
    argument: str
    kind: Kind

    def outcome(self, *, check: bool) -> Outcome:
        for name in (self.call, ""):
            if (name, self.argument, self.kind.name) in OTHERWISE:
                return OTHERWISE[name, self.argument, self.kind.name][check]
        if self.kind.outcome is not UN:
            return self.kind.checked if check and self.kind.checked is not None else self.kind.outcome
        if not f"{self.call}.".startswith(VALID.get((self.argument, self.kind.name), NOWHERE)):
            return UN
        # What lies outside the tensors then may be noticed.
        return E if check else S


def cases(name: str) -> list[Case]:
    """Return the cases of a call; of tensors that it leaves out, none."""
    call = TABLE[name]
    arguments = call.complete()
    return [
        Case(name, argument, kind)
        for argument, parameter in call.parameters.items()
        if "Tensor" not in parameter.annotation or isinstance(arguments[argument], Tensor)
        for kind in kinds(argument, parameter.annotation, arguments[argument])
    ]
