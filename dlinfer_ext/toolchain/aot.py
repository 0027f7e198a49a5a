"""Compiles the kernels that launchers launch down to HIVM for A2, A3 and A5, with no card and no CANN; nothing runs.

The compiler is kept out of this process (see install.py): workers do the work (aot_worker.py), one case at a time, and
this side asks and keeps what they found.

Results are kept in a cache folder on three levels, so that an unchanged tree needs no worker at all:

- captures: which kernels the cases of a model launch, by the hash of this package's sources;
- keys: the IR that a kernel's source, specialisation and options make, by their hash;
- raw and hivm: what the compiler said of an IR and what it made of it, by the hash of IR, flags and compiler; builds
  holds what hivm.py read there.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from .hivm import Facts, dropped, failure, read

# Kinds of outcome. "retry": it fits only without optimisations that were asked for. "launcher": a launcher raised.
OK: Final = "ok"
KINDS: Final = (OK, "overflow", "crash", "timeout", "retry", "grid", "frontend", "type", "refused", "launcher")


@dataclass(frozen=True)
class Build:
    """What the compiler made of one kernel in one specialisation for one chip.

    Attributes:
        kernel: name of the kernel's function.
        soc: the chip.
        key: hash of source, specialisation, options, chip and toolchain.
        kind: one of KINDS; "grid" and "launcher" belong to a launch and are set there.
        message: the compiler's words.
        buffer: the memory that overflowed.
        needed: bytes wanted there.
        available: bytes that it has.
        dropped: optimisations that the compiler gave up so that the kernel fits.
        seconds: of frontend and compiler together.
        facts: what the HIVM says; None if it was not reached.
    """

    kernel: str
    soc: str
    key: str
    kind: str = OK
    message: str = ""
    buffer: str | None = None
    needed: int | None = None
    available: int | None = None
    dropped: tuple[str, ...] = ()
    seconds: float = 0.0
    facts: Facts | None = None

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Build:
        """Return the build that `dataclasses.asdict` and JSON made a record of."""
        values = {f.name: record[f.name] for f in fields(cls)}
        values["dropped"] = tuple(values["dropped"])
        values["facts"] = values["facts"] and Facts.from_json(values["facts"])
        return cls(**values)


@dataclass(frozen=True)
class Raw:
    """What came of compiling, before anything is read into it.

    Attributes:
        seconds: of frontend and compiler together.
        kind: one of KINDS where it is known without the log.
        log: the compiler's output.
        returncode: its exit status.
    """

    seconds: float
    kind: str | None = None
    log: str = ""
    returncode: int = 0


def _outcome(raw: Mapping[str, Any], text: str | None) -> Build:
    """Read the compiler's log and the HIVM; name, chip and key are left to the caller."""
    build = Build("", "", "", seconds=raw["seconds"])
    if raw["kind"] is not None:
        return replace(build, kind=raw["kind"], message=raw["log"][-1200:])
    given_up = dropped(raw["log"])
    if text is None:
        return replace(build, dropped=given_up, **vars(failure(raw["log"], raw["returncode"])))
    return replace(
        build,
        kind="retry" if given_up else OK,
        message=f"it fits only without {', '.join(given_up)}" if given_up else "",
        dropped=given_up,
        facts=read(text),
    )


@dataclass(frozen=True)
class Launch:
    """One launch of one kernel by a launcher.

    Attributes:
        kernel: name of the kernel's function.
        soc: the chip that the launcher was told.
        grid: programs.
        key: of the Build.
    """

    kernel: str
    soc: str
    grid: tuple[int, int, int]
    key: str


@dataclass(frozen=True)
class Captured:
    """One case, with what its launcher launched on each chip.

    Attributes:
        index: place among the cases of its model.
        operator: as in the Case.
        phase: as in the Case.
        lower_bound: as in the Case.
        bytes_limit: as in the Case.
        blocks_limit: as in the Case.
        chips: that it was asked for.
        launches: on all of them.
        errors: chip -> what the launcher raised.
    """

    index: int
    operator: str
    phase: str
    lower_bound: int
    bytes_limit: float | None
    blocks_limit: float | None
    chips: tuple[str, ...]
    launches: tuple[Launch, ...] = ()
    errors: Mapping[str, str] | None = None

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Captured:
        """Return the capture that `dataclasses.asdict` and JSON made a record of."""
        values = {f.name: record[f.name] for f in fields(cls)}
        launches = (Launch(**{**x, "grid": tuple(x["grid"])}) for x in values["launches"])
        return cls(**{**values, "launches": tuple(launches), "chips": tuple(values["chips"])})

    def on(self, soc: str) -> Captured:
        """Return the part that belongs to one chip."""
        launches = tuple(x for x in self.launches if x.soc == soc)
        return replace(
            self, chips=(soc,), launches=launches, errors={k: v for k, v in (self.errors or {}).items() if k == soc}
        )


