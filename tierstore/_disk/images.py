"""Finds every intact image of a table's rows on disk, as the source of a repair.

Files may be missing, truncated, replaced or partly unreadable. A record is used if its own checksum
matches, and skipped otherwise. Nothing is mapped, so a bad block of the disk costs only the rows in
it and does not kill the process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tierstore import _checksum, _io
from tierstore._disk import base as bases
from tierstore._disk import footer
from tierstore._disk.backends import Records as BaseRecords
from tierstore._disk.backends import backend_of
from tierstore._disk.base import CHECKSUMS
from tierstore._disk.footer import FOOTER_BYTES
from tierstore._disk.manifest import DeltaInfo, Manifest, TableInfo
from tierstore.errors import TierStoreError
from tierstore.spec import TableSpec

Rows = npt.NDArray[np.int64]
Records = npt.NDArray[np.uint8]

WHOLE, OLDER, LOST = 0, 1, 2

_WINDOW_ROWS = 1 << 20
"""Minimum number of rows whose images are looked up at a time."""
_MOST_WINDOWS = 256
"""Maximum number of passes over the ids of all deltas."""
_BLOCK_BYTES = 8 << 20
_GAP = 64 << 10
"""Maximum gap in bytes between records that are read in one piece."""
_SECTOR = 4096
_FILLER = b"\xff"
"""Fills in for unreadable bytes; it is neither a valid row nor the checksum of an unwritten one."""


@dataclass(frozen=True)
class Found:
    """The images found for some rows.

    Attributes:
        rows: their ids `(n,)`.
        records: the images `(n, record_bytes)`; zeros if `state` is LOST.
        state: WHOLE for the newest image, OLDER for an earlier one, LOST if no image is intact.
        versions: the version of each image, `(n,)`.
    """

    rows: Rows
    records: Records
    state: npt.NDArray[np.uint8]
    versions: npt.NDArray[np.int64]


class Images:
    """The images of a table in one generation, according to a manifest.

    Attributes:
        unknown: upper bound of the records whose row ids are unknown, because their delta is
            missing or its ids are damaged. This many rows may be older than they appear.
    """

    def __init__(
        self,
        table: _io.Directory | None,
        name: str,
        manifest: Manifest,
        kept: Sequence[Manifest] = (),
        *,
        floor: int = 0,
    ) -> None:
        """Examine the directory of the table, if it exists.

        `kept` are older manifests, whose deltas may contain images that the base lost. Deltas up to
        the `floor` may have been partly merged into the base.
        """
        info = manifest.tables[name]
        self.info = info
        self.record_bytes = info.spec.layout.record_bytes
        self._directory = _held(table, info.generation)
        store = bytes.fromhex(manifest.uuid)
        listed = [self._delta(delta, store) for delta in reversed(info.deltas)]
        dropped = [self._delta(delta, store) for delta in _dropped(name, info, kept)]
        self.unknown = sum(delta.unknown for delta in listed)
        base = _BaseImages(self._directory, info.spec, _base_version(info, manifest))
        base.bind(info, max(floor, manifest.floor, *(each.floor for each in kept)), listed)
        self._sources: list[_DeltaImages | _BaseImages] = [*listed, base, *dropped]
        self._window = max(_WINDOW_ROWS, -(-info.spec.rows // _MOST_WINDOWS))
        self._at = -1
        self._places: list[tuple[Rows, Rows]] = []

    def _delta(self, info: DeltaInfo, store: bytes) -> _DeltaImages:
        return _DeltaImages(self._directory, info, store, self.record_bytes, self.info.spec.rows)

    def blocks(self) -> Iterator[Found]:
        """Yield all rows in order, in blocks."""
        step = max(1, min(self._window, _BLOCK_BYTES // self.record_bytes))
        for first in range(0, self.info.spec.rows, self._window):
            stop = min(first + self._window, self.info.spec.rows)
            for start in range(first, stop, step):
                yield self._find(np.arange(start, min(start + step, stop), dtype=np.int64))

    def find(self, rows: Rows) -> Found:
        """Return the images of a small number of ascending, distinct `rows`."""
        cuts = np.flatnonzero(np.diff(rows // self._window)) + 1
        parts = [self._find(part) for part in np.split(rows, cuts)]
        return Found(
            rows,
            np.concatenate([part.records for part in parts]),
            np.concatenate([part.state for part in parts]),
            np.concatenate([part.versions for part in parts]),
        )

    def _find(self, rows: Rows) -> Found:
        """Return the images of ascending rows within one window."""
        count = rows.size
        images = Found(
            rows,
            np.zeros((count, self.record_bytes), np.uint8),
            np.full(count, LOST, np.uint8),
            np.zeros(count, np.int64),
        )
        sums = np.zeros(count, np.uint32)  # of the newest image, intact or not
        seen = np.zeros(count, bool)
        if count:
            self._look_up(int(rows[0]) // self._window)
        for source, places in zip(self._sources, self._places, strict=True):
            todo = np.flatnonzero(images.state != WHOLE)
            if not todo.size:
                break
            which, positions = _among(rows[todo], places)
            at = todo[which]
            if not at.size:
                continue
            records, stored = source.read(positions)
            good = source.good(rows[at], records, stored)
            first = ~seen[at]
            sums[at[first]] = stored[first]
            seen[at] = True
            same = first | ((stored == sums[at]) & (stored != 0))  # zeros may be a lost extent
            same &= ~source.foreign(rows[at])
            take = good & (same | (images.state[at] == LOST))
            images.records[at[take]] = records[take]
            images.versions[at[take]] = source.version
            images.state[at[take]] = np.where(same[take], WHOLE, OLDER)
        return images

    def _look_up(self, window: int) -> None:
        """Record the positions of a window's rows in each source."""
        if window != self._at:
            first = window * self._window
            stop = min(first + self._window, self.info.spec.rows)
            self._places = [source.within(first, stop) for source in self._sources]
            self._at = window

    def close(self) -> None:
        """Close the files."""
        for source in self._sources:
            source.close()
        if self._directory is not None:
            self._directory.close()


