"""The GPU tier's arrays: records, maps, marks, counters, and the scores by which rows stay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._tiers.gpu.abi import (
    COUNTERS,
    COUNTERS_BYTES,
    TIER,
    BatchArgument,
    BatchArguments,
    RowsArgument,
    TierArgument,
)
from tierstore._tiers.gpu.device import Device
from tierstore._tiers.gpu.keys import DeviceKeys
from tierstore._tiers.gpu.launcher import OWN, Launcher
from tierstore._tiers.gpu.link import region_bits
from tierstore._tiers.gpu.places import Places
from tierstore._tiers.host import HostTier
from tierstore.budget import size_of_at_least
from tierstore.errors import CapacityError, NotPrefetchedError, RowIndexError
from tierstore.policy.base import DeviceScores
from tierstore.stats import TierStats, tally

_FOREIGN = -(1 << 62)
"""FOREIGN of tier.cuh."""
_BAD_ID = -(0x2D9A << 48)
"""From here down: ids that are bad for a feature, with its number, as features.cu codes them."""
_ID_BITS = 44
_LOST = TIER.constants["LOST"]
MOST_FEATURES = 1 << 14
"""Most features that bad ids can name."""


_TOTALS = (
    "missed_ids",
    "missed_rows",
    "evicted_rows",
    "written_rows",
    "leased_rows",
    "leased_misses",
)


class Counts:
    """The counters of a tier: those that the host keeps, and those that the device keeps.

    Attributes:
        known: counts of the host, and counts taken over from the device.
    """

    def __init__(self, memory: GpuMemory, *, writable: bool = True) -> None:
        """Start at zero; a bad id in a tier that is only read is reported once."""
        self.known = TierStats()
        self._memory = memory
        self._writable = writable
        self._bad: tuple[int, int, int] | None = None

    def read(self, ids: int, nbytes: int) -> None:
        """Count a read of `nbytes` for each of its ids."""
        self.known.requested += ids
        self.known.bytes_out += ids * nbytes

    def wrote(self, ids: int, nbytes: int) -> None:
        """Count a write of `nbytes` for each of its ids."""
        self.known.requested += ids
        self.known.written += ids
        self.known.bytes_in += ids * nbytes

    def leased(self, ids: int) -> None:
        """Count a lease."""
        self.known.requested += ids
        self.known.unique_of += ids

    def take(self, stream: int) -> None:
        """Wait for the counts of the device, and take them over."""
        counts = self._memory.counters(stream)
        record = int(self._memory.argument.record)
        tally(
            self.known,
            hits=-int(counts["missed_ids"]),
            evictions=int(counts["evicted_rows"]),
            write_backs=int(counts["written_rows"]),
            bytes_promoted=int(counts["missed_rows"]) * record,
            bytes_written_back=int(counts["written_rows"]) * record,
            unique=int(counts["leased_rows"]),
            unique_hits=int(counts["leased_rows"]) - int(counts["leased_misses"]),
        )
        self._memory.clear(_TOTALS, stream)

    def stats(self, stream: int) -> TierStats:
        """Wait, and return the counters since the tier was made.

        Distinct ids are counted for leases only: reads and writes do not distinguish them.
        """
        self.take(stream)
        stats = TierStats(**vars(self.known))
        stats.hits += stats.requested
        return stats

    def check(
        self,
        stream: int,
        tables: Sequence[tuple[str, range]],
        features: Iterable[tuple[str, str, int]] = (),
    ) -> None:
        """Wait; raise RowIndexError if any id since the last `forgive` was outside its table.

        A tier that is only read cannot commit bad data, and forgives at once. `tables` are those of
        the space, by name, and their rows in it; `features` each with its table and the number of
        its rows, by its number.
        """
        if self._bad is None:
            counts = self._memory.counters(stream)
            self._check_replays(counts, stream, tables)
            if counts["bad"]:
                found = [int(counts[name]) for name in ("bad_start", "bad_row", "bad_position")]
                self._bad = found[0], found[1], found[2]
        if self._bad is not None:
            start, row, position = self._bad
            rest = "there and wrote nothing. Nothing can be committed until rollback()"
            if not self._writable:
                rest = "there"
                self._memory.clear(("bad", "bad_position"), stream)
                self.forgive()
            known, (number, code) = list(features), divmod(_BAD_ID - row, 1 << _ID_BITS)
            if 0 <= number < len(known):
                feature, table, count = known[number]
                raise RowIndexError(
                    f"id {code - (1 << (_ID_BITS - 1))} of feature {feature!r}, at position "
                    f"{position} of the ids of all features, is outside table {table!r}, which has "
                    f"rows 0 to {count - 1}; it read NaN {rest}"
                )
            if 0 <= _FOREIGN - row < int(self._memory.argument.rows):
                row = _FOREIGN - row
            table, rows = next(each for each in tables if each[1].start == start)
            raise RowIndexError(
                f"row {row} at position {position} of a batch is outside table {table!r}, which "
                f"has rows 0 to {len(rows) - 1}; that batch read NaN {rest}"
            )

    def _check_replays(
        self, counts: npt.NDArray[Any], stream: int, tables: Sequence[tuple[str, range]]
    ) -> None:
        """Raise, once, the error of a failed read by a replayed CUDA graph since the last call."""
        fault = int(counts["fault"])
        if not fault:
            return
        self._memory.clear(("fault",), stream)
        names = ("fault_id", "fault_start", "fault_position")
        row, start, position = (int(counts[name]) for name in names)
        table, rows = next(each for each in tables if each[1].start == start)
        if fault == _LOST:
            raise NotPrefetchedError(
                f"row {row} of table {table!r}, at position {position} of a read that a CUDA graph "
                "replayed, was neither on the GPU nor in host memory, and read NaN: call "
                "prefetch(ids) before the replay, with at most half as many rows as the host tier "
                "holds, or give the host tier room for every row"
            )
        raise RowIndexError(
            f"row {row} at position {position} of a read, such as one that a CUDA graph replayed, "
            f"is outside table {table!r}, which has rows 0 to {len(rows) - 1}; it read NaN"
        )

    def forgive(self) -> None:
        """Forget the bad id."""
        self._bad = None


_DIRECT_BYTES = 64 << 20
"""Most bytes that an array over all rows may take in any tier, however small."""
_DIRECT_SHARE = 9
"""In a larger tier it may take one part for so many parts of slots, a tenth of both."""
_PER_SLOT: tuple[tuple[str, str], ...] = (
    ("row_of", "i8"),
    ("stamp", "u4"),
    ("pins", "u4"),
    ("arrival", "u4"),
    ("mark", "u4"),
    ("dirty", "u1"),
)


class GpuMemory:
    """Slots, the map of rows, marks by slot and the counters; plain device arrays.

    `scored`: whether rows have scores, a float a row and one a slot.

    Attributes:
        places: the map, where an entry for each row would take more than a tenth of the tier, and
            more than 64 MiB; None where it is an array over all rows. Rows with scores have that.
    """

    def __init__(
        self, device: Device, rows: int, record_bytes: int, slots: int, *, scored: bool = False
    ) -> None:
        """Reserve everything; `bytes_for` returns how much that is."""
        self._nbytes = self.bytes_for(rows, record_bytes, slots, scored=scored)
        self._device = device
        sparse = self._is_sparse(rows, record_bytes, slots, scored=scored)
        self.places: Places | None = Places(device, slots) if sparse else None
        self._mailbox = device.stage(COUNTERS.itemsize)
        self._described: Any = None
        self._arrays = {name: device.allocate(slots, dtype) for name, dtype in _PER_SLOT}
        self._arrays["slots"] = device.allocate(slots * record_bytes, "u1")
        if self.places is None:
            self._arrays["slot_of"] = device.allocate(rows, "i4")
        self._arrays["host_changed"] = device.allocate(-(-rows // 32), "u4")
        self._arrays["poison"] = device.allocate(record_bytes, "u1")
        if scored:
            self._arrays["score"] = device.allocate(rows, "f4")
            self._arrays["key"] = device.allocate(slots, "f4")
        self._arrays["counters"] = device.allocate(COUNTERS_BYTES, "u1")
        self.argument: Any = TierArgument(
            rows=rows,
            record=record_bytes,
            capacity=slots,
            region_bits=region_bits(rows),
            **{name: device.pointer(array) for name, array in self._arrays.items()},
        )
        if self.places is not None:
            self.argument.places = self.places.address
        device.fill(self.argument.poison, 0xFF, record_bytes, 0)
        self.reset(0)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return self._nbytes + (0 if self.places is None else self.places.grown_bytes)

    @staticmethod
    def _slot_bytes(record_bytes: int, *, keyed: bool = False) -> int:
        per_slot = record_bytes + sum(np.dtype(dtype).itemsize for _, dtype in _PER_SLOT)
        return per_slot + (DeviceKeys.BYTES if keyed else 0)

    @classmethod
    def _is_sparse(cls, rows: int, record_bytes: int, slots: int, *, scored: bool) -> bool:
        """Whether a map of places takes the place of an array over all rows."""
        most = slots * cls._slot_bytes(record_bytes) // _DIRECT_SHARE
        return not scored and 4 * rows > max(most, _DIRECT_BYTES)

    def reach(self, host: HostTier) -> None:
        """Tell the kernels where the host tier's records, map and marks are."""
        self._described = None
        view = host.view()
        self.argument.direct = host.direct
        views = {"host": view.records, "host_dirty": view.dirty, "host_slot_of": view.slot_of}
        for name, array in views.items():
            if array is not None:
                setattr(self.argument, name, self._device.host_pointer(host.arena, array))

    def described(self) -> Any:
        """Return the members for every lease, for kernels that are not the tier's own."""
        if self._described is None:
            tier = self.argument
            host_changed = tier.host_changed if tier.direct else 0
            self._described = RowsArgument(
                dirty=tier.dirty, host_changed=host_changed, host=tier.host, record=tier.record
            )
        return RowsArgument.from_buffer_copy(self._described)

    @classmethod
    def bytes_for(
        cls,
        rows: int,
        record_bytes: int,
        slots: int,
        *,
        scored: bool = False,
        keyed: bool = False,
    ) -> int:
        """Device bytes of a tier of that many slots; batches take `Workspace.BYTES` an id more.

        `keyed`: with a map of the keys of as many rows.
        """
        per_slot = cls._slot_bytes(record_bytes, keyed=keyed)
        sparse = cls._is_sparse(rows, record_bytes, slots, scored=scored)
        rows_map = slots * Places.BYTES if sparse else 4 * rows
        scores = 4 * (rows + slots) if scored else 0
        marks = 4 * -(-rows // 32)
        return slots * per_slot + rows_map + marks + scores + record_bytes + COUNTERS_BYTES

    @classmethod
    def slots_for(
        cls,
        rows: int,
        record_bytes: int,
        nbytes: int,
        *,
        scored: bool = False,
        keyed: bool = False,
    ) -> int:
        """Return the most slots that fit a budget, maps included; 0 for a budget of 0.

        Raises CapacityError if a budget above 0 has no room for a single slot and the maps.
        """
        if nbytes == 0:
            return 0

        def takes(slots: int) -> int:
            return cls.bytes_for(rows, record_bytes, slots, scored=scored, keyed=keyed)

        if nbytes < takes(1):
            raise CapacityError(
                f"a GPU budget of {nbytes} bytes cannot hold the map of {rows} rows and one "
                f"record, which take {size_of_at_least(takes(1))}; give more, or 0 for no GPU tier"
            )
        per_slot = cls._slot_bytes(record_bytes, keyed=keyed) + (4 if scored else 0)
        rest = nbytes - 4 * -(-rows // 32) - (4 * rows if scored else 0) - record_bytes
        rest -= COUNTERS_BYTES
        direct = min(rows, (rest - 4 * rows) // per_slot)
        if direct > 0 and not cls._is_sparse(rows, record_bytes, direct, scored=scored):
            return direct
        # With more slots than these the map would be an array over all rows, which does not fit.
        most = (4 * rows * _DIRECT_SHARE - 1) // cls._slot_bytes(record_bytes)
        return min(rows, most, rest // (per_slot + Places.BYTES))

    def reset(self, stream: int) -> None:
        """Empty every slot, and clear the counters, with those of a batch or a bad id; waits."""
        self._fill("row_of", 0xFF, stream)
        if self.places is None:
            self._fill("slot_of", 0xFF, stream)
        else:
            self.places.clear(stream)
        for name in ("stamp", "pins", "arrival", "mark", "dirty", "host_changed", "counters"):
            self._fill(name, 0, stream)
        self._device.fill(self.argument.counters, 0xFF, COUNTERS["bad_position"].itemsize, stream)
        self._device.synchronize(stream)

    def _fill(self, name: str, value: int, stream: int) -> None:
        array = self._arrays[name]
        self._device.fill(getattr(self.argument, name), value, array.nbytes, stream)

    def score(self, scores: npt.NDArray[np.float32]) -> None:
        """Set the score of every row, `(rows,)`; waits."""
        given = np.ascontiguousarray(scores)
        self._device.copy(self.argument.score, given.ctypes.data, given.nbytes, 0)
        self._device.synchronize(0)

    def counters(self, stream: int) -> npt.NDArray[Any]:
        """Wait for the stream and return the counters, a zero-dimensional record of `COUNTERS`."""
        mailbox = self._mailbox.array
        self._device.copy(
            self._device.host_pointer(self._mailbox, mailbox),
            self.argument.counters,
            COUNTERS.itemsize,
            stream,
        )
        self._device.synchronize(stream)
        return mailbox[: COUNTERS.itemsize].view(COUNTERS)[0].copy()  # type: ignore[no-any-return]

    def counter(self, name: str) -> int:
        """Return the address of a counter."""
        fields: Mapping[str, Any] = COUNTERS.fields or {}
        return int(self.argument.counters) + int(fields[name][1])

    def clear(self, names: tuple[str, ...], stream: int) -> None:
        """Set counters to zero, or `bad_position` to none, in the order of the stream."""
        fields: Mapping[str, Any] = COUNTERS.fields or {}
        for name in names:
            value = 0xFF if name == "bad_position" else 0
            self._device.fill(self.counter(name), value, fields[name][0].itemsize, stream)

    def close(self) -> None:
        """Free the memory."""
        self._arrays.clear()
        self._mailbox.close()
        if self.places is not None:
            self.places.close()


class Workspace:
    """Lists that a batch keeps for its misses, with room for `size` ids."""

    _LISTS = (
        ("ids", "i8"),
        ("deferred", "u4"),
        ("missed", "i8"),
        ("place", "i4"),
        ("contest", "u4"),
    )
    _PREFETCH_LISTS = (
        ("ids", "i8"),
        ("missed", "i8"),
        ("place", "i4"),
        ("leaving", "i8"),
        ("held", "i4"),
    )
    BYTES = 28

    def __init__(self, device: Device, size: int, *, prefetch: bool = False) -> None:
        """Reserve the lists; those of a prefetch stay in use until its copies are over."""
        self.size = size
        lists = self._PREFETCH_LISTS if prefetch else self._LISTS
        self._arrays = {name: device.allocate(size, dtype) for name, dtype in lists}
        if prefetch:
            self._arrays["count"] = device.allocate(2, "u4")
        self._pointers = {name: device.pointer(array) for name, array in self._arrays.items()}
        if not prefetch:
            # No batch needs both.
            self._pointers["entry"] = self._pointers["contest"]

    @classmethod
    def for_ids(cls, device: Device, ids: int, *, prefetch: bool = False) -> Workspace:
        """Reserve lists for a batch of `ids` ids, and for batches up to twice as large."""
        return cls(device, max(1024, 1 << (ids - 1).bit_length()), prefetch=prefetch)

    def bind(self, batch: BatchArgument) -> None:
        """Point the batch to these lists, `ids` among them for those that come from the host."""
        for name, pointer in self._pointers.items():
            setattr(batch, name, pointer)

    @property
    def ids(self) -> int:
        """Address of the list of ids."""
        return self._pointers["ids"]


class Scores:
    """The scores of a GPU tier, driven by its policy: two numbers a batch.

    The device keeps a float a row. A batch adds `on_use` to each row that it uses, and sets the
    score of a row that takes a slot to `on_arrival`, if that is not 0; rows with the lowest score
    go first.
    """

    def __init__(self, scores: DeviceScores, memory: GpuMemory, launcher: Launcher) -> None:
        """Bring the first scores to the device; raises InvalidInputError for unfit counts."""
        self._scores = scores
        self._memory = memory
        self._launcher = launcher
        self._on_arrival = 0.0
        first = scores.first(memory.argument.rows)
        if first is not None:
            memory.score(first)

    def begin(self, ids: int, batch: BatchArgument, *, uses: bool) -> None:
        """Set the changes to scores by `batch`, of so many ids.

        A prefetch does not use its rows: they arrive as those of the last batch did.
        """
        if not uses:
            batch.on_use, batch.on_arrival = 0.0, self._on_arrival
            return
        tier = self._memory.argument
        step = self._scores.step(ids, tier.capacity)
        if step.rescale != 1:
            arguments = BatchArguments(tier, BatchArgument(rescale=step.rescale))
            self._launcher.launch(OWN.RESCALE, arguments, tier.rows, self._launcher.stream)
        batch.on_use = step.on_use
        batch.on_arrival = self._on_arrival = step.on_arrival
