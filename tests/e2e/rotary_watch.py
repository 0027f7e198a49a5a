"""A plugin of a session: count what would bring rotary positions or LMDeploy's attention into a model.

Watched are the operators of dlinfer (here the stand-in's) by their names, the modules of LMDeploy, and the operators
that a model asks the backend to build.
"""

from __future__ import annotations

import functools
import importlib
import re
from typing import Any, Final

from dlinfer_ext.framework.lmdeploy import counters

NAMES: Final = re.compile(r"rotary|rope|attention|kv_cache", re.IGNORECASE)
PREFIX: Final = "watched."


def watch(owner: Any, attribute: str, name: str) -> None:
    original = getattr(owner, attribute)

    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        counters.add(PREFIX + name)
        return original(*args, **kwargs)

    setattr(owner, attribute, counted)


def watch_builds(backend: Any) -> None:
    original = backend.build_op.__func__

    def build_op(cls: Any, /, spec: Any, **options: Any) -> Any:
        if NAMES.search(type(spec).__name__):
            counters.add(f"{PREFIX}{type(spec).__name__}")
        return original(cls, spec, **options)

    backend.build_op = classmethod(build_op)


for module in ("attention", "rotary_embedding"):
    for kind in vars(importlib.import_module(f"lmdeploy.pytorch.nn.{module}")).values():
        if isinstance(kind, type) and kind.__module__.endswith(f"nn.{module}") and "forward" in vars(kind):
            watch(kind, "forward", kind.__name__)
ops: Any = importlib.import_module("dlinfer.ops")  # LMDeploy was imported before, and brought the stand-in
for operator in [n for n, value in vars(ops).items() if NAMES.search(n) and callable(value) and not n.startswith("_")]:
    watch(ops, operator, operator)
watch_builds(importlib.import_module("lmdeploy.pytorch.backends.dlinfer.ascend.op_backend").AscendOpsBackend)
