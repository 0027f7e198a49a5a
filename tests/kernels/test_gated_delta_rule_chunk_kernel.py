"""The gated delta rule over prompts where its kernels take other paths: both forms, blocks of V, keys that repeat."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dlinfer_ext.kernels.common.tiling import SoC
from dlinfer_ext.kernels.gated_delta_rule import reference
from dlinfer_ext.ops import gated_delta_rule
from dlinfer_ext.testing import TOLERANCE, assert_close

INF = float("inf")


@pytest.fixture(params=["scan", "dot"], autouse=True)
def form(request: pytest.FixtureRequest, route: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The form that the launcher takes on the kernel routes; other routes have but one."""
    chosen = str(request.param)
    if route not in ("native", "interpret"):
        if chosen == "dot":
            pytest.skip("a form of the kernel")
        return chosen

    def tile(self: SoC, operator: str, name: str, default: int) -> int:
        return int(chosen == "dot") if name == "dot" else self.tiles.get(operator, {}).get(name, default)

    monkeypatch.setattr(SoC, "tile", tile)
    return chosen


def check(
    lengths: list[int],
    sizes: tuple[int, int, int, int],
    *,
    dtype: torch.dtype = torch.float32,
    pool: torch.dtype = torch.float32,
    v_first: bool = True,
    g: Tensor | None = None,
    k: Tensor | None = None,
    beta: Tensor | None = None,
    ring: int | None = None,
) -> None:
    heads, value_heads, keys, values = sizes
    tokens, rows = sum(lengths) + 2, len(lengths)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, key, v = draw(tokens, heads, keys), draw(tokens, heads, keys), draw(tokens, value_heads, values)
    key = key if k is None else k.expand(tokens, heads, keys)
    gate, strength = -draw(tokens, value_heads).abs(), draw(tokens, value_heads).sigmoid()
    gate = gate if g is None else g.expand(tokens, value_heads)
    strength = strength if beta is None else beta.expand(tokens, value_heads)
    inner = (values, keys) if v_first else (keys, values)
    state = draw(rows + 1, *(() if ring is None else (ring,)), value_heads, *inner).to(pool)
    q, key, v = (x.to(dtype) for x in (q, key, v))
    want_state = state.double()
    # Every second entry of longer tensors: the index tensors have strides too.
    index = torch.arange(2 * rows, 0, -1, dtype=torch.int32)[::2] // 2
    past = (torch.arange(2 * rows) * 3 % 4)[::2]
    cu = torch.tensor([0, *lengths]).cumsum(0).repeat_interleave(2)[::2]
    common: dict[str, Any] = {"cu_seqlens": cu, "state_indices": index, "history_lens": past, "use_qk_l2norm": True}
    o = gated_delta_rule(q, key, v, gate, strength, state, **common, state_v_first=v_first, host_lengths=lengths)
    want = reference.gated_delta_rule(q, key, v, gate, strength, want_state, **common, state_v_first=v_first)
    assert_close("o", o, want, TOLERANCE["delta_rule", dtype])
    assert_close("state", state, want_state, TOLERANCE["delta_rule", pool])
    assert not o[sum(lengths) :].any()


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("v_first", [True, False], ids=["VK", "KV"])
def test_a_model_head(dtype: torch.dtype, v_first: bool) -> None:
    check([37, 0, 5], (1, 2, 128, 128), dtype=dtype, v_first=v_first)


@pytest.mark.parametrize("pool", DTYPES, ids=lambda d: f"pool-{str(d)[6:]}")
@pytest.mark.parametrize("sizes", [(2, 2, 256, 40), (1, 3, 96, 300), (1, 1, 5, 1), (1, 4, 64, 65)], ids=str)
def test_sizes_that_are_no_power_of_two(sizes: tuple[int, int, int, int], pool: torch.dtype) -> None:
    check([9, 18], sizes, pool=pool, ring=3)


@pytest.mark.parametrize("strength", [1.0, 2.0, 0.0])
def test_keys_that_repeat(strength: float) -> None:
    """The same key at each token: powers of the matrix to be inverted grow to thousands before they cancel."""
    one = torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(2))
    check([64], (2, 4, 32, 16), k=one, beta=torch.full((1, 1), strength), g=torch.zeros(1, 1))


def test_gates_that_reset_within_a_chunk() -> None:
    token = torch.arange(72)[:, None]
    check([70], (1, 2, 16, 16), g=torch.where(token % 7 == 3, -INF, torch.where(token % 5 == 0, -2e4, -1e-3)))
