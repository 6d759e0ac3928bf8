"""Text files with a line for each row, of numbers and optionally a key.

.csv and .tsv separate cells by commas and tabs, .vec and .txt by blanks; other separators are
found. A cell may hold a list of numbers, as pgvector writes them. A sample shows what the
first line and the columns are, by the rules of `_layout`. .vec and .txt are the text
format of word2vec, fastText and GloVe: a word and its numbers, after a first line with two counts
or none. A .txt file may also contain only keys, one per line. Numbers are read as float64 and
rounded to the requested type. Each file may be packed (`_encoding`).

The writer names the columns (.csv, .tsv) or begins with counts (.vec, .txt), and puts a key into
each row: the number of the row if there are no others.
"""

from __future__ import annotations

import io
import re
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from tierstore._dtypes import ELEMENT_TYPES
from tierstore._formats._arrow import BlockParser, lines_of
from tierstore._formats._cells import (
    BLANKS,
    MISSING,
    Cells,
    Lines,
    Row,
    first_cells,
    is_number,
    line_edges,
    lines_in,
    list_cell,
    numbers_of,
    only_keys_are_quoted,
    thousands,
    unquoted,
)
from tierstore._formats._encoding import UNPACKING_ERRORS, is_packed, text_stream
from tierstore._formats._layout import Layout, decide, needs_float64, with_readings
from tierstore._formats.base import (
    Array,
    Content,
    FileSource,
    MatrixFormat,
    Source,
    TextOptions,
    Wanted,
    Write,
)
from tierstore._formats.files import InputFile, parsing
from tierstore._formats.keys import (
    Keys,
    as_integers,
    blob_to_strings,
    take_words,
    without_row_numbers,
)
from tierstore._keys.strings import Strings
from tierstore.errors import AmbiguousFileError, FormatError
from tierstore.spec import MAX_ROWS

SAMPLE_BYTES = 1 << 18
SAMPLE_ROWS = 1000
MAX_KEY_LINE_BYTES = 1 << 20
MAX_WORD_CHARACTERS = 1 << 14
"""The longest word that is written, well below the reader's limit."""
_TOO_LONG = rf"\A.{{{MAX_WORD_CHARACTERS + 1}}}"
_SAYS_SEP = re.compile(rb"sep=.\r?\n")

_POINT_ZERO = re.compile(r"^(-?\d+)\.0*$")


class _FirstLines:
    """The first lines of a file, and whether they are all."""

    def __init__(self, file: InputFile, options: TextOptions) -> None:
        lines: list[bytes] = []
        size = taken = 0
        comment = None if options.comment is None else options.comment.encode()
        stream = text_stream(file)
        most = max(1, file.allowance.left)
        self.whole = False
        self._blank_words = options.errors == "replace"
        while taken < SAMPLE_ROWS and (size < SAMPLE_BYTES or taken < 3):
            line = stream.readline(most)
            if len(line) == most:
                file.allowance.check(2 * len(line), "its first line")
            if not line:
                self.whole = True
                break
            if len(lines) < options.skip_lines or (comment and line.startswith(comment)):
                lines.append(b"\n")
                continue
            if line.strip():
                size += len(line)
            taken += 1
            lines.append(line)
        self.text = b"".join(lines)
        self._file = file
        try:
            self.text.decode(errors="strict" if options.errors == "strict" else "ignore")
        except UnicodeDecodeError as error:
            number = self.text.count(b"\n", 0, error.start) + 1
            raise _no_utf8(file.path, number, self.text[error.start]) from None

    def rows(self, sep: str) -> list[Row]:
        """Return the rows of the lines with a separator; raises FormatError."""
        lines = Lines(self._file.path, io.BytesIO(self.text), self._file.allowance)
        cells = Cells(sep, blank_words=self._blank_words)
        rows = [row for block in lines for row in cells.rows(block, lines)]
        if not self.whole and len(rows) > 1 and not cells.lines_are_rows and b'"' in self.text:
            rows.pop()  # its last line may have been cut off
        return rows

    def table(
        self, sep: str, *, bare: bool = False
    ) -> tuple[list[Row], tuple[int, int, int] | None]:
        """Return the rows with a separator, and where their lists are; raises FormatError.

        Lists may be `bare`, without brackets, where the caller chooses their column.
        """
        rows = self.rows(sep)
        if not rows:
            raise FormatError(f"{self._file.path}: empty, or its first row does not end")
        vector = list_cell(rows, bare=bare)
        if vector is not None:
            rows = list(Cells.apart(self._file.path, rows, *vector))
        return rows, vector


