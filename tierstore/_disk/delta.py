"""A delta: the records changed in one version, with their ids and checksums.

    records   n × record_bytes     at position p: a row that changed
    ids       n × uint64
    sums      n × uint32           crc32c(id ‖ record)
    footer    64 bytes             what the file is, and a checksum of ids, sums and itself

Where a row occurs more than once, the last one counts.

A live delta is that of the version that is being written. Records are put at positions as they are
evicted; rows that are evicted again overwrite their own where those lie close together, and
elsewhere supersede them. Sealing makes it a delta. No manifest names a live delta, so a crash
leaves a file that the next writer removes.

Putting records takes space in the file and notes their ids: a full disk raises in the caller.
Writing the bytes and computing their checksums may be left to a thread (`Behind`); `_sums`, `_torn`
and what is mapped are changed where the bytes are written.
"""

from __future__ import annotations

import mmap
import struct
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import _checksum, _io
from tierstore._disk.manifest import DeltaInfo
from tierstore._disk.readahead import MappedRows
from tierstore._disk.write_queue import Behind, Piece
from tierstore.errors import (
    ROW_CURE,
    ConcurrentWriterError,
    CorruptRowError,
    CorruptStoreError,
    StoreIOError,
)

__all__ = ["FOOTER_BYTES", "Delta", "LiveDelta", "footer_checksum", "make_footer", "read_records"]

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

    def __init__(self, file: _io.File, info: DeltaInfo, *, store: bytes, record_bytes: int) -> None:
        """Map and check a delta: its exact size, its footer, its ids and checksums.

        The file may be closed afterwards. Raises CorruptStoreError if anything differs from what
        the manifest says.
        """
        self.info = info
        self.record_bytes = record_bytes
        body = info.rows * record_bytes
        sums_at = body + 8 * info.rows
        expected_size, found_size = sums_at + 4 * info.rows + FOOTER_BYTES, file.size
        if not info.size == expected_size == found_size:
            raise CorruptStoreError(
                f"{file.path} has {found_size} bytes, {expected_size} are expected; restore it "
                "from a copy, or open an older version"
            )
        data = _io.map_files([file], info.size, advice=mmap.MADV_RANDOM)
        self.records: npt.NDArray[np.uint8] = data[:body].reshape(info.rows, record_bytes)
        self.ids: npt.NDArray[np.int64] = data[body:sums_at].view("<i8")
        self.sums: npt.NDArray[np.uint32] = data[sums_at:-FOOTER_BYTES].view("<u4")
        expected = make_footer(
            store, info.version, info.rows, record_bytes, _checksum.crc32c(data[body:-FOOTER_BYTES])
        )
        found = data[-FOOTER_BYTES:].tobytes()
        if found != expected or footer_checksum(found) != info.crc32c:
            raise CorruptStoreError(
                f"{file.path}: ids, checksums or footer are damaged, or it belongs to another "
                "store or version; restore it from a copy, or open an older version"
            )

    @classmethod
    def open(
        cls, directory: _io.Directory, info: DeltaInfo, *, store: bytes, record_bytes: int
    ) -> Delta:
        """Open a delta by its name, and check it; raises CorruptStoreError."""
        try:
            file = directory.open_file(info.name)
        except FileNotFoundError:
            raise CorruptStoreError(
                f"{directory.join(info.name)} is missing, which version {info.version} needs; "
                "restore it from a copy, or open an older version"
            ) from None
        with file:
            return cls(file, info, store=store, record_bytes=record_bytes)

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


_ALLOCATION = (1 << 20, 64 << 20)
_NEAR_BYTES = 16 << 10
_PIECE_BYTES = 4 << 20
_FEW = 64
_ROWS_A_WRITE = 8
"""Records that are appended, and copied once more later, in the time of one write elsewhere."""
_SENT_AT_ONCE = 1 << 20
"""Bytes written in one piece that are unlikely to change again before the commit."""
_CACHED_BYTES = 32 << 20
"""Bytes of a commit that the page cache takes at once; with more, one waits for the disk anyway."""


