"""Which chip this machine has, asked once and only when a route is chosen."""

from __future__ import annotations

import dataclasses
from functools import cache
from importlib.util import find_spec
from typing import Any

from dlinfer_ext.kernels.common.tiling import SoC
from dlinfer_ext.targets import load_soc, soc_of_device


@cache
def this_soc() -> SoC:
    """Return the record of this machine's chip, with the core counts that the device reports.

    Raises:
        RuntimeError: no torch_npu, or no device.
        ValueError: a device that configs/soc does not know.
    """
    if find_spec("torch_npu") is None:
        raise RuntimeError("torch_npu is not installed")
    import torch
    import torch_npu  # noqa: F401  (adds torch.npu)

    npu: Any = torch.npu  # type: ignore[attr-defined]
    if not npu.is_available():
        raise RuntimeError("torch_npu finds no device: run npu-smi info, and source CANN's set_env.sh")
    soc = load_soc(soc_of_device(npu.get_device_name(0)))
    properties = npu.get_device_properties(0)
    return dataclasses.replace(
        soc,
        cube_cores=getattr(properties, "cube_core_num", 0) or soc.cube_cores,
        vector_cores=getattr(properties, "vector_core_num", 0) or soc.vector_cores,
    )


def no_triton(soc: SoC) -> str | None:
    """Return why Triton kernels cannot be built for a chip, or None."""
    return None if soc.triton else f"Triton has no {soc.arch} target"


def triton_missing() -> str | None:
    """Return why Triton kernels cannot run here, or None."""
    try:
        soc = this_soc()
    except (RuntimeError, ValueError, ImportError, OSError) as error:
        return str(error)
    if find_spec("triton") is None:
        return no_triton(soc) or "Triton is not installed: pip install triton-ascend"
    return no_triton(soc)


def given() -> dict[str, SoC]:
    """Return what the launchers need to be told."""
    return {"soc": this_soc()}
