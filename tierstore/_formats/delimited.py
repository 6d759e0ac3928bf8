""".csv, .tsv: a line of numbers for each row, perhaps after a key.

A header line is one with a cell after the first that is no number, or a lone one. The first column
holds keys if the header calls it so, or if the first cell below is no number. What is written is
.tsv with a header and a column of keys, the numbers of the rows where there are no others.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tierstore._dtypes import DEFAULT_DTYPE, ElementType
from tierstore._formats.base import Array, Content, Format, Source, Wanted, Write
from tierstore._formats.files import InputFile, open_input, parsing, unless_it_fails
from tierstore._formats.records import (
    CELL_BYTES,
    MAX_WORD_CHARACTERS,
    RecordSource,
    format_rows,
    parse_numbers,
)
from tierstore.errors import FormatError

__all__ = ["Csv", "Tsv"]

MAX_LINE_CHARACTERS = 64 << 20
_CHARACTER_BYTES = 8
"""What a character of a line takes: in the line and in a cell, four bytes at most each."""
KEY_HEADERS = frozenset({"", "id", "index", "key", "word"})
"""What a header may call the column of keys, or NAME_id; data frames leave their index unnamed."""


class _DelimitedSource(RecordSource):
    def __init__(self, file: InputFile, dtype: str) -> None:
        """Look at the first lines for what the columns are, then count the rows."""
        cells = _cells(file)
        first = next(cells, None)
        if first is None:
            raise FormatError(f"{file.path}: empty")
        self._header = int(_is_header(first))
        below = next(cells, None) if self._header else first
        named = bool(self._header) and _names_keys(first[0])
        self._keyed = int(named or (below is not None and not _is_number(below[0])))
        rows = sum(1 for _ in cells) + (below is not None)
        super().__init__(file, rows, len(below or first) - self._keyed, dtype)

    def _rows(self) -> Iterator[list[str]]:
        cells = _cells(self._file)
        if self._header:
            next(cells, None)
        for row, line in enumerate(cells):
            if len(line) != self._keyed + self.dim:
                raise FormatError(
                    f"{self.path}: row {row} has {len(line)} columns, the first has "
                    f"{self._keyed + self.dim}"
                )
            yield line

    def _vectors(self) -> Iterator[list[float]]:
        for row, line in enumerate(self._rows()):
            yield parse_numbers(self.path, row, line[self._keyed :])

    def _words(self) -> Iterator[str] | None:
        return (line[0] for line in self._rows()) if self._keyed else None


def _cells(file: InputFile) -> Iterator[list[str]]:
    """Yield the cells of each line that is not empty, the header's included."""
    if file.path.suffix.lower() == ".tsv":
        lines = _Lines(file, "\t")
        rows = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        lines = _Lines(file, ",")
        rows = csv.reader(lines, strict=True)
    with parsing(file.path, "table", csv.Error, UnicodeDecodeError):
        for cells in rows:
            lines.pending = 0
            if cells:
                yield cells


class _Lines:
    """The lines of a file, those of one row within the allowance: quotes may hold line ends.

    Attributes:
        pending: bytes that the cells take of the lines since this was last set to 0.
    """

    def __init__(self, file: InputFile, delimiter: str) -> None:
        self._text = io.TextIOWrapper(file.stream(), encoding="utf-8-sig", newline="")
        self._path = file.path
        self._allowance = file.allowance
        self._most = max(1, min(MAX_LINE_CHARACTERS, self._allowance.left // _CHARACTER_BYTES))
        self._delimiter = delimiter
        self.pending = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._text.readline(self._most)
        if not line:
            raise StopIteration
        if len(line) == self._most:
            raise FormatError(f"{self._path}: a line of {self._most} characters or more")
        self.pending += CELL_BYTES * (1 + line.count(self._delimiter))
        self.pending += _CHARACTER_BYTES * len(line)
        self._allowance.check(self.pending, "the cells of one row")
        return line


def _is_header(cells: list[str]) -> bool:
    numbers = cells[1:] or cells
    return not all(map(_is_number, numbers))


def _names_keys(header: str) -> bool:
    name = header.strip().lower()
    return name in KEY_HEADERS or name.endswith("_id")


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


class Csv(Format):
    """Cells between commas, which may be quoted; read only."""

    suffixes = (".csv",)

    def open(self, path: Path, wanted: Wanted) -> Source:
        """Open a file, whose rows are counted first."""
        with unless_it_fails(open_input(path, wanted.memory)) as file:
            return _DelimitedSource(file, wanted.text_dtype)


class Tsv(Csv):
    """Cells between tabs, which are never quoted."""

    suffixes = (".tsv",)
    keys = "always"
    block_bytes = 1 << 20

    def holds(self, element: ElementType) -> bool:
        """Whether the type holds what text is read as."""
        return element.accepts(DEFAULT_DTYPE)

    @contextmanager
    def write(self, path: Path, content: Content) -> Iterator[Write]:
        """Write a header, then lines; raises InvalidInputError for keys that break a line."""
        if content.keys is not None:
            content.keys.reject(
                lambda key: any(c in key for c in "\t\r\n") or len(key) > MAX_WORD_CHARACTERS,
                f"holds a tab or a line end or has over {MAX_WORD_CHARACTERS} characters; "
                ".tsv cannot hold it: write .parquet or .safetensors instead",
            )
        with path.open("xb") as file:
            names = [f"{content.field}_{column}" for column in range(content.dim)]
            file.write("\t".join(["key", *names]).encode() + b"\n")

            def write(start: int, block: Array) -> None:
                words = content.words(start, start + len(block))
                file.write(format_rows(words, block, b"\t"))

            yield write
