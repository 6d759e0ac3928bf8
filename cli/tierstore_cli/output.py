"""The output of a command: one JSON object for programs, or lines and tables for people."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from tierstore_cli.failure import Failure, writing_output
from tierstore_cli.printing import fitted, printable, tell


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
        self._open = ""
        """What ends the object that is being written, and the arrays and objects in it."""
        self._complete = False

    def show(self, data: Mapping[str, Any], *parts: str | Grid) -> None:
        """Write `data` as one JSON object, or `parts`, lines and grids, for people.

        An iterator in `data` is an array whose items are written one by one. NaN and infinities,
        which JSON lacks, are null there; a note says how many.
        """
        if self.as_json:
            self._object(data)
            return
        for part in parts:
            if isinstance(part, Grid):
                self._grid(part)
            else:
                self._line(part)

    def _object(self, data: Mapping[str, Any]) -> None:
        lost = self._value(data)
        _write("")
        self._complete = True
        if lost:
            numbers = "1 number is" if lost == 1 else f"{lost:,} numbers are"
            self.note(f"Note: {numbers} NaN or infinite, for which JSON has null")

    def _value(self, value: Any) -> int:
        """Write a value, that of an iterator item by item; return how many numbers JSON lacks."""
        is_array = isinstance(value, Iterator)
        if not is_array and not isinstance(value, Mapping):
            text, lost = _dumped(value)
            _write(text, "")
            return lost
        start, end = "[]" if is_array else "{}"
        before, lost = self._open, 0
        _write(start, "")
        self._open = end + before  # where reading fails, `fail` writes it
        for number, item in enumerate(value if is_array else value.items()):
            comma = ", " if number else ""
            if is_array:
                text, count = _dumped(item)
                _write(f"{comma}{text}", "")
                lost += count
            else:
                _write(f"{comma}{json.dumps(str(item[0]))}: ", "")
                lost += self._value(item[1])
        _write(end, "")
        self._open = before
        return lost

    def blocks(self, grids: Iterator[Grid]) -> None:
        """Write grids with the same columns as one table, one by one.

        The first one sets the widths of the columns, and on a terminal which of them fit.
        """
        first, left_out = fitting(next(grids), _width())
        columns, widths = len(first.headers), first.widths()
        _write("\n".join(first.lines(widths)))
        for grid in grids:
            rows = [row[:columns] for row in grid.rows]
            _write("\n".join(Grid((), rows, grid.right).lines(widths)))
        if left_out:
            self._line(f"too narrow for {', '.join(left_out)}; --json has them")

    def note(self, message: str) -> None:
        """Write a note, which is not part of the result, to stderr."""
        tell(printable(message))

    def flush(self) -> None:
        """Write what is in the buffer of stdout."""
        with writing_output():
            sys.stdout.flush()

    def fail(self, kind: str, message: str, exit_code: int) -> None:
        """Write a failure as the one JSON object, or as the end of one whose rows have begun.

        Nothing is written after a complete one, as that of a check which found damage.
        """
        if not self.as_json or self._complete:
            return
        error = {"type": kind, "message": message, "exit_code": exit_code}
        with contextlib.suppress(OSError, Failure):  # stdout itself may have failed
            start = f"{self._open[:-1]}, " if self._open else "{"
            _write(f'{start}"error": {json.dumps(error)}}}')
        self._complete = True

    def cells(self, cells: Iterable[object]) -> None:
        """Write one line of a result, its cells divided by tabs; no cell contains one."""
        _write("\t".join(map(printable, cells)))

    def _line(self, text: str) -> None:
        _write(printable(text))

    def _grid(self, grid: Grid) -> None:
        if grid.headers:
            self.blocks(iter([grid]))
        else:
            for line in grid.lines():
                self._line(line)


def _width() -> int:
    """Return the columns of a terminal; elsewhere there is no limit."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize


def _write(text: str, end: str = "\n") -> None:
    """Write to stdout; raises Failure, and OSError for a closed pipe."""
    with writing_output():
        click.echo(fitted(text + end, sys.stdout), nl=False)


def _dumped(value: Any) -> tuple[str, int]:
    """Return the text of a value in JSON, and how many of its numbers JSON lacks."""
    try:
        return json.dumps(value, allow_nan=False, default=str), 0
    except ValueError:
        plain, count = _finite(value)
        return json.dumps(plain, allow_nan=False, default=str), count


def _finite(value: Any) -> tuple[Any, int]:
    """Return a value with None in place of NaN and infinities, and how many there were."""
    if isinstance(value, float) and not math.isfinite(value):
        return None, 1
    if isinstance(value, Mapping):
        pairs = {key: _finite(item) for key, item in value.items()}
        return {key: item for key, (item, _) in pairs.items()}, sum(n for _, n in pairs.values())
    if isinstance(value, list | tuple):
        items = [_finite(item) for item in value]
        return [item for item, _ in items], sum(count for _, count in items)
    return value, 0


_GAP = 2
"""Characters between columns."""


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
