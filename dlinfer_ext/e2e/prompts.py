"""Prompts of an exact number of tokens, for any tokenizer, from the text that ships with the package."""

from __future__ import annotations

import itertools
from functools import cache
from importlib.resources import files
from typing import Any, Final, NamedTuple

from .scenario import Request

STEP: Final = 7  # lines from one prompt's default start to the next
CHARACTERS: Final = 16  # at most, a token on the average


class Prompt(NamedTuple):
    """A text and its token ids; the engine's tokenizer gives the same ids for the text."""

    text: str
    ids: tuple[int, ...]


@cache
def corpus() -> tuple[str, ...]:
    """Return the lines of configs/e2e/corpus.txt."""
    text = (files("dlinfer_ext.configs") / "e2e" / "corpus.txt").read_text(encoding="utf-8")
    return tuple(text.splitlines(keepends=True))


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text).input_ids
    return ids


def _from_line(tokenizer: Any, line: int, skip: int, tokens: int) -> list[int]:
    """Return the first tokens of the text from a line on, less `skip` characters; the text begins again at its end."""
    lines = corpus()
    start = line % len(lines)
    text, more = "", itertools.cycle(lines[start:] + lines[:start])
    while len(text) < CHARACTERS * tokens + skip:
        text += next(more)
    ids = _ids(tokenizer, text[skip:])
    if len(ids) < tokens:
        raise ValueError(f"the tokenizer makes {len(ids)} tokens of {len(text)} characters; {tokens} are wanted")
    return ids[:tokens]


def build(tokenizer: Any, request: Request, number: int) -> Prompt:
    """Return the prompt of the `number`-th request of a scenario.

    Raises:
        ValueError: no prompt of this length survives a round trip through the tokenizer.
    """
    line = request.line if request.line is not None else number * STEP
    for shift in range(64):  # a text cut inside a word may be split otherwise when read again
        if request.tail is None or request.shared is None:
            head = _from_line(tokenizer, line, shift, request.tokens)
        else:
            head = _from_line(tokenizer, line, 0, request.shared)
            head += _from_line(tokenizer, request.tail, shift, request.tokens - request.shared)
        text = tokenizer.decode(head)
        if len(head) == request.tokens and _ids(tokenizer, text) == head:
            return Prompt(text, tuple(head))
    raise ValueError(
        f"prompt {number}: no text of {request.tokens} tokens from line {line} is read again as the same tokens; "
        "choose another line or length"
    )
