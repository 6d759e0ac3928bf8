"""What a file format promises: a source of blocks of rows, or a sink for them."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from tierstore import _bfloat16
from tierstore._allowance import DEFAULT_MEMORY
from tierstore._formats.files import InputFile
from tierstore._formats.keys import KeyColumn, Keys
from tierstore.budget import Size
from tierstore.errors import FormatError, InvalidInputError, OverflowedValuesWarning
from tierstore.spec import DTYPES, MAX_RECORD_BYTES, MAX_ROWS, MAX_TABLE_BYTES

__all__ = [
    "Array",
    "Content",
    "Converter",
    "Format",
    "Source",
    "SpanSource",
    "Wanted",
    "Write",
    "Writer",
    "block_rows_for",
    "choose",
    "convert",
    "held_dtype",
]


Array = npt.NDArray[Any]


def convert(block: Array, source: str, target: str) -> Array:
    """Return a block stored as `source` stored as `target`: rounded to nearest, ties to even.

    The block itself, not a copy, where nothing changes. Values beyond the range of the target
    become infinite.
    """
    if source == target:
        return block
    values = _floats(block, source)
    if target == "bfloat16":
        with np.errstate(over="ignore"):
            return _bfloat16.from_float32(values)
    with np.errstate(over="ignore"):
        return values.astype(DTYPES[target], copy=False)


def held_dtype(dtype: str, holds: Sequence[str], what: str) -> str:
    """Return the element type that a file which `holds` these has for values of `dtype`.

    That is `dtype` itself or, for the two half precisions, float32, which holds them exactly.
    Raises InvalidInputError where precision would be lost unasked.
    """
    if dtype in holds:
        return dtype
    if dtype in ("float16", "bfloat16") and "float32" in holds:
        return "float32"
    raise InvalidInputError(
        f"{what} cannot hold {dtype}; convert to one of {', '.join(holds)} (--dtype)"
    )


class Converter:
    """Converts blocks of one stored type to another and counts what overflows.

    Attributes:
        overflowed: finite values so far that became infinite.
    """

    def __init__(self, source: str, target: str) -> None:
        """Convert from `source` to `target`."""
        self._source = source
        self._target = target
        self.overflowed = 0

    def __call__(self, block: Array) -> Array:
        """Return the block stored as the target; itself, not a copy, where nothing changes."""
        converted = convert(block, self._source, self._target)
        if converted is not block:
            after = int(np.isinf(_floats(converted, self._target)).sum())
            if after:
                self.overflowed += after - int(np.isinf(_floats(block, self._source)).sum())
        return converted

    def warn(self, what: str) -> None:
        """Warn the caller's caller if anything overflowed."""
        if self.overflowed:
            warnings.warn(
                f"{self.overflowed} values of {what} are too large for {self._target} and became "
                "infinite",
                OverflowedValuesWarning,
                stacklevel=3,
            )


def _floats(block: Array, dtype: str) -> Array:
    """Return a stored block as floats: bfloat16 widened, others as they are."""
    return _bfloat16.to_float32(block) if dtype == "bfloat16" else block


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


class SpanSource(Source):
    """A matrix whose elements fill a span of a file row by row, in either byte order."""

    def __init__(
        self,
        file: InputFile,
        rows: int,
        dim: int,
        dtype: str,
        *,
        offset: int,
        big_endian: bool = False,
    ) -> None:
        """Read `file`, which the source closes, from byte `offset` on."""
        super().__init__(file.path, rows, dim, dtype)
        self._file = file
        self._offset = offset
        self._stored = DTYPES[dtype].newbyteorder(">") if big_endian else DTYPES[dtype]

    def _blocks(self, block_rows: int) -> Iterator[Array]:
        for start in range(0, self.rows, block_rows):
            yield self._block(start, min(block_rows, self.rows - start))

    def _block(self, start: int, count: int) -> Array:
        return self._elements(start * self.dim, count * self.dim).reshape(count, self.dim)

    def _elements(self, first: int, count: int) -> npt.NDArray[Any]:
        """Return `count` elements of the span, from number `first`, in native byte order."""
        size = self._stored.itemsize
        data = self._file.read_at(self._offset + first * size, count * size)
        return np.frombuffer(data, self._stored).astype(DTYPES[self.dtype], copy=False)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


_LISTED = 8


def choose(
    path: Path, wanted: Wanted, matrices: Mapping[str, object], others: Mapping[str, object]
) -> str:
    """Return the name of the matrix to read: the one named, the one preferred, or the only one.

    `matrices` are those that could be read and `others` what else is in the file; both map a name
    to something whose string describes it. Raises FormatError, listing what there is.
    """
    name = wanted.name if wanted.name is not None else wanted.field
    if name is not None and name in matrices:
        return name
    if name is not None and name in others:
        raise FormatError(f"{path}: {name!r} is {others[name]}; need floats of shape (rows, dim)")
    if wanted.name is None and len(matrices) == 1:
        return next(iter(matrices))

    if not matrices:
        raise FormatError(
            f"{path}: holds no floats of shape (rows, dim), only {_listed(others) or 'nothing'}"
        )
    if wanted.name is not None:
        raise FormatError(f"{path}: holds no {wanted.name!r}, but {_listed(matrices)}")
    raise FormatError(
        f"{path}: holds {len(matrices)} matrices: {_listed(matrices)}; "
        f"name one, as in {path.name}:{next(iter(matrices))}"
    )


def _listed(entries: Mapping[str, object]) -> str:
    shown = [f"{name!r} {entry}" for name, entry in list(entries.items())[:_LISTED]]
    if len(entries) > _LISTED:
        shown.append(f"{len(entries) - _LISTED} more")
    return ", ".join(shown)
