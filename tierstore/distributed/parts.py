"""The partitions of one rank, of which it is the only writer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, cast

from tierstore._disk.keys import Keys
from tierstore._disk.manifest import Manifest, Partitions, TableInfo, Written
from tierstore._disk.partitioned import PartitionedGeneration
from tierstore._disk.partitioning import PARTITIONS, Shard, partition_name
from tierstore._progress import Overall, Progress
from tierstore._store.options import Options
from tierstore._store.part import Part
from tierstore._store.partitions import generation_over, missing_partition, tell_renumbered
from tierstore._table.home import StoreOfTable
from tierstore.errors import NotAStoreError, VersionError

T = TypeVar("T")
R = TypeVar("R")

_THREADS = 8
"""Partitions that sync their files at a time."""


class Parts:
    """The partitions of one rank; an open root names the version of each.

    Attributes:
        own: the partitions, in order.
    """

    def __init__(self, options: Options) -> None:
        """Open nothing yet."""
        self.own: list[Part] = []
        self._path = cast(Path, options.path)
        self._allow_untested = options.allow_untested
        self._share = Shard(1, 1, 0, 1)
        self._confirmed: dict[int, tuple[set[tuple[int, str]], int]] = {}
        """By partition what roots named when it last removed versions, and its manifest then."""

    def open(self, root: Manifest, rank: int, ranks: int, store: StoreOfTable) -> None:
        """Open those of a rank at the version of the root, whatever newer ones there are."""
        self._share = Shard.of_rank(1, len(root.partitions), rank, ranks)
        first, end = self._share.first, self._share.first + self._share.count
        calls = _side_by_side(lambda number: self._open(root, number, store), range(first, end))
        self.own = [call.result() for call in calls if call.exception() is None]
        for call in calls:
            call.result()
        versions = {number: version for number, (version, _) in self.versions().items()}
        tell_renumbered(str(self._path), root, versions)

    def _open(self, root: Manifest, number: int, store: StoreOfTable) -> Part:
        path = self._path / PARTITIONS / partition_name(number)
        try:
            return Part(path, root.partitions[number], store, allow_untested=self._allow_untested)
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
        parts = [part.generation(name) for part in self.own]
        writers = [_Writer(part, name) for part in self.own]
        return generation_over(parts, info, self.shard(info.spec.rows), keys, writers)

    def numbered(self) -> list[tuple[int, Part]]:
        """Return each partition with its number."""
        return list(enumerate(self.own, self._share.first))

    def versions(self) -> dict[int, tuple[int, str]]:
        """Return the version and mark at which each is, by number."""
        return {
            number: (part.manifest.version, part.manifest.mark) for number, part in self.numbered()
        }

    def written_since(self, root: Manifest) -> Written:
        """Return what was written to those that are not at the version that a root names."""
        ahead = self.ahead(root)
        return Written.total([part.manifest.written or Written() for _, part in ahead])

    def ahead(self, root: Manifest) -> list[tuple[int, Part]]:
        """Return those that are not at the version that a root names."""
        return [
            (number, part)
            for number, part in self.numbered()
            if part.manifest.mark != root.partitions[number][1]
        ]

    def commit(self) -> None:
        """Commit those that rows were written to."""
        self.each(lambda part: part.commit() if part.is_changed else None)

    def check_whole(self, older: Manifest) -> None:
        """Raise CorruptStoreError unless what an older version of the root names can be opened."""
        for number, part in self.numbered():
            part.check_named(*older.partitions[number])

    def restore(self, older: Manifest) -> None:
        """Have each make a version of what an older version of the root names."""
        for number, part in self.ahead(older):
            part.restore(*older.partitions[number])

    def show(self, root: Manifest) -> None:
        """Go back to what the root names, in all that are ahead of it; see `Part.show`."""
        for number, part in self.ahead(root):
            part.show(*root.partitions[number])

    def keep_only(self, roots: Collection[Partitions]) -> None:
        """Remove what none of these roots names; see `Part.keep_only`."""

        def keep_only(item: tuple[int, Part]) -> None:
            number, part = item
            named = {root[number] for root in roots}
            if self._confirmed.get(number) != (named, part.ledger.seq):
                part.keep_only(named)
                self._confirmed[number] = named, part.ledger.seq

        for call in _side_by_side(keep_only, self.numbered()):
            call.result()

    def fold(self, progress: Progress | None = None) -> None:
        """Merge all deltas, and keep no version but the newest; report the partitions done."""
        total = len(self.own)
        report = Overall(progress, total)
        for start in range(0, total, _THREADS):
            for call in _side_by_side(Part.fold, self.own[start : start + _THREADS]):
                call.result()
            report(min(start + _THREADS, total), total)
        report.finish()

    def each(self, work: Callable[[Part], object]) -> None:
        """Do something to every partition, several at a time; raise once all are done."""
        for call in _side_by_side(work, self.own):
            call.result()

    def close(self) -> None:
        """Close them."""
        if self.own:
            self.each(Part.close)


class _Writer:
    """Writes a table by key of a partition."""

    def __init__(self, part: Part, name: str) -> None:
        self._part = part
        self._name = name

    def grow(self, rows: int) -> None:
        """Grow to at least so many rows, by an eighth at least."""
        self._part.grow(self._name, rows)

    def touch(self) -> None:
        """Have the next commit look at the keys."""
        self._part.touched.rows.setdefault(self._name)


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
