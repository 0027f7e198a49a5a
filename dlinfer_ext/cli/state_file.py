"""A dump of `dlinfer_ext.ops.state_dump`, read back: nothing is unpickled, and what is no dump is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..ops import _access
from ..ops._access import KINDS, Kind, Plan
from ..ops.state_dump import FORMAT, HEADER


class NotADump(ValueError):
    """A file that is not a dump, or one that cannot be read; the message names it."""


@dataclass(frozen=True)
class Dump:
    """A call as it was recorded.

    Attributes:
        path: of the file.
        header: see `state_dump`.
        tensors: by name, as in the file.
        arguments: of the call; a pool, and an input that was too large, is a meta tensor.
        plan: what the call had to do, worked out anew from its arguments.
    """

    path: Path
    header: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    arguments: Mapping[str, Any]
    plan: Plan

    @property
    def kind(self) -> Kind:
        return KINDS[self.plan.operator]

    @property
    def pools(self) -> list[str]:
        return [name for name in self.kind.pools if f"before.{name}" in self.tensors]

    @property
    def ran(self) -> bool:
        return bool(self.header["ran"])

    @property
    def missing(self) -> list[str]:
        """Return the arguments whose values are not in the file."""
        held = self.arguments.items()
        return [n for n, v in held if n not in self.kind.pools and isinstance(v, Tensor) and v.is_meta]

    @cached_property
    def places(self) -> Mapping[str, Mapping[int, int]]:
        """Of each pool, where each slot that was kept lies in the file."""
        return {p: {slot: at for at, slot in enumerate(self.tensors[f"slots.{p}"].tolist())} for p in self.pools}

    @cached_property
    def _kept_tokens(self) -> Mapping[str, Mapping[int, int]]:
        """Of each input of which only some tokens were kept, where each lies in the file."""
        held = ((n.removeprefix("tokens."), t) for n, t in self.tensors.items() if n.startswith("tokens."))
        return {name: {token: at for at, token in enumerate(tokens.tolist())} for name, tokens in held}

    def slots(self, pool: str) -> Mapping[int, int]:
        return self.places[pool]

    def token(self, name: str, token: int) -> Tensor | None:
        """Return an input's values of one of the packed tokens, or None if they were not kept."""
        if name in self._kept_tokens:
            at = self._kept_tokens[name].get(token)
            return None if at is None else self.tensors[name][at]
        return None if self.arguments[name].is_meta else self.kind.packed(name, self.arguments)[token]


def load(path: Path) -> Dump:
    """Read a dump.

    Raises:
        NotADump: it is not one, or is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get(HEADER)
            if text is None:
                raise NotADump(f"{path} is no dump: its metadata has no '{HEADER}'; wanted a file of DLINFER_EXT_DUMP")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    except (OSError, SafetensorError) as error:
        raise NotADump(f"{path} is no dump: {error}; wanted a file of DLINFER_EXT_DUMP") from error
    try:
        header = json.loads(text)
        if header["format"] != FORMAT:
            raise NotADump(
                f"{path} has format {header['format']}; wanted {FORMAT}: read it with the version that wrote it"
            )
        arguments = {name: _value(name, given, tensors) for name, given in header["arguments"].items()}
        plan = _access.plan_call(header["operator"], arguments)
        dump = Dump(path, header, tensors, arguments, plan)
        _require_parts(dump)
    except NotADump:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise NotADump(f"{path} is a damaged dump: {type(error).__name__}: {error}") from error
    return dump


def _value(name: str, given: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return an argument: the tensor of the file, one of its shape alone, or the value of the header."""
    if not isinstance(given, dict):
        return given
    if name in tensors and f"tokens.{name}" not in tensors:
        return tensors[name]
    dtype = getattr(torch, given["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"'{name}' has dtype {given['dtype']}; wanted one of torch's")
    return torch.empty(given["shape"], dtype=dtype, device="meta")


def _require_parts(dump: Dump) -> None:
    """Check that each pool has its slots, before and after, in one shape."""
    for name in dump.pools:
        want = (len(dump.tensors[f"slots.{name}"]), *dump.arguments[name].shape[1:])
        for when in ("before", "after") if dump.ran else ("before",):
            got = tuple(dump.tensors[f"{when}.{name}"].shape)
            if got != want:
                raise ValueError(f"'{when}.{name}' is of shape {list(got)}; wanted {list(want)}")
    for key in ("step", "pool", "rank", "pid", "versions", "fault", "layout", "left_out"):
        dump.header[key]
