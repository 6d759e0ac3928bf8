"""A lease on the GPU: the distinct records of a batch, pinned in their slots or in a spill."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tierstore._tiers.base import Epoch, lease_ended
from tierstore._tiers.gpu.abi import (
    Arguments,
    BatchArgument,
    BatchArguments,
    Structure,
    bytes_of,
)
from tierstore._tiers.gpu.device import Device
from tierstore._tiers.gpu.launcher import OWN, Kernel, Launcher
from tierstore._tiers.gpu.link import AsyncScalar, Mailbox
from tierstore._tiers.gpu.memory import GpuMemory

NO_ROWS = np.empty(0, np.int64)
_MUCH = 16 << 20
_LITTLE = 1 << 20
"""Bytes of lists up to which they are kept for a later lease."""


class LeasedTier(Protocol):
    """What a lease asks of its tier; see `GpuTier`."""

    rows: int
    record_bytes: int
    device: Device
    memory: GpuMemory
    launcher: Launcher
    mailbox: Mailbox
    leases: PinnedLeases
    rooms: deque[Room]
    changes: int
    epoch: Epoch
    counts_are_waited_for: bool

    def describe(self, batch: BatchArgument, data: Any, lo: int, hi: int | None) -> None:
        """Describe the data of a batch."""

    def read(self, rows: Any, out: Any, *, admit: bool, stream: int | None) -> None:
        """Copy records `rows` into `out`."""

    def write(
        self, rows: Any, records: Any, lo: int, hi: int | None, *, admit: bool, stream: int | None
    ) -> None:
        """Write `records` over bytes `lo:hi` of `rows`."""


class PinnedLeases:
    """The open leases, and ended ones whose rows in host memory others may still hold."""

    def __init__(self, launcher: Launcher) -> None:
        """Start with none."""
        self._launch = launcher.launch
        self._open: set[GpuLease] = set()
        self._ended: list[GpuLease] = []

    @property
    def bound(self) -> int:
        """Most slots that the open leases can hold."""
        return sum([lease.bound for lease in self._open]) if self._open else 0

    @property
    def keeping(self) -> list[GpuLease]:
        """The leases whose rows in direct host memory must not be promoted."""
        return [lease for lease in (*self._open, *self._ended) if lease.kept_rows]

    def add(self, lease: GpuLease) -> None:
        """Add a new lease."""
        self._open.add(lease)

    def end(self, lease: GpuLease, stream: int | None, *, unpinned: bool = False) -> None:
        """Unpin the records of a lease, unless a kernel that was launched does so.

        Rows that leases keep in direct host memory may be promoted again when the last one ends:
        until then another lease may hold the same rows.
        """
        if lease not in self._open:
            return
        if not unpinned:
            self._launch(OWN.RELEASE, lease.arguments, lease.bound, stream)
        self._open.remove(lease)
        if lease.kept_rows:
            self._ended.append(lease)
        if not self._open:
            for ended in self._ended:
                self._launch(OWN.FORGET, ended.arguments, ended.bound, stream)
            self._ended.clear()

    def clear(self) -> None:
        """Forget every lease, as the device has: their epoch has ended."""
        self._open.clear()
        self._ended.clear()


class Room:
    """The lists of a lease on the device, and the structures that describe them to kernels.

    To make them takes the host longer than to launch a kernel, so small ones are left to a later
    lease: kernels use them in the order of their launches.

    Attributes:
        ids: most ids that it has room for.
        stream: of the lease.
        block: the lists.
        batch: what the tier's own kernels know of a lease.
        arguments: for them.
        rows: what other kernels know of it.
        work: the arguments of one of these; the second structure is of the last launch.
        pins: what unpins the rows of a lease; see `Rows`.
        is_spare: whether another lease may have it; not if others may refer to the lists.
    """

    def __init__(self, tier: LeasedTier, ids: int, stream: int) -> None:
        """Reserve the lists of a batch of so many ids."""
        self.ids: int = ids
        self.stream: int = stream
        self.block: Any = tier.device.borrow(24 * ids + 16, np.uint8, stream)
        self.batch: BatchArgument = BatchArgument()
        self.arguments: BatchArguments = BatchArguments(tier.memory.argument, self.batch)
        self.rows: Any = tier.memory.described()
        self.work: Arguments = Arguments(self.rows, self.rows)
        self.pins: tuple[int, int] = tier.memory.argument.stamp, tier.memory.argument.pins
        self.is_spare: bool = 24 * ids <= _LITTLE
        self._start: int = tier.device.pointer(self.block)
        self._bytes = bytes_of(self.batch)
        self.rows.count, self.rows.records = self._start, self._start + 16
        self.rows.held = self._start + 16 + 8 * ids

    @classmethod
    def of(cls, tier: LeasedTier, ids: int, stream: int, batch: memoryview) -> Room:
        """Return room for a batch, of which `batch` are the bytes of what describes it."""
        room = None
        while tier.rooms and room is None:
            room = tier.rooms.pop()
            room = room if ids <= room.ids and stream == room.stream else None
        if room is None:
            room = cls(tier, ids, stream)
        room._bytes[:] = batch
        own, start, lists = room.batch, room._start, room._start + 16
        own.count, own.records, own.held = start, lists, lists + 8 * room.ids
        own.positions, own.rows = lists + 12 * room.ids, lists + 16 * room.ids
        return room

    def shown(self, before: int, nbytes: int, dtype: npt.DTypeLike) -> Any:
        """Return a list of so many bytes an id, given the bytes an id of the lists before it."""
        self.is_spare = False
        start = 16 + before * self.ids
        return self.block[start : start + nbytes * self.batch.n].view(dtype)


class GpuLease:
    """The distinct records of a batch of ids, pinned until `release`.

    Each record stays in its slot; where all slots are taken it stays in the host tier's memory if
    that holds every row, else in a copy: writes to the copy go to the row at once, and the copy is
    read again before its use if others wrote to the row.

    A lease ends at `release`, and with the epoch of its tier. From then on every method but
    `release`, which does nothing more, raises ClosedError.

    Attributes:
        bound: maximum of `count`; see `trim`.
        trimmed: whether `bound` is that number.

    All arrays are on the device, in no particular order of rows, valid in the stream of the lease.
    """

    def __init__(self, tier: LeasedTier, ids: int, room: Room) -> None:
        """Lease the rows of a batch of `ids` ids, which its `room` describes."""
        self._tier = tier
        self._room = room
        self._batch = room.batch
        self.bound: int = ids if ids < tier.rows else tier.rows
        self.arguments: BatchArguments = room.arguments
        self.kept_rows = True
        """Whether some rows may stay in the host tier's memory, not to be promoted meanwhile."""
        self.spill: Any = None
        self.spilled: npt.NDArray[np.int64] = NO_ROWS
        self._count_sent: AsyncScalar | None = None
        self.trimmed: bool = False
        waited = tier.counts_are_waited_for
        self.asks: bool = waited or self.bound * tier.record_bytes > _MUCH
        """Whether the number of records is worth a copy to the host ahead of its use.

        It is if the number of an earlier lease was awaited, or if `bound` records take much memory.
        """
        self._seen = tier.changes
        self._epoch = tier.epoch
        self._released = False

    def __del__(self) -> None:
        """Leave the room to another lease."""
        if self._room.is_spare:
            self._tier.rooms.append(self._room)

    @property
    def positions(self) -> Any:
        """Int32 `(n,)`, for each id the index of its record; -1 for ids outside the table."""
        return self._room.shown(12, 4, np.int32)

    @property
    def rows(self) -> Any:
        """Int64 `(n,)`, the row of each record; undefined after the first `count`."""
        return self._room.shown(16, 8, np.int64)

    @property
    def count(self) -> Any:
        """uint32 `(1,)`, the number of distinct records."""
        self._room.is_spare = False
        return self._room.block[:4].view(np.uint32)

    @property
    def ended(self) -> bool:
        """Whether the lease was released, or its epoch has ended."""
        return self._released or bool(self._epoch.ended)

    def check(self) -> None:
        """Raise ClosedError if the lease has ended."""
        if self._released or self._epoch.ended:
            raise lease_ended(self._epoch)

    def __enter__(self) -> GpuLease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def gather(
        self, out: Any, lo: int = 0, hi: int | None = None, *, stream: int | None = None
    ) -> None:
        """Copy bytes `lo:hi` of record k to `out[k]`, for all k below `count`.

        `out` is a device array of at least `bound` rows of `hi - lo` bytes; the rest of it stays.
        """
        self._copy(OWN.LEASE_GATHER, out, lo, hi, stream)

    def scatter(
        self, data: Any, lo: int = 0, hi: int | None = None, *, stream: int | None = None
    ) -> None:
        """Copy `data[k]` over bytes `lo:hi` of record k, now changed, for all k below `count`."""
        hi = self._tier.record_bytes if hi is None else hi
        self._copy(OWN.LEASE_SCATTER, data, lo, hi, stream)
        self._wrote([(lo, hi)], stream)

    def read(
        self, out: Any, lo: int = 0, hi: int | None = None, *, stream: int | None = None
    ) -> None:
        """Copy to `out[i]` bytes `lo:hi` of the i-th id's record, 0xff where there is none."""
        self._copy(OWN.LEASE_READ, out, lo, hi, stream)

    def launch(
        self,
        kernel: Kernel,
        work: Structure,
        items: int,
        writes: Sequence[tuple[int, int]] = (),
        positions: tuple[int, int] | None = None,
        *,
        ends: bool = False,
        stream: int | None = None,
    ) -> None:
        """Launch a kernel of the caller's own, of two arguments: `Rows` and the structure `work`.

        Args:
            kernel: of a source that extends `abi.RECORDS`.
            work: copied by the launch.
            items: the amount of work, which determines the kernel's grid.
            writes: the byte ranges of the records that it writes; it calls `changed` for each.
            positions: address and number of positions other than those of the lease's ids.
            ends: whether the lease ends with it; it calls `unpin` for each record.
            stream: where to run it.
        """
        if self._released or self._epoch.ended or self.spilled.size:
            self._begin(stream)
        rows, arguments = self._room.rows, self._room.work
        rows.positions, rows.n = positions or (self._batch.positions, self._batch.n)
        rows.stamp, rows.pins = self._room.pins if ends else (0, 0)
        arguments.point(work)
        self._tier.launcher.launch(kernel, arguments, items, stream)
        if ends:
            self._end(stream, unpinned=True)
        if writes:
            self._wrote(writes, stream)

    def trim(self, *, wait: bool, stream: int | None = None) -> bool:
        """Lower `bound` to the number of distinct records if that is known, or wait for it.

        The first call requests the number from the device, unless it does not `wait` and the number
        may not be needed; see `asks`. Returns whether `bound` is the number now.
        """
        self.check()
        if self.trimmed or not self._batch.n:
            return True
        self._tier.counts_are_waited_for |= wait
        if not (wait or self.asks):
            return False
        device = self._tier.device
        stream = device.current_stream() if stream is None else stream
        if self._count_sent is None:
            self._count_sent = self._tier.mailbox.post(self._batch.count, stream)
            if not wait:
                return False
        if self._count_sent is None:
            device.synchronize(stream)
            self.bound = int(device.download(self.count)[0])
        elif wait or self._count_sent.arrived:
            self.bound = self._count_sent.read()
        else:
            return False
        self.trimmed = True
        return True

    def _copy(self, kernel: Kernel, data: Any, lo: int, hi: int | None, stream: int | None) -> None:
        self._begin(stream)
        if self._batch.n:
            self._tier.describe(self._batch, data, lo, hi)
            self._tier.launcher.launch(kernel, self.arguments, self._batch.n, stream)

    def _begin(self, stream: int | None) -> None:
        """Check the lease, and read its copies of rows again if others wrote since."""
        self.check()
        if self.spilled.size and self._seen != self._tier.changes:
            self._tier.read(self.spilled, self.spill, admit=False, stream=stream)
            self._seen = self._tier.changes

    def _wrote(self, spans: Sequence[tuple[int, int]], stream: int | None) -> None:
        """Note that this lease wrote, and write changed copies to their rows."""
        self._tier.changes += 1
        if self.spilled.size:
            self._write_through(spans, stream)
        self._seen = self._tier.changes

    def _write_through(self, spans: Sequence[tuple[int, int]], stream: int | None) -> None:
        """Write byte ranges of the copies over their rows, wherever those are by now."""
        device, copies, record = self._tier.device, self.spilled.size, self._tier.record_bytes
        stream = device.current_stream() if stream is None else stream
        spill = device.pointer(self.spill)
        for lo, hi in spans:
            part = device.borrow(copies * (hi - lo), np.uint8, stream)
            target = device.pointer(part)
            device.copy_columns(target, spill + lo, hi - lo, record, copies, stream)
            self._tier.write(self.spilled, part, lo, hi, admit=False, stream=stream)

    def release(self, *, stream: int | None = None) -> None:
        """Unpin the records. Harmless when repeated, or when the epoch has ended."""
        if not self._released:
            self._end(stream)

    def _end(self, stream: int | None, *, unpinned: bool = False) -> None:
        self._tier.leases.end(self, stream, unpinned=unpinned)
        self._released = True
        if self._count_sent is not None and not self.trimmed:
            self._count_sent.drop()
