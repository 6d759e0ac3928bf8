"""Rows that lie one after another in a file, as in .npy and .safetensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.formats.files import InputFile
from tierstore.formats.seam import Array, Source
from tierstore.spec import DTYPES

__all__ = ["SpanSource"]


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
