"""The rules a run is judged by: identity of tokens, divergence with its logit gap, and a law of sampled tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Verdict:
    """The result of one rule.

    Attributes:
        rule: "identity", "divergence" or "law".
        failures: one line each; none means that the rule holds.
        facts: figures for the report.
    """

    rule: str
    failures: tuple[str, ...]
    facts: dict[str, Any]


def first_difference(got: Sequence[int], want: Sequence[int]) -> int | None:
    """Return the first place at which two token lists differ, the end of the shorter included, or None."""
    for i, (g, w) in enumerate(zip(got, want, strict=False)):
        if g != w:
            return i
    return None if len(got) == len(want) else min(len(got), len(want))


def identity(got: Sequence[Sequence[int]], want: Sequence[Sequence[int]], names: Sequence[str]) -> Verdict:
    """Require the same tokens for every request."""
    failures, places = [], {}
    for name, g, w in zip(names, got, want, strict=True):
        at = first_difference(g, w)
        if at is not None:
            places[name] = at
            have = g[at] if at < len(g) else "the end"
            need = w[at] if at < len(w) else "the end"
            failures.append(f"{name}: token {at} is {have}; wanted {need}")
    return Verdict("identity", tuple(failures), {"compared": len(got), "first_difference": places})


def divergence(
    got: Sequence[Sequence[int]],
    got_logits: Sequence[Sequence[Mapping[int, float]]],
    want: Sequence[Sequence[int]],
    want_logits: Sequence[Sequence[Mapping[int, float]]],
    names: Sequence[str],
    *,
    margin: float,
    error: float,
) -> Verdict:
    """Compare two runs that may round otherwise: their logits as long as they have the same context.

    Up to the first token that differs both runs have seen the same tokens, so their logits at those places are
    teacher-forced. There they must agree within `error`, RMS over the RMS of the wanted ones; and where the tokens
    part, the two candidates' wanted logits may differ by no more than `margin`: a near tie, and not a wrong state.

    Args:
        got: tokens by request.
        got_logits: the largest logits by request and place, by token id.
        want: as `got`.
        want_logits: as `got_logits`.
        names: of the requests.
        margin: logits.
        error: relative.
    """
    failures, gaps, pairs = [], {}, []
    for name, g, gl, w, wl in zip(names, got, got_logits, want, want_logits, strict=True):
        at = first_difference(g, w)
        end = min(len(g), len(w)) if at is None else at + 1
        for a, b in zip(gl[:end], wl[:end], strict=False):
            pairs += [(a[token], b[token]) for token in a.keys() & b.keys()]
        if at is None:
            continue
        if at >= min(len(g), len(w)):
            failures.append(f"{name}: {len(g)} tokens; wanted {len(w)}")
            continue
        here = wl[at]
        gap = abs(here[w[at]] - here[g[at]]) if g[at] in here and w[at] in here else math.inf
        gaps[name] = {"at": at, "gap": gap}
        if not gap <= margin:
            failures.append(f"{name}: token {at} is {g[at]}; wanted {w[at]}, whose logit is {gap:.3f} away")
    if not pairs:
        failures.append("no logits to compare")
        return Verdict("divergence", tuple(failures), {"first_difference": gaps})
    table = torch.tensor(pairs, dtype=torch.float64)
    relative = ((table[:, 0] - table[:, 1]).square().mean().sqrt() / table[:, 1].square().mean().sqrt()).item()
    if not relative <= error:
        failures.append(f"logits differ by {relative:.4f} of their RMS; at most {error}")
    facts = {"compared": len(got), "logits": len(pairs), "logits_error": relative, "first_difference": gaps}
    return Verdict("divergence", tuple(failures), facts)


def chi_square_tail(statistic: float, degrees: int) -> float:
    """Return the probability that a chi-square variable of so many degrees of freedom exceeds `statistic`."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def law(draws: Sequence[Sequence[int]], chances: Mapping[tuple[int, ...], float], alpha: float) -> Verdict:
    """Test draws against their exact law: nothing impossible, and Pearson's chi-square over all outcomes.

    Outcomes expected fewer than five times are taken together, as the approximation needs.
    """
    seen = Counter(tuple(d) for d in draws)
    impossible = [outcome for outcome in seen if chances.get(outcome, 0.0) <= 0.0]
    failures = [f"drew {list(outcome)}, which has probability 0" for outcome in impossible[:5]]
    total = len(draws)
    rare_seen, rare_expected, statistic, cells = 0, 0.0, 0.0, 0
    for outcome, chance in chances.items():
        expected = chance * total
        if expected < 5:
            rare_seen, rare_expected = rare_seen + seen[outcome], rare_expected + expected
        else:
            statistic += (seen[outcome] - expected) ** 2 / expected
            cells += 1
    if rare_expected > 0:
        statistic += (rare_seen - rare_expected) ** 2 / max(rare_expected, 1.0)
        cells += 1
    if cells < 2:
        return Verdict("law", (*failures, f"{total} draws are too few for {len(chances)} outcomes"), {"draws": total})
    tail = chi_square_tail(statistic, cells - 1)
    if tail < alpha:
        failures.append(f"chi-square {statistic:.1f} with {cells - 1} degrees of freedom: probability {tail:.2g}")
    facts = {"draws": total, "outcomes": cells, "chi_square": statistic, "probability": tail}
    return Verdict("law", tuple(failures), facts)


def share(name: str, hits: int, trials: int, chance: float, alpha: float) -> Verdict:
    """Test a count against its binomial law, two-sided, by the normal approximation."""
    spread = math.sqrt(max(chance * (1 - chance) * trials, 1e-12))
    z = (hits - chance * trials) / spread
    tail = math.erfc(abs(z) / math.sqrt(2))
    facts = {"name": name, "hits": hits, "trials": trials, "chance": chance, "probability": tail}
    wrong = () if tail >= alpha else (f"{name}: {hits} of {trials}; wanted {chance:.3f} of them (z = {z:.1f})",)
    return Verdict("law", wrong, facts)
