"""A delta: the records changed in one version, with their ids and checksums.

    records   n × record_bytes     at position p: a row that changed
    ids       n × uint64
    sums      n × uint32           crc32c(id ‖ record)
    footer    64 bytes             the identity of the file; a checksum of ids, sums and footer

If a row occurs more than once, its last record counts. If many consecutive rows change, such as
those of arriving keys, the footer states the first one: such a run is opened without its ids, and
these and the checksums are compared with the footer at their first use.

A live delta collects the records of the version being written. Each evicted record gets a position.
A row that is evicted again overwrites its old record if the positions of the batch are close
together, and otherwise gets another position; see `Segments`. Sealing turns a live delta into a
delta, in which dead records count as earlier ones of the last row. No manifest names a live delta,
so a crash leaves a file that the next writer removes.

`put` allocates space in the file and records the ids, so a full disk raises in the caller. A thread
(`WriteQueue`) may write the bytes and compute their checksums; `_sums`, `_torn` and the mapping are
updated there.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import _checksum, _io
from tierstore._disk import footer
from tierstore._disk.behind import Behind
from tierstore._disk.footer import FOOTER_BYTES
from tierstore._disk.manifest import DeltaInfo
from tierstore._disk.readahead import MappedRows
from tierstore._disk.segments import Segments
from tierstore._disk.write_queue import Piece, WriteQueue
from tierstore._rowcopy import Target, ascends, call_at
from tierstore.errors import (
    ROW_CURE,
    ConcurrentWriterError,
    CorruptRowError,
    CorruptStoreError,
    StoreIOError,
    counted,
)

Get = Callable[[Any, npt.NDArray[np.uint8]], object]
"""Copies some of the records to be written, a slice or positions, to where they are wanted."""

_CHECKED_BYTES = 4 << 20
_IDS = 1 << 20
_MOST_ROWS = 2**63


def _refuse(name: str, rows: npt.NDArray[np.int64], wrong: npt.NDArray[np.int64]) -> None:
    """Raise CorruptRowError if any of `rows` `(n,)`, at positions `wrong`, do not match."""
    if wrong.size:
        bad = np.unique(rows[wrong]).tolist()
        raise CorruptRowError(
            f"{counted(len(bad), 'row does', 'rows do')} not match the checksum in {name}, the "
            f"first is row {bad[0]}; " + ROW_CURE,
            rows=bad,
            file=name,
        )


class Delta:
    """A sealed, immutable delta, mapped for reading by position.

    Attributes:
        first: the first of its rows if they ascend by one and the footer states it; else None.
    """

    def __init__(self, file: _io.File, info: DeltaInfo, *, store: bytes, record_bytes: int) -> None:
        """Map a delta; check its exact size, its footer and, except for a run, ids and checksums.

        The file may be closed afterwards. Raises CorruptStoreError if the file does not match the
        manifest.
        """
        self.info = info
        self.record_bytes = record_bytes
        body = info.rows * record_bytes
        sums_at = body + 8 * info.rows
        expected_size, found_size = sums_at + 4 * info.rows + FOOTER_BYTES, file.size
        if not info.size == expected_size == found_size:
            raise CorruptStoreError(
                f"{file.path} has {found_size} bytes instead of {expected_size}; restore it "
                "from a copy, or open an older version"
            )
        self._path = file.path
        data = _io.map_files([file], info.size, advice=mmap.MADV_RANDOM)
        self.records: npt.NDArray[np.uint8] = data[:body].reshape(info.rows, record_bytes)
        self._beside = data[body:-FOOTER_BYTES]
        self._ids: npt.NDArray[np.int64] = data[body:sums_at].view("<i8")
        self._sums: npt.NDArray[np.uint32] = data[sums_at:-FOOTER_BYTES].view("<u4")
        found = data[-FOOTER_BYTES:].tobytes()
        self._body_sum, first = footer.read(found, info.rows)
        self.first: int | None = first if first is None or first < _MOST_ROWS - info.rows else None
        self._is_checked = self.first is None
        if self._is_checked:
            self._body_sum = _checksum.crc32c(self._beside)
        expected, crc32c = footer.make(
            store, info.version, info.rows, record_bytes, self._body_sum, self.first
        )
        if found != expected or crc32c != info.crc32c:
            raise self._damage()

    def _damage(self) -> CorruptStoreError:
        return CorruptStoreError(
            f"{self._path}: ids, checksums or footer are damaged, or the file is from another "
            "store or version; restore it from a copy, or open an older version"
        )

    def check(self) -> None:
        """Compare ids and checksums with the footer; raises CorruptStoreError if they differ.

        Opening does so unless the rows ascend by one: then ids are not needed to find a row,
        and a record is read only if it matches its checksum.
        """
        if self._is_checked:
            return
        whole = _checksum.crc32c(self._beside) == self._body_sum
        for at in range(0, self.info.rows, _IDS):
            ids = self._ids[at : at + _IDS]
            whole = whole and np.array_equal(ids, self._rows(np.arange(at, at + ids.size)))
        if not whole:
            raise self._damage()
        self._is_checked = True

    def _rows(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the row ids of records; those of a run are computed, not read."""
        return self._ids[positions] if self.first is None else positions + self.first

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Row ids by position; raises CorruptStoreError as `check` does."""
        self.check()
        return self._ids

    @property
    def sums(self) -> npt.NDArray[np.uint32]:
        """The checksums of ids and records by position; raises as `check` does."""
        self.check()
        return self._sums

    @classmethod
    def open(
        cls, directory: _io.Directory, info: DeltaInfo, *, store: bytes, record_bytes: int
    ) -> Delta:
        """Open a delta by name and check it; raises CorruptStoreError."""
        try:
            file = directory.open_file(info.name)
        except FileNotFoundError:
            raise CorruptStoreError(
                f"{directory.join(info.name)} is missing, but version {info.version} needs it; "
                "restore it from a copy, or open an older version"
            ) from None
        with file:
            return cls(file, info, store=store, record_bytes=record_bytes)

    @cached_property
    def span(self) -> tuple[int, int]:
        """The first of its rows and the last; (0, -1) if it has none."""
        if self.first is not None:
            return self.first, self.first + self.info.rows - 1
        ids = self.ids
        if self._ascends and ids.size:
            return int(ids[0]), int(ids[-1])
        return int(ids.min(initial=0)), int(ids.max(initial=-1))

    def find(
        self, rows: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int64]]:
        """Return which of `rows` `(n,)` have a record here, and the positions of these."""
        if self.first is not None:
            which = np.flatnonzero((rows >= self.first) & (rows < self.first + self.info.rows))
            return which, rows[which] - self.first
        order = None  # of a row that repeats, the last counts
        if not self._ascends:
            order = np.argsort(self.ids, kind="stable")
        at = np.searchsorted(self.ids, rows, "right", sorter=order) - 1
        which = np.flatnonzero(at >= 0)
        positions = at[which] if order is None else order[at[which]]
        here = self.ids[positions] == rows[which]
        return which[here], positions[here]

    @cached_property
    def _ascends(self) -> bool:
        """Whether its rows ascend, as those that a commit writes from memory do."""
        return ascends(self.ids)

    def blocks(self, rows: int) -> npt.NDArray[np.int64]:
        """Return the numbers of the blocks of `rows` rows in which it has rows; they may repeat."""
        if self.first is not None:
            return np.arange(self.first // rows, self.span[1] // rows + 1)
        return np.asarray(self.ids) // rows

    def read(self, positions: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
        """Copy the records at `positions` `(n,)` into `out` `(n, record_bytes)` and verify them."""
        self.deliver(positions, Target(out))

    def deliver(self, positions: npt.NDArray[np.int64], target: Target) -> None:
        """Copy the records at `positions` `(n,)` to a target and verify them."""
        rows, sums = self._rows(positions), self._sums[positions]
        wrong = _checksum.copy(self.records, positions, rows, sums, target)
        _refuse(self.info.name, rows, wrong)

    def places(self, positions: npt.NDArray[np.int64]) -> list[MappedRows]:
        """Return the mapped records at `positions`, and the other memory that `read` uses."""
        beside = [self._sums.view(np.uint8).reshape(-1, 4)]
        if self.first is None:
            beside.append(self._ids.view(np.uint8).reshape(-1, 8))
        return [MappedRows(each, positions) for each in (self.records, *beside)]

    def damaged(self) -> list[int]:
        """Return the rows whose records do not match their checksums."""
        bad: list[int] = []
        step = max(1, _CHECKED_BYTES // self.record_bytes)
        for start in range(0, self.info.rows, step):
            part = slice(start, start + step)
            wrong = _checksum.mismatches(self.ids[part], self.records[part], self.sums[part])
            bad += self.ids[part][wrong].tolist()
            _io.let_go(self.records[part])
        return bad


_ALLOCATION = (1 << 20, 64 << 20)
_NEAR_BYTES = 16 << 10
_PIECE_BYTES = 4 << 20
_FEW = 64
_FEW_POSITIONS = 1024
_ROWS_A_WRITE = 8
"""Cost of one scattered write, in records that are appended and copied once more later."""
_SENT_AT_ONCE = 1 << 20
"""Size of a write from which its records are unlikely to change again before the commit."""
_SEGMENT_BYTES = 4 << 20
"""Most bytes of positions that are used again together, written in one piece then."""
_SEGMENTS = 16
"""Least number of segments that the rows of a table take."""
_CACHED_BYTES = 32 << 20
"""Bytes of a commit that the page cache absorbs; larger commits wait for the disk anyway."""


def _splits(positions: npt.NDArray[np.int64], record_bytes: int) -> npt.NDArray[np.intp]:
    """Return where ascending positions have wide gaps, or a piece would become too long."""
    blocks = positions // max(1, _PIECE_BYTES // record_bytes)
    wide = np.diff(positions) > 1 + _NEAR_BYTES // record_bytes
    return 1 + np.flatnonzero(wide | (np.diff(blocks) != 0))


def _parts(positions: npt.NDArray[np.int64], record_bytes: int) -> list[slice]:
    """Return the parts of ascending positions that are written in one piece."""
    if positions.size and positions[-1] - positions[0] == positions.size - 1:
        return [slice(0, positions.size)]
    edges = [0, *_splits(positions, record_bytes).tolist(), positions.size]
    return [slice(first, stop) for first, stop in pairwise(edges) if first < stop]


class LiveDelta:
    """The delta of the version that is being written.

    Attributes:
        segments: which positions are in use.
        full: whether the disk has no space beyond the needed bytes.
    """

    def __init__(
        self,
        directory: _io.Holder,
        name: str,
        record_bytes: int,
        *,
        rows: int,
        room: int = 0,
        behind: Behind | None = None,
    ) -> None:
        """Create the file of a table of so many `rows`.

        Up to `room` bytes of records may be queued in memory for a thread. `behind` is that of the
        store, by default one of its own.
        """
        self.name = name
        self.record_bytes = record_bytes
        segment = max(1, min(_SEGMENT_BYTES // record_bytes, rows // _SEGMENTS))
        self.segments: Segments = Segments(segment)
        self.full = False
        self._directory = directory
        self._file = _io.hold_file(directory, name, create=True)
        self._allocated = 0
        self._resident_bytes = 0
        self._mapped = np.empty((0, record_bytes), np.uint8)
        self._ids = np.zeros(_FEW_POSITIONS, np.int64)
        self._sums = np.zeros(_FEW_POSITIONS, np.uint32)
        self._torn = np.empty(0, np.int64)
        self._loose = np.empty(0, np.int64)  # dead ones whose bytes may have changed
        self._queue = WriteQueue(self._write_piece, record_bytes, room, behind)

    @property
    def count(self) -> int:
        """The number of positions, including those of dead records."""
        return self.segments.count

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The distinct rows that have records here."""
        return self._ids[self.segments.newest()]

    def rows_at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the rows of the records at used `positions` `(n,)`."""
        return self._ids[positions]

    def put(
        self,
        positions: npt.NDArray[np.int64],
        rows: npt.NDArray[np.int64],
        get: Get,
        *,
        resident: bool = False,
    ) -> None:
        """Put records that `get` copies at distinct positions `(n,)`.

        New and dead ones among them are those that `segments` chose; they are used from now on.
        All but the first records that stay `resident` in the tier above bypass the page cache.
        Nothing is durable before the delta is sealed and synced. If the disk is full, nothing has
        changed. A failed write may damage the records that it replaces: until these are put again,
        they cannot be read and the delta cannot be sealed. The same holds for queued records that
        cannot be written; they are not lost.
        """
        count = max(self.segments.count, int(positions.max(initial=-1)) + 1)
        self._reserve(count)
        if (positions[1:] < positions[:-1]).any():
            order = np.argsort(positions, kind="stable")
            positions, rows, get = positions[order], rows[order], partial(call_at, get, order)
        self._resident_bytes += positions.size * self.record_bytes if resident else 0
        cached = not resident or self._resident_bytes <= _CACHED_BYTES
        used = positions[: np.searchsorted(positions, self.segments.count)]
        again = used[self.segments.dead(used)] if used.size else used
        try:
            self._queue.put(positions, rows, get, cached=cached, now=resident and cached)
        except BaseException:
            self._loose = np.union1d(self._loose, again)
            raise
        self._ids[positions] = rows
        self.segments.use(np.concatenate([again, positions[used.size :]]))
        if self._loose.size:
            self._loose = np.setdiff1d(self._loose, again)

    def await_room(self) -> None:
        """Wait until the disk has written enough of what is queued; any thread may do so."""
        self._queue.await_room()

    def _write_piece(self, piece: Piece) -> None:
        """Write a piece to the file and record its checksums."""
        positions = piece.positions
        try:
            for part in _parts(positions, self.record_bytes):
                self._write(positions[part], piece.records[part], cached=piece.cached)
            sums = _checksum.row_checksums(piece.rows, piece.records)  # while the disk works
            if (count := int(positions.max(initial=-1)) + 1) > self._sums.size:
                self._sums = _grown(self._sums, count)
            self._sums[positions] = sums
            if self._torn.size:
                self._torn = np.setdiff1d(self._torn, positions)
        except BaseException:
            used = positions[positions < self.segments.count]
            self._torn = np.union1d(self._torn, used[~self.segments.dead(used)])
            raise

    def _write(
        self, positions: npt.NDArray[np.int64], records: npt.NDArray[np.uint8], *, cached: bool
    ) -> None:
        """Write records at nearby positions in one piece.

        The records between them are rewritten unchanged, which is cheaper than more system calls.
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
        """Whether overwriting records at `positions` is slower than appending them.

        Damaged ones are overwritten: only that makes the file whole again.
        """
        if self.full or positions.size < _FEW or np.isin(positions, self._torn).any():
            return False
        parts = 1 + _splits(np.sort(positions), self.record_bytes).size
        return parts * _ROWS_A_WRITE > positions.size

    def _reserve(self, count: int) -> None:
        if count > self._ids.size:
            self._ids = _grown(self._ids, count)
        needed = count * self.record_bytes
        if needed > self._allocated:
            least, most = _ALLOCATION
            step = max(needed - self._allocated, min(max(self._allocated, least), most))
            with self._file.use() as file:
                file.allocate(self._allocated, step)
            self._allocated += step

    def _records(self, count: int) -> npt.NDArray[np.uint8]:
        """Return the first `count` records as mapped from the file."""
        mapped = self._mapped
        if len(mapped) < count:
            whole = self._allocated // self.record_bytes
            nbytes = whole * self.record_bytes
            with self._file.use() as file:
                data = _io.map_files([file], nbytes, advice=mmap.MADV_RANDOM)
            mapped = self._mapped = data.reshape(whole, self.record_bytes)
        return mapped[:count]

    def read(self, positions: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
        """Copy the records at `positions` `(n,)` into `out` `(n, record_bytes)` and verify them."""
        self.begin(positions, self._ids[positions], Target(out))()

    def begin(
        self, positions: npt.NDArray[np.int64], rows: npt.NDArray[np.int64], target: Target
    ) -> Callable[[], None]:
        """Copy those records at `positions` `(n,)`, of `rows`, that are queued to a target.

        Returns a function that copies the others, from the file. It may be called while another
        thread writes: a record in whose place there is another then does not match.
        """
        written = np.ones(positions.size, np.bool_)
        for which, records, at in self._queue.find(positions):
            target.of(which).put(records[at])
            written[which] = False
        left = np.flatnonzero(written)
        if left.size and self._torn.size:
            self._refuse(np.intersect1d(positions[left], self._torn))
        records = self._records(self.segments.count) if left.size else self._mapped
        if left.size < positions.size:
            positions, rows, target = positions[left], rows[left], target.of(left)
        sums = self._sums

        def deliver() -> None:
            wrong = _checksum.copy(records, positions, rows, sums[positions], target)
            _refuse(self.name, rows, wrong)

        return deliver

    def places(self, positions: npt.NDArray[np.int64]) -> list[MappedRows]:
        """Return the mapped memory of those records at `positions` that were written."""
        written = np.ones(positions.size, np.bool_)
        for which, _, _ in self._queue.find(positions):
            written[which] = False
        return [MappedRows(self._records(self.segments.count), positions[written])]

    def drain(self) -> None:
        """Wait until all records are in the file, not yet durable; raises the errors of `put`."""
        self._queue.drain()

    def seal(self, *, store: bytes, version: int) -> Delta:
        """Complete the file, which is durable only once it is synced, and map it as a delta.

        If the version is not published after all, more records may be put and the delta sealed
        again. Raises StoreIOError if a failed write damaged records, ConcurrentWriterError if
        another program removed the file.
        """
        self._queue.drain()
        if self._torn.size:
            self._refuse(self._torn)
        ids, sums = self._as_sealed()
        count = ids.size
        tail = ids.astype("<i8").tobytes() + sums.astype("<u4").tobytes()
        first, tail_sum = footer.run_of(ids), _checksum.crc32c(tail)
        end, crc32c = footer.make(store, version, count, self.record_bytes, tail_sum, first)
        body = count * self.record_bytes
        size = body + len(tail) + FOOTER_BYTES
        info = DeltaInfo(self.name, size, count, version, crc32c)
        with self._file.use() as file:
            if size > self._allocated:
                file.allocate(body, size - body)
            file.write(tail + end, body)
            file.truncate(size)
            self._allocated = body
            self._mapped = self._mapped[:count]
            file.start_writing(body, size - body)
            if file.nameless:
                raise ConcurrentWriterError(
                    f"{file.path} was removed before it was committed: another writer took over "
                    "the store, which the lock should prevent; open it again"
                )
            sealed = Delta(file, info, store=store, record_bytes=self.record_bytes)
        sealed.check()
        return sealed

    def _as_sealed(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
        """Return ids and checksums up to the last of the newest records.

        Of a row that repeats, the last record counts. A dead record may come after the newest of
        its row, but never after that at the end, whose row it counts for.
        """
        count = int(self.segments.newest()[-1]) + 1
        ids, sums = self._ids[:count], self._sums[:count]
        if self.segments.ordered:
            return ids, sums
        ids, sums = ids.copy(), sums.copy()
        dead = np.flatnonzero(self.segments.dead(np.arange(count)))
        last = np.full(dead.size, ids[-1])
        sums[dead] = _checksum.moved(sums[dead], ids[dead], last, self.record_bytes)
        ids[dead] = last
        for position in self._loose[self._loose < count]:
            record = self._records(count)[position : position + 1]
            sums[position] = _checksum.row_checksums(last[:1], record)[0]
        return ids, sums

    def sync(self) -> None:
        """Make the file durable; its name becomes durable when the directory is synced."""
        self._file.sync()

    def _refuse(self, torn: npt.NDArray[np.int64]) -> None:
        if torn.size:
            raise StoreIOError(
                f"{counted(torn.size, 'row was', 'rows were')} damaged in {self._file.path} when a "
                "write failed; write them again, or roll back"
            )

    def close(self) -> None:
        """Drop queued records and close the file; mappings stay valid while they are used."""
        self._queue.drop()
        self._file.close()
        self._mapped = np.empty((0, self.record_bytes), np.uint8)
        self._ids, self._sums = np.empty(0, np.int64), np.empty(0, np.uint32)

    def remove(self) -> None:
        """Close and delete the file: its rows were never committed."""
        self.close()
        with self._directory.use() as directory:
            directory.unlink(self.name)


def _grown(array: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    """Return a larger array of at least `count` elements, with the same contents."""
    room = np.zeros(max(count, 2 * array.size), array.dtype)
    room[: array.size] = array
    return room
