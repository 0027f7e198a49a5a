"""What one run of a formulation asks of PyTorch: calls, host reads, bytes and kernel launches.

Counted as PyTorch dispatches them, on any device. Of an operator of this package the calls it is made of are counted,
not the operator as one. These are counts of what a formulation asks for, not of what a compiler or a cache makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlinfer_ext.testing import host_read, seen_through
from dlinfer_ext.toolchain import count, native

from .bench_record import Counts

# Methods that read a value without a call that PyTorch dispatches on a CPU. On a card `cpu` copies and waits.
SILENT_READS = ("tolist", "numpy", "cpu")
# Reserve memory or tell about a tensor, and move no element.
FREE = frozenset(
    {"empty", "new_empty", "empty_like", "new_empty_strided", "empty_strided", "set_", "resize_", "_unsafe_view"}
)


class Counter(TorchDispatchMode):
    """Counts while it is on, in the thread that turned it on.

    Attributes:
        calls: of functions that are neither views nor mere reservations of memory, host reads included.
        host_reads: reads by the host, dispatched ones (`item`, `bool`, nonzero, boolean masks) and `SILENT_READS`.
        bytes: of each call's tensors, taken and given, each time; see `_bytes`.
    """

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.calls = 0
        self.host_reads = 0
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = seen_through(self, func, args, kwargs)
        if func.namespace == "dlinfer_ext" or func.is_view or func.overloadpacket.__name__ in FREE:
            return out
        self.calls += 1
        self.host_reads += host_read(func, args, kwargs) is not None
        self.bytes += _bytes(func, args, kwargs, out)
        return out


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return the bytes that a call reads and writes.

    What a call fills without reading it is not read, and of a pool that is gathered from or scattered to, only what is
    taken or given counts, once on either side.
    """
    name = func.overloadpacket.__name__
    given = sum(_size(t) for t in tree_leaves(out) if isinstance(t, Tensor))
    taken = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if name in ("index", "index_select", "gather", "embedding"):
        return 2 * given + sum(_size(t) for t in taken[1:])
    if name in ("index_put_", "_index_put_impl_", "index_copy_", "scatter_", "index_add_", "scatter_add_"):
        values = taken[-1] if len(taken) > 2 else taken[1]
        return sum(_size(t) for t in taken[1:]) + _size(values)
    if name in ("copy_", "fill_", "zero_", "exponential_", "uniform_"):
        return given + sum(_size(t) for t in taken[1:])
    return given + sum(_size(t) for t in taken)


@contextmanager
def counting() -> Iterator[Counter]:
    """Count what is dispatched inside, in this thread."""
    counter = Counter()

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            counter.host_reads += 1
            return method(tensor, *args, **kwargs)

        return read

    with ExitStack() as stack:
        for name in SILENT_READS:
            stack.enter_context(mock.patch.object(Tensor, name, counted(getattr(Tensor, name))))
        stack.enter_context(counter)
        yield counter


def launches() -> int:
    """Return how many native Triton kernels this process has launched."""
    return native.launches()


def measure(run: Callable[[], object], *, kernel_bytes: bool = False) -> Counts:
    """Return the counts of one run, with the bytes that native kernels moved only if asked for.

    Args:
        run: what to count; it is called once, and once more with `kernel_bytes` if it launches kernels.
        kernel_bytes: count the kernels' accesses as `verify --count` does (toolchain/count.py), 10 to 135 times slower.
    """
    before = launches()
    with counting() as counter:
        run()
    launched = launches() - before
    moved: int | None = counter.bytes
    if launched:
        moved = None
        if kernel_bytes:
            with count.counting() as counted:
                run()
            moved = counter.bytes + sum(launch.bytes for launch in counted)
    return Counts(calls=counter.calls, host_reads=counter.host_reads, launches=launched, bytes=moved)
