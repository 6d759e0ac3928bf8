""".jsonl, .ndjson: an object or a list of numbers a line; read only. Packed ones too.

Interfaces of embedding models and vector databases produce such files. What an object holds is a
column, also within objects in it, or lists of them: `data.0.vector`. Lists of numbers are columns
of lists.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tierstore._formats._encoding import UNPACKING_ERRORS, text_stream
from tierstore._formats.base import Array, Source, Wanted
from tierstore._formats.files import InputFile, distinct, open_input, parsing, unless_it_fails
from tierstore._formats.keys import Keys
from tierstore._formats.reading import Column, ColumnFormat, Reader
from tierstore._keys.given import integer_type
from tierstore._keys.strings import Strings
from tierstore.budget import JSON_COST, OBJECT_BYTES, Allowance, Size
from tierstore.errors import FormatError, InvalidInputError

MAX_LINE_BYTES = 64 << 20
_BITS = (1 << 64) - 1
_MOST_DEPTH = 16
_VECTOR = "vector"
"""The name of what is a list without one."""


class Objects(Reader):
    """Objects, one for each row, whose columns are found by reading all of them once."""

    is_table = True
    is_declared = False
    unit: ClassVar[str] = "line"

    def __init__(self, path: Path, allowance: Allowance) -> None:
        self.path = path
        self._allowance = allowance
        rows, kinds, dims = 0, dict[str, set[str]](), dict[str, int]()
        for _, found in self._flat():
            rows += 1
            for name, value in found.items():
                if name not in kinds:
                    allowance.take(OBJECT_BYTES + 8 * len(name), "the names of its columns")
                    kinds[name] = set()
                kinds[name].add(_kind(value))
                if isinstance(value, list):
                    dims.setdefault(name, len(value))
        if not rows:
            raise FormatError(f"{path}: empty")
        self.columns = {
            name: Column(
                _TEXTS[kind], rows, kind, "float64" if kind == "list" else "", dims.get(name)
            )
            for name, each in kinds.items()
            for kind in [_merged(each)]
        }

    @abstractmethod
    def objects(self) -> Iterator[tuple[int, Any]]:
        """Yield the number of each object, from 1, and the object or list."""

    def _flat(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield objects with what is in objects in them, by the path of its names."""
        kind: type | None = None
        for number, found in self.objects():
            kind = type(found) if kind is None else kind
            if kind not in (dict, list) or not isinstance(found, kind):
                what = "list of numbers" if kind is list else "object"
                raise FormatError(f"{self.path}: {self.unit} {number} is no {what}")
            each = {_VECTOR: found} if isinstance(found, list) else found
            try:
                yield number, distinct(list(_leaves(each, "", 0)))
            except ValueError as error:
                raise FormatError(f"{self.path}: {self.unit} {number}: {error!s:.200}") from None

    def blocks(self, names: Sequence[str], dim: int, block_rows: int) -> Iterator[Array]:
        """Yield rows of a list, or of a number of each of several names."""
        objects = self._flat()
        first = self.columns[names[0]]
        rows = first.rows or 0
        for start in range(0, rows, block_rows):
            numbers = np.empty((min(block_rows, rows - start), dim))
            row = -1
            # One by one: objects need many times the memory of their numbers.
            for row, (line, found) in enumerate(islice(objects, len(numbers))):
                if first.kind == "list":
                    self._take(names[0], found.get(names[0]), line, numbers[row])
                    continue
                for at, name in enumerate(names):
                    self._take(name, [found.get(name)], line, numbers[row, at : at + 1])
            yield numbers[: row + 1]

    def _take(self, name: str, vector: Any, line: int, into: npt.NDArray[np.float64]) -> None:
        """Copy the numbers of one object; raises FormatError for another."""
        if not is_vector(vector) or len(vector) != len(into):
            single = self.columns[name].kind != "list"
            found = _described(vector[0] if single else vector)
            need = "a number" if single else f"{len(into)} numbers"
            raise FormatError(f"{self.path}: {self.unit} {line}, {name!r} is {found}; need {need}")
        try:
            into[:] = vector
        except OverflowError:
            raise FormatError(
                f"{self.path}: {self.unit} {line}, {name!r} has a whole number too large"
            ) from None

    def keys(self, name: str) -> Keys:
        """Return the value of a name in each object, all texts or all whole numbers."""
        texts = Strings()
        numbers = array("Q")  # of int64 the same bits
        lowest = highest = 0
        for line, each in self._flat():
            key = each.get(name)
            key = int(key) if isinstance(key, float) and key.is_integer() else key
            where = f"{self.path}: {self.unit} {line}, {name!r}"
            if not _is_key(key) or (texts if isinstance(key, int) else numbers):
                others = "texts" if texts else "whole numbers" if numbers else "keys"
                raise FormatError(
                    f"{where} is {_described(key)}, not of {others}; to read no keys, say "
                    "--key-column none (key_column=False)"
                )
            if isinstance(key, int):
                self._allowance.take(2 * numbers.itemsize, "its keys")  # a growing array is copied
                lowest, highest = min(lowest, key), max(highest, key)
                numbers.append(key & _BITS)
                continue
            self._allowance.take(4 * len(str(key)) + 8, "its keys")
            try:
                texts.append(str(key))
            except UnicodeEncodeError:
                raise FormatError(f"{where} holds half a character") from None
        try:
            return texts or np.frombuffer(numbers, integer_type(lowest, highest))
        except InvalidInputError as error:
            raise FormatError(f"{self.path}: {name!r}: {error}") from None


