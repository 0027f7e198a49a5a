"""What may be wrong with an argument of each type, and what has to come of it.

Every argument of every call of `TABLE`, with every kind of its type, is a case. What has to come of it is told by the
kind, or by `OTHERWISE` and `VALID` where an argument has a meaning of its own there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from .bad_input_calls import OFFSETS, TABLE
from .test_interface import ints


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
