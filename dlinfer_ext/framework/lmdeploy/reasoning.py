"""What GLM-4.5 and later write around an answer: reasoning that a tool call may end, and calls that may be cut off.

LMDeploy's parsers come close. Its reasoning goes on behind a call that came before `</think>`, so the answer after it
is taken for reasoning; without a tool parser such a call stays inside the reasoning; a request that turns thinking off
gets the reasoning of a model that always thinks as content; what the length limit cut off becomes a call of something
else; and the template sees tools in another form than in training.
Source of the format: the chat templates of GLM-4.5 to 5.3, and the reasoning parser `glm45` of other engines.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

from lmdeploy.serve.parsers.reasoning_parser import ReasoningParser, ReasoningParserManager
from lmdeploy.serve.parsers.response_parser import BaseResponseParser, ResponseParserManager
from lmdeploy.serve.parsers.tool_parser import Glm47ToolParser, ToolParserManager

NAME: Final = "glm45"
TOOLS: Final = "glm47"
CALL: Final = "<tool_call>"


class Glm45ReasoningParser(ReasoningParser):  # type: ignore[misc]
    """Reasoning from the first token on, as the prompt ends in `<think>`, to `</think>` or the first `<tool_call>`."""

    # GLM-4.5's template has a switch for thinking; that of 5.3 has none, so a request's `enable_thinking` is moot.
    has_switch: ClassVar[bool] = False

    @classmethod
    def validate_tokenizer(cls, tokenizer: Any) -> None:
        """Check the tags, and learn from the chat template whether thinking can be turned off.

        Raises:
            RuntimeError: the tokenizer has no `<think>` and `</think>`.
        """
        super().validate_tokenizer(tokenizer)
        cls.has_switch = "enable_thinking" in str(getattr(tokenizer, "chat_template", None))


class WholeCallsToolParser(Glm47ToolParser):  # type: ignore[misc]
    """At the length limit a name may be the beginning of another one, so it counts when the tag behind it has come.

    Arguments that were cut off stay open, so that they are no JSON: closed, they would be those of another call.
    """

    def _consume_stream_payload(self, text: str, deltas: list[Any], *, final: bool) -> int:
        return super()._consume_stream_payload(text, deltas, final=False)  # type: ignore[no-any-return]


def as_given(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as OpenAI's interface and chat templates have it; LMDeploy hands on the function's fields alone.

    They come in an order of its own, with null for what was not given.
    """
    function = tool.get("function", tool)
    fields = {key: function[key] for key in ("name", "description", "parameters") if function.get(key) is not None}
    return {"type": "function", "function": fields}


class ResponseParser(BaseResponseParser):  # type: ignore[misc]
    """LMDeploy's own for every other reasoning parser. With ours a call ends the reasoning for good.

    `request` is what the prompt is made of.
    """

    request: Any
    _pending: str

    @classmethod
    def chat_template_kwargs_from_request(cls, request: Any) -> dict[str, Any]:
        kwargs: dict[str, Any] = super().chat_template_kwargs_from_request(request)
        ours = cls.reasoning_parser_cls
        if ours is not None and issubclass(ours, Glm45ReasoningParser) and not ours.has_switch:
            kwargs = {k: v for k, v in kwargs.items() if k not in ("enable_thinking", "thinking")}
        return kwargs

    def __init__(self, request: Any) -> None:
        super().__init__(request)
        self._ours = isinstance(self.reasoning_parser, Glm45ReasoningParser)
        self._ended_by_call = False
        if self._ours and self.request.tools:
            tools = [as_given(tool) for tool in self.request.tools]
            self.request = self.request.model_copy(update={"tools": tools})
        vocabulary = self.tokenizer.get_vocab() if self._ours and self.tokenizer is not None else {}
        self._call_token: int | None = vocabulary.get(CALL)

    def _consume_reasoning(self) -> tuple[str | None, bool]:
        """Split what is pending at `</think>` or `<tool_call>`; return reasoning, and whether anything was consumed."""
        ends = (self._reasoning_close_tag, CALL)
        if not self._ours or self._pending.startswith(self._reasoning_open_tag):
            return super()._consume_reasoning()  # type: ignore[no-any-return]
        found = [(at, tag) for tag in ends if (at := self._pending.find(tag)) >= 0]
        if found:
            at, tag = min(found)
            self._ended_by_call = tag == CALL
            self._mode = self.MODE_PLAIN  # which takes up the call, as one or, without a tool parser, as text
            text, self._pending = self._pending[:at], self._pending[at if tag == CALL else at + len(tag) :]
            return text or None, True
        # The end of what is pending may be the beginning of a tag.
        kept = 0 if self._stream_final_received else self._longest_open_tag_prefix_suffix(self._pending, list(ends))
        cut = len(self._pending) - kept
        text, self._pending = self._pending[:cut], self._pending[cut:]
        return text or None, bool(text)

    def _consume_plain(self) -> tuple[str | None, bool]:
        if self._ended_by_call:  # a late end tag is neither
            self._pending = self._pending.replace(self._reasoning_close_tag, "")
        return super()._consume_plain()  # type: ignore[no-any-return]

    def _update_reasoning_tokens(self, token_ids: list[int]) -> None:
        """Count reasoning up to the call too."""
        call = self._call_token
        if call is None or call not in token_ids or self.reasoning_tokens is None:
            super()._update_reasoning_tokens(token_ids)
            return
        at = token_ids.index(call)
        super()._update_reasoning_tokens(token_ids[:at])
        self._counting_reasoning_tokens = False
        self._update_reasoning_tokens(token_ids[at + 1 :])


def register(module: Any) -> str:
    """Add our parsers to LMDeploy's registries; `module` is `lmdeploy.serve.parsers.response_parser`."""
    ReasoningParserManager.register_module(NAME, force=True, module=Glm45ReasoningParser)
    ToolParserManager.register_module(TOOLS, force=True, module=WholeCallsToolParser)
    ResponseParserManager.register_module("default", force=True, module=ResponseParser)
    return f"reasoning parser {NAME}, tool parser {TOOLS} for whole calls, and a response parser for both"