@dataclass(frozen=True)
class Group:
    """The cases of one model on one of `tp` ranks in one dtype.

    Attributes:
        model: name in configs/models.
        tp: ranks.
        dtype: "bfloat16", "float16" or "float32".
        source: module, or path of a Python file, that has `cases(model, tp, dtype)`.
    """

    model: str
    tp: int
    dtype: str
    source: str = "dlinfer_ext.toolchain.cases"


def cache_folder(given: Path | None = None) -> Path:
    """Return the folder given, or dlinfer_ext/hivm in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME", "").strip() or Path.home() / ".cache"
    return given or Path(home) / "dlinfer_ext" / "hivm"


def digest(*parts: object) -> str:
    """Return a hash of the text of all parts."""
    return hashlib.sha256("\0".join(str(p) for p in parts).encode()).hexdigest()[:40]


@cache
def toolchain_hash(folder: Path) -> str:
    """Return a hash of what is installed in the toolchain's folder: the file lists of its packages hold all hashes."""
    records = sorted(folder.glob("*.dist-info/RECORD"))
    return digest(*(hashlib.sha256(r.read_bytes()).hexdigest() for r in records))


@cache
def _reader() -> str:
    """Return a hash of what reads the compiler's output."""
    here = Path(__file__).resolve().parent
    return digest(*((here / n).read_text(encoding="utf-8") for n in ("hivm.py", "aot.py")))


@cache
def tree_hash() -> str:
    """Return a hash of the sources and configs of this package that decide what a launcher launches.

    These are all but the parts that only call, serve or check operators.
    """
    root = Path(__file__).resolve().parent.parent
    found = []
    for folder, folders, names in os.walk(root, followlinks=True):
        here = Path(folder)
        if here == root:
            folders[:] = [f for f in folders if f not in ("cli", "framework", "vendor")]
        found += [here / n for n in names if n.endswith((".py", ".json"))]
    tools = root / "toolchain"
    wanted = sorted(p for p in found if p.parent != tools or p.name in ("aot.py", "aot_worker.py"))
    return digest(*(f"{p.relative_to(root)}:{hashlib.sha256(p.read_bytes()).hexdigest()}" for p in wanted))


