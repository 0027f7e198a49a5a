"""A picture of a matrix run: unified buffer used, and seconds to compile, per kernel and chip.

It needs matplotlib (requirements/report.txt), which nothing else here does.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

from .matrix import UB_SHARE, Row


def missing() -> str | None:
    """Return why no chart can be drawn here and what brings it, or None."""
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is not installed: `pip install -r requirements/report.txt`"
    return None


def largest(rows: Iterable[Row]) -> dict[str, dict[str, tuple[float, float]]]:
    """Return kernel -> chip -> the largest share of the unified buffer and the longest build, over all cases."""
    table: dict[str, dict[str, tuple[float, float]]] = {}
    for row in rows:
        if not row.kernel:
            continue
        ub = row.build.facts.buffer("UB") if row.build.facts else None
        share, seconds = table.setdefault(row.kernel, {}).get(row.soc, (0.0, 0.0))
        table[row.kernel][row.soc] = max(share, ub.share if ub else 0.0), max(seconds, row.build.seconds)
    return dict(sorted(table.items()))


def draw(rows: Iterable[Row], path: Path) -> None:
    """Write a PNG.

    Raises:
        RuntimeError: matplotlib is missing.
        ValueError: there is no kernel to show.
    """
    why = missing()
    if why is not None:
        raise RuntimeError(why)
    table = largest(rows)
    if not table:
        raise ValueError("chart: the rows hold no kernel")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    chips = sorted({chip for found in table.values() for chip in found})
    figure = Figure(figsize=(11, 1.8 + 0.4 * len(table)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    titles = ("unified buffer used, % (largest over the cases)", "seconds to HIVM (longest over the cases)")
    height = 0.8 / len(chips)
    for panel, title, entry, scale in zip(panels, titles, (0, 1), (100, 1), strict=True):
        for i, chip in enumerate(chips):
            places = [n + (i - (len(chips) - 1) / 2) * height for n in range(len(table))]
            values = [found.get(chip, (0.0, 0.0))[entry] * scale for found in table.values()]
            panel.barh(places, values, height, label=chip)
        panel.set_title(title, fontsize=9)
        panel.set_yticks(range(len(table)), list(table), fontsize=8)
        panel.grid(axis="x", linewidth=0.3)
    panels[0].invert_yaxis()
    panels[0].axvline(UB_SHARE * 100, color="black", linestyle="--", linewidth=1, label=f"limit {UB_SHARE:.0%}")
    panels[0].set_xlim(0, 105)
    panels[0].legend(fontsize=8)
    FigureCanvasAgg(figure).print_png(str(path))
