"""Put each known fault back and see named tests turn red; a test that stays green would prove nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import faults

ROOT = Path(__file__).parents[1]
CONV, RULE, KDA = (
    f"tests/kernels/{name}.py::" for name in ("test_causal_conv1d_faults", "test_gated_delta_rule", "test_kda")
)

HYPER, MOE = (f"tests/kernels/{name}.py::" for name in ("test_hyper_connection", "test_clamped_moe"))

KPOOL, LATENT = (f"tests/kernels/{name}.py::" for name in ("test_kpool_indexer", "test_latent_attention"))


def conv(*ids: str) -> tuple[str, ...]:
    return tuple(f"{CONV}test_reported_fault[{i}]" for i in ids)


CAUGHT_BY = {
    "ring_gather_from_packed_batch": conv("ring-fresh-short-chunk", "ring-one-token-tail", "B03", "R04", "R05"),
    "accepted_count_taken_as_row_count": conv("verify-rows-are-all-convolved", "B01"),
    "rewind_ignores_accepted_count": conv("verify-rows-are-all-convolved", "B04"),
    "pad_row_written": conv("R06", "R07", "R19", "B11", "B75"),
    "taps_in_reverse_order": conv("B20", "B12"),
    "operands_through_fp16": conv("R16"),
    "history_not_zeroed_on_reuse": (
        *conv("R11", "R12", "ring-fresh-short-chunk"),
        f"{RULE}test_prefill_fresh_row_ignores_what_a_slot_holds[ring3-nan]",
        f"{RULE}test_update_fresh_row_ignores_what_a_slot_holds[plain-inf]",
    ),
    "recurrent_ring_slot_one_behind": (
        f"{RULE}test_ring_verify_goes_on_from_any_accepted_token[drafts3]",
        f"{RULE}test_ring_with_changing_draft_counts",
        f"{RULE}test_update_matches_definition[Q2-ring4-VK-HV=2H-K<V]",
    ),
    "kda_reset_by_a_gate": (
        f"{KDA}test_fresh_row_ignores_what_a_slot_holds[plain-nan]",
        f"{KDA}test_prefill_problems_of_peers[VK-P31-warm-up-then-use]",
    ),
    "kda_reference_at_the_middle_row": (
        f"{KDA}test_a_prefix_does_not_depend_on_later_tokens[random]",
        f"{KDA}test_prefill_holds_fp32_accuracy_under_any_gate[softplus down to -20]",
    ),
    "kda_gate_clamped": (
        f"{KDA}test_gate_written_out",
        f"{KDA}test_gate_is_that_of_transformers[glm5_next--5.0]",
        f"{KDA}test_gate_matches_definition_on_views[bound-0.5-float32]",
    ),
    "kda_state_stored_transposed": (
        f"{KDA}test_prefill_one_row_matches_definition[T17-VK-plain]",
        f"{KDA}test_update_equals_prefill_of_the_same_tokens[plain-VK]",
        f"{KDA}test_prefill_problems_of_peers[KV-P23-K-differs-from-V]",
    ),
    "hyper_connection_epsilons_swapped": (
        f"{HYPER}test_pre_written_out",
        f"{HYPER}test_pre_is_that_of_transformers[torch.float32-0.0001]",
        f"{HYPER}test_both_match_the_definition[7-33-4-torch.bfloat16]",
    ),
    "hyper_connection_sigmoid_not_doubled": (
        f"{HYPER}test_pre_written_out",
        f"{HYPER}test_pre_is_that_of_transformers[torch.bfloat16-1.0]",
    ),
    "hyper_connection_not_transposed": (
        f"{HYPER}test_post_written_out",
        f"{HYPER}test_post_is_that_of_transformers",
        f"{HYPER}test_one_stream_that_is_kept_goes_where_the_matrix_says",
    ),
    "hyper_connection_rows_for_columns": (
        f"{HYPER}test_pre_written_out",
        f"{HYPER}test_pre_is_that_of_transformers[torch.float32-1.0]",
        f"{HYPER}test_the_combination_is_doubly_stochastic",
    ),
    "hyper_connection_last_columns_left_out": (
        f"{HYPER}test_pre_written_out",
        f"{HYPER}test_pre_is_that_of_transformers[torch.float32-1.0]",
    ),
    "swiglu_not_clamped": (
        f"{MOE}test_unit_written_out[torch.float32]",
        f"{MOE}test_unit_is_that_of_transformers",
        f"{MOE}test_mixture_is_that_of_transformers",
    ),
    "swiglu_clamped_after_silu": (
        f"{MOE}test_unit_written_out[torch.bfloat16]",
        f"{MOE}test_mixture_is_that_of_transformers",
    ),
    "swiglu_gate_clamped_from_below": (
        f"{MOE}test_unit_written_out[torch.float16]",
        f"{MOE}test_a_gate_has_no_limit_from_below",
        f"{MOE}test_mixture_matches_the_definition[37-torch.int64-64-32-torch.float32]",
    ),
    "kpool_tail_without_room_for_drafts": (
        f"{KPOOL}test_rejected_drafts_leave_no_trace[keep1-drafts3-T%P=3]",
        f"{KPOOL}test_rejected_drafts_leave_no_trace[keep1-drafts7-T%P=0]",
    ),
    "kpool_open_pool_forgotten": (
        f"{KPOOL}test_pool_by_hand",
        f"{KPOOL}test_any_chunks_equal_one_shot[P4]",
        f"{KPOOL}test_an_open_pool_moves_with_its_block",
        f"{KPOOL}test_both_are_the_indexer_of_transformers[T75]",
    ),
    "kpool_position_counted_from_the_chunk": (
        f"{KPOOL}test_any_chunks_equal_one_shot[P4]",
        f"{KPOOL}test_update_matches_definition[h3-P4]",
    ),
    "kpool_open_pool_is_a_candidate": (
        f"{KPOOL}test_a_pool_of_a_rejected_draft_is_no_candidate",
        f"{KPOOL}test_both_are_the_indexer_of_transformers[T75]",
    ),
    "kpool_ties_as_they_come": (
        f"{KPOOL}test_choice_of_a_step[exact-decode]",
        f"{KPOOL}test_choice_with_blocks_of_one_pool_of_128",
    ),
    "kpool_weights_before_the_relu": (
        f"{KPOOL}test_choice_in_every_dtype[bfloat16]",
        f"{KPOOL}test_both_are_the_indexer_of_transformers[T75]",
    ),
    "latent_stale_values_weighed": (
        f"{LATENT}test_what_lies_past_the_context_reaches_no_output[nan-dense]",
        f"{LATENT}test_what_lies_past_the_context_reaches_no_output[nan-sparse]",
    ),
    "latent_own_token_hidden": (
        f"{LATENT}test_attention_by_hand",
        f"{LATENT}test_attention_is_that_of_transformers[dense]",
        f"{LATENT}test_attention_is_that_of_transformers[sparse]",
    ),
    "latent_sum_not_rescaled": (
        f"{LATENT}test_a_step_matches_definition[exact-dense-verify3]",
        f"{LATENT}test_large_scores_do_not_overflow[dense]",
    ),
    "entries_of_pad_rows_written": (
        f"{KPOOL}test_pad_rows_write_nothing[0]",
        f"{LATENT}test_write_of_pad_rows_and_empty_batches",
    ),
    "state_stored_transposed": (
        f"{RULE}test_prefill_one_row_matches_definition[T17-VK-ring3]",
        f"{RULE}test_update_equals_prefill_of_the_same_tokens[plain]",
    ),
}


def failed(fault: str, nodes: tuple[str, ...]) -> set[str]:
    """Run tests with a fault planted ("" for none) and return those that failed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({"PLANT": fault} if fault else {})}
    line = [sys.executable, "-m", "pytest", "-p", "tests.faults", "-q", "-rf", "-p", "no:cacheprovider", "--tb=no"]
    done = subprocess.run([*line, *nodes], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    summary = done.stdout.strip().splitlines()[-1]
    assert re.search(r"\b(\d+ failed, )?(\d+ passed)?.* in ", summary), done.stdout[-3000:]
    assert "error" not in summary, done.stdout[-3000:]
    return {node for node in nodes if re.search(rf"^FAILED {re.escape(node)}( - |$)", done.stdout, re.MULTILINE)}


@pytest.mark.parametrize("fault", sorted(faults.FAULTS))
def test_fault_turns_its_tests_red(fault: str) -> None:
    assert failed(fault, CAUGHT_BY[fault]) == set(CAUGHT_BY[fault])


def test_without_a_fault_the_same_tests_are_green() -> None:
    assert failed("", tuple(dict.fromkeys(n for nodes in CAUGHT_BY.values() for n in nodes))) == set()


def test_every_fault_has_tests_that_catch_it() -> None:
    assert set(CAUGHT_BY) == set(faults.FAULTS)
