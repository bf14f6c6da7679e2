"""Tables for people that scripts can read too: nothing is ever cut, and piped lines are never wrapped."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPED_WIDTH = 10_000  # columns where there is no terminal whose width would matter


class Output(Console):
    """A console whose reader may leave: the command then ends as all do, where rich's says that it failed."""

    def on_broken_pipe(self) -> None:
        """Called where nobody reads any more."""
        self.quiet = True
        raise BrokenPipeError


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[str]) -> None:
    """On stdout; the first column is what other commands are given, `numbers` stand on the right."""
    table = Table(box=None, pad_edge=False)
    for at, column in enumerate(columns):
        is_number = column in numbers
        table.add_column(column, justify="right" if is_number else "left", no_wrap=is_number or at == 0)
    for row in rows:
        table.add_row(*map(Text, row))  # else rich takes [words] and :names: of a text for its own
    console = Output(highlight=False)
    if not console.is_terminal:
        console = Output(highlight=False, width=PIPED_WIDTH)
    console.print(table)


def print_whole(table: Table, console: Console) -> None:
    """Where it is wider than the terminal, its lines run on; a number without its end is none."""
    before = console.width
    needed = console.measure(table, options=console.options.update(width=PIPED_WIDTH)).maximum
    console.width = max(before, needed)
    try:
        console.print(table)
    finally:
        console.width = before
