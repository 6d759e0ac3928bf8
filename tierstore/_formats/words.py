"""Text and binary files in which each row is a word and its numbers.

.csv and .tsv have a line of numbers per row, optionally after a key. The first line is a header if
a cell after the first is not a number, or if its only cell is not a number. The first column
contains keys if the header says so, or if the first cell below the header is not a number. The
writer produces .tsv with a header and a column of keys, or of row numbers without keys.

.vec and .txt are the text format of word2vec, fastText and GloVe, .bin is the binary format of
word2vec. The text format has a word and its numbers on each line, and specifies no element type.
word2vec and fastText put the number of rows and dimensions on the first line, GloVe does not; both
variants are read, the former is written. The binary format has the two counts, then each word, a
space and its float32 values. A .txt file may also contain only keys, one per line.
"""

from __future__ import annotations

import csv
import io
import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._dtypes import DEFAULT_DTYPE, ELEMENT_TYPES, ElementType
from tierstore._formats.base import Array, Content, Format, Source, Wanted, Write
from tierstore._formats.files import InputFile, open_input, parsing, unless_it_fails
from tierstore._formats.keys import Keys, as_integers, take_words, without_row_numbers
from tierstore.budget import Size
from tierstore.errors import FormatError, InvalidInputError
from tierstore.spec import MAX_RECORD_BYTES

__all__ = [
    "CELL_BYTES",
    "MAX_WORD_CHARACTERS",
    "Csv",
    "RecordSource",
    "Text",
    "Tsv",
    "Word2VecBinary",
    "Word2VecText",
    "decode_word",
    "format_rows",
    "parse_numbers",
]

MAX_WORD_CHARACTERS = 1 << 14
"""The longest word that is written, well below the reader's limit."""

CELL_BYTES = 128
"""Memory of a number in a line until it is in a block: twice as text, and as a float."""


class RecordSource(Source):
    """A file of words and numbers, read from the start for each pass over its rows."""

    def __init__(self, file: InputFile, rows: int, dim: int, dtype: str) -> None:
        """Read `file`, which the source closes."""
        super().__init__(file.path, rows, dim, dtype)
        self._file = file

    @abstractmethod
    def _vectors(self) -> Iterator[Any]:
        """Yield the `dim` numbers of each row, in any form that NumPy can assign to a row."""

    @abstractmethod
    def _words(self) -> Iterator[str] | None:
        """Yield the word of each row, or None if rows have no words."""

    def _blocks(self, block_rows: int) -> Iterator[Array]:
        vectors = self._vectors()
        filled = size = min(block_rows, self.rows + 1)
        while filled == size:
            block = np.empty((size, self.dim), ELEMENT_TYPES[self.dtype].stored)
            filled = 0
            with np.errstate(over="ignore"):
                for vector in islice(vectors, size):
                    block[filled] = vector
                    filled += 1
            yield block[:filled]

    @cached_property
    def keys(self) -> Keys | None:
        """The words, unless they merely number the rows; integers become int64."""
        words = self._words()
        if words is None:
            return None
        allowance = self._file.allowance
        found = take_words(islice(words, self.rows + 1), allowance)
        if len(found) != self.rows:
            raise self._wrong_count(len(found))
        return without_row_numbers(found, allowance)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def parse_numbers(path: Path, row: int, words: Sequence[bytes] | Sequence[str]) -> list[float]:
    """Parse words as numbers, rounded to float64; raises FormatError."""
    try:
        return list(map(float, words))
    except ValueError as error:
        raise FormatError(f"{path}: row {row}: {error!s:.100}") from None


def decode_word(path: Path, row: int, word: bytes) -> str:
    """Decode a word from UTF-8; raises FormatError."""
    try:
        return word.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: the word of row {row} is not UTF-8: {error}") from None


def format_rows(words: Sequence[bytes], block: Array, separator: bytes) -> bytes:
    """Return lines of a word and the numbers of its row, in decimal and exact.

    Nine significant digits distinguish all float32 values, seventeen all float64 values.
    """
    number = separator + (b"%.17g" if block.dtype.itemsize == 8 else b"%.9g")
    line = b"%b" + number * block.shape[1] + b"\n"
    pairs = zip(words, block.tolist(), strict=True)
    return b"".join([line % (word, *numbers) for word, numbers in pairs])


MAX_LINE_CHARACTERS = 64 << 20
_CHARACTER_BYTES = 8
"""Memory of a character: in the line and in a cell, at most four bytes each."""
KEY_HEADERS = frozenset({"", "id", "index", "key", "word"})
"""Header names of the key column, besides NAME_id; data frames leave their index unnamed."""