class _TextSource(FileSource):
    """Rows in text, read from the start for each pass."""

    def __init__(
        self, file: InputFile, layout: Layout, wanted: Wanted, rows: int | None, said: str
    ) -> None:
        """Read `file`, which the source closes; rows are counted if `rows` is None."""
        self._file = file
        self.path = file.path
        self.layout = layout
        self._decimal = layout.decimal
        self._null = frozenset(wanted.text.null)
        self._errors = wanted.text.errors
        self._left_out = (wanted.text.skip_lines, wanted.text.comment)
        self._has_words = layout.words and layout.key == 0
        self._cells = Cells(
            layout.sep,
            layout.columns if self._has_words else 0,
            layout.vector,
            wanted.text.errors == "replace",
        )
        super().__init__(
            file,
            self._rows() if rows is None else rows,
            len(layout.values),
            wanted.text_dtype,
        )
        self.read_as = said
        self.notes = layout.notes

    def _passes(self) -> Iterator[tuple[bytes, Lines]]:
        """Yield blocks of whole lines from the first row on."""
        with parsing(self.path, "packed file", *UNPACKING_ERRORS):
            stream, allowance = text_stream(self._file), self._file.allowance
            lines = Lines(self.path, stream, allowance, *self._left_out)
            skipped = self.layout.skipped
            for block in lines:
                while skipped and block:
                    skipped, block = self._without_row(block, lines, skipped)
                if block:
                    yield block, lines

    def _without_row(self, block: bytes, lines: Lines, skipped: int) -> tuple[int, bytes]:
        """Remove the first line that is not empty from a block."""
        end = block.index(b"\n") + 1
        line = block[:end]
        if not self._cells.lines_are_rows:
            while line.count(b'"') % 2 and end < len(block):  # a header may contain line ends
                end = block.index(b"\n", end) + 1
                line = block[:end]
        lines.line += line.count(b"\n")
        return skipped - bool(line.strip(b" \t\r\n")), block[end:]

    def _rows(self) -> int:
        """Count the rows, by their keys if there are any."""
        if self.layout.key is not None:
            return len(self._words)
        return sum(self._rows_in(block, lines) for block, lines in self._passes())

    def _rows_in(self, block: bytes, lines: Lines) -> int:
        quoted = b'"' in block and not only_keys_are_quoted(block, self.layout.sep)
        if not self._cells.lines_are_rows and (quoted or _has_lone_returns(block)):
            return sum(1 for _ in self._cells.rows(block, lines))
        lines.line += lines_in(block)
        strip = b" \t\r" if self.layout.sep == BLANKS else b"\r"
        if line_edges(block)[0].isdisjoint(b"\n" + strip):
            return lines_in(block)
        return sum(1 for line in block.split(b"\n") if line.strip(strip))

    def _blocks(self, block_rows: int) -> Iterator[Array]:
        self.overflowed = 0
        parser = BlockParser(self.layout, blank_null=bool(self._null))
        element = ELEMENT_TYPES[self.dtype]
        for block, lines in self._passes():
            numbers = parser(block)
            if numbers is None:
                numbers = self._parsed(block, lines)
            else:
                lines.line += lines_in(block)
            stored = np.ascontiguousarray(element.encode(numbers))
            self.overflowed += element.overflowed(numbers, stored)
            for start in range(0, len(stored), block_rows):
                yield stored[start : start + block_rows]

    def _parsed(self, block: bytes, lines: Lines) -> npt.NDArray[np.float64]:
        """Return the numbers of a block, read cell by cell."""
        values: array[float] = array("d")
        positions = self.layout.values
        first, last = positions[0], positions[-1] + 1
        whole = len(positions) == last - first
        for number, cells in self._checked(block, lines):
            wanted = cells[first:last] if whole else [cells[at] for at in positions]
            try:
                self.overflowed += numbers_of(wanted, self._decimal, self._null, values)
            except ValueError as error:
                at = positions[int(str(error))]
                raise self._no_number(number, at, cells[at]) from None
        return np.frombuffer(values, np.float64).reshape(-1, self.dim)

    def _checked(self, block: bytes, lines: Lines) -> Iterator[Row]:
        """Yield the rows of a block, which all have the columns of the layout."""
        columns = self.layout.columns
        for number, cells in self._cells.rows(block, lines):
            if len(cells) != columns:
                raise FormatError(
                    f"{self.path}: line {number} has {len(cells)} cells, but {columns} were "
                    "expected"
                )
            if self._has_words and _ends_in_number(cells[0]):
                raise FormatError(
                    f"{self.path}: line {number} has more than {self.dim} numbers: "
                    f"{cells[0]!r:.100} stands before them"
                )
            yield number, cells

    def _no_number(self, line: int, at: int, cell: str) -> FormatError:
        hint = ""
        if cell in MISSING:
            hint = f"; to read such cells as NaN, say --null '{cell}' (null=[{cell!r}])"
        hint = hint or thousands(cell)
        return FormatError(
            f"{self.path}: line {line}, {self.layout.column(at)}: {cell!r:.100} is no number{hint} "
            f"(read as: {self.read_as})"
        )

    @cached_property
    def keys(self) -> Keys | None:
        """The column of keys, unless they only count the rows; whole numbers are int64."""
        if self.layout.key is None:
            return None
        if len(self._words) != self.rows:
            raise self._wrong_count(len(self._words))
        keys = without_row_numbers(self._words, self._file.allowance)
        if keys is None:
            self.numbering = self.layout.column(self.layout.key)
        return keys

    @cached_property
    def _words(self) -> Strings:
        """The cells of the column of keys, which also count the rows."""
        allowance = self._file.allowance
        words, most = Strings(), MAX_ROWS if self.layout.counts is None else self.layout.counts[0]
        for block, lines in self._passes():
            packed = self._packed_words(block)
            if packed is None:
                take_words(self._words_in(block, lines), allowance, words)
            else:
                lines.line += len(packed[1]) - 1
                blob_to_strings(self.path, *packed, allowance, words)
            if len(words) > most:
                break
        return words

    def _packed_words(self, block: bytes) -> tuple[bytes, npt.NDArray[np.int64]] | None:
        """Return the keys of a block of plain lines; None for those that `_words_in` reads."""
        layout = self.layout
        if layout.key != 0 or layout.columns < 2 or layout.rounded_keys or layout.quoted_words:
            return None
        packed = first_cells(block, layout.sep, layout.columns)
        with suppress(UnicodeDecodeError):
            return None if packed is None or not packed[0].decode() else packed
        return None

    def _words_in(self, block: bytes, lines: Lines) -> Iterator[str]:
        at = self.layout.key or 0
        for number, cells in self._checked(block, lines):
            word = cells[at]
            try:
                word.encode()
            except UnicodeEncodeError as error:
                if self._errors != "strict":
                    yield word.encode(errors="surrogateescape").decode(errors=self._errors)
                    continue
                byte = ord(error.object[error.start]) & 0xFF  # a surrogate for the byte
                raise _no_utf8(self.path, number, byte) from None
            if self.layout.rounded_keys:
                word = _POINT_ZERO.sub(r"\1", word)
            yield unquoted(word) if self.layout.quoted_words else word


