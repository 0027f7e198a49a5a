"""Why no chip takes the chunked form of the gated delta rule: what configs/tiles says is what the compiler says.

`python -m pytest -s tests/toolchain/test_dot_form.py` prints the figures.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dlinfer_ext.toolchain import hivm, install, matrix

pytestmark = [
    pytest.mark.toolchain,
    pytest.mark.skipif(install.missing() is not None, reason=str(install.missing())),
]
CHUNK, TOKENS = 16, 2048
# The target for a prompt, over the lower bound.
BYTES_LIMIT = 1.6


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], matrix.Row]:
    source = str(Path(__file__).with_name("dot_form.py"))
    cache = tmp_path_factory.mktemp("hivm")
    found = matrix.run_matrix(("a2", "a5"), ["qwen3_5-9b"], [1], ["bfloat16"], cache, source=source)
    return {(r.soc, r.phase): r for r in found}


def facts_of(rows: dict[tuple[str, str], matrix.Row], soc: str, phase: str) -> hivm.Facts:
    row = rows[soc, phase]
    assert row.kernel == "gdr_dot_kernel"
    assert row.build.facts is not None, row.faults
    return row.build.facts


def share(facts: hivm.Facts) -> float:
    buffer = facts.buffer("UB")
    assert buffer is not None
    return buffer.share


def test_on_a2_the_products_exchange_many_times_the_bound(rows: dict[tuple[str, str], matrix.Row]) -> None:
    facts = facts_of(rows, "a2", "V32")
    trips = TOKENS // CHUNK * 32 * (128 // 32)  # chunks, value heads, blocks of V
    ratio = max(facts.exchange) * trips / rows["a2", "V32"].lower_bound
    print(f"\nA2, V 32: {share(facts):.1%} of UB; exchange alone {ratio:.0f} times the lower bound")  # noqa: T201
    assert ratio > 10 * BYTES_LIMIT


def test_on_a5_nothing_goes_through_global_memory_but_whole_heads_do_not_fit(
    rows: dict[tuple[str, str], matrix.Row],
) -> None:
    half, whole = facts_of(rows, "a5", "V64"), facts_of(rows, "a5", "V128")
    print(f"\nA5: {share(half):.1%} of UB with V 64, {share(whole):.1%} with V 128")  # noqa: T201
    assert not any(half.exchange)
    assert not any(whole.exchange)
    assert share(half) <= matrix.UB_SHARE < share(whole)
