"""A table's access to tiers with some columns whole on a GPU, beside a cache of the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from tierstore._door import Door
from tierstore._scaled import ScaledElements
from tierstore._table.address import Ids
from tierstore._table.gpu import Apart, DeviceAccess
from tierstore._table.values import Columns, Scales
from tierstore._table.values import Piece as Written
from tierstore._tiers.gpu import GpuTier
from tierstore._tiers.gpu.abi import RECORDS, TIER, Arguments
from tierstore._tiers.gpu.launcher import Kernel, as_large_as_the_work
from tierstore._tiers.gpu.link import FeatureIds
from tierstore._tiers.gpu.whole import WholeColumns
from tierstore._tiers.space import Extent, WholeSpace
from tierstore._tiers.split import Piece
from tierstore.errors import InvalidInputError
from tierstore.spec import RecordLayout

_SOURCE = RECORDS.extended("tierstore._table", "split.cu")
_Move: Any = _SOURCE.structure("Move")
_Choice: Any = _SOURCE.structure("Choice")
_SPREAD = Kernel(_SOURCE, "spread", as_large_as_the_work)
_STRAY = TIER.constants["STRAY"]


class SplitAccess(DeviceAccess):
    """Access to a GPU tier with part of each record, and to the columns that the GPU holds whole.

    Nothing is leased or written: a step trains whole records.
    """

    def __init__(
        self,
        gpu: GpuTier,
        extent: Extent | WholeSpace,
        layout: RecordLayout,
        door: Door,
        whole: WholeColumns,
        *,
        sync_checks: bool,
    ) -> None:
        """Refer to the rows of a table; `layout` is of whole records."""
        super().__init__(gpu, extent, layout, door, sync_checks=sync_checks)
        self._whole = whole
        self._split = whole.split

    def _cached(self, lo: int, hi: int) -> Piece | None:
        """Return where the tier has all of bytes `lo:hi`, or None."""
        pieces = self._split.cached.within(lo, hi)
        one = len(pieces) == 1 and pieces[0].hi - pieces[0].lo == hi - lo
        return pieces[0] if one else None

    def _apart(self, scaled: ScaledElements, lo: int, hi: int) -> tuple[Piece, int] | None:
        """Return where the elements of a scaled field are, and the place of its scales.

        None if both are together.
        """
        elements = self._cached(lo, lo + scaled.dim)
        scales = self._split.whole.within(lo + scaled.scales_at, hi)
        return (elements, scales[0].lo) if elements is not None and scales else None

    def _on_device(self, rows: Any, stream: int) -> Any:
        return self.device.upload(rows, stream) if self.device.on_host(rows) else rows

    def read(self, ids: Ids, lo: int, hi: int, *, admit: bool, into: Any = None) -> Any:
        cached = self._cached(lo, hi)
        if cached is not None:
            return super().read(ids, cached.lo, cached.hi, admit=admit, into=into)
        with self.using():
            self.extent.epoch.check_open()
            there = into is not None and not isinstance(into, np.ndarray)
            count, stream = ids.rows.shape[0], self.stream(ids.kind)
            out = into if there else self.empty(ids.kind, count, hi - lo)
            if count:
                self._assemble(ids, out, lo, hi, admit=admit, stream=stream)
            return self.device.download(out) if ids.kind == "numpy" else out

    def _assemble(self, ids: Ids, out: Any, lo: int, hi: int, *, admit: bool, stream: int) -> None:
        """Copy bytes `lo:hi` of records from both places into `out`."""
        rows, launch = ids.rows, self.gpu.launcher.launch
        cached = self._split.cached.within(lo, hi)
        moves = []
        for piece in cached:
            found = self.empty(ids.kind, rows.shape[0], piece.hi - piece.lo)
            self._read_parts(rows, found, piece.lo, piece.hi, admit=admit, stream=stream)
            moves.append((piece, found))
        self._clear_gaps(out, lo, hi, stream)
        for piece, found in moves:
            launch(*self._moved(piece, found, out, hi - lo, len(rows)), stream)
        there = self._on_device(rows, stream)
        for piece in self._split.whole.within(lo, hi):
            launch(*self._taken(piece, there, out, hi - lo, reports=not cached), stream)

    def _clear_gaps(self, out: Any, lo: int, hi: int, stream: int) -> None:
        """Clear the padding between fields, which belongs to neither part."""
        both = (self._split.cached, self._split.whole)
        known = sum(end - begin for part in both for begin, end, _ in part.within(lo, hi))
        if known < hi - lo:
            self.device.fill(self.device.pointer(out), 0, len(out) * (hi - lo), stream)

    def _moved(
        self, piece: Piece, found: Any, out: Any, wide: int, count: int
    ) -> tuple[Kernel, Arguments, int]:
        """Return the launch that copies a separately read piece of each row to its place."""
        nbytes = piece.hi - piece.lo
        return self._spread(self.device.pointer(found), nbytes, piece, out, wide, count, _Choice())

    def _taken(
        self, piece: Piece, rows: Any, out: Any, wide: int, *, reports: bool
    ) -> tuple[Kernel, Arguments, int]:
        """Return the launch that copies a piece of the whole columns to its place, for `rows`.

        `reports`: note rows outside the table, because no other read does.
        """
        choice = _Choice(ids=self.device.pointer(rows), bound=len(self.within))
        if reports:
            choice.fault = self.gpu.memory.counter("fault")
            choice.faulty = self.gpu.memory.counter("fault_id")
            choice.start, choice.stray = self.within.start, _STRAY
        source = self.device.pointer(self._whole.array) + piece.lo
        return self._spread(source, self._whole.pitch, piece, out, wide, len(rows), choice)

    def _spread(
        self,
        source: int,
        pitch: int,
        piece: Piece,
        out: Any,
        wide: int,
        count: int,
        choice: Any,
    ) -> tuple[Kernel, Arguments, int]:
        nbytes, to = piece.hi - piece.lo, self.device.pointer(out) + piece.at
        bits = source | pitch | to | wide | nbytes | 16
        width = bits & -bits
        move = _Move(source=source, to=to, count=count, pitch=pitch)
        move.wide, move.bytes, move.width = wide, nbytes, width
        return _SPREAD, Arguments(move, choice), count * nbytes // width

    def _bytes(self, ids: Ids, columns: Columns, *, admit: bool, raw: bool) -> Any:
        """Return the bytes that fields span; `Apart` of a scaled field in two places."""
        found, scaled = None, columns.items[0].scaled
        if scaled is not None and len(columns.items) == 1 and ids.kind != "numpy" and not raw:
            found = self._apart(scaled, columns.lo, columns.hi)
        if found is None:
            return super()._bytes(ids, columns, admit=admit, raw=raw)
        (begin, end, _), at = found
        elements = DeviceAccess.read(self, ids, begin, end, admit=admit)
        rows = self._on_device(ids.rows, self.stream(ids.kind))
        return Apart(elements, self._scales(rows, at))

    def _scales(self, rows: Any, at: int) -> Any:
        return Scales(
            scales=self.device.pointer(self._whole.array) + at,
            ids=self.device.pointer(rows),
            bound=len(self.within),
            pitch=self._whole.pitch,
        )

    def _capture_bytes(self, rows: Any, out: Any, lo: int, hi: int, stream: int) -> None:
        found = self._cached(lo, hi)
        if found is not None:  # as of every field that is not held whole
            super()._capture_bytes(rows, out, found.lo, found.hi, stream)
            return
        for piece in self._split.whole.within(lo, hi):
            kernel, arguments, items = self._taken(piece, rows, out, hi - lo, reports=True)
            self.gpu.launcher.start(kernel, arguments, stream, items)

    def _capture_scaled(
        self, rows: Any, scaled: ScaledElements, lo: int, hi: int, stream: int
    ) -> tuple[Any, Any]:
        found = self._apart(scaled, lo, hi)
        if found is None:
            return super()._capture_scaled(rows, scaled, lo, hi, stream)
        (begin, end, _), at = found
        data = self.empty("torch", len(rows), end - begin)
        DeviceAccess._capture_bytes(self, rows, data, begin, end, stream)
        return data, self._scales(rows, at)

    def write(self, ids: Ids, pieces: Sequence[Written]) -> NoReturn:
        """Raise InvalidInputError: a column that is held whole is only read."""
        self._refuse()

    def lease(
        self, ids: Ids, features: FeatureIds | None = None, into: Sequence[Any] = ()
    ) -> NoReturn:
        """Raise InvalidInputError: leases are of whole records."""
        self._refuse()

    def lease_and_read(self, ids: Ids, field: str, features: FeatureIds | None = None) -> NoReturn:
        """Raise InvalidInputError: leases are of whole records."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise InvalidInputError(
            f"table {self.name!r} is open with gpu_whole, to be read alone: leases and training "
            "take whole records; open it without gpu_whole"
        )