def _no_utf8(path: Path, line: int, byte: int) -> FormatError:
    return FormatError(
        f"{path}: line {line}: byte 0x{byte:02x} is not UTF-8; if the file is in Latin-1, "
        "convert it: iconv -f latin1 -t utf-8; if words are cut within a character, say --errors "
        "replace (errors='replace')"
    )


def _ends_in_number(word: str) -> bool:
    """Whether a word with blanks ends in a number, so that the row has one too many."""
    _, blank, last = word.replace("\t", " ").rpartition(" ")
    return bool(blank) and is_number(last)


def _has_lone_returns(block: bytes) -> bool:
    return b"\r" in block and block.count(b"\r") != block.count(b"\r\n")


class Csv(MatrixFormat):
    """Cells between commas, which may be quoted."""

    suffixes = (".csv",)
    keys = "always"
    block_bytes = 1 << 20
    is_text = True
    names_key = True
    elements = "text"
    sep: ClassVar[str] = ","
    unfit: ClassVar[str] = r"\0"
    """Characters that no key may have; readers take text with NUL for UTF-16."""

    def matrix(self, file: InputFile, wanted: Wanted) -> Source:
        """Decide from a sample what the lines are; without counts, the rows are counted first."""
        path = file.path
        with parsing(path, "packed file", *UNPACKING_ERRORS):
            sample = _FirstLines(file, wanted.text)
        if _SAYS_SEP.match(sample.text) and not wanted.text.skip_lines:
            raise FormatError(
                f"{path}: line 1 tells a spreadsheet what is between cells; leave it out with "
                "--skip-lines 1 (skip_lines=1)"
            )
        try:
            layout = self._layout(sample, path, wanted.text)
        except AmbiguousFileError as error:
            raise self._with_readings(error, file, wanted.text) from None
        rows = None if layout.counts is None else layout.counts[0]
        if rows is not None and not is_packed(path):
            _check_size(file, sample, rows, len(layout.values))
        source = _TextSource(file, layout, wanted, rows, layout.described(self.sep))
        sampled, _ = sample.table(layout.sep, bare=len(wanted.text.vector) == 1)
        if source.dtype == "float32" and needs_float64(sampled, layout):
            source.notes += (
                "numbers have more digits than float32 keeps; --dtype float64 keeps them",
            )
        return source

    def _layout(self, sample: _FirstLines, path: Path, options: TextOptions) -> Layout:
        table = partial(sample.table, bare=len(options.vector) == 1)
        return decide(path, table, self.sep, self.suffixes[0], options, sample.whole)

    def _with_readings(
        self, error: AmbiguousFileError, file: InputFile, options: TextOptions
    ) -> AmbiguousFileError:
        """Return the error with the first rows as each way to decide reads them."""

        def read(chosen: TextOptions) -> str:
            sample = _FirstLines(file, chosen)
            layout = self._layout(sample, file.path, chosen)
            return layout.rows(sample.table(layout.sep, bare=len(chosen.vector) == 1)[0])

        return with_readings(error, read, options)

    @contextmanager
    def write(self, path: Path, content: Content) -> Iterator[Write]:
        """Write lines, after names if wanted; raises InvalidInputError for unfit keys."""
        if content.keys is not None:
            content.keys.reject(
                re.compile(rf"(?s)[{self.unfit}]|{_TOO_LONG}"),
                f"holds NUL, a tab or a line end, or has over {MAX_WORD_CHARACTERS} characters; "
                "text cannot hold it: write .parquet or .safetensors instead",
            )
        sep = self.sep.encode()
        with path.open("xb") as file:
            if content.header:
                names = [content.key, *_numbered(content.field, content.dim)]
                file.write(sep.join(_quoted([each.encode() for each in names], sep)) + b"\n")

            def write(start: int, block: Array) -> None:
                quoted = _quoted(content.words(start, start + len(block)), sep)
                # All data frames read this spelling of NaN, and only some read others.
                file.write(format_rows(quoted, block, sep, nan=b"NaN"))

            yield write