class _DelimitedSource(RecordSource):
    def __init__(self, file: InputFile, dtype: str) -> None:
        """Determine the columns from the first lines, then count the rows."""
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
    """Yield the cells of each non-empty line, including the header."""
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
    """The lines of a file; lines of one row, which quotes may join, are charged to the allowance.

    Attributes:
        pending: memory of the cells of the lines since it was last set to 0.
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
    """Cells between commas, which may be quoted; read-only."""

    suffixes = (".csv",)

    def open(self, path: Path, wanted: Wanted) -> Source:
        """Open a file, counting its rows first."""
        with unless_it_fails(open_input(path, wanted.memory)) as file:
            return _DelimitedSource(file, wanted.text_dtype)


class Tsv(Csv):
    """Cells between tabs, which are never quoted."""

    suffixes = (".tsv",)
    keys = "always"
    block_bytes = 1 << 20

    def holds(self, element: ElementType) -> bool:
        """Whether the type is one as which text can be read."""
        return element.accepts(DEFAULT_DTYPE)

    @contextmanager
    def write(self, path: Path, content: Content) -> Iterator[Write]:
        """Write a header, then lines; raises InvalidInputError for keys that break a line."""
        if content.keys is not None:
            content.keys.reject(
                lambda key: any(c in key for c in "\t\r\n") or len(key) > MAX_WORD_CHARACTERS,
                f"contains a tab or a line end or has over {MAX_WORD_CHARACTERS} characters; "
                ".tsv cannot hold it: write .parquet or .safetensors instead",
            )
        with path.open("xb") as file:
            names = [f"{content.field}_{column}" for column in range(content.dim)]
            file.write("\t".join(["key", *names]).encode() + b"\n")

            def write(start: int, block: Array) -> None:
                words = content.words(start, start + len(block))
                file.write(format_rows(words, block, b"\t"))

            yield write


MAX_LINE_BYTES = 64 << 20
MAX_KEY_LINE_BYTES = 1 << 20
MAX_WORD_BYTES = 4 * MAX_WORD_CHARACTERS + 2

_TEXT_COUNTS = re.compile(rb"(\d{1,15}) (\d{1,9})")
_BINARY_COUNTS = re.compile(rb"(\d{1,15}) (\d{1,9})[ \r]*\n")
_FASTTEXT_MAGIC = b"\xba\x16O/"
_READ_BYTES = 1 << 20
_ELEMENT = np.dtype("<f4")
"""The element type of the binary format."""


class _VecSource(RecordSource):
    def __init__(self, file: InputFile, rows: int, dim: int, dtype: str, *, offset: int) -> None:
        super().__init__(file, rows, dim, dtype)
        self._offset = offset

    def _vectors(self) -> Iterator[list[float]]:
        for row, line in enumerate(_lines(self._file, self._offset)):
            yield parse_numbers(self.path, row, self._split(row, line)[1:])

    def _words(self) -> Iterator[str]:
        for row, line in enumerate(_lines(self._file, self._offset)):
            yield decode_word(self.path, row, self._split(row, line)[0])

    def _split(self, row: int, line: bytes) -> list[bytes]:
        """Return the word and the last `dim` parts: a few words of GloVe contain spaces."""
        parts = line.rsplit(b" ", self.dim)
        if len(parts) != self.dim + 1 or not parts[0]:
            raise FormatError(f"{self.path}: row {row} is not a word and {self.dim} numbers")
        return parts


def _lines(file: InputFile, offset: int) -> Iterator[bytes]:
    """Yield the non-empty lines from byte `offset` on, without line ends."""
    stream = file.stream()
    stream.seek(offset)
    while line := stream.readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES:
            raise FormatError(f"{file.path}: a line of {MAX_LINE_BYTES} bytes or more")
        file.allowance.check(CELL_BYTES * line.count(b" ") + 2 * len(line), "a line of numbers")
        if line := line.rstrip(b" \r\n"):
            yield line


class Word2VecText(Format):
    """Words and numbers in text, read as float32 unless a wider type is requested."""

    suffixes = (".vec",)
    keys = "always"
    block_bytes = 1 << 20

    def holds(self, element: ElementType) -> bool:
        """Whether the type is one as which text can be read."""
        return element.accepts(DEFAULT_DTYPE)

    def open(self, path: Path, wanted: Wanted) -> Source:
        """Open a file with or without counts; without counts, count the rows first."""
        with unless_it_fails(open_input(path, wanted.memory)) as file:
            first = file.stream().readline(MAX_LINE_BYTES)
            counts = _TEXT_COUNTS.fullmatch(first.rstrip(b" \r\n"))
            if counts is None:
                dim = first.rstrip(b" \r\n").count(b" ")
                if not 1 <= dim <= MAX_RECORD_BYTES // 4:
                    raise FormatError(f"{path}: the first line is not a word and its numbers")
                rows = sum(1 for _ in _lines(file, 0))
                return _VecSource(file, rows, dim, wanted.text_dtype, offset=0)

            rows, dim = int(counts[1]), int(counts[2])
            shortest = rows * (len("w 0\n") + (dim - 1) * len(" 0")) - 1
            if file.size - len(first) < shortest:
                raise FormatError(
                    f"{path}: {file.size} bytes cannot hold {rows} rows of {dim} numbers"
                )
            return _VecSource(file, rows, dim, wanted.text_dtype, offset=len(first))

    @contextmanager
    def write(self, path: Path, content: Content) -> Iterator[Write]:
        """Write counts, then lines; raises InvalidInputError for keys that are not words."""
        _reject_unfit_words(content)
        with path.open("xb") as file:
            file.write(b"%d %d\n" % (content.rows, content.dim))

            def write(start: int, block: Array) -> None:
                words = content.words(start, start + len(block))
                file.write(format_rows(words, block, b" "))

            yield write


class Text(Word2VecText):
    """The same format under the suffix of GloVe, or only keys, one per line."""

    suffixes = (".txt",)

    def read_keys(self, path: Path, name: str | None, memory: Size) -> Keys:
        """Read keys in UTF-8, one per line; if all are integers they become int64."""
        if name is not None:
            raise InvalidInputError(f"{path}:{name}: a .txt file of keys has no columns")
        with open_input(path, memory) as file:
            words = take_words(_key_lines(file), file.allowance)
            numbers = as_integers(words, file.allowance)
            return words if numbers is None else numbers


def _key_lines(file: InputFile) -> Iterator[str]:
    stream = file.stream()
    for number in count(1):
        line = stream.readline(MAX_KEY_LINE_BYTES)
        if not line:
            return
        text = line.rstrip(b"\r\n")
        if not text or len(line) == MAX_KEY_LINE_BYTES:
            raise FormatError(f"{file.path}: line {number} is empty or too long for a key")
        try:
            yield text.decode()
        except UnicodeDecodeError as error:
            raise FormatError(f"{file.path}: line {number} is not UTF-8: {error}") from None


class _BinSource(RecordSource):
    def __init__(self, file: InputFile, rows: int, dim: int, *, offset: int) -> None:
        super().__init__(file, rows, dim, _ELEMENT.name)
        self._offset = offset

    def _vectors(self) -> Iterator[npt.NDArray[Any]]:
        for _, vector in self._records():
            yield np.frombuffer(vector, _ELEMENT)

    def _words(self) -> Iterator[str]:
        for row, (word, _) in enumerate(self._records()):
            yield decode_word(self.path, row, word)

    def _records(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield each word and the bytes of its numbers; nothing may follow the last."""
        stream = self._file.stream()
        stream.seek(self._offset)
        nbytes = 4 * self.dim
        data, at = b"", 0
        for row in range(self.rows):
            if len(data) - at <= MAX_WORD_BYTES + nbytes:
                data, at = data[at:] + stream.read(_READ_BYTES + nbytes), 0
            space = data.find(b" ", at, at + MAX_WORD_BYTES)
            stop = space + 1 + nbytes
            # The original tool ends each row with a newline, other tools do not.
            word = data[at:space].removeprefix(b"\n")
            if space < 0 or not word or stop > len(data):
                raise FormatError(f"{self.path}: row {row} of {self.rows} is truncated or no word")
            yield word, data[space + 1 : stop]
            at = stop
        if (data[at:] + stream.read(2))[:2] not in (b"", b"\n"):
            raise FormatError(f"{self.path}: extra bytes follow the {self.rows} rows")


