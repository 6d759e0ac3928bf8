"""The schema changes of a store: adding, altering and removing tables."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import _io
from tierstore._progress import Progress, Shown, shown
from tierstore._store import alter
from tierstore._store.alter import Rewrite
from tierstore._store.compaction import Folder
from tierstore._store.options import whole_number
from tierstore._store.state import State
from tierstore._table.table import Table
from tierstore.errors import ExistsError, InvalidInputError, named
from tierstore.initializers import Initializer, as_initializer
from tierstore.spec import BackendName, CompressionName, DTypeName, Field, TableSpec, check_name


class SchemaChanges(Mapping[str, Table]):
    """The methods of `Store` that change its tables, each in a separate commit.

    Everything else must be committed before.
    """

    path: Path | _io.Objects
    _state: State
    _folder: Folder

    def create_table(
        self,
        name: str,
        spec: TableSpec,
        *,
        blocks: Iterable[npt.NDArray[np.uint8]] | None = None,
        keys: Sequence[Any] | None = None,
        progress: Shown = None,
    ) -> Table:
        """Add a table; commits separately. Raises ExistsError if there is one of that name.

        `blocks` are its records `(n, record_bytes)` in order; without them the fields'
        initializers decide.
        `keys` are external keys of the rows, all ints or all texts, distinct.
        """
        check_name(name)
        self._agree("create a table", {"name": name, "spec": shape_of(spec)})
        self._check_free(name)
        spec = self._state.same_spec(name, spec)
        self._rewrite(
            f"create table {name!r}",
            lambda state: [alter.replaced(state, name, spec, blocks, keys)],
            shown(progress),
        )
        return self[name]

    def replace_table(
        self,
        name: str,
        spec: TableSpec,
        *,
        blocks: Iterable[npt.NDArray[np.uint8]] | None = None,
        reinitialize: bool = False,
        keys: Sequence[Any] | None = None,
        changed: int | None = None,
        progress: Shown = None,
    ) -> Table:
        """Replace all records of a table; commits separately.

        `blocks` are all records `(n, record_bytes)` in order. Without them, `reinitialize=True` is
        required, and the initializers of the fields replace every value of the table. Use
        `alter_table` to keep the values. `keys` are new external keys; without them, existing keys
        stay if the number of rows does. `changed` is how many rows are new or others than before,
        as `versions()` tells; None says that all are. Older versions keep the old table. This also
        restores a damaged table, without keys.
        """
        self._agree("replace a table", {"name": name, "spec": shape_of(spec)})
        if name not in self._state.damaged:
            self[name]
        if blocks is None and not reinitialize:
            raise InvalidInputError(
                f"this would drop every row of table {name!r}: give blocks= with the new records, "
                "or reinitialize=True; alter_table keeps the rows"
            )
        spec = self._state.same_spec(name, spec)
        self._rewrite(
            f"replace table {name!r}",
            lambda state: [alter.replaced(state, name, spec, blocks, keys, changed)],
            shown(progress),
        )
        return self[name]

    def add_fields(self, name: str, fields: Mapping[str, Field], *, progress: Shown = None) -> None:
        """Add fields with initial values to every record of a table; commits separately.

        Raises ExistsError for a field that already exists.
        """
        self.alter_tables({name: {"add": fields}}, progress=progress)

    def drop_fields(self, name: str, fields: Collection[str], *, progress: Shown = None) -> None:
        """Remove fields from every record of a table; commits separately."""
        self.alter_tables({name: {"drop": fields}}, progress=progress)

    def alter_table(
        self,
        name: str,
        *,
        dtype: DTypeName | Mapping[str, DTypeName] | None = None,
        backend: BackendName | None = None,
        compression: CompressionName | None = "keep",
        chunk_rows: int | None = None,
        progress: Shown = None,
    ) -> None:
        """Convert a table, keeping its rows, keys and scalars; commits separately.

        Args:
            name: the table.
            dtype: the element type of its first field, or a dict from field to element type.
                Values are rounded to nearest; one that would become infinite is InvalidInputError.
            backend: "memmap" or "zarr".
            compression: None, "zstd" or "lz4"; "keep" keeps it unless the backend changes.
            chunk_rows: rows per zarr chunk; None chooses a number.
            progress: called with the number of rows done and the total; True shows a bar.
        """
        change = {
            "dtype": dtype,
            "backend": backend,
            "compression": compression,
            "chunk_rows": chunk_rows,
        }
        self.alter_tables({name: change}, progress=progress)

    def alter_tables(
        self,
        changes: Mapping[str, Mapping[str, Any]],
        *,
        progress: Shown = None,
    ) -> None:
        """Alter several tables in one commit.

        Args:
            changes: a dict from table to arguments of `alter_table`, plus `add`, a dict of fields
                to add, and `drop`, the names of fields to remove.
            progress: called with the number of rows done and the total; True shows a bar.

        >>> store.alter_tables({"item": {"add": {"age": Field(1)}}, "user": {"dtype": "float16"}})
        """
        known = {"add", "drop", "dtype", "backend", "compression", "chunk_rows"}
        for change in changes.values():
            if unknown := sorted(set(change) - known):
                raise InvalidInputError(f"unknown change {unknown[0]!r}, not in {sorted(known)}")
        self._agree("alter tables", {"changes": repr({k: dict(v) for k, v in changes.items()})})
        for name in changes:
            self[name]
        self._rewrite(
            _told(changes),
            lambda state: [alter.altered(state, name, **each) for name, each in changes.items()],
            shown(progress),
        )

    def grow(
        self,
        name: str,
        rows: int,
        *,
        init: Initializer | float | None = None,
        keys: Sequence[Any] | None = None,
        progress: Shown = None,
    ) -> None:
        """Grow a table to `rows` rows; commits separately.

        `init` initializes the first field of the new rows; a number is `constant` of it. Without
        it, and in other fields, the initializers of the table are used, or zero if it has none. If
        rows have external keys, `keys` are those of the new rows. Writes a complete new copy of the
        table.
        """
        rows, init = whole_number("rows", rows), as_initializer(init)
        self._agree("grow a table", {"name": name, "rows": rows, "init": init and init.text})
        table = self[name]
        if init is not None:
            init = self._state.same_values(init.bound(name, (rows, table.dim)))
        self._rewrite(
            f"grow table {name!r}",
            lambda state: [alter.grown(state, name, rows, init, keys)],
            shown(progress),
        )

    def append(
        self,
        name: str,
        rows: Any,
        *,
        keys: Sequence[Any] | None = None,
        progress: Shown = None,
    ) -> range:
        """Append rows with values to a table, and return their ids; commits separately.

        `rows` is an array `(n, dim)` for the first field, or a dict from field to array; omitted
        fields are zero. If rows have external keys, `keys` are those of the new rows.

        Writes a complete new copy of the table, with its checksums and the map of its keys, and so
        takes as long for one row as for many: append them together. For rows that arrive all the
        time use a table by key, `TableSpec(keys=...)`, which grows in place.
        """
        self._agree("append rows", {"name": name})
        table = self[name]
        before = table.rows
        self._state.check_same(name, rows)
        self._rewrite(
            f"append to table {name!r}",
            lambda state: [alter.appended(state, name, rows, keys)],
            shown(progress),
        )
        return range(before, table.rows)

    def rename(self, name: str, new: str, *, progress: Shown = None) -> Table:
        """Rename a table and return it; commits separately.

        The rows are copied, because the directory of a table has its name, and older versions still
        name its files. Table objects of the old name are closed.
        """
        check_name(new)
        self._agree("rename a table", {"name": name, "new": new})
        self[name]
        self._check_free(new)
        self._rewrite(
            f"rename table {name!r}",
            lambda state: [alter.renamed(state, name, new)],
            shown(progress),
            drop=[name],
        )
        return self[new]

    def drop(self, name: str) -> None:
        """Remove a table; commits separately. Older versions keep it.

        A damaged table can be dropped too.
        """
        self._agree("drop a table", {"name": name})
        if name not in self._state.damaged:
            self[name]
        self._rewrite(f"drop table {name!r}", lambda state: [], drop=[name])

    def set_keys(
        self,
        name: str,
        keys: Sequence[Any] | None,
        *,
        commit: bool = True,
        progress: Shown = None,
    ) -> None:
        """Set external keys for all rows of a table; commits separately.

        Keys must be distinct, and all ints or all strings of at most 64 KiB; None removes existing
        keys. With `commit=False` they are part of the next commit, like rows that were written:
        `table.keys` shows them at once, and a rollback drops them. Raises InvalidInputError that
        names the key and both rows where one repeats. `progress(done, total)` counts the keys
        twice: they are checked, then written.
        """
        self._agree("set keys", {"name": name, "count": None if keys is None else len(keys)})
        self[name]
        self._set_keys(name, keys, commit=commit, progress=shown(progress))

    def _set_keys(
        self,
        name: str,
        keys: Sequence[Any] | None,
        *,
        commit: bool,
        progress: Progress | None,
    ) -> None:
        table = self._state.tables[name]
        alter.set_keys(self._state, self._folder, table, keys, commit=commit, progress=progress)

    def _agree(self, what: str, values: Mapping[str, object], *, after_fault: bool = False) -> None:
        """Raise unless all ranks that write the store call for the same."""
        self._state.ranks.agree(what, values, after_fault=after_fault)

    def _check_free(self, name: str) -> None:
        if name in self:
            raise ExistsError(f"{self.path} already has a table {name!r}; choose another name")

    def _rewrite(
        self,
        change: str,
        tables: Callable[[State], Sequence[Rewrite]],
        progress: Progress | None = None,
        drop: Collection[str] = (),
    ) -> None:
        alter.rewrite(change, self._state, self._folder, tables, drop=drop, progress=progress)


def shape_of(spec: object) -> list[object]:
    """Return what ranks must agree on of a table that they make: its rows and fields."""
    if not isinstance(spec, TableSpec):
        return []
    return [spec.rows, *((field, each.dim, each.dtype) for field, each in spec.fields.items())]


def _told(changes: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what changes of tables are, for errors."""
    kinds = {kind for change in changes.values() for kind in change}
    only = kinds.pop() if len(kinds) == 1 else ""
    verb = {"add": "add fields to", "drop": "drop fields of"}.get(only, "alter")
    return f"{verb} {named('table', changes)}"
