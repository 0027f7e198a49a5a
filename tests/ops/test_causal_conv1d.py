"""The convolution's interface: signatures, declarations, and what it says of bad input."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dlinfer_ext.ops import _registry
from dlinfer_ext.ops.causal_conv1d import causal_conv1d, causal_conv1d_columns, causal_conv1d_update
from dlinfer_ext.vendor.ascend import triton_ops

Options = dict[str, Any]


def ints(*values: int) -> Tensor:
    return torch.tensor(values)


def prefill(**changes: Any) -> Tensor:
    options: Options = {
        "x": torch.randn(5, 3),
        "weight": torch.randn(4, 3),
        "conv_state": torch.zeros(4, 4, 3),
        "cu_seqlens": ints(0, 2, 5),
        "state_indices": ints(0, 2),
        "history_lens": ints(0, 4),
    }
    return causal_conv1d(**(options | changes))


def columns(**changes: Any) -> Tensor:
    options: Options = {
        "x": torch.randn(5, 3),
        "weight": torch.randn(4, 3),
        "bias": None,
        "conv_state": torch.zeros(4, 4, 3),
        "cu_seqlens": ints(0, 2, 5),
        "state_indices": ints(0, 2),
        "has_history": torch.tensor([True, False]),
        "read_columns": torch.tensor([[0, 1, 2], [1, 2, 3]]),
        "write_columns": torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]),
    }
    return causal_conv1d_columns(**(options | changes))


def update(**changes: Any) -> Tensor:
    options: Options = {"x": torch.randn(2, 3), "conv_state": torch.zeros(4, 5, 3), "weight": torch.randn(4, 3)}
    return causal_conv1d_update(**(options | changes))


PACKED: Options = {"x": torch.zeros(5, 3), "query_start_loc": ints(0, 2, 5)}
TABLE: Options = {"conv_state_indices": torch.tensor([[0, 1], [2, 3]])}

BAD: dict[str, tuple[Callable[..., Tensor], Options, type[Exception], str]] = {
    "x-list": (prefill, {"x": [1.0]}, TypeError, "causal_conv1d: argument 'x' is list; wanted a torch.Tensor"),
    "x-rank": (prefill, {"x": torch.zeros(5)}, ValueError, r"'x' is of shape \[5\]; wanted \[T, D\]"),
    "x-dtype": (prefill, {"x": torch.zeros(5, 3, dtype=torch.int32)}, TypeError, "'x' has dtype int32"),
    "x-fp64": (prefill, {"x": torch.zeros(5, 3).double()}, TypeError, "'x' has dtype float64; wanted float32"),
    "x-grad": (prefill, {"x": torch.zeros(5, 3, requires_grad=True)}, ValueError, "inference only"),
    "x-device": (prefill, {"weight": torch.zeros(4, 3, device="meta")}, ValueError, "'weight' is on meta; wanted cpu"),
    "weight-shape": (
        prefill,
        {"weight": torch.zeros(4, 2)},
        ValueError,
        r"'weight' is of shape \[4, 2\]; wanted \[W, 3\]",
    ),
    "weight-width": (
        prefill,
        {"weight": torch.zeros(9, 3)},
        ValueError,
        "'weight' is of width 9; wanted .* W from 1 to 8",
    ),
    "bias-shape": (prefill, {"bias": torch.zeros(4)}, ValueError, r"'bias' is of shape \[4\]; wanted \[3\]"),
    "pool-rank": (prefill, {"conv_state": torch.zeros(4, 3)}, ValueError, r"'conv_state' .* wanted \[S, L, 3\]"),
    "pool-short": (prefill, {"conv_state": torch.zeros(4, 2, 3)}, ValueError, r"'conv_state' .* \[S, L >= 3, D\]"),
    "pool-short-ring": (
        prefill,
        {"conv_state": torch.zeros(4, 2, 3), "layout": "ring"},
        ValueError,
        r"'conv_state' .* \[S, L >= 3, D\] at width 4",
    ),
    "pool-dtype": (prefill, {"conv_state": torch.zeros(4, 4, 3).long()}, TypeError, "'conv_state' has dtype int64"),
    "pool-too-few": (
        prefill,
        {"conv_state": torch.zeros(1, 4, 3), "state_indices": None},
        ValueError,
        "'state_indices' is None; wanted slot numbers, as 2 rows do not fit 1 slots",
    ),
    "cu-dtype": (
        prefill,
        {"cu_seqlens": torch.zeros(3)},
        TypeError,
        "'cu_seqlens' has dtype float32; wanted int32, int64",
    ),
    "cu-empty": (
        prefill,
        {"cu_seqlens": torch.zeros(0).long()},
        ValueError,
        r"'cu_seqlens' is empty; wanted \[N \+ 1\]",
    ),
    "indices-shape": (
        prefill,
        {"state_indices": ints(0)},
        ValueError,
        r"'state_indices' is of shape \[1\]; wanted \[2\]",
    ),
    "history-dtype": (prefill, {"history_lens": torch.zeros(2)}, TypeError, "'history_lens' has dtype float32"),
    "layout": (prefill, {"layout": "circular"}, ValueError, "'layout' is 'circular'; wanted 'linear' or 'ring'"),
    "activation": (
        prefill,
        {"activation": "gelu"},
        ValueError,
        "'activation' is 'gelu'; wanted None, 'silu' or 'swish'",
    ),
    "longest": (prefill, {"max_query_len": -1}, ValueError, "'max_query_len' is -1; wanted None or >= 0"),
    "read-shape": (
        columns,
        {"read_columns": torch.zeros(2, 4).long()},
        ValueError,
        r"'read_columns' .* wanted \[2, 3\]",
    ),
    "write-shape": (columns, {"write_columns": torch.zeros(2, 3).long()}, ValueError, r"'write_columns' .* \[2, 4\]"),
    "has-history": (
        columns,
        {"has_history": torch.zeros(2)},
        TypeError,
        "'has_history' has dtype float32; wanted bool",
    ),
    "update-rank": (update, {"x": torch.zeros(2, 1, 1, 3)}, ValueError, r"wanted \[N, D\] or \[N, q, D\]"),
    "update-packed-rank": (update, PACKED | {"x": torch.zeros(1, 5, 3)}, ValueError, r"'x' .* wanted \[T, D\]"),
    "two-layouts": (
        update,
        {"num_accepted_tokens": ints(1, 1), "cache_seqlens": ints(1, 1)},
        ValueError,
        "one of the two layouts",
    ),
    "rewind-short": (
        update,
        {"num_accepted_tokens": ints(1, 1), "x": torch.zeros(2, 4, 3)},
        ValueError,
        r"'conv_state' is of shape \[4, 5, 3\]; wanted \[S, L >= 6, D\] to rewind rows of up to 4 tokens at width 4",
    ),
    "rewind-short-packed": (update, PACKED | {"num_accepted_tokens": ints(1, 1)}, ValueError, "L >= 7"),
    "one-pointer": (update, TABLE | {"initial_state_idx": ints(0, 0)}, ValueError, "both or neither"),
    "pointer-without-table": (
        update,
        {"initial_state_idx": ints(0, 0), "block_idx_last_scheduled_token": ints(0, 0)},
        ValueError,
        r"None unless conv_state_indices is \[N, blocks\]",
    ),
    "counts-shape": (update, {"num_accepted_tokens": ints(1)}, ValueError, r"'num_accepted_tokens' .* wanted \[2\]"),
}

CHECKED: dict[str, tuple[Callable[..., Tensor], Options, str]] = {
    "cu-start": (prefill, {"cu_seqlens": ints(1, 2, 5)}, "'cu_seqlens' is 1 at row 0; wanted 0"),
    "cu-end": (
        prefill,
        {"cu_seqlens": ints(0, 2, 6)},
        "'cu_seqlens' is 6 at row 1; wanted at most 5",
    ),
    "cu-falls": (prefill, {"cu_seqlens": ints(0, 5, 2)}, "'cu_seqlens' is falling by 3 at row 1; wanted offsets"),
    "row-too-long": (
        prefill,
        {"max_query_len": 2},
        "'cu_seqlens' is 3 tokens at row 1; wanted at most 2, max_query_len",
    ),
    "slot-high": (prefill, {"state_indices": ints(0, 4)}, "'state_indices' is 4 at row 1; wanted below 4, the slots"),
    "slot-twice": (
        prefill,
        {"state_indices": ints(3, 3)},
        "'state_indices' is 3 at row 1 and at row 0; wanted a slot of its own",
    ),
    "history": (prefill, {"history_lens": ints(0, -2)}, "'history_lens' is -2 at row 1; wanted at least 0"),
    "column": (
        columns,
        {"write_columns": torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])},
        "'write_columns' is 4 at row 1; wanted below 4",
    ),
    "update-slot": (update, {"conv_state_indices": ints(1, 9)}, "'conv_state_indices' is 9 at row 1"),
    "update-history": (update, {"cache_seqlens": ints(0, -1)}, "'cache_seqlens' is -1 at row 1"),
    "accepted": (update, {"num_accepted_tokens": ints(1, 4)}, "'num_accepted_tokens' is 4 at row 1; wanted at most 3"),
    "block": (
        update,
        TABLE | {"initial_state_idx": ints(0, 2), "block_idx_last_scheduled_token": ints(0, 0)},
        "'initial_state_idx' is 2 at row 1; wanted one of the 2 blocks",
    ),
    "packed": (update, PACKED | {"max_query_len": 2}, "'query_start_loc' is 3 tokens at row 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case: str) -> None:
    call, changes, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call(**changes)


@pytest.mark.parametrize("case", CHECKED)
def test_bad_values_are_named_under_check(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, changes, message = CHECKED[case]
    monkeypatch.setenv("DLINFER_EXT_CHECK", "1")
    call()
    with pytest.raises(ValueError, match=message):
        call(**changes)


def test_check_lets_padding_and_empty_rows_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLINFER_EXT_CHECK", "1")
    prefill(state_indices=ints(-1, 0), history_lens=ints(-5, 0))
    prefill(state_indices=ints(9, 0), pad_slot_id=9)
    prefill(cu_seqlens=ints(0, 0, 5), state_indices=ints(2, 2))
    update(**TABLE)
    update(**TABLE, initial_state_idx=ints(0, 1), block_idx_last_scheduled_token=ints(1, 1))
    update(conv_state_indices=ints(-1, -1), cache_seqlens=ints(-1, -1), validate_data=True)


def test_dead_rows_need_no_valid_values() -> None:
    """Without the check too: a padding row's slot, history and count may be anything."""
    pool = torch.randn(4, 5, 3)
    before = pool.clone()
    wild = torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32)
    for options in ({}, {"num_accepted_tokens": wild}, {"cache_seqlens": wild}):
        got = update(conv_state=pool, conv_state_indices=ints(-1, -(2**40)), **options)
        assert not got.any()
        got = update(conv_state=pool, conv_state_indices=ints(2**40, 2**40), pad_slot_id=2**40, **options)
        assert not got.any()
    assert torch.equal(pool, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["prefill", "prefill-stateless", "ring", "columns", "decode", "rewind", "packed-ring"])
