"""Every `torch.cuda` name and `device="cuda"` that LMDeploy hard-codes lands on the CPU.

On a card, torch_npu's `transfer_to_npu` does the same with the NPU in place of the CPU; this is its counterpart for a
machine with no card. It changes torch for the whole process, so it is installed by the CPU vendor only, once, and
`installed()` tells.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._device import _device_constructors

from ... import envs

_CPU: Final = torch.device("cpu")
_DEVICE_KEYWORDS: Final = ("device", "map_location")
_FACTORIES: Final = (
    *("arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "load"),
    *("logspace", "normal", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like"),
    *("randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros", "zeros_like"),
)
_NEW_METHODS: Final = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
_installed = False


class Stream:
    """A stream that orders nothing: work on a CPU has run when the call returns."""

    def __init__(self, device: object = None, priority: int = 0, **_: object) -> None:
        self.device = _CPU
        self.priority = priority
        self.cuda_stream = id(self)

    def wait_event(self, event: Event) -> None: ...

    def wait_stream(self, stream: Stream) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class Event:
    """An event that has always happened."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self, stream: Stream | None = None) -> None: ...

    def wait(self, stream: Stream | None = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        return 0.0


class _Streams(threading.local):
    def __init__(self) -> None:
        self.stack: list[Stream] = []


_DEFAULT_STREAM: Final = Stream()
_streams: Final = _Streams()


def current_stream(device: object = None) -> Stream:
    """Return the innermost stream entered in this thread: the cache engine asserts that it is not its own."""
    return _streams.stack[-1] if _streams.stack else _DEFAULT_STREAM


@contextlib.contextmanager
def stream(entered: Stream | None) -> Iterator[None]:
    if entered is None:
        yield
        return
    _streams.stack.append(entered)
    try:
        yield
    finally:
        # An asynchronous engine leaves contexts out of order, so remove this one, not the last.
        _streams.stack.remove(entered)


def _device(value: Any) -> Any:
    """Map a CUDA device in any spelling (string, torch.device, index) to the CPU."""
    if isinstance(value, str):
        return "cpu" if value.split(":")[0] == "cuda" else value
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    if isinstance(value, int) and not isinstance(value, bool):
        return _CPU
    return value


def _on_cpu(function: Callable[..., Any], *, first_is_device: bool = False) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if first_is_device and len(args) > 1:
            args = (args[0], _device(args[1]), *args[2:])
        for key in _DEVICE_KEYWORDS:
            if kwargs.get(key) is not None:
                kwargs[key] = _device(kwargs[key])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return call


def _with_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
    """LMDeploy asks for the collective library of the *cuda* backend by name; transfer_to_npu maps it to hccl."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple("gloo" if isinstance(a, str) and a in ("nccl", "hccl") else a for a in args)
        if kwargs.get("backend") in ("nccl", "hccl"):
            kwargs["backend"] = "gloo"
        return function(*args, **kwargs)

    return call


def installed() -> bool:
    return _installed


def install() -> None:
    """Install the names; a second call does nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    # torch remembers here, at its first use, which functions `with torch.device("meta")` is for. It has to see its own,
    # or the context is passed over, and transformers leaves rotary frequencies as memory held them.
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in _NEW_METHODS:
        setattr(Tensor, name, _on_cpu(getattr(Tensor, name)))
    _replace(
        Tensor,
        to=_on_cpu(Tensor.to, first_is_device=True),
        cuda=lambda self, *_, **__: self,
        pin_memory=lambda self, *_, **__: self,
        record_stream=lambda self, _: None,
    )
    _replace(
        nn.Module,
        to=_on_cpu(nn.Module.to, first_is_device=True),
        to_empty=_on_cpu(nn.Module.to_empty),
        cuda=lambda self, *_, **__: self,
    )
    _install_device_context()
    _install_cuda_module()
    _install_collectives()


def _replace(owner: Any, **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(owner, name, value)


def _install_device_context() -> None:
    """`with torch.device("cuda")` reaches factories without a keyword, through this mode."""
    from torch.utils._device import DeviceContext

    original = DeviceContext.__init__

    def init(self: Any, device: Any) -> None:
        original(self, _device(device))

    DeviceContext.__init__ = init  # type: ignore[method-assign]


def _install_cuda_module() -> None:
    memory = int(envs.CPU_MEMORY.get())
    properties = types.SimpleNamespace(
        name="cpu", major=0, minor=0, total_memory=memory, uuid="cpu", multi_processor_count=1
    )

    def answer(value: Any) -> Callable[..., Any]:
        # A new function for every name: torch._dynamo's tables refuse one object under two names.
        return lambda *_, **__: value

    _replace(
        torch.cuda,
        Stream=Stream,
        Event=Event,
        stream=stream,
        current_stream=current_stream,
        default_stream=lambda device=None: current_stream(device),
        synchronize=answer(None),
        empty_cache=answer(None),
        ipc_collect=answer(None),
        set_device=answer(None),
        reset_peak_memory_stats=answer(None),
        current_device=answer(0),
        device_count=answer(1),
        mem_get_info=answer((memory, memory)),
        memory_allocated=answer(0),
        memory_reserved=answer(0),
        max_memory_allocated=answer(0),
        get_device_name=answer("cpu"),
        get_device_capability=answer((0, 0)),
        get_device_properties=answer(properties),
        is_current_stream_capturing=answer(False),
        device=lambda *_: contextlib.nullcontext(),
    )


def _install_collectives() -> None:
    import torch.distributed as dist

    if not dist.is_available():
        return
    from torch.distributed import distributed_c10d as c10d

    wrapped = _with_gloo(c10d.init_process_group)
    _replace(c10d, init_process_group=wrapped, _new_group_with_tag=_with_gloo(c10d._new_group_with_tag))
    _replace(dist, init_process_group=wrapped)
