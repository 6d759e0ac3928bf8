"""Folds and compactions: deltas become part of the base, or fewer, while the store is in use.

A fold has three parts.

1. It publishes a manifest whose `floor` is the version up to which deltas are merged: older ones
   cannot be opened from then on. No older one may be open for reading at that moment.
2. A thread writes the newest image of each row in those deltas over the base, and syncs it. It
   needs neither the store nor a lock: readers and the writer find these rows in the deltas. Commits
   continue; their deltas stay.
3. The first commit that finds this done publishes a manifest without those deltas, and removes
   them.

Every record a fold writes is a whole image that a delta still holds. A fold that fails, is stopped
or is cut off is done again, and readers never see its traces.

Deltas that no fold can take, because an older version is kept or read, are compacted among
themselves where many have gathered. A compaction has the last two parts alone: it writes files that
no manifest names before the one that names them in place of others. Those others stay for as long
as an older manifest names them, and readers have them open. Deltas up to the floor are never
compacted with later ones: what the base holds of their rows may be torn.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Protocol

from tierstore._disk.delta import Delta
from tierstore._disk.generation import Generation
from tierstore._disk.manifest import DeltaInfo, DigestInfo, Manifest, TableInfo
from tierstore._disk.merging import Compaction, spans
from tierstore._disk.readahead import at_leisure
from tierstore._disk.tier import DiskTier
from tierstore._store.state import State
from tierstore._threads import Event, Worker
from tierstore._tiers import memory
from tierstore.errors import InternalError, InvalidInputError, StoreFullError, StoreIOError

__all__ = ["BackgroundWork", "Folder"]

_LOG = logging.getLogger("tierstore")

_MOST_DELTAS = 64
_MOST_BYTES = 1 << 30
_QUICK_BYTES = 64 << 20
_MOST_MAPPINGS = 8 << 10
"""Deltas of all tables together, an eighth of the mappings that Linux lets a process have."""
_FEWEST_DELTAS = 8
_TIMES_ROWS = 4
"""Records that deltas hold for each row of their table, at most, where no fold can take them."""


class Work(Protocol):
    """Something done to deltas in steps that need no lock, and published when they are taken."""

    name: str
    """What the log calls it."""

    def steps(self) -> Iterator[None]:
        """Do it, durably, some of it at each step."""

    def publish(self) -> None:
        """Publish a manifest that says it is done, and remove what that no longer needs."""

    def drop(self) -> None:
        """Leave no trace of what will not be published."""


class _Fold:
    """The deltas of versions up to one go into the bases."""

    def __init__(self, state: State, upto: int) -> None:
        self._state = state
        self._upto = upto
        self.name = f"fold of {state.directory.path} up to version {upto}"
        # This keeps the store and its lock alive: no second writer may come beside the thread.
        self._merges = {
            name: table._disk.merge(upto)
            for name, table in state.tables.items()
            if _between(table._disk, 0, upto) or not table._generation.is_bound(upto)
        }
        self._digests: dict[str, DigestInfo] = {}

    def steps(self) -> Iterator[None]:
        for name, merge in self._merges.items():
            yield from merge.steps()
            generation = self._state.tables[name]._generation
            if not generation.is_bound(self._upto):
                self._digests[name] = generation.bind(self._upto)

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
            self.drop()  # after other errors there may be a manifest that names them
            raise
        state.sweep(1 if self._upto == state.manifest.version else state.keep)

    def drop(self) -> None:
        for name, digest in self._digests.items():
            self._state.tables[name]._generation.unbind(digest)


class _Compacting:
    """Groups of consecutive deltas become one each."""

    def __init__(self, state: State, groups: Mapping[str, list[list[Delta]]]) -> None:
        self._state = state
        self.name = f"compaction of deltas in {state.directory.path}"
        self._compactions = {
            name: [state.tables[name]._generation.compact(group) for group in found]
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
            infos[name] = _compacted(state.tables[name]._generation, compactions)
        try:
            state.change(tables=infos)
        except (StoreIOError, StoreFullError, InvalidInputError):
            self.drop()  # after other errors there may be a manifest that names them
            raise
        state.sweep(state.keep)

    def drop(self) -> None:
        for compactions in self._compactions.values():
            for compaction in compactions:
                compaction.remove()


def _compacted(generation: Generation, compactions: list[Compaction]) -> TableInfo:
    """Return what a manifest says of a table whose compactions are done."""
    deltas = list(generation.info.deltas)
    for compaction in compactions:
        if compaction.delta is None:
            raise RuntimeError("a compaction is published before it is done")
        first = deltas.index(compaction.deltas[0].info)
        deltas[first : first + len(compaction.deltas)] = [compaction.delta.info]
        generation.adopt(compaction.delta)
    return dataclasses.replace(generation.info, deltas=tuple(deltas))


class Gathered:
    """The deltas of all tables, counted anew only where a manifest says something else of them.

    Attributes:
        total: how many there are.
        full: the tables that have more than a few, or many bytes of them.
    """

    def __init__(self) -> None:
        """Know of no table."""
        self.total = 0
        self.full: dict[str, None] = {}
        self._counts: dict[str, int] = {}
        self._seen: Manifest | None = None

    def look(self, manifest: Manifest) -> None:
        """Take what another manifest says."""
        seen, self._seen = self._seen, manifest
        if seen is not None:
            for name in manifest.gone_tables(seen):
                self._count(name, ())
        for name in manifest.tables if seen is None else manifest.changed_tables(seen):
            self._count(name, manifest.tables[name].deltas)

    def _count(self, name: str, deltas: Sequence[DeltaInfo]) -> None:
        self.total += len(deltas) - self._counts.pop(name, 0)
        self.full.pop(name, None)
        if deltas:
            self._counts[name] = len(deltas)
        few = min(_FEWEST_DELTAS, _MOST_DELTAS)
        if len(deltas) > few or sum(delta.size for delta in deltas) > _MOST_BYTES:
            self.full[name] = None

    @property
    def most(self) -> int:
        """How many deltas a table may have before something is done about them."""
        return _MOST_DELTAS if self.total <= _MOST_MAPPINGS else min(_FEWEST_DELTAS, _MOST_DELTAS)


class Folder:
    """Folds and compacts a store; its methods expect to be called within `Door.use`."""

    def __init__(self, state: State) -> None:
        """Do nothing yet."""
        self._state = state
        self.warned = False
        """Whether this session has warned of versions that wait to be confirmed."""
        self._since = 0
        self._gathered = Gathered()
        self._work: Work | None = None
        self._behind: BackgroundWork | None = None

    def tend(self) -> None:
        """After a commit: end work whose thread is done, and begin some if much has gathered.

        Where twice as much has gathered while it was under way, wait for that: deltas must not come
        faster than they go.
        """
        if self._state.damaged:
            return
        newest = self._state.manifest.version
        if self._behind is not None:
            if not self._behind.done() and not self._much(self._since, newest, times=2):
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

    def fold(self, upto: int) -> bool:
        """Fold the deltas of versions up to `upto` now; return False where readers prevent it.

        Raises CorruptStoreError where a table is damaged: older versions may be what it needs.
        """
        for error in self._state.damaged.values():
            raise error
        self.finish()
        if not self._begin(upto):
            return False
        work = _Fold(self._state, upto)
        try:
            for _ in work.steps():
                pass
        except BaseException:
            work.drop()
            raise
        work.publish()
        memory.give_back()
        return True

    def fold_if_quick(self) -> None:
        """Fold what can be folded, if that takes only a moment."""
        if self._state.damaged:
            return
        oldest = self._oldest()
        sizes = [
            sum(delta.info.size for delta in _between(table._disk, 0, oldest))
            for table in self._state.tables.values()
        ]
        if any(sizes) and sum(sizes) <= _QUICK_BYTES:
            self.fold(oldest)

    def finish(self) -> None:
        """Wait for the work under way, if there is any, and publish it.

        Raises what went wrong in it; then there is none any more. An interrupt stops it.
        """
        work, behind = self._work, self._behind
        self._work = self._behind = None
        if work is None or behind is None:
            return
        try:
            behind.finish()
        except BaseException as error:
            behind.stop()
            work.drop()
            _LOG.warning("%s failed: %s", work.name, str(error))  # whose frames hold files
            raise
        work.publish()
        memory.give_back()
        _LOG.info("%s is published", work.name)

    def leave(self) -> None:
        """End the work under way if its thread is done; else leave it to a later session.

        A fold of a large table may take hours. Where three times as much has gathered as lets it
        begin, wait for it: deltas must not come faster than they go, over short sessions either.
        """
        if self._behind is None:
            return
        if self._behind.done() or self._much(0, self._state.manifest.version, times=3):
            self.finish()
        else:
            self.stop()

    def stop(self) -> None:
        """Stop the work under way, if there is any; a later one does it again."""
        work, behind = self._work, self._behind
        self._work = self._behind = None
        if work is not None and behind is not None:
            behind.stop()
            work.drop()
            _LOG.info("%s is stopped; a later session does it", work.name)

    def _start(self, work: Work) -> None:
        """Have a thread take the steps of work."""
        self._since = self._state.manifest.version
        try:
            self._behind = BackgroundWork(work.steps())
        except BaseException:
            work.drop()
            raise
        self._work = work
        _LOG.info("%s begins in a thread", work.name)

    def _oldest(self) -> int:
        """Return the version up to which deltas can be folded: all kept or read came from it."""
        state = self._state
        past = state.ledger.common_past(state.writer.readers(state.manifest.version))
        if not state.manifest.forks or past <= state.ledger.floor:
            return past
        return max(state.ledger.floor, _before_compacted(state, past))

    def _much(self, after: int, upto: int, *, times: int = 1) -> bool:
        """Whether much has gathered in deltas of versions after one and up to another.

        In any table more than 64 deltas, or fewer where there are thousands of them in all tables,
        or both 1 GiB and a quarter of its base.
        """
        manifest = self._state.manifest
        self._gathered.look(manifest)
        for name in self._gathered.full:
            info = manifest.tables[name]
            found = [delta.size for delta in info.deltas if after < delta.version <= upto]
            most_bytes = times * max(_MOST_BYTES, info.spec.nbytes // 4)
            if len(found) > times * self._gathered.most or sum(found) > most_bytes:
                return True
        return False

    def _groups(self, after: int, upto: int) -> dict[str, list[list[Delta]]]:
        """Return, by table, which deltas of versions after one and up to another to compact.

        All of a table's where they hold its rows several times over.
        """
        groups: dict[str, list[list[Delta]]] = {}
        for name, table in self._state.tables.items():
            found = _between(table._disk, after, upto)
            rows = sum(delta.info.rows for delta in found)
            if rows > _TIMES_ROWS * table.rows:
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
        """Say that deltas up to `upto` are being merged; return False where readers prevent it.

        A reader of an older version would see newer rows in the base; one of a later version sees
        none of them.
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
    """Return the newest version up to one that no compacted delta of a kept version begins before.

    A version beside the newest may name a delta that holds older changes too, which the newest has
    in deltas of their own: what the base holds of those must stay as that version knows it.
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
    """Return the deltas of versions after one and up to another."""
    return [delta for delta in tier.deltas if after < delta.info.version <= upto]


class BackgroundWork:
    """Work that a thread does in steps, with pauses in between until it is waited for."""

    def __init__(self, steps: Iterator[None]) -> None:
        """Begin with it; raises StoreIOError where no thread can be had."""
        self._steps: Iterator[None] | None = steps
        self._error: BaseException | None = InternalError(
            "the thread that was to fold ended; memory may have run out, fold again"
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
            self._error = error
        finally:
            self._steps = None

    def done(self) -> bool:
        """Whether the thread has ended."""
        return not self._worker.alive

    def finish(self) -> None:
        """Wait until all is done, without more pauses; raise what went wrong."""
        self._hurry.set()
        self._worker.join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End it after the present step, and wait for that."""
        self._over.set()
        self._hurry.set()
        self._worker.join()
