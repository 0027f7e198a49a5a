"""A process of a server that is killed while it answers: how the answers end, and what the server says of itself."""

from __future__ import annotations

import json
import time
import urllib.error
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from . import client
from .server import Server

END_S: Final = 10.0  # for an answer, under way or later, to end
UNHEALTHY_S: Final = 30.0  # LMDeploy asks its engine every 12 seconds
SPAWNED: Final = "--multiprocessing-fork"


def processes(pid: int) -> list[Any]:
    """Return the engine's process of a server and the workers of that, by rank; with one rank there is no worker."""
    import psutil

    def spawned(process: Any) -> list[Any]:
        found = [p for p in process.children() if SPAWNED in p.cmdline()]
        return sorted(found, key=lambda p: (p.create_time(), p.pid))

    (engine,) = spawned(psutil.Process(pid))
    return [engine, *spawned(engine)]


def _under_way(folder: Path, requests: int, timeout_s: float) -> None:
    """Wait until all requests have begun to be answered.

    Raises:
        RuntimeError: not in time.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        counted = [json.loads(f.read_text(encoding="utf-8"))["counters"] for f in folder.glob("counters-*.json")]
        if counted and all(
            c.get("prefill_rows", 0) >= requests and c.get("verify_steps", 0) + c.get("decode_steps", 0)
            for c in counted
        ):
            return
        time.sleep(0.1)
    raise RuntimeError(f"{requests} requests were not under way within {timeout_s:.0f} s")


def kill_under_load(
    server: Server, bodies: Sequence[dict[str, Any]], timeout_s: float, folder: Path
) -> tuple[list[dict[str, Any]], list[str]]:
    """Kill the last worker of a server, or its engine where it has one rank, while it answers.

    Args:
        server: one with DLINFER_EXT_COUNTERS in its environment.
        bodies: requests that take longer than it takes to start them all.
        timeout_s: for each of them.
        folder: of DLINFER_EXT_COUNTERS.

    Returns:
        How each of them and a later one ended ("which", "finish", "message", "seconds" since the kill or the question),
        and what is wrong beside that.
    """
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(client.ask_all, server.url, bodies, timeout_s)
        _under_way(folder, len(bodies), timeout_s)
        *_, victim = processes(server.pid)
        victim.kill()
        killed = time.monotonic()
        outputs = answers.result()
        seconds = time.monotonic() - killed
    ends = [_end(f"answer {i} under way", o, seconds) for i, o in enumerate(outputs)]
    asked = time.monotonic()
    (later,) = client.ask_all(server.url, [{"text": bodies[0]["text"], "new": 4}], 2 * END_S)
    ends.append(_end("a later answer", later, time.monotonic() - asked))
    late = [f"{e['which']} took {e['seconds']:.0f} s to end; wanted {END_S:.0f}" for e in ends if e["seconds"] > END_S]
    return ends, late + _unhealthy(server, killed)


def _end(which: str, output: dict[str, Any], seconds: float) -> dict[str, Any]:
    finish = "error" if output["error"] else output["finish"]
    return {"which": which, "finish": finish, "message": output["error"], "seconds": seconds}


def _unhealthy(server: Server, killed: float) -> list[str]:
    """Wait until the server says that it is not healthy, or is gone; return what is wrong if it does not."""
    said = ""
    while time.monotonic() < killed + UNHEALTHY_S:
        try:
            said = server.get("/health")
        except urllib.error.HTTPError as error:
            if error.code == 503:
                return []
            said = f"status {error.code}"
        except (urllib.error.URLError, ConnectionError):
            return []  # it has ended
        except TimeoutError:
            said = "nothing"
        time.sleep(0.5)
    return [f"{UNHEALTHY_S:.0f} s after its process was killed the server's /health says {said}; wanted status 503"]
