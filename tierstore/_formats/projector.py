""".projector: a directory that TensorBoard and projector.tensorflow.org show.

`vectors.tsv` has the numbers of a row on each line, `metadata.tsv` its key, both without a header.
`projector_config.pbtxt` names them for TensorBoard, which accepts it as a log directory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from tierstore._formats.base import (
    FORMATS,
    Array,
    Content,
    Format,
    Source,
    TextOptions,
    Wanted,
    Write,
)
from tierstore._formats.delimited import format_rows
from tierstore._formats.keys import Keys
from tierstore.errors import FormatError, InvalidInputError

_VECTORS, _METADATA, _CONFIG = "vectors.tsv", "metadata.tsv", "projector_config.pbtxt"
_ROWS = TextOptions(header=False, key_column=False, sep="\t", decimal=".")


class _ProjectorSource(Source):
    def __init__(self, path: Path, rows: Source, wanted: Wanted) -> None:
        super().__init__(path, rows.rows, rows.dim, rows.dtype)
        self._rows = rows
        self._memory = wanted.memory

    def _blocks(self, block_rows: int) -> Iterator[Array]:
        yield from self._rows.blocks(block_rows)
        self.overflowed = self._rows.overflowed

    @cached_property
    def keys(self) -> Keys | None:
        """The lines of the metadata, if there are any; whole numbers are int64."""
        metadata = self.path / _METADATA
        if not metadata.exists():
            return None
        keys = FORMATS[".txt"].read_keys(metadata, None, self._memory)
        if len(keys) != self.rows:
            raise FormatError(
                f"{metadata}: {len(keys)} lines for {self.rows} rows; one of several columns, "
                "which has a header, is not read"
            )
        return keys

    def close(self) -> None:
        """Close the file of vectors."""
        self._rows.close()


class Projector(Format):
    """Rows of numbers and their labels, in a directory."""

    suffixes = (".projector",)
    is_directory = True
    block_bytes = 1 << 20
    elements = "text"

    def wrote(self, directory: Path) -> bool:
        """Whether it holds only these files."""
        return {each.name for each in directory.iterdir()} <= {_VECTORS, _METADATA, _CONFIG}

    def open(self, path: Path, wanted: Wanted) -> Source:
        """Open the rows."""
        rows = FORMATS[".tsv"].open(path / _VECTORS, replace(wanted, text=_ROWS))
        return _ProjectorSource(path, rows, wanted)

    @contextmanager
    def write(self, path: Path, content: Content) -> Iterator[Write]:
        """Write both files; raises InvalidInputError for keys that are no line, or no rows."""
        if content.rows == 0:
            raise InvalidInputError(".projector shows at least one row")
        if content.keys is not None:
            content.keys.reject(
                re.compile(r"\A\Z|[\0\t\r\n]"),
                "is empty, or holds NUL, a tab or a line end, which metadata.tsv cannot",
            )
        path.mkdir()
        with ExitStack() as files:
            vectors = files.enter_context((path / _VECTORS).open("xb"))
            config = {"tensor_name": content.field, "tensor_path": _VECTORS}
            labels = None
            if content.keys is not None:
                labels = files.enter_context((path / _METADATA).open("xb"))
                config["metadata_path"] = _METADATA
            lines = "".join(f"  {name}: {json.dumps(value)}\n" for name, value in config.items())
            with (path / _CONFIG).open("xb") as file:
                file.write(f"embeddings {{\n{lines}}}\n".encode())

            def write(start: int, block: Array) -> None:
                vectors.write(format_rows(None, block, b"\t"))
                if labels is not None:
                    words = content.words(start, start + len(block))
                    labels.write(b"".join([word + b"\n" for word in words]))

            yield write
