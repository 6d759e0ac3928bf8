"""A partitioned table by key: the hash of a key determines its partition.

Its rows are numbered in one order over all partitions of a shard, so that whatever goes by row
number is as in a table of one process: first those of the version that was opened, partition by
partition, then others as they come. In a partition rows are dense too, in an order of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tierstore._disk.generation import Generation
from tierstore._disk.manifest import TableInfo
from tierstore._disk.partitioned import PartitionedGeneration, PartitionedTier
from tierstore._disk.partitioning import partition_of_key
from tierstore._disk.tier import DiskTier
from tierstore._keys.growing import KeyMap, StoredKeys, key_map
from tierstore.errors import CorruptStoreError
from tierstore.spec import EXTENT_ROWS, TableSpec

Rows = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

_BLOCK_ROWS = 1 << 14


class PartitionWriter(Protocol):
    """The writer of a table of a partition."""

    def grow(self, rows: int) -> None:
        """Grow to at least so many rows."""

    def touch(self) -> None:
        """Make the next commit include the keys."""


class _PartitionRows:
    """The partition of each row of a shard, counted from its first, and the row there.

    They follow the keys of the shard: a new one gets a place in its partition.

    Attributes:
        partitions: of the whole table.
        first: the first partition of the shard.
        writers: of the partitions, none of a reader.
        counts: the rows of each partition, `(count,)`.
        capacity: rows that the shard can have; those without a key are nowhere.
    """

    def __init__(
        self, partitions: int, first: int, count: int, writers: Sequence[PartitionWriter]
    ) -> None:
        self.partitions = partitions
        self.first = first
        self.writers = writers
        self.counts = np.zeros(count, np.int64)
        self.capacity = EXTENT_ROWS
        self._of = np.empty((2, 0), np.int64)
        self._rows = 0
        self.seal()

    def __len__(self) -> int:
        return self.capacity

    def partitions_of(self, codes: npt.NDArray[np.uint64]) -> Rows:
        """Return the partition of each key, counted from the first of the shard."""
        partitions: Rows = partition_of_key(codes, self.partitions) - self.first
        return partitions

    def added(self, keys: KeyMap, start: int) -> None:
        """Give keys that came, of rows from `start` on, places in their partitions, which grow."""
        partitions = self.partitions_of(keys.codes_of(np.arange(start, len(keys))))
        self.append(partitions)
        for number in np.unique(partitions).tolist():
            self.writers[number].grow(int(self.counts[number]))

    def append(self, partitions: Rows) -> None:
        """Append a row to each of these partitions, for the next rows of the shard."""
        order = np.argsort(partitions, kind="stable")
        counts = np.bincount(partitions, minlength=self.counts.size)
        starts = np.cumsum(counts) - counts
        local = np.empty_like(partitions)
        local[order] = np.arange(order.size) - starts.repeat(counts) + self.counts.repeat(counts)
        end = self._rows + partitions.size
        if end > self._of.shape[1]:
            grown = np.empty((2, end + end // 8), np.int64)
            grown[:, : self._rows] = self._of[:, : self._rows]
            self._of = grown
        self._of[:, self._rows : end] = partitions, local
        self._rows = end
        self.counts += counts

    def truncate(self, rows: int) -> None:
        """Keep only the first rows, which are the first in their partitions."""
        self.counts -= np.bincount(self._of[0, rows : self._rows], minlength=self.counts.size)
        self._rows = rows

    def seal(self) -> None:
        """Record that all rows are committed: later rows come after them in every partition."""
        self._sealed, self._sealed_counts = self._rows, self.counts.copy()

    def locate(self, rows: Rows) -> tuple[Rows, Rows]:
        """Return the partition of each row that has a key, and its row there."""
        known = rows < self._rows
        found = np.zeros((2, rows.size), np.int64)
        found[0, ~known] = self.counts.size
        found[:, known] = self._of[:, rows[known]]
        return found[0], found[1]

    def rows_in(self, partition: int, rows: Any) -> Rows:
        """Return the rows in the shard of those rows of a partition that have a key."""
        known = np.asarray(rows, np.int64)
        inside: Rows = self.all_in(partition)[known[known < self.counts[partition]]]
        return inside

    def all_in(self, partition: int, start: int = 0) -> Rows:
        """Return the rows in the shard of those of a partition from `start` on, in its order."""
        first = self._sealed if start >= self._sealed_counts[partition] else 0
        rows = np.flatnonzero(self._of[0, first : self._rows] == partition) + first
        local = self._of[1, rows]
        order = np.argsort(local, kind="stable")
        ordered: Rows = rows[order[np.searchsorted(local[order], start) :]]
        return ordered

    def keep(self, rows: Rows) -> list[tuple[Rows, Rows]]:
        """Keep only these rows, renumbered in this order.

        Returns for each partition which of its rows are to be moved, and where each goes: the last
        ones close the gaps of those that are gone.
        """
        kept = self._of[:, rows]
        counts = np.bincount(kept[0], minlength=self.counts.size)
        moves = []
        for number, count in enumerate(counts.tolist()):
            here = np.flatnonzero(kept[0] == number)
            local = kept[1, here]
            late = local >= count
            gaps = np.setdiff1d(np.arange(count), local[~late])
            moves.append((local[late], gaps))
            kept[1, here[late]] = gaps
        self._of, self._rows, self.counts = kept, rows.size, counts
        self._sealed = 0
        self._sealed_counts = np.zeros_like(counts)
        return moves


class _KeysOfPartition(StoredKeys):
    """The keys of one partition, for the generation that makes them durable."""

    def __init__(
        self, whole: KeyMap, places: _PartitionRows, number: int, generation: Generation
    ) -> None:
        self.lock = whole.lock
        self._whole = whole
        self._places = places
        self._number = number
        self._generation = generation

    def __len__(self) -> int:
        return int(self._places.counts[self._number])

    def check_whole(self) -> None:
        self._whole.check_whole()

    def truncate(self, rows: int) -> None:
        """Do nothing: the shard goes back as a whole."""

    def keys_of(self, rows: Rows) -> npt.NDArray[Any]:
        return self._whole.keys_of(self._places.all_in(self._number)[rows])

    def codes_of(self, rows: Rows) -> npt.NDArray[np.uint64]:
        return self._whole.codes_of(self._places.all_in(self._number)[rows])

    def parts(self, start: int) -> dict[str, Bytes]:
        stored = None if start == 0 else self._generation.info.keys
        sizes = {} if stored is None else stored.files
        behind = [size for name, (size, _) in sizes.items() if name.endswith(".utf8")]
        return self._whole.parts_of(self._places.all_in(self._number, start), sum(behind))


class _KeyedTier(PartitionedTier):
    """Records of a shard by row; those of rows without a key are zeros."""

    def __init__(
        self, places: _PartitionRows, tiers: Sequence[DiskTier], load: Callable[[], object]
    ) -> None:
        super().__init__(places, tiers)
        self._places = places
        self._load = load

    def grow(self, rows: int) -> None:
        """Reserve room for more rows; partitions grow as they get keys."""
        self._places.capacity = self.rows = rows

    def read(self, rows: Rows, out: Bytes) -> None:
        """Copy records as `PartitionedTier.read` does."""
        out[...] = 0
        super().read(rows, out)

    def _routed(self, rows: Rows) -> Iterator[tuple[DiskTier, npt.NDArray[np.intp], Rows]]:
        """Yield each tier with its rows, ascending; rows without a key are in none."""
        self._load()
        partitions, local = self.shard.locate(rows)
        order = np.lexsort((local, partitions))
        edges = np.searchsorted(partitions[order], np.arange(len(self.tiers) + 1))
        for number in np.flatnonzero(np.diff(edges)).tolist():
            which = order[edges[number] : edges[number + 1]]
            yield self.tiers[number], which, local[which]


class KeyedPartitionedGeneration(PartitionedGeneration):
    """The generations of a partitioned table by key, presented as one."""

    moves_rows = False
    """A row stays in its partition, whatever its number."""
    tier: _KeyedTier

    def __init__(
        self,
        info: TableInfo,
        partitions: int,
        first: int,
        parts: Sequence[Generation],
        writers: Sequence[PartitionWriter] = (),
    ) -> None:
        """Combine the generations of the partitions of a shard, from `first` on.

        `writers` are those of the partitions, none of a reader.
        """
        self._places = _PartitionRows(partitions, first, len(parts), tuple(writers))
        rows = sum(part.key_count for part in parts)
        self._places.capacity = max(1, -(-rows // EXTENT_ROWS)) * EXTENT_ROWS
        self._map: KeyMap | None = None
        self._map_lock = threading.RLock()
        self._has_moved_keys = False
        self._grown: TableSpec | None = None
        super().__init__(info, self._places, parts)
        tiers = [part.tier for part in parts]
        self.tier = _KeyedTier(self._places, tiers, lambda: self.key_map)

    @property
    def spec(self) -> TableSpec:
        """The spec of the table, with the rows that the shard has room for."""
        if self._grown is None or self._grown.rows != self.tier.rows:
            self._grown = self.info.spec.with_rows(self.tier.rows)
        return self._grown

    # -- keys

    @property
    def key_map(self) -> KeyMap:
        """The keys of the shard, loaded from its partitions on first use."""
        loaded = self._map
        if loaded is None:
            with self._map_lock:
                loaded = self._map
                if loaded is None:  # no other thread was faster
                    loaded = self._map = self._loaded()
        return loaded

    def _loaded(self) -> KeyMap:
        places = self._places
        places.truncate(0)
        loaded = key_map(self.info.spec.keys or "int64")
        for number, part in enumerate(self.parts):
            self._take(loaded, number, part)
        places.seal()
        loaded.follower = places
        for number, part in enumerate(self.parts if places.writers else ()):
            part.share_keys(_KeysOfPartition(loaded, places, number, part))
        return loaded

    def _take(self, keys: KeyMap, number: int, part: Generation) -> None:
        """Take the keys of the next partition. Raises CorruptStoreError."""
        start = len(keys)
        keys.extend(part.stored_keys.parts(0))
        partitions = self._places.partitions_of(keys.codes_of(np.arange(start, len(keys))))
        if (partitions != number).any():
            raise CorruptStoreError(
                f"{part.directory.path} has keys of other partitions; restore all partitions from "
                "one copy"
            )
        self._places.append(partitions)

    @property
    def keys_in_use(self) -> int:
        """The number of keys of the shard, which are loaded for that."""
        return len(self.key_map)

    def fill_ahead(self) -> None:
        """Do nothing: the keys are loaded on first use."""

    @property
    def key_count(self) -> int:
        """The number of keys of the shard in the open version."""
        return sum(part.key_count for part in self.parts)

    @property
    def has_moved_keys(self) -> bool:
        """Whether keys were removed since the last commit."""
        return self._has_moved_keys

    @property
    def removed_keys(self) -> int:
        """The number of keys removed since the open version."""
        if self._map is None or not self._has_moved_keys:
            return 0
        return max(0, self.key_count - len(self._map))

    def keep_keys(self, rows: Rows) -> None:
        """Keep only the keys of these rows, in this order, after `note_moved_keys`.

        Nothing of the table may be in memory. Within each partition the last rows take the places
        of those that are gone, and the places of the last ones become zeros.
        """
        before = self._places.counts.tolist()
        self.key_map.keep(rows)
        for number, (moved, to) in enumerate(self._places.keep(rows)):
            part = self.parts[number]
            for start in range(0, moved.size, _BLOCK_ROWS):
                block, at = (each[start : start + _BLOCK_ROWS] for each in (moved, to))
                records = np.empty((block.size, self.tier.record_bytes), np.uint8)
                order = np.argsort(block)
                part.tier.read(block[order], records)
                part.tier.write(at[order], records)
            left = int(self._places.counts[number])
            for start in range(left, before[number], _BLOCK_ROWS):
                freed = np.arange(start, min(start + _BLOCK_ROWS, before[number]))
                part.tier.write(freed, np.zeros((freed.size, self.tier.record_bytes), np.uint8))

    def note_moved_keys(self) -> None:
        """Note that keys have new rows, in every partition, or a rollback would load only some."""
        self._has_moved_keys = True
        for part, writer in zip(self.parts, self._places.writers, strict=True):
            writer.touch()
            part.note_moved_keys()

    def keys_committed(self) -> None:
        """Record that the open version has the current keys."""
        self._has_moved_keys = False
        self._places.seal()

    def drop_new_keys(self) -> None:
        """Restore the keys of the last commit, after the partitions have done so."""
        if self._has_moved_keys:
            self._map, self._has_moved_keys = None, False
        elif self._map is not None:
            self._map.truncate(self.key_count)

    def rows_in(self, partition: int, rows: Rows) -> Rows:
        """Return the rows of the shard for rows of a partition."""
        if not self.key_map:
            return rows[:0]
        return self._places.rows_in(partition, rows)
