"""Records that lie row after row in objects, which are read in ranges and cannot be mapped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from tierstore import _io
from tierstore._disk.files import Files
from tierstore._disk.readahead import MappedRows
from tierstore._disk.records import LaidRecords, RecordFiles
from tierstore.errors import InvalidInputError

__all__ = ["RangedRecords", "record_files"]

_GAP = 64 << 10
"""Records that lie less than this apart are read in one range: a store far away reads this much in
the time of one more request, with 64 of them under way."""
_RANGE_BYTES = 4 << 20
_HELD_BYTES = 32 << 20
"""Bytes that are read before any of them is used."""


def record_files(
    files: Files, created: Sequence[_io.File] = (), **laid: Any
) -> RecordFiles | RangedRecords:
    """Return the records in these files, mapped where they can be; see `LaidRecords`.

    `created` are the files themselves where they are new.
    """
    with contextlib.ExitStack() as stack:
        first = created[0] if created else stack.enter_context(files.open(0))
        if first.mappable:
            return RecordFiles(files, **laid)
    return RangedRecords(created or [files.open(number) for number in range(files.count)], **laid)


class RangedRecords(LaidRecords):
    """Records in objects, written once, from the first row to the last.

    Those that are left out are zero.
    """

    _writing = 0

    def __init__(self, files: Sequence[_io.File], **laid: Any) -> None:
        """Refer to the objects; see `LaidRecords`."""
        super().__init__(**laid)
        self._files = files

    def read(self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
        """Copy records `rows` `(n,)` into `out` `(n, record_bytes)`, neighbours in one range."""
        order = np.argsort(rows, kind="stable")
        numbers, within = np.divmod(rows[order], self._rows_per_file)
        begins = self._offset + within * self.record_bytes
        for first, last in self._groups(numbers, begins):
            runs = self._runs(numbers[first:last], begins[first:last])
            wanted = [
                (
                    cast(_io.ObjectFile, self._files[int(numbers[first + at])]),
                    int(begins[first + at]),
                    int(begins[first + end - 1]) + self.record_bytes,
                )
                for at, end in runs
            ]
            for (at, end), (_, begin, _), data in zip(
                runs, wanted, _io.read_ranges(wanted), strict=True
            ):
                records = np.frombuffer(data, np.uint8).reshape(-1, self.record_bytes)
                part = slice(first + at, first + end)
                out[order[part]] = records[(begins[part] - begin) // self.record_bytes]

    def _groups(
        self, numbers: npt.NDArray[np.int64], begins: npt.NDArray[np.int64]
    ) -> Iterator[tuple[int, int]]:
        """Yield parts of sorted records that lie within so many bytes of ranges."""
        apart = np.diff(begins, prepend=0)
        near = (np.diff(numbers, prepend=-1) == 0) & (apart <= self.record_bytes + _GAP)
        total = np.cumsum(np.where(near, apart, self.record_bytes))
        first = 0
        while first < begins.size:
            limit = total[first] + _HELD_BYTES
            last = max(first + 1, int(np.searchsorted(total, limit)))
            yield first, last
            first = last

    def _runs(
        self, numbers: npt.NDArray[np.int64], begins: npt.NDArray[np.int64]
    ) -> list[tuple[int, int]]:
        """Return what of sorted records is read in one range each."""
        far = np.diff(begins) > self.record_bytes + _GAP
        full = np.diff(begins // _RANGE_BYTES) != 0
        cuts = np.flatnonzero(far | full | (np.diff(numbers) != 0)) + 1
        return list(pairwise([0, *cuts.tolist(), begins.size]))

    def places(self, rows: npt.NDArray[np.int64]) -> list[MappedRows]:
        """Return nothing: there are no pages to be announced."""
        return []

    def write(self, rows: npt.NDArray[np.int64], records: npt.NDArray[np.uint8]) -> None:
        """Write `records` `(n, record_bytes)` over `rows` `(n,)`, ascending in all calls."""
        numbers = rows // self._rows_per_file
        consecutive = (np.diff(rows) == 1) & (np.diff(numbers) == 0)
        cuts = (np.flatnonzero(~consecutive) + 1).tolist()
        for at, end in pairwise([0, *cuts, rows.size]):
            number = int(numbers[at])
            if number < self._writing:
                raise InvalidInputError(f"row {rows[at]} comes after rows behind it")
            for file in self._files[self._writing : number]:
                file.sync()
            self._writing = number
            within = int(rows[at]) - number * self._rows_per_file
            offset = self._offset + within * self.record_bytes
            self._files[number].write(np.ascontiguousarray(records[at:end]), offset)

    def reread(self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
        """Read: there is no cache in between."""
        self.read(rows, out)

    def damaged_files(self) -> list[str]:
        """Return the last object's name if the rest of it, behind the last row, is not zero."""
        return self._damaged(self._files[-1])

    def sync(self) -> None:
        """Send what was not sent yet."""
        for file in self._files:
            file.sync()

    def close(self) -> None:
        """Do nothing: objects are not kept open."""
