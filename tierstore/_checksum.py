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
import struct
from collections import deque
from collections.abc import Callable
from functools import cache, lru_cache
from itertools import starmap
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from crc32c import crc32c as _crc32c

from tierstore._parts import in_parts, threads_here

__all__ = ["Put", "crc32c", "deliver", "mismatches", "moved", "row_checksums"]


_MANY = 512
"""Records from which it is faster to compare one checksum of all, before that of each."""
_PART_BYTES = 512 << 10
"""Least bytes that a thread copies and checks at a time, of many."""
_MOST_PART_BYTES = 2 << 20
"""Most bytes of the same: they stay in the processor's own cache."""
_PARTS_PER_THREAD = 4
"""Parts take different times: with several for each thread, all threads end together."""
_LOG_JOINED = 6
_JOINED = 1 << _LOG_JOINED
"""Registers that are joined at a time; the table for it takes 256 KiB."""
_AT = 256 * np.arange(4 * _JOINED)
"""Where the entries for each byte of the registers to join begin."""
_FEW = 256
"""Records up to which it is faster to continue each checksum from that of its id."""
_AT_ONCE = 1024
"""Checksums computed before other threads may run: a call keeps the interpreter to itself."""

Put = Callable[[Any, npt.NDArray[np.uint8]], object]
"""Takes records, and which of the requested ones they are: a slice, or their positions."""
Load = Callable[[slice], npt.NDArray[np.uint8]]
Done = Callable[[slice, npt.NDArray[np.uint8]], object]


def crc32c(data: bytes | memoryview | npt.NDArray[Any], value: int = 0) -> int:
    """Return the crc32c of contiguous bytes, continuing from `value`."""
    return int(_crc32c(memoryview(cast(Any, data)), value))


def row_checksums(
    rows: npt.NDArray[np.int64], records: npt.NDArray[np.uint8]
) -> npt.NDArray[np.uint32]:
    """Return the uint32 checksums of `records` `(n, record_bytes)` as rows `rows` `(n,)`."""
    count, width = records.shape
    records = np.ascontiguousarray(records)
    if count <= _FEW:
        whole = records.view(f"V{width}").ravel()  # items without a copy
        seeds = _id_checksums(rows)
        return np.fromiter(map(_crc32c, cast(Any, whole), seeds.tolist()), np.uint32, count)
    sums = np.empty(count, np.uint32)
    # Copies of records, a fifth faster than items that refer to them.
    each = starmap(_crc32c, struct.iter_unpack(f"{width}s", cast(Any, records.reshape(-1))))
    for at in range(0, count, _AT_ONCE):
        part = sums[at : at + _AT_ONCE]
        part[:] = np.fromiter(each, np.uint32, part.size)
    return sums ^ _id_parts(rows, width)


def moved(
    sums: npt.NDArray[np.uint32],
    rows: npt.NDArray[np.int64],
    others: npt.NDArray[np.int64],
    width: int,
) -> npt.NDArray[np.uint32]:
    """Return the checksums that records of `rows`, of `width` bytes, have as those of `others`."""
    return sums ^ (_id_parts(rows, width) ^ _id_parts(others, width))


def mismatches(
    rows: npt.NDArray[np.int64],
    records: npt.NDArray[np.uint8],
    expected: npt.NDArray[np.uint32],
    *,
    sparse: bool = False,
    fill: Callable[[slice], object] | None = None,
) -> npt.NDArray[np.intp]:
    """Return the positions of records that do not have the expected checksum.

    In a sparse file, a checksum of 0 may also mark a row that was never written and reads as zeros.
    `fill` copies a part of the records to where they are checked. It is called first, with disjoint
    parts that cover all records, for many of them in threads.
    """
    holes = sparse and not expected.all()
    if len(rows) >= _MANY and not holes:

        def load(part: slice) -> npt.NDArray[np.uint8]:
            if fill is not None:
                fill(part)
            return np.ascontiguousarray(records[part])

        if _match_together(rows, records.shape[1], expected, load):
            return np.empty(0, np.intp)
    elif fill is not None:
        in_parts(fill, len(rows), records.nbytes, least=_PART_BYTES)
    if holes:
        written = np.flatnonzero(expected.astype(np.bool_) | _are_set(records))
        if written.size < expected.size:
            found = mismatches(rows[written], records[written], expected[written])
            return written[found]
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
    return _sum_up(rows, table, zero)


def _id_parts(rows: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.uint32]:
    """Return what the checksums of ids become over `width` zeros."""
    table, zero = _tables_before(width)
    return _sum_up(rows, table, zero)


@lru_cache(maxsize=64)
def _tables_before(width: int) -> tuple[npt.NDArray[np.uint32], int]:
    """Return what `_tables` becomes over `width` zeros."""
    table, zero = _tables()
    zeros = _by_zeros(width, 0)
    after = _shifted(np.append(table.ravel(), np.uint32(zero)), zeros)
    return after[:-1].reshape(table.shape), int(after[-1])


