"""The stock server on the trained checkpoint: what clients do to it, with MTP and prefix caching on."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from openai import BadRequestError, OpenAI
from transformers import AutoTokenizer

from dlinfer_ext.e2e import server as serve
from tests.e2e.engine import ROOT, expected

pytestmark = [pytest.mark.lmdeploy, pytest.mark.xdist_group("ports")]
CHECKPOINT = ROOT / "examples" / "checkpoints" / "tiny_qwen3_5"
MODEL = "tiny"
PROMPT = "class Server:\n    def __init__(self, host, port):\n"
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"top_k": 1, "ignore_eos": True}}


@pytest.fixture(scope="module")
def server() -> Iterator[serve.Server]:
    port = serve.free_port()
    extra = ("--enable-prefix-caching", "--max-prefill-token-num", "64")
    line = serve.command(CHECKPOINT, MODEL, port, 3, extra)
    with serve.serving(line, MODEL, port, serve.environment()) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: serve.Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0)


def post(server: serve.Server, path: str, body: object) -> tuple[int, str]:
    where = urlsplit(server.url)
    connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=60)
    text = body if isinstance(body, str) else json.dumps(body)
    connection.request("POST", path, text, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    return reply.status, reply.read().decode()


def metric(server: serve.Server, name: str) -> float:
    rows = re.findall(rf"^lmdeploy:{name}(?:\{{.*?\}})? (\S+)$", server.get("/metrics"), re.MULTILINE)
    return sum(map(float, rows))


def text_of(ids: list[int]) -> str:
    text: str = AutoTokenizer.from_pretrained(CHECKPOINT).decode(ids)
    return text


def test_generate_is_token_identical(server: serve.Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 48, "temperature": 0, "top_k": 1, "ignore_eos": True}
    status, reply = post(server, "/generate", body)
    assert status == 200
    assert json.loads(reply)["output_ids"] == expected(CHECKPOINT, (PROMPT,), 48)[0]


def test_completion_and_stream_give_the_same_text(client: OpenAI) -> None:
    want = text_of(expected(CHECKPOINT, (PROMPT,), 48)[0])
    whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=48, **GREEDY)
    assert whole.choices[0].text == want
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 48
    parts = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=48, stream=True, **GREEDY)
    pieces = [p.choices[0].text for p in parts if p.choices]
    assert "".join(pieces) == want
    assert len(pieces) > 3, "one piece is no stream"


def test_chat_follows_the_checkpoints_template(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "def main():"}]
    reply = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=24, **GREEDY)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    want = text_of(expected(CHECKPOINT, (prompt,), 24)[0])
    message = reply.choices[0].message
    assert (message.content or "") in want
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 24
    assert reply.usage.prompt_tokens == len(tokenizer(prompt).input_ids)


def test_cancelled_stream_leaves_nothing_behind(server: serve.Server, client: OpenAI) -> None:
    """A request that goes away in mid-stream frees its slot, and the next answer in that slot is right."""
    for _ in range(3):
        stream = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1500, stream=True, **GREEDY)
        for seen, _part in enumerate(stream):
            if seen == 3:
                break
        stream.close()
    deadline = time.monotonic() + 30
    while metric(server, "num_requests_running") > 0:
        assert time.monotonic() < deadline, "a cancelled request still runs"
        time.sleep(0.2)
    reply = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=48, **GREEDY)
    assert reply.choices[0].text == text_of(expected(CHECKPOINT, (PROMPT,), 48)[0])


def test_metrics_count_accepted_drafts_and_prefix_hits(server: serve.Server, client: OpenAI) -> None:
    long = PROMPT * 12
    for _ in range(3):
        client.completions.create(model=MODEL, prompt=long, max_tokens=16, **GREEDY)
    assert metric(server, "spec_decode_num_accepted_tokens_total") > 0
    assert metric(server, "spec_decode_num_drafts_total") > 0
    assert metric(server, "generation_tokens_total") > 0
    deadline = time.monotonic() + 15  # the gauge is set once a second or so
    while metric(server, "prefix_cache_hit_rate") <= 0:
        assert time.monotonic() < deadline, "no prefix was found in the cache"
        time.sleep(0.5)


MALFORMED: dict[str, tuple[str, object]] = {
    "not-json": ("/v1/completions", "{not json"),
    "no-prompt": ("/v1/completions", {"model": MODEL}),
    "wrong-type": ("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": "many"}),
    "no-messages": ("/v1/chat/completions", {"model": MODEL, "messages": 7}),
}


@pytest.mark.parametrize(("path", "body"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_request_gets_a_client_error(server: serve.Server, path: str, body: object) -> None:
    status, reply = post(server, path, body)
    assert 400 <= status < 500, (status, reply)
    assert reply
    assert "id" in server.get("/v1/models")


def test_negative_temperature_is_refused_by_name(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="temperature"):
        client.completions.create(model=MODEL, prompt="a", max_tokens=4, temperature=-1)
