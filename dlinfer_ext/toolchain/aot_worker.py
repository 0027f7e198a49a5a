"""The process behind aot.py: lets launchers launch into nothing, and compiles what they would have launched.

It has the toolchain on PYTHONPATH and the compiler on PATH. Requests come as lines of JSON on the standard input.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError
from triton.runtime import driver

from ..targets import load_model, load_soc
from . import hivm
from .aot import Captured, Launch, Raw, Store, digest, toolchain_hash
from .cases import Case

_BACKEND: Final = triton.backends.backends["ascend"].compiler
# Triton loads the backend's compiler.py under a name of its own.
_GLOBALS: Final[dict[str, Any]] = _BACKEND.__init__.__globals__
# The release has the options of A2 and A3 built in; for A5 it wants them told, and these go together.
_A5_OPTIONS: Final = {
    "compile_on_910_95": True,
    "multibuffer": False,
    "enable_auto_bind_sub_block": False,
    "enable_select_analysis": True,
}


class _Zeros(TorchFunctionMode):
    """Zeros where a case asks for random numbers: nothing runs, and pages of zeros cost nothing."""

    _PLACES: Final = {torch.randn: torch.zeros, torch.rand: torch.zeros}
    _LIKE: Final = {torch.randn_like: torch.zeros_like, torch.rand_like: torch.zeros_like}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in self._PLACES or func in self._LIKE:
            given.pop("generator", None)
            func = self._PLACES.get(func) or self._LIKE[func]
        return func(*args, **given)


@dataclass
class _Kernel:
    """Stands in for a compiled kernel: launching it takes a note."""

    source: Any
    options: dict[str, Any]
    target: Any
    notes: list[tuple[_Kernel, tuple[int, int, int]]]
    function: None = None
    packed_metadata: None = None

    def launch_metadata(self, *_: Any) -> None:
        return None

    def _init_handles(self) -> None:
        return None

    def run(self, x: int, y: int, z: int, *_: Any) -> None:
        self.notes.append((self, (int(x), int(y), int(z))))


class _Driver:
    """A driver with a device per chip, so that Triton's own per-device caches keep them apart."""

    def __init__(self) -> None:
        self.arch = ""
        self.archs: list[str] = []

    def take(self, arch: str) -> None:
        self.arch = arch
        if arch not in self.archs:
            self.archs.append(arch)

    def get_current_target(self) -> Any:
        return GPUTarget("npu", self.arch, 0)

    def get_current_device(self) -> int:
        return self.archs.index(self.arch)

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_arch(self) -> str:
        return self.arch


class _Command(BaseException):
    def __init__(self, command: list[str]) -> None:
        super().__init__()
        self.flags = [c for c in command[2:] if c != "-o" and c != command[command.index("-o") + 1]]
        self.program = command[0]
        self.ir = Path(command[1]).read_text(encoding="utf-8")


class _Subprocess:
    """Stands in for the module `subprocess` in the backend: the last command is caught, not run."""

    CalledProcessError = subprocess.CalledProcessError

    def run(self, command: list[str], **options: Any) -> Any:
        if "bishengir-compile" in os.path.basename(command[0]):
            raise _Command(command)
        return subprocess.run(command, timeout=_TIMEOUT, **options)


_DRIVER: Final = _Driver()
_NOTES: Final[list[tuple[_Kernel, tuple[int, int, int]]]] = []
_TIMEOUT = 300.0


def _install() -> None:
    """Take the places of driver and compiler in this process's Triton."""
    driver.set_active(_DRIVER)
    # JITFunction takes `compile` from the package when it is first launched.
    compiler: Any = sys.modules["triton.compiler"]
    compiler.compile = lambda source, target, options: _Kernel(source, options, target, _NOTES)
    _GLOBALS["NPUUtils"] = lambda: _DRIVER
    _GLOBALS["subprocess"] = _Subprocess()
    for name in ("_check_bishengir_api_change", "_check_bishengir_is_regbased"):
        _GLOBALS[name] = cache(_GLOBALS[name])
    parse = _BACKEND.parse_options

    def parse_options(self: Any, given: Mapping[str, Any]) -> Any:
        return parse(self, {**(_A5_OPTIONS if _is_a5(self.target.arch) else {}), **given})

    _BACKEND.parse_options = parse_options


def _is_a5(arch: str) -> bool:
    return arch.startswith(("Ascend950", "Ascend910_95"))


def capture(launch: Callable[[], object], arch: str) -> list[tuple[_Kernel, tuple[int, int, int]]]:
    """Return the kernels that a call launches, with their grids."""
    _DRIVER.take(arch)
    _NOTES.clear()
    # Triton-Ascend refuses a large grid at the launch; here it is found later, with the other kernels of the launcher.
    os.environ["TRITON_ALL_BLOCKS_PARALLEL"] = "1"
    try:
        with torch.inference_mode():
            launch()
    finally:
        del os.environ["TRITON_ALL_BLOCKS_PARALLEL"]
    return list(_NOTES)


def key_of(kernel: _Kernel, stamp: str) -> str:
    """Return a hash of source, specialisation, options, chip and toolchain."""
    options = {k: v for k, v in kernel.options.items() if k != "stream"}
    return digest(kernel.source.hash(), sorted(options.items(), key=str), kernel.target.arch, stamp)


