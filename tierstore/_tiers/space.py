"""A space: tables whose records are equally long, under one host tier and one GPU tier.

A space is a list of extents placed end to end, one for each table. The tiers above the lowest know
only rows of the space: row = start of the extent + row of the table.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from tierstore._rowcopy import Target, call_at, copy
from tierstore._tiers.base import (
    OPENED_ANEW,
    ROLLED_BACK,
    Bytes,
    Collecting,
    Delivering,
    Epoch,
    LowestTier,
    MappedTier,
    Renewed,
    Rows,
)
from tierstore._tiers.gpu import GpuTier
from tierstore._tiers.gpu.device import device_error
from tierstore._tiers.gpu.whole import WholeColumns
from tierstore._tiers.host import HostTier
from tierstore._tiers.slots import staging_rows
from tierstore._tiers.uncached import Uncached
from tierstore.stats import Occupancy, TierInformation, TierStats

_NO_ROWS = np.empty(0, np.int64)

Nearest = HostTier | Uncached
"""What serves byte ranges of any rows of a space, in any order."""


@dataclasses.dataclass(eq=False)
class Extent:
    """The rows of a table within a space.

    Attributes:
        table: its name.
        start: its first row in the space.
        tier: its lowest tier, which knows the table's own rows.
        epoch: of leases of its rows, and of what these mean; a new one after each event that ends
            leases. The epochs of all extents of a space end together.
    """

    table: str
    start: int
    tier: LowestTier
    epoch: Epoch = dataclasses.field(default_factory=Epoch)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.tier.rows

    @property
    def range(self) -> range:
        """Its rows in the space."""
        return range(self.start, self.start + self.rows)

    def in_space(self, rows: Rows) -> Rows:
        """Return rows of the table as rows of the space; no copy where they are the same."""
        return rows + self.start if self.start else rows

    def own(self, rows: Rows) -> Rows:
        """Return those of `rows` of the space that are in the extent, as rows of the table."""
        return rows[(rows >= self.start) & (rows < self.start + self.rows)] - self.start


class WholeSpace:
    """All rows of a space as one extent, for calls on several of its tables at once.

    Attributes:
        table: their name in messages that know no single table.
        start: 0.
        rows: number of rows.
        range: the rows in the space.
    """

    start = 0

    def __init__(self, space: Space, table: str) -> None:
        """Refer to the rows of every extent."""
        self.table = table
        self.rows: int = space.nearest.rows
        self.range: range = range(self.rows)
        self._first = space.extents[0]

    @property
    def epoch(self) -> Epoch:
        """The epoch of leases of the rows: the epochs of all extents end together."""
        return self._first.epoch

    def in_space(self, rows: Rows) -> Rows:
        """Return the rows themselves."""
        return rows


def laid_out(tiers: Sequence[tuple[str, LowestTier]]) -> tuple[Extent, ...]:
    """Return the extents of tables, each with its name and lowest tier, end to end."""
    extents, start = [], 0
    for table, tier in tiers:
        extents.append(Extent(table, start, tier))
        start += tier.rows
    return tuple(extents)


def lowest_of(extents: Sequence[Extent]) -> MappedTier:
    """Return the lowest tier of a space: that of its table, or a router to those of several."""
    return extents[0].tier if len(extents) == 1 else Router([extent.tier for extent in extents])


class Router:
    """The lowest tier of a space of several extents, placed end to end."""

    def __init__(self, tiers: Sequence[LowestTier]) -> None:
        """Lay the rows of `tiers`, whose records are equally long, end to end."""
        self.record_bytes = tiers[0].record_bytes
        self.stats = TierStats()
        self._tiers = tuple(tiers)
        self._starts = np.cumsum([0, *(tier.rows for tier in tiers)])
        self.rows = int(self._starts[-1])

    def _routed(self, rows: Rows) -> Iterator[tuple[LowestTier, slice, Rows]]:
        """Yield each tier that has some of `rows`, ascending, which of them, and its own rows."""
        edges = np.searchsorted(rows, self._starts)
        for number in np.flatnonzero(np.diff(edges)).tolist():
            part = slice(int(edges[number]), int(edges[number + 1]))
            yield self._tiers[number], part, rows[part] - self._starts[number]

    def read(self, rows: Rows, out: Bytes) -> None:
        """Copy the records of `rows` `(n,)`, ascending, into `out` `(n, record_bytes)`."""
        for tier, part, own in self._routed(rows):
            tier.read(own, out[part])

    def stream(self, rows: Rows) -> Generator[tuple[slice, Bytes]]:
        """Yield the records of `rows`, ascending, part by part."""
        for tier, part, own in self._routed(rows):
            for within, records in tier.stream(own):
                yield slice(part.start + within.start, part.start + within.stop), records

    def deliver(self, rows: Rows, target: Target) -> None:
        """Copy the records of `rows`, ascending, to a target; see `Delivering`."""
        for tier, part, own in self._routed(rows):
            goal = target.of(part)
            if isinstance(tier, Delivering):
                tier.deliver(own, goal)
                continue
            with contextlib.closing(tier.stream(own)) as stream:
                for within, records in stream:
                    goal.of(within).put(records)

    def write(self, rows: Rows, records: Bytes, *, resident: bool = False) -> None:
        """Write `records` `(n, record_bytes)` over those of `rows` `(n,)`, in any order."""
        self.collect(rows, partial(copy, np.ascontiguousarray(records)), resident=resident)

    def collect(
        self, rows: Rows, get: Callable[[Any, Bytes], object], *, resident: bool = False
    ) -> None:
        """Write the records of `rows` `(n,)`, in any order, that `get` copies; see `Collecting`."""
        order = np.arange(rows.size)
        if (rows[1:] < rows[:-1]).any():
            order = np.argsort(rows)
            rows = rows.take(order)
        for tier, part, own in self._routed(rows):
            if isinstance(tier, Collecting):
                tier.collect(own, partial(call_at, get, order[part]), resident=resident)
                continue
            step = staging_rows(self.record_bytes)
            block = np.empty((min(step, own.size), self.record_bytes), np.uint8)
            for at in range(0, own.size, step):
                some, records = own[at : at + step], block[: own.size - at]
                get(order[part][at : at + step], records)
                tier.write(some, records, resident=resident)

    def stage(self, rows: Rows) -> Callable[[], None] | None:
        """Return a call that brings `rows`, ascending, nearer in all the tiers, or None."""
        advice = [tier.stage(own) for tier, _, own in self._routed(rows)]
        calls = [call for call in advice if call is not None]

        def advise() -> None:
            for call in calls:
                call()

        return advise if calls else None

    def let_go(self, rows: Rows) -> None:
        """Unmap the memory that was mapped to read ascending `rows`."""
        for tier, _, own in self._routed(rows):
            tier.let_go(own)

    def flush(self) -> None:
        """Do nothing: a lowest tier writes nothing further down."""


class Space:
    """The tiers of some tables: their lowest tiers, a host cache or none, a GPU cache or none.

    Attributes:
        extents: the tables.
        nearest: the nearest tier that is not on a GPU, for byte ranges of any rows.
        host: the same where it is a host tier, else None.
        gpu: the GPU tier, or None; there is none without a host tier.
        whole: the columns of its only table that the GPU holds whole, unknown to the tiers, or
            None. Such a table is only read.
    """

    def __init__(
        self,
        extents: Sequence[Extent],
        below: MappedTier,
        host: HostTier | None = None,
        gpu: GpuTier | None = None,
        whole: WholeColumns | None = None,
    ) -> None:
        """Take over the tiers above `below`, the lowest one of the extents."""
        self.extents: tuple[Extent, ...] = tuple(extents)
        self.host = host
        self.gpu = gpu
        self.whole = whole
        self.closed: bool = False
        """Whether its tables are in other spaces by now, or nowhere."""
        if gpu is not None:
            gpu.tables = [(extent.table, extent.range) for extent in self.extents]
        self.nearest: Nearest = Uncached(below) if host is None else host

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Make the device of the GPU tier the current one, and explain the driver's errors.

        Without a GPU tier this does nothing.
        """
        if self.gpu is None:
            yield
            return
        try:
            with self.gpu.device.current():
                yield
        except Exception as error:
            meaning = device_error(error, self.extents[0].table)
            if meaning is error or meaning is None:
                raise
            raise meaning from error

    def records(self, extent: Extent) -> Nearest:
        """Return the tier off the GPU that has whole records of a table, to be read in order."""
        return self.nearest if self.whole is None else Uncached(extent.tier)

    @property
    def can_grow(self) -> bool:
        """Whether its table may grow in place, with its leases and cached rows."""
        return self.gpu is None and (self.host is None or self.host.grows)

    def grow(self, rows: int) -> None:
        """Grow to `rows` rows of its only table, whose lowest tier already has them."""
        self.nearest.grow(rows)

    def flush_gpu(self) -> None:
        """Write every record that changed on the GPU to the tiers below it, and wait."""
        if self.gpu is not None:
            with self.on_device():
                self.gpu.flush()

    def flush(self) -> None:
        """Write every changed record to the lowest tiers."""
        self.flush_gpu()
        self.nearest.flush()

    def uncommitted(self, extent: Extent) -> Rows:
        """Return the rows of a table that were written since the last commit, ascending."""
        self.flush_gpu()
        live = extent.tier.live
        handed_down = _NO_ROWS if live is None else live.ids
        return np.union1d(handed_down, extent.own(self.nearest.dirty()))

    def uncommitted_rows(self) -> int:
        """Return how many rows of all tables were written since the last commit."""
        self.flush_gpu()
        lives = ((extent, extent.tier.live) for extent in self.extents)
        handed_down = [extent.in_space(live.ids) for extent, live in lives if live is not None]
        return np.union1d(np.concatenate([_NO_ROWS, *handed_down]), self.nearest.dirty()).size

    def discard(self) -> None:
        """Drop what was not committed, and end every lease."""
        self.end_epochs(ROLLED_BACK, renamed=None)
        if self.gpu is not None:
            with self.on_device():
                self.gpu.discard()
        gone = [extent.in_space(extent.tier.discard()) for extent in self.extents]
        self.nearest.discard(np.concatenate(gone))
        if self.gpu is not None:
            with self.on_device():
                self.gpu.fill_for_replays()
        self.begin_epochs()

    def end_leases(self, reason: str, renamed: Collection[str]) -> None:
        """End every lease of a space without a GPU tier, and what rows of some tables mean."""
        self.end_epochs(reason, renamed=renamed)
        if self.host is not None:
            self.host.unpin()
        self.begin_epochs()

    def end_epochs(self, reason: str, *, renamed: Collection[str] | None) -> None:
        """End every lease, and prevent reads during a use, until new epochs begin.

        Rows of the tables `renamed`, of all if it is None, may mean something else then.
        """
        for extent in self.extents:
            extent.epoch.end(reason, names=renamed is None or extent.table in renamed)

    def begin_epochs(self) -> None:
        """Begin new epochs after the ended ones: rows and keys have their final state."""
        for extent in self.extents:
            extent.epoch = extent.epoch.next()

    def forget(self, renewed: Renewed | None) -> None:
        """Drop old bytes of changed rows, for a reader: the lowest tiers have new ones.

        In a host tier, `renewed` records replace them. The epochs have ended; new ones begin.
        """
        if self.host is not None and renewed is not None:
            self.host.renew(renewed)
        self.begin_epochs()

    def stats(self, extent: Extent) -> dict[str, TierStats]:
        """Return copies of the counters of each tier, the nearest first."""
        with self.on_device():
            found = {
                **({} if self.gpu is None else {"gpu": self.gpu.stats}),
                **({} if self.host is None else {"host": self.host.stats_from(extent.start)}),
                "disk": extent.tier.stats,
            }
            return {name: dataclasses.replace(stats) for name, stats in found.items()}

    def occupancy(self) -> dict[str, Occupancy]:
        """Return how full the host tier is, under "host"; empty where there is none."""
        return {} if self.host is None else {"host": self.host.occupancy()}

    def information(self) -> tuple[TierInformation, ...]:
        """Return the size of each tier above the lowest, the nearest first."""
        tables, found = tuple(extent.table for extent in self.extents), []
        if self.gpu is not None:
            place = self.gpu.device.torch_name
            nbytes = self.gpu.nbytes + (0 if self.whole is None else self.whole.nbytes)
            found.append(
                TierInformation("gpu", nbytes, self.gpu.slots, place, tables, self.gpu.policy)
            )
        if self.host is not None:
            host, kind = self.host, self.host.arena.kind
            found.append(
                TierInformation("host", host.nbytes, host.slots, kind, tables, host.policy)
            )
        return tuple(found)

    def close(self, reason: str = OPENED_ANEW) -> None:
        """End every lease and free the memory, even if the GPU has failed."""
        self.closed = True
        self.end_epochs(reason, renamed=())
        if self.gpu is not None:
            self.gpu.epoch.end(reason, names=False)
            with contextlib.suppress(Exception), self.gpu.device.current():
                self.gpu.close()
        if self.whole is not None:
            self.whole.close()
        with contextlib.suppress(Exception):
            self.nearest.close()
