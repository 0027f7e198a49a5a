"""Generate text offline with stock LMDeploy and multi-token prediction (MTP).

Nothing of dlinfer_ext is imported: it enters LMDeploy's processes by itself. On a machine with no card:

    DLINFER_EXT_VENDOR=cpu python examples/offline_pipeline.py

On an Ascend machine leave the variable unset and pass the model to serve:

    python examples/offline_pipeline.py Qwen/Qwen3.5-9B --prompt "The capital of France is"
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lmdeploy import GenerationConfig, PytorchEngineConfig, pipeline
from lmdeploy.messages import SpeculativeConfig

CHECKPOINT = Path(__file__).parent / "checkpoints" / "tiny_qwen3_5"
PROMPTS = (
    "import os\n\n\ndef read_file(path):\n",
    "class Server:\n    def __init__(self, host, port):\n",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", nargs="?", default=str(CHECKPOINT), help="checkpoint folder (default: the trained one)"
    )
    parser.add_argument("--prompt", action="append", help="a text to continue; may be repeated")
    parser.add_argument("--drafts", type=int, default=4, help="draft tokens per step; 0 turns MTP off (default 4)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate per prompt (default 64)")
    parser.add_argument("--tp", type=int, default=1, help="ranks of tensor parallelism (default 1)")
    args = parser.parse_args()

    engine = PytorchEngineConfig(
        device_type="ascend",
        eager_mode=True,  # graphs exist on a card only; leave this out there
        tp=args.tp,
        session_len=2048,
        max_batch_size=8,
        cache_max_entry_count=0.2,
        language_model_only=True,  # the trained checkpoint holds no trained vision part
    )
    drafts = SpeculativeConfig(method="qwen3_5_mtp", num_speculative_tokens=args.drafts) if args.drafts else None
    config = GenerationConfig(max_new_tokens=args.tokens, do_sample=False, ignore_eos=True)
    prompts = args.prompt or list(PROMPTS)
    with pipeline(args.model, backend_config=engine, speculative_config=drafts, log_level="ERROR") as pipe:
        for prompt, output in zip(prompts, pipe(prompts, gen_config=config, do_preprocess=False), strict=True):
            print(f"--- {output.input_token_len} tokens in, {output.generate_token_len} out")
            print(prompt + output.text)


# LMDeploy starts workers that import this file again.
if __name__ == "__main__":
    main()
