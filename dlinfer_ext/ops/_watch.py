"""A call on a state pool under DLINFER_EXT_CHECK=1 or DLINFER_EXT_DUMP: checked, recorded, or both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from .. import envs
from ._access import KINDS, Problem, plan_call
from ._value_checks import after_call, before_call, raise_first
from .state_dump import Recording


@cache
def _names(operator: str) -> tuple[str, ...]:
    schema = getattr(torch.ops.dlinfer_ext, operator).default._schema
    return tuple(argument.name for argument in schema.arguments)


def wanted(operator: str) -> bool:
    """Tell whether a call of an operator is to be watched; reads the environment and nothing else."""
    return operator in KINDS and (envs.CHECK.flag() or bool(envs.DUMP.get()))


def call(operator: str, form: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a form of an operator and look at what goes into it and what it writes. It reads the host.

    Raises:
        ValueError: what `_value_checks` finds under DLINFER_EXT_CHECK=1, with the path of the dump under
            DLINFER_EXT_DUMP; a setting that is not supported.
    """
    arguments = dict(zip(_names(operator), args, strict=False)) | dict(kwargs)
    plan, check = plan_call(operator, arguments), envs.CHECK.flag()
    recording = Recording.begin(plan, arguments, faults=check)
    if check:
        _raise(operator, before_call(plan, arguments), recording, None, ran=False)
    try:
        out = form(*args, **kwargs)
    except Exception as error:
        if recording is not None:
            recording.end(ran=False, fault=f"{type(error).__name__}: {error}")
        raise
    if check:
        _raise(operator, after_call(plan, arguments), recording, out, ran=True)
    if recording is not None:
        recording.end(out, ran=True)
    return out


def _raise(operator: str, problems: list[Problem], recording: Recording | None, out: object, *, ran: bool) -> None:
    try:
        raise_first(operator, problems)
    except ValueError as error:
        path = None if recording is None else recording.end(out, ran=ran, fault=str(error))
        if path is None:
            raise
        raise ValueError(f"{error}. Dumped: {path}") from None
