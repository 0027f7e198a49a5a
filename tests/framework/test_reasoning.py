"""Reasoning, content and calls of GLM's answers, each written out: whole, by token, and in any two pieces."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

import pytest
from lmdeploy.serve.openai.protocol import ChatCompletionRequest
from lmdeploy.serve.parsers.response_parser import BaseResponseParser
from lmdeploy.serve.parsers.tool_parser import Glm47ToolParser

from dlinfer_ext.framework.lmdeploy import patches, reasoning
from tests.e2e.glm_chat import TEMPLATE, chat_tokenizer

TOOLS: Final[list[dict[str, Any]]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "of a place",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    },
    {"type": "function", "function": {"name": "weather_now", "parameters": {"type": "object", "properties": {}}}},
]
PARIS: Final = "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"
PARIS_3: Final = PARIS + "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
NOW: Final = "<tool_call>weather_now</tool_call>"


@dataclass(frozen=True)
class Said:
    """An answer, and what it is made of; `calls` are names and arguments as text."""

    text: str
    reasoning: str | None = None
    content: str | None = None
    calls: tuple[tuple[str, str], ...] = ()


ANSWERS: Final = {
    "reasoning and content": Said("why</think>so", "why", "so"),
    "no reasoning": Said("</think>so", None, "so"),
    "an open tag of its own": Said("<think>why</think>so", "why", "so"),
    "a call": Said(f"why</think>so{PARIS_3}", "why", "so", (("weather", '{"city": "Paris", "days": 3}'),)),
    "no arguments": Said(f"why</think>{NOW}", "why", None, (("weather_now", "{}"),)),
    "two calls": Said(
        f"why</think>{NOW}\n{PARIS_3}",
        "why", None, (("weather_now", "{}"), ("weather", '{"city": "Paris", "days": 3}')),
    ),
    "a call ends the reasoning": Said(f"why{NOW}", "why", None, (("weather_now", "{}"),)),
    "content behind it": Said(f"why{NOW}so", "why", "so", (("weather_now", "{}"),)),
    "two calls end it": Said(f"why{NOW}{NOW}", "why", None, (("weather_now", "{}"), ("weather_now", "{}"))),
    "a late end": Said(f"why{NOW}</think>so", "why", "so", (("weather_now", "{}"),)),
    "cut off in the reasoning": Said("wh", "wh"),
    "cut off in the content": Said("why</think>s", "why", "s"),
    "cut off in the name": Said("why</think><tool_call>weather", "why"),
    "cut off in a string": Said(f"why</think>{PARIS[:-15]}", "why", None, (("weather", '{"city": "Pa'),)),
    "cut off behind a value": Said(f"why</think>{PARIS}", "why", None, (("weather", '{"city": "Paris"'),)),
    "cut off in a number": Said(
        "why</think><tool_call>weather<arg_key>days</arg_key><arg_value>1", "why", None, (("weather", ""),)
    ),
    "cut off in an end": Said("why</think>so</tool", "why", "so</tool"),
}  # fmt: skip


def parser(
    *, tools: bool = True, parse_tools: bool = True, template: str = TEMPLATE, **request: Any
) -> reasoning.ResponseParser:
    """Return a parser for one request, of a class of its own as it keeps its settings in the class."""
    own: Any = type("Own", (reasoning.ResponseParser,), {})
    patches.install("cpu")
    own.set_parsers(reasoning.NAME, reasoning.TOOLS if parse_tools else None, chat_tokenizer(template))
    if tools:
        request["tools"] = TOOLS
    asked = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "hi"}], **request)
    made: reasoning.ResponseParser = own(asked)
    return made


def by_token(text: str) -> list[str]:
    tokenizer = chat_tokenizer()
    return [tokenizer.decode([i]) for i in tokenizer(text).input_ids]


def streamed(made: BaseResponseParser, pieces: list[str], *, final: bool = True) -> Said:
    """Give a text in pieces and add up what comes; the last piece says that it is the last."""
    text: dict[str, str] = {"reasoning": "", "content": ""}
    calls: list[list[str]] = []
    for i, piece in enumerate(pieces):
        deltas = made.stream_chunk(piece, chat_tokenizer()(piece).input_ids, final=final and i == len(pieces) - 1)
        for message, _ in deltas:
            text["reasoning"] += message.reasoning_content or ""
            text["content"] += message.content or ""
            for call in message.tool_calls or []:
                if call.function.name is not None:
                    assert call.index == len(calls), "a call's name comes first and once"
                    calls.append([call.function.name, ""])
                calls[call.index][1] += call.function.arguments or ""
    return Said("".join(pieces), text["reasoning"] or None, text["content"] or None, tuple((n, a) for n, a in calls))


@pytest.mark.parametrize("said", ANSWERS.values(), ids=ANSWERS)
def test_a_whole_answer(said: Said) -> None:
    content, calls, why = parser().parse_complete(said.text, chat_tokenizer()(said.text).input_ids)
    assert Said(said.text, why, content, tuple((c.function.name, c.function.arguments) for c in calls or [])) == said


@pytest.mark.parametrize("said", ANSWERS.values(), ids=ANSWERS)
def test_a_streamed_answer(said: Said) -> None:
    tokens = by_token(said.text)
    assert streamed(parser(), tokens) == said
    for cut in range(1, len(tokens)):
        assert streamed(parser(), ["".join(tokens[:cut]), "".join(tokens[cut:])]) == said


@pytest.mark.parametrize("said", ANSWERS.values(), ids=ANSWERS)
def test_an_end_may_come_with_nothing(said: Said) -> None:
    """The last piece of a server's stream is often empty."""
    assert streamed(parser(), [*by_token(said.text), ""]) == said


