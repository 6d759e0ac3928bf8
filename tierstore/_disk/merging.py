"""Merges the newest image of each row of some deltas into the base, or into one delta.

Readers find these rows in the deltas, so they do not wait for a merge. Every record that is written
stays in its delta until the result was synced and read back from the disk, so an interrupted merge
is simply repeated.

One delta per version would cost a file, a mapping and a line in each manifest until a merge into
the base is possible, which older readers and unconfirmed versions prevent. Deltas of consecutive
versions are therefore compacted. The result has the newest of their versions and replaces them in
later manifests; older manifests still name the originals, and readers keep their mappings. `spans`
selects the deltas such that few remain and none is rewritten often.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from itertools import groupby, pairwise

import numpy as np
import numpy.typing as npt

from tierstore import _checksum, _io
from tierstore._disk import footer
from tierstore._disk.base import Base
from tierstore._disk.delta import Delta
from tierstore._disk.footer import FOOTER_BYTES
from tierstore._disk.manifest import DeltaInfo
from tierstore._disk.readahead import USUAL_GAP
from tierstore._disk.records import BLOCK_BYTES
from tierstore.errors import CommitFailedError, StoreIOError, counted

Rows = npt.NDArray[np.int64]

_STEP_BYTES = BLOCK_BYTES
_WINDOW_ROWS = 1 << 20
"""Minimum rows of a table whose newest images are looked up at a time, four bytes each."""
_MOST_WINDOWS = 256
"""Maximum number of passes over the ids of all deltas."""
_IDS = 1 << 20


class Newest:
    """The newest image of each row in some deltas, which are ordered oldest first."""

    def __init__(self, deltas: Sequence[Delta], rows: int, gap: int = USUAL_GAP) -> None:
        """Prepare to merge deltas of a table with `rows` rows; nothing is read yet.

        Pages at most `gap` bytes apart are read in one piece.
        """
        self._deltas = tuple(deltas)
        self._rows = rows
        self._gap = gap
        self._starts = np.cumsum([0, *(delta.info.rows for delta in deltas)]).tolist()

    def images(self) -> Iterator[tuple[Rows, npt.NDArray[np.uint8], npt.NDArray[np.uint32]]]:
        """Yield ascending rows with records and checksums, valid until the next iteration.

        Each record is verified.
        """
        if not self._deltas:
            return
        width = self._deltas[0].record_bytes
        most = min(max(1, _STEP_BYTES // width), self._starts[-1])
        block = np.empty((2, most, width), np.uint8)
        for rows, places in self._parts(width):
            records, sums = block[0, : rows.size], np.empty(rows.size, np.uint32)
            for delta, which, at in self._found(places):
                for place in delta.places(at):
                    place.prefetch(self._gap)
                images = block[1, : which.size]
                delta.read(at, images)
                records[which] = images
                sums[which] = delta.sums[at]
            yield rows, records, sums

    def checksums(self, record_bytes: int) -> Iterator[tuple[Rows, npt.NDArray[np.uint32]]]:
        """Yield the same rows and checksums in the same parts, without records."""
        for rows, places in self._parts(record_bytes):
            sums = np.empty(rows.size, np.uint32)
            for delta, which, at in self._found(places):
                sums[which] = delta.sums[at]
            yield rows, sums

    def _parts(self, record_bytes: int) -> Iterator[tuple[Rows, Rows]]:
        """Yield the items of `places` in parts of one step each."""
        step = max(1, _STEP_BYTES // record_bytes)
        for rows, places in self.places():
            for start in range(0, rows.size, step):
                yield rows[start : start + step], places[start : start + step]

    def places(self) -> Iterator[tuple[Rows, Rows]]:
        """Yield ascending rows and the places of their newest images, counted over all deltas."""
        if self._starts[-1] <= _WINDOW_ROWS:
            ids = np.concatenate([np.empty(0, np.int64), *(delta.ids for delta in self._deltas)])
            rows, from_end = np.unique(ids[::-1], return_index=True)
            yield rows, ids.size - 1 - from_end
            return
        window = max(_WINDOW_ROWS, -(-self._rows // _MOST_WINDOWS))
        for first in range(0, self._rows, window):
            newest = np.zeros(min(window, self._rows - first), np.int32)
            for delta, start in zip(self._deltas, self._starts, strict=False):
                for at in range(0, delta.info.rows, _IDS):
                    rows = delta.ids[at : at + _IDS] - first
                    here = np.flatnonzero((rows >= 0) & (rows < newest.size))
                    places = (here + (start + at + 1)).astype(np.int32)
                    np.maximum.at(newest, rows[here], places)  # the last one of a repeated row
            rows = np.flatnonzero(newest)
            yield rows + first, newest[rows].astype(np.int64) - 1

    def _found(self, places: Rows) -> Iterator[tuple[Delta, npt.NDArray[np.intp], Rows]]:
        """Yield each delta with the indices of its `places` and their positions in it."""
        for delta, (first, stop) in zip(self._deltas, pairwise(self._starts), strict=True):
            which = np.flatnonzero((places >= first) & (places < stop))
            if which.size:
                yield delta, which, places[which] - first


class Merge:
    """The merge of deltas, oldest first, into their base."""

    def __init__(self, base: Base, deltas: Sequence[Delta]) -> None:
        """Prepare the merge; nothing is read yet."""
        self._base = base
        self._deltas = tuple(deltas)

    @property
    def total(self) -> int:
        """The number of row visits: each row is written once and verified once."""
        return 2 * self._base.rows

    def steps(self) -> Iterator[int]:
        """Write the images in steps, make the base durable, and verify that it is.

        Each step yields the rows that were passed, of `total`. Stopping between steps is safe.
        Raises CommitFailedError if the disk does not contain what was written although its syncs
        succeeded: the deltas are still needed.
        """
        if not self._deltas:
            return
        newest = Newest(self._deltas, self._base.rows, self._base.gap)
        for delta in self._deltas:
            for _ in self._base.own(delta.ids):
                yield 0
        for rows, records, sums in newest.images():
            self._base.write(rows, records, sums)
            yield int(rows[-1]) + 1
        self._base.sync()
        for rows, sums in newest.checksums(self._base.record_bytes):
            self._prove(rows, sums)
            yield self._base.rows + int(rows[-1]) + 1

    def _prove(self, rows: Rows, sums: npt.NDArray[np.uint32]) -> None:
        """Compare `rows` on the disk with the checksums of the written records."""
        wrong = self._base.unproven(rows, sums)
        if wrong.size:
            raise CommitFailedError(
                f"{counted(wrong.size, 'row differs', 'rows differ')}, the first row {wrong[0]}, "
                "on the disk from what a fold wrote and synced; the last commit is intact: check "
                "the disk and open the store again"
            )


_FAN_OUTS = (4, 2, 1)
"""Bits of a version number per level of spans, starting with the fewest rewrites."""


def spans(deltas: Sequence[Delta], newest: int, most: int) -> list[list[Delta]]:
    """Group consecutive deltas, oldest first, into about `most` groups or fewer.

    Each delta joins the largest complete span of versions that contains it. Spans are the aligned
    ranges of 16, 256, 4,096 … version numbers; a span is complete when the newest version,
    `newest`, is after it. This leaves 15 groups per level and writes each record once per level. If
    that is too many groups, the ranges have lengths 4, 16, 64 … or 2, 4, 8 …, and finally all
    deltas form one group.
    """
    for bits in _FAN_OUTS:
        groups = [list(group) for _, group in groupby(deltas, partial(_span, newest, bits))]
        if len(groups) <= most:
            return groups
    return [list(deltas)]


def _span(newest: int, bits: int, delta: Delta) -> tuple[int, int]:
    """Return the largest complete span that contains a delta, as (bits of length, number)."""
    version = delta.info.version
    length = max(0, (version ^ newest).bit_length() - 1) // bits * bits
    return length, version >> length


class Compaction:
    """The compaction of deltas of consecutive versions, oldest first, into one.

    Attributes:
        name: name of the new file, which no manifest names until it is published.
        deltas: the deltas to compact.
        delta: the result, once all steps are done.
    """

    def __init__(
        self,
        directory: _io.Holder,
        name: str,
        deltas: Sequence[Delta],
        *,
        rows: int,
        store: bytes,
    ) -> None:
        """Prepare the compaction; nothing is read or written yet.

        `rows` is the number of rows of the table, `store` the uuid in the footers of deltas.
        """
        self.name = name
        self.deltas: tuple[Delta, ...] = tuple(deltas)
        self.delta: Delta | None = None
        self._directory = directory
        self._newest = Newest(deltas, rows)
        self._record_bytes = deltas[0].record_bytes
        self._store = store

    def steps(self) -> Iterator[None]:
        """Write the delta in steps; after the last step it is durable and verified.

        If a step fails, or the iteration stops early, no file remains.
        """
        try:
            with self._directory.use() as directory, directory.create(self.name) as file:
                info = yield from self._write(file)
                file.sync()
                directory.sync()
                yield from self._prove(file, info)
                self.delta = Delta(file, info, store=self._store, record_bytes=self._record_bytes)
                self.delta.check()
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Delete the file, which no manifest names."""
        self.delta = None
        with contextlib.suppress(OSError), self._directory.use() as directory:
            directory.unlink(self.name)

    def _write(self, file: _io.File) -> Generator[None, None, DeltaInfo]:
        """Write records, ids, checksums and footer; return the entry for manifests."""
        count, width = 0, self._record_bytes
        bounds = list[int]()
        for rows, _ in self._newest.places():
            count += rows.size
            bounds += rows[[0, -1]].tolist() if rows.size else []
            yield
        sums_at = count * (width + 8)
        size = sums_at + 4 * count + FOOTER_BYTES
        file.allocate(0, size)
        done = body = 0
        for rows, records, sums in self._newest.images():
            ids = rows.astype("<i8")
            body = _checksum.crc32c(ids, body)
            file.write(records.reshape(-1), done * width)
            file.write(ids, count * width + 8 * done)
            file.write(sums.astype("<u4"), sums_at + 4 * done)
            done += rows.size
            yield
        for at in range(sums_at, size - FOOTER_BYTES, BLOCK_BYTES):
            body = _checksum.crc32c(file.read(min(BLOCK_BYTES, size - FOOTER_BYTES - at), at), body)
        version = self.deltas[-1].info.version
        first = footer.run_between(bounds[0], bounds[-1], count) if count else None
        end, crc32c = footer.make(self._store, version, count, width, body, first)
        file.write(end, size - FOOTER_BYTES)
        return DeltaInfo(self.name, size, count, version, crc32c)

    def _prove(self, file: _io.File, info: DeltaInfo) -> Iterator[None]:
        """Read the records back from the disk; raises StoreIOError if they differ."""
        width, count = self._record_bytes, info.rows
        file.advise(os.POSIX_FADV_DONTNEED)
        step = max(1, BLOCK_BYTES // width)
        room = np.empty(min(step, count) * width + _io.direct.BLOCK, np.uint8)
        for start in range(0, count, step):
            part = min(step, count - start)
            records = _io.direct.placed(room, part * width, start * width)
            _io.direct.read(file, records, start * width)
            ids = np.frombuffer(file.read(8 * part, count * width + 8 * start), "<i8")
            sums = np.frombuffer(file.read(4 * part, count * (width + 8) + 4 * start), "<u4")
            self._check(ids, records.reshape(part, width), sums)
            yield

    def _check(
        self,
        ids: npt.NDArray[np.int64],
        records: npt.NDArray[np.uint8],
        sums: npt.NDArray[np.uint32],
    ) -> None:
        wrong = _checksum.mismatches(ids, records, sums)
        if wrong.size:
            path = os.path.join(self._directory.path, self.name)
            raise StoreIOError(
                f"{counted(wrong.size, 'row differs', 'rows differ')} in {path} from what was "
                f"written, the first is row {int(ids[wrong[0]])}; the original deltas remain; "
                "check the disk"
            )
