"""Compaction: many deltas become one that holds the newest image of each of their rows.

A delta of its own for every version would cost a file, a mapping and a line of each manifest for as
long as no fold can take it: while a reader is older, or while versions wait to be confirmed. So
deltas of consecutive versions are compacted. What comes of them has the newest of their versions,
and is named in their place by manifests from then on; older manifests go on naming them, and
readers hold what they have mapped.

`spans` says which of them, so that few are left and none is written often.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from itertools import groupby

import numpy as np
import numpy.typing as npt

from tierstore import _checksum, _io
from tierstore._disk.delta import FOOTER_BYTES, Delta, footer_checksum, make_footer
from tierstore._disk.fold import Newest
from tierstore._disk.manifest import DeltaInfo
from tierstore._disk.records import BLOCK_BYTES
from tierstore.errors import StoreIOError

__all__ = ["Compaction", "spans"]

_FAN_OUTS = (4, 2, 1)
"""How many bits of a version number a level of spans takes: what is written least often first."""


def spans(deltas: Sequence[Delta], newest: int, most: int) -> list[list[Delta]]:
    """Group consecutive deltas, oldest first, so that about `most` groups are left, or fewer.

    Each goes to the largest complete span of versions that holds it. Spans are the aligned ranges
    of 16, 256, 4,096 … version numbers, complete when `newest`, the newest version, lies behind
    them: 15 groups a level, and a record is written once a level. Where that leaves too many, the
    ranges are 4, 16, 64 … or 2, 4, 8 … long; one group is all that helps where those do not.
    """
    for bits in _FAN_OUTS:
        groups = [list(group) for _, group in groupby(deltas, partial(_span, newest, bits))]
        if len(groups) <= most:
            return groups
    return [list(deltas)]


def _span(newest: int, bits: int, delta: Delta) -> tuple[int, int]:
    """Return the largest complete span that holds a delta: bits of its length, and its number."""
    version = delta.info.version
    length = max(0, (version ^ newest).bit_length() - 1) // bits * bits
    return length, version >> length


class Compaction:
    """Deltas of consecutive versions, oldest first, on their way into one.

    Attributes:
        name: name of the file that is written, which no manifest names before it is published.
        deltas: what it is made of.
        delta: what came of them, once all steps were taken.
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
        """Take note of what is to be compacted; nothing is read or written yet.

        `rows` are those of the table; `store` is the uuid that deltas bear.
        """
        self.name = name
        self.deltas: tuple[Delta, ...] = tuple(deltas)
        self.delta: Delta | None = None
        self._directory = directory
        self._newest = Newest(deltas, rows)
        self._record_bytes = deltas[0].record_bytes
        self._store = store

    def steps(self) -> Iterator[None]:
        """Write the delta, some records at each step; with the last one it is durable and proven.

        Where that fails, or is stopped, no file is left.
        """
        try:
            with self._directory.use() as directory:
                with directory.create(self.name) as file:
                    info = yield from self._write(file)
                    file.sync()
                    directory.sync()
                    yield from self._prove(file, info)
                self.delta = Delta(
                    directory, info, store=self._store, record_bytes=self._record_bytes
                )
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Delete the file, which no manifest names."""
        self.delta = None
        with contextlib.suppress(OSError), self._directory.use() as directory:
            directory.unlink(self.name)

    def _write(self, file: _io.File) -> Generator[None, None, DeltaInfo]:
        """Write records, ids, checksums and footer, and return what a manifest says of them."""
        count, width = 0, self._record_bytes
        for rows, _ in self._newest.places():
            count += rows.size
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
        footer = make_footer(self._store, version, count, width, body)
        file.write(footer, size - FOOTER_BYTES)
        return DeltaInfo(self.name, size, count, version, footer_checksum(footer))

    def _prove(self, file: _io.File, info: DeltaInfo) -> Iterator[None]:
        """Read the records back from the disk; raises StoreIOError where they differ."""
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
                f"{wrong.size} rows read otherwise than they were written to {path}, the first is "
                f"row {int(ids[wrong[0]])}; the deltas they came from stay; check the disk"
            )
