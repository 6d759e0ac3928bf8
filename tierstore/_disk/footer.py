"""The footer of a delta: the identity of the file, and a checksum of its ids, sums and footer.

It has 64 bytes: a magic word (8), the uuid of the store (16), version, number of records and bytes
of a record (8 each), the crc32c of ids and sums (4), one more than the first row if all rows ascend
by one and are many, else 0 (8), and the crc32c of the bytes before (4).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierstore import _checksum
from tierstore._rowcopy import ascends

FOOTER_BYTES = 64

_MAGIC = b"TSDELTA1"
_FOOTER = struct.Struct("<8s16sQQQIQ")
_RUN_ROWS = 1 << 16
"""Rows from which on a footer states that they ascend by one; fewer ids are read fast enough."""


def file_bytes(records: int, record_bytes: int) -> int:
    """Return the size of a delta: records, the row and the checksum of each, and the footer."""
    return records * (record_bytes + 12) + FOOTER_BYTES


def make(
    store: bytes, version: int, count: int, record_bytes: int, body: int, first: int | None
) -> tuple[bytes, int]:
    """Return the footer of a delta of `count` records, and `checksum` of it.

    `body` is the checksum of ids and sums, `first` the result of `run_of` for the ids.
    """
    run = 0 if first is None else first + 1
    head = _FOOTER.pack(_MAGIC, store, version, count, record_bytes, body, run)
    found = _checksum.crc32c(head)
    return head + struct.pack("<I", found), found


class Stated(NamedTuple):
    """What a footer states: the store, the version, the records and the bytes of each."""

    store: bytes
    version: int
    records: int
    record_bytes: int


def stated(footer: bytes) -> Stated | None:
    """Return what an intact footer states; None if these bytes are none."""
    if len(footer) != FOOTER_BYTES or footer[:8] != _MAGIC:
        return None
    if _checksum.crc32c(footer[:-4]) != checksum(footer):
        return None
    _, *found, _, _ = _FOOTER.unpack_from(footer)
    return Stated(*found)


def checksum(footer: bytes) -> int:
    """Return the checksum at the end of a footer, which identifies the delta.

    A checksum of the whole footer would not: data followed by its own crc has a constant crc.
    """
    return int.from_bytes(footer[-4:], "little")


def read(footer: bytes, count: int) -> tuple[int, int | None]:
    """Return the checksum of ids and sums that a footer states, and the first row of a run.

    The latter is None for a delta whose rows do not ascend by one, or whose `count` is small: what
    a footer says of these is not believed, since their ids say it.
    """
    *_, body, run = _FOOTER.unpack_from(footer)
    return body, run - 1 if run and count >= _RUN_ROWS else None


def run_of(ids: npt.NDArray[np.int64]) -> int | None:
    """Return the first of many `ids` that ascend by one, as those of arriving keys; or None."""
    if ids.size < _RUN_ROWS:
        return None
    first = run_between(int(ids[0]), int(ids[-1]), ids.size)
    return first if first is None or ascends(ids, strictly=True) else None


def run_between(first: int, last: int, count: int) -> int | None:
    """Return the first of many ascending rows if no row between it and the last is missing."""
    return first if count >= _RUN_ROWS and last - first == count - 1 else None
