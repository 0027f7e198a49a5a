"""Operators, their routes, and the one place where a route is chosen.

An operator is declared once with `Operator.define`: a torch.library schema, a fake, and the public name. A vendor binds
forms to it as data (`dlinfer_ext.vendor.<vendor>.bindings.ROUTES`). The first route of the vendor that can serve is
taken, once per process; a route that cannot says why in one log line, or raises under DLINFER_EXT_STRICT=1.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import torch

from .. import envs
from ..forms import load
from . import _watch

logger = logging.getLogger("dlinfer_ext")

_LIBRARY: Final = torch.library.Library("dlinfer_ext", "FRAGMENT")
_VENDOR_OF_KEY: Final = {"CPU": "cpu", "PrivateUse1": "ascend"}
OPERATORS: Final[dict[str, Operator]] = {}


@dataclass(frozen=True)
class Route:
    """One form of an operator.

    Attributes:
        name: one of the choices of DLINFER_EXT_ROUTE.
        target: "module:function", imported when the route is chosen.
        missing: returns why the route cannot serve on this machine, or None.
        prepare: run before the import; what it returns is passed to the function by name.
        on_request: the route serves only if DLINFER_EXT_ROUTE names it.
    """

    name: str
    target: str
    missing: Callable[[], str | None] = field(default=lambda: None)
    prepare: Callable[[], Mapping[str, Any]] = field(default=dict)
    on_request: bool = False

    def load(self) -> Callable[..., Any]:
        given = self.prepare()
        form = load(self.target)
        return functools.partial(form, **given) if given else form


@dataclass(frozen=True)
class Operator:
    """A declared operator.

    Attributes:
        name: the name under `torch.ops.dlinfer_ext` and in `python -m dlinfer_ext ops`.
        summary: one line.
        dtypes: the activation types supported.
    """

    name: str
    summary: str
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def define(
        cls, name: str, schema: str, fake: Callable[..., Any], *, summary: str, dtypes: tuple[torch.dtype, ...]
    ) -> Operator:
        """Declare `dlinfer_ext::name` with its schema (without the name) and its fake implementation."""
        operator = cls(name, summary, dtypes)
        OPERATORS[name] = operator
        _LIBRARY.define(name + schema)
        torch.library.register_fake(f"dlinfer_ext::{name}", fake, lib=_LIBRARY)
        for key, vendor in _VENDOR_OF_KEY.items():
            _LIBRARY.impl(name, _entry(name, vendor), key)
        return operator


def _entry(name: str, vendor: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        form = chosen(name, vendor)
        return _watch.call(name, form, args, kwargs) if _watch.wanted(name) else form(*args, **kwargs)

    return run


def routes(name: str, vendor: str) -> tuple[Route, ...]:
    """Return the routes that a vendor binds to an operator, best first."""
    table: dict[str, tuple[Route, ...]] = importlib.import_module(f"dlinfer_ext.vendor.{vendor}.bindings").ROUTES
    return table[name]


@dataclass(frozen=True)
class Choice:
    """The route taken, and what was passed over: (route, why)."""

    route: Route
    passed_over: tuple[tuple[str, str], ...]


def choose(name: str, vendor: str) -> Choice:
    """Choose a route for an operator on a vendor by DLINFER_EXT_ROUTE.

    Raises:
        RuntimeError: no route can serve, or one was passed over under DLINFER_EXT_STRICT=1.
    """
    asked = envs.ROUTE.get()
    bound = [r for r in routes(name, vendor) if r.name == asked or not r.on_request]
    # The route asked for comes first; the others stay behind it in the vendor's order.
    order = sorted(bound, key=lambda r: r.name != asked) if asked != "auto" else bound
    passed: list[tuple[str, str]] = []
    if asked not in ("auto", *(r.name for r in bound)):
        passed.append((asked, f"vendor {vendor} binds no {asked} form of it"))
    for route in order:
        why = route.missing()
        if why is None:
            if passed and envs.STRICT.flag():
                raise RuntimeError(
                    f"{name}: route '{passed[0][0]}' cannot serve ({passed[0][1]}) and DLINFER_EXT_STRICT=1; "
                    "unset it, or set DLINFER_EXT_ROUTE to a route that `python -m dlinfer_ext ops` shows as able"
                )
            return Choice(route, tuple(passed))
        passed.append((route.name, why))
    detail = "; ".join(f"{r}: {w}" for r, w in passed)
    raise RuntimeError(f"{name}: no route can serve on vendor {vendor} ({detail})")


@cache
def chosen(name: str, vendor: str) -> Callable[..., Any]:
    """Return the function of the chosen route; the choice holds for the life of the process."""
    choice = choose(name, vendor)
    for route, why in choice.passed_over:
        logger.warning("%s: route %s passed over (%s); %s serves", name, route, why, choice.route.name)
    return choice.route.load()
