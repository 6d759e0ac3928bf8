"""Keys of rows in files, integers or strings.

Formats store keys differently; this module has the representations that several share. Keys are not
checked for uniqueness.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tierstore._keys.given import given, integer_type, least
from tierstore._keys.strings import Strings
from tierstore._keys.text import Texts
from tierstore.budget import Allowance
from tierstore.errors import FormatError, InvalidInputError, InvalidTypeError, counted

Integers = npt.NDArray[np.int64] | npt.NDArray[np.uint64]
"""Integer keys: int64, or uint64 where one of them needs that."""

Keys = Integers | Sequence[str]
"""The key of each row: a 1-D array of integers, or strings."""

KeyArrays = list[tuple[str, np.dtype[Any], int, Iterator[npt.NDArray[Any]]]]
"""Arrays by name, type and length, with their elements in blocks."""

KEYS, OFFSETS = "keys", "keys_offsets"
"""Names of arrays of keys: whole numbers, or the bytes of texts and where each begins."""

_Block = TypeVar("_Block")

_BLOCK = 1 << 16
_OFFSET_BYTES = 8
_WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,19}")


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

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The type of all integers, int64, or uint64 if one needs that; only if `integers`.

        A part of an array keeps the type of the whole, so that all parts have one. Raises
        InvalidInputError if neither type holds all of them.
        """
        first = self._keys[:1]
        if isinstance(first, np.ndarray) and first.dtype.kind in "iu":
            return np.dtype(np.int64 if np.can_cast(first.dtype, np.int64) else np.uint64)
        lowest = highest = 0
        for block in self._blocks(self._taken):
            lowest = min(lowest, int(block.min()))
            highest = max(highest, int(block.max()))
        return integer_type(lowest, highest)

    def _blocks(self, take: Callable[[int, int], _Block]) -> Iterator[_Block]:
        for start in range(0, len(self), _BLOCK):
            yield take(start, min(start + _BLOCK, len(self)))

    def _taken(self, start: int, stop: int) -> Integers:
        """Return integers of the type that this block needs."""
        taken = self._keys[start:stop]
        block = given(taken) if len(taken) else np.empty(0, np.int64)
        if isinstance(block, Texts):
            raise InvalidTypeError("keys must be all integers or all strings; these are mixed")
        return block

    def block(self, start: int, stop: int) -> Integers | list[str]:
        """Return keys start..stop-1, integers or strings."""
        take = self.integer_block if self.integers else self.string_block
        return take(start, stop)

    def integer_block(self, start: int, stop: int) -> Integers:
        """Return keys start..stop-1 as `dtype`; only if `integers` is true."""
        return self._taken(start, stop).astype(self.dtype, copy=False)

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

    def blocks(self) -> Iterator[Integers | list[str]]:
        """Yield all keys, integers or strings, in blocks."""
        return self._blocks(self.block)

    def bytes_blocks(self) -> Iterator[list[bytes]]:
        """Yield all keys in UTF-8, in blocks."""
        return self._blocks(self.bytes_block)

    def arrays(self) -> KeyArrays:
        """Return the arrays that hold the keys: name, type, length and, in blocks, the elements.

        Strings are the offset of each in their joined UTF-8, and the end, then these bytes.
        """
        if self.integers:
            return [(KEYS, self.dtype, len(self), self._blocks(self.integer_block))]
        nbytes = sum(len(key) for block in self.bytes_blocks() for key in block)
        blobs = (np.frombuffer(b"".join(block), np.uint8) for block in self.bytes_blocks())
        return [
            (OFFSETS, np.dtype(np.int64), len(self) + 1, self._offsets()),
            (KEYS, np.dtype(np.uint8), nbytes, blobs),
        ]

    def _offsets(self) -> Iterator[npt.NDArray[np.int64]]:
        end = 0
        yield np.zeros(1, np.int64)
        for block in self.bytes_blocks():
            ends = end + np.cumsum([len(key) for key in block], dtype=np.int64)
            end = int(ends[-1])
            yield ends

    def reject(self, unfit: re.Pattern[str], why: str) -> None:
        """Raise InvalidInputError for the first string in which `unfit` is found, saying `why`."""
        if self.integers:
            return
        for row, key in enumerate(chain.from_iterable(self._blocks(self.string_block))):
            if unfit.search(key):
                raise InvalidInputError(f"key {key!r:.100} of row {row} {why}")


def typed(keys: Any) -> Any:
    """Return integers as an array of the type that all of them need, other keys as they are.

    Raises InvalidTypeError if only the first is an integer, InvalidInputError if no type holds all.
    """
    return given(keys) if len(keys) and _is_integer(keys[0]) else keys


def _is_integer(key: object) -> bool:
    if isinstance(key, str):
        return False
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        return True
    raise InvalidTypeError(f"keys must be integers or strings, not {type(key).__name__}")


def as_integers(words: Sequence[str], allowance: Allowance) -> Integers | None:
    """Return words as integers if all are plain decimals that one type holds, else None."""
    if not all(_WHOLE_NUMBER.fullmatch(word) for word in words):
        return None
    allowance.check(8 * len(words), f"{len(words)} keys")
    with contextlib.suppress(OverflowError):
        return np.fromiter(map(int, words), np.int64, len(words))
    with contextlib.suppress(OverflowError):
        return np.fromiter(map(int, words), np.uint64, len(words))
    return None


def without_row_numbers(words: Sequence[str], allowance: Allowance) -> Keys | None:
    """Return the keys that the words of a text file represent.

    Such a file has a word in every row. Words that merely number the rows, 0, 1, 2, …, are not
    keys: None is returned. Words that are all integers are integer keys.
    """
    numbers = as_integers(words, allowance)
    if numbers is None:
        return words
    return None if np.array_equal(numbers, np.arange(len(numbers))) else numbers


def take_words(words: Iterable[str], allowance: Allowance, taken: Strings | None = None) -> Strings:
    """Append words to `taken` or new ones, in little memory, within the allowance.

    Raises UnicodeEncodeError.
    """
    taken = Strings() if taken is None else taken
    for word in words:
        allowance.take(_OFFSET_BYTES + 4 * len(word), "its keys")
        taken.append(word)
    return taken


def integers_of(
    blocks: Iterable[npt.NDArray[Any]], count: int, dtype: np.dtype[Any], allowance: Allowance
) -> Integers:
    """Return `count` integers, stored as `dtype`, as int64, or as uint64 if one needs that."""
    allowance.take(8 * count, f"{count} keys")
    keys, filled = np.empty(count, np.uint64 if dtype.kind == "u" else np.int64), 0
    for block in blocks:
        stop = filled + len(block)
        keys[filled:stop] = block
        filled = stop
    return least(keys)


def widened(integers: npt.NDArray[Any], allowance: Allowance) -> Integers:
    """Return integers of any width as int64, or as uint64 if one needs that, maybe not copied."""
    if integers.itemsize < 8:
        allowance.take(8 * len(integers), f"{len(integers)} keys")
    return least(integers)


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
