"""A session: an open store together with what changes it."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._disk.base import Progress
from tierstore._disk.generation import Generation
from tierstore._store import alter
from tierstore._store.compaction import Folder
from tierstore._store.opened import Opened
from tierstore._store.options import Options
from tierstore._store.pointer import check_pointer, make_pointer
from tierstore._table.table import Table
from tierstore._table.tiers import Tiers
from tierstore.errors import (
    ClosedError,
    CommitFailedError,
    TierStoreError,
    UncommittedRowsWarning,
    UpkeepWarning,
)
from tierstore.initializers import Initializer
from tierstore.spec import Field, TableSpec

__all__ = ["Session"]

_MANY_UNCONFIRMED = 100


class Session(Opened):
    """What a Store is made of, and what its tables ask for."""

    def __init__(self, options: Options) -> None:
        """Open a store."""
        self.folder = Folder(self)
        self._has_warned = False
        super().__init__(options)

    def new_table(self, name: str, generation: Generation, tiers: Tiers) -> Table:
        """Return a table that was opened."""
        return Table(self, name, generation, tiers)

    def tidy(self) -> None:
        """Remove old versions, and see to folding."""
        with self._put_off():
            self.sweep(self.keep)
            self.folder.tend()
        if not self._has_warned and self.ledger.unconfirmed() > _MANY_UNCONFIRMED:
            self._has_warned = True
            warnings.warn(
                f"more than {_MANY_UNCONFIRMED} versions of {self.directory.path} wait to be "
                "confirmed: all of them stay on the disk, and nothing can be folded; call "
                "store.confirm(version) when the model of that version is saved",
                UpkeepWarning,
                stacklevel=5,
            )

    @contextlib.contextmanager
    def _put_off(self) -> Iterator[None]:
        """Turn an error into a warning, and leave what the body does to the next commit.

        For work that comes after a version is safe, so that it never looks like a failed commit.
        """
        try:
            yield
        except (TierStoreError, OSError, MemoryError) as error:
            if isinstance(error, CommitFailedError):
                self.guard.close(str(error))
            warnings.warn(
                f"version {self.manifest.version} is committed; removing or folding what came "
                f"before is put off: {error}",
                UpkeepWarning,
                stacklevel=5,
            )

    # -- changing tables

    def _alone_to(self, change: str, work: Callable[[], None]) -> None:
        """Have the store to oneself, with no fold under way, for a commit of its own.

        A context manager made of a generator would not do: an interrupt that came as it is left
        would leave it unfinished.
        """
        with self.guard.use(write=True) as use, self.alone(change), use.interruptible():
            with self._put_off():
                self.folder.finish()
            self.guard.check(write=True)
            work()
            self.tidy()

    def replace(
        self,
        name: str,
        spec: TableSpec,
        blocks: Iterable[npt.NDArray[np.uint8]] | None = None,
        *,
        keys: Sequence[Any] | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Write a table, new or not, from blocks of records; a commit of its own."""

        def work() -> None:
            known = self.manifest.tables.get(name)
            scalars = {} if known is None else known.scalars
            if name in self.tables:
                scalars = self.tables[name].scalars
            alter.replace(self, name, spec, blocks, scalars=scalars, keys=keys, progress=progress)

        self._alone_to("change a table", work)

    def add_fields(
        self, name: str, fields: Mapping[str, Field], progress: Progress | None = None
    ) -> None:
        """Add fields to every record of a table; a commit of its own."""
        work = partial(alter.add_fields, self, name, fields, progress)
        self._alone_to("change a table", work)

    def grow(
        self,
        name: str,
        rows: int,
        init: Initializer | None = None,
        keys: Sequence[Any] | None = None,
    ) -> None:
        """Append rows to a table; new ones follow `init`, or are zero; a commit of its own."""
        self._alone_to("change a table", partial(alter.grow, self, name, rows, init, keys))

    def set_keys(self, name: str, keys: Sequence[Any]) -> None:
        """Give a table's rows external keys; a commit of its own."""
        self._alone_to("set keys", partial(alter.set_keys, self, name, keys))

    # -- pointing to the store

    def pointer(self) -> dict[str, Any]:
        """Return a pointer to the version that is open."""
        return make_pointer(str(self.directory.path), self.manifest)

    def check_pointer(self, state: Mapping[str, Any]) -> None:
        """Raise InvalidInputError for a pointer to another store, warn of another version."""
        check_pointer(state, str(self.directory.path), self.identity, self.manifest)

    # -- ending

    def close(self, *, at_once: bool = False) -> None:
        """Drop what was not committed, with a warning that counts the rows, and release all.

        Where it waits for a fold under way, an interrupt, or `at_once`, gives that up.
        """
        if os.getpid() != self.guard.pid:
            return
        self.prefetcher.close()
        if self.guard.held:
            self.guard.close("it was closed from within this call", then=self.close)
            return
        lost = 0
        try:
            if self.guard.writable:
                with contextlib.suppress(ClosedError):
                    self._end_fold(at_once=at_once)
            with contextlib.suppress(ClosedError), self.guard.use():
                lost = self._wind_up()
        finally:
            self.release()
        if lost:
            warnings.warn(
                f"{self.directory.path} was closed with {lost} uncommitted rows, which were "
                "dropped; call commit() to keep them",
                UncommittedRowsWarning,
                stacklevel=4,
            )

    def _end_fold(self, *, at_once: bool) -> None:
        with self.guard.use(write=True) as use, use.interruptible(), self._put_off():
            if at_once:
                self.folder.stop()
            else:
                self.folder.leave()

    def _wind_up(self) -> int:
        """Drop what was not committed, refuse every call from now on; return the rows dropped."""
        try:
            if not self.guard.writable:
                return 0
            lost = self.uncommitted_rows()
            for table in self.tables.values():
                table._discard()
            with self._put_off():
                self.folder.fold_if_quick()
            return lost
        finally:
            self.guard.close()

    def release(self) -> None:
        """Give back memory, files and locks, whatever the state; no file is removed."""
        self.folder.stop()
        super().release()
