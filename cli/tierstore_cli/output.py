"""The output of a command: one JSON object for programs, or lines and tables for people."""

from __future__ import annotations

import contextlib
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
        self.shown = False

    def show(self, data: Mapping[str, Any], *parts: str | Grid) -> None:
        """Write `data` as one JSON object, or `parts` below one another for people."""
        if self.as_json:
            click.echo(json.dumps(data, indent=None, allow_nan=False, default=str))
            self.shown = True
            return
        for part in parts:
            if isinstance(part, Grid):
                self._grid(part)
            else:
                self._line(part)

    def note(self, message: str) -> None:
        """Write a note, which is not part of the result, to stderr."""
        click.echo(fitted(printable(message), sys.stderr), err=True)

    def fail(self, kind: str, message: str, exit_code: int) -> None:
        """Write a failure as the one JSON object, unless a result was written before it."""
        if not self.as_json or self.shown:
            return
        with contextlib.suppress(OSError):  # what failed may be stdout itself
            self.show({"error": {"type": kind, "message": message, "exit_code": exit_code}})

    def cells(self, cells: Iterable[object]) -> None:
        """Write one line of a result, its cells divided by tabs, none of which is in a cell."""
        click.echo(fitted("\t".join(map(printable, cells)), sys.stdout))

    def _line(self, text: str) -> None:
        click.echo(fitted(printable(text, keep="\n"), sys.stdout))

    def _grid(self, grid: Grid) -> None:
        if not rich_grid(grid):
            for line in grid.lines():
                self._line(line)


_GAP = 3
"""Characters between columns, at most."""


def fitting(grid: Grid, width: int) -> tuple[Grid, list[str]]:
    """Return a grid without the last columns that do not fit in `width`, and their headers.

    The first column stays. A number that is cut is a wrong number.
    """
    taken = 0
    for column, cells in enumerate(zip(*grid.cells(), strict=True)):
        taken += max(map(len, cells)) + (_GAP if column else 0)
        if taken > width and column:
            rows = [row[:column] for row in grid.rows]
            return Grid(grid.headers[:column], rows, grid.right), list(grid.headers[column:])
    return grid, []


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
    grid, left_out = fitting(grid, Console().width)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    headers, *rows = grid.cells()
    for column, header in enumerate(headers):
        table.add_column(header, justify="right" if column in grid.right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    widest = sum(max(map(len, cells)) + _GAP for cells in zip(headers, *rows, strict=True))
    Console(soft_wrap=True, width=max(widest, Console().width)).print(table)
    if left_out:
        click.echo(f"too narrow for {', '.join(left_out)}; --json has them")
    return True
