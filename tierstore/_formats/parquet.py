""".parquet: a column of vectors, and one of keys. Needs pyarrow.

The writer stores a column of fixed-size lists with the name of the field, and keys as a column
`key`. Trained floats hardly repeat, so there is no dictionary; they compress better when they are
split into byte streams before zstd. The reader accepts any column of lists of floats of equal
length without nulls, and the column `key` if it contains integers or strings. A separate process
decodes them within the memory limit (`_parquet_child`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import struct
import subprocess
import sys
import weakref
from collections.abc import Iterator
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from tierstore._dtypes import ELEMENT_TYPES, ElementType
from tierstore._formats.base import (
    Array,
    Content,
    Format,
    Source,
    Wanted,
    Write,
    choose,
    note_unread,
)
from tierstore._formats.files import InputFile, open_input, unless_it_fails
from tierstore._formats.keys import Keys, blob_to_strings
from tierstore.budget import Size, format_bytes
from tierstore.errors import FormatError, MissingExtraError, StoreIOError

__all__ = ["Columns", "Parquet"]

_KEY = "key"
_KEY_ROWS = 1 << 16
_MAGIC = b"PAR1"
_CHILD = Path(__file__).with_name("_parquet_child.py")
_MAX_ANSWER = 16 << 20
_ENVIRONMENT = {"MALLOC_ARENA_MAX": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
"""Settings for allocators that do not reserve gigabytes of address space."""


def _need_pyarrow() -> None:
    if importlib.util.find_spec("pyarrow") is None:
        raise MissingExtraError("parquet files need pyarrow: pip install 'tierstore[parquet]'")


class Columns:
    """The columns of a Parquet file, decoded in batches of rows by a separate process.

    Attributes:
        rows: number of rows.
        kinds: the kind of each column, as reported by the child: `text` describes its type,
            `element` is the element type of lists of floats, `size` the length of fixed-size lists,
            and `key` is "integer" or "string" if the column can be keys.
    """

    def __init__(self, file: InputFile) -> None:
        """Take ownership of `file`, which is closed if this raises."""
        self.path = file.path
        self.file = file
        with unless_it_fails(file):
            _need_pyarrow()
            _check_ends(file)
            self._process = _child(file)
        self._closed = weakref.finalize(self, _end, self._process)
        self._numbers = count()
        with unless_it_fails(self):
            found, _ = self._ask(do="schema")
            self.rows: int = found["rows"]
            self.kinds: dict[str, dict[str, Any]] = found["columns"]

    def length(self, column: str) -> int:
        """Return the length of the lists of a column, from its type or the first list."""
        size = self.kinds[column]["size"]
        return int(self._ask(do="length", column=column)[0]["length"] if size is None else size)

    def blocks(self, column: str, rows: int, dim: int = 0) -> Iterator[tuple[int, list[bytes]]]:
        """Yield a column in batches of at most `rows` rows: their number and buffers.

        With `dim`, the column consists of lists of `dim` floats. Raises FormatError.
        """
        number = next(self._numbers)
        self._ask(do="start", number=number, column=column, rows=rows, dim=dim)
        while True:
            found, buffers = self._ask(do="next", number=number)
            if not found["rows"]:
                return
            yield found["rows"], buffers

    def integers(self, column: str) -> npt.NDArray[np.int64]:
        """Return a column of integers as int64, within the allowance of the file."""
        blocks = [np.empty(0, np.int64)]
        for _, (data,) in self.blocks(column, _KEY_ROWS):
            self.file.allowance.take(2 * len(data), f"the integers in {column!r}")
            blocks.append(np.frombuffer(data, np.int64))
        return np.concatenate(blocks)

    def _ask(self, **request: Any) -> tuple[dict[str, Any], list[bytes]]:
        """Send a request; return the child's answer and its buffers."""
        sent, received = self._process.stdin, self._process.stdout
        if sent is None or received is None or sent.closed:
            raise FormatError(f"{self.path}: the file was closed")
        try:
            sent.write(json.dumps(request).encode() + b"\n")
            sent.flush()
            (length,) = struct.unpack("<I", self._read(received, 4))
            header = json.loads(self._read(received, min(length, _MAX_ANSWER)))
            buffers = [self._read(received, nbytes) for nbytes in header["buffers"]]
        except (BrokenPipeError, EOFError, ValueError):
            code = self._process.wait()
            raise self._refusal(f"the process that decodes it ended with {code}") from None
        if "error" in header:
            if header["error"] == "memory":
                raise self._refusal("decoding it takes more memory")
            reason = "".join(c if c.isprintable() else "?" for c in header["reason"][:200])
            parsed = header["error"] == "parser"
            raise FormatError(
                f"{self.path}: {'not a readable Parquet file: ' if parsed else ''}{reason}"
            )
        return header, buffers

    def _read(self, stream: IO[bytes], nbytes: int) -> bytes:
        self.file.allowance.check(nbytes, "a batch of rows")
        data = stream.read(nbytes)
        if len(data) < nbytes:
            raise EOFError
        return data

    def _refusal(self, why: str) -> FormatError:
        memory = format_bytes(self.file.allowance.memory)
        return FormatError(
            f"{self.path}: {why}; the limit is {memory}. If you trust the file, allow more "
            "(memory=, --memory)"
        )

    def close(self) -> None:
        """End the process and close the file."""
        self._closed()
        self.file.close()


