"""The interface of file formats, which read and write blocks of rows."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from tierstore._closing import Closing
from tierstore._dtypes import DEFAULT_DTYPE, ELEMENT_TYPES, ElementType
from tierstore._formats.files import InputFile, open_input, taken_by, unless_it_fails
from tierstore._formats.keys import KeyColumn, Keys
from tierstore._registry import Registry
from tierstore.budget import DEFAULT_MEMORY, Size
from tierstore.errors import FormatError, InvalidInputError
from tierstore.spec import MAX_RECORD_BYTES, MAX_ROWS, MAX_TABLE_BYTES

Array = npt.NDArray[Any]

_WHOLE = re.compile(r"u?int(8|16|32|64)")
BLOCK_BYTES = 4 << 20
"""Default size of a block in bytes."""


def block_rows_for(row_bytes: int, block_bytes: int = BLOCK_BYTES) -> int:
    """Return the number of rows of `row_bytes` per block, at least one."""
    return max(1, block_bytes // max(1, row_bytes))


def element_of(number: object) -> str | None:
    """Return the element type in which a NumPy type, by name, is read, or None.

    Whole numbers are read as the narrowest type that holds all of theirs, those of 64 bits as
    float64; see `exactly`.
    """
    whole = _WHOLE.fullmatch(str(number))
    if whole is not None:
        return DEFAULT_DTYPE if whole[1] in ("8", "16") else "float64"
    element = ELEMENT_TYPES.get(str(number))
    return None if element is None or element.as_bits else element.name


def exactly(path: Path, values: Array, dtype: str) -> Array:
    """Return numbers of a file as an element type; raises FormatError for what it does not hold."""
    if values.dtype.kind in "iu" and values.itemsize == 8:
        beyond = values[(values > 2**53) | (values < -(2**53))]
        if beyond.size:
            raise FormatError(
                f"{path}: whole numbers such as {beyond[0]}, beyond 2**53, which no float holds; "
                "save them as floats, rounded, or as keys"
            )
    return values.astype(ELEMENT_TYPES[dtype].stored, copy=False)


@dataclass(frozen=True)
class StoredRows:
    """Files in which the rows of a matrix are as a table stores them, one after the other.

    Attributes:
        dtype: name of the element type.
        files: the files, in order.
        offset: the byte of the file at which the first row begins; 0 if there are several.
        rows_per_file: rows of each file, which fill whole pages if there are several.
    """

    dtype: str
    files: tuple[Path, ...]
    offset: int
    rows_per_file: int


@dataclass(frozen=True)
class StoredChunks:
    """Chunks of whole rows, each decoded alone.

    Attributes:
        dtype: name of the element type.
        files: for each chunk the files it is in, which may be missing.
        rows_per_chunk: rows of every chunk except the last, which may have fewer.
        decode: returns the rows of a chunk by its number, as a table stores them.
    """

    dtype: str
    files: tuple[tuple[Path, ...], ...]
    rows_per_chunk: int
    decode: Callable[[int], Array]


@dataclass(frozen=True)
class StoredParts:
    """Ranges of rows, each stored for itself.

    Attributes:
        dtype: name of the element type.
        parts: where the rows of each range are.
        rows: how many each has.
    """

    dtype: str
    parts: tuple[Stored, ...]
    rows: tuple[int, ...]


Stored = StoredRows | StoredChunks | StoredParts
"""Where rows can be read at random."""


class Source(Closing):
    """An open file of vectors: `(rows, dim)` elements of `dtype`, read in blocks of rows.

    The file is never modified. Reading needs memory for a block and, once they are read, for the
    keys, within the allowance.

    Attributes:
        path: the file.
        rows: number of rows, may be 0.
        dim: number of elements per row, at least 1.
        dtype: name of the element type.
        overflowed: values that the last pass over the rows found too large for `dtype`.
        read_as: what was decided about a file in text, for people; or None.
        notes: what the file holds and is not read, a sentence each.
        scales: names of arrays in the file that may be scales of its 8-bit elements.
        filled: which rows read as a value that the file does not hold, a sentence each of `notes`.
        numbering: what in each row is its number from 0, for people, so that `keys` is None; or
            None. It is known when the keys are read.
    """

    overflowed = 0
    read_as: str | None = None
    notes: tuple[str, ...] = ()
    numbering: str | None = None
    scales: tuple[str, ...] = ()
    filled: tuple[str, ...] = ()

    def __init__(self, path: Path, rows: int, dim: int, dtype: str) -> None:
        """Validate the sizes that the file claims before memory is allocated for them."""
        row_bytes = dim * ELEMENT_TYPES[dtype].stored.itemsize
        if not (0 <= rows <= MAX_ROWS and dim >= 1 and row_bytes <= MAX_RECORD_BYTES):
            raise FormatError(
                f"{path}: {rows} rows of {dim} {dtype}; a table has at most {MAX_ROWS} rows of 1 "
                f"to {MAX_RECORD_BYTES // ELEMENT_TYPES[dtype].stored.itemsize} elements"
            )
        if rows * row_bytes > MAX_TABLE_BYTES:
            raise FormatError(f"{path}: {rows * row_bytes} bytes; a table has at most 2**50")
        self.path = path
        self.rows = rows
        self.dim = dim
        self.dtype = dtype

    @property
    def keys(self) -> Keys | None:
        """The key of each row, or None if the file has none; read on first use.

        Keys are int64, uint64 if one needs that, or str. Raises FormatError.
        """
        return None

    def stored(self) -> Stored | None:
        """Return where rows can be read at random; None if the file must be read in order."""
        return None

    def held_bytes(self, enough: int) -> int:
        """Return the bytes on the disk that the rows are read from, or some number >= `enough`."""
        return taken_by(self.path, enough)

    def blocks(self, block_rows: int | None = None) -> Iterator[Array]:
        """Yield all rows in order, in blocks `(n, dim)`, n at most `block_rows`.

        Blocks are C-contiguous arrays of the stored NumPy dtype. They may be read-only, and stay
        valid. Each call starts at the first row. Raises FormatError if the contents do not match
        what the file claims.
        """
        size = block_rows or block_rows_for(self.dim * ELEMENT_TYPES[self.dtype].stored.itemsize)
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
        """Yield the rows in blocks of at most `block_rows`; `blocks` checks their number."""


class FileSource(Source):
    """Rows in one file, which the source closes."""

    def __init__(self, file: InputFile, rows: int, dim: int, dtype: str) -> None:
        """Read `file`; raises FormatError for sizes that no table has."""
        self._file = file
        super().__init__(file.path, rows, dim, dtype)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class SelectedSource(Source):
    """Some of the rows of a source, in its order."""

    def __init__(self, source: Source, chosen: npt.NDArray[np.bool_]) -> None:
        """Take the rows of `source` where `chosen`, one bool for each, is true."""
        super().__init__(source.path, int(chosen.sum()), source.dim, source.dtype)
        self._source = source
        self._chosen = chosen

    def _blocks(self, block_rows: int) -> Iterator[Array]:
        start = 0
        for block in self._source.blocks(block_rows):
            yield block[self._chosen[start : start + len(block)]]
            start += len(block)

    def close(self) -> None:
        """Close the source."""
        self._source.close()


@dataclass(frozen=True)
class TextOptions:
    """Options for a text file; None leaves the decision to its contents.

    Attributes:
        header: whether the first line names the columns.
        key_column: the column of keys, its name or its number from 1; False if there is none. Of
            other files with columns or arrays, too.
        sep: what is between cells, one character; a blank is any run of blanks and tabs.
        decimal: what is before the decimals of a number.
        null: texts that mean NaN.
        vector: the columns of numbers, names or numbers from 1, and ranges of them: "x0..x7"; or
            these between commas; () for those that the file says. Of other files that have columns,
            too.
        skip_lines: lines to leave out at the start of the file.
        comment: what lines that are left out begin with, one character.
        errors: "strict", or "replace" for keys with � in place of bytes that are no UTF-8. Of
            word2vec's binary files, too.
    """

    header: bool | None = None
    key_column: str | int | Literal[False] | None = None
    sep: str | None = None
    decimal: str | None = None
    null: Sequence[str] = ()
    vector: Sequence[str | int] = ()
    skip_lines: int = 0
    comment: str | None = None
    errors: str = "strict"

    def __post_init__(self) -> None:
        """Refuse options with which no file can be read."""
        vector = self.vector.split(",") if self.vector and isinstance(self.vector, str) else ()
        object.__setattr__(self, "vector", tuple(vector or self.vector))
        object.__setattr__(self, "null", tuple(self.null))
        if self.header not in (None, True, False):
            raise InvalidInputError(f"header is True, False or None, not {self.header!r}")
        if self.key_column is True or not isinstance(self.key_column, str | int | None):
            raise InvalidInputError(
                f"key_column is a name, a number from 1, False or None, not {self.key_column!r}"
            )
        if self.sep is not None and (len(self.sep) != 1 or self.sep in '\r\n".' or self.sep > "~"):
            raise InvalidInputError(
                f"sep is one character of ASCII, such as ',' or ';', not {self.sep!r}"
            )
        if self.decimal not in (None, ".", ",") or (self.decimal and self.decimal == self.sep):
            raise InvalidInputError(f"decimal is '.' or ',' and not sep, not {self.decimal!r}")
        if self.errors not in ("strict", "replace"):
            raise InvalidInputError(f"errors is 'strict' or 'replace', not {self.errors!r}")
        if self.skip_lines < 0:
            raise InvalidInputError(f"skip_lines is a number of lines, not {self.skip_lines!r}")
        if self.comment is not None and (len(self.comment) != 1 or not "!" <= self.comment <= "~"):
            raise InvalidInputError(f"comment is one character of ASCII, not {self.comment!r}")


@dataclass(frozen=True)
class Wanted:
    """The request for reading a file.

    Attributes:
        name: the array, tensor or column given with the path, which must exist.
        field: the preferred array if no name is given and the file contains several.
        text_dtype: element type for formats that do not specify one.
        memory: limit in bytes for keys, headers and directories, in addition to blocks.
        text: options for a text file.
        dim: the elements of a row, for files that say it in their rows alone and have none.
        beside: names that others read from the same file, of which `field` then names one.
    """

    name: str | None = None
    field: str | None = None
    text_dtype: str = DEFAULT_DTYPE
    memory: Size = DEFAULT_MEMORY
    text: TextOptions = TextOptions()
    dim: int | None = None
    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class Content:
    """The description of the matrix that a writer gets before the first row.

    Attributes:
        rows, dim, dtype: shape and element type of the matrix in the file.
        block_rows: rows of every block except the last, which may have fewer.
        fields: name of the matrix and `dim`; formats with `several` may get more, side by side in
            the blocks, each with its number of columns.
        keys: the key of each row, or None.
        first_row: number of the first row, for formats that write row numbers in place of keys.
        header: whether text begins with a line of names, or of counts.
        key: name of the column of keys, if the format `names_key`.
        scale: name of the scales, one for each row of elements of 8 bits; None if they have none.
    """

    rows: int
    dim: int
    dtype: str
    block_rows: int
    fields: Mapping[str, int]
    keys: KeyColumn | None
    first_row: int
    header: bool = True
    key: str = "key"
    scale: str | None = None

    @property
    def field(self) -> str:
        """Name of the matrix, if the format has names; of several, the first."""
        return next(iter(self.fields))

    @property
    def storage(self) -> np.dtype[Any]:
        """The NumPy dtype of one stored element."""
        return ELEMENT_TYPES[self.dtype].stored

    def words(self, start: int, stop: int) -> list[bytes]:
        """Return the keys of rows start..stop-1 in UTF-8, or the row numbers."""
        if self.keys is None:
            return [b"%d" % row for row in range(self.first_row + start, self.first_row + stop)]
        return self.keys.bytes_block(start, stop)


Write = Callable[..., object]
"""Called with the number of a block's first row, from 0, and the block.

