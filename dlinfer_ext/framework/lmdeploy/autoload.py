"""How the adapter gets into every process: the entry-point group `torch.backends`.

torch calls `register` at the end of `import torch` in every process (torch >= 2.5, `torch._import_device_backends`),
LMDeploy's mp and Ray workers included. It only registers a post-import hook, so a process that never imports
LMDeploy pays for one small import. It must not raise: torch would then fail to import.
"""

from __future__ import annotations

import logging
import os

HOST = "lmdeploy"


def register() -> None:
    """Hook LMDeploy unless DLINFER_EXT_AUTOLOAD=0."""
    if os.environ.get("DLINFER_EXT_AUTOLOAD", "1").strip() == "0":
        return
    try:
        from wrapt.importer import when_imported

        when_imported(HOST)(_install)
    except Exception:  # a broken environment must not break `import torch`; `env` shows what is missing
        logging.getLogger("dlinfer_ext").exception("dlinfer_ext could not hook LMDeploy")


def _install(_: object) -> None:
    from . import install

    install()