def _held(parent: _io.Holder | None, name: str) -> _io.Held[_io.Directory] | None:
    try:
        if parent is None:
            return None
        with parent.use() as place:
            return _io.hold_directory(place.directory(name))
    except (FileNotFoundError, TierStoreError):
        return None


def _dropped(name: str, info: TableInfo, kept: Sequence[Manifest]) -> list[DeltaInfo]:
    """Return folded deltas that older manifests still name, newest first."""
    others = [each.tables[name] for each in kept if name in each.tables]
    found = {
        delta
        for other in others
        if other.generation == info.generation
        for delta in other.deltas
        if delta not in info.deltas
    }
    return sorted(found, key=lambda delta: delta.version, reverse=True)


def _base_version(info: TableInfo, manifest: Manifest) -> int:
    """Return the version of those rows of the base that are in no delta."""
    before = info.deltas[0].version - 1 if info.deltas else manifest.version
    return max(before, min(manifest.floor, manifest.version))


def _among(rows: Rows, places: tuple[Rows, Rows]) -> tuple[npt.NDArray[np.intp], Rows]:
    """Return which of `rows` a source contains, and their positions."""
    known, positions = places
    if not known.size:
        return np.empty(0, np.intp), np.empty(0, np.int64)
    at = np.minimum(np.searchsorted(known, rows), known.size - 1)
    which = np.flatnonzero(known[at] == rows)
    return which, positions[at[which]]