@pytest.mark.parametrize("request_", [{"parse_tools": False}, {"tool_choice": "none"}], ids=str)
def test_without_calls_a_call_is_content_and_ends_the_reasoning_too(request_: dict[str, Any]) -> None:
    for text in (f"why{NOW}so", f"why</think>{NOW}so"):
        said = Said(text, "why", f"{NOW}so")
        tools = "tool_choice" in request_
        for pieces in ([text], list(text), by_token(text)):
            assert streamed(parser(tools=tools, **request_), pieces) == said


@pytest.mark.parametrize(
    "switch", [{"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}},
               {"chat_template_kwargs": {"thinking": False}}], ids=str,
)  # fmt: skip
def test_a_model_that_always_thinks_has_no_switch(switch: dict[str, Any]) -> None:
    assert streamed(parser(**switch), ["why", "</think>", "so"]) == Said("why</think>so", "why", "so")
    with_switch = TEMPLATE + "{% if enable_thinking is defined %}{% endif %}"
    assert streamed(parser(template=with_switch, **switch), ["so"]) == Said("so", None, "so")


@pytest.mark.parametrize(
    ("text", "tokens"), [("why</think>so", 3), (f"why{NOW}so", 3), ("wh", 2), (f"why</think>so{NOW}", 3)], ids=str
)
def test_tokens_of_reasoning_are_counted(text: str, tokens: int) -> None:
    for pieces in ([text], by_token(text)):
        made = parser()
        streamed(made, pieces)
        assert made.reasoning_tokens == tokens
    made = parser()
    made.parse_complete(text, chat_tokenizer()(text).input_ids)
    assert made.reasoning_tokens == tokens


def test_tools_keep_the_form_in_which_they_were_given() -> None:
    asked = parser().request
    assert json.dumps(asked.tools) == json.dumps(TOOLS)  # the order of the fields too


def test_other_reasoning_parsers_are_lmdeploys() -> None:
    """Behind a call LMDeploy's default goes on with the reasoning: the controls of what is ours."""
    own: Any = type("Own", (reasoning.ResponseParser,), {})
    own.set_parsers("default", None, chat_tokenizer())
    own.tool_parser_cls = Glm47ToolParser
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "hi"}], tools=TOOLS)
    assert streamed(own(request), [f"why{NOW}so"]) == Said(f"why{NOW}so", "whyso", None, (("weather_now", "{}"),))
    assert streamed(own(request), ["why</think><tool_call>weather"]).calls == (("weather", "{}"),)
    assert [list(tool) for tool in own(request).request.tools] == [["description", "name", "parameters"]] * 2


def test_no_parser_is_chosen_by_itself() -> None:
    """Not by LMDeploy and not by us: both have to be named, or all of it is content."""
    own: Any = type("Own", (reasoning.ResponseParser,), {})
    own.set_parsers(None, None, chat_tokenizer())
    text = f"why</think>so{NOW}"
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "hi"}])
    assert streamed(own(request), by_token(text)) == Said(text, None, text)


def test_a_tokenizer_without_the_tags_is_refused() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.get_vocab = dict
    own: Any = type("Own", (reasoning.ResponseParser,), {})
    with pytest.raises(RuntimeError, match="<think>"):
        own.set_parsers(reasoning.NAME, None, tokenizer)


def late_end_is_content(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(reasoning.ResponseParser, "_consume_plain")


def reasoning_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(reasoning.ResponseParser, "_consume_reasoning")


def what_was_cut_off_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(reasoning.WholeCallsToolParser, "_consume_stream_payload")


CONTROLS: Final = {
    late_end_is_content: {"a late end"},
    reasoning_goes_on: {"content behind it"},
    what_was_cut_off_is_closed: {
        name for name in ANSWERS if name.startswith("cut off") and "<tool_call>" in ANSWERS[name].text
    },
}


@pytest.mark.parametrize("plant", CONTROLS, ids=lambda plant: plant.__name__)
def test_without_a_part_of_it_answers_are_wrong(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: LMDeploy's own form of each part that is extended here is caught by the answers that are about it."""
    plant(monkeypatch)
    wrong = {name for name, said in ANSWERS.items() if streamed(parser(), by_token(said.text)) != said}
    assert wrong == CONTROLS[plant]
