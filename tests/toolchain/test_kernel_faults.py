"""Put each known fault into a kernel and see named tests turn red; a test that stays green would prove nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dlinfer_ext.toolchain import install
from tests import kernel_faults

pytestmark = [
    pytest.mark.toolchain,
    pytest.mark.skipif(install.missing() is not None, reason=str(install.missing())),
]

ROOT = Path(__file__).parents[2]
KDA = "tests/kernels/test_kda.py::"
CAUGHT_BY = {
    "scan_stores_the_other_orientation": (
        f"{KDA}test_prefill_one_row_matches_definition[T3-VK-plain]",
        f"{KDA}test_update_equals_prefill_of_the_same_tokens[plain-KV]",
    ),
    "scan_decays_after_the_correction": (
        f"{KDA}test_recurrence_by_hand",
        f"{KDA}test_prefill_one_row_matches_definition[T3-VK-plain]",
    ),
    "scan_reads_gates_behind_the_keys": (
        f"{KDA}test_what_lies_behind_the_keys_is_not_read[prefill-VK]",
        f"{KDA}test_what_lies_behind_the_keys_is_not_read[prefill-KV]",
    ),
    "scan_ring_entry_one_behind": (f"{KDA}test_prefill_one_row_matches_definition[T3-VK-ring3]",),
    "scan_reads_a_reused_slot": (f"{KDA}test_recurrence_by_hand",),
    "update_decays_after_the_correction": (
        f"{KDA}test_update_matches_definition[Q2-ring4-VK-HV=2H-K<V]",
        f"{KDA}test_update_matches_definition[Q2-ring4-KV-HV=2H-K<V]",
    ),
    "update_reads_gates_behind_the_keys": (
        f"{KDA}test_what_lies_behind_the_keys_is_not_read[update-VK]",
        f"{KDA}test_what_lies_behind_the_keys_is_not_read[update-KV]",
    ),
    "update_ring_entry_one_behind": (f"{KDA}test_update_matches_definition[Q2-ring4-VK-HV=2H-K<V]",),
    "gate_rate_outside_the_sigmoid": (f"{KDA}test_gate_written_out",),
}


def failed(fault: str, nodes: tuple[str, ...]) -> set[str]:
    """Run tests on the interpreted kernels with a fault planted ("" for none) and return those that failed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({"PLANT_KERNEL": fault} if fault else {})}
    line = [sys.executable, "-m", "pytest", "-p", "tests.kernel_faults", "--route", "interpret", "-q", "-rf", "--tb=no"]
    line += ["-p", "no:cacheprovider", *nodes]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    summary = done.stdout.strip().splitlines()[-1]
    assert re.search(r"\b(\d+ failed|\d+ passed)\b.* in ", summary), done.stdout[-3000:] + done.stderr[-3000:]
    assert "error" not in summary, done.stdout[-3000:]
    return {node for node in nodes if re.search(rf"^FAILED {re.escape(node)}( - |$)", done.stdout, re.MULTILINE)}


@pytest.mark.parametrize("fault", sorted(kernel_faults.FAULTS))
def test_fault_turns_its_tests_red(fault: str) -> None:
    assert failed(fault, CAUGHT_BY[fault]) == set(CAUGHT_BY[fault])


def test_without_a_fault_the_same_tests_are_green() -> None:
    assert failed("", tuple(dict.fromkeys(n for nodes in CAUGHT_BY.values() for n in nodes))) == set()


def test_every_fault_has_tests_that_catch_it() -> None:
    assert set(CAUGHT_BY) == set(kernel_faults.FAULTS)
