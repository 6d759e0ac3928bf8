"""A table without a store: the same tiers, only in memory, discarded when closed.

    with MemoryTable(TableSpec(rows=1_000_000, dim=64), device="auto") as memory:
        memory.table.write([3, 5], rows)

For rows that need not outlive the process: nothing is written to disk or committed.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Generator
from typing import NoReturn, cast

import numpy as np
import numpy.typing as npt

from tierstore import _rowcopy
from tierstore._closing import Closing
from tierstore._disk.generation import Generation, initial_records
from tierstore._disk.manifest import KeysInfo, TableInfo
from tierstore._door import Door
from tierstore._progress import Progress, report_nothing
from tierstore._table.backing import Backing
from tierstore._table.home import Touched
from tierstore._table.prefetch import Prefetcher
from tierstore._table.table import Table
from tierstore._tiers.base import Bytes, LowestTier, Rows
from tierstore._tiers.gpu.device import Device
from tierstore._tiers.placement import Placement, find_device
from tierstore.budget import Budget
from tierstore.errors import ClosedError, InvalidInputError, InvalidTypeError
from tierstore.initializers import BLOCK_ROWS
from tierstore.spec import DeviceName, TableSpec
from tierstore.stats import TierStats, tally

_LOAD_BYTES = 8 << 20
_PART_BYTES = 2 << 20


class BottomTier:
    """The lowest tier of a table without files.

    Initializes rows with the initializers of their fields, and stores rows written by the tier
    above. If a tier above holds every row, nothing is written here and no memory is used. Rows are
    initialized in blocks, so reading them in order computes each block once.
    """

    deltas: tuple[()] = ()
    live = None
    index_bytes = 0
    queue_bytes = 0

    def __init__(self, spec: TableSpec) -> None:
        """Set up the tier; no row is initialized yet."""
        self.rows = spec.rows
        self.record_bytes = spec.layout.record_bytes
        self.stats = TierStats()
        self._spec = spec.seeded()
        initializers = [item.init for item in spec.fields.values()]
        self._lock = threading.Lock()
        self._kept = np.zeros(self.rows, np.bool_)
        self._records: Bytes | None = None
        self._zero = all(initializer is None or initializer.is_zero for initializer in initializers)
        self._last_block: tuple[int, Bytes] = (-1, np.empty((0, self.record_bytes), np.uint8))

    def read(self, rows: Rows, out: Bytes) -> None:
        """Copy the records of `rows` `(n,)` into `out` `(n, record_bytes)`."""
        with self._lock:
            self._read(rows, out)

    def _read(self, rows: Rows, out: Bytes) -> None:
        tally(self.stats, requested=rows.size, bytes_out=rows.size * self.record_bytes)
        kept = self._kept[rows]
        if self._zero and not kept.any():
            out[:] = 0
            return
        if self._records is not None and kept.any():
            out[kept] = self._records[rows[kept]]
        fresh = np.flatnonzero(~kept)
        blocks = rows[fresh] // BLOCK_ROWS
        for number in np.unique(blocks).tolist():
            which = fresh[blocks == number]
            out[which] = self._block(number)[rows[which] - number * BLOCK_ROWS]

    def stream(self, rows: Rows) -> Generator[tuple[slice, Bytes]]:
        """Yield the records of `rows` part by part; each array is valid until the next."""
        step = max(1, _PART_BYTES // self.record_bytes)
        block = np.empty((min(rows.size, step), self.record_bytes), np.uint8)
        for start in range(0, rows.size, step):
            part = slice(start, min(start + step, rows.size))
            self.read(rows[part], block[: part.stop - start])
            yield part, block[: part.stop - start]

    def _block(self, number: int) -> Bytes:
        """Return the initial records of a block of rows; the last block is cached."""
        if self._last_block[0] != number:
            block = next(initial_records(self._spec, number * BLOCK_ROWS))
            self._last_block = number, block
        return self._last_block[1]

    def write(self, rows: Rows, records: Bytes, *, resident: bool = False) -> None:
        """Store `records` `(n, record_bytes)` of distinct `rows` `(n,)`."""
        with self._lock:
            if self._records is None:
                # Pages are allocated as they are written.
                self._records = np.zeros((self.rows, self.record_bytes), np.uint8)
            _rowcopy.scatter(self._records, rows, np.ascontiguousarray(records))
            self._kept[rows] = True
            tally(self.stats, written=rows.size, bytes_in=rows.size * self.record_bytes)

    def stage(self, rows: Rows) -> None:
        """Return no work: there is no tier below to prefetch from."""

    def flush(self) -> None:
        """Do nothing: there is no tier below."""

    def let_go(self, rows: Rows) -> None:
        """Do nothing: nothing is mapped."""

    def discard(self) -> npt.NDArray[np.int64]:
        """Return no rows: there is no version to return to."""
        return np.empty(0, np.int64)


class MemoryTable(Closing):
    """A table in memory, and its owner.

    Attributes:
        table: the table, which has all that a table of a store has but the store.
        door, prefetcher, sync_checks, touched, store: for the table.
    """

    sync_checks = False
    store = None

    def __init__(
        self,
        spec: TableSpec,
        *,
        name: str = "scratch",
        budget: Budget | None = None,
        device: DeviceName | Device = "cpu",
        progress: Progress | None = None,
    ) -> None:
        """Create the table and initialize its rows.

        Args:
            spec: the specification of the table; its backend is ignored.
            name: the name of the table in errors.
            budget: memory for the tiers; None keeps every row in host memory.
            device: as in `tierstore.open`.
            progress: called with the number of rows done and the total during initialization.

        Rows that do not fit into a tier are kept in memory below all tiers. Raises CapacityError.
        """
        self.door: Door = Door(f"table {name!r}", writable=True)
        self.prefetcher: Prefetcher = Prefetcher(self.door)
        self.touched: Touched = Touched()
        if spec.keys is not None:
            raise InvalidInputError(
                "a table by key needs a store on the disk; see tierstore.create"
            )
        origin = BottomTier(spec)
        budget = Budget(host_rows=spec.rows) if budget is None else budget
        if budget.gpu_whole:
            raise InvalidInputError("gpu_whole is for tables that are only read; leave it out")
        placement = Placement(budget, None, find_device(device))
        (part,) = placement.plan({name: spec})
        self._space = placement.place(part, {name: origin})
        (extent,) = self._space.extents
        files = Unversioned(spec, origin, f"memory {uuid.uuid4().hex}")
        on = Backing(self, name, cast(Generation, files), self._space, extent)
        self.table: Table = Table(on)
        if all(item.init is None or item.init.is_zero for item in spec.fields.values()):
            report_nothing(progress)
        else:
            self._load(progress)

    def _load(self, progress: Progress | None) -> None:
        """Load every row into the tiers in order: a single row costs a whole block."""
        rows = self.table.rows
        step = max(1, _LOAD_BYTES // self.table.spec.layout.record_bytes)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            with self.table.lease(np.arange(start, stop)):
                pass
            if progress is not None:
                progress(stop, rows)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled."""
        raise InvalidTypeError(
            f"table {self.table.name!r} lives in memory alone and cannot be pickled; "
            "tierstore.create makes a store, which every process can open for reading"
        )

    def close(self) -> None:
        """Free the memory and discard the rows; may be called again."""
        self.prefetcher.close()
        with contextlib.suppress(ClosedError), self.door.use():
            self.door.close()
            self.prefetcher.wait_for_advice()
            self._space.close()


class Unversioned:
    """Replaces the generation of a table that no store versions.

    Attributes:
        place: distinguishes the table from those of other files or memory under the same name.
    """

    disk_bytes = allocated_bytes = 0
    base_path = ""

    def __init__(self, spec: TableSpec, tier: LowestTier, place: str) -> None:
        """Describe the table; `tier` is its lowest tier."""
        self.place = place
        self.spec = spec
        self.info = TableInfo(spec, "")
        self.tier = tier

    def keys(self, info: KeysInfo | None) -> None:
        """Return None: there are no keys."""
