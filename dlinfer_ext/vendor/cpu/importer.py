"""Serve the name `dlinfer` on a machine that has no card, or say what to set.

LMDeploy imports `dlinfer` (Ascend's operator package, which exists for aarch64 with CANN only) in every process that
runs a model. With DLINFER_EXT_VENDOR=cpu the folder beside this file answers to that name. With no vendor set and no
dlinfer installed, the import fails with a message that says what to set: nothing falls back to the CPU by itself.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Final

_STAND_IN: Final = Path(__file__).parent / "dlinfer"


class StandInFinder(MetaPathFinder):
    """Find the stand-in package; its submodules are then found through the package's own path."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "dlinfer":
            return None
        return importlib.util.spec_from_file_location(
            fullname, _STAND_IN / "__init__.py", submodule_search_locations=[str(_STAND_IN)]
        )


class NoVendorFinder(MetaPathFinder):
    """Asked last: `dlinfer` is not installed and no vendor was chosen."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "dlinfer":
            raise ModuleNotFoundError(
                "dlinfer is not installed and DLINFER_EXT_VENDOR is not set. On an Ascend machine install dlinfer and "
                "torch_npu; to run LMDeploy's device_type='ascend' on this CPU set DLINFER_EXT_VENDOR=cpu",
                name=fullname,
            )
        return None


def install_stand_in() -> None:
    """Put the stand-in before every other finder, so that the vendor asked for is the one served."""
    if not any(isinstance(f, StandInFinder) for f in sys.meta_path):
        sys.meta_path.insert(0, StandInFinder())


def install_hint() -> None:
    """Put the hint behind every other finder."""
    if not any(isinstance(f, NoVendorFinder) for f in sys.meta_path):
        sys.meta_path.append(NoVendorFinder())
