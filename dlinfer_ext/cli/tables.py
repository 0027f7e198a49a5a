"""Print a table: as wide as the terminal, or as wide as it needs to be for a file or a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def show(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    table = Table(*headings)
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        wide = Console(width=10_000)
        console = Console(width=Measurement.get(wide, wide.options, table).maximum)
    console.print(table)
