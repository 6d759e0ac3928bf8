"""crc32c of rows and files.

A row's checksum is crc32c(row id as eight little-endian bytes ‖ record), so a record in the wrong
place is detected like one with changed bits. The core computes them, and copies records meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import _core
from tierstore._core import crc32c as crc32c
from tierstore._parts import in_parts

_PART_BYTES = 512 << 10
"""Least bytes that a thread copies and checks at a time, of many."""
_MOST_PART_BYTES = 2 << 20
"""Most bytes that are passed on at a time: they stay in the processor's own cache."""

Rows = npt.NDArray[np.int64]
Records = npt.NDArray[np.uint8]
Sums = npt.NDArray[np.uint32]
Put = Callable[[Any, Records], object]
"""Takes records, and which of the requested ones they are: a slice, or their positions."""


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
    source: Records, at: Rows, rows: Rows, expected: Sums, out: Records, *, sparse: bool = False
) -> Rows:
    """Copy records of `source` at `at` `(n,)` to `out` `(n, record_bytes)`; see `mismatches`.

    They are those of `rows`. What is compared is what arrives in `out`, whoever writes meanwhile.
    Many are copied in threads.
    """
    wrong: list[Rows] = []
    at, rows = np.ascontiguousarray(at), np.ascontiguousarray(rows)

    def work(part: slice) -> None:
        bad = np.empty(part.stop - part.start, np.int64)
        count = _core.copy_rows(
            source, at[part], rows[part], expected[part], sparse, out[part], bad
        )
        if count:
            wrong.append(bad[:count] + part.start)

    in_parts(work, len(at), out.nbytes, least=_PART_BYTES)
    return np.sort(np.concatenate(wrong)) if wrong else np.empty(0, np.int64)


def deliver(
    source: Records, at: Rows, rows: Rows, expected: Sums, put: Put, *, sparse: bool = False
) -> Rows:
    """Pass the records that `copy` copies to `put`, and return what it returns.

    `put` is called with parts of them, in several threads at a time, also with those that do not
    match. An array is valid until `put` returns.
    """
    wrong: list[Rows] = []
    width = source.shape[1]
    most = max(1, _MOST_PART_BYTES // width)
    at, rows = np.ascontiguousarray(at), np.ascontiguousarray(rows)

    def work(part: slice) -> None:
        block = np.empty((min(most, part.stop - part.start), width), np.uint8)
        bad = np.empty(len(block), np.int64)
        for start in range(part.start, part.stop, most):
            here = slice(start, min(start + most, part.stop))
            records, found = block[: here.stop - start], bad[: here.stop - start]
            count = _core.copy_rows(
                source, at[here], rows[here], expected[here], sparse, records, found
            )
            if count:
                wrong.append(found[:count] + start)
            put(here, records)

    in_parts(work, len(at), len(at) * width, least=_PART_BYTES)
    return np.sort(np.concatenate(wrong)) if wrong else np.empty(0, np.int64)
