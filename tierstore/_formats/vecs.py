""".fvecs and .fbin: the plain matrices of float32 that faiss and big-ann-benchmarks exchange.

In .fvecs each row begins with its number of elements, an int32. .fbin begins with the numbers of
rows and elements, two uint32. Both are little-endian and hold no keys.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tierstore._dtypes import ElementType
from tierstore._formats.base import (
    Array,
    Content,
    Format,
    Source,
    SpanSource,
    Wanted,
    Write,
    reject_name,
)
from tierstore._formats.files import (
    InputFile,
    end_sparsely,
    open_input,
    unless_it_fails,
    write_sparsely,
)
from tierstore.errors import FormatError, InvalidInputError
from tierstore.spec import MAX_RECORD_BYTES

__all__ = ["Fbin", "Fvecs"]

_DTYPE = "float32"
_ELEMENT = np.dtype("<f4")
_COUNTS = struct.Struct("<II")


class _FvecsSource(Source):
    def __init__(self, file: InputFile, rows: int, dim: int) -> None:
        super().__init__(file.path, rows, dim, _DTYPE)
        self._file = file

    def _blocks(self, block_rows: int) -> Iterator[Array]:
        width = 4 * (self.dim + 1)
        for start in range(0, self.rows, block_rows):
            count = min(block_rows, self.rows - start)
            data = self._file.read_at(start * width, count * width)
            lengths = np.frombuffer(data, "<i4").reshape(count, -1)[:, 0]
            wrong = np.flatnonzero(lengths != self.dim)
            if len(wrong):
                raise FormatError(
                    f"{self.path}: row {start + wrong[0]} has {lengths[wrong[0]]} elements, "
                    f"the first has {self.dim}"
                )
            yield np.ascontiguousarray(np.frombuffer(data, _ELEMENT).reshape(count, -1)[:, 1:])

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Fvecs(Format):
    """Rows of float32, each after its length."""

    suffixes = (".fvecs",)
    keys = "never"

    def holds(self, element: ElementType) -> bool:
        """Whether the type is float32."""
        return element.stored == _ELEMENT

    def open(self, path: Path, wanted: Wanted) -> Source:
        """Open a file, whose size must be a multiple of the size of the first row."""
        reject_name(path, wanted)
        with unless_it_fails(open_input(path, wanted.memory)) as file:
            dim = int.from_bytes(file.read_at(0, 4), "little", signed=True)
            if not 1 <= dim <= MAX_RECORD_BYTES // 4 or file.size % (4 * (dim + 1)):
                raise FormatError(
                    f"{path}: {file.size} bytes are no rows of {dim} elements, as in the first; "
                    "truncated, or no .fvecs file"
                )
            return _FvecsSource(file, file.size // (4 * (dim + 1)), dim)

    @contextmanager
    def write(self, path: Path, content: Content) -> Iterator[Write]:
        """Write rows; raises InvalidInputError without rows, whose length would be unknown."""
        if content.rows == 0:
            raise InvalidInputError(".fvecs holds at least one row; write .fbin or .npy instead")
        with path.open("xb") as file:

            def write(start: int, block: Array) -> None:
                lengths = np.full((len(block), 1), content.dim, "<i4").view(_ELEMENT)
                file.write(np.hstack([lengths, block]).tobytes())

            yield write


class Fbin(Format):
    """Counts, then rows of float32."""

    suffixes = (".fbin",)
    keys = "never"

    def holds(self, element: ElementType) -> bool:
        """Whether the type is float32."""
        return element.stored == _ELEMENT

    def open(self, path: Path, wanted: Wanted) -> Source:
        """Open a file, whose size must match its counts."""
        reject_name(path, wanted)
        with unless_it_fails(open_input(path, wanted.memory)) as file:
            rows, dim = _COUNTS.unpack(file.read_at(0, _COUNTS.size))
            if file.size != _COUNTS.size + 4 * rows * dim:
                raise FormatError(
                    f"{path}: {file.size} bytes, but {rows} rows of {dim} float32 take "
                    f"{_COUNTS.size + 4 * rows * dim}"
                )
            return SpanSource(file, rows, dim, _DTYPE, offset=_COUNTS.size)

    @contextmanager
    def write(self, path: Path, content: Content) -> Iterator[Write]:
        """Write counts and rows; raises InvalidInputError for more than the counts hold."""
        if content.rows >= 1 << 32:
            raise InvalidInputError(f"{content.rows} rows; .fbin holds fewer than 2**32")
        with path.open("xb") as file:
            file.write(_COUNTS.pack(content.rows, content.dim))
            yield lambda _, block: write_sparsely(file, block)
            end_sparsely(file)
