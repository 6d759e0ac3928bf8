"""Imports a file, replacing all rows of one field of a table."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import numpy.typing as npt

from tierstore._disk.partitioning import PARTITIONS
from tierstore._dtypes import DEFAULT_DTYPE, ELEMENT_TYPES, DTypeName, check_dtype
from tierstore._formats import TextOptions, fetched, open_source, read_keys, split_name
from tierstore._formats.base import Source
from tierstore._formats.files import by_numbers
from tierstore._formats.keys import KeyColumn, Keys
from tierstore._html import brief
from tierstore._io import publish
from tierstore._keys.strings import Strings, may_repeat
from tierstore._keys.text import Texts
from tierstore._kinds import check_store
from tierstore._progress import Progress, Shown, shown
from tierstore._store.opening import create, made_or_opened
from tierstore._store.opening import open as open_store
from tierstore._table.keyed import KeyedTable
from tierstore._table.table import records_in
from tierstore._upsert import Incoming, merged, new_records, upsert_rows
from tierstore.budget import DEFAULT_MEMORY, Budget, Size
from tierstore.errors import FormatError, InvalidInputError, UnknownNameError, counted
from tierstore.spec import Field, TableSpec

if TYPE_CHECKING:
    from tierstore._store.store import Store
    from tierstore._table.table import Table

__all__ = [
    "DEFAULT_TABLE",
    "ImportResult",
    "Preview",
    "import_table",
    "in_order_of_numbers",
    "preview",
    "read_keys",
]

DEFAULT_TABLE = "embeddings"
"""Name of the table created in an empty store."""

_NO_CACHES = Budget(host=0, gpu=0)

Records = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True)
class ImportResult:
    """The result of an import.

    Attributes:
        table: name of the table.
        field: name of the field, or the names of several between commas.
        rows: number of rows loaded: all rows of the table, or of an upsert those of the file.
        dim: number of elements per row, of all fields.
        dtype: element type of the field, the first of several.
        created: whether the table was created by the import.
        keys: whether the rows got keys, from the file or from the caller.
        version: the version of the store that contains them.
        overflowed: number of finite values that became infinite in the conversion to `dtype`.
        read_as: what was decided about a file in text, such as 'header yes, keys from "item", 128
            numbers'; None for other files.
        notes: what was left out, kept or narrowed, a sentence each.
        added: of an upsert, the number of rows that the table did not have.
    """

    __repr__ = brief

    table: str
    field: str
    rows: int
    dim: int
    dtype: str
    created: bool
    keys: bool
    version: int
    overflowed: int
    read_as: str | None = None
    notes: tuple[str, ...] = ()
    added: int = 0


@dataclasses.dataclass(frozen=True)
class Preview:
    """What an import would read.

    Attributes:
        rows: rows of the file.
        dim: elements of each, of all fields.
        dtype: element type in which they are read, the first of several fields.
        read_as: what was decided about a file in text; None for other files.
        notes: what is left out or narrowed, a sentence each.
        keys: the keys of the first rows; None where the file has none.
        first: the first rows `(n, dim)`, in the type that NumPy users read.
    """

    rows: int
    dim: int
    dtype: str
    read_as: str | None
    notes: tuple[str, ...]
    keys: list[str] | list[int] | None
    first: npt.NDArray[Any]


def in_order_of_numbers(files: Sequence[str]) -> list[str]:
    """Return files that a shell listed in the order of the numbers in their names.

    A shell puts part-10 before part-2. Files in an order that is none of a shell's stay in theirs.
    """
    listed = list(files)
    letters = sorted(listed, key=lambda name: (re.sub(r"[\W_]", "", name).lower(), name))
    return sorted(listed, key=by_numbers) if listed in (sorted(listed), letters) else listed


def preview(
    src: Any,
    *,
    field: str | Sequence[str] | None = None,
    dtype: DTypeName | None = None,
    memory: Size = DEFAULT_MEMORY,
    header: bool | None = None,
    key_column: str | int | Literal[False] | None = None,
    sep: str | None = None,
    decimal: str | None = None,
    null: Sequence[str] = (),
    vector: str | Sequence[str | int] = (),
    skip_lines: int = 0,
    comment: str | None = None,
    errors: Literal["strict", "replace"] = "strict",
    expand: bool = False,
    rows: int = 3,
) -> Preview:
    """Read the first `rows` rows of a file as `import_table` would, and change nothing.

    Arguments and errors are those of `import_table`.
    """
    text = TextOptions(header, key_column, sep, decimal, null, vector, skip_lines, comment, errors)
    names = ["weight"] if field is None else _distinct(field)
    wanted = dict.fromkeys(names, None if dtype is None else check_dtype(dtype))
    with fetched(src) as place, ExitStack() as stack:
        sources = _sources(
            stack,
            place,
            wanted,
            dict.fromkeys(names),
            memory=memory,
            text=text,
            expand=expand,
        )
        source, parts = sources[names[0]], []
        for each in sources.values():
            some = np.empty((0, each.dim), ELEMENT_TYPES[each.dtype].stored)
            for block in each.blocks(rows):
                some = np.concatenate([some, block[: rows - len(some)]])
                if len(some) == rows:
                    break
            parts.append(ELEMENT_TYPES[each.dtype].decode(some))
        first = parts[0] if len(parts) == 1 else np.hstack(parts)
        found = source.keys
        keys = None if found is None else KeyColumn(found[:rows], len(first)).block(0, len(first))
        return Preview(
            rows=source.rows,
            dim=first.shape[1],
            dtype=source.dtype,
            read_as=_said(sources.values()),
            notes=tuple(dict.fromkeys(n for each in sources.values() for n in _unread(each))),
            keys=keys.tolist() if isinstance(keys, np.ndarray) else keys,
            first=first,
        )


def import_table(
    store: Store | str | os.PathLike[str],
    src: Any,
    *,
    table: str | None = None,
    field: str | Sequence[str] | None = None,
    keys: Any = None,
    dtype: DTypeName | None = None,
    header: bool | None = None,
    key_column: str | int | Literal[False] | None = None,
    sep: str | None = None,
    decimal: str | None = None,
    null: Sequence[str] = (),
    vector: str | Sequence[str | int] = (),
    skip_lines: int = 0,
    comment: str | None = None,
    errors: Literal["strict", "replace"] = "strict",
    duplicates: Literal["error", "first", "last"] = "error",
    upsert: bool = False,
    expand: bool = False,
    memory: Size = DEFAULT_MEMORY,
    allow_untested: bool = False,
    progress: Shown = None,
) -> ImportResult:
    """Load all rows of a field, or of several, from a file in a streaming fashion, and commit.

    A missing table is created with the shape of the file. For an existing table, the file must have
    the shape of the field; other fields do not change. If this raises, nothing has changed: the
    rows are written to a new generation of the table, and the commit switches to it.

    Args:
        store: a store opened with mode "r+" that has no uncommitted rows, or the path of a store,
            which is opened for the import. A new store appears there complete or not at all.
        src: the file, or a list of files that hold ranges of its rows, in this order; a suffix
            selects the format: `.npy`, `.npz`, `.safetensors`, `.parquet`,
            `.zarr`, `.vec`, `.txt`, `.tsv`, `.bin`, `.csv` or `.pt`. `FILE:NAME` selects an array,
            tensor or column of a file that contains several. Text files may be packed: `.csv.gz`,
            `.bz2`, `.xz` or `.zst`, or alone in a `.zip`. A URL for
            fsspec, such as "s3://bucket/items.parquet", is copied to a temporary file first, but
            for a `.zarr`. A zarr store is accepted too, as in `export_table`.
        table: the table; None selects the only table, or creates `embeddings` in an empty store.
        field: the field; None selects the first field, or `weight` in a new table. If the file
            contains several arrays and `src` names none, the array of this name is read. Or a list
            of fields, each of which is an array or column of its name, as `export_table` writes
            several.
        keys: the key of each row (distinct integers or strings), or a file of keys: .txt, .npy or
            FILE.parquet:COLUMN. None uses the keys in `src`, if any. The keys are committed
            separately as the keys of the table. A table that has other fields and different keys is
            refused.
        dtype: element type of the field in a new table; that of the file if None,
            and float32 for text. "int8" and "uint8" quantise floats, with a scale for each row.
        header: whether the first line of a file in text names its columns. What None leaves open
            here and below is decided from the types of the cells, and `read_as` describes how.
        key_column: the column or array of keys, its name or its number from 1; False if there is
            none. If None, it is `key`, or the only one with a name of keys; in text see
            docs/text-files.md.
        sep: what is between the cells of a text, one character; " " is any run of blanks and tabs.
        decimal: what is before the decimals of a number in text, "." or ",".
        null: cells that are read as NaN, such as "" or "NA"; otherwise they are errors.
        vector: the columns of numbers that make a row, names or numbers from 1 and ranges of them,
            such as "x0..x7" or ["x", "y"]; other columns are left out. () for those that the file
            says.
        skip_lines: lines of a text to leave out at its start.
        comment: the character that lines of a text begin with that are left out, such as "#".
        errors: "replace" for keys with � in place of bytes that are no UTF-8, as of words that were
            cut within a character, in text and in `.bin`; "strict" refuses them.
        duplicates: which row stays of those with equal keys, "first" or "last"; or "error".
        upsert: write the rows over those of their keys and append the others, whose other fields
            get initial values. A table without keys takes row ids for keys. To append, the table is
            rewritten, with the rows to replace in memory. A load into a table by key always is an
            upsert, and rewrites nothing.
        expand: take a file that holds less than a 200th of the rows that it claims, beyond 64 MiB
            of them, such as a sparse file or one of zeros. It is refused otherwise, before anything
            is written, as a file of a kilobyte could fill the disk.
        memory: limit in bytes for keys, headers and directories of the file, on top of a block of
            rows. Sizes that the file claims are checked against it before memory is allocated.
        allow_untested: as in `tierstore.open`, if `store` is a path.
        progress: called with the number of rows done and the total; True shows a bar.

    Returns:
        What was loaded. Values are rounded to the field's element type. Values too large for it
        become infinite; they are counted, and a warning gives the number.

    Raises:
        AmbiguousFileError: a text can be read in two ways; the message describes how to choose one.
        FormatError: a file is damaged, lacks the matrix, claims far more rows than it holds or
            needs more than `memory`.
        InvalidInputError: shapes, dtypes or keys do not match, the suffix is unknown, or the store
            has uncommitted rows.
        InvalidTypeError: `store` is neither a store nor a path, or `src` is an array.
        MissingExtraError: the format needs a package that is not installed.
        MissingFileError: a file is not there.
        UnknownNameError: the table has no such field.
        StoreFullError, StoreIOError: the file system failed.
    """
    text = TextOptions(header, key_column, sep, decimal, null, vector, skip_lines, comment, errors)
    if duplicates not in ("error", "first", "last"):
        raise InvalidInputError(f"duplicates is 'error', 'first' or 'last', not {duplicates!r}")
    if isinstance(keys, str | os.PathLike):
        column = _column_of(src, keys)
        if column is None:
            keys = read_keys(os.fspath(keys), memory=memory)
        else:
            keys, text = None, dataclasses.replace(text, key_column=column)
    with fetched(src) as place:

        def work() -> ImportResult:
            with _opened(store, allow_untested) as opened:
                return _load(
                    opened,
                    place,
                    table,
                    field,
                    keys,
                    dtype,
                    text,
                    duplicates,
                    upsert,
                    expand,
                    memory,
                    shown(progress),
                )

        return made_or_opened(store, work) if isinstance(store, str | os.PathLike) else work()


def _column_of(src: Any, keys: str | os.PathLike[str]) -> str | None:
    """Return the column that `keys` names if it is one of the file that the rows are in."""
    if not isinstance(src, str | os.PathLike):
        return None
    (file, _), (place, column) = split_name(os.fspath(src)), split_name(os.fspath(keys))
    return column if os.path.abspath(file) == os.path.abspath(place) else None


@contextmanager
def _opened(store: Store | str | os.PathLike[str], allow_untested: bool) -> Iterator[Store]:
    """Open a store without caches for one import; publish a new store only on success."""
    if not isinstance(store, str | os.PathLike):
        check_store(store, "import_table")
        yield store
        return
    path = Path(store)
    if os.path.isdir(path / PARTITIONS):
        import tierstore.distributed as distributed  # few imports have partitions

        with distributed.open(path, budget=_NO_CACHES, allow_untested=allow_untested) as whole:
            yield cast("Store", whole)
    elif os.path.lexists(path):
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
    field: str | Sequence[str] | None,
    keys: Any,
    dtype: str | None,
    text: TextOptions,
    duplicates: str,
    upsert: bool,
    expand: bool,
    memory: Size,
    progress: Progress | None,
) -> ImportResult:
    name = _table_name(store, table)
    existing = store.get(name)
    if field is None:
        field = "weight" if existing is None else next(iter(existing.fields))
    names = _distinct(field)
    wanted = dict.fromkeys(names, None if dtype is None else check_dtype(dtype))
    dims: dict[str, int | None] = dict.fromkeys(names)
    for each in names if existing is not None else ():
        known = _field_of(cast("Table", existing), each, wanted[each])
        wanted[each], dims[each] = known.dtype, known.dim

    upsert = upsert or isinstance(existing, KeyedTable)
    with ExitStack() as stack:
        sources = _sources(stack, src, wanted, dims, memory=memory, text=text, expand=expand)
        first = sources[names[0]]
        keys = first.keys if keys is None else keys
        if keys is None and existing is not None and upsert and first.numbering is not None:
            keys = range(first.rows)  # rows with these keys, whatever their place in the file
        keys = _checked_keys(first, keys)
        notes = list(
            dict.fromkeys(
                note
                for each, source in sources.items()
                for note in _notes(source, existing, keys, wanted[each] or source.dtype)
            )
        )
        if existing is None:
            fields = {n: _new_field(each, wanted[n] or each.dtype) for n, each in sources.items()}
            incoming = Incoming(sources, fields)
        else:
            incoming = Incoming(sources, existing.fields)
        kept = None if keys is None else _kept_rows(first.path, keys, duplicates)
        if kept is not None and keys is not None:
            rows_of = counted(len(keys) - int(kept.sum()), "row")
            notes.append(f"left out {rows_of} whose key came twice")
            keys, incoming = _chosen(keys, kept), incoming.only(kept)
        added = 0
        if existing is None:
            spec = _new_spec(incoming, fields)
            records = new_records(spec, incoming)
            store.create_table(name, spec, blocks=records, keys=keys, progress=progress)
        elif upsert:
            spec = existing.spec
            added = upsert_rows(store, existing, incoming, keys, memory=memory, progress=progress)
        else:
            spec = dataclasses.replace(existing.spec, sparse=False)
            _check_fit(existing, incoming, keys)
            records = merged(records_in(existing), spec, incoming)
            store.replace_table(name, spec, blocks=records, keys=keys, progress=progress)

    where = ", ".join(map(str, src)) if isinstance(src, list) else str(src)
    for each, source in sources.items():
        incoming.converters[each].overflowed += source.overflowed
        incoming.converters[each].warn(where)
    return ImportResult(
        table=name,
        field=",".join(names),
        rows=incoming.rows,
        dim=sum(spec.fields[each].dim for each in names),
        dtype=spec.fields[names[0]].dtype,
        created=existing is None,
        keys=keys is not None,
        version=store.version,
        overflowed=sum(each.overflowed for each in incoming.converters.values()),
        read_as=_said(sources.values()),
        notes=tuple(notes),
        added=added,
    )


def _sources(
    stack: ExitStack,
    src: Any,
    wanted: Mapping[str, str | None],
    dims: Mapping[str, int | None],
    **options: Any,
) -> dict[str, Source]:
    """Open the rows of fields in one file, of wanted types and lengths as far as they are known."""
    sources = {}
    for name, dtype in wanted.items():
        source = open_source(
            src,
            field=name,
            text_dtype=_text_dtype(dtype),
            dim=dims[name],
            beside=tuple(other for other in wanted if other != name),
            **options,
        )
        sources[name] = stack.enter_context(source)
        _refuse_without_scales(source)
    return sources


def _said(sources: Iterable[Source]) -> str | None:
    """Return what was decided about a file, for people."""
    return "; ".join(dict.fromkeys(filter(None, (each.read_as for each in sources)))) or None


def _distinct(field: str | Sequence[str]) -> list[str]:
    """Return the fields to load; raises InvalidInputError for one that is named twice, or none."""
    names = [field] if isinstance(field, str) else list(field)
    if not names or len(set(names)) < len(names):
        raise InvalidInputError(f"name each field once, and at least one, not {names}")
    return names


def _refuse_without_scales(source: Source) -> None:
    """Raise FormatError for 8-bit or packed elements beside what may be their scales."""
    if source.scales:
        raise FormatError(
            f"{source.path}: 8-bit or packed elements, and beside them "
            f"{', '.join(source.scales[:4])}, which may be their scales: the elements alone are no "
            "values. tierstore.attach takes a pair of elements and a scale for each row or block "
            "of one; save others as floats, or the elements in a file of their own"
        )


def _unread(source: Source) -> list[str]:
    """Return what a source holds and is not read, one sentence each."""
    notes = list(source.notes)
    if source.numbering is not None and source.rows:
        notes.append(f"{source.numbering} numbers the rows from 0, as ids do: no keys are stored")
    return notes


def _notes(source: Source, table: Table | None, keys: Keys | None, dtype: str) -> list[str]:
    """Return what is left out, kept or narrowed, one sentence each."""
    notes = list(source.notes) if keys is not None else _unread(source)
    if isinstance(table, KeyedTable) and isinstance(keys, np.ndarray) and keys.dtype == np.uint64:
        beyond = int((keys > np.uint64(2**63 - 1)).sum())
        notes.append(
            f"{counted(beyond, 'key is', 'keys are')} above 2**63 - 1: a table by int64 takes "
            "their bits, and returns them as negative numbers"
        )
    if keys is None and table is not None and table.keys is not None:
        notes.append(
            f"kept the {table.rows:,} keys that the table had; keys= gives the rows others (--keys)"
        )
    if table is not None and not ELEMENT_TYPES[dtype].accepts(source.dtype):
        notes.append(f"{source.dtype} in the file, rounded to {dtype}")
    return notes


def _text_dtype(wanted: str | None) -> str:
    """Return the type to read numbers in text as: the wanted one, float32 if it is narrower."""
    wide = wanted is not None and ELEMENT_TYPES[wanted].accepts(DEFAULT_DTYPE)
    return wanted if wanted is not None and wide else DEFAULT_DTYPE


def _table_name(store: Store, name: str | None) -> str:
    if name is not None:
        return name
    if len(store) > 1:
        raise InvalidInputError(
            f"the store has several tables: {', '.join(store)}; name one (table=, --table)"
        )
    return next(iter(store), DEFAULT_TABLE)


def _field_of(table: Table, field: str, dtype: str | None) -> Field:
    if field not in table.fields:
        raise UnknownNameError(
            f"table {table.name!r} has no field {field!r}, only {', '.join(table.fields)}; "
            "add it first (Store.add_fields, tierstore add-field)"
        )
    item = table.fields[field]
    if dtype is not None and dtype != item.dtype:
        raise InvalidInputError(
            f"field {field!r} of table {table.name!r} is {item.dtype} and cannot become {dtype}"
        )
    return item


def _checked_keys(source: Source, keys: Any) -> Keys | None:
    """Return one key per row as int64 or strings, or None."""
    if keys is None:
        return None
    column = KeyColumn(keys, source.rows)
    return keys if isinstance(keys, Strings) else column.block(0, source.rows)


def _kept_rows(path: Path, keys: Keys, duplicates: str) -> npt.NDArray[np.bool_] | None:
    """Return which rows stay of those with equal keys; None if all keys are distinct.

    Raises InvalidInputError, naming the first three, where `duplicates` is "error".
    """
    if not may_repeat(Texts.packed(keys).hashes() if isinstance(keys, Strings) else keys):
        return None
    listed = keys.tolist() if isinstance(keys, np.ndarray) else list(keys)
    distinct = len(set(listed))
    if distinct == len(keys):
        return None
    if duplicates == "error":
        shown = [f"{key!r:.100} in rows {one} and {two}" for key, one, two in _repeated(listed)]
        raise InvalidInputError(
            f"{path}: only {distinct} of the {len(keys)} keys are distinct: {', '.join(shown)}; "
            "keep one row of each with --duplicates first or last (duplicates=)"
        )
    kept = np.zeros(len(keys), bool)
    step = 1 if duplicates == "first" else -1
    rows = dict(zip(listed[::-step], range(len(keys))[::-step], strict=True))
    kept[list(rows.values())] = True
    return kept


def _repeated(keys: Sequence[Any], most: int = 3) -> list[tuple[Any, int, int]]:
    """Return the first keys that occur twice, each with its first two rows."""
    rows: dict[Any, int] = {}
    found: dict[Any, tuple[Any, int, int]] = {}
    for row, key in enumerate(keys):
        if rows.setdefault(key, row) != row and key not in found:
            found[key] = (key, rows[key], row)
            if len(found) == most:
                break
    return list(found.values())


def _chosen(keys: Keys, kept: npt.NDArray[np.bool_]) -> Keys:
    return keys[kept] if isinstance(keys, np.ndarray) else list(compress(keys, kept))


def _check_fit(table: Table, incoming: Incoming, keys: Keys | None) -> None:
    for field, source in incoming.sources.items():
        dim = table.fields[field].dim
        if (incoming.rows, source.dim) != (table.rows, dim):
            raise InvalidInputError(
                f"{source.path} holds {counted(incoming.rows, 'row')} of {source.dim}, but field "
                f"{field!r} of table {table.name!r} is {counted(table.rows, 'row')} of {dim}; load "
                "it into another table, or only its rows, by key (--upsert, upsert=True)"
            )
    if keys is None or table.keys is None or len(table.fields) == 1:
        return
    if not _equal(keys, table.keys):
        raise InvalidInputError(
            f"the keys of {incoming.path} differ from those of table {table.name!r}, which has "
            "other fields; put the rows into the order of the table, or load them by key "
            "(--upsert, upsert=True)"
        )


def _equal(keys: Keys, others: Any) -> bool:
    """Compare two sequences of keys in blocks; return whether they are equal."""
    if others is None or len(keys) != len(others):
        return False
    step = 1 << 16
    starts = range(0, len(keys), step)
    return all(list(keys[s : s + step]) == list(others[s : s + step]) for s in starts)


def _new_field(source: Source, dtype: str) -> Field:
    """Return the field for the rows of a file."""
    stored = source.stored()
    whole = stored is not None and stored.dtype == dtype  # 8-bit numbers, which are read as floats
    return Field(source.dim, dtype if whole else source.dtype).of_dtype(dtype)


def _new_spec(incoming: Incoming, fields: dict[str, Field]) -> TableSpec:
    if incoming.rows == 0:
        raise InvalidInputError(f"{incoming.path} holds no rows; a table needs at least one")
    return TableSpec(incoming.rows, fields=fields)