class _JsonLines(Objects):
    def __init__(self, file: InputFile) -> None:
        self._file = file
        super().__init__(file.path, file.allowance)

    def objects(self) -> Iterator[tuple[int, Any]]:
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
                    yield number, json.loads(line, object_pairs_hook=distinct)
                except (ValueError, RecursionError) as error:
                    raise FormatError(
                        f"{self.path}: line {number} is no JSON: {error!s:.100}"
                    ) from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _leaves(found: dict[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    for name, value in found.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            value = {str(at): each for at, each in enumerate(value)}
        if isinstance(value, dict) and value and depth < _MOST_DEPTH:
            yield from _leaves(value, f"{prefix}{name}.", depth + 1)
        else:
            yield f"{prefix}{name}", value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_vector(value: Any) -> bool:
    """Whether a value is a list of numbers, one at least."""
    return isinstance(value, list) and bool(value) and all(map(_is_number, value))


def _is_key(value: object) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)


_TEXTS = {
    "list": "lists of numbers",
    "integer": "whole numbers",
    "float": "numbers",
    "text": "texts",
    "mixed": "texts and whole numbers",
    "damaged": "texts and numbers",
    "other": "other objects",
}


def _kind(value: object) -> str:
    if is_vector(value):
        return "list"
    if _is_key(value):
        return "integer" if isinstance(value, int) else "text"
    return "float" if _is_number(value) else "" if value is None else "other"


def _merged(kinds: set[str]) -> str:
    """Return the kind of a column of values of several kinds; "" is that of null."""
    kinds = kinds - {""}
    if "list" in kinds:
        return "list"
    if kinds == {"integer", "float"}:
        return "float"
    if "text" in kinds and kinds <= {"text", "integer", "float"}:
        return "text" if len(kinds) == 1 else "damaged" if "float" in kinds else "mixed"
    return next(iter(kinds)) if len(kinds) == 1 else "other"


def _described(value: object) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return {dict: "an object", str: "a text", bool: "true or false"}.get(
        type(value), "a number" if _is_number(value) else "missing or null"
    )


class JsonLines(ColumnFormat):
    """Objects, one a line."""

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson")
    is_text = True

    def open(self, path: Path, wanted: Wanted) -> Source:
        """Open a list of numbers in each object, or the numbers of several names."""
        if wanted.text.header is not None or wanted.text.sep is not None or wanted.text.null:
            raise InvalidInputError(f"{path}: header, sep and null say nothing about JSON")
        return super().open(path, wanted)

    def reader(self, path: Path, memory: Size) -> Reader:
        """Open the objects."""
        with unless_it_fails(open_input(path, memory)) as file:
            return _JsonLines(file)
