"""Known faults of kernels, put into their source by name, for the interpreted route.

As a pytest plugin (`-p tests.kernel_faults`, with `--route interpret`) this module puts an edited copy of a kernel's
module in the place of the module, before anything imports it. The variable PLANT_KERNEL names the fault.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

from dlinfer_ext.toolchain import interpreter

KERNELS: Final = Path(__file__).parents[1] / "kernels"


class Edit(NamedTuple):
    """A text of a module below kernels/, which stands there once, and what takes its place."""

    module: str
    right: str
    wrong: str


SCAN, UPDATE, GATE = "common/delta_scan_kernel", "common/delta_update_kernel", "kda/gate_kernel"
FAULTS: Final[dict[str, tuple[Edit, ...]]] = {
    "scan_stores_the_other_orientation": (
        Edit(
            SCAN,
            "tl.store(target + lines[:, None] * LINE + columns[None, :] * COLUMN",
            "tl.store(target + lines[:, None] * COLUMN + columns[None, :] * LINE",
        ),
    ),
    "scan_decays_after_the_correction": (
        Edit(SCAN, "tl.expand_dims(k * decay, 1 - AXIS)", "tl.expand_dims(k, 1 - AXIS)"),
    ),
    "scan_reads_gates_behind_the_keys": (
        Edit(SCAN, "tl.load(g + ok * G_INNER, mask=mk, other=0.0)", "tl.load(g + ok * G_INNER)"),
    ),
    "scan_ring_entry_one_behind": (Edit(SCAN, "(history + hi - lo) % ring", "(history + hi - lo - 1) % ring"),),
    "scan_reads_a_reused_slot": (Edit(SCAN, "end = tl.where(history > 0, V, 0)", "end = V"),),
    "update_decays_after_the_correction": (
        Edit(UPDATE, "                s = s * decay\n", ""),
        Edit(UPDATE, "s = s + u[:, None] * k[None, :]", "s = s * decay + u[:, None] * k[None, :]"),
        Edit(UPDATE, "s = s + k[:, None] * u[None, :]", "s = s * decay + k[:, None] * u[None, :]"),
    ),
    "update_reads_gates_behind_the_keys": (
        Edit(
            UPDATE,
            "tl.load(pg + at * g_token + ks * G_INNER, mask=ks < K, other=0.0)",
            "tl.load(pg + at * g_token + ks * G_INNER)",
        ),
    ),
    "update_ring_entry_one_behind": (Edit(UPDATE, "(history + t + 1) % entries", "(history + t) % entries"),),
    "gate_rate_outside_the_sigmoid": (
        Edit(GATE, "lower_bound * sigmoid(rate * z)", "lower_bound * rate * sigmoid(z)"),
    ),
}


def edited(module: str, edits: tuple[Edit, ...]) -> str:
    """Return the source of a module with the edits that belong to it; each text has to stand there once."""
    text = (KERNELS / f"{module}.py").read_text(encoding="utf-8")
    for edit in edits:
        if edit.module == module:
            assert text.count(edit.right) == 1, f"{module} has {text.count(edit.right)} times {edit.right!r}"
            text = text.replace(edit.right, edit.wrong)
    return text


def plant(name: str) -> None:
    """Put a fault into this process, for good."""
    interpreter.activate()
    folder = Path(tempfile.mkdtemp(prefix="kernel_fault_"))
    for module in {edit.module for edit in FAULTS[name]}:
        # A file, since the interpreter asks for a function's source.
        file = folder / f"{Path(module).name}.py"
        file.write_text(edited(module, FAULTS[name]), encoding="utf-8")
        spec = importlib.util.spec_from_file_location(f"dlinfer_ext.kernels.{module.replace('/', '.')}", file)
        assert spec is not None
        assert spec.loader is not None
        loaded = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)


def pytest_configure() -> None:
    if "PLANT_KERNEL" in os.environ:
        plant(os.environ["PLANT_KERNEL"])
