"""The partitions of one rank, of which it is the only writer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, cast

from tierstore._disk.keys import Keys
from tierstore._disk.manifest import Manifest, Partitions, TableInfo, Written
from tierstore._disk.partitioned import PartitionedGeneration
from tierstore._disk.partitioned_keys import KeyedPartitionedGeneration
from tierstore._disk.partitioning import PARTITIONS, Shard, partition_name
from tierstore._progress import Overall, Progress
from tierstore._store.options import Options
from tierstore._store.partitions import check_part, missing_partition, tell_renumbered
from tierstore._store.store import Store
from tierstore.budget import Budget
from tierstore.errors import NotAStoreError, VersionError
from tierstore.spec import EXTENT_ROWS

T = TypeVar("T")
R = TypeVar("R")

_NOTHING = Budget(host=0, gpu=0)
"""The budget of a partition, which has no tiers of its own."""

_THREADS = 8
"""Partitions that sync their files at a time."""


class Parts:
    """The partitions of one rank; an open root names the version of each.

    Attributes:
        stores: the partitions, in order.
    """

    def __init__(self, options: Options) -> None:
        """Open nothing yet."""
        self.stores: list[Store] = []
        self._path = cast(Path, options.path)
        self._options = options
        self._share = Shard(1, 1, 0, 1)
        self._confirmed: dict[int, tuple[set[tuple[int, str]], int]] = {}
        """By partition what roots named when it last removed versions, and its manifest then."""

    def open(self, root: Manifest, rank: int, ranks: int) -> None:
        """Open those of a rank at the version of the root, whatever newer ones there are."""
        self._share = Shard.of_rank(1, len(root.partitions), rank, ranks)
        first, end = self._share.first, self._share.first + self._share.count
        calls = _side_by_side(lambda number: self._open(root, number), range(first, end))
        self.stores = [call.result() for call in calls if call.exception() is None]
        for call in calls:
            call.result()
        tell_renumbered(
            str(self._path), root, {number: part.version for number, part in self.numbered()}
        )

    def _open(self, root: Manifest, number: int) -> Store:
        version, mark = root.partitions[number]
        path = self._path / PARTITIONS / partition_name(number)
        options = Options(
            path=path,
            mode="r+",
            budget=_NOTHING,
            version=version,
            partition=True,
            mark=mark,
            allow_untested=self._options.allow_untested,
        )
        try:
            return Store(options)
        except NotAStoreError:
            raise missing_partition(str(path), number) from None
        except VersionError as error:
            raise VersionError(
                f"{path} lacks the version that the store's root names: {error}. Partitions belong "
                "together: restore all from one copy, or, where each host has its own disk, open "
                "the store with as many ranks as before"
            ) from None

    def shard(self, rows: int) -> Shard:
        """Return which rows of a table of so many are in these partitions."""
        share = self._share
        return Shard(rows, share.partitions, share.first, share.count)

    def generation(
        self, name: str, info: TableInfo, keys: Callable[[], Keys | None]
    ) -> PartitionedGeneration:
        """Return the files of a table's shard, given what the root states of the whole."""
        shard = self.shard(info.spec.rows)
        parts = [part[name]._generation for part in self.stores]
        for part in parts:
            check_part(part, info, shard)
        if info.spec.keys is not None:
            writers = [_Writer(part, name) for part in self.stores]
            return KeyedPartitionedGeneration(
                dataclasses.replace(info), shard.partitions, shard.first, parts, writers
            )
        own = dataclasses.replace(info, spec=dataclasses.replace(info.spec, rows=len(shard)))
        return PartitionedGeneration(own, shard, parts, keys)

    def numbered(self) -> list[tuple[int, Store]]:
        """Return each partition with its number."""
        return list(enumerate(self.stores, self._share.first))

    def versions(self) -> dict[int, tuple[int, str]]:
        """Return the version and mark at which each is, by number."""
        return {
            number: (part.version, part._state.manifest.mark) for number, part in self.numbered()
        }

    def written_since(self, root: Manifest) -> Written:
        """Return what was written to those that are not at the version that a root names."""
        ahead = self.ahead(root)
        return Written.total([part._state.manifest.written or Written() for _, part in ahead])

    def ahead(self, root: Manifest) -> list[tuple[int, Store]]:
        """Return those that are not at the version that a root names."""
        return [
            (number, part)
            for number, part in self.numbered()
            if part._state.manifest.mark != root.partitions[number][1]
        ]

    def commit(self) -> None:
        """Commit those that rows were written to."""

        def commit(part: Store) -> None:
            if part.uncommitted_rows() or any(part[name]._generation.has_new_keys for name in part):
                part.commit()

        self.each(commit)

    def check_whole(self, older: Manifest) -> None:
        """Raise CorruptStoreError unless what an older version of the root names can be opened."""
        for number, part in self.numbered():
            version, mark = older.partitions[number]
            if part._state.manifest.mark != mark:
                part._state.check_whole(part._state.history.part(version, mark))

    def restore(self, older: Manifest) -> None:
        """Have each make a version of what an older version of the root names."""
        for number, part in self.ahead(older):
            part.restore(part._state.history.part(*older.partitions[number]).version)

    def show(self, root: Manifest) -> None:
        """Go back to what the root names, in all that are ahead of it; see `State.show`."""
        for number, part in self.ahead(root):
            with part._door.use(write=True):
                part._folder.stop()
                part._state.show(*root.partitions[number])

    def keep_only(self, roots: Collection[Partitions]) -> None:
        """Remove what none of these roots names; see `State.keep_only`."""

        def keep_only(item: tuple[int, Store]) -> None:
            number, part = item
            named = {root[number] for root in roots}
            ledger = part._state.ledger
            if self._confirmed.get(number) != (named, ledger.seq):
                with part._door.use(write=True), part._state.alone("confirm a version"):
                    part._state.keep_only(named)
                self._confirmed[number] = named, ledger.seq

        for call in _side_by_side(keep_only, self.numbered()):
            call.result()

    def fold(self, progress: Progress | None = None) -> None:
        """Merge all deltas, and keep no version but the newest; report the partitions done."""
        total = len(self.stores)
        report = Overall(progress, total)
        for start in range(0, total, _THREADS):
            for call in _side_by_side(Store.fold, self.stores[start : start + _THREADS]):
                call.result()
            report(min(start + _THREADS, total), total)
        report.finish()

    def each(self, work: Callable[[Store], object]) -> None:
        """Do something to every partition, several at a time; raise once all are done."""
        for call in _side_by_side(work, self.stores):
            call.result()

    def close(self) -> None:
        """Close them."""
        if self.stores:
            self.each(Store.close)


class _Writer:
    """Writes a table by key of a partition."""

    def __init__(self, part: Store, name: str) -> None:
        self._part = part
        self._name = name

    def grow(self, rows: int) -> None:
        """Grow to at least so many rows, by an eighth at least."""
        spec = self._part[self._name].spec
        if rows > spec.rows:
            more = max(spec.rows // 8, EXTENT_ROWS)
            with self._part._door.use(write=True):
                larger = dataclasses.replace(spec, rows=max(rows, spec.rows + more))
                self._part._state.grow_rows(self._name, larger.rows)

    def touch(self) -> None:
        """Have the next commit look at the keys."""
        self._part._state.touched.rows.setdefault(self._name)


def _side_by_side(work: Callable[[T], R], items: Sequence[T]) -> list[Future[R]]:
    """Call `work` with each item, several at a time, and return the calls when all have ended.

    Call one after another where the program is ending, which starts no more threads.
    """
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            return [pool.submit(work, item) for item in items]
    except RuntimeError:
        return [_ended(work, item) for item in items]


def _ended(work: Callable[[T], R], item: T) -> Future[R]:
    call: Future[R] = Future()
    try:
        call.set_result(work(item))
    except Exception as error:
        call.set_exception(error)
    return call
