"""Tables of a record and of a comparison, for a terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from .bench_compare import Comparison
from .bench_record import Counts, Record, Result

Table = tuple[Sequence[str], list[Sequence[str]]]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if value < 10 else f"{value:.3g}" if value < 1000 else f"{value:,.0f}".replace(",", " ")


def _bounded(value: float | None, limit: float | None, sign: str) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" + (f" ({sign} {limit:g})" if limit is not None else "")


def _counted(counts: Counts | None, name: str) -> str:
    value = getattr(counts, name) if counts else None
    return "" if value is None else f"{value:.4g}"


def ratios(cases: Iterable[Result]) -> Table:
    """Return a row per case and baseline."""
    rows: list[Sequence[str]] = []
    for case in cases:
        for number, (name, side) in enumerate(case.baselines.items()):
            rows.append(
                (
                    case.name,
                    name,
                    str(case.runs),
                    _bounded(side.speedup, None if number else case.target, "≥"),
                    f"{side.low:.2f}–{side.high:.2f}",
                    f"{_counted(case.counts, 'calls')} / {_counted(side.counts, 'calls')}",
                    f"{_counted(case.counts, 'host_reads')} / {_counted(side.counts, 'host_reads')}",
                    f"{_number(case.bytes_per_token(case.counts))} / {_number(case.bytes_per_token(side.counts))}",
                )
            )
    headings = ("case", "beside", "rounds", "times as fast", "quartiles", "calls", "host reads", "bytes per token")
    return headings, rows


def sizes(cases: Iterable[Result]) -> Table:
    """Return a row per case with what it is measured by itself."""
    rows: list[Sequence[str]] = [
        (
            c.name,
            f"{c.ms:.3f}",
            f"{c.spread:.0%}",
            "" if c.copy_ratio is None else f"{c.copy_ratio:.1f}",
            _bounded(c.extra_memory, c.memory_limit, "≤"),
            _counted(c.counts, "calls"),
            _counted(c.counts, "host_reads"),
            _counted(c.counts, "launches"),
            _number(c.bytes_per_token(c.counts)),
            "yes" if c.held else "NO",
        )
        for c in cases
    ]
    headings = ("case", "ms", "spread", "× copy", "extra memory", "calls", "host reads", "launches")
    return (*headings, "bytes per token", "held"), rows


def curves(cases: Iterable[Result]) -> Table:
    """Return a row per growth curve."""
    found: dict[str, list[Result]] = {}
    for case in cases:
        if case.growth:
            found.setdefault(case.growth, []).append(case)
    rows: list[Sequence[str]] = [
        (
            name,
            " → ".join(str(p.point) for p in points),
            " → ".join(f"{p.ms / points[0].ms:.2f}" for p in points),
            " ".join(f"{b.ms / a.ms:.2f}" for a, b in pairwise(points)),
            " → ".join(_counted(p.counts, "calls") for p in points),
        )
        for name, points in found.items()
    ]
    return ("growth", "points", "time over the first's", "from point to point", "calls"), rows


def engine(cases: Iterable[Result]) -> Table:
    """Return a row per engine case; calls and host reads are those of the operators, per step."""
    rows: list[Sequence[str]] = []
    for case in cases:
        if case.engine is None:
            continue
        loop, none = case.baselines.get("loop"), case.baselines.get("no drafts")
        rows.append(
            (
                case.name,
                str(case.runs),
                "" if loop is None else f"{loop.speedup:.2f} ({loop.low:.2f}–{loop.high:.2f})",
                "" if none is None else f"{none.speedup:.2f} ({none.low:.2f}–{none.high:.2f})",
                f"{case.engine.tokens_per_step:.2f}",
                "" if case.engine.accepted is None else f"{case.engine.accepted:.2f}",
                f"{_counted(case.counts, 'calls')} / {_counted(loop.counts if loop else None, 'calls')}",
                f"{_counted(case.counts, 'host_reads')} / {_counted(loop.counts if loop else None, 'host_reads')}",
                "yes" if case.held else "NO: " + "; ".join(case.problems),
            )
        )
    headings = ("case", "rounds", "beside loop", "beside no drafts", "tokens per row and step", "accepted")
    return (*headings, "calls per step", "host reads per step", "held"), rows


def missing(cases: Iterable[Result]) -> list[str]:
    return [f"missing: {c.name}, baseline {name}: {why}" for c in cases for name, why in c.missing.items()]


def tables(found: Record) -> list[Table]:
    every = [engine(found.cases)] if found.what == "engine" else [t(found.cases) for t in (ratios, sizes, curves)]
    return [t for t in every if t[1]]


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table for a page."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def page(found: Record) -> str:
    """Return the tables of a record with where and with what it was made, as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    where = f"{found.cpu}, {found.threads} thread{'s' if found.threads > 1 else ''}, route {found.route}"
    head = [f"`{found.command}`", f"{found.date}, commit {found.commit}. {where}. {versions}."]
    return "\n\n".join([*head, *(markdown(*t) for t in tables(found)), *missing(found.cases)]) + "\n"


def write(found: Record, path: Path) -> None:
    path.write_text(page(found), encoding="utf-8")


def lines(found: Comparison, limit: float) -> list[str]:
    """Return a comparison for a terminal."""
    titles = {
        "slower": "slower",
        "unclear": "unclear, measure again",
        "more": "asks for more",
        "vanished": "vanished",
        "failing": "no longer holds",
        "appeared": "new",
        "differ": "differs",
    }
    text = [f"{title}: {line}" for name, title in titles.items() for line in getattr(found, name)]
    verdict = "holds" if found.held else "does NOT hold"
    return [
        *text,
        f"{verdict}: {found.compared} ratios compared with limit {limit:g}; "
        f"{found.untimed} cases have no baseline in common, only their counts were compared",
    ]
