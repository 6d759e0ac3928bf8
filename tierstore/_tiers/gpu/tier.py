"""The GPU tier: the records of the rows used last, in slots of device memory.

It reads the host tier's memory directly, so rows it lacks cost one pass over the link and no work
of the host. Every call puts its work into the caller's stream and returns; only `flush`, `discard`,
`check`, `stats` and `close` wait, and batches over a host tier that does not hold every row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._tiers.base import OPENED_ANEW, ROLLED_BACK, Epoch
from tierstore._tiers.gpu.abi import BatchArgument, BatchArguments, Mode, bytes_of
from tierstore._tiers.gpu.device import Device
from tierstore._tiers.gpu.exchange import Staging
from tierstore._tiers.gpu.keys import DeviceKeys
from tierstore._tiers.gpu.launcher import OWN, Launcher
from tierstore._tiers.gpu.lease import NO_ROWS, GpuLease, PinnedLeases, Room
from tierstore._tiers.gpu.link import FeatureIds, Inbox, Mailbox, Ordering
from tierstore._tiers.gpu.memory import Counts, GpuMemory, Scores, Workspace
from tierstore._tiers.gpu.places import Places
from tierstore._tiers.gpu.prefetch import Fetches
from tierstore._tiers.gpu.replay import Replays
from tierstore._tiers.host import HostTier, nothing_to_await
from tierstore.errors import CapacityError, InvalidInputError
from tierstore.policy import PolicySpec, lru
from tierstore.stats import TierStats

_MOST_IDS = 2**31 - 8
_LAST_BATCH = 2**30 - 2
_UNLIMITED = 2**32 - 1
_SPARE = 2
"""Most rooms of leases that are kept: one batch may begin before the one before it is dropped."""


class GpuTier:
    """A cache of records over a host tier, by row; least recently used batch first out by default.

    Rows are int64 arrays `(n,)` on the device, or of NumPy, copied before a call returns; in any
    order, with or without duplicates. Records are uint8 arrays `(n, hi - lo)` on the device, or any
    C-contiguous arrays of as many bytes. `within` is the extent, all rows if None, from whose start
    `rows` are counted. Rows outside it read as bytes 0xff, which is NaN, and are not written;
    `check` reports them.
    """

    def __init__(
        self,
        host: HostTier,
        *,
        slots: int,
        device: Device,
        policy: PolicySpec | None = None,
        writable: bool = True,
    ) -> None:
        """Reserve the slots and maps.

        Args:
            host: the tier below, in memory that the device can read.
            slots: most records to hold, at least 1.
            device: where.
            policy: which rows to keep; least recently used go first if None.
            writable: whether records are ever changed; if not, a bad id is reported once.
        """
        if slots < 1:
            raise CapacityError(f"a GPU tier needs at least one slot, not {slots}")
        self.host = host
        self.device = device
        self.policy: str = lru().name if policy is None else policy.name
        self.rows: int = host.rows
        self.record_bytes: int = host.record_bytes
        self.slots: int = min(slots, self.rows)
        scores = None if policy is None else policy.on_device()
        scored = scores is not None
        self.memory: GpuMemory = GpuMemory(
            device, self.rows, self.record_bytes, self.slots, scored=scored
        )
        self.memory.reach(host)
        self._batch = BatchArgument()
        self._batch_bytes = bytes_of(self._batch)
        self._arguments = BatchArguments(self.memory.argument, self._batch)
        launcher = Launcher(device, sparse=self.memory.places is not None)
        self.launcher: Launcher = launcher
        self._staging = None if host.direct else Staging(launcher, device, host, self.memory)
        if self._staging is not None:
            self._staging.bind(self._arguments)
        self.ordering: Ordering = Ordering(host, self.slots)
        self._scores = None if scores is None else Scores(scores, self.memory, launcher)
        self._workspace = Workspace(device, 0)
        self._filled = False
        self._now = 0
        self._fetches = Fetches(launcher, device, self.memory.argument)
        self.replays: Replays = Replays(launcher, device, self.memory)
        self._keys: dict[str, DeviceKeys] = {}
        self._inbox = Inbox(device)
        # If the host must help, a part would wait for it, and might fail after others are done.
        self._undivided = self.slots if host.direct else _MOST_IDS
        self.mailbox: Mailbox = Mailbox(device)
        self.leases: PinnedLeases = PinnedLeases(launcher)
        self.rooms: deque[Room] = deque(maxlen=_SPARE)
        """Rooms of leases that are gone."""
        self.epoch: Epoch = Epoch()
        """The epoch of leases; a new one after each `discard`."""
        self._counts = Counts(self.memory, writable=writable)
        self.tables: Sequence[tuple[str, range]] = (("", range(self.rows)),)
        """The tables of the space and their rows in it, for messages."""
        self.features: dict[tuple[str, str, int], int] = {}
        """The number of each feature whose bad ids may come; see `Counts.check`."""
        self.changes: int = 0
        """How often records were written, for leases that keep copies."""
        self.counts_are_waited_for: bool = False
        """Whether the number of distinct records of some lease was awaited; see `GpuLease.asks`."""
        host.before_change = self.await_fetches

    @property
    def nbytes(self) -> int:
        """Bytes of device memory the tier holds, the workspace of the largest batch included."""
        workspace = self._workspace.size * Workspace.BYTES
        keys = sum(each.nbytes for each in self._keys.values())
        return self.memory.nbytes + workspace + self.replays.nbytes + keys

    def keys(self, table: str, rows: int) -> DeviceKeys:
        """Return the map of the keys of a table of so many rows, for as many as find slots here."""
        keys = self._keys.get(table)
        if keys is None:
            most = max(1, self.slots * rows // self.rows)
            keys = self._keys[table] = DeviceKeys(self.launcher, self.device, most)
        return keys

    # -- batches

    def in_space(self, ids: Any, rows: Any, features: FeatureIds, stream: int) -> None:
        """Write the rows of ids of features `(n,)`, both on the device, to `rows`."""
        batch = BatchArgument(n=ids.shape[0], ids=self.device.pointer(rows))
        batch.arriving = self.device.pointer(ids)
        features.bind(batch)
        arguments = BatchArguments(self.memory.argument, batch)
        self.launcher.launch(OWN.IN_SPACE, arguments, batch.n, stream)

    def parts(self, rows: Any) -> tuple[tuple[Any, int], ...]:
        """Return the parts that a batch is best read or written in; see `Inbox.split`."""
        return self._inbox.split(rows, self._undivided)

    def read(
        self,
        rows: Any,
        out: Any,
        lo: int = 0,
        hi: int | None = None,
        *,
        first: int = 0,
        admit: bool = True,
        within: range | None = None,
        stream: int | None = None,
    ) -> None:
        """Copy bytes `lo:hi` of records `rows` `(n,)`, which may repeat, into `out` from `first`.

        `out` is `(first + n or more, hi - lo)`. Two launches, whatever is hit. Rows that are missed
        take the place of others; with `admit=False` they are copied and not kept.
        """
        if rows.shape[0]:
            self._begin(Mode.READ, rows, stream, admit=admit, within=within)
            self.describe(self._batch, out, lo, hi, first)
            self._run()
            self._counts.read(rows.shape[0], self._batch.bytes)

    def write(
        self,
        rows: Any,
        records: Any,
        lo: int = 0,
        hi: int | None = None,
        *,
        first: int = 0,
        admit: bool = True,
        within: range | None = None,
        stream: int | None = None,
    ) -> None:
        """Write `records` from `first` over bytes `lo:hi` of `rows` `(n,)`; the last of a row wins.

        Rows that are missed are fetched first, unless their whole record is written; with
        `admit=False` they are written where they are.
        """
        if rows.shape[0]:
            self.changes += 1
            self._begin(Mode.WRITE, rows, stream, admit=admit, within=within)
            self.describe(self._batch, records, lo, hi, first)
            self._batch.load = int(self._batch.bytes != self.record_bytes)
            self._run()
            self._counts.wrote(rows.shape[0], self._batch.bytes)

    def lease(
        self,
        rows: Any,
        out: Any = None,
        lo: int = 0,
        hi: int | None = None,
        *,
        within: range | None = None,
        features: FeatureIds | None = None,
        stream: int | None = None,
    ) -> GpuLease:
        """Hold the distinct records of `rows` `(n,)` in place; see `GpuLease`.

        Copies bytes `lo:hi` of the record of each of `rows` into `out`, if given, as its `read`
        does, in the same launches. With `features`, rows on the device are ids of theirs.
        """
        if not rows.shape[0]:
            room = Room.of(self, 0, self.launcher.enter(stream), bytes_of(BatchArgument()))
            lease = GpuLease(self, 0, room)
            self.device.fill(lease.arguments.batch.count, 0, 4, self.launcher.stream)
            return lease
        self._begin(Mode.LEASE, rows, stream, within=within, features=features)
        self._batch.data = 0
        if out is not None:
            self.describe(self._batch, out, lo, hi)
        n = rows.shape[0]
        lease = GpuLease(self, n, Room.of(self, n, self.launcher.stream, self._batch_bytes))
        lease.kept_rows = self._staging is None and not self._has_room(lease.bound)
        lease.spilled = self._run(lease)
        self.leases.add(lease)
        self._counts.leased(rows.shape[0])
        return lease

    def fetch(
        self,
        rows: Any,
        window: int,
        *,
        within: range | None = None,
        stream: int | None = None,
    ) -> None:
        """Start promoting `rows`, and keep them until they are used or `window` newer fetches ran.

        Maps change at once, in the caller's stream; the copies run beside it on few blocks. Later
        batches wait, on the device, only if they lack rows or use some that are still in transit.
        At most half the slots are kept this way, and only rows that the host tier holds are
        fetched: other rows are promoted when they are used.
        """
        if rows.shape[0]:
            self._fetch(rows, window, None, within, self.launcher.enter(stream))

    def prefetch_for(
        self,
        ids: npt.NDArray[np.int64],
        window: int,
        *,
        within: range | None = None,
        stream: int | None = None,
    ) -> None:
        """Fetch like `fetch` for ids on the host, by which `prefetched_for` recognizes their batch.

        Where the host tier is a cache, their slots are held for that batch: it waits for nothing.
        """
        if ids.size:
            # After the last work: until then the memory of earlier ids may be in use.
            stream = self.launcher.enter(stream)
            self._fetch(self.device.upload(ids, stream), window, ids, within, stream)

    def prefetched_for(self, ids: npt.NDArray[np.int64], within: range | None = None) -> Any:
        """Return the device's own copy of `ids`, if slots are held for their batch; else None."""
        return self._fetches.find(ids, within)

    def _fetch(
        self,
        rows: Any,
        window: int,
        ids: npt.NDArray[np.int64] | None,
        within: range | None,
        stream: int,
    ) -> None:
        workspace = self._fetches.begin(rows.shape[0], window, stream)
        batch = BatchArgument()
        workspace.bind(batch)
        arguments = BatchArguments(self.memory.argument, batch)
        with self.device.range(Mode.RANGES[Mode.PREFETCH]):
            self._begin(Mode.PREFETCH, rows, stream, batch, workspace, within=within)
            batch.arrival += 1
            if batch.alone or self._fetches.held + rows.shape[0] > self.slots // 2:
                ids = None
            if ids is None:
                batch.held = 0
            else:
                self._fetches.hold(batch)
            self._find(arguments, stream)
            self.launcher.start(OWN.PROMOTE_BESIDE_COPIES, arguments, stream)
            # Later batches run after the plan; `fence` keeps them from records still in transit.
            self.launcher.mark()
            self._fetches.copy(arguments, workspace, rows, ids, within, self.launcher.last)

    def await_fetches(self) -> None:
        """Wait on the host until no prefetch or replay reads the host tier's memory any more."""
        self._fetches.wait()
        if self.replays.ready:
            self.device.drain()

    # -- CUDA graphs

    def prepare_replays(self, stream: int) -> None:
        """Allow reads to be captured from now on; waits, the first time.

        Then prefetches no longer run beside the caller's stream, where a replay would meet them.
        """
        self.fill_for_replays(ready=True)
        if not self.replays.ready:
            self._fetches.wait()
            self.replays.prepare(self.slots, stream)

    def fill_for_replays(self, *, ready: bool = False) -> None:
        """Refill the host tier after a rollback dropped rows: replays read it without a check."""
        if (ready or self.replays.ready) and not self._filled:
            self.fill()

    def capture(self, rows: Any, out: Any, lo: int, hi: int, *, within: range, stream: int) -> None:
        """Make the graph that a stream captures read rows `(n,)`, on the device, into `out`.

        Each replay reads the ids that are in `rows` then: from slots, or from host memory. Other
        rows read as bytes 0xff, as ids outside `within` do; `check` reports both, once.
        """
        if not rows.shape[0]:
            return
        batch = BatchArgument(ids=self.device.pointer(rows), n=rows.shape[0])
        batch.start, batch.bound = within.start, len(within)
        self.describe(batch, out, lo, hi)
        self.replays.launch(batch, stream)

    def bring(self, rows: Any, *, within: range | None = None, stream: int | None = None) -> None:
        """Promote rows in the order of the stream, as many as find slots."""
        if rows.shape[0]:
            self.lease(rows, within=within, stream=stream).release(stream=stream)

    def adapt(self, stream: int) -> None:
        """Admit the rows that replays have read to slots, by the policy; waits, and checks."""
        if self.replays.ready:
            self.bring(self.replays.take(stream), stream=stream)
        self.check()

    # -- the steps of a batch

    def _begin(
        self,
        mode: int,
        rows: Any,
        stream: int | None,
        batch: BatchArgument | None = None,
        workspace: Workspace | None = None,
        *,
        admit: bool = True,
        within: range | None = None,
        features: FeatureIds | None = None,
    ) -> None:
        """Describe the batch to come, all but its data; a prefetch has one of its own."""
        n = rows.shape[0]
        if n > _MOST_IDS:
            raise InvalidInputError(f"a batch holds at most {_MOST_IDS} ids, not {n}; split it")
        if not self._filled:
            self.fill()
        if stream is None or stream != self.launcher.stream:
            self.launcher.enter(stream)
        if self._staging is not None:
            self._staging.pay()
        if self._now >= _LAST_BATCH:
            self._rebase()
        self._now += 1
        uses = mode != Mode.PREFETCH
        if batch is None:
            batch = self._batch
            if n > self._workspace.size:
                self._grow(n)
        if self.memory.places is not None and not self.memory.places.take(n):
            self._sweep(self.memory.places, n)
        within = within or range(self.rows)
        batch.start, batch.bound = within.start, len(within)
        batch.features = 0
        if features is not None:
            features.bind(batch)
        self._inbox.bring(rows, batch, (workspace or self._workspace).ids)
        batch.n, batch.mode, batch.now = n, mode, self._now
        batch.load, batch.last, batch.admit = 1, 1, int(admit)
        batch.in_order = self.ordering.of(n, mode, admit=admit)
        batch.alone = int(
            self._staging is None
            or self._staging.complete
            or (uses and self._fetches.reach(rows, self.launcher.stream))
        )
        batch.first = 0
        batch.limit = _UNLIMITED if self._staging is None else self._staging.limit
        batch.arrival = self._fetches.newest
        batch.expired = self._fetches.expired
        if self._scores is not None:
            self._scores.begin(n, batch, uses=uses)

    def describe(
        self, batch: BatchArgument, data: Any, lo: int, hi: int | None, first: int = 0
    ) -> None:
        """Describe the data of a batch, which begins with row `first` of it."""
        hi = self.record_bytes if hi is None else hi
        address = self.device.pointer(data) + first * (hi - lo)
        width = address | lo | hi | 16  # its lowest set bit: as wide as the addresses allow
        batch.data, batch.lo, batch.bytes, batch.width = address, lo, hi - lo, width & -width

    def _run(self, lease: GpuLease | None = None) -> npt.NDArray[np.int64]:
        """Launch the batch that was described; return the rows a lease keeps in its spill."""
        arguments = self._arguments if lease is None else lease.arguments
        stream = self.launcher.stream
        with self.device.range(Mode.RANGES[arguments.batch.mode]):
            if self._staging is None or arguments.batch.alone:
                self._launch(arguments, stream)
                spilled = NO_ROWS
            else:
                with self.host.still:
                    self._launch(arguments, stream)
                    counts = self.memory.counters(stream)
                spilled = self._settle(self._staging, arguments, counts, lease)
            self.launcher.launched()
        return spilled

    def _launch(self, arguments: BatchArguments, stream: int) -> None:
        """Launch everything that needs no help of the host."""
        self._find(arguments, stream)
        promote = OWN.PROMOTE
        if self._fetches:
            self.launcher.start(OWN.FENCE, arguments, stream)
            promote = OWN.PROMOTE_BESIDE_COPIES
        self.launcher.start(promote, arguments, stream)

    def _find(self, arguments: BatchArguments, stream: int) -> None:
        """Launch `probe`, and note that the ids are in transit."""
        self.launcher.start(OWN.PROBE, arguments, stream, arguments.batch.n)
        self._inbox.sent(stream)

    def _settle(
        self,
        staging: Staging,
        arguments: BatchArguments,
        counts: npt.NDArray[Any],
        lease: GpuLease | None,
    ) -> npt.NDArray[np.int64]:
        """Finish a batch with the help of a host tier that does not hold every row."""

        def spill(records: int) -> int:
            if lease is None:
                raise RuntimeError("only leases spill")
            nbytes = records * self.record_bytes
            lease.spill = self.device.borrow(nbytes, np.uint8, self.launcher.stream)
            return self.device.pointer(lease.spill)

        return staging.settle(arguments, self.launcher.stream, counts, spill=spill)

    def _grow(self, ids: int) -> None:
        """Make room for a larger batch, rarely: sizes double."""
        self.device.synchronize(self.launcher.stream)
        self._workspace = Workspace.for_ids(self.device, ids)
        self._workspace.bind(self._batch)

    def _sweep(self, places: Places, ids: int) -> None:
        """Provide places for so many more rows; the map drops unused ones if they are too few."""
        keeping, arguments = self.leases.keeping, self._arguments
        stream, start = self.launcher.stream, self.launcher.start
        kept = self.slots + sum(lease.bound for lease in keeping)
        self._batch.n = free = places.provide(kept, ids)
        start(OWN.SWEEP, arguments, stream)
        start(OWN.EMPTY, arguments, stream, places.count)
        start(OWN.ENTER_SLOTS, arguments, stream, self.slots)
        for lease in keeping:
            start(OWN.ENTER_KEPT, lease.arguments, stream, lease.bound)
        places.grant(free - ids)

    def fill(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Load every row into a host tier with room for all: then none is ever missing.

        The first batch does this if it was not done before. `progress` is called with rows done and
        in all.
        """
        self.host.fill(progress)
        self._filled = True

    def _rebase(self) -> None:
        """Renumber the batches before the stamps run out; recent ones keep their order."""
        kept = 1 << 24
        self._batch.now = self._now - kept
        self._now = kept
        self.launcher.launch(OWN.REBASE, self._arguments, self.slots, self.launcher.stream)

    def _has_room(self, rows: int) -> bool:
        """Whether so many more rows certainly find slots, despite all pins."""
        ahead = self.slots // 2 if self._fetches.newest > self._fetches.expired else 0
        return self.leases.bound + ahead + rows <= self.slots

    # -- calls that wait

    def _drain(self) -> int:
        """Wait for everything under way; return the stream to continue in."""
        stream = self.launcher.enter(None)
        self._fetches.follow(stream)
        self.device.synchronize(stream)
        return stream

    def flush(self) -> None:
        """Write every changed record to the host tier, and wait. Raises as `check` does.

        All at once, or as many records at a time as the staging holds.
        """
        stream = self._drain()
        if self._staging is not None:
            self._staging.pay()
        limit = self._batch.limit = 0 if self._staging is None else self._staging.limit
        listed = limit + 1
        while listed > limit:
            self.launcher.launch(OWN.FLUSH, self._arguments, self.slots, stream)
            listed = int(self.memory.counters(stream)["evicted"])
            if self._staging is not None:
                self.memory.clear(("evicted",), stream)
                self._staging.owe(min(listed, limit))
                self._staging.pay()
        self._report(stream)
        self.check()

    def _report(self, stream: int) -> None:
        """Tell a direct host tier which of its records were changed in place; waits."""
        if self.host.direct:
            self.launcher.launch(OWN.REPORT, self._arguments, self.rows // 32 + 1, stream)
            self.device.synchronize(stream)

    def discard(self) -> None:
        """Drop every record, changed or not, and every lease; waits.

        Unchanged ones go too: they may have come from records that the host tier is about to drop.
        The host tier is told which of its records changed.
        """
        self.epoch.end(ROLLED_BACK, names=False)
        stream = self._drain()
        self._report(stream)
        self._counts.take(stream)
        self.memory.reset(stream)
        if self._staging is not None:
            self._staging.forget()
        self.leases.clear()
        self._fetches.clear()
        self._now = 0
        self._filled = False
        self._counts.forgive()
        self.epoch = self.epoch.next()

    def check(self) -> None:
        """Wait; raise RowIndexError if any id since the last `discard` was outside the table."""
        self._counts.check(self.launcher.enter(None), self.tables, self.features)

    @property
    def stats(self) -> TierStats:
        """Counters since the tier was made, counted on the device; reading them waits."""
        return self._counts.stats(self.launcher.enter(None))

    def close(self) -> None:
        """Wait for everything under way and free the memory; changed records are lost."""
        self.epoch.end(OPENED_ANEW, names=False)
        self._drain()
        self.host.before_change = nothing_to_await
        self.leases.clear()
        self.rooms.clear()
        self._fetches.close()
        self.replays.close()
        for each in self._keys.values():
            each.close()
        self._keys.clear()
        self._workspace = Workspace(self.device, 0)
        if self._staging is not None:
            self._staging.close()
        self._inbox.close()
        self.mailbox.close()
        self.memory.close()