class Word2VecBinary(Format):
    """Words and float32 values in binary."""

    suffixes = (".bin",)
    keys = "always"

    def holds(self, element: ElementType) -> bool:
        """Whether the type is float32."""
        return element.stored == _ELEMENT

    def open(self, path: Path, wanted: Wanted) -> Source:
        """Open a file and check its counts against its size."""
        with unless_it_fails(open_input(path, wanted.memory)) as file:
            first = file.stream().readline(64)
            if first.startswith(_FASTTEXT_MAGIC):
                raise FormatError(
                    f"{path}: a fastText model, not word2vec vectors; read its .vec file"
                )
            counts = _BINARY_COUNTS.fullmatch(first)
            if counts is None:
                raise FormatError(f"{path}: the first line is not two counts, as in word2vec files")
            rows, dim = int(counts[1]), int(counts[2])
            if file.size - len(first) < rows * (len(b"w ") + 4 * dim):
                raise FormatError(
                    f"{path}: truncated: {file.size} bytes cannot hold {rows} rows of {dim} float32"
                )
            return _BinSource(file, rows, dim, offset=len(first))

    @contextmanager
    def write(self, path: Path, content: Content) -> Iterator[Write]:
        """Write counts, then each word and its row; raises InvalidInputError for invalid words."""
        _reject_unfit_words(content)
        with path.open("xb") as file:
            file.write(b"%d %d\n" % (content.rows, content.dim))

            def write(start: int, block: Array) -> None:
                words = content.words(start, start + len(block))
                data, size = block.tobytes(), 4 * content.dim
                for row, word in enumerate(words):
                    file.write(b"%b %b\n" % (word, data[row * size : (row + 1) * size]))

            yield write


def _reject_unfit_words(content: Content) -> None:
    """Raise InvalidInputError if a key is empty, very long or contains white space."""
    if content.keys is not None:
        content.keys.reject(
            lambda key: key.split() != [key] or len(key) > MAX_WORD_CHARACTERS,
            f"is empty, contains white space or has over {MAX_WORD_CHARACTERS} characters; "
            "word2vec files cannot hold it: write .parquet or .safetensors instead",
        )