def test_opcheck(form: str, dtype: torch.dtype) -> None:
    x, weight, bias, pool = (torch.randn(s).to(dtype) for s in ((5, 3), (4, 3), (3,), (4, 6, 3)))
    cu, slots, history = ints(0, 2, 5), ints(0, 2), ints(0, 4)
    ops, samples = torch.ops.dlinfer_ext, _samples(x, weight, bias, pool, cu, slots, history)
    name, args = samples[form]
    torch.library.opcheck(getattr(ops, name).default, args)


def _samples(
    x: Tensor, weight: Tensor, bias: Tensor, pool: Tensor, cu: Tensor, slots: Tensor, history: Tensor
) -> dict[str, tuple[str, tuple[Any, ...]]]:
    none = (None,) * 2
    read, write = torch.tensor([[0, 1, 2], [1, 2, 3]]), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
    return {
        "prefill": ("causal_conv1d", (x, weight, bias, pool, cu, slots, history, "linear", "silu", -1, None)),
        "prefill-stateless": ("causal_conv1d", (x, weight, None, None, cu, *none, "linear", None, -1, 3)),
        "ring": (
            "causal_conv1d",
            (x.t().contiguous().t(), weight, None, pool, cu, slots, history, "ring", None, -1, 3),
        ),
        "columns": ("causal_conv1d_columns", (x, weight, None, pool, cu, slots, history, read, write, "swish", -1)),
        "decode": ("causal_conv1d_update", (x[:2], pool, weight, bias, "silu", slots, *none, -1, -1, *none, None)),
        "rewind": (
            "causal_conv1d_update",
            (x[:4].view(2, 2, 3), pool, weight, None, None, slots, cu[1:], None, -1, -1, *none, None),
        ),
        "packed-ring": ("causal_conv1d_update", (x, pool, weight, None, None, slots, None, cu, 3, -1, *none, history)),
    }


