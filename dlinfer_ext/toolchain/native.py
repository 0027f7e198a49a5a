"""The Triton kernels of this package on CPU tensors, compiled natively from the IR that goes to the Ascend compiler.

A Triton driver and backend whose binary is a shared object for this CPU. `kernel[grid](...)`, Triton's specialisation,
its caches in memory and on disk and callable grids stay Triton's own. The programs of a grid run one after the other.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from . import install, interpreter

if TYPE_CHECKING:
    from ..kernels.common.tiling import SoC

_launches: Final[Counter[str]] = Counter()
_builds: Final[list[tuple[str, bool]]] = []
_lock: Final = threading.RLock()


class _Argument(ctypes.Union):
    _fields_ = (("p", ctypes.c_void_p), ("i", ctypes.c_int64), ("f", ctypes.c_double))


@dataclass(frozen=True)
class Call:
    """One launch, ready to be run by whoever counts it.

    Attributes:
        kernel: name of the Triton function.
        grid: programs in x, y and z.
        tensors: the tensor arguments by name.
        library: the shared object.
        arguments: an array of the C union of `native_runtime.c`.
    """

    kernel: str
    grid: tuple[int, int, int]
    tensors: Mapping[str, Any]
    library: ctypes.CDLL
    arguments: Any

    def run(self) -> None:
        self.library.native_launch(self.arguments, *map(ctypes.c_int32, self.grid))


class _State:
    """What kernels are built for now. Each chip with each build is a device number: Triton keeps kernels by device."""

    def __init__(self) -> None:
        self.soc: SoC | None = None
        self.recorder: Callable[[Call], None] | None = None
        self.devices: dict[tuple[str, bool], int] = {}

    @property
    def arch(self) -> str:
        assert self.soc is not None, "the native driver is asked before activate()"
        return self.soc.arch

    @property
    def counting(self) -> bool:
        return self.recorder is not None

    @property
    def device(self) -> int:
        return self.devices.setdefault((self.arch, self.counting), len(self.devices))


_state: Final = _State()


def missing() -> str | None:
    """Return why kernels cannot be compiled natively here, or None."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"native kernels are built for Linux on x86-64; this is {sys.platform} on {platform.machine()}"
    why = install.missing()
    if why is None and install.c_compiler() is None:
        return "no C compiler: install gcc (Debian: apt-get install gcc), or let CC name one"
    return why


def activate(soc: str = "a2") -> dict[str, Any]:
    """Install the native driver in this process; return what launchers need to be told.

    May be called again, with another chip too: kernels launched afterwards are built for that one.

    Args:
        soc: a chip of configs/soc. It decides tiles and the frontend's options.

    Raises:
        RuntimeError: something is missing, another Triton is loaded, or this process interprets kernels.
    """
    from ..targets import load_soc

    with _lock:
        why = missing()
        if why is not None:
            raise RuntimeError(why)
        if os.environ.get("TRITON_INTERPRET", "0") == "1":
            raise RuntimeError(
                "TRITON_INTERPRET=1 is set, so this process interprets kernels: run native ones in another"
            )
        if interpreter.active():
            raise RuntimeError("this process interprets kernels: run native ones in another")
        install.enter()
        chosen = load_soc(soc)
        _driver()
        _state.soc = chosen
        return {"soc": chosen}


def launches() -> int:
    """Return how many kernels this process has launched natively."""
    return sum(_launches.values())


def kernels() -> dict[str, int]:
    """Return how often this process has launched each kernel natively, by its name."""
    return dict(_launches)


def builds() -> tuple[str, ...]:
    """Return the kernels built in this process, in order; one that came from a cache on disk is not among them."""
    return tuple(name for name, _ in _builds)


@contextmanager
def recording(recorder: Callable[[Call], None]) -> Iterator[None]:
    """Build kernels for counting and hand each launch to `recorder`, which has to run it."""
    with _lock:
        if _state.recorder is not None:
            raise RuntimeError("launches are already being counted in this process")
        _state.recorder = recorder
        try:
            yield
        finally:
            _state.recorder = None


