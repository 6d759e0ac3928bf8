"""crc32c of rows and files.

A row's checksum is crc32c(row id as eight little-endian bytes ‖ record), so a record in the wrong
place is detected like one with changed bits. The core computes them, and copies records meanwhile.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tierstore import _core
from tierstore._core import crc32c as crc32c
from tierstore._rowcopy import Target

_MOST_BYTES = 16 << 20
"""Bytes that are copied in a call: some ten milliseconds, for which Ctrl-C waits."""
_NONE = np.empty(0, np.int64)

Rows = npt.NDArray[np.int64]
Records = npt.NDArray[np.uint8]
Sums = npt.NDArray[np.uint32]


def row_checksums(rows: Rows, records: Records) -> Sums:
    """Return the uint32 checksums of `records` `(n, record_bytes)` as rows `rows` `(n,)`."""
    sums = np.empty(len(records), np.uint32)
    _core.sum_rows(np.ascontiguousarray(rows), records, sums)
    return sums


def moved(sums: Sums, rows: Rows, others: Rows, width: int) -> Sums:
    """Return the checksums that records of `rows`, of `width` bytes, have as those of `others`.

    crc32c is linear: what changes is the same for all records of a row, those of zeros too.
    """
    zeros = np.broadcast_to(np.zeros(width, np.uint8), (len(rows), width))
    return sums ^ row_checksums(rows, zeros) ^ row_checksums(others, zeros)


def mismatches(rows: Rows, records: Records, expected: Sums, *, sparse: bool = False) -> Rows:
    """Return the positions of `records` `(n, record_bytes)` without the checksums `expected`.

    In a sparse file, a checksum of 0 may also mark a row that was never written and reads as zeros.
    """
    bad = np.empty(len(records), np.int64)
    rows, expected = np.ascontiguousarray(rows), np.ascontiguousarray(expected)
    return bad[: _core.check_rows(rows, records, expected, sparse, bad)]


def copy(
    source: Records,
    at: Rows,
    rows: Rows,
    expected: Sums,
    target: Target,
    *,
    sparse: bool = False,
) -> Rows:
    """Copy records of `source` at `at` `(n,)`, those of `rows`, to a target; see `mismatches`.

    What is compared is what arrives there, even if the source is written to meanwhile.
    """
    at, rows, expected = map(np.ascontiguousarray, (at, rows, expected))
    step, found = max(1, _MOST_BYTES // max(1, source.shape[1])), [_NONE]
    for start in range(0, at.size, step):
        part = slice(start, start + step)
        goal = target if at.size <= step else target.of(part)
        slots = None if goal.slots is None else np.ascontiguousarray(goal.slots, np.int64)
        which, bad = (at[part], rows[part], expected[part]), np.empty(at[part].size, np.int64)
        count = _core.copy_rows(source, *which, sparse, goal.records, slots, bad)
        if count:
            found.append(bad[:count] + start)
    return np.concatenate(found)