@pytest.mark.parametrize("name", ["causal_conv1d", "causal_conv1d_columns", "causal_conv1d_update"])
def test_operator_is_declared_and_bound(name: str) -> None:
    schema = getattr(torch.ops.dlinfer_ext, name).default._schema
    assert [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write] == ["conv_state"]
    assert name in _registry.OPERATORS
    for vendor in ("cpu", "ascend"):
        assert "eager" in [route.name for route in _registry.routes(name, vendor)]


SIGNATURES = {
    "causal_conv1d_ref": "(x, weight, bias=None, initial_states=None, return_final_states=False, final_states_out=None,"
    " activation='silu')",
    "causal_conv1d_fn": "(x, weight, bias=None, activation='silu', conv_states=None, has_initial_state=None,"
    " cache_indices=None, query_start_loc=None, metadata=None, pad_slot_id=-1, read_conv_offsets=None,"
    " write_conv_offsets=None)",
    "causal_conv1d_update_npu": "(x, conv_state, weight, bias=None, activation='silu', conv_state_indices=None,"
    " num_accepted_tokens=None, query_start_loc=None, max_query_len=-1, pad_slot_id=-1,"
    " block_idx_last_scheduled_token=None, initial_state_idx=None, cache_seqlens=None, validate_data=False)",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_compatible_names_keep_their_signatures(name: str) -> None:
    """B28: a caller's keyword that the vendor's entry lacks is an error at the first request."""
    signature = inspect.signature(getattr(triton_ops, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == SIGNATURES[name]


def test_update_npu_takes_every_argument() -> None:
    pool = torch.zeros(4, 6, 3)
    got = triton_ops.causal_conv1d_update_npu(
        x=torch.ones(3, 3),
        conv_state=pool,
        weight=torch.ones(4, 3),
        bias=torch.ones(3),
        activation=False,
        conv_state_indices=torch.tensor([[3, 1], [0, 2]]),
        num_accepted_tokens=None,
        query_start_loc=ints(0, 1, 3),
        max_query_len=2,
        pad_slot_id=-1,
        block_idx_last_scheduled_token=ints(0, 1),
        initial_state_idx=ints(0, 0),
        cache_seqlens=ints(1, 2),
        validate_data=True,
    )
    assert got[:, 0].tolist() == [2, 2, 3]
    assert pool[..., 0].tolist() == [[0] * 6, [0] * 6, [0, 0, 1, 1, 0, 0], [0, 1, 0, 0, 0, 0]]
    on, off = (
        triton_ops.causal_conv1d_update_npu(torch.ones(1, 3), pool, torch.ones(4, 3), activation=a)
        for a in (True, False)
    )
    assert not torch.equal(on, off)


def test_fn_wants_both_offsets_and_a_pool() -> None:
    x, weight, offsets = torch.ones(3, 2), torch.ones(3, 4), torch.zeros(1, 3).long()
    with pytest.raises(ValueError, match=r"causal_conv1d_fn: argument 'read_conv_offsets' is given alone"):
        triton_ops.causal_conv1d_fn(x, weight, conv_states=torch.zeros(1, 3, 6), read_conv_offsets=offsets)
    with pytest.raises(ValueError, match=r"causal_conv1d_fn: argument 'conv_states' is None"):
        triton_ops.causal_conv1d_fn(x, weight, read_conv_offsets=offsets, write_conv_offsets=torch.zeros(1, 4).long())
    with pytest.raises(ValueError, match=r"causal_conv1d_fn: argument 'weight' is of shape \[4, 3\]; wanted \[3, W\]"):
        triton_ops.causal_conv1d_fn(x, weight.t())


def test_ref_continues_from_its_final_states() -> None:
    x, weight, bias = torch.randn(2, 3, 9), torch.randn(3, 4), torch.randn(3)
    want = triton_ops.causal_conv1d_ref(x, weight, bias)
    assert isinstance(want, Tensor)
    first, state = triton_ops.causal_conv1d_ref(x[..., :2], weight, bias, return_final_states=True)
    kept = state.clone()
    buffer = torch.empty(2, 3, 3)
    rest, final = triton_ops.causal_conv1d_ref(
        x[..., 2:], weight, bias, initial_states=state, return_final_states=True, final_states_out=buffer
    )
    assert torch.equal(torch.cat([first, rest], 2), want)
    assert final is buffer
    assert torch.equal(final, x[..., -3:])
    assert torch.equal(state, kept)


def test_requires_grad_passes_under_no_grad() -> None:
    with torch.no_grad():
        prefill(weight=torch.nn.Parameter(torch.randn(4, 3)))
