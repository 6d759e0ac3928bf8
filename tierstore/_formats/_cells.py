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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, isinf
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from tierstore.budget import Allowance
from tierstore.errors import AmbiguousFileError, FormatError

BLANKS = " "
"""The separator that means runs of blanks and tabs."""

_BRACKETS = {("[", "]"), ("(", ")"), ("{", "}")}
MISSING = frozenset(
    {"", "NA", "N/A", "#N/A", "<NA>", "NULL", "null", "None", "NaT", "\\N"}
    | {"#DIV/0!", "#NUM!", "#REF!", "#VALUE!"}
)
"""What tools write where there is no number, sheets too; read as NaN only on request."""

BLOCK_BYTES = 4 << 20
MAX_LINE_BYTES = 64 << 20
_CELL_BYTES = 128
"""Bytes of a number in a line until it is in a block: twice as text, and as a float."""
_CHARACTER_BYTES = 8
"""Bytes of a character of a line: in the line and in a cell, four bytes at most each."""
_KEY_BYTES = 32
"""Bytes that most keys are shorter than."""
_MOST_BYTES = _CELL_BYTES + _CHARACTER_BYTES
# Python accepts these as numbers, and other tools do not: 1_000, digits of other alphabets.
_THOUSANDS = re.compile(r"[+-]?\d{1,3}((\.\d{3})+(,\d*)?|(,\d{3})+(\.\d*)?)", re.ASCII)
_WRAPPED = re.compile(r"(?:tensor|array)\((\[.*\])(?:, dtype=[\w.]+)?\)", re.DOTALL)
"""A list as torch and NumPy print it."""
_NO_NUMBER = re.compile(r"[^ \t!-^`-~]")

Row = tuple[int, list[str]]
"""The number of a line, from 1, and its cells."""


class Lines(Iterator[bytes]):
    """Whole lines of a stream, some MiB at a time, each ended by a line feed; none is too long.

    Attributes:
        line: the number of the first line of the next block, counted by the code that takes blocks.
    """

    def __init__(
        self,
        path: Path,
        stream: IO[bytes],
        allowance: Allowance,
        skip_lines: int = 0,
        comment: str | None = None,
    ) -> None:
        """Read `stream` from where it is; `path` is for messages.

        The first `skip_lines` lines and those that begin with `comment` are given as empty ones.
        """
        self._skip_lines = skip_lines
        self._comments = (
            None if comment is None else re.compile(b"(?m)^%s[^\n]*" % re.escape(comment.encode()))
        )
        self.path = path
        self.allowance = allowance
        self.line = 1
        self._stream = stream
        self._most = max(1, min(MAX_LINE_BYTES, allowance.left))

    def __next__(self) -> bytes:
        block = self._read()
        at = skipped = 0
        while self._skip_lines and at < len(block):
            at = block.index(b"\n", at) + 1
            skipped += 1
            self._skip_lines -= 1
        block = b"\n" * skipped + block[at:]
        return self._comments.sub(b"", block) if self._comments else block

    def _read(self) -> bytes:
        block = self._stream.read(BLOCK_BYTES)
        if not block:
            raise StopIteration
        if not block.endswith(b"\n"):
            last = self._stream.readline(self._most)
            if len(block) - block.rfind(b"\n") - 1 + len(last) >= self._most:
                line = self.line + lines_in(block)
                raise FormatError(
                    f"{self.path}: line {line} or one after it has {self._most} bytes or "
                    "more; if the file is to be trusted, allow more (memory=, --memory)"
                )
            block += last if last.endswith(b"\n") else last + b"\n"
        return block


@dataclass(frozen=True)
class Cells:
    """How lines are divided into cells.

    Attributes:
        sep: what is between cells.
        width: cells of a row where blanks divide them: more are a word in front; 0 if unknown.
        vector: the position of a cell that holds a list, the numbers in it, and the cells of a row;
            or None.
        blank_words: whether a line that begins with a blank, between blanks, has that for a word.
    """

    sep: str
    width: int = 0
    vector: tuple[int, int, int] | None = None
    blank_words: bool = False

    @property
    def lines_are_rows(self) -> bool:
        """Whether a row is always one line."""
        return self.sep in (BLANKS, "\t")

    def rows(self, block: bytes, lines: Lines) -> Iterator[Row]:
        """Yield the rows of a block that `lines` gave, without empty ones.

        A row that does not end within its block continues in the next one, which is yielded too.
        """
        cells = self._rows(block, lines)
        if self.vector is None:
            return cells
        return self.apart(lines.path, cells, *self.vector)

    @staticmethod
    def apart(path: Path, rows: Iterable[Row], at: int, dim: int, width: int) -> Iterator[Row]:
        """Yield rows of `width` cells in which each number of the list in cell `at` has a cell.

        Any other cell there, such as the name of the column, is followed by empty ones. Raises
        FormatError for rows of other lengths, and lists of other lengths than `dim`.
        """
        for number, cells in rows:
            if len(cells) != width:
                raise FormatError(
                    f"{path}: line {number} has {len(cells)} cells, but {width} were expected"
                )
            cell = cells[at]
            numbers = _divided(cell)
            if not _bracketed(cell) and not (numbers and is_number(numbers[0])):
                numbers = [cell] * dim if cell in MISSING else [cell, *[""] * (dim - 1)]
            if len(numbers) != dim:
                raise FormatError(
                    f"{path}: line {number} has a list of {len(numbers)} numbers, but {dim} were "
                    "expected"
                )
            yield number, [*cells[:at], *numbers, *cells[at + 1 :]]

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
                if self.sep == "\t" and '"' in text and _opens_and_closes(cells):
                    raise AmbiguousFileError(
                        f"{lines.path}: line {number}: a quote opens in one cell and closes in "
                        "another, so that the tab between them may be part of a text: save it with "
                        "commas between cells, or without tabs in texts"
                    )
                blank = self.blank_words and self.sep == BLANKS and text[0] in " \t"
                yield number, [text[0], *cells] if blank else cells

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


