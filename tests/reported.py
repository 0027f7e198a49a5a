"""Problems that users of other implementations of GLM-5.3-Flash's blocks reported, and the tests that are about them.

A test is named by its node id, whole or without its parameters, which is all of its cases. tests/test_reported.py
checks that each of them exists, and puts faults back to see them turn red.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

OPERATORS: Final = "tests/kernels/test_reported.py::test_reported_fault"
ENGINE: Final = "tests/framework/test_reported.py::test_reported_fault"
CONV: Final = "tests/kernels/test_causal_conv1d.py::test"
CONV_FAULTS: Final = "tests/kernels/test_causal_conv1d_faults.py::test_reported_fault"
KDA: Final = "tests/kernels/test_kda.py::test"
KPOOL: Final = "tests/kernels/test_kpool_indexer.py::test"
LATENT: Final = "tests/kernels/test_latent_attention.py::test"
HYPER: Final = "tests/kernels/test_hyper_connection.py::test"
MOE: Final = "tests/kernels/test_clamped_moe.py::test"
CONFIG: Final = "tests/framework/test_glm5_next_config.py::test"
REASONING: Final = "tests/framework/test_reasoning.py::test"
TOKENS: Final = "tests/e2e/test_glm_engine.py::test_tokens_are_those_of_transformers"
DRAFTS: Final = "tests/e2e/test_glm_drafts.py::test_every_draft_is_the_draft_layers"
SIMULATED: Final = "tests/e2e/test_glm_simulation.py::test"
CHAT: Final = "tests/e2e/test_glm_chat.py::test"


@dataclass(frozen=True)
class Reported:
    """One problem.

    Attributes:
        number: of the entry, from 1.
        id: project and number of the report; with the entry's number before it, the beginning of a test's parameter.
        link: of the report.
        fault: what went wrong there.
        right: what holds here.
        tests: node ids that turn red with that fault.
        not_on_a_cpu: what of it no CPU can show, and why; it is all there is if no test is named.
    """

    number: int
    id: str
    link: str
    fault: str
    right: str
    tests: tuple[str, ...]
    not_on_a_cpu: str = ""

    @property
    def name(self) -> str:
        return f"{self.number:02d}-{self.id}"


def at_github(path: str) -> str:
    return f"https://github.com/{path}"


REPORTED: Final = (
    Reported(
        1, "vllm-ascend-15329", at_github("vllm-project/vllm-ascend/issues/15329"),
        "the logits of a step that verifies two tokens are flat, and no draft is accepted",
        "a step of several tokens gives what as many steps of one do",
        (
            f"{OPERATORS}[01-vllm-ascend-15329]", f"{OPERATORS}[01-vllm-ascend-15329-attention]",
            f"{KDA}_update_problems_of_peers[P1-verify-of-two-VK]", f"{TOKENS}[one draft]",
        ),
        "that the kernels of an NPU do so too",
    ),
    Reported(
        2, "vllm-41292", at_github("vllm-project/vllm/issues/41292"),
        "prefill stores the state with keys and values in the other order",
        "decode goes on from what prefill has stored, in either order",
        (
            f"{OPERATORS}[02-vllm-41292]", f"{KDA}_update_equals_prefill_of_the_same_tokens",
            f"{TOKENS}[a batch]",
        ),
    ),
    Reported(
        3, "vllm-51039", at_github("vllm-project/vllm/issues/51039"),
        "a long prompt gives NaN, which spreads between requests",
        "no NaN comes up, and none leaves its request; dead rows write nothing",
        (
            f"{OPERATORS}[03-vllm-51039]", f"{KDA}_a_bad_row_harms_no_other", f"{KDA}_prefill_pad_rows_touch_nothing",
            f"{LATENT}_a_bad_request_harms_no_other", f"{HYPER}_a_bad_token_leaves_the_others_alone",
        ),
    ),
    Reported(
        4, "vllm-52627", at_github("vllm-project/vllm/issues/52627"),
        "an instance that decodes does not get all of a request's states from the one that did the prompt",
        "window, recurrent state, pools and open pool together are all that a request leaves behind",
        (f"{OPERATORS}[04-vllm-52627]", f"{KPOOL}_an_open_pool_moves_with_its_block"),
        "the transfer itself, from the memory of one card to that of another",
    ),
    Reported(
        5, "vllm-53912", at_github("vllm-project/vllm/issues/53912"),
        "a state kept for a prefix is not the prefix's once drafts are verified",
        "a state taken up again is the state computed anew",
        (f"{OPERATORS}[05-vllm-53912]", f"{TOKENS}[prefix cache, chunks and drafts]"),
    ),
    Reported(
        6, "vllm-56196", at_github("vllm-project/vllm/pull/56196"),
        "a chunk shorter than width - 1 stores its inputs in another request's block",
        "it stores them in its own slot, and older columns stay",
        (
            f"{OPERATORS}[06-vllm-56196]", f"{CONV_FAULTS}[ring-fresh-short-chunk]",
            f"{CONV_FAULTS}[ring-one-token-tail]", f"{CONV}_state_of_every_length_and_history",
        ),
    ),
    Reported(
        7, "vllm-34587", at_github("vllm-project/vllm/pull/34587"),
        "a block is cached before its state is complete",
        "at the end of a block the pool holds the state of its tokens, and a pool of keys comes with its last token",
        (
            f"{OPERATORS}[07-vllm-34587]", f"{OPERATORS}[07-vllm-34587-pools]",
            f"{KDA}_prefill_problems_of_peers[VK-P7-state-at-a-chunk-border]", f"{TOKENS}[prefix cache]",
        ),
    ),
    Reported(
        8, "llm-616", at_github("local-inference-lab/vllm/issues/616"),
        "chunks of a prompt change what is decoded beside them",
        "a mixed batch gives what its rows give alone",
        (
            f"{OPERATORS}[08-llm-616]", f"{OPERATORS}[08-llm-616-attention]",
            f"{KDA}_batch_equals_separate_and_permuted", f"{KPOOL}_choice_does_not_depend_on_the_rest_of_the_batch",
            f"{TOKENS}[fourteen prompts, chunks and drafts]", f"{TOKENS}[two ranks, chunks and drafts]",
        ),
        "four ranks at once, for which two cores are too few; two are run",
    ),
    Reported(
        9, "llm-622", at_github("local-inference-lab/vllm/pull/622"),
        "keys of rejected drafts stay in the ring of the open pool",
        "only accepted tokens get into a pool",
        (
            f"{OPERATORS}[09-llm-622]", f"{KPOOL}_rejected_drafts_leave_no_trace",
            f"{KPOOL}_a_pool_of_a_rejected_draft_is_no_candidate", f"{TOKENS}[drafts]",
        ),
    ),
    Reported(
        10, "vllm-55201", at_github("vllm-project/vllm/pull/55201"),
        "columns of the choice that nothing was written to are taken for numbers of pools",
        "they are -1, and no pool beyond the complete ones is chosen",
        (
            f"{OPERATORS}[10-vllm-55201]", f"{KPOOL}_pad_rows_and_empty_batches_choose_nothing",
            f"{KPOOL}_choice_by_hand",
        ),
    ),
    Reported(
        11, "vllm-55563", at_github("vllm-project/vllm/pull/55563"),
        "the choice is padded to a width that the kernels behind it do not have",
        "its width is topk + P - 1, behind the tokens -1, and attention takes it as it is",
        (
            f"{OPERATORS}[11-vllm-55563]", f"{KPOOL}_choice_matches_definition",
            f"{KPOOL}_both_are_the_indexer_of_transformers",
        ),
    ),
    Reported(
        12, "vllm-57317", at_github("vllm-project/vllm/pull/57317"),
        "the open pool is addressed by the slots of the cache of keys",
        "a raw token lies in entry p mod R of its own block",
        (f"{OPERATORS}[12-vllm-57317]", f"{KPOOL}_update_matches_definition", f"{KPOOL}_pool_by_hand"),
    ),
    Reported(
        13, "exl3-79", at_github("Reederey87/glm53-flash-exl3-2x-dgx-spark/pull/79"),
        "addresses of the open pool come from a tensor that a graph does not keep, and masked rows have some too",
        "a step reads its rows from buffers that stay, and masked rows address nothing",
        (
            f"{OPERATORS}[13-exl3-79]", f"{KPOOL}_pad_rows_write_nothing", f"{KPOOL}_batches_that_write_nothing",
            f"{TOKENS}[graphs asked for, drafts]",
        ),
        "the replay of a graph of a card; this model asks for none",
    ),
    Reported(
        14, "vllm-55605", at_github("vllm-project/vllm/issues/55605"),
        "1 to 2 % of the drafts are accepted",
        "as many are accepted as the draft layer's own drafts are worth, to the integer",
        (
            f"{ENGINE}[14-vllm-55605]", f"{DRAFTS}", f"{SIMULATED}_engine_accepts_exactly_the_simulated_drafts",
            f"{SIMULATED}_fault_in_the_head_changes_the_histogram[halves of eh_proj swapped]",
        ),
        "the share that the released weights reach, which are too large for it",
    ),
    Reported(
        15, "vllm-47448", at_github("vllm-project/vllm/pull/47448"),
        "the next draft is given the hidden state from before the norm",
        "it is given the one after `shared_head.norm`, normed once",
        (
            f"{ENGINE}[15-vllm-47448]", f"{DRAFTS}[random layer]",
            f"{SIMULATED}_fault_in_the_head_changes_the_histogram[pre-norm recycled]",
            "tests/e2e/test_glm_controls.py::test_fault_shows_in_the_drafts_alone[draft_hidden_before_the_final_norm]",
        ),
    ),
    Reported(
        16, "vllm-ascend-15864", at_github("vllm-project/vllm-ascend/issues/15864"),
        "the first draft of a round skips its choice, and later ones take other rows' choices",
        "the first chooses, and each later one has its own request's row",
        (
            f"{ENGINE}[16-vllm-ascend-15864]", f"{DRAFTS}[selection]",
            "tests/e2e/test_glm_controls.py::test_fault_shows_in_the_drafts_alone[draft_goes_by_the_last_rows_choice]",
            "tests/e2e/test_glm_controls.py::test_fault_shows_in_the_drafts_alone[draft_chooses_anew]",
        ),
    ),
    Reported(
        17, "sglang-36829", at_github("sgl-project/sglang/issues/36829"),
        "the draft layer is given all residual streams",
        "the streams are made one before the last norm, and the draft layer is given that",
        (f"{ENGINE}[17-sglang-36829]", f"{DRAFTS}", "tests/e2e/test_glm_logits.py::test_logits"),
    ),
    Reported(
        18, "sglang-37813", at_github("sgl-project/sglang/issues/37813"),
        "a verify step writes its states to wrong entries of the ring, and graphs replay memory that was freed",
        "the state after token t is in entry (history + t + 1) mod ring",
        (
            f"{OPERATORS}[18-sglang-37813]", f"{KDA}_verify_goes_on_from_any_accepted_token_in_any_order",
            "tests/framework/test_capture_guard.py::test_step_is_the_same_calls_on_the_same_memory",
        ),
        "memory that a graph of a card replays; on a CPU there are no graphs, so steps are compared by their addresses",
    ),
    Reported(
        19, "sglang-38297", at_github("sgl-project/sglang/pull/38297"),
        "the parsers that are chosen by themselves are wrong ones, and no call is found",
        "glm45 and glm47 are named, and find every call",
        (
            f"{ENGINE}[19-sglang-38297]", f"{REASONING}_no_parser_is_chosen_by_itself", f"{REASONING}_a_whole_answer",
            f"{CHAT}_an_answer_is_taken_apart",
        ),
    ),
    Reported(
        20, "vllm-45915", at_github("vllm-project/vllm/pull/45915"),
        "a call before the end of the reasoning is taken for reasoning; names cut off or alone are wrong",
        "a call ends the reasoning; a name is given when it is whole, and needs no arguments",
        (
            f"{ENGINE}[20-vllm-45915]", f"{REASONING}_a_streamed_answer", f"{REASONING}_an_end_may_come_with_nothing",
            f"{CHAT}_an_answer_is_taken_apart[a call before the end of the reasoning-stream]",
        ),
    ),
    Reported(
        21, "mlx-vlm-2030", at_github("Blaizzy/mlx-vlm/pull/2030"),
        "`swiglu_limit` is left out",
        "gate and up are clamped before SiLU in every MLP and expert",
        (
            f"{OPERATORS}[21-mlx-vlm-2030]", f"{MOE}_unit_is_that_of_transformers",
            f"{MOE}_mixture_is_that_of_transformers", f"{TOKENS}[a batch]",
        ),
    ),
    Reported(
        22, "nvfp4-6", at_github("MiaAI-Lab/GLM-5.3-Flash-NVFP4-Dual-DGX-Spark/issues/6"),
        "an NVFP4 checkpoint gives corrupted tokens, and lacks the draft layer",
        "a checkpoint in NVFP4 is refused by name, and so are drafts without their layer",
        (
            f"{ENGINE}[22-nvfp4-6]", f"{CONFIG}_what_is_refused",
            "tests/e2e/test_glm_checkpoint_types.py::test_a_spoilt_checkpoint_ends_the_start_by_name[no draft layer]",
        ),
        "the tokens of an NVFP4 checkpoint, which nothing here can run",
    ),
    Reported(
        23, "dflash2-4", at_github("tonyd2wild/GLM-5.3-Flash-NVFP4-DFlash2-2x-DGX-Spark/issues/4"),
        "the state that a chunk leaves is wrong, while its output is right",
        "the state is compared as well as the output",
        (
            f"{OPERATORS}[23-dflash2-4]", f"{KDA}_prefill_at_every_split_equals_one_shot",
            f"{KDA}_prefill_problems_of_peers[KV-P23-K-differs-from-V]",
        ),
    ),
    Reported(
        24, "vllm-backport-96", at_github("wtdcode/vllm-backport/issues/96"),
        "one token is repeated for ever, and 99 % of the drafts are accepted",
        "tokens are compared, whatever was accepted",
        (
            f"{ENGINE}[24-vllm-backport-96]", "tests/e2e/test_rules.py::test_identity_names_the_first_difference",
            f"{TOKENS}[prefix cache, chunks and drafts]",
        ),
        "pipeline parallelism, which LMDeploy's PyTorch engine does not have",
    ),
    Reported(
        25, "cula-89", at_github("inclusionAI/cuLA/issues/89"),
        "the exponential of a sum of gates overflows",
        "no factor of a decay is above 1, whatever the gates",
        (
            f"{OPERATORS}[25-cula-89]", f"{KDA}_prefill_holds_fp32_accuracy_under_any_gate",
            f"{KDA}_update_holds_fp32_accuracy_under_any_gate",
        ),
    ),
    Reported(
        26, "attention-gym-337", at_github("meta-pytorch/attention-gym/pull/337"),
        "a reference in the middle of a tile lets later tokens change the roundings of earlier ones",
        "the output of a prefix does not depend on what follows, bit for bit",
        (f"{OPERATORS}[26-attention-gym-337]", f"{KDA}_a_prefix_does_not_depend_on_later_tokens"),
    ),
    Reported(
        27, "fla-1090", at_github("fla-org/flash-linear-attention/pull/1090"),
        "gates behind the last key channel are read, and are NaN",
        "nothing behind a head's channels is read",
        (
            f"{OPERATORS}[27-fla-1090]", f"{KDA}_what_lies_behind_the_keys_is_not_read",
            f"{KDA}_prefill_problems_of_peers[VK-P27-K60-is-no-power-of-two]",
        ),
    ),
    Reported(
        28, "plugin-fl-57", at_github("flagos-ai/sglang-plugin-FL/pull/57"),
        "a kernel with `@triton.autotune` cannot be imported on Ascend",
        "no kernel has that decorator",
        (f"{OPERATORS}[28-plugin-fl-57]",),
        "the import on Ascend itself",
    ),
    Reported(
        29, "vllm-ascend-16178", at_github("vllm-project/vllm-ascend/issues/16178"),
        "with W8A8 weights and a context of a million tokens the engine does not start",
        "unknown; W8A8 weights are not served",
        (),
        "the start needs the memory and the W8A8 operators of a card, and the report does not say what fails",
    ),
    Reported(
        30, "lmdeploy-4958", at_github("InternLM/lmdeploy/issues/4958"),
        "a user asks for W4A16 weights with MTP",
        "they are refused by name before anything is loaded",
        (
            f"{ENGINE}[30-lmdeploy-4958]", f"{CONFIG}_other_quantisation_is_refused",
            "tests/e2e/test_glm_checkpoint_types.py::test_a_spoilt_checkpoint_ends_the_start_by_name"
            "[another quantisation]",
        ),
    ),
    Reported(
        31, "vllm-ascend-6695", at_github("vllm-project/vllm-ascend/issues/6695"),
        "Kimi-Linear fails on a 910B2 although its warm-up passes",
        "a warm-up on memory that holds anything leaves nothing behind",
        (
            f"{OPERATORS}[31-vllm-ascend-6695]", f"{KDA}_prefill_problems_of_peers[VK-P31-warm-up-then-use]",
            f"{KDA}_fresh_row_ignores_what_a_slot_holds",
        ),
        "what fails on the card, of which the report says no more",
    ),
    Reported(
        32, "llama.cpp-27752", at_github("ggml-org/llama.cpp/issues/27752"),
        "a converter writes the size of a pool under another key, and a default is taken for it",
        "`index_kpool` has to be in the checkpoint's own config.json",
        (
            "tests/framework/test_reported.py::test_the_size_of_a_pool[32-llama.cpp-27752-renamed]",
            "tests/framework/test_reported.py::test_the_size_of_a_pool[32-llama.cpp-27752-missing]",
            f"{CONFIG}_the_size_of_a_pool_is_never_a_default",
        ),
    ),
)  # fmt: skip

# What any implementation of these blocks should be tried with, and where that is done.
SITUATIONS: Final[dict[str, tuple[str, ...]]] = {
    "saturated and mixed gates": (
        f"{OPERATORS}[25-cula-89]",
        f"{KDA}_prefill_holds_fp32_accuracy_under_any_gate[saturated -5]",
        f"{KDA}_prefill_holds_fp32_accuracy_under_any_gate[P25-mixed 0/-5]",
    ),
    "first chunk in a dirty slot": (
        f"{OPERATORS}[31-vllm-ascend-6695]",
        f"{KDA}_fresh_row_ignores_what_a_slot_holds",
        f"{CONV}_fresh_row_in_a_dirty_slot_starts_from_zero",
    ),
    "splits at 1, 2, 3, 63, 64, 65 and width - 1": (
        f"{KDA}_prefill_at_every_split_equals_one_shot",
        f"{CONV}_chunks_equal_one_shot_at_every_split",
        f"{KPOOL}_choice_in_any_chunks_equals_one_shot",
    ),
    "packed rows, some of no tokens": (
        f"{KDA}_prefill_batch_matches_definition[0-0-0-7-plain-VK-HV=H]",
        f"{KPOOL}_batches_that_write_nothing",
        f"{LATENT}_pad_rows_and_empty_batches",
    ),
    "negative and padded slots": (
        f"{KDA}_prefill_pad_rows_touch_nothing",
        f"{KDA}_update_pad_rows_touch_nothing",
        f"{CONV}_pad_row_at_every_position",
        f"{KPOOL}_pad_rows_write_nothing",
    ),
    "keys and values of different width": (
        f"{OPERATORS}[02-vllm-41292]",
        f"{OPERATORS}[23-dflash2-4]",
        f"{KDA}_table_matches_definition",
    ),
    "every accepted count, and requests that change places": (
        f"{KDA}_verify_goes_on_from_any_accepted_token_in_any_order",
        f"{CONV}_verify_continues_after_every_accepted_count",
    ),
    "window after a prompt shorter than the width": (
        f"{OPERATORS}[06-vllm-56196]",
        f"{CONV}_state_of_every_length_and_history",
    ),
    "rejected drafts that complete a pool, from each place in it": (
        f"{OPERATORS}[09-llm-622]",
        f"{KPOOL}_rejected_drafts_leave_no_trace",
        "tests/e2e/test_glm_engine.py::test_rejected_drafts_complete_pools",
    ),
    "equal scores": (f"{KPOOL}_choice_of_drawn_batches[0-ties]", f"{KPOOL}_choice_by_hand"),
    "streams of a tiny root mean square": (
        f"{HYPER}_pre_is_that_of_transformers[torch.float32-0.0001]",
        f"{HYPER}_pre_written_out",
    ),
    "gate and up beyond the limit": (f"{OPERATORS}[21-mlx-vlm-2030]", f"{MOE}_unit_written_out"),
    "two steps of recycled drafts": (f"{DRAFTS}", f"{SIMULATED}_head_unrolls_as_written_out"),
}
