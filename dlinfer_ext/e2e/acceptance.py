"""Accepted drafts as an engine run recorded them, matched with the requests they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from . import simulation
from .simulation import Acceptance


class VerifyRow(NamedTuple):
    """One row of one verify step: its state slot, tokens in it before the step, drafts accepted, last token emitted."""

    slot: int
    history: int
    accepted: int
    last_token: int


Chain = tuple[VerifyRow, ...]  # the verify rows of one request, in order


def chains(rows: Iterable[Sequence[int]]) -> list[Chain]:
    """Split the rows of a run into requests: a row that does not go on where its slot stands starts a new one."""
    done: list[Chain] = []
    under_way: dict[int, list[VerifyRow]] = {}
    for row in (VerifyRow(*r) for r in rows):
        before = under_way.get(row.slot)
        if before and before[-1].history + before[-1].accepted + 1 == row.history:
            before.append(row)
            continue
        if before:
            done.append(tuple(before))
        under_way[row.slot] = [row]
    return done + [tuple(r) for r in under_way.values()]


def fits(chain: Chain, prompt: int, tokens: Sequence[int]) -> bool:
    """Tell whether a chain emitted a request's tokens: its prompt's length and what it gave before it ended."""
    if chain[0].history < prompt:
        return False
    # A step after `history` tokens emits the places after the one that it is fed.
    places = [(row.history - prompt + row.accepted + 1, row.last_token) for row in chain]
    known = [(place, token) for place, token in places if place < len(tokens)]
    return bool(known) and all(tokens[place] == token for place, token in known)


def measure(
    rows: Iterable[Sequence[int]], drafts: int, requests: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> Acceptance:
    """Summarise the verify rows of a run.

    Args:
        rows: [slot, history, accepted, last token] in the order of the steps.
        drafts: draft tokens per step.
        requests: (prompt ids, generated ids) of the run's requests.

    Returns:
        The figures over all rows; the split by context covers the rows that could be matched with a request and
        whose context it still holds.
    """
    found = chains(rows)
    left, known, contexts = list(requests), [], []
    for chain in found:
        match = next((r for r in left if fits(chain, len(r[0]), r[1])), None)
        if match is None:
            continue
        left.remove(match)
        text = [*match[0], *match[1]]
        known.append([(row.history - 1, row.accepted) for row in chain if row.history < len(text)])
        contexts.append(text)
    whole = simulation.summarise(
        [()] * len(found), [[(row.history - 1, row.accepted) for row in chain] for chain in found], drafts
    )
    split = simulation.by_context(contexts, known)
    return replace(
        whole,
        mean_by_context={name: sum(v) / max(1, len(v)) for name, v in split.items()},
        steps_by_context={name: len(v) for name, v in split.items()},
    )