class Tsv(Csv):
    """Cells between tabs, which may be quoted."""

    suffixes = (".tsv",)
    sep = "\t"
    unfit = r"\0\t\r\n"


class Word2VecText(Csv):
    """Words and numbers between blanks, after counts or without them."""

    suffixes = (".vec",)
    names_key = False
    sep = BLANKS

    @contextmanager
    def write(self, path: Path, content: Content) -> Iterator[Write]:
        """Write lines, after counts if wanted; raises InvalidInputError for unfit keys."""
        reject_unfit_words(content, nul=False)
        with path.open("xb") as file:
            if content.header:
                file.write(b"%d %d\n" % (content.rows, content.dim))

            def write(start: int, block: Array) -> None:
                words = content.words(start, start + len(block))
                file.write(format_rows(words, block, b" "))

            yield write


class Text(Word2VecText):
    """The same format under the suffix of GloVe, or only keys, one per line."""

    suffixes = (".txt",)

    def keys_in(self, file: InputFile) -> Keys:
        """Return keys, one a line; if all are whole numbers they are int64."""
        with parsing(file.path, "packed file", *UNPACKING_ERRORS):
            words = take_words(_key_lines(file), file.allowance)
            numbers = as_integers(words, file.allowance)
            return words if numbers is None else numbers


