""".parquet: a column of vectors, and one of keys. Needs pyarrow.

Written are a column of fixed-size lists, named like the field, and with keys a column `key`.
Trained floats hardly repeat, so there is no dictionary; what makes them smaller is to split them
into streams of bytes before zstd. Read is any column of lists of floats that all have the same
length, without nulls, and the column `key` if it holds integers or strings.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tierstore.errors import FormatError, MissingExtraError
from tierstore.formats.choice import choose
from tierstore.formats.files import InputFile, open_input, parsing, unless_it_fails
from tierstore.formats.keys import Keys
from tierstore.formats.seam import Array, Content, Format, Source, Wanted, Write

__all__ = ["FORMAT", "read_key_column"]

_KEY = "key"
_ELEMENTS = {"halffloat": "float16", "float": "float32", "double": "float64"}
_BUFFER_BYTES = 1 << 20
_SMALL_BYTES = 32 << 20
"""Files up to this size are read by whole chunks."""
_KEY_ROWS = 1 << 16


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError(
            "parquet files need pyarrow: pip install 'tierstore[parquet]'"
        ) from None
    return pyarrow


class _Table:
    """The columns of a Parquet file, read in batches of rows."""

    def __init__(self, file: InputFile) -> None:
        self.path = file.path
        parquet = _pyarrow().parquet
        with parsing(self.path, "Parquet file", Exception):
            # A buffered read believes the sizes that pages have by their headers; that of a whole
            # chunk is bounded by the file's.
            buffer_bytes = _BUFFER_BYTES if file.size > _SMALL_BYTES else 0
            self._file = parquet.ParquetFile(
                file.stream(), pre_buffer=False, buffer_size=buffer_bytes
            )
            self.rows: int = self._file.metadata.num_rows
            self.types = {column.name: column.type for column in self._file.schema_arrow}

    def column(self, name: str, batch_rows: int) -> Iterator[Any]:
        """Yield a column as Arrow arrays of at most `batch_rows` rows."""
        with parsing(self.path, "Parquet file", Exception):
            batches = self._file.iter_batches(batch_rows, columns=[name], use_threads=False)
            for batch in batches:
                # A name with a dot selects the parts of a nested column too.
                yield batch.column(batch.schema.get_field_index(name))


class _ParquetSource(Source):
    def __init__(self, file: InputFile, table: _Table, column: str) -> None:
        kind = table.types[column]
        dim = _list_length(table, column)
        super().__init__(file.path, table.rows, dim, _ELEMENTS[str(kind.value_type)])
        self._file = file
        self._table = table
        self._column = column

    def _blocks(self, block_rows: int) -> Iterator[Array]:
        row = 0
        for lists in self._table.column(self._column, block_rows):
            yield self._matrix(lists, row)
            row += len(lists)

    def _matrix(self, lists: Any, row: int) -> Array:
        """Return lists of `dim` numbers as a matrix; `row` is the number of the first."""
        values = lists.flatten()
        lengths = lists.value_lengths()
        if lists.null_count or values.null_count or (lengths.to_numpy() != self.dim).any():
            raise FormatError(
                f"{self.path}: rows {row} to {row + len(lists) - 1} of {self._column!r} are not "
                f"all {self.dim} numbers without nulls"
            )
        matrix: Array = values.to_numpy(zero_copy_only=True).reshape(-1, self.dim)
        return matrix

    @cached_property
    def keys(self) -> Keys | None:
        kind = self._table.types.get(_KEY)
        return None if kind is None or not _can_be_key(kind) else _keys(self._table, _KEY)

    def close(self) -> None:
        self._file.close()


def _list_length(table: _Table, column: str) -> int:
    """Return how many numbers each list has, by its type or by the first one."""
    kind = table.types[column]
    if _pyarrow().types.is_fixed_size_list(kind):
        return int(kind.list_size)
    first = next(table.column(column, 1), None)
    if first is None or not first[0].is_valid:
        raise FormatError(f"{table.path}: the first list of {column!r} is missing or null")
    return len(first[0])


def _is_list_of_floats(kind: Any) -> bool:
    types = _pyarrow().types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return is_list and str(kind.value_type) in _ELEMENTS


def _can_be_key(kind: Any) -> bool:
    types = _pyarrow().types
    if types.is_integer(kind):
        return True
    text = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(text) or types.is_large_string(text))


def _keys(table: _Table, column: str) -> Keys:
    pyarrow = _pyarrow()
    integers = pyarrow.types.is_integer(table.types[column])
    strings: list[str] = []
    numbers = [np.empty(0, np.int64)]
    for batch in table.column(column, _KEY_ROWS):
        if batch.null_count:
            raise FormatError(f"{table.path}: column {column!r} has nulls; each row needs a key")
        with parsing(table.path, "Parquet file", pyarrow.ArrowException, UnicodeDecodeError):
            if integers:
                numbers.append(batch.cast(pyarrow.int64()).to_numpy())
            else:
                strings += batch.to_pylist()
    keys = np.concatenate(numbers) if integers else strings
    if len(keys) != table.rows:
        raise FormatError(f"{table.path}: {len(keys)} keys in column {column!r} of {table.rows}")
    return keys


def read_key_column(path: Path, column: str) -> Keys:
    """Return a column of integers or strings; raises FormatError if there is none such."""
    with open_input(path) as file:
        table = _Table(file)
        if column not in table.types or not _can_be_key(table.types[column]):
            able = [name for name, kind in table.types.items() if _can_be_key(kind)]
            raise FormatError(
                f"{path}: no column {column!r} of integers or strings; there are {able}"
            )
        return _keys(table, column)


def _open(path: Path, wanted: Wanted) -> Source:
    with unless_it_fails(open_input(path)) as file:
        table = _Table(file)
        lists = {name: kind for name, kind in table.types.items() if _is_list_of_floats(kind)}
        return _ParquetSource(file, table, choose(path, wanted, lists, table.types))


@contextmanager
def _write(path: Path, content: Content) -> Iterator[Write]:
    pyarrow = _pyarrow()
    element = pyarrow.field("element", pyarrow.from_numpy_dtype(content.storage), nullable=False)
    fields = [pyarrow.field(content.field, pyarrow.list_(element, content.dim), nullable=False)]
    if content.keys is not None:
        kind = pyarrow.int64() if content.keys.integers else pyarrow.string()
        fields.insert(0, pyarrow.field(_KEY, kind, nullable=False))
    schema = pyarrow.schema(fields)

    def write(start: int, block: Array) -> None:
        values = pyarrow.array(block.reshape(-1))
        columns = [pyarrow.FixedSizeListArray.from_arrays(values, type=fields[-1].type)]
        if content.keys is not None:
            columns.insert(0, pyarrow.array(content.keys.block(start, start + len(block)), kind))
        writer.write_batch(pyarrow.record_batch(columns, schema=schema))

    options = {
        "compression": "zstd",
        "use_dictionary": False,
        "use_byte_stream_split": [f"{content.field}.list.element"],
        "write_statistics": False,
    }
    with (
        path.open("xb") as file,
        pyarrow.parquet.ParquetWriter(file, schema, **options) as writer,
    ):
        yield write


FORMAT = Format(
    (".parquet",), _open, _write, ("float16", "float32", "float64"), block_bytes=16 << 20
)
