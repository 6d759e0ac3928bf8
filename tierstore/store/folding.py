"""Folding: merging deltas into the base they lie over, behind whoever reads, writes and commits.

A fold has three parts.

1. It begins with a manifest whose `floor` is the version up to which deltas are merged: older ones
   cannot be opened from then on. That takes a moment in which nobody reads the store.
2. A thread writes the newest image of each row in those deltas over the base, and syncs it. It
   needs neither the store nor a lock: readers, and the writer too, find these rows in the deltas.
   Commits go on meanwhile; their deltas stay.
3. The first commit that finds this done publishes a manifest without those deltas, and removes
   them.

Every record a fold writes is a whole image that a delta still holds, so a fold that fails, is
stopped or is cut off is simply done again, and nobody ever sees its traces.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future

from tierstore.disk.pacing import at_leisure
from tierstore.errors import StoreIOError
from tierstore.store.history import FOLD
from tierstore.store.opened import Opened

__all__ = ["Behind", "Folder"]

_MOST_DELTAS = 64
_MOST_BYTES = 1 << 30
_QUICK_BYTES = 64 << 20


class Folder:
    """Folds a store; its methods expect to be called inside the guard, as its only writer."""

    def __init__(self, store: Opened) -> None:
        """Fold nothing yet."""
        self._store = store
        self._upto = 0
        self._work: Behind | None = None

    def tend(self) -> None:
        """After a commit: end a fold whose thread is done, and begin one if much has gathered.

        Where twice as much has gathered while one was under way, wait for that: deltas must not
        come faster than they go.
        """
        if self._store.damaged:
            return
        oldest = min(self._store.history.versions())
        if self._work is not None:
            if not self._work.done() and not self._much(self._upto, oldest, times=2):
                return
            self.finish()
        if self._much(0, oldest) and self._begin(oldest):
            self._work = Behind(self._steps(oldest))

    def fold(self, upto: int) -> bool:
        """Fold the deltas of versions up to `upto` now; return False where readers prevent it.

        Raises CorruptStoreError where a table is damaged: older versions may be what it needs.
        """
        for error in self._store.damaged.values():
            raise error
        self.finish()
        if not self._begin(upto):
            return False
        for _ in self._steps(upto):
            pass
        self._end(upto)
        return True

    def fold_if_quick(self) -> None:
        """Fold to the oldest kept version, if there is something and it takes but a moment."""
        if self._store.damaged:
            return
        oldest = min(self._store.history.versions())
        if any(sizes := self._sizes(0, oldest)) and sum(map(sum, sizes)) <= _QUICK_BYTES:
            self.fold(oldest)

    def finish(self) -> None:
        """Wait for the fold under way, if there is one, and end it.

        Raises what went wrong in it; then there is none any more. An interrupt stops it.
        """
        work, self._work = self._work, None
        if work is not None:
            try:
                work.finish()
            except BaseException:
                work.stop()
                raise
            self._end(self._upto)

    def leave(self) -> None:
        """End the fold under way if its thread is done; else give it up, for a later session.

        Of a large table it may take hours. Where three times as much has gathered as lets one
        begin, wait for it: deltas must not come faster than they go, over short sessions either.
        """
        if self._work is None:
            return
        if self._work.done() or self._much(0, min(self._store.history.versions()), times=3):
            self.finish()
        else:
            self.stop()

    def stop(self) -> None:
        """Give the fold under way up, if there is one; a later one does it again."""
        work, self._work = self._work, None
        if work is not None:
            work.stop()

    def _sizes(self, after: int, upto: int) -> list[list[int]]:
        """Return the bytes of each table's deltas of versions after one and up to another."""
        return [
            [delta.info.size for delta in table.disk.deltas if after < delta.info.version <= upto]
            for table in self._store.tables.values()
        ]

    def _much(self, after: int, upto: int, *, times: int = 1) -> bool:
        """Whether those of a table exceed 64, or both 1 GiB and a quarter of its base."""
        return any(
            len(sizes) > times * _MOST_DELTAS
            or sum(sizes) > times * max(_MOST_BYTES, table.spec.nbytes // 4)
            for sizes, table in zip(
                self._sizes(after, upto), self._store.tables.values(), strict=True
            )
        )

    def _begin(self, upto: int) -> bool:
        """Say that deltas up to `upto` are being merged; return False where readers prevent it.

        A reader of an older version would see newer rows in the base. Who comes later finds a
        manifest by which it sees none of them.
        """
        store = self._store
        newest = upto == store.manifest.version
        with store.directory.open_file(FOLD, write=True) as lock:
            if not lock.lock(exclusive=True):
                return False
            store.publish(floor=upto, confirmed=upto if newest else store.manifest.confirmed)
            store.sweep(1 if newest else store.keep, unread=True)
        self._upto = upto
        return True

    def _steps(self, upto: int) -> Iterator[None]:
        """Write the deltas up to `upto` into the bases, durably, some records at each step."""
        # Who holds this holds the store and its lock: no second writer may come beside it.
        for merge in [table.disk.merge(upto) for table in self._store.tables.values()]:
            yield from merge.steps()

    def _end(self, upto: int) -> None:
        """Publish that the deltas up to `upto` are no more, and remove them."""
        store = self._store
        infos = dict(store.manifest.tables)
        for name, table in store.tables.items():
            info = table.generation.info
            kept = tuple(delta for delta in info.deltas if delta.version > upto)
            infos[name] = dataclasses.replace(info, deltas=kept)
        store.publish(tables=infos)
        store.sweep(1 if upto == store.manifest.version else store.keep)


class Behind(Future[None]):
    """Work that a thread of its own does in steps, resting in between until somebody waits."""

    def __init__(self, steps: Iterator[None]) -> None:
        """Begin with it."""
        super().__init__()
        self._steps = steps
        self._hurry = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tierstore-fold", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise StoreIOError(f"no thread can be started to fold the store: {error}") from error

    def _run(self) -> None:
        try:
            for _ in at_leisure(self._steps, self._hurry):
                if self._over.is_set():
                    raise CancelledError
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(None)
        finally:
            del self._steps

    def finish(self) -> None:
        """Wait until all is done, without more rests; raise what went wrong."""
        self._hurry.set()
        self.result()
        self._thread.join()

    def stop(self) -> None:
        """Have it end after the step it is at, and wait for that."""
        self._over.set()
        self._hurry.set()
        self._thread.join()
