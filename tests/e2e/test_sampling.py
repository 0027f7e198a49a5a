"""Requests that sample, through the stock engine: our sampler runs, and a seed gives the same text in any batch."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from dlinfer_ext.e2e import server as serve
from tests.e2e.engine import ROOT
from tests.e2e.test_engine import PYTHON, TRAINED

pytestmark = [pytest.mark.lmdeploy]

TOKENS = 48


def request(text: str, seed: int | None, **more: Any) -> dict[str, Any]:
    return {"text": text, "new": TOKENS, "seed": seed, "top_k": 40, "temperature": 1.0, **more}


def ask(drafts: int, rounds: list[list[dict[str, Any]]], folder: Path, *plugins: str) -> dict[str, Any]:
    """Return a session's result: the tokens of all rounds in order under "tokens", and the counts of its process."""
    job, out = folder / "job.json", folder / "result.json"
    run = {"model": str(TRAINED), "drafts": drafts, "engine": {"num_gpu_blocks": 64}, "rounds": rounds}
    job.write_text(json.dumps({"plugins": plugins, "runs": [run]}))
    line = [sys.executable, "-m", "dlinfer_ext.framework.lmdeploy.session", str(job), str(out)]
    env = serve.environment(DLINFER_EXT_STRICT="1")
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(out.read_text())["runs"][0]
    tokens = [o["tokens"] for o in result["outputs"]]
    assert [len(t) for t in tokens] == [TOKENS] * sum(map(len, rounds))
    return {"tokens": tokens, **result["processes"][0]}


# The same request alone; among others that sample, with another top_k too; beside greedy ones and in another place.
ONE = request(PYTHON[1], 7)
ROUNDS = [
    [ONE],
    [ONE, *(request(text, 100 + i, top_k=64) for i, text in enumerate(PYTHON))],
    [request(PYTHON[0], None, top_k=1), request(PYTHON[2], 5), ONE],
    [request(PYTHON[1], 8)],
]
PLACES = (0, 1, 9)  # of the request in all rounds, one after the other
OTHER_SEED = 10


@pytest.mark.parametrize("drafts", [0, 3])
def test_the_same_seed_gives_the_same_text_in_any_batch(drafts: int, tmp_path: Path) -> None:
    result = ask(drafts, ROUNDS, tmp_path)
    alone, *others = (result["tokens"][i] for i in PLACES)
    assert others == [alone, alone]
    assert result["tokens"][OTHER_SEED] != alone
    assert result["counters"]["multinomial_sampling"] > 0
    if drafts:
        assert result["counters"]["rejection_sample"] > 0
        kept = {row[2] for row in result["verify_rows"]}
        assert kept == set(range(drafts + 1)), "drafts were kept in part, all and none"


def test_without_the_seeds_the_text_depends_on_the_batch(tmp_path: Path) -> None:
    """Negative control: LMDeploy as it is hands the sampler neither seeds nor positions."""
    result = ask(3, ROUNDS, tmp_path, "tests.e2e.unseeded")
    alone, *others = (result["tokens"][i] for i in PLACES)
    assert others != [alone, alone]


def test_a_greedy_batch_goes_through_our_sampler(tmp_path: Path) -> None:
    result = ask(3, [[request(text, None, top_k=1) for text in PYTHON]], tmp_path)
    assert result["counters"]["rejection_sample_greedy"] > 0
    assert "rejection_sample" not in result["counters"]
    assert len(result["verify_rows"]) >= result["counters"]["verify_steps"] > 0


@pytest.mark.xdist_group("ports")
def test_the_engine_process_of_a_server_leaves_its_record(tmp_path: Path) -> None:
    port, folder = serve.free_port(), tmp_path / "counters"
    line = serve.command(TRAINED, "tiny", port, 3)
    ask_for = {"model": "tiny", "prompt": PYTHON[1], "max_tokens": TOKENS, "temperature": 1.0, "seed": 7}
    body = json.dumps(ask_for | {"top_k": 40, "ignore_eos": True}).encode()
    with serve.serving(line, "tiny", port, serve.environment(DLINFER_EXT_COUNTERS=str(folder))) as server:
        headers = {"Content-Type": "application/json"}
        answers = []
        for _ in range(2):
            post = urllib.request.Request(f"{server.url}/v1/completions", body, headers)
            with urllib.request.urlopen(post, timeout=60) as reply:
                answers.append(json.load(reply)["choices"][0]["text"])
    assert answers[0] == answers[1], "the same seed gave two texts"
    files = list(folder.glob("counters-*.json"))
    assert len(files) == 1
    record = json.loads(files[0].read_text())
    assert record["pid"] != server.pid
    assert record["counters"]["rejection_sample"] > 0
    emitted = sum(row[2] + 1 for row in record["verify_rows"])
    assert emitted >= 2 * (TOKENS - 1)
