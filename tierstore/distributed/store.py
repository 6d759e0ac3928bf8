"""A store in partitions that several ranks write."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from tierstore._disk.partitioning import Shard
from tierstore._progress import Progress
from tierstore._store import locking
from tierstore._store.commit import CommitDraft
from tierstore._store.options import Options
from tierstore._store.store import Store
from tierstore.distributed import schema
from tierstore.distributed.apart import Apart
from tierstore.distributed.ranks import Ranks
from tierstore.errors import InvalidInputError
from tierstore.spec import TableSpec


class DistributedStore(Store):
    """A store of which every rank writes some partitions; `tierstore.distributed.open` gives one.

    `commit`, `rollback`, `fold`, `restore`, `apply_patch` and what changes tables or names of
    versions are collective: every rank calls them, in the same order and with the same arguments,
    and an error on one rank is raised on all. On one rank alone its tables are those of any store.
    A patch is read by every rank, from a file of its own path, and names rows by id alone.
    """

    _state: Apart
    _ranks: Ranks

    def __init__(self, options: Options, ranks: Ranks, *, average: bool = True) -> None:
        """Open it; `tierstore.distributed.open` is the way to."""
        self._ranks = ranks
        self.average: bool = average
        """Whether gradients of rows are divided by the number of ranks."""
        super().__init__(options)
        self._folder = self._state.folder

    def _opened(self, options: Options, lock: locking.WriterLock | None) -> Apart:
        return Apart(options, self, self._ranks, average=self.average)

    def __getitem__(self, name: str) -> Any:
        """Return a table; raises UnknownNameError, a KeyError.

        One rank alone has a Table; each of several has a DistributedTable, with its own shard, or
        a DistributedKeyedTable.
        """
        table = super().__getitem__(name)
        return self._state.shared.get(name, table)

    def __repr__(self) -> str:
        """Name the store, its version, its tables and this rank."""
        closed = ", closed" if self._door.closed else ""
        return (
            f"DistributedStore({str(self.path)!r}, version={self.version}, tables={list(self)}, "
            f"rank={self.rank} of {self.ranks}{closed})"
        )

    @property
    def rank(self) -> int:
        """Which rank this is."""
        return self._ranks.rank

    @property
    def ranks(self) -> int:
        """How many ranks write the store."""
        return self._ranks.count

    def ids_of(self, rows: Any) -> Any:
        """Return the ids of rows of this rank's shard of a table, whichever it is."""
        return self._state.ids_of(rows)

    def shard_of(self, spec: TableSpec) -> Shard:
        """Return which rows of a table are on this rank."""
        return self._state.shard_of(spec)

    # -- versions

    def commit(  # type: ignore[override]
        self,
        step: int | None = None,
        *,
        payload: Mapping[str, object] | None = None,
        keep: str | None = None,
    ) -> int:
        """Make everything that any rank wrote durable as one new version; return its number.

        Collective. The arguments are those of `Store.commit`. Ranks must give the same step, keep
        and names of a payload, whose values are those of the first rank of each file system.

        After an error that is raised on every rank nothing is published and nothing is lost: commit
        again, or roll back. After RanksError, no rank can know what the others did: end all ranks
        and open the store again: it is at the version before, or at this one.
        """
        step = self._checked(step, payload, keep)
        names = None if payload is None else sorted(payload)
        self._agree("commit", {"step": step, "payload": names, "keep": keep})
        state = self._state
        with self._door.use(write=True) as use, state.alone("commit"):
            state.commit_all(
                use, lambda: CommitDraft(state, step, payload, confirm=True, keep=keep)
            )
            return self.version

    def commit_async(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: the messages of a thread would come between those of the training."""
        raise InvalidInputError(
            "ranks commit together, and a thread cannot take part while they train: call commit()"
        )

    def confirm(self, version: int) -> None:
        """Refuse: every version that ranks commit is confirmed."""
        raise InvalidInputError("each version that ranks commit is confirmed: leave confirm out")

    # -- changes of tables

    def _rewrite(
        self,
        change: str,
        tables: schema.Tables,
        progress: Progress | None = None,
        drop: Collection[str] = (),
    ) -> None:
        schema.rewrite(self._state, change, tables, drop, progress)

    def _set_keys(
        self,
        name: str,
        keys: Sequence[Any] | None,
        *,
        commit: bool,
        progress: Progress | None,
    ) -> None:
        if not commit:
            raise InvalidInputError(
                "keys of a partitioned store are a commit of their own: leave commit=False out"
            )
        schema.set_keys(self._state, name, keys, progress)

    def _agree(self, what: str, values: Mapping[str, object], *, after_fault: bool = False) -> None:
        """Check that the store is open, and that all ranks are at the same version and call."""
        self._door.check(write=True)
        with self._state.closed_when_broken():
            told = {"version": self.version, **values}
            self._ranks.agree(what, told, after_fault=after_fault)
