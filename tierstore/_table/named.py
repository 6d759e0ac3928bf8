"""Rows with names: the external keys of a table by id, which map to row ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tierstore._disk.keys import Keys
from tierstore._table.address import on_host
from tierstore._table.backing import Backing
from tierstore._table.home import StoreOfTable
from tierstore.errors import InvalidInputError


class NamedRows:
    """The part of a table by id for the keys that `Store.set_keys` gave its rows."""

    name: str
    _backing: Backing

    @property
    def store(self) -> StoreOfTable:
        """The `Store` of the table; raises InvalidInputError for one in memory or in a file."""
        store = self._backing.home.store
        if store is None:
            raise InvalidInputError(
                f"table {self.name!r} has no store: it lives in memory alone, or in another "
                "program's file; tierstore.create makes a store, whose tables can be committed, "
                "grown and found again"
            )
        return store

    if not TYPE_CHECKING:  # else every name would be one of a table

        def __getattr__(self, name: str) -> Any:
            """Say that a method is one of the store, such as `append`; a table has no such name."""
            said = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_") and hasattr(self._backing.home.store, name):
                said += f", its store has: store.{name}"
            raise AttributeError(said, name=name, obj=self)

    @property
    def keys(self) -> Keys | None:
        """The external keys of the rows, as `keys[5]` or `keys[array_of_ids]`, or None."""
        return self._backing.keys

    def _own_keys(self) -> Keys:
        own = self.keys  # once: another thread may refresh the store meanwhile
        if own is None:
            raise InvalidInputError(f"table {self.name!r} has no keys; see Store.set_keys")
        return own

    def lookup(self, keys: object, *, missing: int | None = None) -> npt.NDArray[np.int64]:
        """Return the ids of external keys, in their shape.

        Keys that no row has get `missing`, such as -1; without it, UnknownNameError names the
        first three and how many there are.
        """
        return self._own_keys().lookup(keys, missing=missing)

    def contains(self, keys: object) -> npt.NDArray[np.bool_]:
        """Return for each external key whether a row has it: bool, of their shape."""
        return self.lookup(keys, missing=-1) >= 0

    def get_or_add(self, keys: object) -> npt.NDArray[np.int64]:
        """Return the ids of external keys, in their shape; those that no row has get a new row.

        New rows are after the others, in the order of their keys, with the values that `Store.grow`
        gives them. If there are any, it writes a complete new copy of the table and commits
        separately, as `Store.grow` does; call it for many keys at once, or use a table by key where
        keys arrive all the time.

        >>> item = store.create_table("named", tierstore.TableSpec(2, 16))
        >>> store.set_keys("named", ["a", "b"])
        >>> item.get_or_add(["b", "c", "a", "c"])
        array([1, 2, 0, 2])
        >>> item.rows
        3
        """
        ids = self.lookup(keys, missing=-1)
        if (ids >= 0).all():
            return ids
        new = without_row(keys, ids)
        rows = len(self._own_keys())
        self.store.grow(self.name, rows + len(new), keys=new)
        return self.lookup(keys)


def without_row(keys: object, found: npt.NDArray[np.int64]) -> list[Any]:
    """Return the distinct ones of keys for which no row was found, in the order of the keys."""
    given = np.asarray(on_host(keys), object).ravel()[found.ravel() < 0].tolist()
    return list(dict.fromkeys(given))
