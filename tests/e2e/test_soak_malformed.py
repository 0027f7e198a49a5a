"""Every kind of malformed request beside answers that are under way: each is refused, and no answer differs."""

from __future__ import annotations

from typing import Final

import pytest

from dlinfer_ext.e2e import client, malformed, soak
from dlinfer_ext.e2e import server as serve
from dlinfer_ext.e2e.soak import Refused
from tests.e2e.engine import PROMPTS, ROOT, expected

pytestmark = [pytest.mark.lmdeploy, pytest.mark.xdist_group("ports")]
CHECKPOINT: Final = ROOT / "examples" / "checkpoints" / "tiny_qwen3_5"
TOKENS: Final = 48


def test_malformed_requests_are_refused_and_disturb_nobody() -> None:
    port = serve.free_port()
    line = serve.command(CHECKPOINT, "tiny", port, 3, ("--enable-prefix-caching", "--max-prefill-token-num", "64"))
    kinds = malformed.requests("tiny")
    asked = [{"text": text, "new": TOKENS} for text in PROMPTS]
    # Some together with the answers' beginning, some while they are under way.
    wrong = [{"post": post, "wait": 0.01 * number} for number, post in enumerate(kinds.values())]
    most = {"text": "hello", "new": 4, "top_k": 1_000_000, "temperature": 1e-6}
    with serve.serving(line, "tiny", port, serve.environment()) as running:
        answers = client.ask_all(running.url, [*asked, *wrong, most], 120)
        assert "healthy" in running.get("/health")
        later = client.ask_all(running.url, asked, 120)
    assert not soak.not_refused([Refused(name, 0.0) for name in kinds], answers[len(asked) : -1])
    want = expected(CHECKPOINT, PROMPTS, TOKENS)
    for got in (answers[: len(asked)], later):
        assert [a["error"] for a in got] == [None] * len(asked)
        assert [a["tokens"] for a in got] == want
    assert len(answers[-1]["tokens"]) == 4, "a top_k above the vocabulary is no limit"
