"""Tables for people: borders and colour on a terminal, aligned columns elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

PIPE_WIDTH = 200
"""Columns when output is not a terminal: whoever reads it there must not get cut cells."""


def make_console(*, stderr: bool = False) -> Console:
    """A console that honours NO_COLOR, and does not wrap where no terminal has a width."""
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print to stdout; columns whose cells are all numbers are set right."""
    console = make_console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, header in enumerate(headers):
        numeric = bool(rows) and all(row[index].replace(".", "").replace("/", "").isdigit() for row in rows)
        table.add_column(header, justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
