"""Imports a file, replacing all rows of one field of a table."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tierstore._dtypes import DEFAULT_DTYPE, ELEMENT_TYPES, Converter, DTypeName, check_dtype
from tierstore._formats import open_source, read_keys
from tierstore._formats.base import Source, block_rows_for
from tierstore._formats.keys import KeyColumn, Keys
from tierstore._io import publish
from tierstore._rowcopy import unique
from tierstore._store.opening import create
from tierstore._store.opening import open as open_store
from tierstore.budget import DEFAULT_MEMORY, Budget, Size
from tierstore.errors import InvalidInputError, UnknownNameError
from tierstore.spec import Field, TableSpec

if TYPE_CHECKING:
    from tierstore._store.store import Store
    from tierstore._table.table import Table

__all__ = ["DEFAULT_TABLE", "ImportResult", "import_table"]

DEFAULT_TABLE = "embeddings"
"""Name of the table created in an empty store."""

_NO_CACHES = Budget(host=0, gpu=0)

Progress = Callable[[int, int], None]
Records = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True)
class ImportResult:
    """The result of an import.

    Attributes:
        table: name of the table.
        field: name of the field.
        rows: number of rows loaded, all rows of the table.
        dim: number of elements per row.
        dtype: element type of the field.
        created: whether the table was created by the import.
        keys: whether the rows got keys, from the file or from the caller.
        version: the version of the store that contains them.
        overflowed: number of finite values that became infinite in the conversion to `dtype`.
    """

    table: str
    field: str
    rows: int
    dim: int
    dtype: str
    created: bool
    keys: bool
    version: int
    overflowed: int


def import_table(
    store: Store | str | os.PathLike[str],
    src: Any,
    *,
    table: str | None = None,
    field: str | None = None,
    keys: Any = None,
    dtype: DTypeName | None = None,
    memory: Size = DEFAULT_MEMORY,
    allow_untested: bool = False,
    progress: Progress | None = None,
) -> ImportResult:
    """Load all rows of a field from a file in a streaming fashion, and commit them.

    A missing table is created with the shape of the file. For an existing table, the file must have
    the shape of the field; other fields do not change. If this raises, nothing has changed: the
    rows are written to a new generation of the table, and the commit switches to it.

    Args:
        store: a store opened with mode "r+" that has no uncommitted rows, or the path of a store,
            which is opened for the import. A new store appears there complete or not at all.
        src: the file; its suffix selects the format: `.npy`, `.npz`, `.safetensors`, `.parquet`,
            `.zarr`, `.vec`, `.txt`, `.tsv`, `.bin`, `.csv` or `.pt`. `FILE:NAME` selects an array,
            tensor or column of a file that contains several. A zarr store is accepted too, as in
            `export_table`.
        table: the table; None selects the only table, or creates `embeddings` in an empty store.
        field: the field; None selects the first field, or `weight` in a new table. If the file
            contains several arrays and `src` names none, the array of this name is read.
        keys: the key of each row (distinct integers or strings), or a file of keys: .txt, .npy or
            FILE.parquet:COLUMN. None uses the keys in `src`, if any. The keys are committed
            separately as the keys of the table. A table that has other fields and different keys is
            refused.
        dtype: element type of the field in a new table; that of the file if None.
        memory: limit in bytes for keys, headers and directories of the file, on top of a block of
            rows. Sizes that the file claims are checked against it before memory is allocated.
        allow_untested: as in `tierstore.open`, if `store` is a path.
        progress: called with the number of rows done and the total.

    Returns:
        What was loaded. Values are rounded to the field's element type. Values too large for it
        become infinite; they are counted, and a warning gives the number.

    Raises:
        FormatError: a file is missing or damaged, lacks the matrix or needs more than `memory`.
        InvalidInputError: shapes, dtypes or keys do not match, the suffix is unknown, or the store
            has uncommitted rows.
        MissingExtraError: the format needs a package that is not installed.
        UnknownNameError: the table has no such field.
        StoreFullError, StoreIOError: the file system failed.
    """
    if isinstance(keys, str | os.PathLike):
        keys = read_keys(os.fspath(keys), memory=memory)
    with _opened(store, allow_untested) as opened:
        return _load(opened, src, table, field, keys, dtype, memory, progress)


@contextmanager
def _opened(store: Store | str | os.PathLike[str], allow_untested: bool) -> Iterator[Store]:
    """Open a store without caches for one import; publish a new store only on success."""
    if not isinstance(store, str | os.PathLike):
        yield store
        return
    path = Path(store)
    if os.path.lexists(path):
        with open_store(path, "r+", budget=_NO_CACHES, allow_untested=allow_untested) as opened:
            yield opened
    else:
        with (
            publish(path) as partial,
            create(partial, {}, budget=_NO_CACHES, allow_untested=allow_untested) as made,
        ):
            yield made


def _load(
    store: Store,
    src: Any,
    table: str | None,
    field: str | None,
    keys: Any,
    dtype: str | None,
    memory: Size,
    progress: Progress | None,
) -> ImportResult:
    name = _table_name(store, table)
    existing = store.get(name)
    if field is None:
        field = "weight" if existing is None else next(iter(existing.fields))
    wanted = None if dtype is None else check_dtype(dtype)
    if existing is not None:
        wanted = _field_of(existing, field, wanted).dtype

    wide = wanted is not None and ELEMENT_TYPES[wanted].accepts(DEFAULT_DTYPE)
    text_dtype = wanted if wanted is not None and wide else DEFAULT_DTYPE
    with open_source(src, field=field, text_dtype=text_dtype, memory=memory) as source:
        keys = _checked_keys(source, source.keys if keys is None else keys)
        converter = Converter(source.dtype, wanted or source.dtype)
        if existing is None:
            spec = _new_spec(source, field, wanted or source.dtype)
            records = _new_records(spec, field, source, converter)
            loaded = store.create_table(name, spec, blocks=records, keys=keys, progress=progress)
        else:
            _check_fit(existing, field, source, keys)
            spec = dataclasses.replace(existing.spec, sparse=False)
            records = _merged_records(existing, field, source, converter)
            loaded = store.replace_table(name, spec, blocks=records, keys=keys, progress=progress)

    converter.warn(str(src))
    return ImportResult(
        table=name,
        field=field,
        rows=loaded.rows,
        dim=spec.fields[field].dim,
        dtype=spec.fields[field].dtype,
        created=existing is None,
        keys=keys is not None,
        version=store.version,
        overflowed=converter.overflowed,
    )


def _table_name(store: Store, name: str | None) -> str:
    if name is not None:
        return name
    if len(store) > 1:
        raise InvalidInputError(f"the store has several tables: {', '.join(store)}; name one")
    return next(iter(store), DEFAULT_TABLE)


def _field_of(table: Table, field: str, dtype: str | None) -> Field:
    if field not in table.fields:
        raise UnknownNameError(
            f"table {table.name!r} has no field {field!r}, only {', '.join(table.fields)}; "
            "add it first (Store.add_fields)"
        )
    found = table.fields[field]
    if dtype is not None and dtype != found.dtype:
        raise InvalidInputError(
            f"field {field!r} of table {table.name!r} is {found.dtype} and cannot become {dtype}"
        )
    return found


def _checked_keys(source: Source, keys: Any) -> Keys | None:
    """Return one distinct key per row as int64 or strings, or None."""
    if keys is None:
        return None
    checked = KeyColumn(keys, source.rows).block(0, source.rows)
    distinct = len(set(checked) if isinstance(checked, list) else unique(checked))
    if distinct < source.rows:
        raise InvalidInputError(
            f"only {distinct} of the {source.rows} keys are distinct; keys must be unique"
        )
    return checked


def _check_fit(table: Table, field: str, source: Source, keys: Keys | None) -> None:
    dim = table.fields[field].dim
    if (source.rows, source.dim) != (table.rows, dim):
        raise InvalidInputError(
            f"{source.path} holds {source.rows} rows of {source.dim}, but field {field!r} of table "
            f"{table.name!r} is {table.rows} rows of {dim}; load it into another table"
        )
    if keys is None or table.keys is None or len(table.fields) == 1:
        return
    if not _equal(keys, table.keys):
        raise InvalidInputError(
            f"the keys of {source.path} differ from those of table {table.name!r}, which has other "
            "fields; put the rows into the order of the table"
        )


def _equal(keys: Keys, others: Any) -> bool:
    """Compare two sequences of keys in blocks; return whether they are equal."""
    if others is None or len(keys) != len(others):
        return False
    step = 1 << 16
    starts = range(0, len(keys), step)
    return all(list(keys[s : s + step]) == list(others[s : s + step]) for s in starts)


def _new_spec(source: Source, field: str, dtype: str) -> TableSpec:
    if source.rows == 0:
        raise InvalidInputError(f"{source.path} holds no rows; a table needs at least one")
    return TableSpec(source.rows, fields={field: Field(source.dim, dtype)})


def _new_records(
    spec: TableSpec, field: str, source: Source, converter: Converter
) -> Iterator[Records]:
    """Yield records of a single field from the source."""
    width = spec.layout.record_bytes
    for block in source.blocks(block_rows_for(width)):
        records = np.zeros((len(block), width), np.uint8)
        spec.layout.view(records, field)[:] = converter(block)
        yield records


def _merged_records(
    table: Table, field: str, source: Source, converter: Converter
) -> Iterator[Records]:
    """Yield the table's records with one field replaced from the source, row for row."""
    blocks = source.blocks()
    rest = next(blocks)
    for records in table._records():
        values = table.spec.layout.view(records, field)
        filled = 0
        while filled < len(values):
            part = rest[: len(values) - filled]
            values[filled : filled + len(part)] = converter(part)
            filled, rest = filled + len(part), rest[len(part) :]
            if not len(rest):
                rest = next(blocks, rest)
        yield records
