"""How a soak judges a server, without one: what is drawn, what is not freed or refused, and memory that grows."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from dlinfer_ext.e2e import client, malformed, memory, scenario, soak
from dlinfer_ext.e2e.scenario import Soak, Span
from dlinfer_ext.e2e.soak import Refused

LOAD = scenario.load(scenario.find("soak_load")).soak
OLD = scenario.load(scenario.find("soak")).soak
MINUTES = 5


def test_what_is_drawn_has_the_shares_and_the_time_that_it_says() -> None:
    assert LOAD is not None
    requests, refused = soak.drawn(LOAD)
    assert (requests, refused) == soak.drawn(LOAD)
    assert len(requests) + len(refused) == LOAD.requests == 500
    assert len(refused) == pytest.approx(0.05 * 500, abs=10)
    assert len({r.name for r in refused}) == len(refused)
    assert sum(r.cancel_after is not None for r in requests) == pytest.approx(0.1 * len(requests), abs=15)
    again = [r for r in requests if r.line is not None]
    assert len(again) == pytest.approx(LOAD.again * len(requests), abs=15)
    assert {r.tokens for r in again} == {LOAD.again_tokens}
    lengths = {r.tokens for r in requests if r.line is None}
    assert min(lengths) < 10
    assert 290 < max(lengths) <= 300
    assert max(r.wait for r in requests) == pytest.approx(60 * MINUTES, rel=0.15)


def test_a_soak_of_old_draws_what_it_drew() -> None:
    """Its answers are known to hold; nothing malformed, nothing twice."""
    assert OLD is not None
    draw, at = random.Random(OLD.seed), 0.0
    requests, refused = soak.drawn(OLD)
    assert not refused
    for request in requests:
        at += draw.expovariate(OLD.per_second)
        assert isinstance(OLD.new, list)
        assert isinstance(OLD.tokens, list)
        new = draw.choice(OLD.new)
        gone = new > 4 and draw.random() < OLD.cancelled
        assert (request.wait, request.new, request.tokens) == (at, new, draw.choice(OLD.tokens))
        assert request.cancel_after == (draw.randint(1, 4) if gone else None)


def test_a_span_is_in_order() -> None:
    assert Span(least=3, most=3).most == 3
    with pytest.raises(ValueError, match="most is 2; wanted at least least, 3"):
        Span(least=3, most=2)


def held(**changes: int) -> dict[str, int]:
    idle = {"slots": 17, "slots_free": 5, "slots_cached": 12, "blocks": 55, "blocks_free": 9, "blocks_cached": 46}
    return idle | {"sequences": 0, "sessions": 0} | changes


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, []),
        ({"slots_free": 4}, ["1 of 17 state slots are neither free nor cached"]),
        ({"blocks_cached": 43}, ["3 of 55 blocks are neither free nor cached"]),
        ({"slots_free": 6}, ["-1 of 17 state slots are neither free nor cached"]),  # one is free twice
        ({"sequences": 2}, ["2 sequences are left"]),
        ({"sessions": 1}, ["1 sessions are left"]),
    ],
)
def test_what_is_not_freed_is_told(changes: dict[str, int], told: list[str]) -> None:
    assert soak.not_freed(held(**changes)) == told


def test_an_engine_without_a_record_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "SETTLE_S", 0.3)
    assert soak.settled(tmp_path, time.time()) is None
    assert soak.not_freed(None) == ["the engine left no record of what it holds"]
    busy = {"time": time.time() + 1, "sequences": 1}
    (tmp_path / "paging-7.json").write_text(json.dumps(busy))
    assert soak.settled(tmp_path, time.time()) == busy
    idle = {"time": time.time() + 1, "sequences": 0}
    (tmp_path / "paging-7.json").write_text(json.dumps(idle))
    assert soak.settled(tmp_path, time.time()) == idle


MESSAGE = '{"message": "top_p 2 must be in (0, 1]", "code": 400}'


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ({"status": 400, "text": MESSAGE}, None),
        ({"status": 404, "text": '{"detail": "Not Found"}'}, None),
        ({"status": 200, "text": "{}"}, "status 200; wanted 4xx"),
        ({"status": 500, "text": "Internal Server Error"}, "status 500; wanted 4xx"),
        ({"status": 503, "text": MESSAGE}, "status 503; wanted 4xx"),
        ({"status": 400, "text": ""}, "status 400 without a message"),
        ({"status": 400, "text": '{"message": ""}'}, "status 400 without a message"),
        ({"status": 0, "text": "", "error": "TimeoutError: "}, "TimeoutError"),
    ],
)
def test_what_is_not_refused_is_told(answer: dict[str, Any], told: str | None) -> None:
    failures = soak.not_refused([Refused("top_p above 1", 0.0)], [{"error": None} | answer])
    assert len(failures) == (told is not None)
    if told:
        assert "malformed (top_p above 1): " in failures[0]
        assert told in failures[0]


def test_malformed_requests_are_of_every_kind() -> None:
    kinds = malformed.requests("tiny")
    assert len(kinds) == len(set(kinds.values())) > 45
    assert {path for path, _ in kinds.values()} == {malformed.GENERATE, malformed.COMPLETIONS, malformed.CHAT}


# ------------------------------------------------------------------------------------------------------------- memory


def samples(mib: Callable[[float], float], noise: float = 0.0, seconds: int = 300) -> list[memory.Sample]:
    draw = random.Random(3)
    return [(float(s), mib(s) + draw.uniform(-noise, noise)) for s in range(seconds)]


def judged(series: list[memory.Sample], warm_up_s: float = 90) -> float:
    return memory.growth(memory.medians(series, warm_up_s))


def warming(s: float) -> float:
    return 700 - 300 * max(0.0, 60 - s) / 60


def test_a_server_that_only_warms_up_does_not_grow() -> None:
    assert abs(judged(samples(warming, noise=8))) < 0.005


def test_a_mib_of_every_ten_requests_is_found() -> None:
    """1.75 requests a second, 700 MiB: 37 MiB after the warm-up."""
    assert 0.04 < judged(samples(lambda s: warming(s) + 0.175 * s, noise=8)) < 0.06


def test_one_window_that_stands_out_is_no_leak() -> None:
    assert abs(judged(samples(lambda s: warming(s) + (60 if 180 <= s < 215 else 0)))) < 0.005


def test_what_is_lost_once_counts_little_and_what_is_lost_again_and_again_does() -> None:
    assert judged(samples(lambda s: warming(s) + 10 * ((s - 90) // 35))) > 0.05


def test_memory_is_not_judged_by_too_few_samples() -> None:
    with pytest.raises(ValueError, match="no sample after a warm-up of 90 s"):
        memory.medians(samples(warming, seconds=80), 90)
    with pytest.raises(ValueError, match="one has none"):
        memory.medians([(0.0, 1.0), (100.0, 1.0), (300.0, 1.0)], 90)


def test_memory_of_a_tree_counts_children() -> None:
    """40 MiB in a child of a child."""
    grand = "b = b'1' * (40 << 20); print('up', flush=True); import time; time.sleep(60)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grand!r}])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "up"
        with memory.watched(process.pid, every_s=0.05) as seen:
            time.sleep(0.4)
        assert len(seen) >= 3
        assert all(40 < mib < 80 for _, mib in seen)
    finally:
        os.killpg(process.pid, 9)
        process.wait(10)
    assert memory.of_tree(process.pid) == 0


# ------------------------------------------------------------------------------------------------------------- client


def answered_by(lines: list[str], request: dict[str, Any]) -> dict[str, Any]:
    """Return what the client makes of a server that streams these lines."""

    async def stream(asked: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(asked)
        for line in lines:
            await reply.write(f"data: {line}\n\n".encode())
        return reply

    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"message": "no"}, status=404)

    async def everything() -> dict[str, Any]:
        app = web.Application()
        app.router.add_post("/generate", stream)
        app.router.add_post("/v1/completions", refuse)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server: Any = site._server
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            return (await asyncio.to_thread(client.ask_all, url, [request], 10.0))[0]
        finally:
            await runner.cleanup()

    return asyncio.run(everything())


TOKEN = '{"output_ids": [5], "meta_info": {"prompt_tokens": 1}}'
LAST = '{"output_ids": [6], "meta_info": {"prompt_tokens": 1, "finish_reason": {"type": "length"}}}'
ASK = {"text": "a", "new": 2}


def test_an_answer_that_ends_is_no_error() -> None:
    result = answered_by([TOKEN, LAST, "[DONE]"], ASK)
    assert (result["tokens"], result["finish"], result["error"]) == ([5, 6], "length", None)


def test_an_error_in_mid_stream_is_one() -> None:
    """The status was 200 by then: the server can only say it in the stream."""
    result = answered_by([TOKEN, '{"error": {"message": "The inference engine is unavailable."}}', "[DONE]"], ASK)
    assert (result["tokens"], result["finish"]) == ([5], None)
    assert "error in mid-stream" in result["error"]
    assert "engine is unavailable" in result["error"]


def test_a_stream_without_an_end_is_an_error() -> None:
    result = answered_by([TOKEN], ASK)
    assert result["error"] == "the stream ended after 1 tokens without a reason"


def test_a_client_that_goes_away_has_no_error() -> None:
    result = answered_by([TOKEN, TOKEN, LAST], ASK | {"cancel_after": 1})
    assert (result["tokens"], result["finish"], result["error"]) == ([5], "abort", None)


def test_a_body_is_sent_as_it_is() -> None:
    result = answered_by([], {"post": ("/v1/completions", "{not json")})
    assert result == {"status": 404, "text": '{"message": "no"}', "error": None}


def test_settings_out_of_range_are_refused() -> None:
    given: dict[str, Any] = {"requests": 1, "seed": 1, "tokens": [1], "new": [1], "per_second": 1}
    assert Soak(**given).malformed == 0
    for name, value in (("malformed", 1.0), ("again", 2), ("growth", 0), ("warm_up_s", -1)):
        with pytest.raises(ValueError, match=name):
            Soak(**given | {name: value})
