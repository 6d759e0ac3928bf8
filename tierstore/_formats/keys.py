"""Keys of rows in files, integers or strings.

Formats store keys differently; this module has the representations that several share. Keys are not
checked for uniqueness.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._keys.strings import Strings
from tierstore.budget import Allowance
from tierstore.errors import FormatError, InvalidInputError, InvalidTypeError, counted

__all__ = [
    "KeyColumn",
    "Keys",
    "as_integers",
    "blob_to_strings",
    "integers_of",
    "strings_of",
    "take_words",
    "without_row_numbers",
]

Keys = npt.NDArray[np.int64] | Sequence[str]
"""The key of each row: a 1-D int64 array, or strings."""

_BLOCK = 1 << 16
_OFFSET_BYTES = 8
_WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,18}")


class KeyColumn:
    """The keys to write, one per row, from any sequence.

    Only the length, the first item and slices of the sequence are used, so it may be on disk.
    """

    def __init__(self, keys: Any, rows: int) -> None:
        """Use `rows` keys: integers (an array, a range, a list) or strings."""
        if len(keys) != rows:
            raise InvalidInputError(
                f"{counted(len(keys), 'key')} for {counted(rows, 'row')}; give one key per row"
            )
        self._keys = keys
        self.integers = rows == 0 or _is_integer(keys[0])

    def __len__(self) -> int:
        return len(self._keys)

    def block(self, start: int, stop: int) -> npt.NDArray[np.int64] | list[str]:
        """Return keys start..stop-1, int64 or strings."""
        take = self.integer_block if self.integers else self.string_block
        return take(start, stop)

    def integer_block(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return keys start..stop-1 as int64; only if `integers` is true."""
        block = np.asarray(self._keys[start:stop])
        if block.size and block.dtype.kind not in "iu":
            raise InvalidTypeError("keys must be all integers or all strings; these are mixed")
        if block.dtype.kind == "u" and block.size and int(block.max()) >= 2**63:
            raise InvalidInputError(f"keys must fit into int64; {int(block.max())} is too large")
        return block.astype(np.int64)

    def string_block(self, start: int, stop: int) -> list[str]:
        """Return keys start..stop-1 as strings, integers in decimal."""
        if self.integers:
            return [str(key) for key in self.integer_block(start, stop).tolist()]
        block = [str(key) if isinstance(key, str) else key for key in self._keys[start:stop]]
        for key in block:
            if not isinstance(key, str):
                raise InvalidTypeError(f"keys must be all integers or all strings, not {key!r}")
        try:
            "".join(block).encode()
        except UnicodeEncodeError as error:
            raise InvalidInputError(f"a key cannot be encoded in UTF-8: {error}") from None
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
        """Yield, in blocks, the offset of each key in the joined UTF-8, and finally the end."""
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
    raise InvalidTypeError(f"keys must be integers or strings, not {type(key).__name__}")


def as_integers(words: Sequence[str], allowance: Allowance) -> npt.NDArray[np.int64] | None:
    """Return words as int64 if all are plain decimal integers, else None."""
    if not all(_WHOLE_NUMBER.fullmatch(word) for word in words):
        return None
    allowance.check(8 * len(words), f"{len(words)} keys")
    try:
        return np.fromiter(map(int, words), np.int64, len(words))
    except OverflowError:
        return None


def without_row_numbers(words: Sequence[str], allowance: Allowance) -> Keys | None:
    """Return the keys that the words of a text file represent.

    Such a file has a word in every row. Words that merely number the rows, 0, 1, 2, …, are not
    keys: None is returned. Words that are all integers are int64 keys.
    """
    numbers = as_integers(words, allowance)
    if numbers is None:
        return words
    return None if np.array_equal(numbers, np.arange(len(numbers))) else numbers


def take_words(words: Iterable[str], allowance: Allowance) -> Strings:
    """Return words in little memory, within the allowance; raises UnicodeEncodeError."""
    taken = Strings()
    for word in words:
        allowance.take(_OFFSET_BYTES + 4 * len(word), "its keys")
        taken.append(word)
    return taken


def integers_of(
    blocks: Iterable[npt.NDArray[Any]], count: int, allowance: Allowance
) -> npt.NDArray[np.int64]:
    """Return `count` integers of any width as int64; raises InvalidInputError for larger ones."""
    allowance.take(8 * count, f"{count} keys")
    keys, filled = np.empty(count, np.int64), 0
    for block in blocks:
        stop = filled + len(block)
        keys[filled:stop] = KeyColumn(block, len(block)).integer_block(0, len(block))
        filled = stop
    return keys


def strings_of(path: Path, blocks: Iterable[npt.NDArray[np.str_]], allowance: Allowance) -> Strings:
    """Return blocks of fixed-width strings; raises FormatError for invalid text.

    Padding is removed block by block.
    """

    def words() -> Iterator[str]:
        for block in blocks:
            allowance.check(block.nbytes, "a block of its keys")
            yield from block.tolist()

    try:
        return take_words(words(), allowance)
    except (ValueError, SystemError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{path}: a key contains code points that are not characters") from None


def blob_to_strings(
    path: Path,
    blob: bytes,
    offsets: npt.NDArray[np.int64],
    allowance: Allowance,
    strings: Strings | None = None,
) -> Strings:
    """Append the strings between `offsets` `(rows + 1,)` of UTF-8 to `strings` or new ones.

    Raises FormatError.
    """
    ascending = bool((offsets[1:] >= offsets[:-1]).all())
    if offsets[0] != 0 or offsets[-1] != len(blob) or not ascending:
        raise FormatError(f"{path}: the offsets of its keys do not match their {len(blob)} bytes")
    allowance.take(len(blob) + _OFFSET_BYTES * len(offsets), "its keys")
    strings = Strings() if strings is None else strings
    try:
        strings.extend_packed(blob, offsets)
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: a key is not UTF-8: {error}") from None
    return strings
