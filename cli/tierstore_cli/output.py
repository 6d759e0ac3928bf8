"""The output of a command: one JSON object for programs, or lines and tables for people."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import click

from tierstore_cli.failure import Failure, writing_output
from tierstore_cli.text import fitted, printable, tell


@dataclass(frozen=True)
class Grid:
    """A table of text: headers (none for a plain list), rows, and the right-aligned columns."""

    headers: Sequence[str]
    rows: Sequence[Sequence[object]]
    right: frozenset[int] = frozenset()
    least: Sequence[int] = ()
    """Widths below which columns do not fall; none if it is empty."""

    def cells(self) -> list[list[str]]:
        """Return all cells, headers first if there are any, safe to print."""
        rows = [self.headers, *self.rows] if self.headers else self.rows
        return [[printable(cell) for cell in row] for row in rows]

    def widths(self) -> list[int]:
        """Return the characters of the widest cell of each column."""
        widths = [max(map(len, column)) for column in zip(*self.cells(), strict=True)]
        return [*map(max, zip(widths, self.least or widths, strict=True))]

    def lines(self, widths: Sequence[int] | None = None) -> Iterable[str]:
        """Yield the lines of the table, its columns two spaces apart."""
        widths = self.widths() if widths is None else widths
        for row in self.cells():
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
        """Write `data` as one JSON object, or `parts`, lines and grids, for people.

        An iterator in `data` is an array whose items are written one by one.
        """
        if self.as_json:
            self.shown = True  # before: a failure while rows are read is not a separate object
            for text in _json(data):
                _write(text, "")
            _write("")
            return
        for part in parts:
            if isinstance(part, Grid):
                self._grid(part)
            else:
                self._line(part)

    def blocks(self, grids: Iterator[Grid]) -> None:
        """Write grids with the same columns as one table, one by one.

        The first one sets the widths of the columns, and on a terminal which of them fit.
        """
        first, second = next(grids), next(grids, None)
        if second is None:
            self._grid(first)
            return
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
        fit, left_out = fitting(first, width)
        columns, widths = len(fit.headers), fit.widths()
        _write("\n".join(fit.lines(widths)))
        for grid in chain([second], grids):
            rows = [row[:columns] for row in grid.rows]
            _write("\n".join(Grid((), rows, grid.right).lines(widths)))
        if left_out:
            self._line(_too_narrow(left_out))

    def note(self, message: str) -> None:
        """Write a note, which is not part of the result, to stderr."""
        tell(printable(message))

    def flush(self) -> None:
        """Write what is in the buffer of stdout."""
        with writing_output():
            sys.stdout.flush()

    def fail(self, kind: str, message: str, exit_code: int) -> None:
        """Write a failure as the one JSON object, unless a result was written before it."""
        if not self.as_json or self.shown:
            return
        with contextlib.suppress(OSError, Failure):  # stdout itself may have failed
            self.show({"error": {"type": kind, "message": message, "exit_code": exit_code}})

    def cells(self, cells: Iterable[object]) -> None:
        """Write one line of a result, its cells divided by tabs; no cell contains one."""
        _write("\t".join(map(printable, cells)))

    def _line(self, text: str) -> None:
        _write(printable(text))

    def _grid(self, grid: Grid) -> None:
        if not rich_grid(grid):
            for line in grid.lines():
                self._line(line)


def _write(text: str, end: str = "\n") -> None:
    """Write to stdout; raises Failure, and OSError for a closed pipe."""
    with writing_output():
        click.echo(fitted(text + end, sys.stdout), nl=False)


def _json(value: Any) -> Iterator[str]:
    """Yield the text of a value in JSON; that of an iterator item by item."""
    if isinstance(value, Iterator):
        yield "["
        for number, each in enumerate(value):
            yield f"{', ' if number else ''}{_dumped(each)}"
        yield "]"
    elif isinstance(value, Mapping):
        yield "{"
        for number, (key, each) in enumerate(value.items()):
            yield f"{', ' if number else ''}{_dumped(str(key))}: "
            yield from _json(each)
        yield "}"
    else:
        yield _dumped(value)


def _dumped(value: Any) -> str:
    return json.dumps(value, allow_nan=False, default=str)


_GAP = 3
"""Characters between columns, at most."""


def fitting(grid: Grid, width: int) -> tuple[Grid, list[str]]:
    """Return a grid without the last columns that do not fit in `width`, and their headers.

    The first column stays. A number that is cut is a wrong number.
    """
    taken = 0
    for column, cells in enumerate(grid.widths()):
        taken += cells + (_GAP if column else 0)
        if taken > width and column:
            rows = [row[:column] for row in grid.rows]
            left = Grid(grid.headers[:column], rows, grid.right, grid.least[:column])
            return left, list(grid.headers[column:])
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
    with writing_output():
        Console(soft_wrap=True, width=max(widest, Console().width)).print(table)
    if left_out:
        _write(_too_narrow(left_out))
    return True


def _too_narrow(headers: Sequence[str]) -> str:
    return f"too narrow for {', '.join(headers)}; --json has them"