Blocks are in order, `(n, dim)` with n >= 1, C-contiguous and of the stored NumPy dtype. Of a file
with scales, those of the block follow, float32 `(n, 1)`.
"""


class Format(ABC):
    """A file format, selected by the suffix of a file; each is a subclass in this package.

    Attributes:
        suffixes: lower-case suffixes of file names, including the dot.
        keys: whether written files never, optionally or always have keys.
        block_bytes: size of the blocks that `write` gets.
        takes_stores: whether the format supports zarr stores in addition to paths.
        is_directory: whether what is written is a directory; others are streams of bytes.
        is_text: whether files are text: read with `TextOptions`, and packed ones too.
        has_words: whether files that are no text hold words, of which `errors` says how to read
            those that are no UTF-8.
        has_columns: whether files have named columns, of which `key_column` selects the keys.
        several: whether a written file can hold several matrices.
        names_key: whether a written file has a column of keys of any name.
        holds_scales: whether a written file can have an array of scales beside the matrix.
        elements: the types that a written file can hold: all, those of NumPy, those that text can
            be read as, or one by its name.
    """

    suffixes: ClassVar[tuple[str, ...]] = ()
    keys: ClassVar[Literal["never", "optional", "always"]] = "optional"
    block_bytes: ClassVar[int] = BLOCK_BYTES
    takes_stores: ClassVar[bool] = False
    is_directory: ClassVar[bool] = False
    is_text: ClassVar[bool] = False
    has_columns: ClassVar[bool] = False
    has_words: ClassVar[bool] = False
    several: ClassVar[bool] = False
    names_key: ClassVar[bool] = False
    holds_scales: ClassVar[bool] = False
    elements: ClassVar[str] = "all"

    def __init_subclass__(cls) -> None:
        """Register the format under its suffixes."""
        for suffix in cls.suffixes:
            FORMATS.add(suffix, cls())

    @property
    def is_written(self) -> bool:
        """Whether files can also be written."""
        return type(self).write is not Format.write

    @property
    def holds_keys_alone(self) -> bool:
        """Whether a file may contain only keys."""
        return type(self).read_keys is not Format.read_keys

    def holds(self, element: ElementType) -> bool:
        """Whether a written file can hold elements of a type."""
        if self.elements == "text":
            return element.accepts(DEFAULT_DTYPE)
        if self.elements == "numpy":
            return not element.as_bits
        return self.elements in ("all", element.name)

    def claims(self, directory: Path) -> bool:
        """Whether a directory of any name holds files of this format."""
        return False

    def wrote(self, directory: Path) -> bool:
        """Whether a directory looks like one that `write` made, and may be replaced by another."""
        return False

    @abstractmethod
    def open(self, path: Path, wanted: Wanted) -> Source:
        """Open a file for reading; raises FormatError."""

    def write(self, path: Path, content: Content) -> AbstractContextManager[Write]:
        """Create a file at a new path; it is complete when the context ends without an error.

        Only if `is_written`. Unless `is_directory`, `path` may be a `RemoteFile` or `PackedFile`,
        which can only be opened.
        """
        raise NotImplementedError

    def read_keys(self, path: Path, name: str | None, memory: Size) -> Keys:
        """Read a file that contains only keys, from the column `name` if it has several.

        Only if `holds_keys_alone`. Raises FormatError.
        """
        raise NotImplementedError

    def open_store(self, store: Any, path: Path, wanted: Wanted) -> Source:
        """Open a zarr store for reading, if `takes_stores`; `path` is for messages."""
        raise NotImplementedError

    def write_store(
        self, store: Any, path: Path, content: Content, *, force: bool
    ) -> AbstractContextManager[Write]:
        """Write to a zarr store, if `takes_stores`; `path` is for messages.

        Raises ExistsError if the store is not empty, unless `force` is set.
        """
        raise NotImplementedError


class MatrixFormat(Format):
    """A format whose files hold one matrix, or one column of keys, without a name.

    Attributes:
        names: what may be given as a name nevertheless: the type of elements.
    """

    names: ClassVar[Collection[str]] = ()

    @abstractmethod
    def matrix(self, file: InputFile, wanted: Wanted) -> Source:
        """Return the rows of an open file, which the caller closes if this raises FormatError."""

    def keys_in(self, file: InputFile) -> Keys:
        """Return the keys of an open file that contains only keys, or raise FormatError."""
        raise NotImplementedError

    @property
    def holds_keys_alone(self) -> bool:
        """Whether a file may contain only keys."""
        return type(self).keys_in is not MatrixFormat.keys_in

    def open(self, path: Path, wanted: Wanted) -> Source:
        """Open the matrix."""
        self._reject(path, None if wanted.name in self.names else wanted.name)
        with unless_it_fails(open_input(path, wanted.memory)) as file:
            return self.matrix(file, wanted)

    def read_keys(self, path: Path, name: str | None, memory: Size) -> Keys:
        """Read the keys, a line or an entry each."""
        self._reject(path, name)
        with open_input(path, memory) as file:
            return self.keys_in(file)

    def _reject(self, path: Path, name: str | None) -> None:
        if name is not None:
            raise InvalidInputError(
                f"{path}:{name}: {path.name} holds one matrix or column of keys, without a name; "
                f"leave :{name} out"
            )


FORMATS: Registry[Format] = Registry("suffix of a file of vectors", "tierstore._formats")
"""The formats by suffix."""


class SpanSource(FileSource):
    """A matrix stored row by row in a span of a file.

    Attributes:
        offset: the byte of the file at which the span begins.
    """

    def __init__(
        self,
        file: InputFile,
        rows: int,
        dim: int,
        dtype: str,
        *,
        offset: int,
        stored: np.dtype[Any] | None = None,
    ) -> None:
        """Read `file`, which the source closes, from byte `offset` on.

        Elements are `stored` in the file, by default as in tables.
        """
        super().__init__(file, rows, dim, dtype)
        self.offset = offset
        self._stored = ELEMENT_TYPES[dtype].stored if stored is None else stored

    def stored(self) -> StoredRows | None:
        """Return the span, if it holds the rows as a table stores them."""
        dtype = self.dtype
        if self._stored != ELEMENT_TYPES[dtype].stored:
            dtype = self._stored.name  # whole numbers, which are imported as floats
        if dtype not in ELEMENT_TYPES or self._stored != ELEMENT_TYPES[dtype].stored:
            return None
        return StoredRows(dtype, (self.path,), self.offset, max(1, self.rows))

    def _blocks(self, block_rows: int) -> Iterator[Array]:
        for start in range(0, self.rows, block_rows):
            yield self._block(start, min(block_rows, self.rows - start))

    def _block(self, start: int, count: int) -> Array:
        return self._elements(start * self.dim, count * self.dim).reshape(count, self.dim)

    def _elements(self, first: int, count: int) -> npt.NDArray[Any]:
        """Return `count` elements of the span, from number `first`, in native byte order."""
        size = self._stored.itemsize
        data = self._file.read_at(self.offset + first * size, count * size)
        return exactly(self.path, np.frombuffer(data, self._stored), self.dtype)
