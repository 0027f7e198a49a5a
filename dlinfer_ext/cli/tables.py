"""Print a table: as wide as the terminal, or wide enough for a file or a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

PIPE_WIDTH = 180


def show(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*headings)
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH)
    console.print(table)
