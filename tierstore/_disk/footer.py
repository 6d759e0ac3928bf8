"""The footer of a delta: what the file is, and a checksum of its ids, its sums and itself.

It has 64 bytes: a magic word (8), the uuid of the store (16), version, number of records and bytes
of a record (8 each), the crc32c of ids and sums (4), one more than the first row if all rows ascend
by one and are many, else 0 (8), and the crc32c of the bytes before (4).
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from tierstore import _checksum
from tierstore._rowcopy import ascends

__all__ = ["FOOTER_BYTES", "body_sum", "checksum", "first_row", "make", "run_between", "run_of"]

FOOTER_BYTES = 64

_MAGIC = b"TSDELTA1"
_FOOTER = struct.Struct("<8s16sQQQIQ")
_RUN_ROWS = 1 << 16
"""Rows from which on a footer says that they ascend by one; fewer ids are read in no time."""


def make(
    store: bytes, version: int, count: int, record_bytes: int, body: int, first: int | None
) -> bytes:
    """Return the footer of a delta of `count` records; `body` is the checksum of ids and sums.

    `first` is what `run_of` says of its ids.
    """
    run = 0 if first is None else first + 1
    head = _FOOTER.pack(_MAGIC, store, version, count, record_bytes, body, run)
    return head + struct.pack("<I", _checksum.crc32c(head))


def checksum(footer: bytes) -> int:
    """Return the checksum at the end of a footer, which identifies the delta.

    A checksum of the whole footer would not: data followed by its own crc has a constant crc.
    """
    return int.from_bytes(footer[-4:], "little")


def body_sum(footer: bytes) -> int:
    """Return what a footer says that the checksum of ids and sums is."""
    found: int = _FOOTER.unpack_from(footer)[-2]
    return found


def first_row(footer: bytes) -> int | None:
    """Return the first row of a delta whose rows ascend by one, if a footer says that of it."""
    run: int = _FOOTER.unpack_from(footer)[-1]
    return run - 1 if run else None


def run_of(ids: npt.NDArray[np.int64]) -> int | None:
    """Return the first of many `ids` that ascend by one, as those of keys that arrive; or None."""
    if not ids.size:
        return None
    first = run_between(int(ids[0]), int(ids[-1]), ids.size)
    return first if first is None or ascends(ids, strictly=True) else None


def run_between(first: int, last: int, count: int) -> int | None:
    """Return the first of many ascending rows if no row between it and the last is missing."""
    return first if count >= _RUN_ROWS and last - first == count - 1 else None
