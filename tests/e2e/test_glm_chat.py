"""GLM-5.3-Flash's chat through the stock server: prompts, reasoning, calls, and images, which are refused.

What the model says is scripted, so that everything around it can be written out. Requests that have no script get
transformers' greedy text, with chunks and the prefix cache on; test_glm_server.py does more of that.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from openai import BadRequestError, OpenAI
from PIL import Image
from transformers import AutoTokenizer

from dlinfer_ext.e2e import client
from dlinfer_ext.e2e import server as serve
from tests.e2e.checkpoints import checkpoint  # noqa: F401
from tests.e2e.engine import PROMPTS as PROMPTS_OF_ENGINE
from tests.e2e.glm_chat import random_glm5_next_chat
from tests.e2e.glm_reference import GAP, first_wrong
from tests.e2e.test_glm_server import assert_ran

pytestmark = [pytest.mark.lmdeploy, pytest.mark.xdist_group("ports")]
MODEL: Final = "tiny"
HI: Final = [{"role": "user", "content": "hi"}]
TOOLS: Final[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a place – 天气",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
PARIS: Final = "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"
PARIS_3: Final = PARIS + "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
NOW: Final = "<tool_call>now</tool_call>"
END: Final = "<|observation|>"  # ends a turn behind a call, and shows nowhere


class Talk:
    """A server whose words are written down by the caller, for each request by its seed."""

    def __init__(self, server: serve.Server, model: Path, script: Path) -> None:
        self.server, self.model, self.script = server, model, script
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self.client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=0)
        self.seeds = itertools.count(1)

    def ask(self, says: str, messages: Any = HI, **request: Any) -> Any:
        """Send a chat to which the model says `says`, then nothing but ends."""
        seed = next(self.seeds)
        ids = [*self.tokenizer(says).input_ids, self.tokenizer.eos_token_id]
        (self.script / f"{seed}.json").write_text(json.dumps(ids))
        request = {"max_tokens": len(ids), "temperature": 1.0, "tools": TOOLS} | request
        return self.client.chat.completions.create(model=MODEL, messages=messages, seed=seed, **request)

    def last_prompt(self) -> list[int]:
        ids: list[int] = json.loads((self.script / "prompts.jsonl").read_text().splitlines()[-1])
        return ids


@pytest.fixture(scope="module")
def talk(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talk]:  # noqa: F811
    model, script = checkpoint(random_glm5_next_chat), tmp_path_factory.mktemp("script")
    port = serve.free_port()
    extra = ("--enable-prefix-caching", "--prefix-cache-state-budget", "8", "--max-prefill-token-num", "64")
    line = serve.command(model, MODEL, port, 0, ("--reasoning-parser", "glm45", "--tool-call-parser", "glm47", *extra))
    hook, counted = Path(__file__).parent / "scripted", tmp_path_factory.mktemp("counted")
    env = serve.environment(PYTHONPATH=str(hook), E2E_SCRIPT=str(script), DLINFER_EXT_COUNTERS=str(counted))
    with serve.serving(line, MODEL, port, env) as server:
        yield Talk(server, model, script)
    assert_ran(counted, 1, "kda", "kda_update", "kpool_select", "sparse_latent_attention", "prefill_rows_with_history")


# --- the prompt -------------------------------------------------------------------------------------------------------

KOELN: Final = '{"city": "Köln", "days": 2}'
CALLED: Final = [
    *HI,
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "look",
        "tool_calls": [
            {
                "id": "a",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Köln", "days": 2}'},
            },
            {"id": "b", "type": "function", "function": {"name": "now", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "sun"},
    {"role": "tool", "tool_call_id": "b", "content": "noon"},
]
PROMPTS: Final[dict[str, tuple[Any, dict[str, Any]]]] = {
    "one question": (HI, {}),
    "a system prompt and an answer": (
        [{"role": "system", "content": "be brief"}, *HI, {"role": "assistant", "content": "hello"}, *HI], {},
    ),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "你好"}]}], {}),
    "effort": (HI, {"reasoning_effort": "high"}),
    "low effort": (HI, {"reasoning_effort": "low"}),
    "tools": (HI, {"tools": TOOLS}),
    "calls and what came of them": (CALLED, {"tools": TOOLS}),
}  # fmt: skip


def parsed(messages: Any) -> Any:
    """Return messages as transformers' templates want them: a call's arguments are no text."""
    messages = json.loads(json.dumps(messages))
    for call in (c for m in messages for c in m.get("tool_calls", [])):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return messages


@pytest.mark.parametrize(("messages", "more"), PROMPTS.values(), ids=PROMPTS)
def test_the_prompt_is_that_of_transformers(talk: Talk, messages: Any, more: dict[str, Any]) -> None:
    talk.ask("</think>", messages, **({"tools": None} | more))
    want = talk.tokenizer.apply_chat_template(parsed(messages), add_generation_prompt=True, **more)["input_ids"]
    got = talk.last_prompt()
    assert got == want, talk.tokenizer.decode(got)
    effort = more.get("reasoning_effort", "max").capitalize()
    text = talk.tokenizer.decode(got)
    assert text.startswith("[gMASK]<sop><|system|>")
    assert f"<|system|>Reasoning Effort: {effort}<|" in text
    assert text.endswith("<|assistant|><think>")


# --- the answer -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Said:
    """What the model says, and the parts of the answer; `calls` are names and arguments as text."""

    text: str
    reasoning: str | None = None
    content: str | None = None
    calls: tuple[tuple[str, str], ...] = ()
    finish: str = "stop"
    tokens: int | None = None  # the request's limit


ANSWERS: Final = {
    "reasoning and content": Said(f"why</think>so 你{END}", "why", "so 你"),
    "a call": Said(
        f"why</think>so{PARIS_3}{END}", "why", "so", (("weather", '{"city": "Paris", "days": 3}'),), "tool_calls"
    ),
    "no arguments": Said(f"why</think>{NOW}{END}", "why", None, (("now", "{}"),), "tool_calls"),
    "two calls": Said(
        f"why</think>{PARIS_3}{NOW}{END}",
        "why", None, (("weather", '{"city": "Paris", "days": 3}'), ("now", "{}")), "tool_calls",
    ),
    "a call before the end of the reasoning": Said(f"why{NOW}{END}", "why", None, (("now", "{}"),), "tool_calls"),
    "content behind it": Said(f"why{NOW}so{END}", "why", "so", (("now", "{}"),), "tool_calls"),
    "cut off in the reasoning": Said("why", "wh", None, (), "length", 2),
    "cut off in the name": Said(f"why</think>{NOW}", "why", None, (), "length", 8),
    "cut off in a value": Said(f"w</think>{PARIS}", "w", None, (("weather", '{"city": "Par'),), "length", 20),
}  # fmt: skip


def whole(talk: Talk, said: Said, **more: Any) -> Said:
    choice = talk.ask(said.text, **more).choices[0]
    message = choice.message
    calls = tuple((c.function.name, c.function.arguments) for c in message.tool_calls or [])
    return Said(said.text, message.reasoning_content, message.content or None, calls, choice.finish_reason, said.tokens)


def streamed(talk: Talk, said: Said, **more: Any) -> Said:
    why, content, calls, ends, pieces = "", "", list[list[str]](), list[str](), 0
    for choice in (c for part in talk.ask(said.text, stream=True, **more) for c in part.choices):
        pieces += 1
        why += getattr(choice.delta, "reasoning_content", None) or ""
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            if call.function.name:
                assert call.id
                assert call.index == len(calls)
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments or ""
        ends += [choice.finish_reason] if choice.finish_reason else []
    (finish,) = ends
    assert pieces > 1, "one piece is no stream"
    return Said(said.text, why or None, content or None, tuple((n, a) for n, a in calls), finish, said.tokens)


HOW: Final = {"whole": whole, "stream": streamed}


@pytest.fixture(scope="module")
def answers(talk: Talk) -> Iterator[dict[tuple[str, str], Future[Said]]]:
    """Ask for all of them at once, in both ways."""
    with ThreadPoolExecutor(8) as pool:
        yield {
            (how, name): pool.submit(ask, talk, said, **({"max_tokens": said.tokens} if said.tokens else {}))
            for name, said in ANSWERS.items()
            for how, ask in HOW.items()
        }


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_taken_apart(answers: dict[tuple[str, str], Future[Said]], name: str, how: str) -> None:
    assert answers[how, name].result(60) == ANSWERS[name]


def test_a_request_cannot_turn_thinking_off(talk: Talk) -> None:
    """The template has no switch: taken at its word, the reasoning would be the answer."""
    answer = talk.ask("why</think>so", extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("why", "so")
    assert answer.usage.completion_tokens_details.reasoning_tokens == 3


# --- images -----------------------------------------------------------------------------------------------------------


def picture() -> str:
    file = io.BytesIO()
    Image.new("RGB", (28, 28)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def with_picture(kind: str = "image_url") -> Any:
    return [{"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": kind, kind: {"url": picture()}}]}]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", ["image_url", "video_url"])
def test_an_image_is_refused_and_text_beside_it_is_not(talk: Talk, kind: str, stream: bool) -> None:
    with ThreadPoolExecutor() as pool:
        beside = [pool.submit(talk.ask, f"why</think>{n}") for n in range(3)]
        with pytest.raises(BadRequestError, match="Multimodal input is not supported by this model") as error:
            talk.ask("</think>so", with_picture(kind), stream=stream)
        assert [b.result().choices[0].message.content for b in beside] == ["0", "1", "2"]
    assert error.value.status_code == 400


# --- text without a script --------------------------------------------------------------------------------------------


def test_concurrent_requests_are_token_identical(talk: Talk) -> None:
    prompts = [*PROMPTS_OF_ENGINE, *PROMPTS_OF_ENGINE]
    requests = [{"text": prompt, "new": 16, "wait": 0.1 * i} for i, prompt in enumerate(prompts)]
    answers = client.ask_all(talk.server.url, requests, 120)
    assert [a["error"] for a in answers] == [None] * len(prompts)
    judged = [first_wrong(talk.model, p, a["tokens"]) for p, a in zip(prompts, answers, strict=True)]
    assert [at for at, _ in judged] == [None] * len(prompts)
    assert [len(a["tokens"]) for a in answers] == [16] * len(prompts)
    assert min(gap for _, gap in judged) > GAP
