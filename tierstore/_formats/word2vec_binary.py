""".bin: the binary form of word2vec: two counts, then each word, a space and its float32s."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._formats.base import Array, Content, Format, Source, Wanted, Write
from tierstore._formats.files import InputFile, open_input, unless_it_fails
from tierstore._formats.records import MAX_WORD_CHARACTERS, RecordSource, decode_word
from tierstore._formats.word2vec_text import reject_unfit_words
from tierstore.errors import FormatError

__all__ = ["FORMAT"]

MAX_WORD_BYTES = 4 * MAX_WORD_CHARACTERS + 2

_COUNTS = re.compile(rb"(\d{1,15}) (\d{1,9})[ \r]*\n")
_FASTTEXT_MAGIC = b"\xba\x16O/"
_READ_BYTES = 1 << 20


class _BinSource(RecordSource):
    def __init__(self, file: InputFile, rows: int, dim: int, *, offset: int) -> None:
        super().__init__(file, rows, dim, "float32")
        self._offset = offset

    def _vectors(self) -> Iterator[npt.NDArray[Any]]:
        for _, vector in self._records():
            yield np.frombuffer(vector, "<f4")

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
            # The original tool ends each row with a newline, others do not.
            word = data[at:space].removeprefix(b"\n")
            if space < 0 or not word or stop > len(data):
                raise FormatError(f"{self.path}: row {row} of {self.rows} is truncated or no word")
            yield word, data[space + 1 : stop]
            at = stop
        if (data[at:] + stream.read(2))[:2] not in (b"", b"\n"):
            raise FormatError(f"{self.path}: something follows the {self.rows} rows")


def _open(path: Path, wanted: Wanted) -> Source:
    with unless_it_fails(open_input(path, wanted.memory)) as file:
        first = file.stream().readline(64)
        if first.startswith(_FASTTEXT_MAGIC):
            raise FormatError(f"{path}: a fastText model, not word2vec vectors; read its .vec file")
        counts = _COUNTS.fullmatch(first)
        if counts is None:
            raise FormatError(f"{path}: the first line is not two counts, as in word2vec files")
        rows, dim = int(counts[1]), int(counts[2])
        if file.size - len(first) < rows * (len(b"w ") + 4 * dim):
            raise FormatError(
                f"{path}: truncated: {file.size} bytes cannot hold {rows} rows of {dim} float32"
            )
        return _BinSource(file, rows, dim, offset=len(first))


@contextmanager
def _write(path: Path, content: Content) -> Iterator[Write]:
    reject_unfit_words(content)
    with path.open("xb") as file:
        file.write(b"%d %d\n" % (content.rows, content.dim))

        def write(start: int, block: Array) -> None:
            words = content.words(start, start + len(block))
            data, size = block.tobytes(), 4 * content.dim
            for row, word in enumerate(words):
                file.write(b"%b %b\n" % (word, data[row * size : (row + 1) * size]))

        yield write


FORMAT = Format((".bin",), _open, _write, ("float32",), keys="always")
