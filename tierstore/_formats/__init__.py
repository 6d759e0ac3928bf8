"""Files of vectors: what other tools write and read, as blocks of rows.

Everything streams, in blocks of a few MiB. What a file claims is held against an allowance before
memory is taken for it, and no code that comes with a file is run. A file that is written appears
complete or not at all; whatever blocks a caller has, the writer of a format gets blocks of one size
and of the element type that the file holds.

A format is one module with one `Format` (base.py) a kind of file, found by its suffix. A module
with a leading underscore belongs to the format that imports it.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tierstore._dtypes import DEFAULT_DTYPE, ELEMENT_TYPES, check_dtype, convert, held_dtype
from tierstore._formats._encoding import is_packed
from tierstore._formats.base import (
    FORMATS,
    Array,
    Content,
    Format,
    Source,
    TextOptions,
    Wanted,
    Write,
    block_rows_for,
)
from tierstore._formats.keys import KeyColumn, Keys
from tierstore._io import publish, reach
from tierstore.budget import DEFAULT_MEMORY, Size
from tierstore.errors import (
    InvalidInputError,
    InvalidTypeError,
    StoreFullError,
    StoreIOError,
    TierStoreError,
)

__all__ = [
    "SINK_SUFFIXES",
    "SOURCE_SUFFIXES",
    "Keys",
    "Location",
    "Sink",
    "Source",
    "TextOptions",
    "format_of",
    "locate",
    "open_sink",
    "open_source",
    "read_keys",
    "split_name",
]

_RESERVED = frozenset({"key", "keys", "keys_offsets"})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def format_of(path: Path, *, write: bool = False) -> Format:
    """Return the format of a file by its suffix, in either case.

    Raises InvalidInputError, listing those that can be read or written.
    """
    suffix = format_suffix(path)
    known = [name for name, each in FORMATS.items() if each.is_written or not write]
    if suffix not in known or (write and is_packed(path)):
        verb = "written" if write else "read"
        raise InvalidInputError(
            f"{path}: files ending in {suffix!r} cannot be {verb}; use one of {' '.join(known)}"
        )
    return FORMATS[suffix]


def format_suffix(path: Path) -> str:
    """Return the suffix that names the format of a file, in lower case.

    That of a packed file in text is the last but one: `.csv` of `items.csv.gz`.
    """
    inner = Path(path.stem).suffix.lower()
    packed = is_packed(path) and inner in FORMATS and FORMATS[inner].is_text
    return inner if packed else path.suffix.lower()


def split_name(source: str | Path) -> tuple[Path, str | None]:
    """Split `FILE:NAME` into the file and the array, tensor or column in it.

    A file that exists under the whole text is meant by it, and so is one without a name.
    """
    text = str(source)
    colon = text.find(":")
    while colon >= 0 and not Path(text).exists():
        if format_suffix(Path(text[:colon])) in FORMATS:
            return Path(text[:colon]), text[colon + 1 :]
        colon = text.find(":", colon + 1)
    return Path(text), None


@dataclass(frozen=True)
class Location:
    """Where vectors are.

    Attributes:
        path: the file, with `:NAME` if it was given so; of a zarr store its name, whose suffix
            says the format.
        store: the zarr store, or None for a file.
    """

    path: Path
    store: Any = None


def locate(where: Any, *, write: bool = False) -> Location:
    """Return the location that a path, a URL or a zarr store stands for; a location as it is.

    Raises InvalidInputError for a URL of a format that is not read from stores.
    """
    if isinstance(where, Location):
        return where
    able = [suffix for suffix, each in FORMATS.items() if each.takes_stores]
    if isinstance(where, str) and "://" in where:
        if Path(where.rstrip("/")).suffix not in able:
            raise InvalidInputError(
                f"{where}: only {' '.join(able)} is read from and written to a URL"
            )
        where = reach(where, write=write)
    if isinstance(where, str | os.PathLike):
        return Location(Path(where))
    return Location(Path(f"{where}".rstrip("/").removesuffix(able[0]) + able[0]), where)


def open_source(
    path: Any,
    *,
    field: str | None = None,
    text_dtype: str = DEFAULT_DTYPE,
    memory: Size = DEFAULT_MEMORY,
    text: TextOptions | None = None,
) -> Source:
    """Open a file of vectors for reading, chosen by its suffix; see `Source` for what it gives.

    Args:
        path: the file, or `FILE:NAME` for an array, tensor or column of one that holds several; or
            a URL that fsspec knows, such as "s3://bucket/items.zarr", or a zarr store.
        field: the one to prefer where no name is given; a file that holds just one needs neither.
        text_dtype: the element type that formats in text, which name none, are read as.
        memory: bytes that reading may take beside a block of rows, such as 536870912 or "512MiB";
            what the file claims is held against it before it is believed.
        text: what the caller knows about a file in text.

    Raises:
        AmbiguousFileError: a file in text can be read in two ways, and `text` does not say which.
        FormatError: there is no such file, or it is damaged, or holds no such matrix, or what it
            holds takes more than `memory`.
        InvalidInputError: the suffix is unknown; the message lists the known ones. Or `text` is
            given for a file that is none.
        MissingExtraError: the format needs a package that is not installed.
    """
    found = locate(path)
    dtype = check_dtype(text_dtype)
    if found.store is not None:
        wanted = Wanted(None, field, dtype, memory)
        return format_of(found.path).open_store(found.store, found.path, wanted)
    file, name = split_name(found.path)
    format_ = format_of(file)
    if text not in (None, TextOptions()) and not format_.is_text:
        raise InvalidInputError(f"{file}: is no text, so that header, sep, … say nothing about it")
    return format_.open(file, Wanted(name, field, dtype, memory, text or TextOptions()))


def read_keys(path: str | Path, *, memory: Size = DEFAULT_MEMORY) -> Keys:
    """Return the keys in a file of keys, in order: an int64 array or a list of strings.

    `.txt` has one key a line, in UTF-8; if all are whole numbers they are int64. `.npy` is a 1-D
    array of integers or of fixed-width strings. `FILE.parquet:COLUMN` is a column of either, `key`
    if none is named. Raises FormatError for a file that is none of these or whose keys take more
    than `memory` bytes, InvalidInputError for another suffix.
    """
    file, name = split_name(path)
    able = [suffix for suffix, each in FORMATS.items() if each.holds_keys_alone]
    if format_suffix(file) not in able:
        raise InvalidInputError(f"{path}: keys are read from {' '.join(able)} files")
    return format_of(file).read_keys(file, name, memory)


class Sink:
    """Takes all rows of a matrix in order, in blocks of any size.

    Attributes:
        path: the file to come.
        rows, dim: shape of the matrix.
        dtype: element type of the file; the blocks may have another one.
        rows_written: rows taken so far.
    """

    def __init__(self, path: Path, content: Content, block_dtype: str, write: Write) -> None:
        """Send blocks of `block_dtype` on to `write`."""
        self.path = path
        self.rows = content.rows
        self.dim = content.dim
        self.dtype = content.dtype
        self.rows_written = 0
        self._block_dtype = block_dtype
        self._write = write
        self._buffer = np.empty(
            (min(content.block_rows, content.rows), content.dim), content.storage
        )
        self._held = 0

    def write(self, block: Array) -> None:
        """Take rows `(n, dim)` of the stored NumPy dtype, which are copied or written at once.

        Raises InvalidInputError if the shape does not fit or there are more rows than announced,
        InvalidTypeError for another dtype.
        """
        stored = ELEMENT_TYPES[self._block_dtype].stored
        if block.dtype != stored:
            raise InvalidTypeError(f"a block is {block.dtype}, but {stored} was announced")
        if block.ndim != 2 or block.shape[1] != self.dim:
            raise InvalidInputError(f"a block is {block.shape}; need (n, {self.dim})")
        if self.rows_written + len(block) > self.rows:
            raise InvalidInputError(
                f"{self.rows_written + len(block)} rows, but {self.rows} were announced"
            )
        block = np.ascontiguousarray(convert(block, self._block_dtype, self.dtype))
        while len(block):
            taken = self._take(block)
            self.rows_written += taken
            block = block[taken:]

    def _take(self, block: Array) -> int:
        """Write or hold the first rows of `block`; return how many."""
        size = len(self._buffer)
        if self._held == 0 and len(block) >= size:
            self._write(self.rows_written, block[:size])
            return size
        taken = min(size - self._held, len(block))
        self._buffer[self._held : self._held + taken] = block[:taken]
        self._held += taken
        if self._held == size:
            self._write(self.rows_written + taken - size, self._buffer)
            self._held = 0
        return taken

    def finish(self) -> None:
        """Write what is held; raises InvalidInputError if rows are missing."""
        if self.rows_written != self.rows:
            raise InvalidInputError(
                f"{self.path}: {self.rows_written} rows were written, but {self.rows} announced"
            )
        if self._held:
            self._write(self.rows_written - self._held, self._buffer[: self._held])
            self._held = 0


def open_sink(
    path: Any,
    *,
    rows: int,
    dim: int,
    dtype: str,
    field: str = "weight",
    keys: Any = None,
    first_row: int = 0,
    force: bool = False,
) -> contextlib.AbstractContextManager[Sink]:
    """Open a file of vectors for writing, chosen by its suffix, as a context manager.

    The file appears under its name, synced, when the context ends with all rows written; after any
    error nothing is left.

    Args:
        path: the file; `.zarr` makes a directory. Or a zarr store: what is written there appears
            at once, and is refused by readers until it is complete.
        rows: rows of the whole matrix; 0 is possible.
        dim: elements of a row.
        dtype: element type of the blocks. Where a format cannot hold it, the narrowest type that
            holds its values exactly is written; if there is none it is refused.
        field: name of the matrix, where the format gives it one.
        keys: one for each row, integers or strings, in a sequence that is only sliced; or None.
        first_row: number of the first row. Formats that need a word in each row count from it if
            there are no keys.
        force: replace an existing file.

    Raises:
        ExistsError: the file exists, or is a link or a directory.
        InvalidInputError: the suffix is unknown, or the format cannot hold the keys or the dtype.
        MissingExtraError: the format needs a package that is not installed.
        StoreFullError, StoreIOError: the file system failed.
    """
    target = locate(path, write=True)
    format_ = format_of(target.path, write=True)
    content = _content(format_, target.path, rows, dim, check_dtype(dtype), field, keys, first_row)
    return _sink(format_, target, content, dtype, force=force)


@contextlib.contextmanager
def _sink(
    format_: Format, target: Location, content: Content, dtype: str, *, force: bool
) -> Iterator[Sink]:
    """Write to a location, and publish what is complete."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_explained(target.path))
        if target.store is None:
            partial = stack.enter_context(publish(target.path, force=force))
            write = stack.enter_context(format_.write(partial, content))
        else:
            write = stack.enter_context(
                format_.write_store(target.store, target.path, content, force=force)
            )
        sink = Sink(target.path, content, dtype, write)
        yield sink
        sink.finish()


