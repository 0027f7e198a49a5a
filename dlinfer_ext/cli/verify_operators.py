"""`verify`: every operator that serves on this machine against its definition, on fixed cases."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Check:
    """One operator in one dtype: the larger RMS error of output and state over the fp64 definition's RMS."""

    operator: str
    case: str
    dtype: str
    route: str
    error: float
    limit: float

    @property
    def held(self) -> bool:
        return self.error <= self.limit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Runs the route that serves (see `ops`) on CPU tensors and compares output and state with reference.py in "
        "fp64: it says that the operators match the reference here, and nothing of a card. Exit code 1: a limit is "
        "exceeded."
    )


def run(args: argparse.Namespace) -> int:
    import torch

    torch.manual_seed(0)
    with torch.inference_mode():
        checks = [check for dtype in (torch.float32, torch.bfloat16, torch.float16) for check in _checks(dtype)]
    if args.json:
        print(json.dumps([asdict(c) | {"held": c.held} for c in checks], indent=2))
    else:
        from .tables import show

        show(
            ("operator", "case", "dtype", "route", "error", "limit", "held"),
            (
                (c.operator, c.case, c.dtype, c.route, f"{c.error:.1e}", f"{c.limit:.0e}", "yes" if c.held else "NO")
                for c in checks
            ),
        )
    return 0 if all(c.held for c in checks) else 1


def _compare(
    operator: str, family: str, case: str, call: Callable[..., Any], definition: Callable[..., Any], **arguments: Any
) -> Check:
    """Run operator and definition on copies of the same arguments; `state` is compared after the call."""
    import torch

    from ..ops import _registry
    from ..testing import TOLERANCE, rms_error

    ours, exact = dict(arguments), dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            ours[name] = value.clone()
            exact[name] = value.double() if value.is_floating_point() else value
    state = "conv_state" if "conv_state" in arguments else "state"
    error = rms_error(call(**ours), definition(**exact))
    if state in arguments:
        error = max(error, rms_error(ours[state], exact[state]))
    dtype = (arguments.get("x") if "x" in arguments else arguments["q"]).dtype  # type: ignore[union-attr]
    route = _registry.choose(operator, "cpu").route.name
    return Check(operator, case, str(dtype).removeprefix("torch."), route, error, TOLERANCE[family, dtype])


def _checks(dtype: torch.dtype) -> Iterator[Check]:
    """Rows of mixed lengths, one empty, one padded, one fresh in a used slot; K ≠ V; HV = 2·H."""
    import torch

    from .. import ops
    from ..kernels.causal_conv1d import reference as conv
    from ..kernels.gated_delta_rule import reference as rule
    from ..kernels.gated_rms_norm import reference as norm

    lengths, channels, width, drafts = [70, 1, 0, 3, 2], 48, 4, 3
    tokens, rows = sum(lengths), len(lengths)
    batch = {
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
        "state_indices": torch.tensor([3, 1, 4, -1, 0]),
        "history_lens": torch.tensor([5, 9, 2, 4, 0]),
    }
    x = torch.randn(tokens, channels).to(dtype)
    taps = {"weight": torch.randn(width, channels).to(dtype), "bias": torch.randn(channels).to(dtype)}
    for layout in ("linear", "ring"):
        pool = torch.randn(6, width + drafts, channels).to(dtype)
        yield _compare(
            "causal_conv1d",
            "conv",
            layout,
            ops.causal_conv1d,
            conv.causal_conv1d,
            x=x,
            conv_state=pool,
            **taps,
            **batch,
            layout=layout,
            activation="silu",
        )
    yield _compare(
        "causal_conv1d_update",
        "conv",
        "rewind",
        ops.causal_conv1d_update,
        conv.causal_conv1d_update,
        x=torch.randn(rows, 1 + drafts, channels).to(dtype),
        conv_state=torch.randn(6, width + drafts, channels).to(dtype),
        **taps,
        activation="silu",
        conv_state_indices=batch["state_indices"],
        num_accepted_tokens=torch.tensor([1, 2, 3, 4, 1]),
    )
    heads, keys, values = 2, 32, 16

    def inputs(*leading: int) -> dict[str, torch.Tensor]:
        return {
            "q": torch.randn(*leading, heads, keys).to(dtype),
            "k": torch.randn(*leading, heads, keys).to(dtype),
            "v": torch.randn(*leading, 2 * heads, values).to(dtype),
            "g": -torch.rand(*leading, 2 * heads),
            "beta": torch.rand(*leading, 2 * heads),
        }

    ring = torch.randn(6, 1 + drafts, 2 * heads, values, keys)
    yield _compare(
        "gated_delta_rule",
        "delta_rule",
        "ring",
        ops.gated_delta_rule,
        rule.gated_delta_rule,
        **inputs(tokens),
        state=ring,
        **batch,
        use_qk_l2norm=True,
    )
    del batch["cu_seqlens"]
    yield _compare(
        "gated_delta_rule_update",
        "delta_rule",
        "ring",
        ops.gated_delta_rule_update,
        rule.gated_delta_rule_update,
        **inputs(rows, 1 + drafts),
        state=ring,
        **batch,
        use_qk_l2norm=True,
    )
    for activation in ("silu", "sigmoid"):
        yield _compare(
            "gated_rms_norm",
            "norm",
            activation,
            ops.gated_rms_norm,
            norm.gated_rms_norm,
            x=torch.randn(tokens, 64).to(dtype),
            gate=torch.randn(tokens, 64).to(dtype),
            weight=torch.randn(64).to(dtype),
            bias=None,
            eps=1e-6,
            activation=activation,
            norm_before_gate=True,
            group_size=64,
        )
