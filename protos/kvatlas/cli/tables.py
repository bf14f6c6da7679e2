"""Tables for people that scripts can read too: names are never cut, and piped lines never wrapped."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

PIPED_WIDTH = 10_000  # columns where there is no terminal whose width would matter


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[str]) -> None:
    """On stdout; the first column is what other commands are given, `numbers` stand on the right."""
    table = Table(box=None, pad_edge=False)
    for at, column in enumerate(columns):
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=at == 0)
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPED_WIDTH)
    console.print(table)
