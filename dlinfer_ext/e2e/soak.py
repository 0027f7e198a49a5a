"""A server under load: which requests arrive when, and what has to hold beside the answers once they are over."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from . import client, malformed, memory
from .scenario import Request, Soak, Span
from .server import Server

# A server asks its engine how it is every so often, which makes the engine record what it holds.
PROBES: Final = {"LMDEPLOY_HEALTH_POLL_INTERVAL": "2", "LMDEPLOY_HEALTH_PROBE_TIMEOUT": "1.9"}
SETTLE_S: Final = 40.0
COMMON: Final = 3  # prompts that are asked for again and again


@dataclass(frozen=True)
class Refused:
    """A request that the server has to refuse: what is wrong with it, and when it is sent."""

    name: str
    wait: float


def _one_of(draw: random.Random, values: Sequence[int] | Span) -> int:
    return draw.randint(values.least, values.most) if isinstance(values, Span) else draw.choice(values)


def drawn(soak: Soak) -> tuple[list[Request], list[Refused]]:
    """Return the requests of a soak, and those that are malformed, drawn from its seed."""
    draw, at = random.Random(soak.seed), 0.0
    requests: list[Request] = []
    refused: list[Refused] = []
    kinds: list[str] = []
    for _ in range(soak.requests):
        at += draw.expovariate(soak.per_second)
        if soak.malformed and draw.random() < soak.malformed:
            if not kinds:
                kinds = sorted(malformed.requests(""))
                draw.shuffle(kinds)
            refused.append(Refused(kinds.pop(), at))
            continue
        new = _one_of(draw, soak.new)
        gone = new > 4 and draw.random() < soak.cancelled
        tokens = _one_of(draw, soak.tokens)
        line = None
        if soak.again and draw.random() < soak.again:
            tokens, line = soak.again_tokens, 50 * draw.randrange(COMMON)
        requests.append(
            Request(tokens=tokens, line=line, new=new, wait=at, cancel_after=draw.randint(1, 4) if gone else None)
        )
    return requests, refused


def before(soak: Soak) -> list[Refused]:
    """Return one malformed request of each kind, where a soak has any."""
    return [Refused(name, 0.0) for name in malformed.requests("")] if soak.malformed else []


def ask(
    soak: Soak, server: Server, bodies: Sequence[dict[str, Any]], timeout_s: float, folder: Path
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Send the requests of a soak and its malformed ones, and watch the server meanwhile.

    Every kind of malformed request is sent once before: the first of some loads a library, which is no leak.

    Args:
        soak: the settings.
        server: one with DLINFER_EXT_COUNTERS and `PROBES` in its environment.
        bodies: of the well formed requests.
        timeout_s: for each.
        folder: of DLINFER_EXT_COUNTERS.

    Returns:
        The outputs of `bodies`; and "refused", the replies to the malformed requests, those before the load first;
        "held", what the engine held once it was idle; "memory", samples of the server's processes; "seconds" until the
        last answer.
    """
    kinds = malformed.requests(server.model)
    first = [{"post": kinds[r.name]} for r in before(soak)]
    refused = client.ask_all(server.url, first, timeout_s)
    under_load = [{"post": kinds[r.name], "wait": r.wait} for r in drawn(soak)[1]]
    started = time.monotonic()
    with memory.watched(server.pid) as samples:
        outputs = client.ask_all(server.url, [*bodies, *under_load], timeout_s)
    seconds = time.monotonic() - started
    refused += outputs[len(bodies) :]
    more = {"refused": refused, "held": settled(folder, time.time()), "memory": samples}
    return outputs[: len(bodies)], more | {"seconds": seconds}


def settled(folder: Path, since: float) -> dict[str, Any] | None:
    """Return what the engine held once it was idle: the first record later than `since` without a sequence.

    Args:
        folder: of DLINFER_EXT_COUNTERS.
        since: time (of the epoch) of the last answer.

    Returns:
        The record; the last one where sequences remain for `SETTLE_S` seconds; None where there is none at all.
    """
    deadline, last = time.monotonic() + SETTLE_S, None
    while time.monotonic() < deadline:
        records = [json.loads(f.read_text(encoding="utf-8")) for f in folder.glob("paging-*.json")]
        last = max(records, key=lambda r: r["time"], default=None)
        if last is not None and last["time"] > since + 0.5 and not last["sequences"]:
            break
        time.sleep(0.2)
    return last


def not_freed(held: Mapping[str, Any] | None) -> list[str]:
    """Return what an idle engine holds that is neither free nor of its prefix cache."""
    if held is None:
        return ["the engine left no record of what it holds"]
    wrong = []
    for name, what in (("slots", "state slots"), ("blocks", "blocks")):
        lost = held[name] - held[f"{name}_free"] - held[f"{name}_cached"]
        if lost:
            wrong.append(f"{lost} of {held[name]} {what} are neither free nor cached")
    return wrong + [f"{held[name]} {name} are left" for name in ("sequences", "sessions") if held[name]]


