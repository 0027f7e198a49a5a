"""Bad input of every argument of every public function: refused by name or served as defined, and no pool harmed."""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from dlinfer_ext import envs
from dlinfer_ext.ops import _registry
from dlinfer_ext.testing import guarded_pool, rms_error

from .bad_input import Case, Outcome, cases
from .bad_input_calls import POOLS, PUBLIC, TABLE, Arguments

pytestmark = pytest.mark.eager_only(reason="arguments are checked before a route is taken")

R, RS, EQ, S, D, UN, E, DUTY = Outcome
# Of the same numbers in another order of memory.
CLOSE: Final = 2e-6


def guarded(arguments: Arguments) -> Arguments:
    """Put pools between guard rows of larger tensors."""
    placed = dict(arguments)
    for name in POOLS & arguments.keys():
        if isinstance(arguments[name], Tensor):
            placed[name] = guarded_pool(arguments[name].shape, arguments[name].dtype)[0].copy_(arguments[name])
    return placed


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in an argument or a result."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, SimpleNamespace):
        yield from tensors(list(vars(value).values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors(part)


def memory(t: Tensor) -> Tensor:
    """Return all bytes of the storage of a tensor, guard rows included."""
    return torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).clone()


def outside(t: Tensor, storage: Tensor) -> Tensor:
    """Return bytes of a tensor's storage with its own elements blanked."""
    copy = storage.view(t.dtype).clone()
    copy.as_strided(t.size(), t.stride(), t.storage_offset()).zero_()
    return copy.view(torch.uint8)


def harm_to_memory(arguments: Arguments, before: Mapping[str, list[Tensor]], *, refused: bool) -> str:
    """Tell which argument was changed that may not be, or ""."""
    for name, storages in before.items():
        for t, old in zip(on_cpu(arguments[name]), storages, strict=True):
            new = memory(t)
            if name in POOLS and not refused:
                new, old = outside(t, new), outside(t, old)
            if not torch.equal(new, old):
                return f"the memory of {name} was changed"
    return ""


def on_cpu(value: Any) -> list[Tensor]:
    return [t for t in tensors(value) if t.device.type == "cpu"]


def on_meta(value: Any) -> Any:
    """Return arguments with every tensor on meta."""
    if isinstance(value, dict):
        return {name: on_meta(x) for name, x in value.items()}
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**on_meta(vars(value)))
    return value.to("meta") if isinstance(value, Tensor) else value


def shapes(result: Any) -> list[tuple[torch.Size, torch.dtype]]:
    return [(t.shape, t.dtype) for t in tensors(result)]


def run(case: Case, arguments: Arguments) -> Any:
    """Make a call with the same random numbers as every other."""
    torch.default_generator.manual_seed(1)
    return TABLE[case.call].function(**arguments)


def differs(got: Any, want: Any) -> bool:
    """Tell whether two results differ, up to the rounding of another order of memory."""
    one, other = list(tensors(got)), list(tensors(want))
    return len(one) != len(other) or any(
        g.shape != w.shape
        or g.dtype != w.dtype
        or (not rms_error(g, w) <= CLOSE if w.is_floating_point() else not torch.equal(g, w))
        for g, w in zip(one, other, strict=True)
    )


def misnamed(case: Case, error: Exception, outcome: Outcome) -> bool:
    """Tell whether a message names the operator and the argument less well than the outcome asks."""
    call = TABLE[case.call]
    names = "|".join(map(re.escape, (case.argument, *call.known_as.get(case.argument, ()))))
    begins = f"({'|'.join(map(re.escape, call.operators))}): argument '"
    if outcome is R:
        return not re.match(rf"{begins}({names})['.]", str(error))
    if not re.match(begins, str(error)):
        return True
    return outcome is RS and not re.search(rf"'({names})['.]", str(error))


def harm(case: Case, *, check: bool) -> str:
    """Try a case; return what came of it if that is not what has to, or ""."""
    call, outcome = TABLE[case.call], case.outcome(check=check)
    arguments = guarded(call.complete())
    valid = arguments[case.argument]
    arguments[case.argument] = case.kind.change(valid)
    before = {name: [memory(t) for t in on_cpu(value)] for name, value in arguments.items()}
    try:
        result = run(case, arguments)
    except (ValueError, TypeError) as error:
        if outcome in (EQ, S, D):
            return f"refused: {error}"
        if misnamed(case, error, outcome):
            return f"{type(error).__name__} without its names: {error}"
        return harm_to_memory(arguments, before, refused=True)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if outcome in (R, RS, UN):
        return "served"
    if not inspect.ismethod(call.function) and shapes(result) != shapes(run(case, on_meta(arguments))):
        return "the fake has other shapes"
    if outcome is not D and any(not bool(t.isfinite().all()) for t in on_cpu(result)):
        return "an output is not finite"
    if outcome is EQ:
        plain = guarded(call.complete())
        if differs(result, run(case, plain)):
            return "the outputs differ"
        if any(differs(arguments[name], plain[name]) for name in POOLS & plain.keys()):
            return "the pools differ"
    return harm_to_memory(arguments, before, refused=False)


