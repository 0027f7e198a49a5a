"""Helpers of the tests: tolerances, comparison, guarded pools, and the guard against host reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)

# RMS error over RMS of the fp64 definition (docs: "Accuracy"). Loosening one needs a CHANGELOG "Numerics" line.
_FP32: Final[Mapping[str, float]] = {
    "clamped_moe": 2e-6,
    "conv": 2e-6,
    "delta_rule": 2e-5,
    "hyper_connection": 2e-6,
    "kda": 2e-5,
    "kpool": 2e-6,
    "latent": 2e-6,
    "norm": 2e-6,
}
TOLERANCE: Final[Mapping[tuple[str, torch.dtype], float]] = {
    **{(family, torch.float32): limit for family, limit in _FP32.items()},
    **{(family, torch.bfloat16): 8e-3 for family in _FP32},
    **{(family, torch.float16): 2e-3 for family in _FP32},
}


def rms_error(got: Tensor, want: Tensor) -> float:
    """Return RMS(got - want) / RMS(want), in fp64; 0 for two empty or two zero tensors."""
    g, w = got.double(), want.double()
    if w.numel() == 0:
        return 0.0
    scale, diff = w.square().mean().sqrt().item(), (g - w).square().mean().sqrt().item()
    return diff if scale == 0 else diff / scale


def assert_close(name: str, got: Tensor, want: Tensor, limit: float) -> None:
    """Compare a result with the definition: shape, finiteness, and RMS error over RMS of the reference."""
    assert got.shape == want.shape, f"{name}: shape {list(got.shape)}, wanted {list(want.shape)}"
    bad = ~torch.isfinite(got)
    assert not bool(bad.any()), f"{name}: {int(bad.sum())} values are not finite"
    error = rms_error(got, want)
    if error > limit:
        at = int((got.double() - want.double()).abs().argmax())
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), got.shape))
        raise AssertionError(
            f"{name}: RMS error {error:.3g} of the reference, limit {limit:.3g}; worst at {index}: "
            f"got {got.flatten()[at].item():.9g}, wanted {want.flatten()[at].item():.9g}"
        )


def guarded_pool(
    shape: Sequence[int], dtype: torch.dtype, *, guard: int = 2, fill: float = 777.0
) -> tuple[Tensor, Tensor]:
    """Return (pool, storage): a strided pool view inside a larger storage whose other bytes hold `fill`.

    The slot stride of the view is larger than a slot, and whole guard rows stand before and after it.
    """
    slots, *inner = shape
    storage = torch.full((slots + 2 * guard, 3, *inner), fill, dtype=dtype)
    return storage[guard : guard + slots, 1], storage


def untouched(storage: Tensor, before: Tensor, pool: Tensor, allowed: Sequence[int]) -> bool:
    """Tell whether `storage` equals `before` bit for bit outside the slots `allowed` of the view `pool`."""
    now = storage.clone()
    view = now.as_strided(pool.size(), pool.stride(), pool.storage_offset())
    old = before.clone().as_strided(pool.size(), pool.stride(), pool.storage_offset())
    for slot in allowed:
        view[slot] = old[slot]
    bits = {4: torch.int32, 2: torch.int16, 8: torch.int64}[now.element_size()]
    return bool((now.view(bits) == before.view(bits)).all())


class HostRead(AssertionError):
    """A device value was read on the host inside a guarded region."""


_READING_OPS: Final = frozenset(
    {"_local_scalar_dense", "item", "nonzero", "nonzero_static", "masked_select", "is_nonzero", "equal", "argwhere",
     "unique_dim", "_unique2", "unique_consecutive", "bincount"}
)  # fmt: skip
READING_METHODS: Final = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "cpu", "nonzero")


def seen_through(mode: TorchDispatchMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` for a dispatch mode; of an operator of this package, let the mode see the calls it is made of.

    PyTorch turns a mode off while it handles a call, so that the inside of an operator would go unseen.
    """
    if func.namespace != "dlinfer_ext":
        return func(*args, **kwargs)
    with mode:
        return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)


def host_read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return why a dispatched call needs a device value on the host, or None."""
    name = func.overloadpacket.__name__
    if name in _READING_OPS:
        return f"{name} reads a device value on the host"
    if name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index") and any(
        isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
    ):
        return f"{name} with a boolean mask has a shape that depends on data"
    if name == "repeat_interleave" and kwargs.get("output_size") is None and len(args) < 2:
        return "repeat_interleave without output_size has a shape that depends on data"
    return None


class _HostReadMode(TorchDispatchMode):
    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        why = host_read(func, args, kwargs)
        if why:
            raise HostRead(why)
        return seen_through(self, func, args, kwargs)


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Raise HostRead on anything that a captured graph forbids: .item(), .tolist(), bool(tensor), nonzero, masks."""

    def refuse(name: str) -> Callable[..., Any]:
        def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            raise HostRead(f"Tensor.{name}() reads a device value on the host")

        return method

    with ExitStack() as stack:
        for name in READING_METHODS:
            stack.enter_context(mock.patch.object(Tensor, name, refuse(name)))
        stack.enter_context(_HostReadMode())
        yield
