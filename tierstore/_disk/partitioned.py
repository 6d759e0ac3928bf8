"""The lowest tier of a partitioned table, and its generations."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tierstore._disk.delta import Delta, Get
from tierstore._disk.generation import Generation
from tierstore._disk.keys import Keys
from tierstore._disk.manifest import KeysInfo, TableInfo
from tierstore._disk.records import BLOCK_BYTES
from tierstore._disk.tier import DiskTier
from tierstore._rowcopy import call_at, copy
from tierstore.spec import TableSpec
from tierstore.stats import TierStats

Rows = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class Laid(Protocol):
    """Where rows are, each in one of some partitions; see `Shard`."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def locate(self, rows: Any) -> tuple[Any, Any]:
        """Return for each row its partition, counted from the first, and row there."""

    def rows_in(self, partition: int, rows: Any) -> Any:
        """Return the rows that are rows of a partition, counted from the first."""


class _Live:
    """Records written to any partition since the last commit."""

    def __init__(self, ids: Rows) -> None:
        self.ids = ids


class PartitionedTier:
    """Records of a shard by row, each in the disk tier of its partition.

    Threads may read, write, stream and stage beside each other, as they may in a disk tier.
    """

    def __init__(self, shard: Laid, tiers: Sequence[DiskTier]) -> None:
        """Combine the tiers of the partitions of a shard, in order."""
        self.rows: int = len(shard)
        self.record_bytes: int = tiers[0].record_bytes
        self.shard = shard
        self.tiers: tuple[DiskTier, ...] = tuple(tiers)

    @property
    def stats(self) -> TierStats:
        """The counters of all partitions together."""
        total = TierStats()
        for tier in self.tiers:
            for name, value in vars(tier.stats).items():
                setattr(total, name, getattr(total, name) + value)
        return total

    @property
    def queue_bytes(self) -> int:
        """Bytes of records that may wait in memory to be written, of all partitions."""
        return sum(tier.queue_bytes for tier in self.tiers)

    @queue_bytes.setter
    def queue_bytes(self, nbytes: int) -> None:
        for tier in self.tiers:
            tier.queue_bytes = nbytes // len(self.tiers)

    @property
    def deltas(self) -> list[Delta]:
        """The committed deltas of all partitions."""
        return [delta for tier in self.tiers for delta in tier.deltas]

    @property
    def index_bytes(self) -> int:
        """The memory that the indexes take."""
        return sum(tier.index_bytes for tier in self.tiers)

    @property
    def live(self) -> _Live | None:
        """Records written since the last commit."""
        found = [
            self.shard.rows_in(number, tier.live.ids)
            for number, tier in enumerate(self.tiers)
            if tier.live is not None
        ]
        return _Live(np.concatenate(found)) if found else None

    def _routed(self, rows: Rows) -> Iterator[tuple[DiskTier, npt.NDArray[np.intp], Rows]]:
        """Yield each tier that has some of `rows`, which of them, and their rows there.

        Where `rows` ascend, those of each tier do.
        """
        partitions, local = self.shard.locate(rows)
        order = np.argsort(partitions, kind="stable")
        edges = np.searchsorted(partitions[order], np.arange(len(self.tiers) + 1))
        for number in np.flatnonzero(np.diff(edges)).tolist():
            which = order[edges[number] : edges[number + 1]]
            yield self.tiers[number], which, local[which]

    def read(self, rows: Rows, out: Bytes) -> None:
        """Copy the records of `rows` `(n,)`, ascending, into `out` `(n, record_bytes)`."""
        for tier, which, own in self._routed(rows):
            records = np.empty((own.size, self.record_bytes), np.uint8)
            tier.read(own, records)
            out[which] = records

    def stream(self, rows: Rows) -> Generator[tuple[slice, Bytes]]:
        """Yield the records of `rows`, ascending, part by part."""
        step = max(1, 4 * BLOCK_BYTES // self.record_bytes)
        for at in range(0, rows.size, step):
            part = slice(at, min(at + step, rows.size))
            records = np.empty((part.stop - at, self.record_bytes), np.uint8)
            self.read(rows[part], records)
            yield part, records

    def write(self, rows: Rows, records: Bytes, *, resident: bool = False) -> None:
        """Write `records` `(n, record_bytes)` over those of `rows` `(n,)`, distinct."""
        self.collect(rows, partial(copy, np.ascontiguousarray(records)), resident=resident)

    def collect(self, rows: Rows, get: Get, *, resident: bool = False) -> None:
        """Write the records that `get` copies over those of `rows` `(n,)`, distinct."""
        for tier, which, own in self._routed(rows):
            tier.collect(own, partial(call_at, get, which), resident=resident)

    def stage(self, rows: Rows) -> Callable[[], None]:
        """Return a function that prefetches `rows`; it may block, so call it without a lock."""
        advice = [tier.stage(own) for tier, _, own in self._routed(rows)]

        def prefetch() -> None:
            for call in filter(None, advice):
                call()

        return prefetch

    def let_go(self, rows: Rows) -> None:
        """Drop the mapped pages of `rows` from memory, which a scan has passed."""
        for tier, _, own in self._routed(rows):
            tier.let_go(own)

    def flush(self) -> None:
        """Do nothing: what was written is in a live delta already."""

    def discard(self) -> Rows:
        """Drop the records written since the last commit; return their rows."""
        gone = [
            self.shard.rows_in(number, tier.discard()) for number, tier in enumerate(self.tiers)
        ]
        return np.sort(np.concatenate(gone))


class PartitionedGeneration:
    """The generations of a partitioned table, presented as one."""

    examined = True
    """Whether their bases were examined."""

    def __init__(
        self,
        info: TableInfo,
        shard: Laid,
        parts: Sequence[Generation],
        keys: Callable[[], Keys | None] = lambda: None,
    ) -> None:
        """Combine the generations of the partitions of a shard.

        `info` is what the root's manifest says of the table, with the rows of the shard. `keys`
        returns the external keys of the whole table, of which the shard may be a part.
        """
        self.keys_of_whole: Callable[[], Keys | None] = keys
        self.info = info
        self.parts: tuple[Generation, ...] = tuple(parts)
        self.tier: PartitionedTier = PartitionedTier(shard, [part.tier for part in parts])

    @property
    def spec(self) -> TableSpec:
        """The spec of the table, with the rows of the shard."""
        return self.info.spec

    def is_of(self, info: TableInfo) -> bool:
        """Return False: another version may have other deltas in any partition."""
        return False

    def is_over(self, other: object) -> bool:
        """Whether it uses the same open files as another."""
        return isinstance(other, PartitionedGeneration) and self.tier.tiers == other.tier.tiers

    @property
    def bases(self) -> tuple[str, ...]:
        """The names that identify the bases of all partitions."""
        return tuple(name for part in self.parts for name in part.bases)

    def delta_rows(self) -> dict[str, Rows]:
        """Return the rows of each committed delta, by its partition and name."""
        shard = self.tier.shard
        return {
            f"{number}/{name}": shard.rows_in(number, rows)
            for number, part in enumerate(self.parts)
            for name, rows in part.delta_rows().items()
        }

    def keys(self, info: KeysInfo | None) -> Keys | None:
        """Return the external keys of the rows, if any, of a shard that is the whole table."""
        keys = self.keys_of_whole()
        return keys if keys is not None and len(keys) == self.info.spec.rows else None

    @property
    def disk_bytes(self) -> int:
        """Bytes of the bases and their checksums."""
        return sum(part.disk_bytes for part in self.parts)

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the files of all partitions take on the disk."""
        return sum(part.allocated_bytes for part in self.parts)

    @property
    def base_path(self) -> str:
        """Empty: each partition has a base of its own."""
        return ""

    def close(self) -> None:
        """Close every file."""
        for part in self.parts:
            part.close()
