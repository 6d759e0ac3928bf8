""".parquet: a column of vectors, or a column for each element, and one of keys. Needs pyarrow.

The writer stores a column of fixed-size lists with the name of each field, and keys as a column
`key`. Trained floats hardly repeat, so there is no dictionary; they compress better when they are
split into byte streams before zstd. The reader accepts any column of lists of numbers of equal
length without nulls, or else all columns of floats, and the column `key` if it contains integers or
strings. A directory of such files, as Spark, DuckDB and Hugging Face write them, is read in the
order of their names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tierstore._dtypes import ElementType
from tierstore._formats._columns import (
    Columns,
    ColumnSource,
    arrow_batch,
    arrow_schema,
    column_keys,
    in_order,
    need,
)
from tierstore._formats.base import Array, Content, Format, Source, Wanted, Write
from tierstore._formats.files import open_input, unless_it_fails
from tierstore._formats.keys import Keys
from tierstore.budget import Size
from tierstore.errors import FormatError

__all__ = ["Parquet", "open_columns"]

_KIND = "parquet"
_KEY = "key"
_MAGIC = b"PAR1"


def open_columns(path: Path, memory: Size) -> Columns:
    """Return the columns of a Parquet file, or of the Parquet files in a directory."""
    parts = in_order(path.glob("*.parquet")) if path.is_dir() else [path]
    if not parts:
        raise FormatError(f"{path}: a directory that holds no .parquet files itself")
    need(_KIND)
    for part in parts:
        _check_ends(part)
    return Columns(_KIND, path, memory, parts)


def _check_ends(path: Path) -> None:
    """Raise FormatError if this is not a Parquet file, before starting a process."""
    with open_input(path) as file:
        ends = file.read_at(0, 4) + file.read_at(file.size - 8, 8) if file.size >= 12 else b""
        footer = int.from_bytes(ends[4:8], "little")
        if ends[:4] != _MAGIC or ends[8:] != _MAGIC or footer > file.size - 12:
            raise FormatError(f"{path}: not a Parquet file, or truncated")


class Parquet(Format):
    """Named columns, of element types that NumPy supports."""

    suffixes = (".parquet",)
    several = True
    has_columns = True
    block_bytes = 16 << 20

    def holds(self, element: ElementType) -> bool:
        """Whether NumPy, and therefore Arrow, supports the type."""
        return not element.as_bits

    def claims(self, directory: Path) -> bool:
        """Whether there are Parquet files."""
        return next(directory.glob("*.parquet"), None) is not None

    def open(self, path: Path, wanted: Wanted) -> Source:
        """Open a column of lists, or columns of numbers."""
        with unless_it_fails(open_columns(path, wanted.memory)) as columns:
            return ColumnSource(columns, wanted, _KEY)

    @contextlib.contextmanager
    def write(self, path: Path, content: Content) -> Iterator[Write]:
        """Write a column of lists for each field, and a column of keys."""
        need(_KIND)
        import pyarrow.parquet

        schema = arrow_schema(content, _KEY)

        def write(start: int, block: Array) -> None:
            writer.write_batch(arrow_batch(content, schema, start, block))

        options = {
            "compression": "zstd",
            "use_dictionary": False,
            # DuckDB reads it of the types of the specification's first version alone.
            "use_byte_stream_split": (
                [f"{name}.list.element" for name in content.fields]
                if content.storage.itemsize > 2
                else False
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
        with contextlib.closing(open_columns(path, memory)) as columns:
            return column_keys(columns, _KEY if name is None else name)
