"""What dlinfer's start-up on a card replaces of LMDeploy's layers is put back; without that, the test says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from dlinfer_ext.framework.lmdeploy import contract, kept

# As dlinfer 0.2.8 does it: `nn.gated_delta` first, then the model and its config builder, which it imports meanwhile.
CHILD = """
import json, sys, torch, lmdeploy
from lmdeploy.pytorch.backends import get_backend
get_backend("ascend")  # the adapter is there now
from dlinfer_ext.framework.lmdeploy import backend, kept, patches, status
put_back = json.loads(sys.argv[1])
if not put_back:
    kept.keep = lambda module, names: ""
    patches.PATCHES = tuple(p for p in patches.PATCHES if p.hook != "H20")

class Old:
    pass

def old(*args):
    raise AssertionError("dlinfer's")

def init():
    from lmdeploy.pytorch.nn import gated_delta
    gated_delta.GatedDeltaMeta = gated_delta.CausalConv1dFunc = gated_delta.GatedDelta = Old
    gated_delta.build_rmsnorm_gated = old
    from lmdeploy.pytorch.configurations.qwen3_5 import Qwen3_5ModelConfigBuilder
    from lmdeploy.pytorch.models.qwen3_5 import Qwen3_5ForConditionalGeneration, Qwen3_5GatedDeltaNet
    import lmdeploy.pytorch.models.qwen3_next
    Qwen3_5GatedDeltaNet.forward = old
    Qwen3_5ModelConfigBuilder.build = classmethod(old)
    Qwen3_5ForConditionalGeneration.prepare_inputs_for_generation = old

backend.AscendOpsBackend.init = staticmethod(init)
backend.GatedDeltaAscendBackend.init()

import importlib
dlinfers = []
for name in ("nn.gated_delta", "models.qwen3_5", "models.qwen3_next", "configurations.qwen3_5"):
    module = importlib.import_module("lmdeploy.pytorch." + name)
    values = dict(vars(module))
    for cls in [v for v in values.values() if isinstance(v, type) and v.__module__ == module.__name__]:
        values |= {f"{cls.__name__}.{k}": getattr(v, "__func__", v) for k, v in vars(cls).items()}
    dlinfers += [f"{name}.{k}" for k, v in values.items() if v is Old or v is old]
print(json.dumps({"dlinfers": sorted(dlinfers), "said": [p["now"] for p in status()["patches"] if p["hook"] == "H20"]}))
"""


def after_start_up(*, put_back: bool) -> dict[str, Any]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DLINFER_EXT_")}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(put_back)],
        env=clean | {"DLINFER_EXT_VENDOR": "cpu"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_what_dlinfer_replaces_is_put_back() -> None:
    found = after_start_up(put_back=True)
    assert found["dlinfers"] == ["nn.gated_delta.GatedDeltaMeta"]  # a type hint there, and nothing else
    said = " ".join(found["said"])
    for name in ("CausalConv1dFunc, GatedDelta", "Qwen3_5GatedDeltaNet.forward", "Qwen3_5ModelConfigBuilder.build"):
        assert f"put back: {name}" in said


def test_control_without_the_hook_they_stay_dlinfers() -> None:
    found = after_start_up(put_back=False)
    assert {
        "nn.gated_delta.GatedDelta",
        "models.qwen3_5.Qwen3_5GatedDeltaNet.forward",
        "configurations.qwen3_5.Qwen3_5ModelConfigBuilder.build",
    } <= set(found["dlinfers"])


class Layer:
    def forward(self) -> None: ...


def test_a_model_that_imported_what_was_replaced_gets_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_first", {})
    layers, model, other = ModuleType(kept.GATED_DELTA), ModuleType("model"), type("Other", (), {})
    layers.GatedDelta = Layer  # type: ignore[attr-defined]
    assert kept.keep(layers, ("GatedDelta", "CausalConv1d")) == "GatedDelta, CausalConv1d: as they were"
    layers.GatedDelta = model.GatedDelta = other  # type: ignore[attr-defined]
    assert kept.keep(model, ("GatedDelta",)).endswith("put back: GatedDelta")
    assert model.GatedDelta is Layer
    assert layers.GatedDelta is other  # each module is asked by itself
    kept.keep(layers, ("GatedDelta",))
    assert layers.GatedDelta is Layer


def test_every_kept_name_is_a_seam() -> None:
    seams = {(s.module, s.name) for s in contract.SEAMS if s.hook == "H20"}
    for module, names in kept.NAMES.items():
        for name in names:
            assert (kept.GATED_DELTA if name in kept.LAYERS else module, name) in seams
