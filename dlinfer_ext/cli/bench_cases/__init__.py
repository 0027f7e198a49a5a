"""Benchmark cases as data: one module per operator family, each with `cases() -> list[Case]`.

Timings on one machine at one time are only comparable with each other, so a case carries its own baselines and a plain
copy of its bytes, and all are timed in the same run as the operator.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dlinfer_ext.testing import seen_through

Form = Callable[[], object]
# What the names of baselines mean, in every family.
BASELINES: Final = {
    "loop": "the public expressions, called once per request",
    "plain": "the plain batched expression",
    "transformers": "transformers' PyTorch form, all requests in one call",
    "fla-naive": "flash-linear-attention's naive recurrence, token by token, written from its formula",
}


class MissingBaseline(RuntimeError):
    """A baseline cannot run here; the message says why."""


def public(module: str, name: str) -> Any:
    """Return what `module` of transformers calls `name`.

    Raises:
        MissingBaseline: transformers is not installed, or has no such thing in this version.
    """
    try:
        return getattr(importlib.import_module(f"transformers.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise MissingBaseline(f"transformers.{module} has no {name} here ({error})") from None


@dataclass(frozen=True)
class Case:
    """One operator at one shape.

    Attributes:
        name: operator, shape and dtype.
        run: the operator, on tensors made beforehand; called many times, so its state may drift but not grow.
        baselines: public formulations of the same work by name (`BASELINES`), or none for a growth case. One that
            cannot run raises `MissingBaseline`, which is reported.
        copy: a plain copy of the bytes that the operator must read and write.
        target: how many times faster than the first baseline it must be, or None.
        growth: name of the growth curve the case is a point of, or None.
        extra_memory: peak of fresh bytes during `run` as a multiple of what the limit is stated in, or None.
        memory_limit: upper bound of that multiple.
        tokens: how many tokens (or rows, of an operator without tokens) one run serves, for bytes per token.
        point: where on its growth curve it is.
    """

    name: str
    run: Form
    baselines: Mapping[str, Form]
    copy: Form
    target: float | None = None
    growth: str | None = None
    extra_memory: Callable[[], float] | None = None
    memory_limit: float | None = None
    tokens: int | None = field(default=None, kw_only=True)
    point: int | None = field(default=None, kw_only=True)


class _PeakBytes(TorchDispatchMode):
    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.live = 0
        self.peak: int = 0
        self._seen: set[int] = set()

    def _release(self, key: int, size: int) -> None:
        self.live -= size
        self._seen.discard(key)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = {t.untyped_storage()._cdata for t in _tensors((args, kwargs or {}))}
        out = seen_through(self, func, args, kwargs or {})
        for t in _tensors(out):
            storage = t.untyped_storage()
            key = storage._cdata
            if key not in known and key not in self._seen:
                self._seen.add(key)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._release, key, storage.nbytes())
        return out


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the largest sum of live bytes of tensors that `run` allocated."""
    with _PeakBytes() as mode:
        run()
    peak: int = mode.peak
    return peak