class Store:
    """The cache folder. Files are renamed into place, so that processes may share it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, kind: str, name: str) -> Path:
        return self.folder / kind / name[:2] / name

    def load(self, kind: str, name: str) -> Any:
        """Return what was saved, or None."""
        try:
            return json.loads(self._path(kind, name).read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return None

    def save(self, kind: str, name: str, value: object) -> None:
        """Save anything that JSON can hold."""
        self._write(kind, name, json.dumps(value).encode())

    def _write(self, kind: str, name: str, data: bytes) -> None:
        path = self._path(kind, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as f:
            f.write(data)
        os.replace(f.name, path)

    def has(self, key: str) -> bool:
        """Return whether a key leads to a result."""
        pointer = self.load("keys", key)
        return pointer is not None and self._path("raw", pointer["content"]).exists()

    def build(self, key: str) -> Build | None:
        """Return the build of a key, or None if there is none yet."""
        pointer = self.load("keys", key)
        if pointer is None:
            return None
        name = digest(pointer["content"], _reader())
        record = self.load("builds", name)
        if record is None:
            raw = self.load("raw", pointer["content"])
            if raw is None:
                return None
            record = asdict(_outcome(raw, self._text(pointer["content"])))
            self.save("builds", name, record)
        return Build.from_json({**record, "kernel": pointer["kernel"], "soc": pointer["soc"], "key": key})

    def _text(self, content: str) -> str | None:
        try:
            return gzip.decompress(self._path("hivm", content).read_bytes()).decode()
        except FileNotFoundError:
            return None

    def save_raw(self, content: str, raw: Raw, text: str | None = None) -> None:
        """Save what the compiler said, and the HIVM that it made."""
        if text is not None:
            self._write("hivm", content, gzip.compress(text.encode()))
        self.save("raw", content, asdict(raw))

    def point(self, key: str, content: str, kernel: str, soc: str) -> None:
        """Say that a key leads to a result."""
        self.save("keys", key, {"content": content, "kernel": kernel, "soc": soc})

    def forget(self, key: str) -> None:
        """Let a key lead nowhere."""
        self._path("keys", key).unlink(missing_ok=True)

    def claim(self, key: str) -> bool:
        """Return True for the first process that asks to build a key, False for the others."""
        path = self._path("claims", key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError, ValueError):
            owner = int(path.read_text(encoding="utf-8"))
            try:
                os.kill(owner, 0)
            except ProcessLookupError:
                path.unlink(missing_ok=True)
            except PermissionError:
                pass
        try:
            with path.open("x", encoding="utf-8") as f:
                f.write(str(os.getpid()))
        except FileExistsError:
            return False
        return True

    def release(self, key: str) -> None:
        self._path("claims", key).unlink(missing_ok=True)


class WorkerDied(RuntimeError):
    """A worker ended or was ended; `building` is the kernel that it had begun, as (kernel, soc, key), if any."""

    def __init__(self, message: str, building: tuple[str, str, str] | None, timed_out: bool) -> None:
        super().__init__(message)
        self.building = building
        self.timed_out = timed_out


class Worker:
    """A process that has the toolchain on its path, and answers requests one after the other.

    Args:
        toolchain: folder of the toolchain.
        store: where builds go.
        timeout: seconds that the compiler may take for one kernel.
    """

    def __init__(self, toolchain: Path, store: Store, timeout: float) -> None:
        self.timeout = timeout
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        # The package may be imported from a source tree that is not installed.
        paths = [str(toolchain), str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
        environ = {
            # Triton's own variables change what is compiled.
            **{k: v for k, v in os.environ.items() if not k.startswith("TRITON_")},
            "PYTHONPATH": os.pathsep.join(p for p in paths if p),
            "PATH": os.pathsep.join((str(toolchain / "ascendnpuir" / "bin"), os.environ.get("PATH", ""))),
            "OMP_NUM_THREADS": "1",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dlinfer_ext.toolchain.aot_worker", str(store.folder), str(toolchain), str(timeout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environ,
            text=True,
        )

    def ask(self, request: Mapping[str, Any], *, seconds: float = 900.0) -> Any:
        """Return the answer to a request.

        Raises:
            WorkerDied: the worker ended, or made no progress for `seconds`.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        building: tuple[str, str, str] | None = None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        while True:
            expired = threading.Event()

            def end(expired: threading.Event = expired) -> None:
                expired.set()
                self._process.kill()

            timer = threading.Timer(seconds, end)
            timer.start()
            line = self._process.stdout.readline()
            timer.cancel()
            if not line:
                status = self._process.wait()
                self._log.seek(max(self._log.tell() - 1000, 0))
                tail = self._log.read().decode(errors="replace").strip()
                raise WorkerDied(f"worker ended with status {status}: {tail[-600:]}", building, expired.is_set())
            answer = json.loads(line)
            if "building" in answer:
                kernel, soc, key = answer["building"]
                building = (kernel, soc, key)
            else:
                return answer["answer"]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def compile_groups(
    groups: Iterable[Group],
    socs: tuple[str, ...],
    store: Store,
    *,
    timeout: float = 300.0,
    workers: int = 2,
    on_case: Callable[[Group, Captured, Mapping[str, Build], frozenset[str]], None],
) -> None:
    """Compile every kernel that the cases launch, and report each case as soon as its kernels are done.

    Args:
        groups: what to compile.
        socs: chips.
        store: the cache.
        timeout: seconds that the compiler may take for one kernel.
        workers: processes.
        on_case: called, in the order of completion, with the group, the case, its builds by key, and the keys that were
            built now rather than found in the cache. Called from one thread at a time.

    Raises:
        RuntimeError: the toolchain is missing, and the cache does not hold all that is asked for.
    """
    from . import install

    toolchain = install.folder()
    stamp = toolchain_hash(toolchain)
    lock, fresh = threading.Lock(), set[str]()
    missing: list[tuple[Group, tuple[str, ...]]] = []
    for group in groups:
        name = digest(tree_hash(), stamp, _source_hash(group.source), group)
        ready, todo = _cached(store, name, socs)
        for case, builds in ready:
            on_case(group, case, builds, frozenset())
        if todo:
            missing.append((group, todo))
    if not missing:
        return
    why = install.missing()
    if why is not None:
        raise RuntimeError(why)

    jobs: list[tuple[Group, tuple[str, ...], int]] = []
    results: dict[tuple[Group, str], list[Captured]] = {(g, s): [] for g, todo in missing for s in todo}
    pool = _Pool(toolchain, store, timeout, workers)
    try:
        listed = pool.map([{"op": "list", **asdict(group)} for group, _ in missing])
        for (group, todo), count in zip(missing, listed, strict=True):
            jobs += ((group, todo, i) for i in range(count))

        def done(job: tuple[Group, tuple[str, ...], int], answer: Any) -> bool:
            """Keep the answer; False: another worker is still at one of its kernels."""
            group, todo, _ = job
            case = Captured.from_json(answer["case"])
            builds = {x.key: store.build(x.key) for x in case.launches}
            complete = {k: b for k, b in builds.items() if b is not None}
            if len(complete) < len(builds):
                return False
            with lock:
                fresh.update(answer["fresh"])
                for soc in todo:
                    results[group, soc].append(case.on(soc))
                on_case(group, case, complete, frozenset(fresh & complete.keys()))
            return True

        # What waits for another worker's kernel is asked again at the end; a claim left by a dead process goes then.
        late = pool.run(
            [{"op": "case", **asdict(g), "socs": t, "index": i, "wait": False} for g, t, i in jobs], jobs, done
        )
        pool.run([{"op": "case", **asdict(g), "socs": t, "index": i, "wait": True} for g, t, i in late], late, done)
    finally:
        pool.close()
    for (group, soc), cases in results.items():
        name = digest(tree_hash(), stamp, _source_hash(group.source), group)
        if not any(c.errors for c in cases):
            store.save("captures", digest(name, soc), [asdict(c) for c in sorted(cases, key=lambda c: c.index)])


