"""Files in which each row is a word and its numbers, found only by reading one after another."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tierstore._dtypes import ELEMENT_TYPES
from tierstore._formats.base import Array, Source
from tierstore._formats.files import InputFile
from tierstore._formats.keys import Keys, take_words, without_row_numbers
from tierstore.errors import FormatError

__all__ = [
    "CELL_BYTES",
    "MAX_WORD_CHARACTERS",
    "RecordSource",
    "decode_word",
    "format_rows",
    "parse_numbers",
]

MAX_WORD_CHARACTERS = 1 << 14
"""The longest word that is written, well within what is read."""

CELL_BYTES = 128
"""What a number in a line takes until it is in a block: twice as text, and as a float."""


class RecordSource(Source):
    """A file of words and numbers, read from the start for each pass over its rows."""

    def __init__(self, file: InputFile, rows: int, dim: int, dtype: str) -> None:
        """Read `file`, which the source closes."""
        super().__init__(file.path, rows, dim, dtype)
        self._file = file

    @abstractmethod
    def _vectors(self) -> Iterator[Any]:
        """Yield the `dim` numbers of each row, as anything NumPy assigns to a row."""

    @abstractmethod
    def _words(self) -> Iterator[str] | None:
        """Yield the word of each row; None if rows have none."""

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
        """The words, unless they only count the rows; whole numbers are int64."""
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
    """Return the numbers that words spell, rounded to float64; raises FormatError."""
    try:
        return list(map(float, words))
    except ValueError as error:
        raise FormatError(f"{path}: row {row}: {error!s:.100}") from None


def decode_word(path: Path, row: int, word: bytes) -> str:
    """Return the text of a word in UTF-8; raises FormatError."""
    try:
        return word.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: the word of row {row} is not UTF-8: {error}") from None


def format_rows(words: Sequence[bytes], block: Array, separator: bytes) -> bytes:
    """Return lines of a word and the numbers of its row, in decimal and exact.

    Nine significant digits tell all float32 apart, seventeen all float64.
    """
    number = separator + (b"%.17g" if block.dtype.itemsize == 8 else b"%.9g")
    line = b"%b" + number * block.shape[1] + b"\n"
    pairs = zip(words, block.tolist(), strict=True)
    return b"".join([line % (word, *numbers) for word, numbers in pairs])