def _key_lines(file: InputFile) -> Iterator[str]:
    stream = text_stream(file)
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


def _check_size(file: InputFile, sample: _FirstLines, rows: int, dim: int) -> None:
    """Raise FormatError if the file is too short for its counts."""
    shortest = rows * (len("w 0\n") + (dim - 1) * len(" 0")) - 1
    if file.size - len(sample.text.lstrip().partition(b"\n")[0]) - 1 < shortest:
        raise FormatError(
            f"{file.path}: {file.size} bytes cannot hold {rows} rows of {dim} numbers"
        )


def _numbered(name: str, count: int) -> list[str]:
    """Return a name for each number of a row: that with {} in it replaced, or `name`_0, …."""
    pattern = name if "{}" in name else f"{name}_{{}}"
    return [pattern.replace("{}", str(at)) for at in range(count)]


def _quoted(words: list[bytes], sep: bytes) -> list[bytes]:
    """Return keys as cells of a table, in quotes where they need them."""
    special = re.compile(b'["\r\n' + re.escape(sep) + b"]")
    if not special.search(b"".join(words)):
        return words
    return [
        b'"' + word.replace(b'"', b'""') + b'"' if special.search(word) else word for word in words
    ]


def format_rows(
    words: Sequence[bytes] | None, block: Array, separator: bytes, *, nan: bytes = b"nan"
) -> bytes:
    """Return lines of a word, if any, and the numbers of its row, in decimal and exact.

    Nine significant digits distinguish all float32 values, seventeen all float64 values; pyarrow
    writes fewer where they do.
    """
    renamed = nan != b"nan" and bool(np.isnan(block).any())
    apart = words is not None and (renamed or b'"' in b"".join(words))
    text = lines_of(() if apart else words or (), block, separator)
    if text is not None and not (apart or renamed):
        return text
    if text is None:
        number = b"%.17g" if block.dtype.itemsize == 8 else b"%.9g"
        line = separator.join([number] * block.shape[1]) + b"\n"
        text = b"".join([line % tuple(row) for row in block.tolist()])
    if renamed:
        text = text.replace(b"nan", nan)
    if words is None:
        return text
    pairs = zip(words, text.splitlines(keepends=True), strict=True)
    return b"".join([part for word, line in pairs for part in (word, separator, line)])


def reject_unfit_words(content: Content, *, nul: bool = True) -> None:
    """Raise InvalidInputError if a key is empty, very long or contains white space.

    The same for one with NUL, unless the format can hold it: `nul`.
    """
    if content.keys is not None:
        content.keys.reject(
            re.compile(rf"(?s)\A\Z|[\s{'' if nul else chr(0)}]|{_TOO_LONG}"),
            f"is empty, contains white space{'' if nul else ' or NUL'} or has over "
            f"{MAX_WORD_CHARACTERS} characters; word2vec files cannot hold it: write .parquet or "
            ".safetensors instead",
        )
