"""Lines of text and their cells, in blocks of whole lines, and the numbers in them.

Cells are divided by a separator. A blank means runs of blanks and tabs, and a word
in front may contain single ones. Between tabs a cell that begins and ends with a quote is unquoted,
others are unchanged. Every other separator is that of CSV, whose quotes may also hold the
ends of lines. A cell may hold a list of numbers, as pgvector writes them: [0.1,0.2]; it is divided
into a cell for each.
"""

from __future__ import annotations

import csv
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, isinf
from pathlib import Path
from typing import IO

import numpy as np

from tierstore.budget import Allowance
from tierstore.errors import FormatError

__all__ = [
    "BLANKS",
    "MISSING",
    "Cells",
    "Lines",
    "Row",
    "is_list",
    "is_number",
    "line_edges",
    "list_cell",
    "numbers_of",
    "split_blanks",
    "thousands",
    "unquoted",
]

BLANKS = " "
"""The separator that means runs of blanks and tabs."""

MISSING = frozenset(
    {"", "NA", "N/A", "#N/A", "<NA>", "NULL", "null", "None", "NaT"}
    | {"#DIV/0!", "#NUM!", "#REF!", "#VALUE!"}
)
"""What tools write where there is no number, sheets too; read as NaN only on request."""

BLOCK_BYTES = 4 << 20
MAX_LINE_BYTES = 64 << 20
_CELL_BYTES = 128
"""Bytes of a number in a line until it is in a block: twice as text, and as a float."""
_CHARACTER_BYTES = 8
"""Bytes of a character of a line: in the line and in a cell, four bytes at most each."""
_MOST_BYTES = _CELL_BYTES + _CHARACTER_BYTES
# Python accepts these as numbers, and other tools do not: 1_000, digits of other alphabets.
_THOUSANDS = re.compile(r"[+-]?\d{1,3}((\.\d{3})+(,\d*)?|(,\d{3})+(\.\d*)?)", re.ASCII)
_NO_NUMBER = re.compile(r"[^ \t!-^`-~]")

Row = tuple[int, list[str]]
"""The number of a line, from 1, and its cells."""


class Lines(Iterator[bytes]):
    """Whole lines of a stream, some MiB at a time, each ended by a line feed; none is too long.

    Attributes:
        line: the number of the first line of the next block, counted by the code that takes blocks.
    """

    def __init__(self, path: Path, stream: IO[bytes], allowance: Allowance) -> None:
        """Read `stream` from where it is; `path` is for messages."""
        self.path = path
        self.allowance = allowance
        self.line = 1
        self._stream = stream
        self._rest: list[bytes] = []
        self._most = max(1, min(MAX_LINE_BYTES, allowance.left))

    def __next__(self) -> bytes:
        while data := self._stream.read(BLOCK_BYTES):
            cut = data.rfind(b"\n") + 1
            block, self._rest = [*self._rest, data[:cut]], [*self._rest, data]
            if cut:
                self._rest = [data[cut:]]
                return b"".join(block)
            self._check_length()
        last, self._rest = b"".join(self._rest), []
        if not last:
            raise StopIteration
        return last + b"\n"

    def _check_length(self) -> None:
        if sum(map(len, self._rest)) >= self._most:
            raise FormatError(
                f"{self.path}: line {self.line} or one after it has {self._most} bytes or more; if "
                "the file is to be trusted, allow more (memory=, --memory)"
            )


@dataclass(frozen=True)
class Cells:
    """How lines are divided into cells.

    Attributes:
        sep: what is between cells.
        width: cells of a row where blanks divide them: more are a word in front; 0 if unknown.
        vector: the position of a cell that holds a list, and the numbers in it; or None.
    """

    sep: str
    width: int = 0
    vector: tuple[int, int] | None = None

    @property
    def lines_are_rows(self) -> bool:
        """Whether a row is always one line."""
        return self.sep in (BLANKS, "\t")

    def rows(self, block: bytes, lines: Lines) -> Iterator[Row]:
        """Yield the rows of a block that `lines` gave, without empty ones.

        A row that does not end within its block continues in the next one, which is yielded too.
        """
        found = self._rows(block, lines)
        if self.vector is None:
            return found
        return ((number, self.apart(cells, *self.vector)) for number, cells in found)

    @staticmethod
    def apart(cells: list[str], at: int, dim: int) -> list[str]:
        """Return a row in which each number of the list in cell `at` has a cell.

        Any other cell there, such as the name of the column, is followed by empty ones.
        """
        if at >= len(cells):
            return cells
        cell = cells[at]
        numbers = cell[1:-1].split(",") if is_list(cell) else [cell, *[""] * (dim - 1)]
        return [*cells[:at], *numbers, *cells[at + 1 :]]

    def _rows(self, block: bytes, lines: Lines) -> Iterator[Row]:
        if not self.lines_are_rows:
            yield from self._csv_rows(block, lines)
            return
        split = split_blanks if self.sep == BLANKS else _split_tabs
        first, lines.line = lines.line, lines.line + block.count(b"\n")
        for number, data in enumerate(block.split(b"\n"), first):
            text = data.decode(errors="surrogateescape").rstrip("\r")
            if _MOST_BYTES * (len(text) + 1) > lines.allowance.left:  # most lines are far from it
                lines.allowance.check(self.cost(text), "the cells of one row")
            if cells := split(text, self.width):
                yield number, cells

    def _csv_rows(self, block: bytes, lines: Lines) -> Iterator[Row]:
        source = _CsvLines(self, block, lines)
        reader = csv.reader(source, delimiter=self.sep, strict=True)
        first = lines.line
        while True:
            number = first + reader.line_num
            source.begin_row()
            try:
                cells = next(reader)
            except StopIteration:
                break
            except csv.Error as error:
                last = first + reader.line_num - 1
                raise FormatError(f"{lines.path}: line {last}: not a table: {error}") from None
            if cells:
                yield number, cells
        lines.line = first + reader.line_num

    def cost(self, text: str) -> int:
        """Return the memory of a line with its cells."""
        blanks = text.count(" ") + text.count("\t") if self.sep == BLANKS else 0
        cells = 1 + (blanks or text.count(self.sep)) + (text.count(",") if self.vector else 0)
        return _CELL_BYTES * cells + _CHARACTER_BYTES * len(text)


