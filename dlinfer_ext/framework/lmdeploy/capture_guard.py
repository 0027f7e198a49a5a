"""Whether a step may be captured in a graph: two steps of one shape must be the same calls on the same memory.

A captured graph replays the calls of one step with whatever the buffers then hold. So nothing may be read on the host,
and neither the calls, nor their shapes and numbers, nor what they allocate, nor the addresses of what lives outside the
step (weights, pools, buffers) may depend on lengths, slots, tokens or acceptance. `record` lists one step's calls,
`differences` compares two such lists, and `watch` does both in a running engine once `enable` was called.

What a host makes before the model's forward (input tensors, block tables) is not captured on a card, so not guarded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from unittest import mock

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ...testing import READING_METHODS, host_read, seen_through

# The CPU stand-in's own operators that read lengths or route tokens on the host: on a card dlinfer's kernels stand
# there. Each counts as one call on the tensors it is given; its inside is not looked at.
EXCLUDED: Final = ("prefill_attention", "paged_prefill_attention", "paged_decode_attention", "fused_moe")
MOST_PROBLEMS: Final = 20
MOST_VALUES: Final = 64  # of a tensor of Python numbers


@dataclass(frozen=True)
class Value:
    """One tensor of a call.

    Attributes:
        shape, strides, dtype: of the tensor.
        place: address of its first element if it lives outside the step, else None.
        nbytes: bytes of the memory that the call made for it, 0 for a view or an existing tensor.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    place: int | None
    nbytes: int


@dataclass(frozen=True)
class Call:
    """One call: its name, its tensors and other arguments in order, and its results."""

    name: str
    inputs: tuple[object, ...]
    outputs: tuple[object, ...]


@dataclass
class Step:
    """What one step did: its calls in order, and every host read."""

    calls: list[Call] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)


def _flat(value: object) -> Iterator[object]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _flat(item)
    else:
        yield value


class _Recorder(TorchDispatchMode):
    """Write down every call below it, the insides of this package's operators included."""

    def __init__(self, step: Step) -> None:
        TorchDispatchMode.__init__(self)
        self.step = step
        self.inside: dict[int, Tensor] = {}  # memory made in this step, kept so that no address is given twice
        self.paused = False

    def _value(self, value: object, known: frozenset[int] | None) -> object:
        """Describe one argument, or one result if `known` holds the memory of the arguments."""
        if not isinstance(value, Tensor):
            return value if isinstance(value, (int, float, bool, str, type(None))) else str(value)
        storage = value.untyped_storage()
        address, nbytes = storage.data_ptr(), 0
        if known is not None and address not in known and address not in self.inside:
            self.inside[address] = value
            nbytes = storage.nbytes()
        outside = address not in self.inside and address != 0
        place = value.data_ptr() if outside else None
        return Value(tuple(value.shape), value.stride(), str(value.dtype).removeprefix("torch."), place, nbytes)

    def note(self, name: str, arguments: object, results: object) -> None:
        """Write down one call that was made."""
        given = list(_flat(arguments))
        known = frozenset(v.untyped_storage().data_ptr() for v in given if isinstance(v, Tensor))
        inputs = tuple(self._value(v, None) for v in given)
        outputs = tuple(self._value(v, known) for v in _flat(results) if isinstance(v, Tensor))
        self.step.calls.append(Call(name, inputs, outputs))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        why = host_read(func, args, kwargs)
        if why:
            self.step.reads.append(f"call {len(self.step.calls)}: {why}")
        out = seen_through(self, func, args, kwargs)
        if func.overloadpacket.__name__ == "lift_fresh":
            self._constant(args[0])
        elif func.namespace not in ("profiler", "dlinfer_ext"):
            self.note(str(func), (args, kwargs), out)
        return out

    def _constant(self, value: Tensor) -> None:
        """Write down a tensor made of Python numbers: its values are part of what a graph keeps."""
        self.inside[value.untyped_storage().data_ptr()] = value
        self.paused = True
        values = tuple(value.flatten()[:MOST_VALUES].tolist())
        self.paused = False
        self.step.calls.append(Call("a tensor of Python numbers", (self._value(value, None), *values), ()))


def _watched_method(recorder: _Recorder, name: str) -> Callable[..., Any]:
    original = getattr(Tensor, name)

    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if recorder.paused:
            return original(self, *args, **kwargs)
        recorder.step.reads.append(f"call {len(recorder.step.calls)}: Tensor.{name}() reads a device value on the host")
        with _disable_current_modes():  # the read itself would be reported a second time
            return original(self, *args, **kwargs)

    return method


