""".raw, .dat: the bytes of a matrix alone, as numpy.memmap and tofile leave them; read only.

The path says what they are: `table.dat:float32:256` has rows of 256 float32.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from tierstore._dtypes import ELEMENT_TYPES
from tierstore._formats.base import Format, Source, SpanSource, Wanted, element_of
from tierstore._formats.files import open_input, unless_it_fails
from tierstore.errors import FormatError

_SHAPE = re.compile(r"([a-z]+\d+\w*):(\d{1,9})")


def is_shape(name: str | None) -> bool:
    """Whether a name says the type and the elements of a row."""
    return name is not None and _SHAPE.fullmatch(name) is not None


def open_raw(path: Path, wanted: Wanted) -> Source:
    """Open the bytes of rows whose type and length the name says."""
    found = _SHAPE.fullmatch(wanted.name or "")
    number = "" if found is None else found[1]
    dtype = element_of(number) or number
    if found is None or dtype not in ELEMENT_TYPES or not int(found[2]):
        raise FormatError(
            f"{path}: the bytes of a matrix do not say its type and shape: name the type and the "
            f"elements of a row, as in {path.name}:float32:256, of {', '.join(ELEMENT_TYPES)}, or "
            "int16 to uint64"
        )
    dim = int(found[2])
    stored = ELEMENT_TYPES[number].stored if number in ELEMENT_TYPES else np.dtype(number)
    with unless_it_fails(open_input(path, wanted.memory)) as file:
        if file.size % (dim * stored.itemsize):
            raise FormatError(f"{path}: {file.size} bytes are no rows of {dim} {number}")
        rows = file.size // (dim * stored.itemsize)
        return SpanSource(file, rows, dim, dtype, offset=0, stored=stored)


class Raw(Format):
    """Rows of the type and length that the path says."""

    suffixes = (".raw", ".dat")

    def open(self, path: Path, wanted: Wanted) -> Source:
        """Open the bytes of rows."""
        return open_raw(path, wanted)
