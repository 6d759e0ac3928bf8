"""Columns of files that another library decodes, in a process of its own (`_columns_child`).

A matrix is a column of lists of numbers, or the columns of numbers together, one for each element.
The rows of several files are joined.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shlex
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from tierstore._dtypes import ELEMENT_TYPES
from tierstore._formats._roles import NO_KEYS, ambiguous, names_keys
from tierstore._formats.base import (
    Array,
    Content,
    Source,
    Wanted,
    choose,
    element_of,
    note_unread,
    scales_beside,
)
from tierstore._formats.files import InputFile, open_input, unless_it_fails
from tierstore._formats.keys import Integers, KeyColumn, Keys, blob_to_strings
from tierstore._keys.given import least
from tierstore._keys.strings import Strings
from tierstore.budget import Allowance, Size, format_bytes
from tierstore.errors import FormatError, InvalidInputError, MissingExtraError, StoreIOError

__all__ = [
    "ColumnSource",
    "Columns",
    "arrow_batch",
    "arrow_schema",
    "column_keys",
    "in_order",
    "need",
]

_KEY_ROWS = 1 << 16
_CHILD = Path(__file__).with_name("_columns_child.py")
_MAX_ANSWER = 16 << 20
_ENVIRONMENT = {
    # Allocators that do not reserve gigabytes of address space.
    "MALLOC_ARENA_MAX": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    # HDF5 would load libraries that a file names.
    "HDF5_PLUGIN_PRELOAD": "::",
}
_PACKAGES = {"parquet": "pyarrow", "arrow": "pyarrow", "hdf5": "h5py"}
_EXTRAS = {"parquet": "parquet", "arrow": "parquet", "hdf5": "hdf5"}


def need(kind: str) -> None:
    """Raise MissingExtraError if the library for files of a kind is not installed."""
    package = _PACKAGES[kind]
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(
            f"{kind} files need {package}: pip install 'tierstore[{_EXTRAS[kind]}]'"
        )


class Columns:
    """The columns of files of one kind, decoded in batches of rows by a separate process.

    Attributes:
        path: the file, or the directory of the files.
        allowance: the memory limit, also of the process.
        rows: number of rows in each file; None if it differs by column.
        kinds: the kind of each column, as reported by the child: `text` describes its type,
            `element` is the type of the numbers in lists, `size` the length of fixed-size lists,
            `number` the type of single numbers, and `key` is "int64", "uint64" or "string" if
            the column can be keys.
    """

    def __init__(self, kind: str, path: Path, memory: Size, parts: Sequence[Path] = ()) -> None:
        """Open files of a `kind` that the child supports: `path`, or else its `parts`."""
        need(kind)
        self.path = path
        self.allowance = Allowance(path, memory)
        self._kind = kind
        self._parts = list(parts) or [path]
        self._file = open_input(self._parts[0], memory)
        with unless_it_fails(self._file):
            self._process, self._socket = _child(kind, path, self.allowance.left)
        self._closed = weakref.finalize(self, _end, self._process, self._socket)
        self._numbers = count()
        with unless_it_fails(self):
            self.rows, self.kinds = self._described()

    def _described(self) -> tuple[list[int | None], dict[str, dict[str, Any]]]:
        """Return the rows of each file, and the columns, which all of them must have."""
        rows: list[int | None] = []
        first: dict[str, dict[str, Any]] = {}
        for at, part in enumerate(self._parts):
            self.allowance.take(len(str(part)) + 100, "the names of its files")
            found, _ = self._ask(at, do="describe")
            rows.append(found["rows"])
            first = first or found["columns"]
            if found["columns"] != first:
                differ = [n for n, kind in first.items() if found["columns"].get(n) != kind]
                raise FormatError(
                    f"{self.path}: {part.name} has other columns than {self._parts[0].name}: "
                    f"{', '.join((differ or list(found['columns']))[:8])}"
                )
        return rows, first

    def rows_of(self, column: str) -> int:
        """Return the number of rows of a column, in all files."""
        return (
            int(self.kinds[column].get("rows", 0))
            if None in self.rows
            else sum(each for each in self.rows if each is not None)
        )

    def length(self, column: str) -> int:
        """Return the length of the lists of a column, from its type or the first list."""
        size = self.kinds[column]["size"]
        if size is not None:
            return int(size)
        first = next((at for at, rows in enumerate(self.rows) if rows), 0)
        return int(self._ask(first, do="length", column=column)[0]["length"])

    def blocks(
        self, columns: Sequence[str], rows: int, dim: int = 0
    ) -> Iterator[tuple[int, list[bytes]]]:
        """Yield columns in batches of at most `rows` rows: their number and buffers.

        With `dim`, it is one column of lists of `dim` numbers, or one for each number. Raises
        FormatError.
        """
        for at in range(len(self._parts)):
            number = next(self._numbers)
            self._ask(at, do="start", number=number, columns=list(columns), rows=rows, dim=dim)
            while True:
                found, buffers = self._ask(None, do="next", number=number)
                if not found["rows"]:
                    break
                yield found["rows"], buffers

    def integers(self, column: str) -> Integers:
        """Return a column of integers, as uint64 if one needs that, within the allowance."""
        dtype = np.dtype(self.kinds[column]["key"])
        blocks = [np.empty(0, dtype)]
        for _, (data,) in self.blocks([column], _KEY_ROWS):
            self.allowance.take(2 * len(data), f"the integers in {column!r}")
            blocks.append(np.frombuffer(data, dtype))
        return least(np.concatenate(blocks))

    def _ask(self, part: int | None, **request: Any) -> tuple[dict[str, Any], list[bytes]]:
        """Send a request, about a file by its number; return the child's answer and its buffers."""
        sent, received = self._process.stdin, self._process.stdout
        if sent is None or received is None or sent.closed:
            raise FormatError(f"{self.path}: the file was closed")
        try:
            if part is not None:
                with self._opened(part) as file:
                    socket.send_fds(self._socket, [b"f"], [file.fd])
            sent.write(json.dumps(request).encode() + b"\n")
            sent.flush()
            (length,) = struct.unpack("<I", self._read(received, 4))
            header = json.loads(self._read(received, min(length, _MAX_ANSWER)))
            buffers = [self._read(received, nbytes) for nbytes in header["buffers"]]
        except (BrokenPipeError, ConnectionError, EOFError, ValueError):
            code = self._process.wait()
            raise self._refusal(f"the process that decodes it ended with {code}") from None
        if "error" in header:
            if header["error"] == "memory":
                raise self._refusal("decoding it takes more memory")
            reason = "".join(c if c.isprintable() else "?" for c in header["reason"][:200])
            parsed = header["error"] == "parser"
            where = f" {self._parts[part].name}:" if part and len(self._parts) > 1 else ""
            raise FormatError(
                f"{self.path}:{where} "
                f"{f'not a readable {self._kind} file: ' if parsed else ''}{reason}"
            )
        return header, buffers

    @contextlib.contextmanager
    def _opened(self, part: int) -> Iterator[InputFile]:
        if part == 0:
            yield self._file
            return
        with open_input(self._parts[part]) as file:
            yield file

    def _read(self, stream: IO[bytes], nbytes: int) -> bytes:
        self.allowance.check(nbytes, "a batch of rows")
        data = stream.read(nbytes)
        if len(data) < nbytes:
            raise EOFError
        return data

    def _refusal(self, why: str) -> FormatError:
        memory = format_bytes(self.allowance.memory)
        return FormatError(
            f"{self.path}: {why}; the limit is {memory}. If you trust the file, allow more "
            "(memory=, --memory)"
        )

    def close(self) -> None:
        """End the process and close the file."""
        self._closed()
        self._file.close()