def _whole(recorder: _Recorder, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        was, recorder.paused = recorder.paused, True
        try:
            with _disable_current_modes():
                out = original(*args, **kwargs)
        finally:
            recorder.paused = was
        # Of its arguments the tensors only: numbers such as the longest history are no part of what a card captures.
        recorder.note(f"dlinfer.ops.{name}", [v for v in _flat((args, kwargs)) if isinstance(v, Tensor)], out)
        return out

    return call


@contextmanager
def record(excluded: Sequence[str] = EXCLUDED) -> Iterator[Step]:
    """Give a Step that fills while the block runs; nothing is refused.

    Args:
        excluded: functions of `dlinfer.ops` that count as one call each.
    """
    step = Step()
    recorder = _Recorder(step)
    stand_in = sys.modules.get("dlinfer.ops")
    with ExitStack() as stack:
        for name in READING_METHODS:
            stack.enter_context(mock.patch.object(Tensor, name, _watched_method(recorder, name)))
        for name in excluded if stand_in else ():
            stack.enter_context(mock.patch.object(stand_in, name, _whole(recorder, name, getattr(stand_in, name))))
        stack.enter_context(recorder)
        yield step
    recorder.inside.clear()


def _value_difference(what: str, now: object, then: object) -> str | None:
    if now == then:
        return None
    if not (isinstance(now, Value) and isinstance(then, Value)):
        return f"{what} is {now}, in the first step {then}: a graph keeps the first"
    if (now.shape, now.dtype) != (then.shape, then.dtype):
        return f"{what} is {now.dtype} {list(now.shape)}, in the first step {then.dtype} {list(then.shape)}"
    if now.nbytes != then.nbytes:
        return f"{what} allocates {now.nbytes} bytes, in the first step {then.nbytes}"
    if now.place != then.place:
        return f"{what}, {now.dtype} {list(now.shape)} outside the step, has moved: a graph keeps the first address"
    return f"{what} has strides {list(now.strides)}, in the first step {list(then.strides)}"


def differences(first: Step, other: Step) -> list[str]:
    """Return why `other` is not what a graph captured from `first` would replay; host reads of both included."""
    found = [f"host read in {which}: {r}" for which, s in (("first", first), ("later", other)) for r in s.reads]
    for i, (then, now) in enumerate(zip(first.calls, other.calls, strict=False)):
        if (now.name, len(now.inputs), len(now.outputs)) != (then.name, len(then.inputs), len(then.outputs)):
            return [*found, f"call {i} is {now.name}, in the first step {then.name}"]
        parts = (("argument", now.inputs, then.inputs), ("result", now.outputs, then.outputs))
        for kind, values, before in parts:
            for n, (a, b) in enumerate(zip(values, before, strict=True)):
                why = _value_difference(f"call {i} {now.name}: {kind} {n}", a, b)
                if why:
                    found.append(why)
    if len(first.calls) != len(other.calls):
        found.append(f"{len(other.calls)} calls, in the first step {len(first.calls)}")
    return found


class CaptureUnsafe(AssertionError):
    """A step could not be captured in a graph, or not be replayed from the capture of another."""


def assert_capturable(step: Callable[[], object], *changes: Callable[[], object]) -> int:
    """Run `step`, then once more after each of `changes`, and compare each run with the first.

    Args:
        step: one step on static buffers.
        changes: each writes other contents of the same shapes into the buffers.

    Returns:
        How many calls a step is made of.

    Raises:
        CaptureUnsafe: a host read, or a run that is not the first one's calls on the first one's memory.
    """
    first: Step | None = None
    for change in (None, *changes):
        if change is not None:
            change()
        with record() as run:
            step()
        first = first or run
        found = differences(first, run) if first is not run else [f"host read: {r}" for r in run.reads]
        if found:
            raise CaptureUnsafe("\n".join(found[:MOST_PROBLEMS]))
    assert first is not None
    return len(first.calls)


# --- in a running engine ---------------------------------------------------------------------------------------------


@dataclass
class Watch:
    """What was seen since `enable`.

    Attributes:
        first: the first step of each shape.
        compared: how many later steps were compared with a first one.
        problems: what was found, each once.
    """

    first: dict[tuple[Any, ...], Step] = field(default_factory=dict)
    compared: int = 0
    problems: list[str] = field(default_factory=list)


_watch: Watch | None = None


def enable() -> Watch:
    """Compare every later step of a bucket with its first one, in this process, from now on; see `watch`."""
    global _watch
    _watch = Watch()
    return _watch


@contextmanager
def watch(key: tuple[Any, ...]) -> Iterator[None]:
    """Guard the model's forward of one padded step; `key` tells model and shape. Does nothing before `enable`."""
    seen = _watch
    if seen is None:
        yield
        return
    with record() as step:
        yield
    first = seen.first.setdefault(key, step)
    seen.compared += first is not step
    found = differences(first, step) if first is not step else [f"host read: {r}" for r in step.reads]
    seen.problems += [p for p in found if p not in seen.problems][: max(0, MOST_PROBLEMS - len(seen.problems))]
