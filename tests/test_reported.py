"""The register of reported problems is whole and names tests that exist, and its own tests turn red by the faults."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from dlinfer_ext.framework.lmdeploy import reasoning
from dlinfer_ext.framework.lmdeploy.models.glm5_next import config, mtp
from dlinfer_ext.ops._registry import chosen
from tests import faults
from tests.framework import test_reported as engine
from tests.kernels import test_reported as operators
from tests.reported import ENGINE, OPERATORS, REPORTED, SITUATIONS, Reported

ROOT: Final = Path(__file__).parents[1]
NAMED: Final = [node for e in REPORTED for node in e.tests] + [node for nodes in SITUATIONS.values() for node in nodes]


@pytest.fixture(scope="module")
def collected() -> set[str]:
    """Return the node ids of the named files, each also without its parameters."""
    files = sorted({node.partition("::")[0] for node in NAMED})
    line = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *files]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]
    nodes = {text for text in done.stdout.splitlines() if "::" in text}
    return nodes | {node.partition("[")[0] for node in nodes}


@pytest.mark.parametrize("entry", [pytest.param(e, id=e.name) for e in REPORTED])
def test_an_entry_names_tests_that_exist(entry: Reported, collected: set[str]) -> None:
    assert entry.tests or entry.not_on_a_cpu, "neither a test nor a reason"
    assert set(entry.tests) <= collected
    assert len(set(entry.tests)) == len(entry.tests)
    # Each has a test of its own, whose id begins with its number.
    assert not entry.tests or any(f"[{entry.name}" in node for node in entry.tests)
    assert entry.link.startswith("https://github.com/")
    assert entry.link.rsplit("/", 1)[1] == entry.id.rsplit("-", 1)[1]
    assert entry.fault
    assert entry.right


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_situation_names_tests_that_exist(situation: str, collected: set[str]) -> None:
    assert SITUATIONS[situation]
    assert set(SITUATIONS[situation]) <= collected


def test_numbers_have_no_gap() -> None:
    assert [e.number for e in REPORTED] == list(range(1, len(REPORTED) + 1))
    assert len(REPORTED) >= 32
    assert len({e.link for e in REPORTED}) == len(REPORTED)


def test_every_numbered_case_is_in_the_register() -> None:
    cases = {f"{OPERATORS}[{name}]" for name in operators.CASES} | {f"{ENGINE}[{name}]" for name in engine.CASES}
    assert cases <= {node for e in REPORTED for node in e.tests if f"[{e.name}" in node}


# --- negative controls ------------------------------------------------------------------------------------------------


Fault = Callable[[pytest.MonkeyPatch], None]


def prefix_overwritten(patch: pytest.MonkeyPatch) -> None:
    """Let a verify step write to the slot in which the state of a prefix is kept."""
    original = faults.kda.kda_update

    def update(*args: Any) -> Tensor:
        out: Tensor = original(*args)
        args[5][-1] = args[5][0]
        return out

    patch.setattr(faults.kda, "kda_update", update)


def decode_row_gets_the_chunk_beside_it(patch: pytest.MonkeyPatch) -> None:
    """Store the second row's state for the first too, if there is one."""
    original = faults.kda.kda

    def prefill(*args: Any) -> Tensor:
        out: Tensor = original(*args)
        state, slots = args[5], args[7]
        if slots is not None and len(slots) > 1:
            state[slots[0]] = state[slots[1]]
        return out

    patch.setattr(faults.kda, "kda", prefill)


def state_a_little_off(patch: pytest.MonkeyPatch) -> None:
    """Leave a state that is 1 % too large; the output is right."""
    original = faults.kda.kda

    def prefill(*args: Any) -> Tensor:
        out: Tensor = original(*args)
        args[5].mul_(1.01)
        return out

    patch.setattr(faults.kda, "kda", prefill)


def choice_cut_at_topk(patch: pytest.MonkeyPatch) -> None:
    """Leave out what lies in the columns from topk on."""
    original = faults.kpool_select.token_positions

    def positions(*args: Any) -> Tensor:
        out: Tensor = original(*args)
        out[:, args[2] * args[3] :] = -1
        return out

    patch.setattr(faults.kpool_select, "token_positions", positions)


def gates_read_behind_the_keys(patch: pytest.MonkeyPatch) -> None:
    """Read gates in whole lanes of 64, and take part of what lies behind them."""
    original = faults.kda.kda

    def prefill(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *rest: Any) -> Tensor:
        if g.stride(-2) == 64:
            lanes = g.as_strided((*g.shape[:-1], 64), g.stride(), g.storage_offset())
            g = g + 0 * lanes.sum(-1, keepdim=True)
        out: Tensor = original(q, k, v, g, *rest)
        return out

    patch.setattr(faults.kda, "kda", prefill)


def sums_of_gates_raised(patch: pytest.MonkeyPatch) -> None:
    """Divide by the exponential of a running sum of gates, which overflows where that underflows."""

    def decay_runs(read: Tensor, key: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
        total = decay.log().cumsum(1)
        left = read / decay[:, :, None] * total.exp()[:, :, None]
        right = key * (-total).exp()
        products = torch.einsum("miuk,mjk->miuj", left, right)
        products.movedim(2, 1).tril_(-1)
        read.copy_(left)
        key.mul_((total[:, -1:] - total).exp())
        return products, total[:, -1:].exp()

    patch.setattr(faults.kda_chunks, "decay_runs", decay_runs)


def a_kernel_is_tuned(patch: pytest.MonkeyPatch) -> None:
    """Find one more source, with the decorator on its kernel."""
    tuned = "@triton.autotune(configs=[], key=['T'])\n@triton.jit\ndef kernel(x): ...\n"
    sources = operators.kernel_sources()
    patch.setattr(operators, "kernel_sources", lambda: sources | {"tuned.py": tuned})


def draft_hidden_not_normed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mtp.Glm5NextMTPModel, "prepare_hidden_states_for_logits", lambda self, hidden: hidden)


