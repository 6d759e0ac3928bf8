"""Random calls of the core with the results that they must have, for tests/core/driver.c."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SUM_BYTES, SUM_ROWS, CHECK_ROWS, COPY_ROWS = range(4)

_BYTES = np.arange(256, dtype=np.uint32)
for _ in range(8):
    _BYTES = np.where(_BYTES & 1, _BYTES >> 1 ^ np.uint32(0x82F63B78), _BYTES >> 1)


def crc32c(records: npt.NDArray[np.uint8], value: int = 0) -> npt.NDArray[np.uint32]:
    """The oracle: the crc32c of each of `records` `(n, bytes)`, byte by byte."""
    crc = np.full(len(records), ~np.uint32(value))
    for column in records.T:
        crc = crc >> 8 ^ _BYTES[(crc ^ column) & 255]
    return ~crc


def row_checksums(rows: npt.NDArray[Any], records: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """The oracle of rows: crc32c(row as eight bytes ‖ record)."""
    return crc32c(np.concatenate([rows.astype("<i8").view(np.uint8).reshape(-1, 8), records], 1))


def step(rng: np.random.Generator) -> bytes:
    """One call: a head, its arguments, and what it must return and write."""
    kind = int(rng.integers(4))
    width, n = int(rng.choice([0, 1, 7, 8, 9, 16, 64, 192, 200, 513])), int(rng.integers(0, 150))
    if kind == SUM_BYTES:
        data = rng.integers(0, 256, (1, int(rng.integers(0, 6000))), np.uint8)
        value = int(rng.integers(2**32))
        result = int(crc32c(data, value)[0])
        return struct.pack("<8q", kind, 0, 1, 0, data.size, value, result, 0) + data.tobytes()
    apart, sparse = int(rng.integers(0, 9)), bool(rng.integers(2)) and kind != SUM_ROWS
    placed = kind == COPY_ROWS
    count = int(rng.integers(1, 200)) if placed else n
    source = rng.integers(0, 256, (count, width + apart), np.uint8)
    source[rng.random(count) < 0.1] = 0
    at = rng.integers(0, count, n) if placed else np.arange(n)
    rows = rng.integers(0, 1 << int(rng.integers(1, 63)), n)
    records = source[at, :width]
    true = row_checksums(rows, records)
    sums = true.copy()
    wrong = rng.random(n) < rng.choice([0, 0.1, 1])
    if kind != SUM_ROWS:
        sums[wrong] ^= rng.integers(1, 2**32, int(wrong.sum())).astype(np.uint32)
        sums[rng.random(n) < 0.1] = 0
    bad = np.flatnonzero((sums != true) & ~(sparse & (sums == 0) & ~records.any(1)))
    result = n if kind == SUM_ROWS else bad.size
    if placed and n and rng.random() < 0.1:
        first = int(rng.integers(n))
        at[first] = rng.choice([-1, count, 2**62, -(2**63)])
        result, bad = -(first + 1), bad[:0]
    stride = source.shape[1]
    extent = (count - 1) * stride + width if count else 0
    if rng.random() < 0.3:  # as NumPy's [::-1]: the last record is the first in memory
        source, stride = source[::-1], -stride
    return b"".join(
        [
            struct.pack("<8q", kind, n, count, stride, width, sparse, result, placed),
            rows.astype("<i8").tobytes(),
            at.astype("<i8").tobytes() if placed else b"",
            source.tobytes()[:extent],
            sums.astype("<u4").tobytes(),
            bad.astype("<i8").tobytes() if kind != SUM_ROWS else b"",
        ]
    )


def write(path: Path, seed: int, steps: int) -> None:
    """Write a program of so many calls."""
    rng = np.random.default_rng(seed)
    path.write_bytes(b"".join(step(rng) for _ in range(steps)))
