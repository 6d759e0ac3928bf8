"""Keys: what stands beside the rows in a file, whole numbers or strings.

Formats differ in how they hold keys; here are the forms several of them share. Whether keys are
unique is not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.errors import FormatError, InvalidInputError, InvalidTypeError

__all__ = [
    "KeyColumn",
    "Keys",
    "as_integers",
    "blob_to_strings",
    "strings_of",
    "without_row_numbers",
]

Keys = npt.NDArray[np.int64] | Sequence[str]
"""The key of each row: a 1-D int64 array, or strings."""

_BLOCK = 1 << 16
_WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,18}")


class KeyColumn:
    """Keys to be written, one for each row, whatever sequence holds them.

    Of the sequence only the length, the first item and slices are used, so it may lie on disk.
    """

    def __init__(self, keys: Any, rows: int) -> None:
        """Take `rows` keys: integers (an array, a range, a list) or strings."""
        if len(keys) != rows:
            raise InvalidInputError(f"{len(keys)} keys for {rows} rows; each row needs one")
        self._keys = keys
        self.integers = rows == 0 or _is_integer(keys[0])

    def __len__(self) -> int:
        return len(self._keys)

    def block(self, start: int, stop: int) -> npt.NDArray[np.int64] | list[str]:
        """Return keys start..stop-1, int64 or strings."""
        take = self.integer_block if self.integers else self.string_block
        return take(start, stop)

    def integer_block(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return keys start..stop-1 as int64; only where `integers` is true."""
        block = np.asarray(self._keys[start:stop])
        if block.size and block.dtype.kind not in "iu":
            raise InvalidTypeError("keys are all integers or all strings; these are mixed")
        if block.dtype.kind == "u" and block.size and int(block.max()) >= 2**63:
            raise InvalidInputError(f"keys are int64; {int(block.max())} is too large")
        return block.astype(np.int64)

    def string_block(self, start: int, stop: int) -> list[str]:
        """Return keys start..stop-1 as strings, integers in decimal."""
        if self.integers:
            return [str(key) for key in self.integer_block(start, stop).tolist()]
        block = [str(key) if isinstance(key, str) else key for key in self._keys[start:stop]]
        for key in block:
            if not isinstance(key, str):
                raise InvalidTypeError(f"keys are all integers or all strings, not {key!r}")
        try:
            "".join(block).encode()
        except UnicodeEncodeError as error:
            raise InvalidInputError(f"a key has no UTF-8 form: {error}") from None
        return block

    def bytes_block(self, start: int, stop: int) -> list[bytes]:
        """Return keys start..stop-1 in UTF-8, integers in decimal."""
        return [key.encode() for key in self.string_block(start, stop)]

    def string_blocks(self) -> Iterator[list[str]]:
        """Yield all keys as strings, in blocks."""
        for start in range(0, len(self), _BLOCK):
            yield self.string_block(start, min(start + _BLOCK, len(self)))

    def integer_blocks(self) -> Iterator[npt.NDArray[np.int64]]:
        """Yield all keys as int64, in blocks."""
        for start in range(0, len(self), _BLOCK):
            yield self.integer_block(start, min(start + _BLOCK, len(self)))

    def bytes_blocks(self) -> Iterator[list[bytes]]:
        """Yield all keys in UTF-8, in blocks."""
        for start in range(0, len(self), _BLOCK):
            yield self.bytes_block(start, min(start + _BLOCK, len(self)))

    def offset_blocks(self) -> Iterator[npt.NDArray[np.int64]]:
        """Yield, in blocks, where each key starts in the UTF-8 of all, and last where they end."""
        end = 0
        yield np.zeros(1, np.int64)
        for block in self.bytes_blocks():
            ends = end + np.cumsum([len(key) for key in block], dtype=np.int64)
            end = int(ends[-1])
            yield ends

    def reject(self, unfit: Callable[[str], bool], why: str) -> None:
        """Raise InvalidInputError for the first string that is `unfit`, saying `why`."""
        if self.integers:
            return
        for row, key in enumerate(chain.from_iterable(self.string_blocks())):
            if unfit(key):
                raise InvalidInputError(f"key {key!r:.100} of row {row} {why}")


def _is_integer(key: object) -> bool:
    if isinstance(key, str):
        return False
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        return True
    raise InvalidTypeError(f"keys are integers or strings, not {type(key).__name__}")


def as_integers(words: Sequence[str]) -> npt.NDArray[np.int64] | None:
    """Return words as int64 if each is a whole number in plain decimal, else None."""
    if not all(_WHOLE_NUMBER.fullmatch(word) for word in words):
        return None
    try:
        return np.array([int(word) for word in words], np.int64)
    except OverflowError:
        return None


def without_row_numbers(words: Sequence[str]) -> Keys | None:
    """Return the keys that the words of a text file stand for.

    Such a file has a word in each row, always. Words that only count the rows, 0, 1, 2, …, are no
    keys: None. Words that are all whole numbers are int64 keys.
    """
    numbers = as_integers(words)
    if numbers is None:
        return words
    return None if np.array_equal(numbers, np.arange(len(numbers))) else numbers


def strings_of(path: Path, values: npt.NDArray[np.str_]) -> list[str]:
    """Return an array of fixed-width strings as a list; raises FormatError if any is no text."""
    try:
        strings: list[str] = values.tolist()
        for key in strings:
            key.encode()
    except (ValueError, SystemError):
        raise FormatError(f"{path}: a key holds code points that are no characters") from None
    return strings


def blob_to_strings(path: Path, blob: bytes, offsets: npt.NDArray[np.int64]) -> list[str]:
    """Cut the UTF-8 `blob` of all keys at `offsets` `(rows + 1,)`; raises FormatError."""
    bounds = offsets.tolist()
    ascending = all(lo <= hi for lo, hi in pairwise(bounds))
    if bounds[0] != 0 or bounds[-1] != len(blob) or not ascending:
        raise FormatError(f"{path}: the offsets of its keys do not fit their {len(blob)} bytes")
    try:
        return [blob[lo:hi].decode() for lo, hi in pairwise(bounds)]
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: a key is not UTF-8: {error}") from None
