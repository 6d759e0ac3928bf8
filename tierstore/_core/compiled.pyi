"""Loops over rows and bytes, compiled from core.c.

Arrays are any buffers of these shapes and items, contiguous unless said otherwise; those that are
written must not overlap others, and nobody else may write to any of them during a call. Sizes are
checked: ValueError if they do not match each other, BufferError or ValueError if an array is
read-only or not contiguous. A call on 64 KiB or more lets other threads run. No call can be
interrupted but `crc32c`, so callers pass parts. Nothing is copied or kept.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

DISPATCH: str
"""How checksums are computed on this processor: "sse4.2", "armv8" or "table"."""
SOURCES: str
"""The hash of the sources that the module was built from; see `tierstore._core.sources`."""

def crc32c(data: bytes | memoryview | npt.NDArray[Any], value: int = 0, /) -> int:
    """Return the crc32c of bytes, continuing from `value`, the crc32c of what is before them."""

def sum_rows(
    rows: npt.NDArray[np.int64],
    records: npt.NDArray[np.uint8],
    sums: npt.NDArray[np.uint32],
    /,
) -> int:
    """Write crc32c(row as eight bytes ‖ record) of each to `sums` `(n,)`; return n.

    `records` are `(n, bytes)`; rows of it may lie apart, or all in one place.
    """

def check_rows(
    rows: npt.NDArray[np.int64],
    records: npt.NDArray[np.uint8],
    sums: npt.NDArray[np.uint32],
    sparse: bool,
    bad: npt.NDArray[np.int64],
    /,
) -> int:
    """Return how many `records` `(n, bytes)` do not have the checksums `sums` `(n,)`.

    Their positions come first in `bad` `(n,)`. Where `sparse`, a record of zeros whose checksum is
    0 was never written and counts as right.
    """

def copy_rows(
    source: npt.NDArray[np.uint8],
    at: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    sums: npt.NDArray[np.uint32],
    sparse: bool,
    out: npt.NDArray[np.uint8],
    bad: npt.NDArray[np.int64],
    /,
) -> int:
    """Copy the records at `at` `(n,)` of `source` `(m, bytes)` to `out` `(n, bytes)`.

    They are compared on the way, as those of `rows`; returns as `check_rows` does. Rows of `source`
    and `out` may lie apart. Raises IndexError, and copies nothing, if a place is not in the source.
    """