@cache
def _driver() -> Any:
    """Return the driver, installed in Triton with its backend."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime import driver as active

    from . import native_build

    ascend = triton.backends.backends["ascend"]
    # Triton loads the backend's module under another name than its place, so that it can only be had from the class.
    parse_metadata = ascend.compiler.__init__.__globals__["_parse_linalg_metadata"]

    class NativeBackend(ascend.compiler):  # type: ignore[misc, name-defined]
        """triton-ascend's frontend for a chip, with another last stage."""

        def parse_options(self, options: Mapping[str, Any]) -> Any:
            is_a5 = self.target.arch.startswith("Ascend950")
            a5 = {"compile_on_910_95": is_a5, "enable_select_analysis": is_a5}
            return super().parse_options({**options, **a5})

        def add_stages(self, stages: dict[str, Any], options: Any) -> None:
            if options.force_simt_only:
                raise native_build.LowerError("a kernel in SIMT mode has no linalg form to run natively")
            super().add_stages(stages, options)
            counting = _state.counting

            def npubin(linalg: str, metadata: dict[str, Any]) -> bytes:
                linalg, metadata = parse_metadata(linalg, metadata)
                blob = native_build.build(linalg, counting)
                _builds.append((metadata["kernel_name"], counting))
                return blob

            stages["npubin"] = npubin

        def hash(self) -> str:
            return f"{self.target}|{_state.counting}|{native_build.fingerprint()}"

    class NativeDriver(DriverBase):  # type: ignore[misc]
        def __init__(self) -> None:
            self.utils, self.launcher_cls = _Utils(), _Launcher

        @classmethod
        def is_active(cls) -> bool:
            return True

        def get_current_target(self) -> Any:
            return GPUTarget("npu", _state.arch, 0)

        def get_current_device(self) -> int:
            return _state.device

        def set_current_device(self, device: int) -> None:
            pass

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

        def get_benchmarker(self) -> Any:
            from triton.testing import do_bench

            return do_bench

    triton.backends.backends["ascend"] = type(ascend)(NativeBackend, NativeDriver)
    installed = NativeDriver()
    active.set_active(installed)
    return installed


class _Utils:
    """What Triton asks a driver about the machine, and the loading of binaries."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        soc = _state.soc
        assert soc is not None
        return {"max_shared_mem": soc.ub_bytes, "num_aicore": soc.cube_cores, "num_vectorcore": soc.vector_cores}

    def get_arch(self) -> str:
        return _state.arch

    def get_aicore_num(self) -> int:
        return self.get_device_properties(0)["num_aicore"]

    def load_binary(
        self, name: str, blob: bytes, shared: int, device: int
    ) -> tuple[ctypes.CDLL, ctypes.CDLL, int, int]:
        from triton.runtime.cache import default_cache_dir

        # The loader knows libraries by path: one file for each content.
        folder = Path(os.environ.get("TRITON_CACHE_DIR") or default_cache_dir()) / "dlinfer_ext_native"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / f"{hashlib.sha256(blob).hexdigest()[:40]}.so"
        if not path.exists():
            scratch = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
            scratch.write_bytes(blob)
            scratch.replace(path)
        library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        return library, library, 0, 0


class _Launcher:
    """Calls a kernel; Triton makes one for each build and calls it for each launch."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.name = source.fn.fn.__name__
        # The position among the arguments that are not constexpr, the name, the type. Constants are not passed.
        self.arguments = [
            (position, name, kind)
            for position, (name, kind) in enumerate(source.signature.items())
            if name not in source.constants
        ]
        self.array = _Argument * max(1, len(self.arguments))

    def __call__(
        self,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        stream: int,
        library: ctypes.CDLL,
        packed_metadata: Any,
        launch_metadata: Any,
        enter_hook: Any,
        exit_hook: Any,
        *values: Any,
    ) -> None:
        arguments = self.array()
        for slot, (position, name, kind) in zip(arguments, self.arguments, strict=False):
            value = values[position]
            if kind[0] == "*":
                if value.device.type != "cpu":
                    raise ValueError(f"{self.name}: {name} is on {value.device}; native kernels take CPU tensors only")
                slot.p = value.data_ptr()
            elif kind[0] == "f":
                slot.f = value
            else:
                slot.i = value
        _launches[self.name] += 1
        if _state.recorder is None:
            library.native_launch(arguments, ctypes.c_int32(grid_x), ctypes.c_int32(grid_y), ctypes.c_int32(grid_z))
        else:
            tensors = {name: values[position] for position, name, kind in self.arguments if kind[0] == "*"}
            _state.recorder(Call(self.name, (grid_x, grid_y, grid_z), tensors, library, arguments))
