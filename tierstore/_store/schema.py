"""The schema changes of a store: what its tables are made of, and which there are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import _io
from tierstore._disk.base import Progress
from tierstore._store import alter
from tierstore._store.alter import Rewrite
from tierstore._store.compaction import Folder
from tierstore._store.options import whole_number
from tierstore._store.state import State
from tierstore._table.table import Table
from tierstore.errors import ExistsError, InvalidInputError
from tierstore.initializers import Initializer
from tierstore.spec import BackendName, CompressionName, DTypeName, Field, TableSpec, check_name

__all__ = ["SchemaChanges"]


class SchemaChanges(Mapping[str, Table]):
    """What changes the tables of a store; each is a commit of its own.

    Everything must be committed before. See `Store`.
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
        progress: Progress | None = None,
    ) -> Table:
        """Add a table; a commit of its own. Raises ExistsError if there is one of that name.

        `blocks` are its records `(n, record_bytes)` in order; without them the fields'
        initializers decide.
        `keys` are external keys of the rows, all ints or all texts, distinct.
        """
        check_name(name)
        self._check_free(name)
        self._rewrite(lambda: [alter.replaced(self._state, name, spec, blocks, keys)], progress)
        return self[name]

    def replace_table(
        self,
        name: str,
        spec: TableSpec,
        *,
        blocks: Iterable[npt.NDArray[np.uint8]] | None = None,
        reinitialize: bool = False,
        keys: Sequence[Any] | None = None,
        progress: Progress | None = None,
    ) -> Table:
        """Write a table again, with other records; a commit of its own.

        `blocks` are all records `(n, record_bytes)` in order. Without them `reinitialize=True` is
        needed, and the fields' initializers decide: every value that the table has is dropped.
        `alter_table` keeps them.
        `keys` are new external keys; without them, those there are stay if the rows are as many.
        Older versions keep the old table. A damaged table is whole again by this, without keys.
        """
        if name not in self._state.damaged:
            self[name]
        if blocks is None and not reinitialize:
            raise InvalidInputError(
                f"this would drop every row of table {name!r}: give blocks= with the new records, "
                "or reinitialize=True; alter_table keeps the rows"
            )
        self._rewrite(lambda: [alter.replaced(self._state, name, spec, blocks, keys)], progress)
        return self[name]

    def add_fields(
        self, name: str, fields: Mapping[str, Field], *, progress: Progress | None = None
    ) -> None:
        """Add fields to every record of a table, with their first values; a commit of its own.

        Raises ExistsError for a field that is there.
        """
        self.alter_tables({name: {"add": fields}}, progress=progress)

    def drop_fields(
        self, name: str, fields: Collection[str], *, progress: Progress | None = None
    ) -> None:
        """Remove fields from every record of a table; a commit of its own."""
        self.alter_tables({name: {"drop": fields}}, progress=progress)

    def alter_table(
        self,
        name: str,
        *,
        dtype: DTypeName | Mapping[str, DTypeName] | None = None,
        backend: BackendName | None = None,
        compression: CompressionName | None = "keep",
        chunk_rows: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Convert a table, keeping its rows, keys and scalars; a commit of its own.

        Args:
            name: the table.
            dtype: the element type of its first field, or a dict from field to element type.
                Values are rounded to nearest; one that would become infinite is InvalidInputError.
            backend: "memmap" or "zarr".
            compression: None, "zstd" or "lz4"; "keep" keeps it while the backend stays.
            chunk_rows: rows of one zarr chunk; None chooses.
            progress: called with rows done and in all.
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
        progress: Progress | None = None,
    ) -> None:
        """Alter several tables in one commit.

        Args:
            changes: by table, arguments of `alter_table`, and `add`, a dict of fields to add, and
                `drop`, the names of fields to remove.
            progress: called with rows done and in all.

        >>> store.alter_tables({"item": {"add": {"age": Field(1)}}, "user": {"dtype": "float16"}})
        """
        known = {"add", "drop", "dtype", "backend", "compression", "chunk_rows"}
        for change in changes.values():
            if unknown := sorted(set(change) - known):
                raise InvalidInputError(f"no change {unknown[0]!r}; there are {sorted(known)}")
        tables = [self[name] for name in changes]
        self._rewrite(
            lambda: [alter.altered(table, **changes[table.name]) for table in tables], progress
        )

    def grow(
        self,
        name: str,
        rows: int,
        *,
        init: Initializer | None = None,
        keys: Sequence[Any] | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Add rows to a table until there are `rows`; a commit of its own.

        New rows of the first field follow `init`. Without it, and in other fields, they follow the
        initializer that the table was made with, or are zero where there was none. Where rows have
        external keys, `keys` are those of the new ones. Writes the table again beside the old one.
        """
        table = self[name]
        rows = whole_number("rows", rows)
        self._rewrite(lambda: [alter.grown(table, rows, init, keys)], progress)

    def append(
        self,
        name: str,
        rows: Any,
        *,
        keys: Sequence[Any] | None = None,
        progress: Progress | None = None,
    ) -> range:
        """Add rows that have values behind those of a table, and return their ids; one commit.

        `rows` is an array `(n, dim)` for the first field, or a dict from field to array; fields
        that are not given are zero. Where rows have external keys, `keys` are those of the new
        ones. Writes the table again beside the old one.
        """
        table = self[name]
        before = table.rows
        self._rewrite(lambda: [alter.appended(table, rows, keys)], progress)
        return range(before, table.rows)

    def rename(self, name: str, new: str, *, progress: Progress | None = None) -> Table:
        """Give a table another name, and return it; a commit of its own.

        The rows are copied: the files of a table lie in a directory that has its name, and older
        versions still name them. Table objects of the old name are closed.
        """
        check_name(new)
        table = self[name]
        self._check_free(new)
        self._rewrite(lambda: [alter.renamed(table, new)], progress, drop=[name])
        return self[new]

    def drop(self, name: str) -> None:
        """Remove a table; a commit of its own. Older versions keep it.

        A damaged table can be dropped too.
        """
        if name not in self._state.damaged:
            self[name]
        self._rewrite(list, drop=[name])

    def set_keys(self, name: str, keys: Sequence[Any] | None) -> None:
        """Give every row of a table an external key; a commit of its own.

        Keys are all ints or all texts, distinct; None removes those there are.
        """
        alter.set_keys(self._state, self._folder, self[name], keys)

    def _check_free(self, name: str) -> None:
        if name in self:
            raise ExistsError(f"{self.path} has a table {name!r}; choose another name")

    def _rewrite(
        self,
        tables: Callable[[], Sequence[Rewrite]],
        progress: Progress | None = None,
        drop: Collection[str] = (),
    ) -> None:
        alter.rewrite(self._state, self._folder, tables, drop=drop, progress=progress)
