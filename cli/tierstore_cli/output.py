"""The output of a command: one JSON object for programs, or lines and tables for people."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from tierstore_cli.text import fitted, printable


@dataclass(frozen=True)
class Grid:
    """A table of text: headers (none for a plain list), rows, and the right-aligned columns."""

    headers: Sequence[str]
    rows: Sequence[Sequence[object]]
    right: frozenset[int] = frozenset()

    def cells(self) -> list[list[str]]:
        """Return all cells, headers first if there are any, safe to print."""
        rows = [self.headers, *self.rows] if self.headers else self.rows
        return [[printable(cell) for cell in row] for row in rows]

    def lines(self) -> Iterable[str]:
        """Yield the lines of the table, its columns two spaces apart."""
        cells = self.cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            yield "  ".join(
                cell.rjust(width) if column in self.right else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()


class Output:
    """Writes the result of one command to stdout, as JSON or for people, and notes to stderr."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json

    def show(self, data: Mapping[str, Any], *parts: str | Grid) -> None:
        """Write `data` as one JSON object, or `parts` below one another for people."""
        if self.as_json:
            click.echo(json.dumps(data, indent=None, allow_nan=False, default=str))
            return
        for part in parts:
            if isinstance(part, Grid):
                self._grid(part)
            else:
                self._line(part)

    def note(self, message: str) -> None:
        """Write a note, which is not part of the result, to stderr."""
        click.echo(fitted(printable(message), sys.stderr), err=True)

    def _line(self, text: str) -> None:
        click.echo(fitted(printable(text, keep="\n"), sys.stdout))

    def _grid(self, grid: Grid) -> None:
        if not rich_grid(grid):
            for line in grid.lines():
                self._line(line)


def rich_grid(grid: Grid) -> bool:
    """Draw the table with rich on a terminal; return False if that is not possible."""
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    if plain or not grid.headers or not sys.stdout.isatty():
        return False
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    headers, *rows = grid.cells()
    for column, header in enumerate(headers):
        table.add_column(header, justify="right" if column in grid.right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    Console(soft_wrap=True).print(table)
    return True
