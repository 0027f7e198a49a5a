"""Which CANN is installed, read from the files it leaves: nothing of it is imported or run."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

VARIABLES: Final = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")  # set by CANN's set_env.sh
USUAL: Final = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann")
# Newest form first, below the toolkit's folder. Each states the version of the whole, not that of a component.
FILES: Final = (
    "*-linux/ascend_toolkit_install.info",
    "ascend_toolkit_install.info",
    "share/info/*/version.info",
    "compiler/version.info",
    "runtime/version.info",
    "opp/version.info",
    "version.cfg",
)
# `version=8.3.RC1`, `version_dir=8.3.RC1` and `Version=8.5.0`; `toolkit_running_version=[7.7.0.1.238:8.3.RC1]`.
_PLAIN: Final = re.compile(r"^\s*(version_dir|version)\s*=\s*(\S+)\s*$", re.MULTILINE | re.IGNORECASE)
_RUNNING: Final = re.compile(r"^\s*\w*running_version\s*=\s*\[[^:\]]*:([^\]]+)\]", re.MULTILINE)
_RELEASE: Final = re.compile(r"\d+\.\d+\.?(?:\d+|(?:rc|alpha|beta)\.?\d+)(?:\.(?:rc|alpha|beta)\d+)*$", re.IGNORECASE)
_MOST_BYTES: Final = 1 << 20  # such a file is some hundred bytes; anything larger is something else


@dataclass(frozen=True)
class Cann:
    """An installed CANN.

    Attributes:
        folder: of the toolkit.
        version: as CANN writes it, such as "8.5.0" or "8.3.RC1"; None where no file states it.
        file: that states it.
    """

    folder: str
    version: str | None
    file: str | None


def find(environment: Mapping[str, str] | None = None, usual: tuple[str, ...] = USUAL) -> Cann | None:
    """Return the CANN that the variables name, or that stands in the usual place, or None.

    A variable that names a folder wins over the usual places also where that folder does not exist: a process would
    load CANN from there.
    """
    environment = os.environ if environment is None else environment
    named = [environment[name] for name in VARIABLES if environment.get(name)]
    folder = next(iter(named), None) or next((f for f in usual if Path(f).is_dir()), None)
    if folder is None:
        return None
    for pattern in FILES:
        for file in sorted(Path(folder).glob(pattern)):
            version = read(file)
            if version is not None:
                return Cann(folder, version, str(file))
    return Cann(folder, None, None)


def read(file: Path) -> str | None:
    """Return the version of CANN that one of its files states, or None: a component's version is not taken for it."""
    try:
        if not file.is_file() or file.stat().st_size > _MOST_BYTES:
            return None
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    plain = {name.lower(): value for name, value in reversed(_PLAIN.findall(text))}
    stated = [plain.get("version_dir"), plain.get("version"), *_RUNNING.findall(text)]
    return next((v for v in stated if v and _RELEASE.fullmatch(v)), None)