def _child(kind: str, path: Path, nbytes: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the process that reads files, and return the socket that takes their descriptors."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-P", str(_CHILD), kind, str(theirs.fileno()), str(nbytes)]
    search = os.pathsep.join(filter(None, sys.path))
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": search},
        )
    except OSError as error:
        ours.close()
        raise StoreIOError(f"cannot start a process to read {path}: {error.strerror}") from error
    finally:
        theirs.close()
    return process, ours


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    channel.close()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    process.kill()
    process.wait()


class ColumnSource(Source):
    """A column of lists, or all columns of numbers if there is none."""

    def __init__(self, columns: Columns, wanted: Wanted, key: str) -> None:
        """Choose the matrix among `columns`, which the source closes; `key` names the keys."""
        self._columns = columns
        self._key = _key_column(columns, wanted.text.key_column, key)
        self._names, dim, number = _matrix(columns, wanted, self._key)
        super().__init__(
            columns.path, columns.rows_of(self._names[0]), dim, str(element_of(number))
        )
        self._stored = np.dtype(ELEMENT_TYPES[number].stored if number in ELEMENT_TYPES else number)
        self.notes = () if self._key is None else self.notes_beside(self._key)
        self.scales = scales_beside(self._names[0], number, columns.kinds)
        if len(self._names) > 1:
            self.read_as = f'{dim} numbers from columns "{self._names[0]}" to "{self._names[-1]}"'
        if self._key in columns.kinds:
            self.called_keys = f"a column of {columns.kinds[self._key]['text']}"

    def notes_beside(self, key: str) -> tuple[str, ...]:
        """Name the other columns that could be keys."""
        rest = {
            name: (self.rows,)
            for name, kind in self._columns.kinds.items()
            if "key" in kind
            and name not in (self._key, key, *self._names)
            and self._columns.rows_of(name) == self.rows
        }
        column = next(iter(rest), "")
        how = f"--key-column {shlex.quote(column)} (key_column={column!r}) makes it the keys"
        return note_unread(self.rows, rest, how)

    def _blocks(self, block_rows: int) -> Iterator[Array]:
        for rows, (data,) in self._columns.blocks(self._names, block_rows, self.dim):
            block = np.frombuffer(data, self._stored)
            if block.size != rows * self.dim:
                raise FormatError(
                    f"{self.path}: rows of {block.size / rows:g} numbers, not {self.dim}"
                )
            yield block.reshape(rows, self.dim).astype(ELEMENT_TYPES[self.dtype].stored, copy=False)

    @cached_property
    def keys(self) -> Keys | None:
        """The column of keys, if it has integers or strings, one for each row."""
        if self._key is None or "key" not in self._columns.kinds.get(self._key, {}):
            return None
        if self._columns.rows_of(self._key) != self.rows:
            return None
        return column_keys(self._columns, self._key)

    def close(self) -> None:
        """End the process and close the file."""
        self._columns.close()


