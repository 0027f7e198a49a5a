"""Start an engine on each of several checkpoints in one process and say how each start ends.

    python -m tests.e2e.start_each JOBS.json RESULTS.json

A job is {"model", "drafts"}; a result {"error": type of the exception or None, "message"}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def start(job: dict[str, Any]) -> dict[str, Any]:
    from lmdeploy import PytorchEngineConfig, pipeline
    from lmdeploy.messages import SpeculativeConfig

    more: dict[str, Any] = {}
    if job.get("drafts"):
        more["speculative_config"] = SpeculativeConfig(method="deepseek_mtp", num_speculative_tokens=job["drafts"])
    engine = PytorchEngineConfig(
        device_type="ascend", eager_mode=True, max_batch_size=2, session_len=256, num_gpu_blocks=16
    )
    try:
        with pipeline(job["model"], backend_config=engine, log_level="ERROR", **more):
            return {"error": None, "message": ""}
    except (Exception, SystemExit) as error:  # LMDeploy logs what its check of the config finds, and exits
        return {"error": type(error).__name__, "message": str(error)}


if __name__ == "__main__":
    jobs = json.loads(Path(sys.argv[1]).read_text())
    results = []
    for job in jobs:
        results.append(start(job))
        Path(sys.argv[2]).write_text(json.dumps(results))  # what there is, should a later start not end