def _parts(positions: npt.NDArray[np.int64], record_bytes: int) -> list[slice]:
    """Split ascending positions where the gap is wide or a piece would get long."""
    if positions.size and positions[-1] - positions[0] == positions.size - 1:
        return [slice(0, positions.size)]
    blocks = positions // max(1, _PIECE_BYTES // record_bytes)
    wide = np.diff(positions) > 1 + _NEAR_BYTES // record_bytes
    edges = [0, *(1 + np.flatnonzero(wide | (np.diff(blocks) != 0))).tolist(), positions.size]
    return [slice(first, stop) for first, stop in pairwise(edges) if first < stop]


class LiveDelta:
    """The delta of the version that is being written.

    Attributes:
        count: positions in use, those of superseded records too.
        full: whether there is no space for more than is needed.
    """

    def __init__(
        self, directory: _io.Holder, name: str, record_bytes: int, *, room: int = 0
    ) -> None:
        """Create the file; `room` bytes of records may wait in memory to be written."""
        self.name = name
        self.record_bytes = record_bytes
        self.count: int = 0
        self.full = False
        self._directory = directory
        self._file = _io.hold_file(directory, name, create=True)
        self._allocated = 0
        self._resident_bytes = 0
        self._mapped = np.empty((0, record_bytes), np.uint8)
        self._ids = np.empty(0, np.int64)
        self._sums = np.empty(0, np.uint32)
        self._torn = np.empty(0, np.int64)
        self._behind = Behind(self._write_piece, record_bytes, room)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Row ids by position."""
        return self._ids[: self.count]

    def put(
        self,
        positions: npt.NDArray[np.int64],
        rows: npt.NDArray[np.int64],
        records: npt.NDArray[np.uint8],
        *,
        resident: bool = False,
    ) -> None:
        """Put records `(n, record_bytes)` at distinct positions; new ones follow on `count`.

        Of those that are `resident` above, all but the first go past the page cache. Nothing is
        durable before the delta is sealed and synced. If the disk is full nothing has changed. If a
        write fails, records it was to replace may be damaged: until they are put again they cannot
        be read, nor the delta be sealed. So it is if records that were put before cannot be
        written; those are not lost.
        """
        count = max(self.count, int(positions.max(initial=-1)) + 1)
        self._reserve(count)
        if (positions[1:] < positions[:-1]).any():
            order = np.argsort(positions, kind="stable")
            positions, rows, records = positions[order], rows[order], records[order]
        self._resident_bytes += records.nbytes if resident else 0
        cached = not resident or self._resident_bytes <= _CACHED_BYTES
        self._behind.put(Piece(positions, rows, records, cached), now=resident and cached)
        self._ids[positions] = rows
        self.count = count

    def _write_piece(self, piece: Piece) -> None:
        """Write a piece to the file, and note its checksums."""
        positions = piece.positions
        try:
            for part in _parts(positions, self.record_bytes):
                self._write(positions[part], piece.records[part], cached=piece.cached)
            sums = _checksum.row_checksums(piece.rows, piece.records)  # while the disk is at work
        except BaseException:
            self._torn = np.union1d(self._torn, positions[positions < self.count])
            raise
        if self._torn.size:
            self._torn = np.setdiff1d(self._torn, positions)
        self._sums = _grown(self._sums, int(positions.max(initial=-1)) + 1)
        self._sums[positions] = sums

    def _write(
        self, positions: npt.NDArray[np.int64], records: npt.NDArray[np.uint8], *, cached: bool
    ) -> None:
        """Write records at positions near each other, in one piece.

        What lies between them is written again as it is: that takes less than more system calls.
        """
        first, last = int(positions[0]), int(positions[-1])
        offset = first * self.record_bytes
        if last - first >= positions.size:
            piece = self._records(last + 1)[first:].copy()
            piece[positions - first] = records
            with self._file.use() as file:
                file.write(piece, offset)
            return
        data = np.ascontiguousarray(records).reshape(-1)
        with self._file.use() as file:
            if not cached:
                _io.direct.write(file, data, offset)
                return
            file.write(data, offset)
            if data.nbytes >= _SENT_AT_ONCE:
                file.start_writing(offset, data.nbytes)

    def scattered(self, positions: npt.NDArray[np.int64]) -> bool:
        """Whether to put records at `positions` takes longer than to put them behind all others."""
        if self.full or positions.size < _FEW:
            return False
        parts = _parts(np.sort(positions), self.record_bytes)
        return len(parts) * _ROWS_A_WRITE > positions.size

    def _reserve(self, count: int) -> None:
        self._ids = _grown(self._ids, count)
        needed = count * self.record_bytes
        if needed > self._allocated:
            least, most = _ALLOCATION
            step = max(needed - self._allocated, min(max(self._allocated, least), most))
            with self._file.use() as file:
                file.allocate(self._allocated, step)
            self._allocated += step

    def _records(self, count: int) -> npt.NDArray[np.uint8]:
        """Return the first `count` records, for which there is space, as they are in the file."""
        mapped = self._mapped
        if len(mapped) < count:
            whole = self._allocated // self.record_bytes
            nbytes = whole * self.record_bytes
            with self._file.use() as file:
                data = _io.map_files([file], nbytes, advice=mmap.MADV_RANDOM)
            mapped = self._mapped = data.reshape(whole, self.record_bytes)
        return mapped[:count]

    def read(self, positions: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
        """Copy the records at `positions` `(n,)` into `out` `(n, record_bytes)` and check each."""
        written = np.ones(positions.size, np.bool_)
        for which, records, at in self._behind.find(positions):
            out[which] = records[at]
            written[which] = False
        if written.all():
            self._read(positions, out)
        elif written.any():
            block = np.empty((np.count_nonzero(written), self.record_bytes), np.uint8)
            self._read(positions[written], block)
            out[written] = block

    def _read(self, positions: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
        if self._torn.size:
            self._refuse(np.intersect1d(positions, self._torn))
        read_records(self.name, self._records(self.count), self._ids, self._sums, positions, out)

    def places(self, positions: npt.NDArray[np.int64]) -> list[MappedRows]:
        """Return where those of the records at `positions` are mapped that were written."""
        written = np.ones(positions.size, np.bool_)
        for which, _, _ in self._behind.find(positions):
            written[which] = False
        return [MappedRows(self._records(self.count), positions[written])]

    def drain(self) -> None:
        """Wait until all records are in the file, though not durable. Raises as `put` does."""
        self._behind.drain()

    def seal(self, *, store: bytes, version: int) -> Delta:
        """Complete the file, which is not durable until it is synced; map it as it will be read.

        Where the version is not published after all, records may be put again and the delta be
        sealed again. Raises StoreIOError where records were damaged by a write that failed,
        ConcurrentWriterError where another program removed the file.
        """
        self.drain()
        if self._torn.size:
            self._refuse(self._torn)
        tail = self.ids.astype("<i8").tobytes() + self._sums[: self.count].astype("<u4").tobytes()
        footer = make_footer(store, version, self.count, self.record_bytes, _checksum.crc32c(tail))
        body = self.count * self.record_bytes
        size = body + len(tail) + FOOTER_BYTES
        info = DeltaInfo(self.name, size, self.count, version, footer_checksum(footer))
        with self._file.use() as file:
            if size > self._allocated:
                file.allocate(body, size - body)
            file.write(tail + footer, body)
            file.truncate(size)
            self._allocated = body
            self._mapped = self._mapped[: self.count]
            file.start_writing(body, size - body)
            if file.nameless:
                raise ConcurrentWriterError(
                    f"{file.path} was removed before it was committed: another writer takes the "
                    "store for its own, which the lock should prevent; open it again"
                )
            return Delta(file, info, store=store, record_bytes=self.record_bytes)

    def sync(self) -> None:
        """Make the file durable; its name is not, until the directory is synced."""
        self._file.sync()

    def _refuse(self, torn: npt.NDArray[np.int64]) -> None:
        if torn.size:
            raise StoreIOError(
                f"{torn.size} rows in {self._file.path} were damaged when a write failed; "
                "write them again, or roll back"
            )

    def close(self) -> None:
        """Drop what waits and close the file; a mapping of it lives as long as it is read."""
        self._behind.drop()
        self._file.close()
        self._mapped = np.empty((0, self.record_bytes), np.uint8)
        self._ids, self._sums = np.empty(0, np.int64), np.empty(0, np.uint32)

    def remove(self) -> None:
        """Close and delete the file: its rows were never committed."""
        self.close()
        with self._directory.use() as directory:
            directory.unlink(self.name)


def _grown(array: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    """Return an array of at least `count` elements that begins with those of another."""
    if count <= array.size:
        return array
    room = np.zeros(max(count, 2 * array.size, 1024), array.dtype)
    room[: array.size] = array
    return room
