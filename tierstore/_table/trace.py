"""Traces: the rows that each batch used, written while a table is used, read to plan for it.

A file is the magic `TSTRACE1`, the rows of the table as u64, and for each batch the number of ids
as u64 and the ids as u32, or as u64 where the table has 2**32 rows or more; all little-endian.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tierstore._io.system import explained
from tierstore.errors import ExistsError, FormatError, StoreIOError, counted

MAGIC = b"TSTRACE1"
_HEAD = struct.Struct("<8sQ")
_COUNT = struct.Struct("<Q")
_BUFFER_BYTES = 1 << 20


def _id_type(rows: int) -> np.dtype[Any]:
    return np.dtype("<u4") if rows < 2**32 else np.dtype("<u8")


class Recording:
    """A trace that is being written; `Table.record` starts one. A context manager.

    Batches go through a buffer of 1 MiB. A recording that is not closed, because the process died,
    can be read up to its last whole batch. A full disk raises StoreFullError in the recorded call,
    and ends the recording with the batches in the file.

    Attributes:
        path: the file.
        batches, ids: numbers of recorded ones.
    """

    def __repr__(self) -> str:
        """Say what was recorded so far."""
        return f"Recording({str(self.path)!r}, {self.batches:,} batches, {self.ids:,} ids)"

    def __init__(self, path: str | os.PathLike[str], rows: int) -> None:
        """Create the file, which must not exist, for a table of `rows`. Raises ExistsError."""
        self.path: Path = Path(path)
        self.batches: int = 0
        self.ids: int = 0
        self._rows = rows
        self._type = _id_type(rows)
        self._lock = threading.Lock()
        self._whole = 0  # bytes of the file that are whole batches
        self._waiting = bytearray(_HEAD.pack(MAGIC, rows))
        try:
            self._file = open(path, "xb", buffering=0)  # noqa: SIM115
        except FileExistsError:
            raise ExistsError(f"{path} exists; choose another name", filename=path) from None
        except OSError as error:
            raise StoreIOError(f"cannot create {path}: {error.strerror}") from error
        try:
            self._write()
        except BaseException:
            self.path.unlink(missing_ok=True)
            raise

    @property
    def closed(self) -> bool:
        """Whether the recording has ended."""
        return self._file.closed

    def add(self, rows: npt.NDArray[np.int64]) -> bool:
        """Record a batch of ids in their order, without those outside the table.

        Returns False if the recording is closed.
        """
        rows = rows[(rows >= 0) & (rows < self._rows)]
        with self._lock:
            if self._file.closed:
                return False
            self._waiting += _COUNT.pack(rows.size)
            self._waiting += np.ascontiguousarray(rows, self._type).data
            self.batches += 1
            self.ids += rows.size
            if len(self._waiting) >= _BUFFER_BYTES:
                self._write()
        return True

    def _write(self) -> None:
        """Write waiting bytes; if that fails, end the file after a whole batch, and close it."""
        try:
            with explained("record to", str(self.path)):
                left = memoryview(self._waiting)
                while left:
                    left = left[self._file.write(left) or 0 :]
        except BaseException:
            with contextlib.suppress(OSError):
                self._file.truncate(self._whole)
            self._file.close()
            raise
        self._whole += len(self._waiting)
        self._waiting = bytearray()

    def close(self) -> None:
        """Write buffered batches and close the file; harmless when repeated."""
        with self._lock:
            if not self._file.closed:
                self._write()
                self._file.close()

    def __del__(self) -> None:
        """Close a dropped recording."""
        with contextlib.suppress(Exception):
            self.close()

    def __enter__(self) -> Self:
        """Return the recording itself."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Close the recording."""
        self.close()


def is_trace(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as a recorded trace does."""
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def trace_rows(path: str | os.PathLike[str]) -> int:
    """Return the rows of the table a trace was recorded from. Raises FormatError."""
    with open(path, "rb") as file:
        head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or not head.startswith(MAGIC):
        raise FormatError(f"{path} is not a recorded trace")
    return int(_HEAD.unpack(head)[1])


def read_trace(path: str | os.PathLike[str]) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the ids of each batch of a recorded trace, int64 `(n,)`; a torn last batch is left out.

    Raises FormatError for another kind of file, and for ids that its table does not have.
    """
    rows = trace_rows(path)
    size, kind = os.path.getsize(path), _id_type(rows)
    at = _HEAD.size
    with open(path, "rb") as file:
        file.seek(at)
        while at + _COUNT.size <= size:
            (count,) = _COUNT.unpack(file.read(_COUNT.size))
            at += _COUNT.size + count * kind.itemsize
            if at > size:
                return
            ids = np.frombuffer(file.read(count * kind.itemsize), kind).astype(np.int64)
            if count and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
                raise FormatError(
                    f"{path} names row {ids.max()} of a table of {counted(rows, 'row')}"
                )
            yield ids
