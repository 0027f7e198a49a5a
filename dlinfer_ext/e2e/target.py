"""What scenarios are run on."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from .. import envs
from .scenario import Scenario

# Ray sends no statistics, writes no token file to the home folder, and keeps its store small.
RAY: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": "200000000",
}


@dataclass(frozen=True)
class Target:
    """What scenarios are run on.

    Attributes:
        model: checkpoint folder.
        vendor: "cpu" or "ascend".
        reference: "transformers" (the definition, on this CPU) or "plain" (LMDeploy itself: one request at a time,
            no drafts, the prompt in one piece, no prefix cache).
        dtype: of the engine on a card, where LMDeploy has 16-bit types only; on a CPU the scenario's holds.
        plugins: modules to import in the engine's process first.
        env: further variables of the engine's process.
        patience: times the scenarios' time limits; a large model takes longer to start.
    """

    model: Path
    vendor: str = "cpu"
    reference: str = "transformers"
    dtype: str = "bfloat16"
    plugins: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    patience: float = 1.0

    def dtype_of(self, scenario: Scenario) -> str:
        return scenario.dtype if self.vendor == "cpu" else self.dtype

    def environment(self, scenario: Scenario) -> dict[str, str]:
        """Return the variables of an engine process; of ours only what is set here gets in."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith("DLINFER_EXT_") or k == envs.TOOLCHAIN.name}
        clean |= {envs.VENDOR.name: self.vendor, envs.STRICT.name: "1", "HF_HUB_OFFLINE": "1"}
        if self.vendor == "cpu":
            # One thread: the tiny models are faster so, and the order of sums is the reference's.
            clean |= {"OMP_NUM_THREADS": "1"}
            clean[envs.CPU_DTYPE.name] = "float32" if scenario.dtype == "float32" else "auto"
            if on_ray(scenario):
                clean |= RAY
        if self.dtype_of(scenario) != "float32":
            clean["LMDEPLOY_FP32_MAMBA_SSM_DTYPE"] = "1"
        return clean | self.env


def on_ray(scenario: Scenario) -> bool:
    return bool(scenario.engine.get("distributed_executor_backend") == "ray")


def cannot_run(scenario: Scenario, target: Target) -> str | None:
    """Return why a scenario cannot run on this target, or None."""
    if target.vendor == "cpu" and "cpu" not in scenario.where:
        return "it is for a card"
    if target.vendor == "ascend" and "npu" not in scenario.where:
        return "it is for a CPU"
    if target.vendor == "ascend" and importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed: no card here"
    if on_ray(scenario) and importlib.util.find_spec("ray") is None:
        return "ray is not installed (requirements/ray.txt)"
    return None
