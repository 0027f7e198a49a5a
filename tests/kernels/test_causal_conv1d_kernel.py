"""What only the convolution kernel has: runs of tokens that cut rows anywhere, strides it takes as they are, builds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from dlinfer_ext.kernels.causal_conv1d import reference
from dlinfer_ext.ops.causal_conv1d import Layout, causal_conv1d, causal_conv1d_columns, causal_conv1d_update
from dlinfer_ext.testing import TOLERANCE, assert_close
from dlinfer_ext.toolchain import native

LENGTHS = (1, 9, 0, 2, 3, 17, 4)
TAIL = 2
WIDTH, COLUMNS, CHANNELS = 4, 6, 20


@pytest.fixture(autouse=True)
def _kernel_only(route: str) -> None:
    if route not in ("native", "interpret"):
        pytest.skip("of the kernel alone: --route native or interpret")


@pytest.fixture
def with_run(route: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set how many tokens a task has."""
    if route == "native":
        native.activate()
    # The launcher can be imported only where the operators have installed a Triton.
    causal_conv1d(torch.ones(1, 1), torch.ones(1, 1), cu_seqlens=torch.tensor([0, 1]))
    from dlinfer_ext.kernels.causal_conv1d import launch

    return lambda run: monkeypatch.setattr(launch, "_plan", lambda *sizes: (16, run))


def faults(route: str) -> AbstractContextManager[list[Any]]:
    """Count launches where they can be counted."""
    if route != "native":
        return nullcontext([])
    from dlinfer_ext.toolchain.count import counting

    return counting()


def inputs(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "x": values(sum(LENGTHS) + TAIL, CHANNELS),
        "weight": values(CHANNELS, WIDTH).t(),
        "bias": values(CHANNELS),
        "conv_state": values(8, COLUMNS, CHANNELS),
        "cu_seqlens": torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32),
        "state_indices": torch.tensor([6, 2, 3, -1, 0, 5, 1]),
    }


def exact(given: dict[str, Any]) -> dict[str, Any]:
    return {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in given.items()}


@pytest.mark.parametrize("run", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("form", ["linear", "ring", "columns"])
def test_runs_may_cut_rows_anywhere(form: str, run: int, route: str, with_run: Callable[[int], None]) -> None:
    given, history = inputs(), torch.tensor([3, 0, 5, 2, 1, 40, 7])
    lengths = torch.tensor(LENGTHS)
    if form == "columns":
        call, definition = causal_conv1d_columns, reference.causal_conv1d_columns
        given["has_history"] = history > 0
        given["read_columns"] = (history[:, None] + torch.arange(1 - WIDTH, 0)) % COLUMNS
        given["write_columns"] = ((history + lengths)[:, None] + torch.arange(-WIDTH, 0)) % COLUMNS
    else:
        call, definition = causal_conv1d, reference.causal_conv1d  # type: ignore[assignment]
        given |= {"history_lens": history, "layout": form}
    wanted = exact(given)
    with_run(run)
    with faults(route) as launches:
        out = call(**given, activation="silu")
    want = definition(**wanted, activation="silu")
    assert_close("output", out, want, TOLERANCE["conv", out.dtype])
    assert torch.equal(given["conv_state"], wanted["conv_state"].float())
    assert all(f.write_write + f.read_write + f.stray_read + f.stray_written == 0 for f in launches)
    assert len(launches) == (route == "native")


@pytest.mark.parametrize("run", [2, 3, 8])
@pytest.mark.parametrize("layout", ["linear", "rewind", "ring"])
def test_rows_of_a_larger_tensor(layout: str, run: int, route: str, with_run: Callable[[int], None]) -> None:
    rows, each = 5, 3
    x = torch.randn(rows, each + 2, CHANNELS)[:, 1:-1]
    pool = torch.randn(rows, COLUMNS, CHANNELS)
    counts = torch.tensor([1, 3, 2, 1, 3])
    name = {"rewind": "num_accepted_tokens", "ring": "cache_seqlens"}.get(layout)
    options: dict[str, Any] = {name: counts} if name else {}
    weight, want_pool = torch.randn(WIDTH, CHANNELS), pool.double()
    with_run(run)
    with faults(route) as launches:
        out = causal_conv1d_update(x, pool, weight, **options)
    want = reference.causal_conv1d_update(x.double(), want_pool, weight.double(), activation="silu", **options)
    assert_close("output", out, want, TOLERANCE["conv", out.dtype])
    assert torch.equal(pool, want_pool.float())
    assert all(f.write_write + f.read_write + f.stray_read + f.stray_written == 0 for f in launches)


@pytest.mark.parametrize("layout", ["linear", "ring"])
def test_state_moves_every_bit(layout: Layout) -> None:
    # All 16-bit patterns, NaNs with a payload among them.
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(2, 1 << 15)
    pool = patterns[:1, None].expand(1, 3, -1).contiguous().view(torch.bfloat16)
    x = patterns[1:].contiguous().view(torch.bfloat16)
    causal_conv1d(
        x,
        torch.ones(4, 1 << 15, dtype=torch.bfloat16),
        None,
        pool,
        cu_seqlens=torch.tensor([0, 1]),
        history_lens=torch.tensor([3]),
        layout=layout,
    )
    stored = pool.view(torch.int16)[0]
    newest = 2 if layout == "linear" else 0
    for column in range(3):
        assert torch.equal(stored[column], patterns[int(column == newest)])


def test_a_server_needs_few_builds(route: str) -> None:
    if route != "native":
        pytest.skip("nothing is built")
    weight, pool = torch.randn(1024, 4).t(), torch.zeros(64, 4, 1024)
    before = len(native.builds())
    for rows in range(1, 51):
        causal_conv1d(
            torch.ones(rows, 1024),
            weight,
            None,
            pool,
            cu_seqlens=torch.arange(rows + 1),
            state_indices=torch.arange(rows) + 64 - rows,
            history_lens=torch.arange(rows),
            activation="silu",
        )
    assert len(native.builds()) - before <= 4