def _sum_up(
    rows: npt.NDArray[np.int64], table: npt.NDArray[np.uint32], zero: int
) -> npt.NDArray[np.uint32]:
    """Return `zero` with the entry of each byte of the ids added."""
    result = np.full(rows.shape, zero, np.uint32)
    octets = np.ascontiguousarray(rows, "<i8").view(np.uint8).reshape(-1, 8)
    used = (int(rows.max(initial=0)).bit_length() + 7) // 8
    for position in range(used):
        result ^= table[position].take(octets[:, position])
    return result


def deliver(
    records: npt.NDArray[np.uint8],
    positions: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    sums: npt.NDArray[np.uint32],
    put: Put,
) -> bool:
    """Pass the records at `positions` `(n,)`, those of `rows`, to `put`; return whether all match.

    `put` is called with parts of them, in several threads at a time, and before all are known to
    match their `sums`. An array is valid until `put` returns.
    """
    spare: deque[npt.NDArray[np.uint8]] = deque()

    def load(part: slice) -> npt.NDArray[np.uint8]:
        count = part.stop - part.start
        try:  # without asking first whether there is one: another thread may take it meanwhile
            block = spare.pop()
        except IndexError:
            block = np.empty((0, records.shape[1]), np.uint8)
        if len(block) < count:
            block = np.empty((count, records.shape[1]), np.uint8)
        records.take(positions[part], axis=0, out=block[:count], mode="clip")
        return block[:count]

    def done(part: slice, block: npt.NDArray[np.uint8]) -> None:
        put(part, block)
        spare.append(block)

    if len(rows) >= _MANY:
        return _match_together(rows, records.shape[1], sums, load, done)
    every = slice(0, len(rows))
    block = load(every)
    match = np.array_equal(row_checksums(rows, block), sums)
    put(every, block)
    return match


def _match_together(
    rows: npt.NDArray[np.int64],
    width: int,
    expected: npt.NDArray[np.uint32],
    load: Load,
    done: Done | None = None,
) -> bool:
    """Whether groups of records have the checksums they have if each has the expected one.

    The groups have the same number of records, but for the first, which has the rest. A thread
    loads a group, and checks it while it is in its cache; the caller computes meanwhile what the
    checksums must be.
    """
    count = len(rows)
    size = _group_size(count, width)
    groups = -(-count // size)
    found, known = np.empty(groups, np.uint32), np.empty(groups, np.uint32)

    def work(part: slice) -> None:
        for number in range(part.start, part.stop):
            end = count - (groups - 1 - number) * size
            here = slice(max(0, end - size), end)
            records = load(here)
            found[number] = _register(records)
            if done is not None:
                done(here, records)

    def expect() -> None:
        known[:] = _of_groups(rows, expected, width, size)

    in_parts(work, groups, groups, least=1, pieces=_PARTS_PER_THREAD, here=expect)
    return np.array_equal(found, known)


def _group_size(count: int, width: int) -> int:
    """Return how many of `count` records a thread copies and checks at a time.

    Threads take turns at the interpreter for each step of their work: as few groups as there are
    threads are best, of lengths that `_of_groups` can join.
    """
    nbytes = min(max(_PART_BYTES, count * width // threads_here()), _MOST_PART_BYTES)
    size = max(1, nbytes // width)
    for joined in (_JOINED, _JOINED**2):
        if size > joined:
            size -= size % joined
    return size


def _of_groups(
    rows: npt.NDArray[np.int64], expected: npt.NDArray[np.uint32], width: int, size: int
) -> npt.NDArray[np.uint32]:
    """Return the register after each group of `size` records, if it starts from zero.

    The register of crc32c starts from all ones and is inverted at the end. Here, each record is
    taken as if the register had started from zero, so that records before it, whose bytes shift it
    by as many zeros as the record has bytes, only add to it.
    """
    ones = np.full(1, 0xFFFFFFFF, np.uint32)
    own = expected ^ _id_parts(rows, width) ^ (~_shifted(ones, _by_zeros(width, 0)))
    missing = -own.size % size
    if missing:  # before all others, where zeros add nothing
        own = np.concatenate([np.zeros(missing, np.uint32), own])
    level = 0
    while size > 1:
        count = min(size, _JOINED)
        first = _JOINED - count
        shifts, at = _shifts(width, level)[4 * 256 * first :], _AT[: 4 * count]
        own = np.bitwise_xor.reduce(shifts.take(own.view(np.uint8).reshape(-1, 4 * count) + at), 1)
        size, level = size // count, level + 1
    return own


def _register(data: npt.NDArray[np.uint8]) -> int:
    """Return the register of crc32c after contiguous bytes, if it starts from zero."""
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


@lru_cache(maxsize=64)
def _shifts(width: int, level: int) -> npt.NDArray[np.uint32]:
    """Return what follows makes of each value of each byte of the registers of one to be joined.

    `(_JOINED * 4 * 256,)`: behind the last one nothing follows, behind the others one more each
    time, of `width` bytes times as many as levels below have joined.
    """
    zeros = _by_zeros(width, level * _LOG_JOINED)
    values = np.arange(256, dtype=np.uint32)
    each = [np.concatenate([values << np.uint32(8 * byte) for byte in range(4)])]
    for _ in range(_JOINED - 1):
        each.append(_shifted(each[-1], zeros))
    return np.concatenate(each[::-1])


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