def _bracketed(cell: str) -> bool:
    cell = _WRAPPED.sub(r"\1", cell)
    return len(cell) > 2 and (cell[0], cell[-1]) in _BRACKETS


def _divided(cell: str) -> list[str]:
    """Return what stands between commas, semicolons or blanks in a cell, without its brackets."""
    cell = _WRAPPED.sub(r"\1", cell.strip())
    inner = cell[1:-1] if _bracketed(cell) else cell
    for mark in (",", ";"):
        if mark in inner:
            return inner.split(mark)
    return inner.split()


def list_items(cell: str) -> list[str]:
    """Return the numbers of a cell that is a list of them; [] for any other cell.

    They are in brackets, or more than one without: between blanks or semicolons, or between commas
    if they are three or have a point.
    """
    items = _divided(cell)
    if not all(map(is_number, items)):
        return []
    if _bracketed(cell.strip()):
        return items
    commas = len(items) == 2 and "," in cell and "." not in cell
    return [] if commas or len(items) < 2 or _THOUSANDS.fullmatch(cell.strip()) else items


def may_be_list(cell: str) -> bool:
    """Whether a cell that is no list may be one that is damaged: in brackets, or with a number."""
    cell = cell.strip()
    found = _divided(cell)
    return cell[:1] in "[({" or (len(found) > 1 and any(map(is_number, found)))


def list_cell(rows: Sequence[Row], *, bare: bool = False) -> tuple[int, int, int] | None:
    """Return the column of lists below the first row: its position, as in `Cells.vector`.

    None if there is no such column, or more than one. Lists without brackets are taken for ones
    beside one other column, or where they are chosen: `bare`.
    """
    body = [cells for _, cells in rows[1:] or rows]
    width = min(map(len, body), default=0)
    found = []
    for at in range(width):
        known = [cells[at] for cells in body if cells[at] not in MISSING]
        if width != 2 and not bare and not all(_bracketed(cell.strip()) for cell in known):
            continue
        if known and all(map(list_items, known)):
            found.append((at, len(list_items(known[0])), width))
    return found[0] if len(found) == 1 else None


def only_keys_are_quoted(block: bytes, sep: str) -> bool:
    """Whether each line of a block begins with a cell in quotes, and has no other quote.

    Such rows end where lines end, as programs write them that quote texts.
    """
    return _quoted_cells(np.frombuffer(block, np.uint8), sep) is not None


def _quoted_cells(text: npt.NDArray[np.uint8], sep: str) -> npt.NDArray[np.intp] | None:
    """Return where the first cell of each line ends, if all of them and no others are in quotes."""
    quotes, ends = np.flatnonzero(text == ord('"')), np.flatnonzero(text == ord("\n"))
    if len(quotes) != 2 * len(ends) or not len(ends) or ends[-1] != len(text) - 1:
        return None
    begin, stop = quotes[::2], quotes[1::2]
    starts = np.concatenate([[0], ends[:-1] + 1])
    alone = (begin == starts).all() and (stop < ends).all() and (text[stop + 1] == ord(sep)).all()
    return stop if alone else None


def first_cells(block: bytes, sep: str, columns: int) -> tuple[bytes, npt.NDArray[np.int64]] | None:
    """Return the first cell of each line of a block: their bytes, where each begins, and the end.

    None for a block that is not plain lines of cells, of which at most the first are in quotes.
    Between blanks a line has so many `columns`.
    """
    if b"\r" in block or (sep == BLANKS and b"\t" in block):
        return None
    text = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(text == ord("\n"))
    begin = np.concatenate([[0], ends[:-1] + 1])
    if sep == BLANKS:
        marks = np.flatnonzero(text == ord(sep))
        low, high = np.searchsorted(marks, begin), np.searchsorted(marks, ends)
        if (high - low != columns - 1).any():
            return None
        stop = marks[low]
    elif b'"' in block:
        found = _quoted_cells(text, sep)
        if found is None:
            return None
        begin, stop = begin + 1, found
    else:
        stop = _next(text, ord(sep), begin)
    lengths = stop - begin
    if (stop >= ends).any() or (sep == BLANKS and not lengths.all()):
        return None
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    cells = text[np.repeat(begin - bounds[:-1], lengths) + np.arange(bounds[-1])].tobytes()
    return cells, bounds


def _next(
    text: npt.NDArray[np.uint8], mark: int, begin: npt.NDArray[np.intp]
) -> npt.NDArray[np.intp]:
    """Return where the first `mark` from each of some positions on is; the end for none."""
    stop, rest = np.full(len(begin), len(text)), np.arange(len(begin))
    at = begin
    while len(rest):
        window = at[:, None] + np.arange(_KEY_BYTES)
        found = text[np.minimum(window, len(text) - 1)] == mark
        has = found.any(1)
        stop[rest[has]] = at[has] + found[has].argmax(1)
        rest, at = rest[~has], at[~has] + _KEY_BYTES
        rest, at = rest[at < len(text)], at[at < len(text)]
    return stop


def lines_in(block: bytes) -> int:
    """Return the number of line feeds."""
    return int(np.count_nonzero(np.frombuffer(block, np.uint8) == ord("\n")))


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


def _opens_and_closes(cells: Sequence[str]) -> bool:
    """Whether a cell begins with a quote, without its end, and a later one ends with one."""
    ends = [(cell[:1] == '"', cell[-1:] == '"') for cell in cells]
    return (True, False) in ends and (False, True) in ends[ends.index((True, False)) :]


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