def not_refused(refused: Sequence[Refused], answers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the malformed requests that did not get a client's error with a message."""
    wrong = []
    for request, answer in zip(refused, answers, strict=True):
        status, text = answer["status"], answer["text"]
        if answer["error"]:
            wrong.append(f"malformed ({request.name}): {answer['error']}")
        elif not 400 <= status < 500:
            wrong.append(f"malformed ({request.name}): status {status}; wanted 4xx: {text[:120]}")
        elif not any(isinstance(v, str) and v for v in _fields(text)):
            wrong.append(f"malformed ({request.name}): status {status} without a message: {text[:120]}")
    return wrong


def _fields(text: str) -> list[Any]:
    try:
        data = json.loads(text)
    except ValueError:
        return []
    return [data.get("message"), data.get("detail")] if isinstance(data, dict) else []


def figures(
    soak: Soak, outputs: Sequence[Mapping[str, Any]], result: Mapping[str, Any], counters: Mapping[str, int]
) -> dict[str, Any]:
    """Return the figures of a soak, for its report.

    Args:
        soak: the settings.
        outputs: the answers to the requests that are well formed.
        result: of `engines.through_server`: "refused", "held" and "memory".
        counters: of the first rank.
    """
    held = result["held"] or {}
    finish = Counter(o["finish"] for o in outputs)
    under_load = result["refused"][len(before(soak)) :]
    found: dict[str, Any] = {
        "requests": len(outputs) + len(under_load),
        "finished": finish["length"] + finish["stop"],
        "cancelled": finish["abort"],
        "malformed": sum(400 <= a["status"] < 500 for a in under_load),
        "malformed_before": len(before(soak)),
        "failed": sum(bool(o["error"]) for o in [*outputs, *result["refused"]]),
        "tokens": sum(len(o["tokens"]) for o in outputs),
        "prefix_hit_tokens": held.get("hit_tokens", 0),
        "preempted": counters.get("preempted", 0),
        "seconds": round(result["seconds"], 1),
    }
    found |= {k: held[k] for k in held if k.startswith(("slots", "blocks"))}
    try:
        per_window = memory.medians(result["memory"], soak.warm_up_s)
    except ValueError as error:
        return found | {"memory": str(error)}
    return found | {
        "mib_warm": round(per_window[0], 1),
        "mib_end": round(per_window[-1], 1),
        "mib_windows": [round(m, 1) for m in per_window],
        "growth": round(memory.growth(per_window), 5),
    }


def judge(soak: Soak, found: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    """Return what does not hold beside the answers of a soak."""
    refused = [*before(soak), *drawn(soak)[1]]
    wrong = [*not_refused(refused, result["refused"]), *not_freed(result["held"])]
    for name, share in (
        ("malformed", soak.malformed),
        ("cancelled", soak.cancelled),
        ("prefix_hit_tokens", soak.again),
    ):
        if share and not found[name]:
            wrong.append(f"{name} is 0")
    if soak.growth is not None:
        if "growth" not in found:
            wrong.append(f"memory: {found['memory']}")
        elif found["growth"] > soak.growth:
            wrong.append(
                f"memory grows by {found['growth']:.2%} from {found['mib_warm']} MiB after the warm-up; wanted at most "
                f"{soak.growth:.2%} (medians over time: {found['mib_windows']})"
            )
    return wrong


def table(found: Mapping[str, Any]) -> list[str]:
    """Return the figures as lines for a terminal; {} has none."""
    if not found:
        return []
    lines = [
        f"{found['requests']} requests: {found['finished']} finished, {found['cancelled']} cancelled, "
        f"{found['malformed']} malformed and refused, {found['failed']} failed; {found['tokens']} tokens "
        f"in {found['seconds']:.0f} s; before them one malformed request of each of {found['malformed_before']} kinds",
        f"{found['prefix_hit_tokens']} prompt tokens from the prefix cache; {found['preempted']} times preempted",
    ]
    for name, what in (("slots", "state slots"), ("blocks", "blocks")):
        if name in found:
            lines.append(f"{what}: {found[name]}, free {found[f'{name}_free']}, cached {found[f'{name}_cached']}")
    if "growth" in found:
        lines.append(
            f"memory: {found['mib_warm']} MiB after the warm-up, {found['mib_end']} MiB at the end, "
            f"growth {found['growth']:+.2%} (medians over time: {found['mib_windows']})"
        )
    else:
        lines.append(f"memory: {found['memory']}")
    return lines
