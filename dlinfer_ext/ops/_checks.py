"""Argument checks that every operator uses, so that bad input is named in one form before any state is touched."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTS = (torch.int32, torch.int64)


def require(ok: bool, op: str, arg: str, got: object, wanted: str) -> None:
    """Raise ValueError in the project's form unless `ok`."""
    if not ok:
        raise ValueError(f"{op}: argument '{arg}' is {got}; wanted {wanted}")


def require_tensor(op: str, arg: str, t: object) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{op}: argument '{arg}' is {type(t).__name__}; wanted a torch.Tensor")


def require_dtype(op: str, arg: str, t: Tensor, allowed: Sequence[torch.dtype]) -> None:
    if t.dtype not in allowed:
        names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise TypeError(f"{op}: argument '{arg}' has dtype {str(t.dtype).removeprefix('torch.')}; wanted {names}")


def require_shape(op: str, arg: str, t: Tensor, shape: Sequence[int | str]) -> None:
    """Check the rank and every dimension given as an int; a str names a free dimension."""
    require_tensor(op, arg, t)
    got = t.shape
    ok = len(got) == len(shape) and all(isinstance(w, str) or w == g for w, g in zip(shape, got, strict=False))
    if not ok:  # a decode step may be shorter than making the text takes
        require(False, op, arg, f"of shape {list(got)}", f"[{', '.join(map(str, shape))}]")


def require_same_device(op: str, first: str, ref: Tensor, **others: Tensor | None) -> None:
    for name, t in others.items():
        if t is not None and t.device != ref.device:
            raise ValueError(f"{op}: argument '{name}' is on {t.device}; wanted {ref.device}, where '{first}' is")


def require_inference(op: str, **tensors: Tensor | None) -> None:
    """Refuse an input that asks for a gradient: nothing here is differentiable."""
    for name, t in tensors.items():
        if t is not None and t.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{op}: argument '{name}' has requires_grad=True; this operator is inference only, "
                "call it under torch.no_grad() or pass a detached tensor"
            )
