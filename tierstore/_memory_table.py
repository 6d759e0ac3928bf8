"""A table without a store: the same tiers in memory alone, gone when it is closed.

    with MemoryTable(TableSpec(rows=1_000_000, dim=64), device="auto") as memory:
        memory.table.write([3, 5], rows)

For rows that need not outlive the process: nothing is written to a disk, nothing can be committed.
"""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Self, cast

import numpy as np

from tierstore._disk.base import Progress
from tierstore._disk.generation import Generation
from tierstore._disk.manifest import TableInfo
from tierstore._door import Door
from tierstore._table.prefetch import Prefetcher
from tierstore._table.table import Table
from tierstore._tiers.gpu.device import Device
from tierstore._tiers.placement import Placement, find_device
from tierstore._tiers.volatile import Origin
from tierstore.budget import Budget
from tierstore.errors import ClosedError
from tierstore.spec import DeviceName, TableSpec

__all__ = ["MemoryTable"]

_LOAD_BYTES = 8 << 20


class MemoryTable:
    """A table in memory, and the owner it needs.

    Attributes:
        table: the table, which has all that a table of a store has but the store.
        door, prefetcher, sync_checks, store: for the table.
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
        """Make every row by the initializers of its fields.

        Args:
            spec: what the table is made of; its backend does not matter.
            name: what errors call the table.
            budget: memory for the tiers; None gives every row a place on the host.
            device: as in `tierstore.open`.
            progress: called with rows done and in all while rows are made.

        Rows that have no place in a tier are kept in memory below all tiers. Raises CapacityError.
        """
        self.door: Door = Door(f"table {name!r}", writable=True)
        self.prefetcher: Prefetcher = Prefetcher(self.door)
        origin = Origin(spec)
        budget = Budget(host_rows=spec.rows) if budget is None else budget
        placement = Placement(budget, None, find_device(device))
        self._space = placement.place({name: origin}, {name: spec})
        (extent,) = self._space.extents
        self.table: Table = Table(
            self, name, cast(Generation, _Ground(spec, origin)), self._space, extent
        )
        if not all(item.init is None or item.init.is_zero for item in spec.fields.values()):
            self._load(progress)

    def _load(self, progress: Progress | None) -> None:
        """Bring every row into the tiers, in order: made singly, each would cost a block."""
        rows = self.table.rows
        step = max(1, _LOAD_BYTES // self.table.spec.layout.record_bytes)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            with self.table.lease(np.arange(start, stop)):
                pass
            if progress is not None:
                progress(stop, rows)

    def close(self) -> None:
        """Give the memory back, and the rows with it; harmless when repeated."""
        self.prefetcher.close()
        with contextlib.suppress(ClosedError), self.door.use():
            self.door.close()
            self.prefetcher.wait_for_advice()
            self._space.close()

    def __enter__(self) -> Self:
        """Return the memory table itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()


class _Ground:
    """Stands in for a generation, under a table that has no files."""

    disk_bytes = 0
    base_path = ""

    def __init__(self, spec: TableSpec, tier: Origin) -> None:
        self.info = TableInfo(spec, "")
        self.tier = tier

    def keys(self) -> None:
        return None
