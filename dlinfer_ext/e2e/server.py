"""Start and stop the stock LMDeploy server on this CPU; used by `demo`, `e2e` and the server tests."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from ..framework.lmdeploy.drafts import draft_method

OUTPUT_SHOWN: Final = 6000


@dataclass(frozen=True)
class Server:
    """A server that answers."""

    url: str
    model: str
    pid: int

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as reply:
            text: str = reply.read().decode()
        return text


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
    return port


def _alive(group: int) -> list[str]:
    """Return the names of a group's processes, but for those that have ended and that nobody has waited for yet."""
    import psutil

    names = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                names.append(f"{process.name()} ({process.pid})")
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return names


def left_behind(server: Server, port: int, patience_s: float = 10) -> list[str]:
    """Return what a server that was stopped has left after `patience_s`: processes of its group, and its port."""
    deadline = time.monotonic() + patience_s
    while _alive(server.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    wrong = [f"{name} of the server's group {server.pid} is left" for name in _alive(server.pid)]
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError as error:
            wrong.append(f"port {port} is not free: {error}")
    return wrong


def command(checkpoint: Path, model: str, port: int, drafts: int, extra: tuple[str, ...] = ()) -> list[str]:
    """Return the command line of a stock server, as a user would type it, bound to loopback."""
    line = [sys.executable, "-m", "lmdeploy", "serve", "api_server", str(checkpoint)]
    line += ["--backend", "pytorch", "--device", "ascend", "--eager-mode", "--model-name", model]
    line += ["--server-name", "127.0.0.1", "--server-port", str(port), "--session-len", "2048"]
    # The checkpoint is of Qwen3.5's vision-language form, but holds no trained vision part.
    line += ["--max-batch-size", "8", "--cache-max-entry-count", "0.2", "--language-model-only"]
    if drafts:
        line += ["--speculative-algorithm", draft_method(checkpoint), "--speculative-num-draft-tokens", str(drafts)]
    return [*line, *extra]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a CPU run in fp32: the vendor, and nothing of ours in the user's code."""
    fixed = {"DLINFER_EXT_VENDOR": "cpu", "DLINFER_EXT_CPU_DTYPE": "float32", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **fixed, "HF_HUB_OFFLINE": "1", **more}


@contextmanager
def serving(line: list[str], model: str, port: int, env: Mapping[str, str], timeout_s: float = 180) -> Iterator[Server]:
    """Run a server until the block ends, then stop its whole process group.

    Raises:
        RuntimeError: it ended or did not answer in `timeout_s` seconds; the message holds the end of its output.
    """
    with tempfile.NamedTemporaryFile(prefix="dlinfer_ext_server_", suffix=".log") as log:
        try:
            with _running(line, model, port, log.file, env, timeout_s) as server:
                yield server
        except _NotServingError as error:
            output = Path(log.name).read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"{error}\n{output[-OUTPUT_SHOWN:]}") from None


class _NotServingError(RuntimeError):
    pass


@contextmanager
def _running(
    line: list[str], model: str, port: int, log: IO[bytes], env: Mapping[str, str], timeout_s: float
) -> Iterator[Server]:
    process = subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT, env=dict(env), start_new_session=True)
    try:
        server = Server(f"http://127.0.0.1:{port}", model, process.pid)
        deadline = time.monotonic() + timeout_s
        while not _answers(server):
            if process.poll() is not None:
                raise _NotServingError(f"the server ended with code {process.returncode} before it answered")
            if time.monotonic() > deadline:
                raise _NotServingError(f"the server did not answer within {timeout_s:.0f} s")
            time.sleep(0.3)
        yield server
    finally:
        _stop(process)


def _answers(server: Server) -> bool:
    try:
        server.get("/v1/models")
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
    return True


def _stop(process: subprocess.Popen[bytes], patience_s: float = 15) -> None:
    """Ask the group to end, then make it: tp > 1 has workers that outlive a killed parent."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
        except ProcessLookupError:
            break
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue
    process.wait(patience_s)
