"""A delta: the records changed in one version, with their ids and checksums.

    records   n × record_bytes     at position p: a row that changed
    ids       n × uint64
    sums      n × uint32           crc32c(id ‖ record)
    footer    64 bytes             what the file is, and a checksum of ids, sums and itself

Where a row occurs more than once, the last one counts. `live` is about deltas that are being
written.
"""

from __future__ import annotations

import mmap
import struct

import numpy as np
import numpy.typing as npt

from tierstore import _checksum, _io
from tierstore._disk.manifest import DeltaInfo
from tierstore._disk.readahead import MappedRows
from tierstore.errors import ROW_CURE, CorruptRowError, CorruptStoreError

__all__ = ["FOOTER_BYTES", "Delta", "footer_checksum", "make_footer", "read_records"]

_MAGIC = b"TSDELTA1"
_FOOTER = struct.Struct("<8s16sQQQI")
FOOTER_BYTES = 64
_CHECKED_BYTES = 4 << 20


def make_footer(store: bytes, version: int, count: int, record_bytes: int, body: int) -> bytes:
    """Return the footer of a delta of `count` records; `body`: checksum of its ids and sums."""
    head = _FOOTER.pack(_MAGIC, store, version, count, record_bytes, body)
    head = head.ljust(FOOTER_BYTES - 4, b"\0")
    return head + struct.pack("<I", _checksum.crc32c(head))


def footer_checksum(footer: bytes) -> int:
    """Return the checksum a footer ends with, which tells this delta from all others.

    That of a footer with its checksum would not: it is the same for every one.
    """
    return int.from_bytes(footer[-4:], "little")


def read_records(
    name: str,
    records: npt.NDArray[np.uint8],
    ids: npt.NDArray[np.int64],
    sums: npt.NDArray[np.uint32],
    positions: npt.NDArray[np.int64],
    out: npt.NDArray[np.uint8],
) -> None:
    """Copy the records at `positions` `(n,)` into `out` `(n, record_bytes)` and check each.

    `records`, `ids` and `sums` are those of a delta, by position; `name` is for messages. Raises
    CorruptRowError.
    """
    np.take(records, positions, axis=0, out=out, mode="clip")
    rows = ids[positions]
    wrong = _checksum.mismatches(rows, out, sums[positions])
    if wrong.size:
        bad = np.unique(rows[wrong]).tolist()
        raise CorruptRowError(
            f"{len(bad)} rows in {name} do not match their checksum, the first is row {bad[0]}; "
            + ROW_CURE,
            rows=bad,
            file=name,
        )


class Delta:
    """A sealed delta, immutable, mapped to be read by position."""

    def __init__(
        self, directory: _io.Directory, info: DeltaInfo, *, store: bytes, record_bytes: int
    ) -> None:
        """Open and check a delta: its exact size, its footer, its ids and checksums.

        Raises CorruptStoreError if anything differs from what the manifest says.
        """
        self.info = info
        self.record_bytes = record_bytes
        self._sums_at = info.rows * (record_bytes + 8)
        try:
            file = directory.open_file(info.name)
        except FileNotFoundError:
            raise CorruptStoreError(
                f"{directory.join(info.name)} is missing, which version {info.version} needs; "
                "restore it from a copy, or open an older version"
            ) from None
        with file:
            self._check_size(file)
            data = _io.map_files([file], info.size, advice=mmap.MADV_RANDOM)
        body = info.rows * record_bytes
        self.records: npt.NDArray[np.uint8] = data[:body].reshape(info.rows, record_bytes)
        self.ids: npt.NDArray[np.int64] = data[body : self._sums_at].view("<i8")
        self.sums: npt.NDArray[np.uint32] = data[self._sums_at : -FOOTER_BYTES].view("<u4")
        expected = make_footer(
            store, info.version, info.rows, record_bytes, _checksum.crc32c(data[body:-FOOTER_BYTES])
        )
        found = data[-FOOTER_BYTES:].tobytes()
        if found != expected or footer_checksum(found) != info.crc32c:
            raise CorruptStoreError(
                f"{file.path}: ids, checksums or footer are damaged, or it belongs to another "
                "store or version; restore it from a copy, or open an older version"
            )

    def _check_size(self, file: _io.File) -> None:
        expected = self._sums_at + 4 * self.info.rows + FOOTER_BYTES
        if self.info.size != expected or file.size != expected:
            raise CorruptStoreError(
                f"{file.path} has {file.size} bytes, {expected} are expected; restore it from a "
                "copy, or open an older version"
            )

    def read(self, positions: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
        """Copy the records at `positions` `(n,)` into `out` `(n, record_bytes)` and check each."""
        read_records(self.info.name, self.records, self.ids, self.sums, positions, out)

    def places(self, positions: npt.NDArray[np.int64]) -> list[MappedRows]:
        """Return where the records at `positions` are mapped, and their ids and checksums."""
        beside = (self.ids.view(np.uint8).reshape(-1, 8), self.sums.view(np.uint8).reshape(-1, 4))
        return [MappedRows(each, positions) for each in (self.records, *beside)]

    def damaged(self) -> list[int]:
        """Return the rows whose record does not match its checksum."""
        bad: list[int] = []
        step = max(1, _CHECKED_BYTES // self.record_bytes)
        for start in range(0, self.info.rows, step):
            ids = self.ids[start : start + step]
            wrong = _checksum.mismatches(
                ids, self.records[start : start + step], self.sums[start : start + step]
            )
            bad += ids[wrong].tolist()
        return bad