def compile_kernel(kernel: _Kernel, soc: str, key: str, store: Store, stamp: str, timeout: float) -> None:
    """Compile to HIVM and save the result.

    Args:
        kernel: as captured.
        soc: name of the chip.
        key: of the result.
        store: where it goes.
        stamp: hash of the toolchain.
        timeout: seconds for the compiler.
    """
    started = time.monotonic()
    name = str(kernel.source.name)
    _DRIVER.take(kernel.target.arch)
    text: str | None = None
    try:
        command = _lower(kernel)
    except subprocess.TimeoutExpired:
        content, raw = digest(key, "timeout"), Raw(0.0, "timeout", f"the frontend took more than {_TIMEOUT:.0f} s")
    except Exception as e:
        kind, message = _frontend_failure(e)
        content, raw = digest(key, kind), Raw(0.0, kind, message)
    else:
        content = digest(command.ir, command.flags, stamp)
        known = store.load("raw", content)
        if known is not None and known["kind"] != "timeout":
            store.point(key, content, name, soc)
            return
        raw, text = _compile(command, timeout)
    store.save_raw(content, replace(raw, seconds=round(time.monotonic() - started, 3)), text)
    store.point(key, content, name, soc)


def _frontend_failure(error: Exception) -> tuple[str, str]:
    """Return the kind and the words of a failure before the compiler proper."""
    if isinstance(error, subprocess.CalledProcessError):
        log = (error.stderr or b"").decode(errors="replace")
        cause = hivm.failure(log, error.returncode)
        return cause.kind if cause.kind in ("crash", "type") else "frontend", cause.message
    # A CompilationError quotes the source first, up to a line that points at the place.
    text = (
        str(error).rpartition("^\n")[2] if isinstance(error, CompilationError) else f"{type(error).__name__}: {error}"
    )
    return "type" if "unexpected type" in text or "nsupported type" in text else "frontend", text


def _lower(kernel: _Kernel) -> _Command:
    """Return the compiler's command for a kernel, its input included."""
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    backend = make_backend(kernel.target)
    options = backend.parse_options(kernel.options)
    stages: dict[str, Callable[[Any, dict[str, Any]], Any]] = {}
    backend.add_stages(stages, options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = kernel.source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    metadata = {"hash": "", "target": kernel.target, **options.__dict__}
    try:
        for stage in stages.values():
            module = stage(module, metadata)
    except _Command as command:
        return command
    raise RuntimeError("the backend made a kernel without bishengir-compile")


def _compile(command: _Command, timeout: float) -> tuple[Raw, str | None]:
    """Run the compiler; return what it said, and the HIVM if it made any."""
    with tempfile.TemporaryDirectory(prefix="dlinfer-ext-hivm-") as scratch:
        source = Path(scratch) / "kernel.ttadapter.mlir"
        source.write_text(command.ir, encoding="utf-8")
        run = [command.program, str(source), *command.flags, "-o", f"{scratch}/kernel", f"--save-temps={scratch}"]
        process = subprocess.Popen(
            run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, text=True, errors="replace"
        )
        try:
            log, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            # The compiler of A5 is a child of the program: the whole group has to go.
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return Raw(0.0, "timeout", f"the compiler took more than {timeout:.0f} s"), None
        result = Path(scratch) / "module.hivm.opt.mlir"
        # What follows HIVM is hivmc, which only CANN has: that it is not found is how success looks here.
        reached = result.is_file() and (process.returncode == 0 or "Cannot find hivmc" in log)
        text = result.read_text(encoding="utf-8") if reached else None
        return Raw(0.0, None, log[-20000:], process.returncode), text


@cache
def _cases(source: str, model: str, tp: int, dtype: str) -> list[Case]:
    if source.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(source).stem, source)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(source)
    return list(module.cases(load_model(model), tp, getattr(torch, dtype)))


def _serve_case(
    request: Mapping[str, Any], store: Store, stamp: str, timeout: float, say: Callable[[Any], None]
) -> Any:
    """Launch a case for each chip and compile what is not in the cache."""
    case = _cases(*(request[k] for k in ("source", "model", "tp", "dtype")))[request["index"]]
    launches: list[Launch] = []
    errors: dict[str, str] = {}
    fresh: list[str] = []
    with _Zeros():
        arguments = case.arguments()
    for soc in request["socs"]:
        record = load_soc(soc)
        try:
            kernels = capture(lambda record=record: case.launch(**arguments, soc=record), record.arch)  # type: ignore[misc]
        except Exception as e:
            errors[soc] = f"{type(e).__name__}: {e}"[:1200]
            continue
        for kernel, grid in kernels:
            key = key_of(kernel, stamp)
            launches.append(Launch(str(kernel.source.name), soc, grid, key))
            # After a wait the claim is a dead process's, or its kernel is slow; building it twice does no harm.
            if not store.has(key) and (store.claim(key) or (request["wait"] and _waited(store, key, timeout))):
                say({"building": (str(kernel.source.name), soc, key)})
                compile_kernel(kernel, soc, key, store, stamp, timeout)
                store.release(key)
                fresh.append(key)
    captured = Captured(
        request["index"],
        case.operator,
        case.phase,
        case.lower_bound,
        case.bytes_limit,
        case.blocks_limit,
        tuple(request["socs"]),
        tuple(launches),
        errors,
    )
    return {"case": asdict(captured), "fresh": fresh}


def _waited(store: Store, key: str, timeout: float) -> bool:
    """Wait for another process's build; True if it did not come."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if store.has(key):
            return False
        if store.claim(key):
            return True
        time.sleep(0.1)
    return True


def main() -> None:
    """Answer requests until the input ends."""
    global _TIMEOUT
    folder, toolchain, timeout = sys.argv[1:]
    # Triton and kernels print; the answers go where nothing else does.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _TIMEOUT = float(timeout)

    def say(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    _install()
    store, stamp = Store(Path(folder)), toolchain_hash(Path(toolchain))
    for request in _requests():
        if request["op"] == "list":
            say({"answer": len(_cases(*(request[k] for k in ("source", "model", "tp", "dtype"))))})
        else:
            say({"answer": _serve_case(request, store, stamp, _TIMEOUT, say)})


def _requests() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


if __name__ == "__main__":
    main()