def _key_column(
    columns: Columns, wanted: str | int | Literal[False] | None, default: str
) -> str | None:
    """Return the name of the column of keys, if there are to be any.

    The default need not be there; raises InvalidInputError if the wanted one cannot be keys.
    """
    if wanted is None or wanted is False:
        return default if wanted is None else None
    names = list(columns.kinds)
    name = dict(enumerate(names, 1)).get(wanted) if isinstance(wanted, int) else wanted
    able = [each for each in names if "key" in columns.kinds[each]]
    if name not in able:
        raise InvalidInputError(
            f"{columns.path}: no column {wanted!r} of integers or strings; such columns are {able}"
        )
    return name


def _matrix(columns: Columns, wanted: Wanted, key: str | None) -> tuple[list[str], int, str]:
    """Return the columns to read, the length of rows, and NumPy's name of their numbers."""
    described = {name: kind["text"] for name, kind in columns.kinds.items()}
    lists = {
        name: described[name] for name, k in columns.kinds.items() if element_of(k.get("element"))
    }
    single = _single_numbers(columns, key)
    if not lists and len(single) > 1 and wanted.name is None:
        named = [name for name in single if names_keys(name)]
        if named and wanted.text.key_column is None:
            raise ambiguous(
                columns.path,
                f"column {named[0]!r} has the name of keys and holds fractions",
                NO_KEYS,
                ("save it as whole numbers", {}),
            )
        number = np.result_type(*(columns.kinds[name]["number"] for name in single)).name
        return single, len(single), number
    name = choose(columns.path, wanted, lists, described)
    return [name], _length(columns, name, wanted), columns.kinds[name]["element"]


