"""Compare stock LMDeploy on the CPU vendor with Hugging Face transformers: greedy tokens and logits of a checkpoint.

    DLINFER_EXT_VENDOR=cpu DLINFER_EXT_CPU_DTYPE=float32 python examples/compare_with_transformers.py

LMDeploy continues each prompt. transformers reads the whole text once and gives its logits at the same places, so that
a token on which the two part does not hide what comes after. Printed for each prompt: tokens on which both agree, and
the largest difference |LMDeploy - transformers| of the ten largest logits at each place.

Exit code 1: a difference above --tolerance, or another token where the two best logits of transformers are further
apart than twice that. In fp32 any such token is a fault; in fp16 and bf16 rounding decides near ties, so give a
tolerance to match.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import transformers
from lmdeploy import GenerationConfig, PytorchEngineConfig, pipeline
from lmdeploy.messages import Response, SpeculativeConfig

CHECKPOINT = Path(__file__).parent / "checkpoints" / "tiny_qwen3_5"
METHODS = {"qwen3_5": "qwen3_5_mtp", "qwen3_5_moe": "qwen3_5_mtp", "glm5_next": "deepseek_mtp"}
PROMPTS = (
    "import os\n\n\ndef read_file(path):\n",
    "class Server:\n    def __init__(self, host, port):\n" * 4,
    "x",
)


def ask_lmdeploy(args: argparse.Namespace, prompts: list[str], kind: str) -> list[Response]:
    """Return LMDeploy's greedy answers with the ten largest raw logits at each place."""
    engine = PytorchEngineConfig(
        device_type="ascend",
        eager_mode=True,
        language_model_only=True,
        session_len=2048,
        max_batch_size=8,
        cache_max_entry_count=0.2,
        max_prefill_token_num=args.chunk,
        logprobs_mode="raw_logits",
    )
    drafts = SpeculativeConfig(method=METHODS[kind], num_speculative_tokens=args.drafts) if args.drafts else None
    config = GenerationConfig(max_new_tokens=args.tokens, do_sample=False, ignore_eos=True, logprobs=10)
    with pipeline(args.model, backend_config=engine, speculative_config=drafts, log_level="ERROR") as pipe:
        answers: list[Response] = pipe(prompts, gen_config=config, do_preprocess=False)
    return answers


def compare(
    answer: Response, prompt: list[int], model: transformers.PreTrainedModel, margin: float
) -> tuple[int, int, float]:
    """Return how many tokens are transformers' own, how many differ though it is sure, and the largest difference.

    Args:
        answer: LMDeploy's, with `token_ids` and, for each, `logprobs`: {id: raw logit}.
        prompt: ids.
        model: of transformers, in fp32.
        margin: a best logit that is further ahead than this is sure.
    """
    ids = torch.tensor([prompt + answer.token_ids])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    logits[:, end_tokens(model)] = -torch.inf  # ignore_eos
    best, chosen = logits.max(-1)
    same = wrong = 0
    largest = 0.0
    for place, (token, given) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        same += token == chosen[place].item()
        wrong += (best[place] - logits[place, token]).item() > margin
        for other, value in given.items():
            if torch.isfinite(logits[place, other]):
                largest = max(largest, abs(value - logits[place, other].item()))
    return same, wrong, largest


def end_tokens(model: transformers.PreTrainedModel) -> list[int]:
    end = model.generation_config.eos_token_id
    return [] if end is None else end if isinstance(end, list) else [end]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", nargs="?", default=str(CHECKPOINT), help="checkpoint folder (default: the trained one)"
    )
    parser.add_argument("--reference", help="folder that transformers reads (default: the same)")
    parser.add_argument("--prompt", action="append", help="a text to continue; may be repeated")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to generate per prompt (default 32)")
    parser.add_argument("--drafts", type=int, default=0, help="draft tokens per step (default 0)")
    parser.add_argument("--chunk", type=int, default=4096, help="tokens of a prefill step (default 4096)")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="of a logit (default 1e-3, for fp32)")
    args = parser.parse_args()
    prompts = args.prompt or list(PROMPTS)

    transformers.logging.set_verbosity_error()
    folder = args.reference or args.model
    kind = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False).model_type
    if args.drafts and kind not in METHODS:
        parser.error(f"--drafts: {folder} is of model type {kind!r}; wanted one of {', '.join(METHODS)}")
    answers = ask_lmdeploy(args, prompts, kind)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    model = getattr(transformers, config.architectures[0]).from_pretrained(folder, dtype=torch.float32).eval()

    ok = True
    greatest = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        if answer.finish_reason != "length":
            print(f"{prompt[:24]!r}: LMDeploy ended with {answer.finish_reason}: {answer.error_message or ''}")
            return 1
        same, wrong, largest = compare(answer, tokenizer(prompt).input_ids, model, 2 * args.tolerance)
        greatest = max(greatest, largest)
        ok &= wrong == 0 and largest <= args.tolerance
        equal = f"{same} of {len(answer.token_ids)} tokens equal"
        print(f"{prompt[:24]!r}: {equal}, max |difference| of a logit {largest:.2e}")
    dtype = os.environ.get("DLINFER_EXT_CPU_DTYPE", "auto")
    verdict = "equal" if ok else "DIFFERENT"
    print(f"max |difference| {greatest:.2e}, tolerance {args.tolerance:.0e}, dtype {dtype}: {verdict}")
    return 0 if ok else 1


# LMDeploy starts workers that import this file again.
if __name__ == "__main__":
    sys.exit(main())
