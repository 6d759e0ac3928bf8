"""What of a file is read: one rule for every format that holds named columns or arrays.

The `Reader` of a format says what a file holds and reads what it is asked for. What is the matrix,
the key, a scale, left out or refused is decided here, from names, types and shapes alone.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from tierstore._closing import Closing
from tierstore._dtypes import ELEMENT_TYPES
from tierstore._formats._roles import Candidates, choice, names_keys
from tierstore._formats.base import (
    Array,
    Format,
    Source,
    StoredChunks,
    StoredRows,
    Wanted,
    element_of,
    exactly,
)
from tierstore._formats.files import InputFile, open_input, taken_by, unless_it_fails
from tierstore._formats.keys import KEYS, OFFSETS, Keys
from tierstore.budget import Size
from tierstore.errors import FormatError, InvalidInputError, counted

PACKING = frozenset({"scale_factor", "add_offset"})
"""Attributes of arrays whose values are not their elements, by the conventions of NetCDF."""
_KEYS = ("key", KEYS)
_LISTED = 8
_SCALE = re.compile(r"scale|absmax|quant|zero_?point|scb", re.IGNORECASE)
_EIGHT_BITS = re.compile(r"u?int8|float8\w*")
_PACKED = re.compile(r"u?int\d+|float8\w*")
_WHOLE = re.compile(r"u?int(8|16|32|64)")


@dataclass(frozen=True)
class Column:
    """A named column, array or tensor.

    Attributes:
        text: its type and shape, for people.
        rows: its entries; None if it has none.
        kind: "list" (an entry is as many numbers as every other), "integer", "float", "text" or
            what else it is: "other".
        number: the type of its numbers, a name of NumPy's or of an element type; "" for others.
        dim: the numbers of an entry of a list; None if only the rows say it, and there are none.
        element: the element type of what `Reader.blocks` yields of it, if that is not the one of
            `number`.
    """

    text: str
    rows: int | None
    kind: str
    number: str = ""
    dim: int | None = None
    element: str | None = None

    @property
    def read_as(self) -> str | None:
        """The element type of its numbers in a table, or None if no table holds them."""
        known = ELEMENT_TYPES.get(self.number)
        named = known.name if known is not None and known.as_bits else element_of(self.number)
        return self.element or named

    @property
    def is_matrix(self) -> bool:
        """Whether its entries can be the rows of a table."""
        return self.kind == "list" and self.read_as is not None

    def __str__(self) -> str:
        return self.text


def array_column(text: str, number: str | np.dtype[Any], shape: Sequence[int]) -> Column:
    """Return the description of an array of a type, of NumPy's or an element type, and shape."""
    dtype = None if isinstance(number, str) else number
    name = str(number if dtype is None else dtype.name)
    rows = shape[0] if shape else None
    if len(shape) == 2:
        return Column(text, rows, "list", name, shape[1])
    if len(shape) != 1:
        return Column(text, rows, "other", name)
    if dtype is not None and dtype.kind in "US":
        return Column(text, rows, "text", name)
    kind = "integer" if _WHOLE.fullmatch(name) else "float" if "float" in name else "other"
    return Column(text, rows, kind, name)


def with_packed_texts(columns: dict[str, Column]) -> dict[str, Column]:
    """Return columns in which bytes `keys` and the offsets of texts in them are one of texts."""
    keys, offsets = columns.get(KEYS), columns.get(OFFSETS)
    if keys is None or offsets is None or not offsets.rows:
        return columns
    if (keys.kind, keys.number, offsets.number) != ("integer", "uint8", "int64"):
        return columns
    packed = replace(keys, kind="text", rows=offsets.rows - 1, number="")
    return {n: packed if n == KEYS else each for n, each in columns.items() if n != OFFSETS}