def _check_ends(file: InputFile) -> None:
    """Raise FormatError if this is not a Parquet file, before starting a process."""
    ends = file.read_at(0, 4) + file.read_at(file.size - 8, 8) if file.size >= 12 else b""
    footer = int.from_bytes(ends[4:8], "little")
    if ends[:4] != _MAGIC or ends[8:] != _MAGIC or footer > file.size - 12:
        raise FormatError(f"{file.path}: not a Parquet file, or truncated")


def _child(file: InputFile) -> subprocess.Popen[bytes]:
    """Start the process that reads a file."""
    command = [sys.executable, "-P", str(_CHILD), str(file.fd), str(file.allowance.left)]
    path = os.pathsep.join(filter(None, sys.path))
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[file.fd],
            env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": path},
        )
    except OSError as error:
        raise StoreIOError(
            f"cannot start a process to read {file.path}: {error.strerror}"
        ) from error


def _end(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    process.kill()
    process.wait()


class _ParquetSource(Source):
    def __init__(self, columns: Columns, column: str) -> None:
        element = columns.kinds[column]["element"]
        super().__init__(columns.path, columns.rows, columns.length(column), element)
        self._columns = columns
        self._column = column
        others = [name for name, kind in columns.kinds.items() if "key" in kind and name != _KEY]
        how = f"--keys {columns.path.name}:{others[0] if others else ''} makes it the keys"
        self.notes = note_unread(self.rows, dict.fromkeys(others, (self.rows,)), how)
        if _KEY in columns.kinds:
            self.called_keys = f"a column of {columns.kinds[_KEY]['text']}"

    def _blocks(self, block_rows: int) -> Iterator[Array]:
        for rows, (data,) in self._columns.blocks(self._column, block_rows, self.dim):
            yield np.frombuffer(data, ELEMENT_TYPES[self.dtype].stored).reshape(rows, self.dim)

    @cached_property
    def keys(self) -> Keys | None:
        found = self._columns.kinds.get(_KEY, {}).get("key")
        return None if found is None else _keys(self._columns, _KEY)

    def close(self) -> None:
        self._columns.close()


def _element(kind: dict[str, Any]) -> str | None:
    """Return the element type of a column of lists of floats; None for other columns."""
    element = ELEMENT_TYPES.get(kind.get("element", ""))
    return None if element is None or element.as_bits else element.name


def _keys(columns: Columns, column: str) -> Keys:
    if columns.kinds[column]["key"] == "integer":
        keys: Keys = columns.integers(column)
    else:
        strings: list[str] = []
        for _, (offsets, text) in columns.blocks(column, _KEY_ROWS):
            ends = np.frombuffer(offsets, np.int64)
            strings += blob_to_strings(columns.path, text, ends, columns.file.allowance)
        keys = strings
    if len(keys) != columns.rows:
        raise FormatError(
            f"{columns.path}: {len(keys)} keys in column {column!r} of {columns.rows}"
        )
    return keys


class Parquet(Format):
    """Named columns, of element types that NumPy supports."""

    suffixes = (".parquet",)
    block_bytes = 16 << 20

    def holds(self, element: ElementType) -> bool:
        """Whether NumPy, and therefore Arrow, supports the type."""
        return not element.as_bits

    def open(self, path: Path, wanted: Wanted) -> Source:
        """Open a column of lists."""
        with unless_it_fails(Columns(open_input(path, wanted.memory))) as columns:
            described = {name: kind["text"] for name, kind in columns.kinds.items()}
            lists = {
                name: described[name]
                for name, k in columns.kinds.items()
                if _element(k) is not None
            }
            return _ParquetSource(columns, choose(path, wanted, lists, described))

    @contextlib.contextmanager
    def write(self, path: Path, content: Content) -> Iterator[Write]:
        """Write a column of lists, and a column of keys."""
        _need_pyarrow()
        import pyarrow.parquet

        element = pyarrow.field(
            "element", pyarrow.from_numpy_dtype(content.storage), nullable=False
        )
        fields = [pyarrow.field(content.field, pyarrow.list_(element, content.dim), nullable=False)]
        if content.keys is not None:
            kind = pyarrow.int64() if content.keys.integers else pyarrow.string()
            fields.insert(0, pyarrow.field(_KEY, kind, nullable=False))
        schema = pyarrow.schema(fields)

        def write(start: int, block: Array) -> None:
            values = pyarrow.array(block.reshape(-1))
            columns = [pyarrow.FixedSizeListArray.from_arrays(values, type=fields[-1].type)]
            if content.keys is not None:
                columns.insert(
                    0, pyarrow.array(content.keys.block(start, start + len(block)), kind)
                )
            writer.write_batch(pyarrow.record_batch(columns, schema=schema))

        options = {
            "compression": "zstd",
            "use_dictionary": False,
            # DuckDB reads it of the types of the specification's first version alone.
            "use_byte_stream_split": (
                [f"{content.field}.list.element"] if content.storage.itemsize > 2 else False
            ),
            "write_statistics": [_KEY] if content.keys is not None else False,
        }
        with (
            path.open("xb") as file,
            pyarrow.parquet.ParquetWriter(file, schema, **options) as writer,
        ):
            yield write

    def read_keys(self, path: Path, name: str | None, memory: Size) -> Keys:
        """Read a column of integers or strings, `key` if none is named."""
        column = _KEY if name is None else name
        with contextlib.closing(Columns(open_input(path, memory))) as columns:
            able = [name for name, kind in columns.kinds.items() if "key" in kind]
            if column not in able:
                raise FormatError(
                    f"{path}: no column {column!r} of integers or strings; such columns are {able}"
                )
            return _keys(columns, column)
