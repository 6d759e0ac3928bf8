""".parquet: a column of vectors, or a column for each element, and one of keys. Needs pyarrow.

The writer stores a column of fixed-size lists with the name of each field, and keys as a column
`key`. Trained floats hardly repeat, so there is no dictionary; they compress better when they are
split into byte streams before zstd. A directory of such files, as Spark, DuckDB and Hugging Face
write them, is read in the order of their names.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

from tierstore._formats._columns import ArrowFormat
from tierstore._formats.base import Content
from tierstore._formats.files import InputFile
from tierstore.errors import FormatError

_MAGIC = b"PAR1"


class Parquet(ArrowFormat):
    """Parquet files, or the directory of some."""

    suffixes = (".parquet",)
    kind = "parquet"

    def check(self, path: Path, file: InputFile) -> None:
        """Raise FormatError for a file that does not begin and end as Parquet does."""
        ends = file.read_at(0, 4) + file.read_at(file.size - 8, 8) if file.size >= 12 else b""
        footer = int.from_bytes(ends[4:8], "little")
        if ends[:4] != _MAGIC or ends[8:] != _MAGIC or footer > file.size - 12:
            raise FormatError(f"{path}: not a Parquet file, or truncated")

    def writer(self, file: IO[bytes], schema: Any, content: Content) -> Any:
        """Return a writer for columns of floats that hardly repeat."""
        import pyarrow.parquet

        # DuckDB reads it of the types of the specification's first version alone.
        split = content.storage.itemsize > 2
        return pyarrow.parquet.ParquetWriter(
            file,
            schema,
            compression="zstd",
            use_dictionary=False,
            use_byte_stream_split=[f"{n}.list.element" for n in content.fields] if split else False,
            write_statistics=[content.key] if content.keys is not None else False,
        )