class Reader(Closing, ABC):
    """An open file of named columns, or of arrays.

    Attributes:
        path: the file.
        columns: what the file holds, by name, in its order.
        is_table: whether all columns have the same rows, so that numbers in several of them can be
            the numbers of one row.
        is_declared: whether the file says of what type a column is.
        notes: what it holds besides, a sentence each.
    """

    path: Path
    columns: dict[str, Column]
    is_table: ClassVar[bool] = False
    is_declared: ClassVar[bool] = True
    notes: tuple[str, ...] = ()

    @abstractmethod
    def blocks(self, names: Sequence[str], dim: int, block_rows: int) -> Iterator[Array]:
        """Yield rows `(n, dim)` of one list, or of one number of each of several columns.

        n is at most `block_rows`. Raises FormatError.
        """

    def check(self, name: str) -> None:
        """Raise FormatError for an array that is not in the file as a whole."""

    def close(self) -> None:
        """Close the file, if any stays open between reads."""

    @abstractmethod
    def keys(self, name: str) -> Keys:
        """Return a column of whole numbers or texts; raises FormatError."""

    def length(self, name: str) -> int | None:
        """Return the numbers of an entry of a list; None if nothing says it."""
        return self.columns[name].dim

    def stored(self, name: str) -> StoredRows | StoredChunks | None:
        """Return where the entries of an array can be read at random, if anywhere."""
        return None

    def filled(self, name: str) -> tuple[str, ...]:
        """Return which entries of an array read as a value that is not there, a sentence each."""
        return ()

    def held_bytes(self, name: str, enough: int) -> int:
        """Return the bytes on the disk that an array is read from, or some number >= `enough`."""
        return taken_by(self.path, enough)


class FileReader(Reader):
    """The arrays or columns of one file, which is closed with this."""

    def __init__(self, file: InputFile) -> None:
        """Read `file`."""
        self.path = file.path
        self._file = file

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ColumnFormat(Format):
    """A format whose files hold named columns or arrays.

    Attributes:
        in_file: what reads an open file, unless `reader` says otherwise.
    """

    has_columns = True
    holds_scales = True
    in_file: ClassVar[type[FileReader]]

    def reader(self, path: Path, memory: Size) -> Reader:
        """Open a file; raises FormatError."""
        with unless_it_fails(open_input(path, memory)) as file:
            return self.in_file(file)

    def open(self, path: Path, wanted: Wanted) -> Source:
        """Open what is to be read of a file."""
        with unless_it_fails(self.reader(path, wanted.memory)) as reader:
            return ReadSource(reader, wanted)

    def read_keys(self, path: Path, name: str | None, memory: Size) -> Keys:
        """Read a column of whole numbers or texts, `key` or `keys` if none is named."""
        with self.reader(path, memory) as reader:
            able = [each for each, column in reader.columns.items() if _is_key(column)]
            found = next((each for each in _KEYS if each in able), "") if name is None else name
            if found not in able:
                raise FormatError(
                    f"{path}: no column {name or 'key'!r} of integers or strings; such columns are "
                    f"{able}"
                )
            return _whole_keys(reader, found, reader.columns[found].rows or 0)


