"""What binds a base to a manifest: a digest of its row checksums.

A fold writes over the files of a base and keeps their names. Files of another moment, from a backup
or half copied, have rows that match their checksums, so each manifest names a digest: a file, never
changed, that holds the crc32c of each 65,536 row checksums. A fold writes the next one.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tierstore import _io
from tierstore._checksum import crc32c
from tierstore._disk.base import CHECKSUMS
from tierstore._disk.manifest import DigestInfo, unique_name
from tierstore._disk.records import BLOCK_BYTES
from tierstore.errors import CorruptStoreError

__all__ = ["DIGEST_ROWS", "block_sums", "foreign_blocks", "read_digest", "write_digest"]

DIGEST_ROWS = 1 << 16
"""Rows whose checksums make one block."""

Blocks = npt.NDArray[np.int64]
Sums = npt.NDArray[np.uint32]


class Computing(Protocol):
    """A base, or the tier over it."""

    record_bytes: int

    def computed_checksums(self, rows: npt.NDArray[np.int64]) -> Sums:
        """Return what the checksums of `rows` of the base are by their records."""


def block_sums(generation: _io.Directory, rows: int, blocks: Blocks | None = None) -> Sums:
    """Return the crc32c of blocks `(n,)` of the row checksums in a generation; None: of all."""
    numbers = range(_block_count(rows)) if blocks is None else blocks.tolist()
    with generation.open_file(CHECKSUMS) as file:
        return np.fromiter((_block_sum(file, rows, number) for number in numbers), np.uint32)


def _block_sum(file: _io.File, rows: int, number: int) -> int:
    first = number * DIGEST_ROWS
    offset, nbytes = 4 * first, 4 * min(DIGEST_ROWS, rows - first)
    if file.is_hole(offset, nbytes):
        return _zeros_sum(nbytes)
    return crc32c(file.read(nbytes, offset))


@cache
def _zeros_sum(nbytes: int) -> int:
    return crc32c(bytes(nbytes))


def foreign_blocks(
    generation: _io.Directory,
    base: Computing,
    rows: int,
    digest: Sums,
    touched: Blocks,
    *,
    most: int | None = None,
) -> list[int]:
    """Return the blocks of row checksums of another moment than a manifest's digest.

    Those that are `touched` by deltas that a fold may be merging are left out; `most` is how many
    others are compared, spread evenly. Where the records alone give what the digest says, checksums
    are damaged and the base is not another: those rows cannot be read, and others can.
    """
    blocks = np.setdiff1d(np.arange(digest.size), touched)
    if most is not None and blocks.size > most:
        blocks = blocks[np.linspace(0, blocks.size - 1, most).astype(np.int64)]
    differing = blocks[block_sums(generation, rows, blocks) != digest[blocks]].tolist()
    return [block for block in differing if not _gives(base, rows, block, int(digest[block]))]


def _gives(base: Computing, rows: int, block: int, expected: int) -> bool:
    """Whether the records of a block give checksums of the expected crc32c."""
    stop = min((block + 1) * DIGEST_ROWS, rows)
    step = max(1, BLOCK_BYTES // base.record_bytes)
    value = 0
    try:
        for start in range(block * DIGEST_ROWS, stop, step):
            sums = base.computed_checksums(np.arange(start, min(start + step, stop)))
            value = crc32c(sums.astype("<u4").view(np.uint8), value)
    except CorruptStoreError:
        return True  # a chunk that cannot be decoded says nothing of its moment
    return value == expected


def _block_count(rows: int) -> int:
    return -(-rows // DIGEST_ROWS)


def write_digest(generation: _io.Directory, sums: Sums, seq: int) -> DigestInfo:
    """Write a digest for the manifest of a number; its bytes are durable, its name is not."""
    data = sums.astype("<u4").tobytes()
    name = unique_name("digest-", seq, ".crc")
    generation.write_file(name, data)
    return DigestInfo(name, len(data), crc32c(data))


def read_digest(generation: _io.Directory, info: DigestInfo, rows: int) -> Sums | None:
    """Return the digest of a base of so many rows; None if it is damaged.

    Raises CorruptStoreError where it is missing or of another size, as it is where a generation
    was restored from a copy of another moment.
    """
    path, size = generation.join(info.name), 4 * _block_count(rows)
    try:
        found = generation.size(info.name)
    except FileNotFoundError:
        raise CorruptStoreError(
            f"{path} is missing, which says what the base must hold; restore the whole store from "
            "one copy"
        ) from None
    if not found == info.size == size:
        raise CorruptStoreError(
            f"{path} has {found} bytes, {size} are expected; restore the whole store from one copy"
        )
    data = generation.read_file(info.name, size)
    return np.frombuffer(data, "<u4") if crc32c(data) == info.crc32c else None
