"""Clearing and copying slots against the definition: nothing but the addressed slots, and every bit as it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlinfer_ext.kernels.state_pool import reference
from dlinfer_ext.ops import copy_slots, zero_slots
from dlinfer_ext.testing import guarded_pool, no_host_reads, untouched

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64)
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FORMS: Mapping[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "zero": (zero_slots, reference.zero_slots),
    "copy": (copy_slots, reference.copy_slots),
}
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def bits(t: Tensor) -> Tensor:
    return t.view(BITS[t.element_size()])


def random_bits_(t: Tensor, seed: int = 0) -> Tensor:
    """Fill a tensor with random bits: NaNs of every payload among them."""
    generator = torch.Generator().manual_seed(seed)
    info = torch.iinfo(BITS[t.element_size()])
    bits(t).copy_(torch.randint(info.min, info.max, t.shape, generator=generator, dtype=torch.int64))
    return t


def pool_like(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    pool, storage = guarded_pool(shape, torch.float32 if dtype.is_floating_point else torch.int64)
    del pool
    storage = random_bits_(storage.to(dtype))
    return storage[2 : 2 + shape[0], 1], storage


def both(call: str, pool: Tensor, storage: Tensor, *slots: list[int], ids: torch.dtype = torch.int64) -> Tensor:
    """Run operator and definition on equal storages and compare all of their bits; return the operator's storage."""
    function, definition = FORMS[call]
    wanted = storage.clone()
    given = [torch.tensor(s, dtype=ids) for s in slots]
    definition(wanted.as_strided(pool.size(), pool.stride(), pool.storage_offset()), *given)
    before = storage.clone()
    function(pool, *given)
    assert torch.equal(bits(storage), bits(wanted))
    return before


@EACH_DTYPE
@pytest.mark.parametrize("shape", [(5,), (5, 1), (6, 7), (6, 3, 5), (4, 2, 3, 40), (5, 1500)], ids=str)
def test_only_the_addressed_slots_change(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    pool, storage = pool_like(shape, dtype)
    before = both("zero", pool, storage, [3, -1, 1, 3, -7])
    if dtype.itemsize > 1:
        assert untouched(storage, before, pool, [1, 3])
    assert not bool(bits(pool)[[1, 3]].any())
    pool, storage = pool_like(shape, dtype)
    before = both("copy", pool, storage, [3, -1, 1, 1], [0, 2, -5, 2], ids=torch.int32)
    if dtype.itemsize > 1:
        assert untouched(storage, before, pool, [0, 2])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3, 2, 1), (0, 2, 3, 1), (3, 0, 1, 2)], ids=str)
def test_views_in_any_order_and_with_gaps(order: tuple[int, ...]) -> None:
    for steps in product((1, 2), repeat=2):
        storage = random_bits_(torch.empty(6, 6, 10, 20))
        pool = storage[:, : 5 : steps[0], 1:9, :: steps[1]].permute(order)
        both("zero", pool, storage, [2, 0])
        random_bits_(storage, 1)
        both("copy", pool, storage, [2, 1], [0, 3])


def test_five_levels_of_stride() -> None:
    storage = random_bits_(torch.empty(4, 4, 4, 4, 4, 4))
    pool = storage[:, ::2, ::3, 1:3, ::2, 1:]
    both("zero", pool, storage, [3])
    both("copy", pool, storage, [1, 0], [3, 2])


@pytest.mark.parametrize("slots", [[-1, -1], [-1], []], ids=str)
def test_no_slot_at_all_writes_nothing(slots: list[int]) -> None:
    ones = [1] * len(slots)
    for call, names in (("zero", (slots,)), ("copy", (slots, ones)), ("copy", (ones, slots))):
        pool, storage = pool_like((3, 9), torch.bfloat16)
        before = both(call, pool, storage, *names)
        assert torch.equal(bits(storage), bits(before))


def test_empty_pools() -> None:
    for shape in ((0, 4), (3, 0)):
        zero_slots(torch.empty(shape), torch.tensor([-1]))
        copy_slots(torch.empty(shape), torch.tensor([-1]), torch.tensor([-1]))


def test_more_tiles_than_a_grid_holds() -> None:
    """R81: 512 slots at once, in a pool of one layer among two."""
    storage = torch.ones(600, 2, 64, 128, dtype=torch.bfloat16)
    pool = storage[:, 1]
    zero_slots(pool, torch.arange(512))
    assert float(storage.sum(dtype=torch.float64)) == 600 * 64 * 128 + 88 * 64 * 128


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    shape=st.lists(st.integers(1, 9), min_size=0, max_size=3),
    slots=st.integers(1, 8),
    named=st.integers(0, 6),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
def test_matches_the_definition_on_drawn_cases(
    shape: list[int], slots: int, named: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    pool, storage = pool_like((slots, *shape), dtype)
    both("zero", pool, storage, torch.randint(-2, slots, (named,), generator=generator).tolist())
    # Half of the slots are sources, the others targets; some pairs are left out.
    order = torch.randperm(slots, generator=generator).tolist()
    targets = order[: min(named, slots // 2)]
    sources = [order[slots // 2 + i % (slots - slots // 2)] for i in range(len(targets))]
    out = torch.rand(len(targets), generator=generator) < 0.3
    both("copy", pool, storage, [-1 if o else s for s, o in zip(sources, out.tolist(), strict=True)], targets)


def test_reads_nothing_on_the_host() -> None:
    pool = torch.randn(4, 3)
    slots, more = torch.tensor([1, -1]), torch.tensor([2, 3])
    with no_host_reads():
        zero_slots(pool, slots)
        copy_slots(pool, slots, more)


@pytest.mark.parametrize(
    ("source", "target", "argument"),
    [([1], [4], "target"), ([4], [1], "source"), ([0, 1], [2, 2], "target"), ([0, 1], [1, 2], "target")],
    ids=["target-beyond", "source-beyond", "named-twice", "source-of-another"],
)
def test_what_only_the_device_knows_is_checked_on_request(
    source: list[int], target: list[int], argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLINFER_EXT_CHECK", "1")
    pool = torch.randn(4, 3)
    with pytest.raises(ValueError, match=rf"^copy_slots: argument '{argument}' .*wanted"):
        copy_slots(pool, torch.tensor(source), torch.tensor(target))
    with pytest.raises(ValueError, match=r"^zero_slots: argument 'slots' .*wanted below 4, the slots"):
        zero_slots(pool, torch.tensor([0, 4]))
    copy_slots(pool, torch.tensor([0, -1, 3]), torch.tensor([1, 1, -1]))
