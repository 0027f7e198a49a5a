"""Requests that a server has to refuse: what a client may get wrong, one of each kind, for the three endpoints."""

from __future__ import annotations

import json
from typing import Any, Final

GENERATE: Final = "/generate"
COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
# One grey pixel.
PIXEL: Final = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJ"
    "RU5ErkJggg=="
)
SESSION_LEN: Final = 2048  # of `server.command`; a word is a token at least
WORDS: Final = "word " * (SESSION_LEN + 1)


def requests(model: str) -> dict[str, tuple[str, str]]:
    """Return path and body by what is wrong.

    Args:
        model: the name under which the server serves its model.
    """
    user = [{"role": "user", "content": "hello"}]
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}]}]

    def generate(**wrong: Any) -> tuple[str, str]:
        return GENERATE, json.dumps({"prompt": "hello", "max_tokens": 4} | wrong)

    def complete(**wrong: Any) -> tuple[str, str]:
        return COMPLETIONS, json.dumps({"model": model, "prompt": "hello", "max_tokens": 4} | wrong)

    def chat(**wrong: Any) -> tuple[str, str]:
        return CHAT, json.dumps({"model": model, "messages": user, "max_tokens": 4} | wrong)

    return {
        "no JSON": (GENERATE, "{not json"),
        "no object": (COMPLETIONS, "[1, 2]"),
        "nothing": (CHAT, ""),
        "no prompt": (GENERATE, '{"max_tokens": 4}'),
        "prompt is a number": generate(prompt=7),
        "prompt is empty": generate(prompt=""),
        "prompt is empty, completions": complete(prompt=""),
        "one prompt of three is empty": complete(prompt=["a", "", "b"]),
        "prompt is half a surrogate pair": (GENERATE, '{"prompt": "\\ud800", "max_tokens": 4}'),
        "prompt is too long": generate(prompt=WORDS),
        "prompt is too long, streamed": complete(prompt=WORDS, stream=True),
        "messages are too long": chat(messages=[{"role": "user", "content": WORDS}]),
        "messages are a number": chat(messages=7),
        "no messages": chat(messages=[]),
        "message without a role": chat(messages=[{"content": "hello"}]),
        "content is a number": chat(messages=[{"role": "user", "content": 5}]),
        "token id below 0": (GENERATE, '{"input_ids": [5, -1], "max_tokens": 4}'),
        "token id out of the vocabulary": (GENERATE, '{"input_ids": [5, 100000000], "max_tokens": 4}'),
        "token id of 70 bits": (GENERATE, json.dumps({"input_ids": [2**70], "max_tokens": 4})),
        "token ids in chat": chat(messages=[], input_ids=[100_000_000]),
        "stop token out of the vocabulary": generate(stop_token_ids=[100_000_000], ignore_eos=True),
        "stop token below 0": generate(stop_token_ids=[-1], ignore_eos=True),
        "stop token of 70 bits": generate(stop_token_ids=[2**70]),
        "max_tokens is a word": generate(max_tokens="many"),
        "max_tokens below 0": generate(max_tokens=-5),
        "max_tokens below 0, completions": complete(max_tokens=-5),
        "max_tokens below 0, chat": chat(max_tokens=-5),
        "max_tokens is 0": complete(max_tokens=0),
        "max_tokens of 70 bits": generate(max_tokens=2**70),
        "unknown model": complete(model="nobody"),
        "unknown model, chat": chat(model="nobody"),
        "n is 0": complete(n=0),
        "n is 1,000": chat(n=1000),
        "top_p above 1": generate(top_p=2),
        "top_p is not a number": (GENERATE, '{"prompt": "hello", "max_tokens": 4, "top_p": NaN}'),
        "top_k below 0": chat(top_k=-1),
        "min_p above 1": chat(min_p=7),
        "temperature below 0": complete(temperature=-1),
        "temperature is infinite": (COMPLETIONS, json.dumps({"model": model, "prompt": "a", "temperature": 1e999})),
        "repetition_penalty is infinite": (GENERATE, '{"prompt": "a", "max_tokens": 4, "repetition_penalty": 1e999}'),
        "logit_bias is huge": chat(logit_bias={"5": 1e30}),
        "logit_bias of no token": chat(logit_bias={"100000000": 1}),
        "logit_bias of a word": chat(logit_bias={"word": 1}),
        "image for a text model": chat(messages=image),
        "image for a text model, generate": generate(image_data=PIXEL),
        "tool without a function": chat(tools=[{"type": "function"}]),
        "schema of no type": chat(
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}}
        ),
    }