class ReadSource(Source):
    """The rows of a file of named columns, and their keys."""

    def __init__(self, reader: Reader, wanted: Wanted) -> None:
        """Decide what to read of `reader`, which the source closes."""
        path, columns = reader.path, reader.columns
        self._reader = reader
        matrix = _matrix(reader, wanted)
        rows = _rows(columns, matrix)
        text = wanted.text if matrix is None else replace(wanted.text, vector=(matrix,))
        names = list(columns)
        kinds = [_kind(reader, name, rows) for name in names]
        damage = {at: f"{name!r} is {columns[name]}" for at, name in enumerate(names)}
        found = Candidates(path, names, kinds, text, damage, reader.is_declared).roles()
        self._names = [names[at] for at in found.values]
        self._key = None if found.key is None else names[found.key]
        unfit = ("list", "other", "float") if reader.is_declared else ("list", "other")
        if self._key is not None and columns[self._key].kind in unfit:
            able = [name for name in names if _is_key(columns[name])]
            raise InvalidInputError(
                f"{path}: no column {self._key!r} of integers or strings; such columns are {able}"
            )
        first = columns[self._names[0]]
        dim: int | None = len(self._names)
        if first.kind == "list":
            length = reader.length(self._names[0])
            dim = wanted.dim if length is None else length
        if dim is None:
            raise FormatError(
                f"{path}: has no rows, and lists of any length in {self._names[0]!r}, so that "
                "nothing says how many numbers a row has; lists of a fixed size do"
            )
        self._is_asked = wanted.text.key_column is not None
        self._is_text = not reader.is_declared
        super().__init__(path, rows, dim, self._element(wanted))
        reader.check(self._names[0])
        read = (self._key, *self._names, *wanted.beside)
        self._left_out = [n for n in names if n not in read]
        for name in _KEYS:
            if name in self._left_out and wanted.text.key_column in (None, False):
                self._left_out.remove(name)  # as it was said, or will be
                if wanted.text.key_column is None:
                    self._refuse_unread_keys(name)
                    what = f"{name!r} is not read: it is {columns[name]}"
                    each = f"one for each of the {rows:,} rows"
                    self.notes += (f"{what}; keys are whole numbers or texts, {each}",)
        self.scales = _scales_beside(self._names[0], first, names)
        self.filled = reader.filled(self._names[0])
        self.notes += (*reader.notes, *self.filled, *self._unread())
        if reader.is_table:
            keys = "no keys" if self._key is None else f'keys from "{self._key}"'
            last = f'" to "{self._names[-1]}' if len(self._names) > 1 else ""
            self.read_as = f'{keys}, {self.dim} numbers from "{self._names[0]}{last}"'

    def _element(self, wanted: Wanted) -> str:
        if self._is_text:
            return wanted.text_dtype
        columns = [self._reader.columns[name] for name in self._names]
        element = columns[0].read_as
        if len(columns) == 1 and element is not None:
            return element
        number = np.result_type(*(each.number for each in columns))
        return element_of(number if number.kind == "f" else np.result_type(number, "f4")) or ""

    def _refuse_unread_keys(self, name: str) -> None:
        """Raise FormatError for keys, one for each row, of a kind that is not read."""
        column = self._reader.columns[name]
        if column.kind == "other" and column.rows in (None, self.rows):
            raise FormatError(
                f"{self.path}: {name!r} is {column}, not of keys, which are whole numbers or "
                "texts; to read no keys, say --key-column none (key_column=False)"
            )

    def _unread(self) -> tuple[str, ...]:
        """Name the columns that are not read."""
        columns = self._reader.columns
        rest = self._left_out
        able = [name for name in rest if _is_key(columns[name]) and columns[name].rows == self.rows]
        others = [
            name
            for name in rest
            # Lists beside tensors are settings unless they have an entry for each row.
            if name not in able
            and (columns[name].number or columns[name].rows in (None, self.rows))
        ]
        found = []
        if able:
            how, _ = choice(list(columns), list(columns).index(able[0]))
            found.append(
                f"not read, though it has a value for each row: {_listed(able)}; {how} makes it "
                "the keys"
            )
        if others:
            shown = [f"{name} ({columns[name]})" for name in others]
            found.append(f"not read: {_listed(shown)}")
        return tuple(found)

    @cached_property
    def keys(self) -> Keys | None:
        """The column of keys, if any."""
        if self._key is None:
            return None
        keys = _whole_keys(self._reader, self._key, self.rows)
        whole = isinstance(keys, np.ndarray) and not self._is_asked and self._key not in _KEYS
        if whole and np.array_equal(keys, np.arange(len(keys))):
            self.numbering = f"column {self._key!r}"
            return None
        return keys

    def stored(self) -> StoredRows | StoredChunks | None:
        """Return where the rows can be read at random, if anywhere."""
        return self._reader.stored(self._names[0])

    def held_bytes(self, enough: int) -> int:
        """Return the bytes on the disk that the rows are read from, or some number >= `enough`."""
        return self._reader.held_bytes(self._names[0], enough)

    def _blocks(self, block_rows: int) -> Iterator[Array]:
        self.overflowed = 0
        element = ELEMENT_TYPES[self.dtype]
        for block in self._reader.blocks(self._names, self.dim, block_rows):
            if self._is_text:
                stored = element.encode(block)
                self.overflowed += element.overflowed(block, stored)
                yield stored
            else:
                yield exactly(self.path, block, self.dtype)

    def close(self) -> None:
        """Close the file."""
        self._reader.close()


