""".jsonl: an object a line, with a list of numbers and perhaps a key; read only.

Interfaces of embedding models and vector databases produce such files. The vector is the list of
numbers that is named or the only one. The key is the text or whole number called `key`, or the only
one in the first object. Either all lines have a key or none has.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._dtypes import ELEMENT_TYPES
from tierstore._formats._encoding import UNPACKING_ERRORS, text_stream
from tierstore._formats.base import Array, Format, Source, Wanted, choose
from tierstore._formats.files import InputFile, open_input, parsing, unless_it_fails
from tierstore._formats.keys import Keys
from tierstore._keys.given import integer_type
from tierstore._keys.strings import Strings
from tierstore.budget import JSON_COST
from tierstore.errors import AmbiguousFileError, FormatError, InvalidInputError

__all__ = ["JsonLines"]

MAX_LINE_BYTES = 64 << 20
_KEY = "key"
_BITS = (1 << 64) - 1


class _JsonSource(Source):
    def __init__(self, file: InputFile, wanted: Wanted) -> None:
        """Choose vector and key by the first object, then count the objects."""
        self.path = file.path
        self._file = file
        first = next(self._objects(), None)
        if first is None:
            raise FormatError(f"{file.path}: empty")
        line, found = first
        described = {name: _described(value) for name, value in found.items()}
        vectors = {name: described[name] for name, value in found.items() if _is_vector(value)}
        self._vector = choose(file.path, wanted, vectors, described)
        vector: Any = found[self._vector]
        self._key = _chosen_key(file.path, line, found, self._vector, wanted.text.key_column)
        guessed_none = self._key is None and wanted.text.key_column is None
        super().__init__(
            file.path,
            sum(1 for _ in (self._without_keys() if guessed_none else self._objects())),
            len(vector),
            wanted.text_dtype,
        )
        keys = "no keys" if self._key is None else f'keys from "{self._key}"'
        self.read_as = f'{keys}, {self.dim} numbers from "{self._vector}"'

    def _objects(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the number of each line that is not empty, from 1, and its object."""
        stream = text_stream(self._file)
        most = max(1, min(MAX_LINE_BYTES, self._file.allowance.left // JSON_COST))
        number = 0
        with parsing(self.path, "packed file", *UNPACKING_ERRORS):
            while line := stream.readline(most):
                number += 1
                if len(line) == most:
                    raise FormatError(
                        f"{self.path}: line {number} has {most} bytes or more; if the file is to "
                        "be trusted, allow more (memory=, --memory)"
                    )
                if not line.strip():
                    continue
                try:
                    found = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise FormatError(
                        f"{self.path}: line {number} is no JSON: {error!s:.100}"
                    ) from None
                if not isinstance(found, dict):
                    raise FormatError(f"{self.path}: line {number} is no object")
                yield number, found

    def _without_keys(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the objects; raises FormatError for one with a key, as the first has none."""
        for line, each in self._objects():
            for name, value in each.items():
                if _is_key(value):
                    raise FormatError(
                        f"{self.path}: line {line} has {name!r}, {_described(value)}, which can be "
                        "the key, and the first line has no key: give each line one, or say "
                        "--key-column none (key_column=False)"
                    )
            yield line, each

    def _blocks(self, block_rows: int) -> Iterator[Array]:
        self.overflowed = 0
        element = ELEMENT_TYPES[self.dtype]
        objects = self._objects()
        for start in range(0, self.rows, block_rows):
            numbers = np.empty((min(block_rows, self.rows - start), self.dim))
            row = -1
            # One by one: objects need many times the memory of their numbers.
            for row, (line, found) in enumerate(islice(objects, len(numbers))):
                self._take(found, line, numbers[row])
            numbers = numbers[: row + 1]
            stored = element.encode(numbers)
            self.overflowed += element.overflowed(numbers, stored)
            yield stored

    def _take(self, found: dict[str, Any], line: int, into: npt.NDArray[np.float64]) -> None:
        """Copy the list of one object; raises FormatError for another."""
        vector: Any = found.get(self._vector)
        if not _is_vector(vector) or len(vector) != self.dim:
            raise FormatError(
                f"{self.path}: line {line}, {self._vector!r} is {_described(vector)}; need "
                f"{self.dim} numbers"
            )
        try:
            into[:] = vector
        except OverflowError:
            raise FormatError(
                f"{self.path}: line {line}, {self._vector!r} has a whole number too large"
            ) from None

    @cached_property
    def keys(self) -> Keys | None:
        """The value of the chosen name in each object, all texts or all whole numbers."""
        if self._key is None:
            return None
        texts = Strings()
        numbers = array("Q")  # of int64 the same bits
        lowest = highest = 0
        allowance = self._file.allowance
        for line, each in self._objects():
            key = each.get(self._key)
            if not _is_key(key) or (texts if isinstance(key, int) else numbers):
                others = "texts" if texts else "whole numbers" if numbers else "keys"
                raise FormatError(
                    f"{self.path}: line {line}, {self._key!r} is {_described(key)}, not of {others}"
                )
            if isinstance(key, int):
                allowance.take(2 * numbers.itemsize, "its keys")  # a growing array is copied
                lowest, highest = min(lowest, key), max(highest, key)
                numbers.append(key & _BITS)
            else:
                allowance.take(4 * len(str(key)) + 8, "its keys")
                try:
                    texts.append(str(key))
                except UnicodeEncodeError:
                    raise FormatError(
                        f"{self.path}: line {line}, {self._key!r} holds half a character"
                    ) from None
        try:
            return texts or np.frombuffer(numbers, integer_type(lowest, highest))
        except InvalidInputError as error:
            raise FormatError(f"{self.path}: {self._key!r}: {error}") from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_vector(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_number, value))


def _is_key(value: object) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)


def _described(value: object) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return {dict: "an object", str: "a text", type(None): "missing or null"}.get(
        type(value), "a number"
    )


def _chosen_key(
    path: Path, line: int, found: dict[str, Any], vector: str, wanted: object
) -> str | None:
    """Return the name of the keys in the first object, which is in `line`.

    Raises AmbiguousFileError where there are several, FormatError if `key` is none.
    """
    able = [name for name, value in found.items() if _is_key(value)]
    if wanted is False:
        return None
    if wanted is not None:
        if wanted not in able:
            raise InvalidInputError(
                f"{path}: no texts or whole numbers {wanted!r}; there are {able}"
            )
        return str(wanted)
    if _KEY in able:
        return _KEY
    if _KEY in found and vector != _KEY:  # keys of later lines would be lost
        raise FormatError(
            f"{path}: line {line}, {_KEY!r} is {_described(found[_KEY])}, not of keys; to read no "
            "keys, say --key-column none (key_column=False)"
        )
    if len(able) > 1:
        raise AmbiguousFileError(
            f"{path}: {', '.join(able[:8])} can be the keys: say --key-column {able[0]} "
            f"(key_column={able[0]!r}) or --key-column none (key_column=False)"
        )
    return next(iter(able), None)


class JsonLines(Format):
    """Objects, one a line."""

    suffixes = (".jsonl",)
    is_text = True

    def open(self, path: Path, wanted: Wanted) -> Source:
        """Open the lists of one name, which the first object has."""
        if wanted.text.header is not None or wanted.text.sep is not None or wanted.text.null:
            raise InvalidInputError(f"{path}: header, sep and null say nothing about JSON")
        with unless_it_fails(open_input(path, wanted.memory)) as file:
            return _JsonSource(file, wanted)
