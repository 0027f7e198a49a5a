"""The gated RMS norm where a kernel takes other paths: rows too long for a tile, and views of several levels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dlinfer_ext.kernels.gated_rms_norm import reference
from dlinfer_ext.ops import gated_rms_norm
from dlinfer_ext.testing import TOLERANCE, assert_close


def check(x: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor | None, group: int, first: bool = True) -> None:
    got = gated_rms_norm(x, gate, weight, bias, norm_before_gate=first, group_size=group)
    want = reference.gated_rms_norm(x, gate, weight, bias, 1e-6, "silu", first, group)
    assert_close("gated_rms_norm", got, want, TOLERANCE["norm", x.dtype])


@pytest.mark.parametrize("first", [True, False], ids=["norm-first", "gate-first"])
@pytest.mark.parametrize(("hidden", "group"), [(1030, 1030), (2000, 1000), (4096, 4096)], ids=str)
def test_rows_longer_than_a_tile(hidden: int, group: int, first: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(9, hidden, generator=generator) for _ in range(2))
    weight, bias = torch.rand(hidden, generator=generator), torch.randn(hidden, generator=generator)
    check(x.bfloat16(), gate.bfloat16(), weight, bias, group, first)
    check(x[:, ::2][:, : hidden // 4 * 2], None, weight[: hidden // 4 * 2], None, hidden // 4 * 2)


@pytest.mark.parametrize("heads", [1, 3, 4, 32, 48], ids=lambda n: f"heads{n}")
@pytest.mark.parametrize("tokens", [1, 5, 33], ids=lambda n: f"tokens{n}")
def test_a_gate_that_is_part_of_a_projection(tokens: int, heads: int) -> None:
    """One rank's value heads: the gate has the projection's row stride, x has none."""
    generator = torch.Generator().manual_seed(tokens)
    projection = torch.randn(tokens, 2 * heads * 128 + 8, generator=generator).bfloat16()
    gate = projection[:, heads * 128 + 8 :].unflatten(-1, (heads, 128))
    check(torch.randn(tokens, heads, 128, generator=generator).bfloat16(), gate, torch.rand(128), None, 128)


@pytest.mark.parametrize("group", [16, 4], ids=["plain", "groups"])
def test_views_of_more_levels_than_the_kernel_steps_through(group: int) -> None:
    whole = torch.randn(3, 4, 6, 5, 32, generator=torch.Generator().manual_seed(0))
    x = whole[:2, 1:3, ::2, :3, :16].transpose(0, 2)
    check(x, whole[:2, 1:3, ::2, 1:4, 16:].transpose(0, 2), torch.rand(16), torch.rand(16), group)
    check(x, None, torch.rand(16), None, group)


def test_nothing_outside_a_view_is_read() -> None:
    whole = torch.full((7, 5, 40), float("nan"))
    whole[1:6, 1:4, 8:29] = torch.randn(5, 3, 21, generator=torch.Generator().manual_seed(0))
    view = whole[1:6, 1:4, 8:29]
    check(view, view, torch.rand(21), None, 21)
    check(view, view, torch.rand(21), None, 7)