def harms(name: str, *, check: bool) -> tuple[Counter[Outcome], list[str]]:
    """Try every case of a call; return how many had which outcome, and what was wrong."""
    tried, wrong = Counter[Outcome](), []
    for case in cases(name):
        outcome = case.outcome(check=check)
        tried[outcome] += 1
        if outcome is not DUTY:
            found = harm(case, check=check)
            if found:
                wrong.append(f"{case.argument} {case.kind.name} ({outcome.name}): {found}")
    return tried, wrong


@pytest.mark.parametrize("check", [False, True], ids=["unchecked", "checked"])
@pytest.mark.parametrize("name", TABLE)
def test_bad_input_is_refused_by_name_or_served_as_defined(
    name: str, check: bool, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    monkeypatch.setenv(envs.CHECK.name, str(int(check)))
    tried, wrong = harms(name, check=check)
    record_property("cases", tried.total())
    sys.stdout.write(f"{name}: {tried.total()} cases: {', '.join(f'{k.name} {n}' for k, n in tried.items())}\n")
    assert not wrong, f"{len(wrong)} of {tried.total()}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("check", [False, True], ids=["unchecked", "checked"])
@pytest.mark.parametrize("name", [n for n in TABLE if n != "RMSNormGated"])
def test_a_batch_without_rows_is_no_work(name: str, check: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.CHECK.name, str(int(check)))
    arguments = guarded(TABLE[name].empty())
    before = {n: [memory(t) for t in on_cpu(value)] for n, value in arguments.items()}
    pools = {id(arguments[n]) for n in POOLS & arguments.keys()}
    result = TABLE[name].function(**arguments)
    assert all(t.numel() == 0 for t in tensors(result) if id(t) not in pools)
    assert harm_to_memory(arguments, before, refused=True) == ""


# --- the table is whole -----------------------------------------------------------------------------------------------


def test_every_public_function_has_a_call() -> None:
    assert {call.public for call in TABLE.values()} == set(PUBLIC.values())


def test_every_operator_of_torch_library_is_reached() -> None:
    assert {name for call in TABLE.values() for name in call.operators} >= set(_registry.OPERATORS)


def test_every_argument_of_every_function_is_tried() -> None:
    """Also a new one: a tensor that no call gives, or an annotation without kinds, is an error."""
    for function in {call.function for call in TABLE.values()}:
        calls = [name for name, call in TABLE.items() if call.function == function]
        tried = {case.argument for name in calls for case in cases(name)}
        assert tried == set(inspect.signature(function).parameters), calls


def test_there_are_as_many_cases_as_there_were(record_property: Callable[[str, object], None]) -> None:
    tried = Counter[Outcome]()
    for check in (False, True):
        tried += Counter(case.outcome(check=check) for name in TABLE for case in cases(name))
    sys.stdout.write(f"{tried.total()} cases: {', '.join(f'{k.name} {n}' for k, n in tried.most_common())}\n")
    record_property("cases", tried.total())
    assert tried.total() >= 14_000
    # Most have to be refused, naming the argument itself.
    assert tried[R] >= 6_500
    assert tried[DUTY] <= 150


# --- negative controls ------------------------------------------------------------------------------------------------

# A check left out, and a call in which it shows.
LEFT_OUT: Final = {
    "require": "gated_rms_norm",
    "require_tensor": "zero_slots",
    "require_shape": "gated_delta_rule_update",
    "require_dtype": "causal_conv1d",
    "require_same_device": "latent_write",
    "require_int": "kpool_select",
    "require_real": "clamped_silu_and_mul",
    "require_flag": "gated_delta_rule",
    "require_choice": "causal_conv1d",
    "require_lengths": "kda",
}


def without(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a check out of every module of the operators."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("dlinfer_ext.ops.", "dlinfer_ext.vendor.ascend.compat.")) and hasattr(module, check):
            monkeypatch.setattr(module, check, lambda *args, **kwargs: None)


@pytest.mark.parametrize("check", LEFT_OUT)
def test_a_check_left_out_is_noticed(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without(check, monkeypatch)
    _, wrong = harms(LEFT_OUT[check], check=False)
    sys.stdout.write("\n".join(wrong[:3]))
    assert wrong


def test_a_pool_written_before_a_refusal_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    call = TABLE["copy_slots"]

    def copy_slots(pool: Tensor, source: Tensor, target: Tensor) -> None:
        pool[0] = 0
        call.function(pool, source, target)

    monkeypatch.setitem(TABLE, "copy_slots", replace(call, function=copy_slots))
    _, wrong = harms("copy_slots", check=False)
    assert any("the memory of pool was changed" in line for line in wrong)


def test_a_guard_row_written_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    call = TABLE["zero_slots"]

    def zero_slots(pool: Tensor, slots: Tensor) -> None:
        call.function(pool, slots)
        pool.as_strided((1,), (1,), 0).fill_(0)

    monkeypatch.setitem(TABLE, "zero_slots", replace(call, function=zero_slots))
    _, wrong = harms("zero_slots", check=False)
    assert any("the memory of pool was changed" in line for line in wrong)


def test_a_result_that_depends_on_strides_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    call = TABLE["hyper_connection_post"]

    def post(x: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Any:
        return call.function(x.as_strided(x.shape, (x.shape[1], 1)), streams, post, comb)

    monkeypatch.setitem(TABLE, "hyper_connection_post", replace(call, function=post))
    _, wrong = harms("hyper_connection_post", check=False)
    assert {"x strided", "x spread"} <= {line.partition(" (")[0] for line in wrong}