def _source_hash(source: str) -> str:
    path = Path(source)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.suffix == ".py" else source


def _cached(
    store: Store, name: str, socs: tuple[str, ...]
) -> tuple[list[tuple[Captured, dict[str, Build]]], tuple[str, ...]]:
    """Return the cases found whole in the cache, and the chips for which they are not."""
    ready, todo = [], []
    for soc in socs:
        records = store.load("captures", digest(name, soc))
        if records is None:
            todo.append(soc)
            continue
        cases = [Captured.from_json(r) for r in records]
        builds = {x.key: store.build(x.key) for c in cases for x in c.launches}
        whole = {k: b for k, b in builds.items() if b is not None}
        # What took too long on a busy machine is tried again.
        slow = [k for k, b in whole.items() if b.kind == "timeout"]
        for key in slow:
            store.forget(key)
        if slow or len(whole) < len(builds):
            todo.append(soc)
            continue
        ready += [(c, {x.key: whole[x.key] for x in c.launches}) for c in cases]
    return ready, tuple(todo)


class _Pool:
    """Workers, each with a thread that asks it for the next job; a worker that dies is replaced."""

    def __init__(self, toolchain: Path, store: Store, timeout: float, workers: int) -> None:
        self.toolchain, self.store, self.timeout = toolchain, store, timeout
        self.slots: list[Worker | None] = [None] * workers

    def _ask(self, slot: int, request: Mapping[str, Any]) -> Any:
        """Ask a worker; a kernel that ends it is saved as a failure, and the case is asked for again."""
        while True:
            worker = self.slots[slot] or Worker(self.toolchain, self.store, self.timeout)
            self.slots[slot] = worker
            try:
                return worker.ask(request, seconds=self.timeout + 300)
            except WorkerDied as e:
                worker.close()
                self.slots[slot] = None
                if e.building is None:
                    raise
                kernel, soc, key = e.building
                kind = "timeout" if e.timed_out else "crash"
                self.store.save_raw(digest(key, kind), Raw(0.0, kind, str(e)))
                self.store.point(key, digest(key, kind), kernel, soc)
                self.store.release(key)

    def map(self, requests: list[dict[str, Any]]) -> list[Any]:
        """Return the answers in order, from one worker."""
        return [self._ask(0, r) for r in requests]

    def run(self, requests: list[dict[str, Any]], jobs: list[Any], done: Callable[[Any, Any], bool]) -> list[Any]:
        """Ask for all; return the jobs whose answer was not yet complete."""
        queue = list(zip(requests, jobs, strict=True))[::-1]
        late: list[Any] = []
        errors: list[BaseException] = []
        lock = threading.Lock()

        def serve(slot: int) -> None:
            while not errors:
                with lock:
                    if not queue:
                        return
                    request, job = queue.pop()
                try:
                    if not done(job, self._ask(slot, request)):
                        late.append(job)
                except BaseException as e:
                    errors.append(e)

        threads = [threading.Thread(target=serve, args=(i,), daemon=True) for i in range(len(self.slots))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if errors:
            raise errors[0]
        return late

    def close(self) -> None:
        for worker in self.slots:
            if worker is not None:
                worker.close()