def _length(columns: Columns, name: str, wanted: Wanted) -> int:
    """Return the length of the lists of a column, from its type, a list, or what is wanted."""
    if columns.kinds[name]["size"] is not None or columns.rows_of(name):
        return columns.length(name)
    if wanted.dim is None:
        raise FormatError(
            f"{columns.path}: has no rows, and lists of any length in {name!r}, so that nothing "
            "says how many numbers a row has; lists of a fixed size do"
        )
    return wanted.dim


def _single_numbers(columns: Columns, key: str | None) -> list[str]:
    """Return the columns of floats, or of bytes if there are none."""
    numbers = {
        name: kind["number"]
        for name, kind in columns.kinds.items()
        if name != key and element_of(kind.get("number"))
    }
    floats = [name for name, number in numbers.items() if element_of(number) == number]
    return floats or list(numbers)


def column_keys(columns: Columns, column: str) -> Keys:
    """Return a column of integers or strings as keys; raises FormatError for another."""
    able = [name for name, kind in columns.kinds.items() if "key" in kind]
    if column not in able:
        raise FormatError(
            f"{columns.path}: no column {column!r} of integers or strings; such columns are {able}"
        )
    if columns.kinds[column]["key"] != "string":
        keys: Keys = columns.integers(column)
    else:
        strings = Strings()
        for _, (offsets, text) in columns.blocks([column], _KEY_ROWS):
            ends = np.frombuffer(offsets, np.int64)
            blob_to_strings(columns.path, text, ends, columns.allowance, strings)
        keys = strings
    rows = columns.rows_of(column)
    if len(keys) != rows:
        raise FormatError(f"{columns.path}: {len(keys)} keys in column {column!r} of {rows}")
    return keys


def in_order(paths: Iterator[Path]) -> list[Path]:
    """Return files sorted by name, with numbers in names by value: part-2 before part-10.

    Hidden files and those that begin with "_", such as markers of Spark, are left out.
    """
    named = [path for path in paths if path.name[0] not in "._"]
    return sorted(named, key=lambda path: _by_numbers(path.name))


def _by_numbers(name: str) -> list[Any]:
    return [int(part) if at % 2 else part for at, part in enumerate(re.split(r"(\d+)", name))]


def arrow_schema(content: Content, key: str) -> Any:
    """Return Arrow's schema of the written file: the column `key`, if any, and the fields."""
    import pyarrow

    element = pyarrow.field("element", pyarrow.from_numpy_dtype(content.storage), nullable=False)
    fields = [
        pyarrow.field(name, pyarrow.list_(element, dim), nullable=False)
        for name, dim in content.fields.items()
    ]
    if content.keys is not None:
        kind = _key_type(content.keys)
        fields.insert(0, pyarrow.field(key, kind, nullable=False))
    return pyarrow.schema(fields)


def _key_type(keys: KeyColumn) -> Any:
    import pyarrow

    return pyarrow.from_numpy_dtype(keys.dtype) if keys.integers else pyarrow.string()


def arrow_batch(content: Content, schema: Any, start: int, block: Array) -> Any:
    """Return a block of rows, which starts at row `start`, as a record batch."""
    import pyarrow

    columns, first = [], 0
    for name, dim in content.fields.items():
        values = pyarrow.array(block[:, first : first + dim].reshape(-1))
        columns.append(pyarrow.FixedSizeListArray.from_arrays(values, type=schema.field(name).type))
        first += dim
    if content.keys is not None:
        keys = content.keys.block(start, start + len(block))
        columns.insert(0, pyarrow.array(keys, schema[0].type))
    return pyarrow.record_batch(columns, schema=schema)
