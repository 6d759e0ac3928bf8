"""Folds and compactions: merge deltas into the base, or into fewer deltas, during use.

A fold has three parts.

1. It publishes a manifest whose `floor` is the version up to which deltas are merged. Older
   versions can no longer be opened, and none may be open for reading at that moment.
2. A thread overwrites the base with the newest image of each row in those deltas, and syncs it. It
   needs neither the store nor a lock, because readers and the writer find these rows in the
   deltas. Commits continue; their deltas remain.
3. The first commit after that publishes a manifest without those deltas, and removes them.

Every record that a fold writes is still in a delta. A fold that fails, is stopped or is interrupted
is repeated, and readers never see its partial results.

If deltas cannot be folded, because an older version is kept or read, they are compacted among
themselves once there are many. A compaction consists of the last two parts only: it writes files
that no manifest names until a new manifest names them in place of others. The replaced deltas
remain as long as an older manifest names them or a reader has them open. Deltas up to the floor are
never compacted with later ones, because their rows in the base may be torn.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError
from operator import attrgetter
from typing import Protocol

from tierstore._disk.delta import Delta
from tierstore._disk.generation import Generation
from tierstore._disk.manifest import DigestInfo, Manifest, TableInfo
from tierstore._disk.merging import Compaction, spans
from tierstore._disk.readahead import PAGE, at_leisure
from tierstore._disk.tier import DiskTier
from tierstore._garbage import without_frames
from tierstore._progress import Overall, Progress
from tierstore._store.state import State
from tierstore._table.backing import Backing
from tierstore._threads import Event, Worker
from tierstore._tiers import memory
from tierstore.errors import InternalError, InvalidInputError, StoreFullError, StoreIOError

_LOG = logging.getLogger("tierstore")

_MOST_DELTAS = 64
_LEAST_BYTES = 1 << 20
_MOST_BYTES = 1 << 30
_QUICK_BYTES = 64 << 20
_MOST_MAPPINGS = 8 << 10
"""Limit of deltas over all tables: an eighth of the mappings that Linux allows a process."""
_FEWEST_DELTAS = 8
_TIMES_ROWS = 4
"""Limit of records in deltas per row of their table, if they cannot be folded."""


class Work(Protocol):
    """Work on deltas in steps that need no lock, published after the last step."""

    name: str
    """The name of the work in the log."""

    def steps(self) -> Iterator[None]:
        """Yield after each step of the work, which makes its result durable."""

    def publish(self) -> None:
        """Publish a manifest with the result, and remove files that it no longer needs."""

    def drop(self) -> None:
        """Remove a result that will not be published."""


class _Fold:
    """The merge of the deltas of versions up to a given one into the bases."""

    def __init__(self, state: State, upto: int, progress: Progress | None = None) -> None:
        self._state = state
        self._upto = upto
        self.name = f"fold of {state.directory.path} up to version {upto}"
        # This keeps the store and its lock alive, so that no second writer runs beside the thread.
        self._merges = {
            name: on.disk.merge(upto)
            for name, on in state.own_tables.items()
            if _between(on.disk, 0, upto) or not on.generation.is_bound(upto)
        }
        self._digests: dict[str, DigestInfo] = {}
        self._report = Overall(progress, sum(merge.total for merge in self._merges.values()))

    def steps(self) -> Iterator[None]:
        for name, merge in self._merges.items():
            for passed in merge.steps():
                self._report(passed, merge.total)
                yield
            self._report(merge.total, merge.total)
            self._report.passed(merge.total)
            generation = self._state.backings[name].generation
            if not generation.is_bound(self._upto):
                self._digests[name] = generation.bind(self._upto)
        self._report.finish()

    def publish(self) -> None:
        state = self._state
        infos = dict(state.manifest.tables)
        for name in self._merges:
            info = infos[name]
            kept = tuple(delta for delta in info.deltas if delta.version > self._upto)
            digest = self._digests.get(name, info.digest)
            infos[name] = dataclasses.replace(info, deltas=kept, digest=digest)
        try:
            state.change(tables=infos)
        except (StoreIOError, StoreFullError, InvalidInputError):
            self.drop()  # after other errors a manifest may name them
            raise
        state.sweep(1 if self._upto == state.manifest.version else state.keep)

    def drop(self) -> None:
        for name, digest in self._digests.items():
            self._state.backings[name].generation.unbind(digest)


class _Compacting:
    """The compaction of groups of consecutive deltas into one delta each."""

    def __init__(self, state: State, groups: Mapping[str, list[list[Delta]]]) -> None:
        self._state = state
        self.name = f"compaction of deltas in {state.directory.path}"
        self._compactions = {
            name: [state.backings[name].generation.compact(group) for group in found]
            for name, found in groups.items()
        }

    def steps(self) -> Iterator[None]:
        for compactions in self._compactions.values():
            for compaction in compactions:
                yield from compaction.steps()

    def publish(self) -> None:
        state = self._state
        infos = dict(state.manifest.tables)
        for name, compactions in self._compactions.items():
            infos[name] = _compacted(state.backings[name].generation, compactions)
        try:
            state.change(tables=infos)
        except (StoreIOError, StoreFullError, InvalidInputError):
            self.drop()  # after other errors a manifest may name them
            raise
        state.sweep(state.keep)

    def drop(self) -> None:
        for compactions in self._compactions.values():
            for compaction in compactions:
                compaction.remove()


def _compacted(generation: Generation, compactions: list[Compaction]) -> TableInfo:
    """Return the manifest entry of a table after its compactions."""
    deltas = list(generation.info.deltas)
    for compaction in compactions:
        if compaction.delta is None:
            raise RuntimeError("a compaction was published before it was done")
        first = deltas.index(compaction.deltas[0].info)
        deltas[first : first + len(compaction.deltas)] = [compaction.delta.info]
        generation.adopt(compaction.delta)
    return dataclasses.replace(generation.info, deltas=tuple(deltas))


class Gathered:
    """The deltas of all tables, recounted only for tables whose entry in the manifest changed.

    Attributes:
        total: number of deltas.
        full: the tables with more than a few deltas, or with large ones.
    """

    def __init__(self) -> None:
        """Start without tables."""
        self.total = 0
        self.full: dict[str, None] = {}
        self._counts: dict[str, int] = {}
        self._seen: Manifest | None = None

    def look(self, manifest: Manifest) -> None:
        """Count the deltas of another manifest."""
        seen, self._seen = self._seen, manifest
        if seen is None:
            changed, gone = list(manifest.tables), set[str]()
        else:
            changed, gone, _ = manifest.difference(seen)
        for name in (*gone, *changed):
            self.total -= self._counts.pop(name, 0)
            self.full.pop(name, None)
        for name in changed:
            self._count(name, manifest.tables[name])

    def _count(self, name: str, info: TableInfo) -> None:
        self._counts[name] = count = len(info.deltas)
        self.total += count
        few, size = min(_FEWEST_DELTAS, _MOST_DELTAS), sum(map(attrgetter("size"), info.deltas))
        if count > few or (size > _LEAST_BYTES and size > _most_bytes(info)):
            self.full[name] = None

    @property
    def most(self) -> int:
        """The most deltas of a table before they are folded or compacted."""
        return _MOST_DELTAS if self.total <= _MOST_MAPPINGS else min(_FEWEST_DELTAS, _MOST_DELTAS)


def _most_bytes(info: TableInfo) -> int:
    """Return how many bytes the deltas of a table may have before they are folded.

    Half of its base, so that a small store stays a small multiple of its data, but a MiB, since a
    fold syncs; and of a large table 1 GiB or a quarter, since a fold of it takes long.
    """
    base = info.spec.nbytes
    return max(_LEAST_BYTES, min(base // 2, _MOST_BYTES), base // 4)


class Folder:
    """Folds and compacts a store; its methods must be called within `Door.use`."""

    def __init__(self, state: State) -> None:
        """Do nothing yet."""
        self._state = state
        self.warned = False
        """Whether this session has already warned about unconfirmed versions."""
        self._since = 0
        self._gathered = Gathered()
        self._work: Work | None = None
        self._thread: BackgroundWork | None = None

    @property
    def done(self) -> bool:
        """Whether work is done that `finish` publishes.

        If that is before a commit, the version that becomes an older one names no delta that is in
        the base, so that these go with the version before it.
        """
        return self._thread is not None and self._thread.done() and not self._state.damaged

    def tend(self) -> None:
        """After a commit: publish finished work, and start new work if deltas have accumulated.

        If twice the threshold has accumulated during the work, wait for it: deltas must not
        accumulate faster than they are merged.
        """
        if self._state.damaged:
            return
        newest = self._state.manifest.version
        if self._thread is not None:
            if not self._thread.done() and not self._much(self._since, newest, times=2):
                return
            self.finish()
        if not self._much(0, newest):
            return
        oldest = self._oldest()
        if self._much(0, oldest) and self._begin(oldest):
            self._start(_Fold(self._state, oldest))
            return
        floor = self._state.manifest.floor
        after = floor if self._much(0, oldest) else max(floor, oldest)
        if groups := self._groups(after, newest):
            self._start(_Compacting(self._state, groups))

    def fold(self, upto: int, progress: Progress | None = None) -> bool:
        """Fold the deltas of versions up to `upto` now; return False if readers prevent it.

        Raises CorruptStoreError if a table is damaged, since its repair may need older versions.
        """
        for error in self._state.damaged.values():
            raise error
        self.finish()
        if not self._begin(upto):
            return False
        work = _Fold(self._state, upto, progress)
        _LOG.info("%s starts", work.name)
        try:
            for _ in work.steps():
                pass
        except BaseException as error:
            work.drop()
            _LOG.info("%s ended without a result: %r", work.name, str(error))
            raise
        work.publish()
        memory.give_back()
        _LOG.info("%s is published", work.name)
        return True

    def fold_if_quick(self) -> None:
        """Fold as much as possible, if that is quick.

        What counts is what a fold writes: a few scattered rows of a large table are many pages.
        """
        if self._state.damaged or not self._state.own_tables:
            return
        oldest = self._oldest()
        tables = [
            each for each in self._state.own_tables.values() if _between(each.disk, 0, oldest)
        ]
        if tables and sum(_merged_bytes(table, oldest) for table in tables) <= _QUICK_BYTES:
            self.fold(oldest)

    def finish(self) -> None:
        """Wait for work in progress, if any, and publish it.

        Raises its error, after which no work is in progress. An interrupt stops the work.
        """
        work, thread = self._work, self._thread
        self._work = self._thread = None
        if work is None or thread is None:
            return
        try:
            thread.finish()
        except BaseException as error:
            thread.stop()
            work.drop()
            _LOG.warning("%s failed: %s", work.name, str(error))  # whose frames hold files
            raise
        work.publish()
        memory.give_back()
        _LOG.info("%s is published", work.name)

    def leave(self) -> None:
        """Publish work whose thread is done; otherwise leave it to a later session.

        A fold of a large table may take hours. If three times the threshold has accumulated, wait
        for it: deltas must not accumulate faster than they are merged, even over short sessions.
        """
        if self._thread is None:
            return
        if self._thread.done() or self._much(0, self._state.manifest.version, times=3):
            self.finish()
        else:
            self.stop()

    def stop(self) -> None:
        """Stop work in progress, if any; it is repeated later."""
        work, thread = self._work, self._thread
        self._work = self._thread = None
        if work is not None and thread is not None:
            thread.stop()
            work.drop()
            _LOG.info("%s is stopped; a later session repeats it", work.name)

    def _start(self, work: Work) -> None:
        """Run the steps of work in a thread."""
        self._since = self._state.manifest.version
        try:
            self._thread = BackgroundWork(work.steps())
        except BaseException:
            work.drop()
            raise
        self._work = work
        _LOG.info("%s starts in a thread", work.name)

    def _oldest(self) -> int:
        """Return the newest version up to which all kept and read versions allow a fold."""
        state = self._state
        past = state.ledger.common_past(state.writer.readers(state.manifest.version))
        if not state.manifest.forks or past <= state.ledger.floor:
            return past
        return max(state.ledger.floor, _before_compacted(state, past))

    def _much(self, after: int, upto: int, *, times: int = 1) -> bool:
        """Whether the deltas of a range of versions exceed the threshold.

        In any table more than 64 deltas, or fewer where there are thousands of them in all tables,
        or more bytes than `_most_bytes`.
        """
        manifest = self._state.manifest
        self._gathered.look(manifest)
        for name in self._gathered.full:
            info = manifest.tables[name]
            found = [delta.size for delta in info.deltas if after < delta.version <= upto]
            most_bytes = times * _most_bytes(info)
            if len(found) > times * self._gathered.most or sum(found) > most_bytes:
                return True
        return False

    def _groups(self, after: int, upto: int) -> dict[str, list[list[Delta]]]:
        """Return the deltas of a range of versions to compact, by table.

        If the deltas of a table contain its rows several times over, all of them are compacted.
        """
        groups: dict[str, list[list[Delta]]] = {}
        for name, on in self._state.backings.items():
            found = _between(on.disk, after, upto)
            rows = sum(delta.info.rows for delta in found)
            if rows > _TIMES_ROWS * on.rows:
                parts = [found]
            elif len(found) > self._gathered.most:
                parts = spans(found, upto, self._gathered.most * 3 // 4)
            else:
                continue
            parts = [part for part in parts if len(part) > 1]
            if parts:
                groups[name] = parts
        return groups

    def _begin(self, upto: int) -> bool:
        """Publish that deltas up to `upto` are being merged; return False if readers prevent it.

        A reader of an older version would see newer rows in the base; readers of later versions do
        not read these rows from the base.
        """
        state = self._state
        newest = upto == state.manifest.version
        with state.writer.without_readers_before(upto) as is_free:
            if not is_free:
                return False
            state.change(floor=upto, confirmed=upto if newest else state.manifest.confirmed)
        state.sweep(1 if newest else state.keep)
        return True


def _before_compacted(state: State, upto: int) -> int:
    """Return the newest version, up to a limit, that no compacted delta of a kept version spans.

    A version on another branch may name a compacted delta with older changes, which the newest
    version has in separate deltas. The base must not change for the rows of these.
    """
    kept = list(state.history.versions().values())
    before = 0
    while before != upto:
        before = upto
        for manifest in kept:
            for name, info in state.manifest.tables.items():
                other = manifest.tables.get(name)
                if other is None or other.generation != info.generation:
                    continue
                merged = [each.version for each in info.deltas if each.version <= upto]
                known = [each.version for each in other.deltas if each.version <= upto]
                is_last = len(known) == len(other.deltas)
                if merged and not is_last and max(known, default=0) < merged[-1]:
                    upto = max(known, default=0)
    return upto


def _between(tier: DiskTier, after: int, upto: int) -> list[Delta]:
    """Return the deltas of a range of versions (first exclusive, last inclusive)."""
    return [delta for delta in tier.deltas if after < delta.info.version <= upto]


def _merged_bytes(table: Backing, upto: int) -> int:
    """Return the bytes that a fold of a table up to a version writes, in whole pages or chunks."""
    spec = table.spec
    width = spec.layout.record_bytes
    rows = spec.chunk_rows if spec.compression and spec.chunk_rows else max(1, PAGE // width)
    chunks, sums = table.disk.touched(upto, rows), table.disk.touched(upto, PAGE // 4)
    written = chunks.size * max(PAGE, rows * width) + sums.size * PAGE
    return written + table.disk.linked_bytes(upto)


class BackgroundWork:
    """Runs work in a thread, in steps with pauses until a caller waits for it."""

    def __init__(self, steps: Iterator[None]) -> None:
        """Start the thread; raises StoreIOError if that fails."""
        self._steps: Iterator[None] | None = steps
        self._error: BaseException | None = InternalError(
            "the fold thread died; memory may have run out, fold again"
        )
        self._hurry, self._over = Event(), Event()
        self._worker = Worker(self._run, "fold the store")

    def _run(self) -> None:
        try:
            for _ in at_leisure(self._steps or iter(()), self._hurry):
                if self._over.is_set():
                    raise CancelledError
            self._error = None
        except BaseException as error:
            self._error = without_frames(error)
        finally:
            self._steps = None

    def done(self) -> bool:
        """Whether the thread has ended."""
        return not self._worker.alive

    def finish(self) -> None:
        """Wait until the work is done, without further pauses; raise its error."""
        self._hurry.set()
        self._worker.join()
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # otherwise it and this frame form a cycle

    def stop(self) -> None:
        """Stop the work after the current step, and wait for that."""
        self._over.set()
        self._hurry.set()
        self._worker.join()
