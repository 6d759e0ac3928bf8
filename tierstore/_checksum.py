"""crc32c of rows and files.

A row's checksum is crc32c(row id as eight little-endian bytes ‖ record), so a record in the wrong
place is detected like one with changed bits. crc32c is linear: the checksum of the eight id bytes
is the exclusive-or of one table entry per byte, computed for a whole batch in NumPy. The crc32c
library then continues over the record with the hardware instruction; or it takes the record alone,
and what the id becomes over as many zeros as the record has bytes is added.

For the same reason the checksum of many records in a row follows from those of each, which takes a
fraction of the time of computing each. Any damage to one record changes it; damage to several goes
unnoticed once in 2^32 times.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from crc32c import crc32c as _crc32c

from tierstore._parts import in_parts

__all__ = ["crc32c", "mismatches", "row_checksums"]


_MANY = 512
"""Records from which it is faster to compare one checksum of all, before that of each."""
_PART_BYTES = 1 << 20
"""Bytes whose checksum is computed at a time."""
_FEW = 256
"""Records up to which it is faster to continue each checksum from that of its id."""
_AT_ONCE = 1024
"""Checksums computed before other threads may run: a call keeps the interpreter to itself."""


def crc32c(data: bytes | memoryview | npt.NDArray[Any], value: int = 0) -> int:
    """Return the crc32c of contiguous bytes, continuing from `value`."""
    return int(_crc32c(memoryview(cast(Any, data)), value))


def row_checksums(
    rows: npt.NDArray[np.int64], records: npt.NDArray[np.uint8]
) -> npt.NDArray[np.uint32]:
    """Return the uint32 checksums of `records` `(n, record_bytes)` as rows `rows` `(n,)`."""
    count, width = records.shape
    whole = np.ascontiguousarray(records).view(f"V{width}").ravel()  # items without a copy
    seeds = _id_checksums(rows)
    if count <= _FEW:
        return np.fromiter(map(_crc32c, cast(Any, whole), seeds.tolist()), np.uint32, count)
    sums = np.empty(count, np.uint32)
    for at in range(0, count, _AT_ONCE):
        each = map(_crc32c, cast(Any, whole[at : at + _AT_ONCE]))
        sums[at : at + _AT_ONCE] = np.fromiter(each, np.uint32, min(_AT_ONCE, count - at))
    return sums ^ _shifted(seeds, _by_zeros(width, 0))


def mismatches(
    rows: npt.NDArray[np.int64],
    records: npt.NDArray[np.uint8],
    expected: npt.NDArray[np.uint32],
    *,
    sparse: bool = False,
) -> npt.NDArray[np.intp]:
    """Return the positions of records that do not have the expected checksum.

    In a sparse file, a checksum of 0 may also mark a row that was never written and reads as zeros.
    """
    if sparse and not expected.all():
        written = np.flatnonzero(expected.astype(np.bool_) | _are_set(records))
        if written.size < expected.size:
            found = mismatches(rows[written], records[written], expected[written])
            return written[found]
    if len(rows) >= _MANY and _match_together(rows, records, expected):
        return np.empty(0, np.intp)
    return np.flatnonzero(row_checksums(rows, records) != expected)


def _are_set(records: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Whether any byte of each record is not zero."""
    width = records.shape[1]
    words = np.ascontiguousarray(records).view(f"u{math.gcd(width, 8)}")
    found: npt.NDArray[np.bool_] = np.bitwise_or.reduce(words, axis=1) != 0
    return found


@cache
def _tables() -> tuple[npt.NDArray[np.uint32], int]:
    """Return the effect of each value at each of eight byte positions, and the crc of zeros."""
    zero = _crc32c(bytes(8))
    table = np.empty((8, 256), np.uint32)
    for position in range(8):
        for value in range(256):
            data = bytearray(8)
            data[position] = value
            table[position, value] = _crc32c(bytes(data)) ^ zero
    return table, zero


def _id_checksums(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    table, zero = _tables()
    result = np.full(rows.shape, zero, np.uint32)
    octets = np.ascontiguousarray(rows, "<i8").view(np.uint8).reshape(-1, 8)
    used = (int(rows.max(initial=0)).bit_length() + 7) // 8
    for position in range(used):
        result ^= table[position][octets[:, position]]
    return result


def _match_together(
    rows: npt.NDArray[np.int64],
    records: npt.NDArray[np.uint8],
    expected: npt.NDArray[np.uint32],
) -> bool:
    """Whether the checksum of all records together is what it is if each has the expected one.

    The register of crc32c starts from all ones and is inverted at the end. Here, each record is
    taken as if the register had started from zero, so that records before it, whose bytes shift it
    by as many zeros as the record has bytes, only add to it.
    """
    width = records.shape[1]
    own = ~expected ^ _shifted(~_id_checksums(rows), _by_zeros(width, 0))
    level = 0
    while own.size > 1:
        if own.size % 2:
            own = np.concatenate([np.zeros(1, np.uint32), own])  # before all others: adds nothing
        own = _shifted(np.ascontiguousarray(own[::2]), _by_zeros(width, level)) ^ own[1::2]
        level += 1
    found: int = _of_all(np.ascontiguousarray(records))
    return found == int(own[0])


def _of_all(records: npt.NDArray[np.uint8]) -> int:
    """Return the register after all `records` if it starts from zero; parts of them in threads.

    All parts but the first are of so many records that the register is shifted by one table.
    """
    level = max(0, (_PART_BYTES // records.shape[1]).bit_length() - 1)
    count = len(records) >> level
    rest = len(records) - (count << level)
    found = [_register(records[:rest])] + count * [0]

    def work(part: slice) -> None:
        for number in range(part.start, part.stop):
            at = rest + (number << level)
            found[number + 1] = _register(records[at : at + (1 << level)])

    in_parts(work, count, count, least=1)
    total, table = np.array(found[:1], np.uint32), _by_zeros(records.shape[1], level)
    for each in found[1:]:
        total = _shifted(total, table) ^ np.uint32(each)
    return int(total[0])


def _register(data: npt.NDArray[np.uint8]) -> int:
    """Return the register of crc32c after some bytes, if it starts from zero."""
    return crc32c(data, 0xFFFFFFFF) ^ 0xFFFFFFFF


def _shifted(
    registers: npt.NDArray[np.uint32], table: npt.NDArray[np.uint32]
) -> npt.NDArray[np.uint32]:
    """Return registers `(n,)` after the zeros that a table of `_by_zeros` is for."""
    octets = registers.astype("<u4", copy=False).view(np.uint8).reshape(-1, 4)
    result: npt.NDArray[np.uint32] = table[0].take(octets[:, 0])
    for position in range(1, 4):
        result ^= table[position].take(octets[:, position])
    return result


@lru_cache(maxsize=256)
def _by_zeros(width: int, level: int) -> npt.NDArray[np.uint32]:
    """Return what `width << level` zero bytes make of each value of the register's four bytes."""
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    if level:
        half = _by_zeros(width, level - 1)
        bits = _shifted(_shifted(bits, half), half)
    else:
        zeros = bytes(width)
        bits = np.array([~_crc32c(zeros, ~bit & 0xFFFFFFFF) & 0xFFFFFFFF for bit in bits.tolist()])
    table = np.zeros((4, 256), np.uint32)
    for value in range(8):
        table[:, 1 << value : 2 << value] = (
            table[:, : 1 << value] ^ bits.astype(np.uint32).reshape(4, 8)[:, value, None]
        )
    return table
