"""The adapter for LMDeploy: the only place in this package that knows the host engine.

`install()` hooks the seams listed in `contract.py` as LMDeploy's modules are imported, in this process; the entry point
in `autoload.py` calls it in every process that imports torch. `status()` says what was replaced.
"""

from __future__ import annotations

from typing import Any


def install(vendor: str | None = None) -> None:
    """Hook LMDeploy's seams, once; see `dlinfer_ext.framework.lmdeploy.patches.install`."""
    from .patches import install as install_patches

    install_patches(vendor)


def status() -> dict[str, Any]:
    """Return the vendor and, per seam, whether it is applied, pending or failed and what stands there now."""
    from .patches import status as patch_status

    return patch_status()
