""".vec, .txt: the text form of word2vec, fastText and GloVe; a word and its numbers on each line.

word2vec and fastText put the numbers of rows and of dimensions on the first line, GloVe does not;
both are read, the former is written. The text does not name an element type.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tierstore._formats.base import Array, Content, Format, Source, Wanted, Write
from tierstore._formats.files import InputFile, open_input, unless_it_fails
from tierstore._formats.records import (
    CELL_BYTES,
    MAX_WORD_CHARACTERS,
    RecordSource,
    decode_word,
    format_rows,
    parse_numbers,
)
from tierstore.errors import FormatError
from tierstore.spec import MAX_RECORD_BYTES

__all__ = ["FORMAT", "reject_unfit_words"]

MAX_LINE_BYTES = 64 << 20

_COUNTS = re.compile(rb"(\d{1,15}) (\d{1,9})")


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
        """Return the word and the last `dim` parts: a few words of GloVe hold spaces."""
        parts = line.rsplit(b" ", self.dim)
        if len(parts) != self.dim + 1 or not parts[0]:
            raise FormatError(f"{self.path}: row {row} is not a word and {self.dim} numbers")
        return parts


def _lines(file: InputFile, offset: int) -> Iterator[bytes]:
    """Yield lines from byte `offset`, without what ends them and without empty ones."""
    stream = file.stream()
    stream.seek(offset)
    while line := stream.readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES:
            raise FormatError(f"{file.path}: a line of {MAX_LINE_BYTES} bytes or more")
        file.allowance.check(CELL_BYTES * line.count(b" ") + 2 * len(line), "a line of numbers")
        if line := line.rstrip(b" \r\n"):
            yield line


def _open(path: Path, wanted: Wanted) -> Source:
    with unless_it_fails(open_input(path, wanted.memory)) as file:
        first = file.stream().readline(MAX_LINE_BYTES)
        counts = _COUNTS.fullmatch(first.rstrip(b" \r\n"))
        if counts is None:
            dim = first.rstrip(b" \r\n").count(b" ")
            if not 1 <= dim <= MAX_RECORD_BYTES // 4:
                raise FormatError(f"{path}: the first line is not a word and its numbers")
            rows = sum(1 for _ in _lines(file, 0))
            return _VecSource(file, rows, dim, wanted.text_dtype, offset=0)

        rows, dim = int(counts[1]), int(counts[2])
        shortest = rows * (len("w 0\n") + (dim - 1) * len(" 0")) - 1
        if file.size - len(first) < shortest:
            raise FormatError(f"{path}: {file.size} bytes cannot hold {rows} rows of {dim} numbers")
        return _VecSource(file, rows, dim, wanted.text_dtype, offset=len(first))


def reject_unfit_words(content: Content) -> None:
    """Raise InvalidInputError if a key is empty, very long or holds white space."""
    if content.keys is not None:
        content.keys.reject(
            lambda key: key.split() != [key] or len(key) > MAX_WORD_CHARACTERS,
            f"is empty, holds white space or has over {MAX_WORD_CHARACTERS} characters; "
            "word2vec files cannot hold it: write .parquet or .safetensors instead",
        )


@contextmanager
def _write(path: Path, content: Content) -> Iterator[Write]:
    reject_unfit_words(content)
    with path.open("xb") as file:
        file.write(b"%d %d\n" % (content.rows, content.dim))

        def write(start: int, block: Array) -> None:
            words = content.words(start, start + len(block))
            file.write(format_rows(words, block, b" "))

        yield write


FORMAT = Format(
    (".vec", ".txt"), _open, _write, ("float32", "float64"), keys="always", block_bytes=1 << 20
)