def _content(
    format_: Format,
    path: Path,
    rows: int,
    dim: int,
    dtype: str,
    field: str,
    keys: Any,
    first_row: int,
) -> Content:
    """Check what is to be written against what the format holds."""
    if keys is not None and format_.keys == "never":
        able = [name for name, each in FORMATS.items() if each.is_written and each.keys != "never"]
        raise InvalidInputError(
            f"{path}: {path.suffix} files hold no keys; choose one of {' '.join(able)}, or leave "
            "the keys out"
        )
    if keys is not None and field in _RESERVED:
        raise InvalidInputError(f"a field named {field!r} cannot be written together with keys")
    if rows < 0 or dim < 1:
        raise InvalidInputError(f"a matrix has 0 or more rows of 1 or more, not {rows} of {dim}")
    able = [name for name, each in ELEMENT_TYPES.items() if format_.holds(each)]
    held = held_dtype(dtype, able, f"{path}: {path.suffix}")
    row_bytes = dim * ELEMENT_TYPES[held].stored.itemsize
    return Content(
        rows=rows,
        dim=dim,
        dtype=held,
        block_rows=block_rows_for(row_bytes, format_.block_bytes),
        field=field,
        keys=None if keys is None else KeyColumn(keys, rows),
        first_row=first_row,
    )


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn an OSError of a writer into the error a user can act on."""
    try:
        yield
    except TierStoreError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        kind: type[OSError] = StoreFullError if error.errno in _FULL else StoreIOError
        failure = kind(f"cannot write {path}: {reason}; nothing was left behind")
        failure.errno = error.errno
        raise failure from error


SOURCE_SUFFIXES = tuple(FORMATS)
"""Endings of files that can be read."""

SINK_SUFFIXES = tuple(suffix for suffix, each in FORMATS.items() if each.is_written)
"""Endings of files that can be written."""
