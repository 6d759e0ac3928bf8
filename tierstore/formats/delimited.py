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

from tierstore.errors import FormatError
from tierstore.formats.files import InputFile, open_input, parsing, unless_it_fails
from tierstore.formats.records import (
    MAX_WORD_CHARACTERS,
    RecordSource,
    format_rows,
    parse_numbers,
)
from tierstore.formats.seam import Array, Content, Format, Source, Wanted, Write
from tierstore.spec import MAX_RECORD_BYTES

__all__ = ["CSV", "TSV"]

MAX_LINE_CHARACTERS = 64 << 20
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
    lines = _lines(file)
    if file.path.suffix.lower() == ".tsv":
        rows = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        rows = csv.reader(lines, strict=True)
    with parsing(file.path, "table", csv.Error, UnicodeDecodeError):
        for cells in rows:
            if len(cells) > MAX_RECORD_BYTES:
                raise FormatError(f"{file.path}: a line of {len(cells)} columns")
            if cells:
                yield cells


def _lines(file: InputFile) -> Iterator[str]:
    text = io.TextIOWrapper(file.stream(), encoding="utf-8-sig", newline="")
    while line := text.readline(MAX_LINE_CHARACTERS):
        if len(line) == MAX_LINE_CHARACTERS:
            raise FormatError(f"{file.path}: a line of {MAX_LINE_CHARACTERS} characters or more")
        yield line


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


def _open(path: Path, wanted: Wanted) -> Source:
    with unless_it_fails(open_input(path)) as file:
        return _DelimitedSource(file, wanted.text_dtype)


@contextmanager
def _write(path: Path, content: Content) -> Iterator[Write]:
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


CSV = Format((".csv",), _open)
TSV = Format((".tsv",), _open, _write, ("float32", "float64"), keys="always", block_bytes=1 << 20)
