""".bin: the binary form of word2vec. Two counts, then each word, a blank and its float32s."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np

from tierstore._formats.base import (
    Array,
    Content,
    FileSource,
    MatrixFormat,
    Source,
    Wanted,
    Write,
)
from tierstore._formats.delimited import MAX_WORD_CHARACTERS, reject_unfit_words
from tierstore._formats.files import InputFile
from tierstore._formats.keys import Keys, take_words, without_row_numbers
from tierstore._formats.raw import is_shape, open_raw
from tierstore.errors import FormatError

MAX_WORD_BYTES = 4 * MAX_WORD_CHARACTERS + 2

_BINARY_COUNTS = re.compile(rb"(\d{1,15}) (\d{1,9})[ \r]*\n")
_CONTROL = re.compile(rb"[\0-\x1f\x7f]")
_FASTTEXT_MAGIC = b"\xba\x16O/"
_READ_BYTES = 1 << 20
_ELEMENT = np.dtype("<f4")


class _BinSource(FileSource):
    def __init__(self, file: InputFile, rows: int, dim: int, *, offset: int, errors: str) -> None:
        super().__init__(file, rows, dim, _ELEMENT.name)
        self._errors = errors
        self._offset = offset

    def _blocks(self, block_rows: int) -> Iterator[Array]:
        vectors = (np.frombuffer(vector, _ELEMENT) for _, vector in self._records())
        while held := list(islice(vectors, block_rows)):
            yield np.stack(held)

    @cached_property
    def keys(self) -> Keys | None:
        """The words, unless they merely number the rows; integers become int64."""
        words = (word for word, _ in self._records())
        allowance = self._file.allowance
        keys = without_row_numbers(take_words(words, allowance), allowance)
        if keys is None:
            self.numbering = "the word of each row"
        return keys

    def _records(self) -> Iterator[tuple[str, bytes]]:
        """Yield each word and the bytes of its numbers; nothing may follow the last.

        A word that holds a blank seems to end there, so that numbers are taken from the wrong
        bytes. What follows is then no word, or not as far from the line ends as in other rows.
        """
        stream = self._file.stream()
        stream.seek(self._offset)
        nbytes, ends_lines, before = 4 * self.dim, False, ""
        data, at = b"", 0
        for row in range(self.rows):
            if len(data) - at <= MAX_WORD_BYTES + nbytes:
                data, at = data[at:] + stream.read(_READ_BYTES + nbytes), 0
            space = data.find(b" ", at, at + MAX_WORD_BYTES)
            stop = space + 1 + nbytes
            # The original tool ends each row with a newline, other tools do not.
            ended = data[at : at + 1] == b"\n"
            if row == 1:
                ends_lines = ended
            first = data[at:space].removeprefix(b"\n")
            odd = not ends_lines and _CONTROL.search(first) is not None
            word = _decoded(first, self._errors)
            if word is None and not row:
                raise FormatError(
                    f"{self.path}: the word of row 0 is not UTF-8; if words are cut within a "
                    "character, say --errors replace (errors='replace')"
                )
            if word is None or (row and (odd or ended != ends_lines)):
                raise FormatError(
                    f"{self.path}: row {row} does not begin with a word in UTF-8; does that of row "
                    f"{row - 1}, {before!r:.100}, hold a blank, at which it seems to end? If words "
                    "are cut within a character, say --errors replace (errors='replace')"
                )
            if space < 0 or not word or stop > len(data):
                raise FormatError(f"{self.path}: row {row} of {self.rows} is truncated or no word")
            yield word, data[space + 1 : stop]
            at, before = stop, word
        if (data[at:] + stream.read(2))[:2] not in (b"", b"\n"):
            raise FormatError(f"{self.path}: extra bytes follow the {self.rows} rows")


def _decoded(word: bytes, errors: str) -> str | None:
    """Return a word, or None for what is no UTF-8."""
    try:
        return word.decode(errors=errors)
    except UnicodeDecodeError:
        return None


class Word2VecBinary(MatrixFormat):
    """Words and float32 values in binary."""

    suffixes = (".bin",)
    has_words = True
    keys = "always"
    elements = "float32"

    def open(self, path: Path, wanted: Wanted) -> Source:
        """Open the words, or the bytes of a matrix whose type and shape the name says."""
        return open_raw(path, wanted) if is_shape(wanted.name) else super().open(path, wanted)

    def matrix(self, file: InputFile, wanted: Wanted) -> Source:
        """Check the counts of a file against its size."""
        path, first = file.path, file.stream().readline(64)
        if first.startswith(_FASTTEXT_MAGIC):
            raise FormatError(f"{path}: a fastText model, not word2vec vectors; read its .vec file")
        counts = _BINARY_COUNTS.fullmatch(first)
        if counts is None:
            raise FormatError(
                f"{path}: the first line is not two counts, as in word2vec files; bytes of a "
                f"matrix alone are read as {path.name}:float32:256"
            )
        rows, dim = int(counts[1]), int(counts[2])
        if file.size - len(first) < rows * (len(b"w ") + 4 * dim):
            raise FormatError(
                f"{path}: truncated: {file.size} bytes cannot hold {rows} rows of {dim} float32"
            )
        return _BinSource(file, rows, dim, offset=len(first), errors=wanted.text.errors)

    @contextmanager
    def write(self, path: Path, content: Content) -> Iterator[Write]:
        """Write counts, then each word and its row; raises InvalidInputError for invalid words."""
        reject_unfit_words(content)
        with path.open("xb") as file:
            file.write(b"%d %d\n" % (content.rows, content.dim))

            def write(start: int, block: Array) -> None:
                words = content.words(start, start + len(block))
                data, size = block.tobytes(), 4 * content.dim
                for row, word in enumerate(words):
                    file.write(b"%b %b\n" % (word, data[row * size : (row + 1) * size]))

            yield write
