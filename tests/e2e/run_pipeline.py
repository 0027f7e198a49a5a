"""Run one scenario through stock `lmdeploy.pipeline` in a process of its own, and print one JSON line.

The part that serves is what a user writes: no import of this package before the answers are there. Faults for negative
controls and the count of accepted drafts are put in from outside, by name.

Usage: python -m tests.e2e.run_pipeline SCENARIO.json
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

MARK = "RESULT "


def count_accepted(histogram: Counter[int]) -> None:
    """Count accepted drafts per verify step and row, at LMDeploy's own greedy rejection sampler."""
    from lmdeploy.pytorch.backends.default import rejection_sampling as module

    original = module.torch_greedy_rejection_sample

    def counting(target: Any, drafts: Any) -> Any:
        out = original(target, drafts)
        histogram.update(drafts.size(1) - int(r) for r in out[1].tolist())
        return out

    module.torch_greedy_rejection_sample = counting


def run(scenario: dict[str, Any]) -> dict[str, Any]:
    from lmdeploy import GenerationConfig, PytorchEngineConfig, pipeline
    from lmdeploy.messages import SpeculativeConfig

    histogram: Counter[int] = Counter()
    count_accepted(histogram)
    if scenario.get("fault"):
        from tests.faults import plant

        plant(scenario["fault"])
    engine = {
        "device_type": "ascend",
        "eager_mode": True,
        "max_batch_size": 8,
        "num_gpu_blocks": 64,
        "session_len": 1024,
        "language_model_only": True,
        **scenario.get("engine", {}),
    }
    if scenario.get("top_logits"):
        engine["logprobs_mode"] = "raw_logits"
    more: dict[str, Any] = {}
    if scenario.get("drafts"):
        more["speculative_config"] = SpeculativeConfig(method="qwen3_5_mtp", num_speculative_tokens=scenario["drafts"])
    pipe = pipeline(scenario["model"], backend_config=PytorchEngineConfig(**engine), log_level="ERROR", **more)
    config = GenerationConfig(
        max_new_tokens=scenario["tokens"],
        do_sample=False,
        ignore_eos=True,
        logprobs=scenario.get("top_logits") or None,
    )
    outputs = []
    with pipe:
        for batch in scenario["batches"]:
            outputs += pipe(batch, gen_config=config, do_preprocess=False)
    from dlinfer_ext.framework.lmdeploy import counters, status

    return {
        "tokens": [o.token_ids for o in outputs],
        "finish": [o.finish_reason for o in outputs],
        "cached_tokens": [o.cached_tokens for o in outputs],
        "top_logits": [o.logprobs for o in outputs],
        "accepted": {str(k): v for k, v in sorted(histogram.items())},
        "counters": counters.snapshot(),
        "status": status(),
    }


if __name__ == "__main__":
    result = run(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    sys.stdout.write(MARK + json.dumps(result) + "\n")
