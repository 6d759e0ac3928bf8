"""A lease: the distinct records of a batch, held where they are while a step works on them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tierstore.tier.gpu.arguments import Arguments, BatchArgument, Rows, TierArgument
from tierstore.tier.gpu.mailbox import Letter
from tierstore.transfer import Kernel

if TYPE_CHECKING:
    from tierstore.tier.gpu import GpuTier

__all__ = ["GpuLease"]


class GpuLease:
    """The distinct records of a batch of ids, pinned until `release`.

    Each record stays in its slot; where all slots are taken it stays in the host tier's memory if
    that holds every row, else in a copy that is written back on release.

    Attributes:
        bound: most that `count` can be; see `trim`.
        trimmed: whether `bound` is that number.

    All arrays are on the device, in no particular order of rows, valid in the stream of the lease.
    """

    def __init__(self, tier: GpuTier, ids: int, batch: BatchArgument, stream: int) -> None:
        """Make room for the lists of a batch of `ids` ids, described by a copy of `batch`."""
        self._tier = tier
        self.bound = min(ids, tier.rows)
        self._block = tier.device.borrow(16 * ids + 16, np.uint8, stream)
        start = tier.device.pointer(self._block)
        self._batch = BatchArgument.from_buffer_copy(batch)
        self._batch.count = start
        self._batch.records = start + 16
        self._batch.held = start + 16 + 8 * ids
        self._batch.positions = start + 16 + 12 * ids
        self.arguments = Arguments(tier.memory.argument, self._batch)
        self._rows = self._described(tier.memory.argument)
        self.kept_rows = True
        """Whether some rows may stay in the host tier's memory, not to be promoted meanwhile."""
        self.spill: Any = None
        self.spilled: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._letter: Letter | None = None
        self.trimmed = False
        self._written: list[tuple[int, int]] = []
        self._seen = tier.changes
        self._open = True

    def _described(self, tier: TierArgument) -> Rows:
        """Describe the records to kernels that are not the tier's own."""
        batch = self._batch
        host_changed = tier.host_changed if tier.direct else 0
        return Rows(
            batch.records,
            batch.count,
            batch.positions,
            batch.n,
            batch.held,
            tier.dirty,
            host_changed,
            tier.host,
            tier.record,
        )

    @property
    def positions(self) -> Any:
        """Int32 `(n,)`, for each id the index of its record; -1 for ids outside the table."""
        return self._part(16 + 12 * self._batch.n, 4 * self._batch.n, np.int32)

    @property
    def count(self) -> Any:
        """uint32 `(1,)`, the number of distinct records."""
        return self._part(0, 4, np.uint32)

    def _part(self, start: int, nbytes: int, dtype: npt.DTypeLike) -> Any:
        return self._block[start : start + nbytes].view(dtype)

    @property
    def fresh(self) -> bool:
        """Whether what the lease holds is what the rows are now.

        False where it keeps copies of rows and others wrote to the tier since they were made.
        """
        return not self.spilled.size or self._seen == self._tier.changes

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
        self._copy("lease_gather", out, lo, hi, stream)

    def scatter(
        self, data: Any, lo: int = 0, hi: int | None = None, *, stream: int | None = None
    ) -> None:
        """Copy `data[k]` over bytes `lo:hi` of record k, now changed, for all k below `count`."""
        self._note(lo, self._tier.record_bytes if hi is None else hi)
        self._copy("lease_scatter", data, lo, hi, stream)

    def read(
        self, out: Any, lo: int = 0, hi: int | None = None, *, stream: int | None = None
    ) -> None:
        """Copy to `out[i]` bytes `lo:hi` of the i-th id's record, 0xff where there is none."""
        self._copy("lease_read", out, lo, hi, stream)

    def run(
        self,
        kernel: tuple[Kernel, int],
        work: ctypes.Structure,
        items: int,
        *,
        writes: Sequence[tuple[int, int]] = (),
        positions: tuple[int, int] | None = None,
        stream: int | None = None,
    ) -> None:
        """Launch a kernel of the caller's own, of two arguments: `Rows` and the structure `work`.

        Args:
            kernel: from `Device.load`.
            work: copied by the launch.
            items: how much there is to do: a block works through 32 items or more.
            writes: the byte ranges of the records that it writes; it calls `changed` for each.
            positions: address and number of positions other than those of the lease's ids.
            stream: where to run it.
        """
        rows = self._rows
        rows.positions, rows.n = positions or (self._batch.positions, self._batch.n)
        arguments = (ctypes.c_void_p * 2)(ctypes.addressof(rows), ctypes.addressof(work))
        for lo, hi in writes:
            self._note(lo, hi)
        self._tier.order.run(kernel, ctypes.addressof(arguments), items, stream)

    def trim(self, *, wait: bool, stream: int | None = None) -> bool:
        """Lower `bound` to the number of distinct records if that is known, or wait for it.

        The first call asks the device for the number. Returns whether `bound` is the number now.
        """
        if self.trimmed or not self._batch.n:
            return True
        device = self._tier.device
        stream = device.current_stream() if stream is None else stream
        if self._letter is None:
            self._letter = self._tier.mailbox.post(self._batch.count, stream)
        if self._letter is None:
            if not wait:
                return False
            device.synchronize(stream)
            self.bound = int(device.download(self.count)[0])
        elif wait or self._letter.arrived:
            self.bound = self._letter.read()
        else:
            return False
        self.trimmed = True
        return True

    def _note(self, lo: int, hi: int) -> None:
        """Remember what bytes of the records this lease has written."""
        fresh = self._seen == self._tier.changes
        self._tier.changes += 1
        if fresh:
            self._seen = self._tier.changes
        if (lo, hi) not in self._written:
            self._written.append((lo, hi))

    def _copy(self, kernel: str, data: Any, lo: int, hi: int | None, stream: int | None) -> None:
        if self._batch.n:
            self._tier.describe(self._batch, data, lo, hi)
            self._tier.order.launch(kernel, self.arguments, self._batch.n, stream)

    def release(self, *, stream: int | None = None) -> None:
        """Let the records go, writing copies of changed ones back. Harmless when repeated."""
        if self._open:
            if self._written and self.spilled.size and self in self._tier.leases:
                self._write_spilled(stream)
            self._open = False
            if self._letter is not None and not self.trimmed:
                self._letter.drop()
            self._tier.leases.end(self, stream)

    def _write_spilled(self, stream: int | None) -> None:
        """Write what was changed in the copies of rows without a slot, wherever they are by now.

        Other bytes of the copies may be older than the rows: another lease may have written them.
        """
        device, spilled = self._tier.device, self.spilled
        stream = device.current_stream() if stream is None else stream
        rows = device.borrow(spilled.size, np.int64, stream)
        device.copy(device.pointer(rows), spilled.ctypes.data, spilled.nbytes, stream)
        device.synchronize(stream)
        spill, record = device.pointer(self.spill), self._tier.record_bytes
        for lo, hi in self._written:
            part = device.borrow(spilled.size * (hi - lo), np.uint8, stream)
            target = device.pointer(part)
            device.copy_columns(target, spill + lo, hi - lo, record, spilled.size, stream)
            self._tier.write(rows, part, lo, hi, stream=stream)
