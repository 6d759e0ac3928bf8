""".npy: one array, NumPy's own format. It holds no keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tierstore.errors import FormatError
from tierstore.formats.files import open_input, unless_it_fails
from tierstore.formats.npy_header import NpyHeader, format_header, read_header
from tierstore.formats.seam import Array, Content, Format, Source, Wanted, Write
from tierstore.formats.span import SpanSource

__all__ = ["FORMAT"]


def _open(path: Path, wanted: Wanted) -> Source:
    with unless_it_fails(open_input(path, wanted.memory)) as file:
        header = read_header(file.stream(), path)
        if header.element is None or len(header.shape) != 2:
            raise FormatError(f"{path}: holds {header}; need floats of shape (rows, dim)")
        expected = header.nbytes + header.data_bytes
        if file.size != expected:
            raise FormatError(
                f"{path}: {file.size} bytes, but {header} makes {expected}: "
                f"{'truncated' if file.size < expected else 'something follows the array'}"
            )
        rows, dim = header.shape
        kind = _ColumnMajorSource if _is_column_major(header) else SpanSource
        big_endian = header.dtype.str.startswith(">")
        return kind(file, rows, dim, header.element, offset=header.nbytes, big_endian=big_endian)


def _is_column_major(header: NpyHeader) -> bool:
    return header.fortran_order and min(header.shape) > 1


class _ColumnMajorSource(SpanSource):
    """A Fortran-ordered array, such as a transposed one that was saved: a read for each column."""

    def _block(self, start: int, count: int) -> Array:
        block = np.empty((count, self.dim), self._stored.newbyteorder("<"))
        for column in range(self.dim):
            block[:, column] = self._elements(column * self.rows + start, count)
        return block


@contextmanager
def _write(path: Path, content: Content) -> Iterator[Write]:
    with path.open("xb") as file:
        file.write(format_header(content.storage, (content.rows, content.dim)))
        yield lambda _, block: file.write(block.data)


FORMAT = Format((".npy",), _open, _write, ("float16", "float32", "float64"), keys="never")
