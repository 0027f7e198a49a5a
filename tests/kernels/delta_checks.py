"""Both delta rules against their definition: inputs, pools among guard rows, and the comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlinfer_ext.testing import TOLERANCE, assert_close, guarded_pool, no_host_reads


class Dims(NamedTuple):
    H: int = 2
    HV: int = 4
    K: int = 8
    V: int = 12


SMALL = Dims()


class Rule(NamedTuple):
    """A delta rule: its operators and their definitions.

    Attributes:
        family: of `TOLERANCE`.
        channels: whether g is [.., HV, K].
        gating: a step that computes its gates, its definition, and what makes their inputs from the leading dimensions,
            the dimensions, the dtype and a shift; None if there is none.
    """

    family: str
    prefill: Callable[..., Tensor]
    update: Callable[..., Tensor]
    define_prefill: Callable[..., Tensor]
    define_update: Callable[..., Tensor]
    channels: bool
    gating: tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[..., dict[str, Any]]] | None = None


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def rows(self, part: Any) -> Inputs:
        return Inputs(*(x[part] for x in self))


def make_inputs(
    lead: Sequence[int],
    dims: Dims = SMALL,
    dtype: torch.dtype = torch.float32,
    gate: Tensor | None = None,
    seed: int = 0,
    channels: bool = False,
) -> Inputs:
    """Return q, k, v as views of one projection and g, beta as views of another, as a model has them.

    `gate` [*lead, 1] is of all heads and channels, [*lead, HV, K] of each.
    """
    generator = torch.Generator().manual_seed(seed)
    h, hv, k, v = dims
    wide = torch.randn(*lead, 2 * h * k + hv * v + 5, generator=generator).to(dtype)
    gates = torch.rand(*lead, 2 * hv + 3, generator=generator)
    g = (-3 * gates).to(dtype)[..., hv + 1 : 2 * hv + 1]
    if channels:
        wider = torch.rand(*lead, hv * k + 3, generator=generator)
        g = (-3 * wider).to(dtype)[..., 3:].unflatten(-1, (hv, k))
    if gate is not None:
        g = (gate[..., None] if channels and gate.shape[-1] == 1 else gate).expand(g.shape)
    return Inputs(
        wide[..., : h * k].unflatten(-1, (h, k)),
        wide[..., h * k : 2 * h * k].unflatten(-1, (h, k)),
        wide[..., 2 * h * k + 3 : 2 * h * k + 3 + hv * v].unflatten(-1, (hv, v)),
        g,
        gates.to(dtype)[..., :hv],
    )


def make_pool(
    slots: int, dims: Dims = SMALL, *, v_first: bool = True, ring: int | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return (pool, storage): random states in a strided view among guard rows."""
    inner = (dims.HV, dims.V, dims.K) if v_first else (dims.HV, dims.K, dims.V)
    pool, storage = guarded_pool((slots, *((ring,) if ring else ()), *inner), dtype)
    pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(1)))
    return pool, storage


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({4: torch.int32, 2: torch.int16}[x.element_size()])


def assert_only_written(storage: Tensor, before: Tensor, pool: Tensor, entries: Sequence[tuple[int, ...]]) -> None:
    """Assert that nothing but the entries of the pool differs from before, bit for bit."""
    want = before.clone()
    view = want.as_strided(pool.size(), pool.stride(), pool.storage_offset())
    for entry in entries:
        view[entry] = pool[entry]
    assert torch.equal(bits(storage), bits(want)), "a state that is not addressed was written"


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def entry(slot: int, history: int | None, ring: int | None) -> tuple[int, ...]:
    return (slot,) if ring is None else (slot, (history or 0) % ring)