def _matrix(reader: Reader, wanted: Wanted) -> str | None:
    """Return the name of the array or column of the rows; None for one column for each number."""
    columns = reader.columns
    vector = wanted.text.vector
    if wanted.name is None and vector:
        if reader.is_table or len(vector) > 1:
            return None
        wanted = replace(wanted, name=str(vector[0]))
    scales = {
        scale
        for name, each in columns.items()
        for scale in _scales_beside(name, each, columns)
        if wanted.name is None
    }
    matrices = {n: each for n, each in columns.items() if each.is_matrix and n not in scales}
    if reader.is_table and wanted.name in columns and columns[wanted.name].kind == "float":
        return wanted.name
    lists = any(each.kind == "list" for each in columns.values())
    if reader.is_table and not lists and wanted.name is None:
        return None
    floats = {name: each for name, each in matrices.items() if each.read_as == each.number}
    return choose(reader.path, wanted, floats, columns, matrices)


def _rows(columns: Mapping[str, Column], matrix: str | None) -> int:
    if matrix is not None:
        return columns[matrix].rows or 0
    return next((each.rows for each in columns.values() if each.rows is not None), 0)


def _kind(reader: Reader, name: str, rows: int) -> str:
    """Return what a column is for the rule of keys and numbers."""
    column = reader.columns[name]
    if column.rows != rows or (column.kind == "list" and not column.is_matrix):
        return "other"
    if column.kind == "float" and not rows and not reader.is_table:  # np.array([]) is of floats
        return "other"
    if column.kind != "integer" or not reader.is_table or column.number not in ELEMENT_TYPES:
        return column.kind
    # Bytes, such as of quantised vectors, are numbers where there are no others.
    numbers = any(each.kind in ("float", "list") for each in reader.columns.values())
    return column.kind if numbers or names_keys(name) else "float"


def _is_key(column: Column) -> bool:
    return column.kind in ("integer", "text")


def _whole_keys(reader: Reader, name: str, rows: int) -> Keys:
    keys = reader.keys(name)
    if len(keys) != rows:
        raise FormatError(
            f"{reader.path}: {counted(len(keys), 'key')} in {name!r} of {counted(rows, 'row')}"
        )
    return keys


def _scales_beside(name: str, column: Column, others: Iterable[str]) -> tuple[str, ...]:
    """Return the names of arrays that may be scales of 8-bit elements or packed ones, by name.

    They are called a scale, in whatever notation, and lie where the elements lie. Packed are some
    elements in a whole number of any width, in a matrix.
    """
    if not (_PACKED if column.kind == "list" else _EIGHT_BITS).fullmatch(column.number):
        return ()
    where = name[: max(name.rfind("."), name.rfind("/")) + 1]
    return tuple(
        each
        for each in others
        if each != name and each.startswith(where) and _SCALE.search(each[len(where) :])
    )


def choose(
    path: Path,
    wanted: Wanted,
    matrices: Mapping[str, object],
    others: Mapping[str, object],
    more: Mapping[str, object] = MappingProxyType({}),
) -> str:
    """Return the name of the matrix to read: the requested, the preferred, or the only one.

    `matrices` are the readable ones and `others` the other entries of the file; both map a name to
    an object whose string describes it. Matrices in `more`, of bytes, are readable too, but taken
    only by name or where there are no others. Raises FormatError that lists the entries.
    """
    name = wanted.name if wanted.name is not None else wanted.field
    if name in more or not matrices:
        matrices = {**matrices, **more}
    if name is not None and name in matrices:
        return name
    if name is not None and name in others:
        raise FormatError(f"{path}: {name!r} is {others[name]}; need floats of shape (rows, dim)")
    if wanted.name is None and len(matrices) == 1:
        return next(iter(matrices))

    if not matrices:
        raise FormatError(
            f"{path}: contains no floats of shape (rows, dim), only {_described(others)}"
        )
    if wanted.name is not None:
        raise FormatError(f"{path}: contains no {wanted.name!r}, only {_described(matrices)}")
    raise FormatError(
        f"{path}: contains {len(matrices)} matrices: {_described(matrices)}; "
        f"name one, as in {path.name}:{next(iter(matrices))}"
    )


def _described(entries: Mapping[str, object]) -> str:
    return (
        _listed([f"{name!r} {entry}" if name else str(entry) for name, entry in entries.items()])
        or "nothing"
    )


def _listed(shown: Sequence[str]) -> str:
    more = [f"{len(shown) - _LISTED} more"] if len(shown) > _LISTED else []
    return ", ".join([*shown[:_LISTED], *more])
