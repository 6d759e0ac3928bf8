"""The seam between files of vectors and everything that uses them.

A file of vectors is a matrix (rows, dim) of one element type, with a key beside each row or
without. A `Source` is such a file opened for reading, a `Writer` makes one, and a `Format` names
both for some suffixes. Nothing here knows a format, a table or a store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from tierstore.allowance import DEFAULT_MEMORY
from tierstore.budget import Size
from tierstore.errors import FormatError
from tierstore.formats.keys import KeyColumn, Keys
from tierstore.spec import DTYPES, MAX_RECORD_BYTES, MAX_ROWS, MAX_TABLE_BYTES

__all__ = ["Array", "Content", "Format", "Source", "Wanted", "Write", "Writer", "block_rows_for"]

Array = npt.NDArray[Any]

BLOCK_BYTES = 4 << 20
"""Bytes of a block where the caller does not say how many rows one has."""


def block_rows_for(row_bytes: int, block_bytes: int = BLOCK_BYTES) -> int:
    """Return how many rows of `row_bytes` make a block; one at least."""
    return max(1, block_bytes // max(1, row_bytes))


class Source(ABC):
    """A file of vectors, opened: `(rows, dim)` elements of `dtype`, read in blocks of rows.

    The file is never modified, and the memory taken is that of a block, plus the keys once they are
    asked for, within what was allowed. A context manager; `close` is harmless when repeated.

    Attributes:
        path: the file.
        rows: number of rows; 0 is possible.
        dim: elements of a row, at least 1.
        dtype: name of the element type, one of DTYPES.
    """

    def __init__(self, path: Path, rows: int, dim: int, dtype: str) -> None:
        """Check the numbers that the file claims before anything is allocated for them."""
        row_bytes = dim * DTYPES[dtype].itemsize
        if not (0 <= rows <= MAX_ROWS and dim >= 1 and row_bytes <= MAX_RECORD_BYTES):
            raise FormatError(
                f"{path}: {rows} rows of {dim} {dtype}; a table has at most {MAX_ROWS} rows of 1 "
                f"to {MAX_RECORD_BYTES // DTYPES[dtype].itemsize} elements"
            )
        if rows * row_bytes > MAX_TABLE_BYTES:
            raise FormatError(f"{path}: {rows * row_bytes} bytes; a table has at most 2**50")
        self.path = path
        self.rows = rows
        self.dim = dim
        self.dtype = dtype

    @property
    def keys(self) -> Keys | None:
        """The key of each row, int64 or str, or None where the file has none; read when first used.

        Raises FormatError.
        """
        return None

    def blocks(self, block_rows: int | None = None) -> Iterator[Array]:
        """Yield all rows in order, in blocks `(n, dim)`, n at most `block_rows`.

        Blocks are C-contiguous, of the stored NumPy dtype (bfloat16 as uint16), may be read-only,
        and stay valid. Each call starts at the first row. Raises FormatError where the file turns
        out not to hold what it claims.
        """
        size = block_rows or block_rows_for(self.dim * DTYPES[self.dtype].itemsize)
        found = 0
        for block in self._blocks(size):
            found += len(block)
            if found > self.rows:
                break
            if len(block):
                yield block
        if found != self.rows:
            raise self._wrong_count(found)

    def _wrong_count(self, found: int) -> FormatError:
        more = " or more" if found > self.rows else ""
        return FormatError(f"{self.path}: {found}{more} rows, but {self.rows} were expected")

    @abstractmethod
    def _blocks(self, block_rows: int) -> Iterator[Array]:
        """Yield the rows in blocks of at most `block_rows`; their number is checked by `blocks`."""

    @abstractmethod
    def close(self) -> None:
        """Close the file."""

    def __enter__(self) -> Self:
        """Return the source itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the source."""
        self.close()


@dataclass(frozen=True)
class Wanted:
    """What to read from a file.

    Attributes:
        name: the array, tensor or column, as given with the path; it must exist.
        field: the one preferred where no name is given and the file holds several.
        text_dtype: element type for formats that do not name one.
        memory: bytes that reading may take beside the blocks: for keys, headers, directories.
    """

    name: str | None = None
    field: str | None = None
    text_dtype: str = "float32"
    memory: Size = DEFAULT_MEMORY


@dataclass(frozen=True)
class Content:
    """What a writer is told before the first row.

    Attributes:
        rows, dim, dtype: of the matrix as the file will hold it.
        block_rows: rows of every block but the last, which may have fewer.
        field: name of the matrix, where the format gives it one.
        keys: the key of each row, or None.
        first_row: number of the first row, for formats that write one where there is no key.
    """

    rows: int
    dim: int
    dtype: str
    block_rows: int
    field: str
    keys: KeyColumn | None
    first_row: int

    @property
    def storage(self) -> np.dtype[Any]:
        """The NumPy dtype of one stored element."""
        return DTYPES[self.dtype]

    def words(self, start: int, stop: int) -> list[bytes]:
        """Return the keys of rows start..stop-1 in UTF-8, or their numbers."""
        if self.keys is None:
            return [b"%d" % row for row in range(self.first_row + start, self.first_row + stop)]
        return self.keys.bytes_block(start, stop)


Write = Callable[[int, Array], object]
"""Takes the number of a block's first row, from 0, and the block.

Blocks come in order, `(n, dim)` with n >= 1, C-contiguous and of the stored NumPy dtype.
"""

Writer = Callable[[Path, Content], AbstractContextManager[Write]]
"""Makes a file at a fresh path; it is complete when the context ends without an error."""

Reader = Callable[[Path, Wanted], Source]


@dataclass(frozen=True)
class Format:
    """One format: who reads it, who writes it and what it can hold.

    Attributes:
        suffixes: file name endings, lower case, with the dot.
        reader: opens a file, or None where the format is only written.
        writer: makes a file, or None where the format is only read.
        dtypes: element types that a written file can hold.
        keys: whether a file never, optionally or always has a key in each row.
        block_bytes: bytes of the blocks that the writer takes.
    """

    suffixes: Sequence[str]
    reader: Reader | None = None
    writer: Writer | None = None
    dtypes: Sequence[str] = ()
    keys: Literal["never", "optional", "always"] = "optional"
    block_bytes: int = BLOCK_BYTES