def check_prefill(
    rule: Rule,
    lengths: Sequence[int],
    *,
    dims: Dims = SMALL,
    slots: Sequence[int] | None = None,
    history: Sequence[int] | None = None,
    v_first: bool = True,
    ring: int | None = None,
    dtype: torch.dtype = torch.float32,
    pool_dtype: torch.dtype = torch.float32,
    gate: Tensor | None = None,
    tail: int = 0,
    dirty: float | None = None,
    pad_slot_id: int = -1,
    limit: float | None = None,
    host: bool = True,
    **options: Any,
) -> Tensor:
    """Run prefill and the definition on the same input; compare outputs, final states, and what must not be touched."""
    rows, total = len(lengths), sum(lengths) + tail
    x = make_inputs([total], dims, dtype, gate, channels=rule.channels)
    pool, storage = make_pool(rows + 3, dims, v_first=v_first, ring=ring, dtype=pool_dtype)
    if dirty is not None:
        pool.fill_(dirty)
    before, want_pool = storage.clone(), pool.double()
    index = None if slots is None else torch.tensor(slots, dtype=torch.int32)
    past = None if history is None else torch.tensor(history, dtype=torch.int32)
    common: dict[str, Any] = {
        "cu_seqlens": offsets(lengths).int(), "state_indices": index, "history_lens": past, "state_v_first": v_first,
        "use_qk_l2norm": True, "pad_slot_id": pad_slot_id, **options,
    }  # fmt: skip
    copies = [y.clone() for y in x]
    o = rule.prefill(*x, pool, **common, host_lengths=lengths if host else None)
    want = rule.define_prefill(*x, want_pool, **common)
    assert all(torch.equal(a, b) for a, b in zip(x, copies, strict=True)), "an input was changed"
    assert o.dtype == dtype
    assert_close("o", o, want, limit or TOLERANCE[rule.family, dtype])
    live = [
        (slot, 0 if history is None else history[i], n)
        for i, (slot, n) in enumerate(zip(slots or range(rows), lengths, strict=True))
        if n and slot >= 0 and slot != pad_slot_id and (history is None or history[i] >= 0)
    ]
    entries = [entry(slot, h + n, ring) for slot, h, n in live]
    for e in entries:
        assert_close(f"state {e}", pool[e], want_pool[e], limit or TOLERANCE[rule.family, pool_dtype])
    assert_only_written(storage, before, pool, entries)
    return o


def check_update(
    rule: Rule,
    rows: int,
    steps: int,
    *,
    dims: Dims = SMALL,
    slots: Any = None,
    history: Sequence[int] | None = None,
    accepted: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    v_first: bool = True,
    ring: int | None = None,
    dtype: torch.dtype = torch.float32,
    pool_dtype: torch.dtype = torch.float32,
    gate: Tensor | None = None,
    dirty: float | None = None,
    pad_slot_id: int = -1,
    num_slots: int | None = None,
    gating: dict[str, Any] | None = None,
) -> Tensor:
    """Run a decode or verify step and the definition, under the host-read guard; compare as `check_prefill` does.

    With `gating` the step computes its gates; its entries are those of `make_gating` and options of the softplus.
    """
    lead = [rows, steps] if lengths is None else [sum(lengths) + 1]
    x = make_inputs(lead, dims, dtype, gate, channels=rule.channels)
    index = None if slots is None else torch.tensor(slots, dtype=torch.int32)
    count = num_slots or rows + 3
    pool, storage = make_pool(count, dims, v_first=v_first, ring=ring, dtype=pool_dtype)
    if dirty is not None:
        pool.fill_(dirty)
    before, want_pool = storage.clone(), pool.double()
    common: dict[str, Any] = {
        "state_indices": index,
        "history_lens": None if history is None else torch.tensor(history, dtype=torch.int32),
        "num_accepted_tokens": None if accepted is None else torch.tensor(accepted, dtype=torch.int32),
        "cu_seqlens": None if lengths is None else offsets(lengths),
        "state_v_first": v_first,
        "use_qk_l2norm": True,
        "pad_slot_id": pad_slot_id,
    }
    given: dict[str, Any] = x._asdict()
    run, define = rule.update, rule.define_update
    if gating is not None:
        assert rule.gating is not None
        run, define, make_gating = rule.gating
        shift = gating.pop("shift", 0.0)
        given = {"q": x.q, "k": x.k, "v": x.v, **make_gating(lead, dims, dtype, shift)}
        common |= gating
    copies = {name: y.clone() for name, y in given.items()}
    with no_host_reads():
        o = run(**given, state=pool, **common)
    want = define(**given, state=want_pool, **common)
    assert all(torch.equal(y, given[name]) for name, y in copies.items()), "an input was changed"
    assert o.dtype == dtype
    assert_close("o", o, want, TOLERANCE[rule.family, dtype])
    changed: list[tuple[int, ...]] = []
    for i in range(rows):
        ids = [i] if slots is None else torch.tensor(slots[i]).reshape(-1).tolist()
        tokens = steps if lengths is None else lengths[i]
        h = 0 if history is None else history[i]
        if isinstance(slots, list) and isinstance(slots[i], list):
            a = 1 if accepted is None else min(max(accepted[i], 1), len(ids))
            needed = [ids[a - 1], *ids[:tokens]]
            targets: list[tuple[int, ...]] = [(s,) for s in ids[:tokens]]
        elif ring:
            needed, targets = ids, [entry(ids[0], h + t + 1, ring) for t in range(tokens)]
        else:
            needed, targets = ids, [(ids[0],)]
        if tokens and h >= 0 and all(s >= 0 and s != pad_slot_id for s in needed):
            changed += targets
    for e in changed:
        assert_close(f"state {e}", pool[e], want_pool[e], TOLERANCE[rule.family, pool_dtype])
    assert_only_written(storage, before, pool, changed)
    return o