class _CsvLines:
    """The lines of a block for csv.reader, and later ones that its last row needs."""

    def __init__(self, cells: Cells, block: bytes, more: Lines) -> None:
        self._cells = cells
        self._more = more
        self._lines = iter(block.splitlines(keepends=True))
        self._held = 0
        self._fresh = True

    def begin_row(self) -> None:
        """Begin a row with the next line."""
        self._fresh, self._held = True, 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines, None)
        if line is None and not self._fresh:
            self._lines = iter(next(self._more, b"").splitlines(keepends=True))
            line = next(self._lines, None)
        if line is None:
            raise StopIteration
        self._fresh = False
        text = line.decode(errors="surrogateescape")
        self._held += self._cells.cost(text)
        self._more.allowance.check(self._held, "the cells of one row")
        return text


def is_list(cell: str) -> bool:
    """Whether a cell holds a list, in the notation of pgvector."""
    return len(cell) > 2 and cell[0] == "[" and cell[-1] == "]"


def list_cell(rows: Sequence[Row]) -> tuple[int, int] | None:
    """Return the position of the column of lists below the first row, and the numbers in one.

    None if there is no such column, or more than one.
    """
    body = [cells for _, cells in rows[1:] or rows]
    found = [
        at
        for at in range(min(map(len, body), default=0))
        if any(is_list(cells[at]) for cells in body)
        and all(is_list(cells[at]) or cells[at] in MISSING for cells in body)
    ]
    if len(found) != 1:
        return None
    lists = [cells[found[0]] for cells in body if is_list(cells[found[0]])]
    return found[0], lists[0].count(",") + 1


def line_edges(block: bytes) -> tuple[set[int], set[int]]:
    """Return the bytes that lines of a block begin with, and those before their line feeds."""
    data = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(data == ord("\n"))
    first = data[np.append(0, ends[:-1] + 1)]
    return set(np.unique(first).tolist()), set(np.unique(data[ends - 1]).tolist())


def split_blanks(text: str, width: int = 0) -> list[str]:
    """Divide a line at runs of blanks and tabs; with `width`, more cells are one word in front."""
    cells = (text.replace("\t", " ") if "\t" in text else text).split(" ")
    if "" in cells:
        cells = [cell for cell in cells if cell]
    if not width or len(cells) <= width:
        return cells
    rest = text.rstrip(" \t")
    for _ in range(width - 1):
        rest = rest[: max(rest.rfind(" "), rest.rfind("\t"))].rstrip(" \t")
    return [rest, *cells[len(cells) - width + 1 :]]


def _split_tabs(text: str, width: int = 0) -> list[str]:
    if not text:
        return []
    return [unquoted(cell) for cell in text.split("\t")] if '"' in text else text.split("\t")


def unquoted(cell: str) -> str:
    """Return the text between quotes at the ends of a cell; return other cells unchanged."""
    if len(cell) > 1 and cell[0] == cell[-1] == '"':
        inner = cell[1:-1].replace('""', "\0")
        if '"' not in inner:
            return inner.replace("\0", '"')
    return cell


def numbers_of(cells: Sequence[str], decimal: str, null: frozenset[str], into: array[float]) -> int:
    """Add the numbers that cells spell to `into`; return how many were too large for float64.

    `null` are cells that mean NaN. Raises ValueError, whose argument is the position of the
    first cell that is no number.
    """
    before = len(into)
    try:
        text = "".join(cells)
        plain = text.isascii() and text.isprintable() and "_" not in text
        if decimal != "." or null or not plain:
            into.extend(_number(cell, decimal, null) for cell in cells)
        else:
            into.extend(map(float, cells))
    except ValueError:
        raise ValueError(len(into) - before) from None
    found = into[before:]
    if isfinite(sum(found)):
        return 0
    pairs = zip(found, cells, strict=True)
    return sum(isinf(value) and any(map(str.isdigit, cell)) for value, cell in pairs)


def _number(cell: str, decimal: str, null: frozenset[str]) -> float:
    if cell in null:
        return float("nan")
    if _NO_NUMBER.search(cell) or (decimal != "." and "." in cell):
        raise ValueError(cell)
    return float(cell.replace(decimal, "."))


def is_number(cell: str, decimal: str = ".") -> bool:
    """Whether a cell spells a number, NaN and infinities included."""
    try:
        _number(cell, decimal, frozenset())
    except ValueError:
        return False
    return True


def thousands(cell: str) -> str:
    """Return a hint for the message on a cell that is no number: marks that divide it."""
    if not _THOUSANDS.fullmatch(cell.strip()):
        return ""
    mark = next(each for each in cell if each in ".,")
    named = {".": "points", ",": "commas"}[mark]
    plain = cell.strip().replace(mark, "")
    return f"; its {named} divide thousands: write numbers without them, as {plain}"
