"""Rows on their way into a file that appears complete or not at all.

Whatever blocks a caller has, the writer of a format sees blocks of one size and of the element
type that the file holds. What the format looks like is the writer's business.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tierstore._dtypes import check_dtype, convert, held_dtype
from tierstore._formats import zarr
from tierstore._formats.base import (
    Array,
    Content,
    Format,
    Write,
    block_rows_for,
)
from tierstore._formats.keys import KeyColumn
from tierstore._io import publish
from tierstore.errors import (
    InvalidInputError,
    InvalidTypeError,
    StoreFullError,
    StoreIOError,
    TierStoreError,
)
from tierstore.spec import DTYPES

__all__ = ["Sink", "open_sink_of"]

_RESERVED = frozenset({"key", "keys", "keys_offsets"})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


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
        if block.dtype != DTYPES[self._block_dtype]:
            raise InvalidTypeError(
                f"a block is {block.dtype}, but {DTYPES[self._block_dtype]} was announced"
            )
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


@contextlib.contextmanager
def open_sink_of(
    format_: Format,
    path: Path,
    *,
    rows: int,
    dim: int,
    dtype: str,
    field: str,
    keys: Any,
    first_row: int,
    force: bool,
    store: Any = None,
) -> Iterator[Sink]:
    """Open a sink for one format; the arguments are those of `open_sink`.

    Where a zarr `store` is given, it is written to, and `path` is for messages.
    """
    suffix = format_.suffixes[0]
    if format_.writer is None:
        raise InvalidInputError(f"{path}: {suffix} files are read, not written")
    if keys is not None and format_.keys == "never":
        raise InvalidInputError(
            f"{path}: {suffix} files hold no keys; choose .npz, .safetensors, .parquet, .zarr, "
            ".vec, .bin or .tsv, or leave the keys out"
        )
    if keys is not None and field in _RESERVED:
        raise InvalidInputError(f"a field named {field!r} cannot be written together with keys")
    if rows < 0 or dim < 1:
        raise InvalidInputError(f"a matrix has 0 or more rows of 1 or more, not {rows} of {dim}")
    check_dtype(dtype)
    held = held_dtype(dtype, format_.dtypes, f"{path}: {suffix}")
    content = Content(
        rows=rows,
        dim=dim,
        dtype=held,
        block_rows=block_rows_for(dim * DTYPES[held].itemsize, format_.block_bytes),
        field=field,
        keys=None if keys is None else KeyColumn(keys, rows),
        first_row=first_row,
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(_explained(path))
        if store is None:
            partial = stack.enter_context(publish(path, force=force))
            write = stack.enter_context(format_.writer(partial, content))
        else:
            write = stack.enter_context(zarr.new_group(store, path, content, force=force))
        sink = Sink(path, content, dtype, write)
        yield sink
        sink.finish()


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