class _DeltaImages:
    """The records of a delta whose file may be damaged."""

    def __init__(
        self,
        directory: _io.Held[_io.Directory] | None,
        info: DeltaInfo,
        store: bytes,
        record_bytes: int,
        rows: int,
    ) -> None:
        self.version = info.version
        self._count = info.rows
        self._width = record_bytes
        self._rows = rows
        self._ids_at = info.rows * record_bytes
        self._sums_at = self._ids_at + 8 * info.rows
        self._file = _PartialFile(directory, info.name)
        self._used = not self._file.missing and not self._is_another(info)
        self.unknown = (
            self._count_outside()
            if self._used and self._proven(store, info)
            else self._count_unknown()
        )

    def _is_another(self, info: DeltaInfo) -> bool:
        """Whether the file is intact, but is not the expected one."""
        end = self._file.read(FOOTER_BYTES, max(0, self._file.size - FOOTER_BYTES)).tobytes()
        whole = _checksum.crc32c(end[:-4]) == footer.checksum(end)
        return whole and footer.checksum(end) != info.crc32c

    def _proven(self, store: bytes, info: DeltaInfo) -> bool:
        """Whether ids and checksums match the manifest, even if the footer is damaged."""
        body, end = 0, self._sums_at + 4 * info.rows
        for start in range(self._ids_at, end, _BLOCK_BYTES):
            body = _checksum.crc32c(self._file.read(min(_BLOCK_BYTES, end - start), start), body)
        ids = self._ids(0, min(1, info.rows)).tolist()
        sums = (
            footer.make(store, info.version, info.rows, self._width, body, first)[1]
            for first in [None, *(each for each in ids if 0 <= each < self._rows)]
        )
        return info.crc32c in sums

    def _count_outside(self) -> int:
        """Return the number of records whose id, though verified, is of no row of the table."""
        return sum(
            int(((ids < 0) | (ids >= self._rows)).sum())
            for start in range(0, self._count, _WINDOW_ROWS)
            for ids in [self._ids(start, min(_WINDOW_ROWS, self._count - start))]
        )

    def _count_unknown(self) -> int:
        """Return the number of records without a verified id."""
        if not self._used:
            return self._count
        unknown = 0
        step = max(1, _BLOCK_BYTES // self._width)
        for start in range(0, self._count, step):
            positions = np.arange(start, min(start + step, self._count), dtype=np.int64)
            ids = self._ids(start, positions.size)
            records, sums = self.read(positions)
            good = self.good(ids, records, sums) & (ids >= 0) & (ids < self._rows)
            unknown += int((~good).sum())
        return unknown

    def blocks(self) -> Rows:
        """Return the digest blocks of the delta's rows, as far as their ids are readable."""
        found = [np.empty(0, np.int64)]
        for start in range(0, self._count if self._used else 0, _WINDOW_ROWS):
            ids = self._ids(start, min(_WINDOW_ROWS, self._count - start))
            found.append(np.unique(ids // bases.DIGEST_ROWS))
        return np.unique(np.concatenate(found))

    def foreign(self, rows: Rows) -> npt.NDArray[np.bool_]:
        return np.zeros(rows.size, np.bool_)

    def _ids(self, start: int, count: int) -> Rows:
        return self._file.read(8 * count, self._ids_at + 8 * start).view("<i8")

    def within(self, first: int, stop: int) -> tuple[Rows, Rows]:
        """Return rows of `first:stop` in the delta, ascending, and the last position of each."""
        rows, positions = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for start in range(0, self._count if self._used else 0, _WINDOW_ROWS):
            ids = self._ids(start, min(_WINDOW_ROWS, self._count - start))
            here = np.flatnonzero((ids >= first) & (ids < stop))
            rows.append(ids[here])
            positions.append(here + start)
        every, where = np.concatenate(rows)[::-1], np.concatenate(positions)[::-1]
        distinct, at = np.unique(every, return_index=True)  # the first in reverse order is the last
        return distinct, where[at]

    def read(self, positions: Rows) -> tuple[Records, npt.NDArray[np.uint32]]:
        records = self._file.records(0, self._width, positions)
        sums = self._file.records(self._sums_at, 4, positions)
        return records, sums.view("<u4").ravel()

    def good(
        self, rows: Rows, records: Records, sums: npt.NDArray[np.uint32]
    ) -> npt.NDArray[np.bool_]:
        return _good(rows, records, sums, sparse=False)

    def close(self) -> None:
        self._file.close()


class _BaseImages:
    """The records of a base whose files may be damaged."""

    def __init__(
        self, directory: _io.Held[_io.Directory] | None, spec: TableSpec, version: int
    ) -> None:
        self.version = version
        self._spec = spec
        self._width = spec.layout.record_bytes
        self.record_bytes = self._width
        self._directory = directory
        self._foreign = np.empty(0, np.int64)
        self._sums = _PartialFile(directory, CHECKSUMS)
        self._files: list[_PartialFile] = []
        self._packed: BaseRecords | None = None
        self._per_file, self._offset = spec.rows, 0
        self._inner: _io.Held[_io.Directory] | None = None
        backend = backend_of(spec)
        plain = backend.plain_files(spec)
        if plain is not None:
            self._per_file, self._offset = plain.rows, plain.offset
            place = directory
            if plain.directory is not None:
                place = self._inner = _held(directory, plain.directory)
            self._files = [_PartialFile(place, plain.name(number)) for number in range(plain.count)]
        elif directory is not None:
            with contextlib.suppress(TierStoreError, FileNotFoundError):
                self._packed = backend.open_unchecked(directory, spec)

    def within(self, first: int, stop: int) -> tuple[Rows, Rows]:
        rows = np.arange(first, stop, dtype=np.int64)
        return rows, rows

    def read(self, rows: Rows) -> tuple[Records, npt.NDArray[np.uint32]]:
        records = np.full((rows.size, self._width), _FILLER[0], np.uint8)
        number = rows // self._per_file
        for each in np.unique(number).tolist():
            which = np.flatnonzero(number == each)
            records[which] = self._part(each, rows[which])
        return records, self._sums.records(0, 4, rows).view("<u4").ravel()

    def _part(self, number: int, rows: Rows) -> Records:
        """Return records from one file."""
        if self._files:
            within = rows - number * self._per_file
            return self._files[number].records(self._offset, self._width, within)
        out = np.full((rows.size, self._width), _FILLER[0], np.uint8)
        if self._packed is not None:
            try:
                self._packed.read(rows, out)
            except TierStoreError:
                out[:] = _FILLER[0]
        return out

    def good(
        self, rows: Rows, records: Records, sums: npt.NDArray[np.uint32]
    ) -> npt.NDArray[np.bool_]:
        return _good(rows, records, sums, sparse=self._spec.sparse)

    def bind(self, info: TableInfo, floor: int, deltas: Sequence[_DeltaImages]) -> None:
        """Find the blocks of rows that belong to a different time than a version; see `binding`.

        Blocks touched by `deltas` up to the `floor` are skipped.
        """
        if self._directory is None or info.digest is None:
            return
        touched = [each.blocks() for each in deltas if each.version <= floor]
        blocks = np.unique(np.concatenate([np.empty(0, np.int64), *touched]))
        with (
            contextlib.suppress(TierStoreError, FileNotFoundError),
            self._directory.use() as directory,
        ):
            digest = bases.read_digest(directory, info.digest, info.spec)
            if digest is not None:
                rows = info.spec.rows
                digest = digest[: info.digest.size // 4]  # others are holes, as many as claimed
                found = bases.foreign_blocks(directory, self, rows, digest, blocks)
                self._foreign = np.array(found, np.int64)

    def computed_checksums(self, rows: Rows) -> npt.NDArray[np.uint32]:
        """Compute the checksums of `rows` from their records."""
        records, stored = self.read(rows)
        sums = _checksum.row_checksums(rows, records)
        if self._spec.sparse:
            sums[(stored == 0) & ~records.any(axis=1)] = 0
        return sums

    def foreign(self, rows: Rows) -> npt.NDArray[np.bool_]:
        return np.isin(rows // bases.DIGEST_ROWS, self._foreign)

    def close(self) -> None:
        for file in [*self._files, self._sums]:
            file.close()
        for opened in (self._inner, self._packed):
            if opened is not None:
                opened.close()


def _good(
    rows: Rows, records: Records, sums: npt.NDArray[np.uint32], *, sparse: bool
) -> npt.NDArray[np.bool_]:
    good = np.ones(rows.size, bool)
    good[_checksum.mismatches(rows, records, sums, sparse=sparse)] = False
    return good


class _PartialFile:
    """A file that may be missing or unreadable in any part."""

    def __init__(self, directory: _io.Held[_io.Directory] | None, name: str) -> None:
        self._file: _io.Held[_io.File] | None = None
        self.size = 0
        try:
            if directory is not None:
                self._file = _io.hold_file(directory, name)
                with self._file.use() as file:
                    self.size = file.size
        except (FileNotFoundError, TierStoreError):
            self.close()

    @property
    def missing(self) -> bool:
        return self._file is None

    def read(self, nbytes: int, offset: int) -> Records:
        """Return `nbytes` bytes from `offset`, with filler in place of unreadable bytes."""
        here = max(0, min(nbytes, self.size - offset))
        data = self._pieces(here, offset) if here else b""
        return np.frombuffer(data + _FILLER * (nbytes - len(data)), np.uint8)

    def _pieces(self, nbytes: int, offset: int) -> bytes:
        """Return the readable bytes of a range by halving unreadable ranges down to a sector."""
        if self._file is None:
            return b""
        try:
            with self._file.use() as file:
                return file.read(nbytes, offset).ljust(nbytes, _FILLER)
        except (FileNotFoundError, TierStoreError):
            if nbytes <= _SECTOR:
                return _FILLER * nbytes
            half = max(_SECTOR, nbytes // 2 // _SECTOR * _SECTOR)
            return self._pieces(half, offset) + self._pieces(nbytes - half, offset + half)

    def records(self, offset: int, width: int, positions: Rows) -> Records:
        """Return consecutive records of `width` bytes from `offset` on."""
        out = np.empty((positions.size, width), np.uint8)
        order = np.argsort(positions, kind="stable")
        ascending = positions[order]
        far = np.diff(ascending) * width > _GAP
        full = np.diff(ascending * width // _BLOCK_BYTES) != 0
        cuts = (np.flatnonzero(far | full) + 1).tolist()
        for begin, end in pairwise([0, *cuts, positions.size]):
            if begin == end:
                continue
            first, last = int(ascending[begin]), int(ascending[end - 1])
            data = self.read((last + 1 - first) * width, offset + first * width)
            out[order[begin:end]] = data.reshape(-1, width)[ascending[begin:end] - first]
        return out

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
