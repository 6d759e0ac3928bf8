"""What a table asks of the store it belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tierstore._disk.base import Progress
from tierstore._door import Door
from tierstore._table.prefetch import Prefetcher
from tierstore.initializers import Initializer
from tierstore.spec import Field

__all__ = ["Owner"]


class Owner(Protocol):
    """A store, or what stands in for one."""

    guard: Door
    prefetcher: Prefetcher
    sync_checks: bool

    def grow(
        self,
        name: str,
        rows: int,
        init: Initializer | None = None,
        keys: Sequence[Any] | None = None,
    ) -> None:
        """Append rows to a table."""

    def set_keys(self, table: str, keys: Sequence[Any]) -> None:
        """Give a table's rows external keys."""

    def add_fields(
        self, name: str, fields: Mapping[str, Field], progress: Progress | None = None
    ) -> None:
        """Add fields to every record of a table."""

    def pointer(self) -> dict[str, Any]:
        """Return a pointer to the version that is open."""

    def check_pointer(self, state: Mapping[str, Any]) -> None:
        """Raise InvalidInputError for a pointer to another store, warn of another version."""
