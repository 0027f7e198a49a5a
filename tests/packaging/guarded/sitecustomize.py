"""Writes down what a process and its children reach for; first on PYTHONPATH of the processes under test.

An audit hook cannot be taken out again and sees what Python code cannot hide: connections, name look-ups, and code that
is executed from a file. Each is a line of JSON in GUARD_LOG. Nothing is forbidden: a test reads the log.
"""

from __future__ import annotations

import ipaddress
import json
import os
import sys
from types import CodeType
from typing import Any

_LOG = os.environ.get("GUARD_LOG", "")
_FOLDERS = tuple(filter(None, os.environ.get("GUARD_FOLDERS", "").split(os.pathsep)))
_busy = False


def _loopback(host: Any) -> bool:
    if not isinstance(host, (str, bytes)) or not host:
        return True  # AF_UNIX without a name, or "any" of a bind
    name = host.decode() if isinstance(host, bytes) else host
    if name in ("localhost", "localhost.localdomain"):
        return True
    try:
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _seen(event: str, arguments: tuple[Any, ...]) -> dict[str, Any] | None:
    if event in ("socket.connect", "socket.sendto"):
        address = arguments[1]
        if isinstance(address, tuple) and not _loopback(address[0]):
            return {"address": list(address[:2])}
    elif event == "socket.bind":
        address = arguments[1]
        if isinstance(address, tuple) and not _loopback(address[0] or "0.0.0.0"):
            return {"address": list(address[:2])}
    elif event == "socket.getaddrinfo":
        if not _loopback(arguments[0]):
            return {"host": str(arguments[0])}
    elif event == "exec" and isinstance(arguments[0], CodeType) and _FOLDERS:
        file = arguments[0].co_filename
        return {"file": file} if file.startswith(_FOLDERS) else None
    return None


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    global _busy
    if _busy or not event.startswith(("socket.", "exec")):
        return
    seen = _seen(event, arguments)
    if seen is None:
        return
    _busy = True  # what the writing itself does is not written down
    try:
        with open(_LOG, "a", encoding="utf-8") as log:
            log.write(json.dumps({"event": event, "pid": os.getpid(), **seen}) + "\n")
    finally:
        _busy = False


if _LOG:
    with open(_LOG, "a", encoding="utf-8") as _log:
        _log.write(json.dumps({"event": "guarded", "pid": os.getpid(), "argv": sys.argv[:3]}) + "\n")
    sys.addaudithook(_hook)
