"""Columns of files that another library decodes, in a process of its own (`_columns_child`).

The rows of several files are joined.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import struct
import subprocess
import sys
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np

from tierstore._formats.base import Array, Content, Write
from tierstore._formats.files import InputFile, by_numbers, open_input, unless_it_fails
from tierstore._formats.keys import Integers, Keys, blob_to_strings
from tierstore._formats.reading import Column, ColumnFormat, Reader
from tierstore._keys.given import least
from tierstore._keys.strings import Strings
from tierstore.budget import Allowance, Size, format_bytes
from tierstore.errors import FormatError, MissingExtraError, StoreIOError

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


def need(kind: str) -> None:
    """Raise MissingExtraError if the library for files of a kind is not installed."""
    package, extra = ("h5py", "hdf5") if kind == "hdf5" else ("pyarrow", "parquet")
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(f"{kind} files need {package}: pip install 'tierstore[{extra}]'")


class Columns(Reader):
    """The columns of files of one kind, decoded in batches of rows by a separate process."""

    is_table = True

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
            self._describe()

    def _describe(self) -> None:
        """Learn the rows of each file, and the columns, which all of them must have."""
        self._rows: list[int | None] = []
        first: dict[str, dict[str, Any]] = {}
        for at, part in enumerate(self._parts):
            self.allowance.take(len(str(part)) + 100, "the names of its files")
            found, _ = self._ask(at, do="describe")
            self._rows.append(found["rows"])
            first = first or found["columns"]
            if found["columns"] != first:
                differ = [n for n, kind in first.items() if found["columns"].get(n) != kind]
                raise FormatError(
                    f"{self.path}: {part.name} has other columns than {self._parts[0].name}: "
                    f"{', '.join((differ or list(found['columns']))[:8])}"
                )
            for note in found["notes"]:
                if note not in self.notes:
                    self.notes += (note,)
        rows = None if None in self._rows else sum(filter(None, self._rows))
        self.columns = {
            name: Column(**{"rows": rows, "kind": "other", **kind}) for name, kind in first.items()
        }
        for name, each in self.columns.items():
            if rows == 0 and each.text == "null":  # of no values, nothing says the type
                self.columns[name] = replace(each, kind="text")

    def length(self, name: str) -> int | None:
        """Return the length of the lists of a column, from its type or the first list."""
        column = self.columns[name]
        if column.dim is not None or not column.rows:
            return column.dim
        first = next((at for at, rows in enumerate(self._rows) if rows), 0)
        return int(self._ask(first, do="length", column=name)[0]["length"])

    def blocks(self, names: Sequence[str], dim: int, block_rows: int) -> Iterator[Array]:
        """Yield rows of one column of lists, or of a column for each number."""
        for rows, number, (data,) in self._batches(names, block_rows, dim):
            block = np.frombuffer(data, number)
            if block.size != rows * dim:
                raise FormatError(f"{self.path}: rows of {block.size / rows:g} numbers, not {dim}")
            yield block.reshape(rows, dim)

    def keys(self, name: str) -> Keys:
        """Return a column of whole numbers or texts."""
        strings, blocks = Strings(), list[Integers]()
        for _, number, buffers in self._batches([name], _KEY_ROWS):
            if self.columns[name].kind == "integer":
                self.allowance.take(2 * len(buffers[0]), f"the integers in {name!r}")
                blocks.append(np.frombuffer(buffers[0], number))
            else:
                ends, text = np.frombuffer(buffers[0], number), buffers[1]
                blob_to_strings(self.path, text, ends, self.allowance, strings)
        if self.columns[name].kind == "integer":
            return least(np.concatenate(blocks)) if blocks else np.empty(0, np.int64)
        return strings

    def _batches(
        self, columns: Sequence[str], rows: int, dim: int = 0
    ) -> Iterator[tuple[int, str, list[bytes]]]:
        """Yield batches of at most `rows` rows: their number, the type of numbers, and buffers.

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
                yield found["rows"], found["number"], buffers

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


def in_order(paths: Iterator[Path]) -> list[Path]:
    """Return files sorted by name, with numbers in names by value: part-2 before part-10.

    Hidden files and those that begin with "_", such as markers of Spark, are left out.
    """
    named = [path for path in paths if path.name[0] not in "._"]
    return sorted(named, key=lambda path: by_numbers(path.name))


class ArrowFormat(ColumnFormat):
    """Named columns of Arrow, of element types that NumPy supports, in a file or a directory.

    Attributes:
        kind: the child's name of what reads the files.
    """

    kind: ClassVar[str]
    several = True
    names_key = True
    block_bytes = 16 << 20
    elements = "numpy"

    def claims(self, directory: Path) -> bool:
        """Whether there are files of the format."""
        return any(each.suffix in self.suffixes for each in directory.iterdir())

    def reader(self, path: Path, memory: Size) -> Columns:
        """Open the columns of a file, or of those in a directory."""
        parts = self.parts(path, memory) if path.is_dir() else [path]
        for part in parts:
            with open_input(part) as file:
                self.check(part, file)
        return Columns(self.kind, path, memory, parts)

    def parts(self, path: Path, memory: Size) -> list[Path]:
        """Return the files of a directory in the order of their rows; raises FormatError."""
        found = in_order(each for each in path.iterdir() if each.suffix in self.suffixes)
        if not found:
            raise FormatError(
                f"{path}: a directory that holds no {' or '.join(self.suffixes)} files itself"
            )
        return found

    @abstractmethod
    def check(self, path: Path, file: InputFile) -> None:
        """Raise FormatError for another file, before a process is started for it."""

    @abstractmethod
    def writer(self, file: IO[bytes], schema: Any, content: Content) -> Any:
        """Return what writes record batches of a schema to a file, as a context manager."""

    @contextlib.contextmanager
    def write(self, path: Path, content: Content) -> Iterator[Write]:
        """Write a column of lists for each field, and a column of keys."""
        need("arrow")
        schema = _schema(content)
        with path.open("xb") as file, self.writer(file, schema, content) as writer:
            yield lambda *given: writer.write_batch(_batch(content, schema, *given))


def _schema(content: Content) -> Any:
    """Return Arrow's schema of the written file: the column of keys, if any, and the fields."""
    import pyarrow

    element = pyarrow.field("element", pyarrow.from_numpy_dtype(content.storage), nullable=False)
    fields = [
        pyarrow.field(name, pyarrow.list_(element, dim), nullable=False)
        for name, dim in content.fields.items()
    ]
    if content.scale is not None:
        fields.append(pyarrow.field(content.scale, pyarrow.float32(), nullable=False))
    keys = content.keys
    if keys is not None:
        kind = pyarrow.from_numpy_dtype(keys.dtype) if keys.integers else pyarrow.string()
        fields.insert(0, pyarrow.field(content.key, kind, nullable=False))
    return pyarrow.schema(fields)


def _batch(content: Content, schema: Any, start: int, block: Array, *scales: Array) -> Any:
    """Return a block of rows, which starts at row `start`, as a record batch."""
    import pyarrow

    columns, first = [], 0
    for name, dim in content.fields.items():
        values = pyarrow.array(block[:, first : first + dim].reshape(-1))
        columns.append(pyarrow.FixedSizeListArray.from_arrays(values, type=schema.field(name).type))
        first += dim
    columns += [pyarrow.array(each[:, 0]) for each in scales]
    if content.keys is not None:
        keys = content.keys.block(start, start + len(block))
        columns.insert(0, pyarrow.array(keys, schema[0].type))
    return pyarrow.record_batch(columns, schema=schema)
