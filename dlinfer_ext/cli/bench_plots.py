"""Pictures of a record: ratios, growth curves and calls of operators; ratios and accepted drafts of the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..toolchain.chart import missing
from .bench_record import Record, Result

DPI = 72
LONGEST_NAME = 58


def check() -> None:
    """Refuse before minutes are spent on what cannot be drawn.

    Raises:
        RuntimeError: matplotlib is missing; the message names the command that brings it.
    """
    why = missing()
    if why is not None:
        raise RuntimeError(f"--plots: {why}")


def draw(found: Record, folder: Path) -> list[Path]:
    """Write the PNG files of a record and return them; a picture without anything to show is left out.

    Raises:
        RuntimeError: see `check`.
    """
    check()
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    folder.mkdir(parents=True, exist_ok=True)
    every: dict[str, dict[str, Callable[[Record], Any]]] = {
        "engine": {"engine_ratios": _ratios, "engine_accepted": _accepted},
        "ops": {"ratios": _ratios, "growth": _growth, "calls": _calls},
    }
    files = []
    for name, picture in every[found.what].items():
        figure = picture(found)
        if figure is not None:
            figure.set_dpi(DPI)
            files.append(folder / f"{name}.png")
            FigureCanvasAgg(figure).print_png(str(files[-1]))
    return files


def _figure(height: float, *, width: float = 9) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def _bars(found: Record, value: Callable[[Result, str], tuple[float, float, float]], label: str) -> Any:
    """Draw a bar per case and baseline, value with low and high, on a logarithmic axis with a line at 1."""
    pairs = [(case, name) for case in found.cases for name in case.baselines]
    if not pairs:
        return None
    names = list(dict.fromkeys(name for _, name in pairs))
    figure = _figure(1.2 + 0.17 * len(pairs))
    axes = figure.subplots()
    for number, name in enumerate(names):
        rows = [(y, value(case, name)) for y, (case, which) in enumerate(pairs) if which == name]
        middle = [v for _, (v, _, _) in rows]
        error = [[max(0.0, v - low) for _, (v, low, _) in rows], [max(0.0, high - v) for _, (v, _, high) in rows]]
        axes.barh([y for y, _ in rows], middle, 0.7, xerr=error, label=name, color=f"C{number}", error_kw={"lw": 0.8})
    axes.set_yticks(range(len(pairs)), [_short(case.name) for case, _ in pairs], fontsize=6)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel(label, fontsize=8)
    axes.grid(axis="x", linewidth=0.3)
    axes.legend(fontsize=7)
    return figure


def _ratios(found: Record) -> Any:
    def speedup(case: Result, name: str) -> tuple[float, float, float]:
        side = case.baselines[name]
        return side.speedup, side.low, side.high

    return _bars(found, speedup, "times as fast as the baseline, quartiles of the rounds (CPU, one run)")


def _calls(found: Record) -> Any:
    def more(case: Result, name: str) -> tuple[float, float, float]:
        own, other = case.counts, case.baselines[name].counts
        value = other.calls / max(1.0, own.calls) if own and other else 1.0
        return value, value, value

    return _bars(found, more, "PyTorch calls of the baseline over ours")


def _growth(found: Record) -> Any:
    lines: dict[str, list[Result]] = {}
    for case in found.cases:
        if case.growth and case.point is not None:
            lines.setdefault(case.growth, []).append(case)
    if not lines:
        return None
    families = list(dict.fromkeys(points[0].family for points in lines.values()))
    figure = _figure(0.6 + 2.0 * ((len(families) + 2) // 3))
    panels = figure.subplots((len(families) + 2) // 3, min(3, len(families)), squeeze=False).flatten()
    for family, panel in zip(families, panels, strict=False):
        for name, points in lines.items():
            if points[0].family == family:
                # A curve over drafts begins at none, so one more: the tokens of a row.
                first = points[0].point or 0
                shift = 1 if "drafts" in name else 0
                over = [((p.point or 0) + shift) / (first + shift) for p in points]
                panel.plot(over, [p.ms / points[0].ms for p in points], marker="o", markersize=3, lw=1, label=name)
        limit = panel.get_xlim()[1]
        panel.plot([1, limit], [1, limit], color="black", linestyle=":", linewidth=0.8)
        panel.set_title(family, fontsize=8)
        panel.tick_params(labelsize=6)
        panel.legend(fontsize=5)
    for panel in panels[len(families) :]:
        panel.axis("off")
    figure.supxlabel("size over the first point's (dotted: in proportion)", fontsize=7)
    figure.supylabel("time over the first point's", fontsize=7)
    return figure


def _accepted(found: Record) -> Any:
    drafted = [c for c in found.cases if c.engine and c.engine.accepted is not None]
    if not drafted:
        return None
    figure = _figure(1.2 + 0.2 * len(drafted))
    axes = figure.subplots()
    axes.barh(range(len(drafted)), [c.engine.accepted or 0.0 for c in drafted if c.engine], 0.7)
    axes.set_yticks(range(len(drafted)), [_short(c.name) for c in drafted], fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("drafts accepted per row of a verify step", fontsize=8)
    axes.grid(axis="x", linewidth=0.3)
    return figure
