"""Argument checks that every operator uses, so that bad input is named in one form before any state is touched."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTS = (torch.int32, torch.int64)
# Of positions: `kpool_select` gives them as int32.
MOST_POSITIONS = 2**31 - 1


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


def require_int(op: str, arg: str, value: object, *, optional: bool = False) -> None:
    """Check a number that PyTorch's dispatcher takes as an int; with `optional` None too."""
    if type(value) is int or isinstance(value, Integral | torch.SymInt):
        require(-(2**63) <= value < 2**63, op, arg, value, "an int of 64 bits")  # type: ignore[operator]
    elif not (optional and value is None):
        raise TypeError(f"{op}: argument '{arg}' is {value!r}; wanted an int{' or None' * optional}")


def require_real(op: str, arg: str, value: object, *, optional: bool = False) -> None:
    """Check a number that PyTorch's dispatcher takes as a float; with `optional` None too."""
    ok = type(value) is float or isinstance(value, Real | torch.SymInt | torch.SymFloat)
    if not ok and not (optional and value is None):
        raise TypeError(f"{op}: argument '{arg}' is {value!r}; wanted a number{' or None' * optional}")


def require_flag(op: str, arg: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{op}: argument '{arg}' is {value!r}; wanted True or False")


def require_choice(op: str, arg: str, value: object, choices: Sequence[str | None], wanted: str) -> None:
    require((value is None or isinstance(value, str)) and value in choices, op, arg, repr(value), wanted)


def require_lengths(op: str, host_lengths: object, rows: int, most: int = MOST_POSITIONS) -> list[int] | None:
    """Check the row lengths given as Python ints, at most `most` tokens in all; return them as a list, or None."""
    if host_lengths is None:
        return None
    if not isinstance(host_lengths, Sequence) or not all(isinstance(n, Integral) for n in host_lengths):
        raise TypeError(f"{op}: argument 'host_lengths' is {host_lengths!r}; wanted {rows} ints, or None")
    lengths = [int(n) for n in host_lengths]
    require(
        len(lengths) == rows and min(lengths, default=0) >= 0 and sum(lengths) <= most,
        op,
        "host_lengths",
        str(lengths),
        f"{rows} lengths >= 0 of at most {most} tokens in all",
    )
    return lengths


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