def choice_not_compacted(patch: pytest.MonkeyPatch) -> None:
    """Keep the first rows of the choice, whichever requests they are of."""

    def compact(self: mtp.SharedChoice, queries: Tensor) -> None:
        assert self.indices is not None
        assert self.visible is not None
        self.indices, self.visible = self.indices[: len(queries)], self.visible[: len(queries)]

    patch.setattr(mtp.SharedChoice, "compact", compact)


def halves_swapped(patch: pytest.MonkeyPatch) -> None:
    original = mtp.MtpLayer.forward

    def forward(self: Any, embedded: Tensor, hidden: Tensor, *rest: Any) -> Tensor:
        return original(self, hidden, embedded, *rest)

    patch.setattr(mtp.MtpLayer, "forward", forward)


def cut_off_calls_closed(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(reasoning.WholeCallsToolParser, "_consume_stream_payload")


def quantisation_passed_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(config, "take_quantization", lambda hf_config: None)


def named(fault: str) -> Fault:
    """Return a fault of tests/faults.py; what it changes is put back by `kept`."""

    def put(patch: pytest.MonkeyPatch) -> None:
        faults.plant(fault)

    put.__name__ = fault
    return put


CONTROLS: Final[tuple[tuple[str, Fault], ...]] = (
    ("01-vllm-ascend-15329", named("recurrent_ring_slot_one_behind")),
    ("01-vllm-ascend-15329-attention", named("latent_own_token_hidden")),
    ("02-vllm-41292", named("kda_state_stored_transposed")),
    ("03-vllm-51039", named("kda_reset_by_a_gate")),
    ("04-vllm-52627", named("kpool_open_pool_forgotten")),
    ("05-vllm-53912", prefix_overwritten),
    ("06-vllm-56196", named("ring_gather_from_packed_batch")),
    ("07-vllm-34587", state_a_little_off),
    ("07-vllm-34587-pools", named("kpool_open_pool_forgotten")),
    ("08-llm-616", decode_row_gets_the_chunk_beside_it),
    ("08-llm-616-attention", named("kpool_position_counted_from_the_chunk")),
    ("09-llm-622", named("kpool_tail_without_room_for_drafts")),
    ("10-vllm-55201", named("kpool_open_pool_is_a_candidate")),
    ("11-vllm-55563", choice_cut_at_topk),
    ("12-vllm-57317", named("kpool_tail_without_room_for_drafts")),
    ("13-exl3-79", named("entries_of_pad_rows_written")),
    ("14-vllm-55605", halves_swapped),
    ("15-vllm-47448", draft_hidden_not_normed),
    ("16-vllm-ascend-15864", choice_not_compacted),
    ("18-sglang-37813", named("recurrent_ring_slot_one_behind")),
    ("20-vllm-45915", cut_off_calls_closed),
    ("21-mlx-vlm-2030", named("swiglu_not_clamped")),
    ("21-mlx-vlm-2030", named("swiglu_clamped_after_silu")),
    ("22-nvfp4-6", quantisation_passed_on),
    ("23-dflash2-4", state_a_little_off),
    ("25-cula-89", sums_of_gates_raised),
    ("26-attention-gym-337", named("kda_reference_at_the_middle_row")),
    ("27-fla-1090", gates_read_behind_the_keys),
    ("28-plugin-fl-57", a_kernel_is_tuned),
    ("30-lmdeploy-4958", quantisation_passed_on),
    ("31-vllm-ascend-6695", named("kda_reset_by_a_gate")),
)


def kernel_owners() -> list[Any]:
    """Return the modules of the batched operators and the classes written in them."""
    modules = [m for name, m in sys.modules.items() if name.startswith("dlinfer_ext.kernels.")]
    classes = [c for m in modules for c in vars(m).values() if isinstance(c, type) and c.__module__ == m.__name__]
    return [*modules, *classes]


@contextmanager
def kept() -> Iterator[None]:
    """Put the operators back afterwards; routes are chosen anew, as a chosen one holds the function that it found."""
    before = [(owner, dict(vars(owner))) for owner in kernel_owners()]
    chosen.cache_clear()
    try:
        yield
    finally:
        for owner, was in before:
            now = dict(vars(owner))
            for name in now.keys() - was.keys():
                # A module that was imported meanwhile is an attribute of its package.
                if not isinstance(now[name], ModuleType):
                    delattr(owner, name)
            for name, value in was.items():
                if now.get(name) is not value:
                    setattr(owner, name, value)
        chosen.cache_clear()


def run(name: str) -> None:
    (operators.CASES if name in operators.CASES else engine.CASES)[name]()


@pytest.mark.eager_only(reason="about faults of the PyTorch form")
@pytest.mark.parametrize(
    ("name", "fault"), [pytest.param(name, fault, id=f"{name}-{fault.__name__}") for name, fault in CONTROLS]
)
def test_a_fault_turns_its_case_red(name: str, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    run(name)
    with kept(), monkeypatch.context() as patch:
        fault(patch)
        # pytest's own exception is what `raises` ends with where nothing is raised.
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            run(name)
    run(name)
