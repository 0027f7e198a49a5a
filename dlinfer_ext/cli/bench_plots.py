"""Pictures of a record: ratios, growth curves and calls of operators; ratios and accepted drafts of the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..toolchain.chart import missing
from .bench_record import Record, Result

DPI = 80
COLOURS = 200
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
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

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
            canvas = FigureCanvasAgg(figure)
            canvas.draw()
            files.append(folder / f"{name}.png")
            # A few colours will do, and make a file of a third of the size.
            Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(COLOURS).save(
                files[-1], optimize=True
            )
    return files


def _figure(height: float, *, width: float = 9) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def _dots(found: Record, value: Callable[[Result, str], tuple[float, float, float]], label: str) -> Any:
    """Draw a line per case with a dot per baseline, value with low and high, on a logarithmic axis with a line at 1."""
    cases = [case for case in found.cases if case.baselines]
    if not cases:
        return None
    names = list(dict.fromkeys(name for case in cases for name in case.baselines))
    figure = _figure(1.1 + 0.19 * len(cases))
    axes = figure.subplots()
    for number, name in enumerate(names):
        # Side by side on a case's line, so that no error bar hides another.
        rows = [(y + 0.2 * (number - (len(names) - 1) / 2), c) for y, c in enumerate(cases) if name in c.baselines]
        points = [value(case, name) for _, case in rows]
        error = [[max(0.0, v - low) for v, low, _ in points], [max(0.0, high - v) for v, _, high in points]]
        axes.errorbar(
            [v for v, _, _ in points], [y for y, _ in rows], xerr=error, fmt="o", markersize=3, lw=0.8, label=name
        )
    axes.set_yticks(range(len(cases)), [_short(case.name) for case in cases], fontsize=6)
    axes.set_ylim(len(cases) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}" if axes.get_xlim()[1] < 10 * axes.get_xlim()[0] else "")
    axes.tick_params(axis="x", which="both", labelsize=7)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel(label, fontsize=8)
    axes.grid(linewidth=0.3)
    axes.legend(fontsize=7)
    return figure


def _ratios(found: Record) -> Any:
    def speedup(case: Result, name: str) -> tuple[float, float, float]:
        side = case.baselines[name]
        return side.speedup, side.low, side.high

    return _dots(found, speedup, "times as fast as the baseline, quartiles of the rounds (CPU, one run)")


def _calls(found: Record) -> Any:
    def more(case: Result, name: str) -> tuple[float, float, float]:
        own, other = case.counts, case.baselines[name].counts
        value = other.calls / max(1.0, own.calls) if own and other else 1.0
        return value, value, value

    return _dots(found, more, "PyTorch calls of the baseline over ours")


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
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")
        limit = panel.get_xlim()[1]
        panel.plot([1, limit], [1, limit], color="black", linestyle=":", linewidth=0.8)
        panel.set_title(family, fontsize=8)
        panel.tick_params(labelsize=6)
        panel.legend(fontsize=5)
    for panel in panels[len(families) :]:
        panel.axis("off")
    figure.supxlabel(
        "size over the first point's (dotted: in proportion; a state grows with the square of dim)", fontsize=7
    )
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
