"""What a table asks of the store, the memory or the attached files that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tierstore._disk.manifest import KeysInfo
from tierstore._door import Door
from tierstore._table.missing import Missing
from tierstore._table.prefetch import Prefetcher


class Touched:
    """Tables that may differ from the open version, so that a commit visits no other.

    Attributes:
        rows: the tables that were written to, in order.
        scalars: the tables whose scalars a caller got and may change at any time.
        keys: the files of the keys that the next commit gives to tables, None to remove keys.
    """

    def __init__(self) -> None:
        """Know of no table."""
        self.rows: dict[str, None] = {}
        self.scalars: dict[str, None] = {}
        self.keys: dict[str, KeysInfo | None] = {}


class StoreOfTable(Protocol):
    """A store as its tables show it, and as layers and optimizers over them use it; see `Store`."""

    path: Any

    @property
    def uuid(self) -> str:
        """The unique id of the store."""

    @property
    def version(self) -> int:
        """Number of the open version."""

    def commit(
        self,
        step: int | None = None,
        *,
        payload: Mapping[str, object] | None = None,
        keep: str | None = None,
    ) -> int:
        """Make everything written so far durable, as one new version; return its number."""

    def rollback(self) -> None:
        """Drop everything written since the last commit, in all tables."""

    def grow(self, name: str, rows: int, *, keys: Sequence[Any] | None = None) -> None:
        """Grow a table to `rows` rows; commits separately."""

    def alter_tables(
        self, changes: Mapping[str, Mapping[str, Any]], *, progress: Any = None
    ) -> None:
        """Alter several tables in one commit."""

    def state_dict(self) -> dict[str, Any]:
        """Return a pointer to the open version."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the version that a pointer names."""


class Home(Protocol):
    """What the tables of one home share; `store` is None where no store versions them."""

    door: Door
    prefetcher: Prefetcher
    sync_checks: bool
    touched: Touched

    @property
    def store(self) -> StoreOfTable | None:
        """Return the store."""


class KeyedHome(Home, Protocol):
    """What tables by key ask in addition; `missing` is what reads do without being told."""

    missing: Missing

    @property
    def commits(self) -> int:
        """Return how many versions the open one's history has; uses of keys are dated by it."""

    def grow_rows(self, name: str, rows: int) -> None:
        """Grow a table to `rows` rows, while no other thread is in a call."""

    def end_leases(self, name: str) -> None:
        """End the leases of a table whose rows are about to move; no other thread is in a call."""

    def keys_before(self, name: str) -> int | None:
        """Return how many keys a table has in the previous version; None if unknown."""
