"""GLM-5.3-Flash through the stock server in fp32: concurrent requests get transformers' greedy text, token by token.

Chunks, drafts and the prefix cache are on at once: on one rank, and on two.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from dlinfer_ext.e2e import client
from dlinfer_ext.e2e import server as serve
from tests.e2e.checkpoints import checkpoint  # noqa: F401
from tests.e2e.engine import PROMPTS
from tests.e2e.glm_checkpoints import random_glm5_next
from tests.e2e.glm_reference import assert_greedy

pytestmark = [pytest.mark.lmdeploy, pytest.mark.long, pytest.mark.xdist_group("ports")]
MODEL: Final = "tiny"
TOKENS: Final = 24
FOX: Final = "The quick brown fox jumps over the lazy dog. " * 10  # 450 tokens: seven chunks
FOXES: Final = (FOX, FOX + " And then?", FOX[:400] + "zzz", FOX)
OPTIONS: Final = ("--enable-prefix-caching", "--prefix-cache-state-budget", "8", "--max-prefill-token-num", "64")
RAN: Final = (
    "kda", "kda_update", "kpool_select", "sparse_latent_attention", "prefill_rows_with_history", "shared_choice",
    "verify_steps",
)  # fmt: skip


def assert_ran(folder: Path, ranks: int, *counters: str) -> None:
    """Fail unless as many processes ran a model, and each counted all of these."""
    records = [json.loads(file.read_text())["counters"] for file in folder.glob("counters-*.json")]
    assert len(records) == ranks
    lacking = [{c for c in counters if not record.get(c)} for record in records]
    assert not any(lacking), lacking


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, id="one-rank"), pytest.param(2, id="two-ranks")],
)
def server(
    request: pytest.FixtureRequest,
    checkpoint: Callable[..., Path],  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[serve.Server]:
    """A server; in the end, what has to have run on each of its ranks."""
    port = serve.free_port()
    extra = OPTIONS if request.param == 1 else (*OPTIONS, "--tp", str(request.param))
    line = serve.command(checkpoint(random_glm5_next), MODEL, port, 3, extra)
    counted = tmp_path_factory.mktemp("counted")
    # Where Ray is installed LMDeploy would take it for two ranks.
    env = serve.environment(LMDEPLOY_EXECUTOR_BACKEND="mp", DLINFER_EXT_COUNTERS=str(counted))
    with serve.serving(line, MODEL, port, env) as running:
        yield running
    assert_ran(counted, request.param, *RAN)


def metric(server: serve.Server, name: str) -> float:
    rows = re.findall(rf"^lmdeploy:{name}(?:\{{.*?\}})? (\S+)$", server.get("/metrics"), re.MULTILINE)
    return sum(map(float, rows))


def asked(server: serve.Server, prompts: list[str], wait: float = 0.0) -> list[list[int]]:
    """Return the tokens of requests that arrive `wait` seconds after each other."""
    requests: list[dict[str, Any]] = [{"text": p, "new": TOKENS, "wait": wait * i} for i, p in enumerate(prompts)]
    answers = client.ask_all(server.url, requests, 120)
    assert [a["error"] for a in answers] == [None] * len(prompts)
    return [a["tokens"] for a in answers]


def judge(model: Path, prompts: list[str], tokens: list[list[int]]) -> None:
    assert_greedy(model, [prompts], {"tokens": tokens, "counters": {}}, TOKENS)


def test_concurrent_requests_are_token_identical(server: serve.Server, checkpoint: Callable[..., Path]) -> None:  # noqa: F811
    """Short and long ones, some of which begin while others are under way."""
    prompts = [*PROMPTS, FOX, *PROMPTS]
    judge(checkpoint(random_glm5_next), prompts, asked(server, prompts, wait=0.1))
    assert metric(server, "spec_decode_num_accepted_tokens_total") > 0


def test_prompts_of_one_beginning_are_token_identical(server: serve.Server, checkpoint: Callable[..., Path]) -> None:  # noqa: F811
    prompts = list(FOXES)
    tokens = [asked(server, [prompt])[0] for prompt in prompts]  # one after the other: what is stored is found
    judge(checkpoint(random_glm5_next), prompts, tokens)
    deadline = time.monotonic() + 15  # the gauge is set once a second or so
    while metric(server, "prefix_cache_hit_rate") <= 0:
        assert time.monotonic() < deadline, "no prefix was found in the cache"
        time.sleep(0.5)


PIPELINE: Final = """
import sys
from lmdeploy import GenerationConfig, PytorchEngineConfig, pipeline
from PIL import Image

engine = PytorchEngineConfig(device_type="ascend", eager_mode=True, num_gpu_blocks=16, session_len=256)
short = GenerationConfig(max_new_tokens=4, do_sample=False, ignore_eos=True)
with pipeline(sys.argv[1], backend_config=engine, log_level="CRITICAL") as pipe:
    for asked in (["one", "two"], ("one", Image.new("RGB", (28, 28))), ["one", "two"]):
        answers = pipe(asked, gen_config=short)
        for answer in answers if isinstance(answers, list) else [answers]:
            print("answer", answer.finish_reason, answer.generate_token_len, answer.error_message)
"""


def test_a_pipeline_refuses_an_image_and_goes_on(checkpoint: Callable[..., Path]) -> None:  # noqa: F811
    """As it comes: no option says that the model is for text only."""
    line = [sys.executable, "-c", PIPELINE, str(checkpoint(random_glm5_next))]
    done = subprocess.run(line, env=serve.environment(), capture_output=True, text=True, timeout=180)
    answers = [text for text in done.stdout.splitlines() if text.startswith("answer ")]
    whole = ["answer length 4 None"] * 2
    refused = ["answer error 0 Multimodal input is not supported by this model."]
    assert answers == [*whole, *refused, *whole], done.stderr[-3000:]
