"""Exports one field of a table to a file for other tools."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import numpy.typing as npt

from tierstore._dtypes import (
    DEFAULT_DTYPE,
    ELEMENT_TYPES,
    Converter,
    DTypeName,
    ElementType,
    check_dtype,
)
from tierstore._formats import format_of, keys_beside, locate, open_sink, read_keys
from tierstore._formats.base import block_rows_for
from tierstore._formats.keys import typed
from tierstore._html import brief
from tierstore._kinds import check_table
from tierstore._progress import Shown, report_nothing, shown
from tierstore._store.versions import refuse_inside_store
from tierstore._table.keyed import RowKeys
from tierstore._table.table import read_records
from tierstore.budget import DEFAULT_MEMORY, Size
from tierstore.errors import (
    InvalidInputError,
    InvalidTypeError,
    RowIndexError,
    UnknownNameError,
    counted,
)

if TYPE_CHECKING:
    from tierstore._table.table import Table
    from tierstore.spec import Field

__all__ = ["ExportResult", "export_table"]


@dataclass(frozen=True)
class ExportResult:
    """The result of an export.

    Attributes:
        path: the file, the directory of a `.zarr`, or the name of a zarr store.
        rows: number of rows written.
        dim: number of elements per row, of all fields.
        dtype: element type in the file.
        bytes: size of the file, of all files in the directory, or of the matrix in a zarr store.
        overflowed: number of finite values that became infinite in the conversion to `dtype`.
        skipped: ids of damaged rows, written as NaN, in ascending order.
        notes: what was not written, a sentence each.
    """

    __repr__ = brief

    path: Path
    rows: int
    dim: int
    dtype: str
    bytes: int
    overflowed: int
    skipped: list[int] = dataclasses.field(default_factory=list)
    notes: tuple[str, ...] = ()


def export_table(
    table: Table,
    out: Any,
    *,
    field: str | Sequence[str] | None = None,
    rows: tuple[int, int] | Sequence[int] | npt.NDArray[np.integer[Any]] | None = None,
    dtype: DTypeName | None = None,
    keys: Any = None,
    names: Mapping[str, str] | None = None,
    memory: Size = DEFAULT_MEMORY,
    header: bool = True,
    force: bool = False,
    damaged: Literal["raise", "skip"] = "raise",
    progress: Shown = None,
) -> ExportResult:
    """Stream rows `(n, dim)` of a field to a file; the suffix of `out` selects the format.

    The file appears complete and synced, or not at all. It includes uncommitted rows.

    Args:
        table: the table to read; caches are neither filled nor emptied.
        out: the file: `.npy`, `.npz`, `.safetensors`, `.parquet`, `.zarr`, `.vec`, `.txt`, `.tsv`,
            `.csv`, `.bin`, `.arrow`, `.feather`, `.fvecs`, `.fbin` or `.projector`. `.gz`, `.bz2`,
            `.xz` or `.zst` after the suffix of a text packs it. A URL for
            fsspec, such as "s3://bucket/items.parquet", is accepted for all but `.projector`. A
            `.zarr` at a URL, and a zarr store, which are accepted too, have no rename, so readers
            see them grow, and `import_table` refuses them until they are complete.
        field: the field to write, the first if None; or a list of fields, each of which becomes a
            column of a `.parquet`, `.arrow` or `.feather` file, all of one element type: the
            narrowest that holds their values exactly, or `dtype`.
        rows: the range of rows as a tuple (start, stop), or a list or array of row ids in any
            order; all rows if None.
        dtype: element type to convert to, rounding to nearest; that of the field if None, and
            float32 for a field with scales. If the format cannot hold a half-precision type,
            float32 is written, which is exact. "int8" and "uint8" quantise floats: a scale for each
            row is written beside them, `weight_scale`, which `.npz`, `.safetensors`, `.zarr`,
            `.parquet`, `.arrow` and `.feather` files of one field can hold.
        keys: one key for each row of the table or of `rows`, or a file of keys: .txt, .npy or
            FILE.parquet:COLUMN. None uses the table's keys. They are written next to a file that
            cannot hold them: `items.keys.npy` for `items.npy`. Without keys, `.vec`, `.bin` and
            `.tsv` number the rows; of a list of ids, the ids are the keys.
        names: other names in the file than those of the fields, by field, and of the column of
            keys, by "key". In `.csv` and `.tsv`, which have a column for each number, "f{}" names
            them f0, f1, …, and a name without {} name_0, name_1, ….
        memory: limit in bytes for reading a file of keys.
        header: whether a text begins with a line of names (`.csv`, `.tsv`) or of counts (`.vec`,
            `.txt`); GloVe files have none.
        force: replace an existing file.
        damaged: "raise" CorruptRowError for damaged rows, or "skip" them: they are written as NaN,
            so the other rows keep their positions. A list of ids cannot be skipped.
        progress: called with the number of rows done and the total; True shows a bar.

    Returns:
        What was written. Values too large for `dtype` become infinite; they are counted, and a
        warning gives the number.

    Raises:
        ClosedError: rows of a table by key got other keys meanwhile: by a removal, a rollback or a
            refresh in another thread.
        ExistsError: `out` exists, or is a link or a directory.
        FormatError: the file of keys is missing, damaged or needs more than `memory`.
        InvalidInputError: the suffix is unknown, the format cannot hold the keys or the dtype, or
            the file is inside a store.
        RowIndexError: `rows` is outside the table.
        UnknownNameError: the table has no such field.
        StoreFullError, StoreIOError: the file system failed.
    """
    progress = shown(progress)
    check_table(table, "export_table")
    target = locate(out, write=True)
    path, elsewhere = target.path, target.store is not None or target.url is not None
    if not elsewhere:
        refuse_inside_store(path)
    fields = _checked_fields(table, field)
    wanted = _common_dtype(fields) if dtype is None else check_dtype(dtype)
    scaled = wanted if _needs_scales(fields, wanted) else None
    wanted = wanted if scaled is None else DEFAULT_DTYPE
    own: object = table.keys
    settled = own.settled() if isinstance(own, RowKeys) else None
    count = table.rows if settled is None else len(settled)  # keys may come meanwhile
    ids = None
    if rows is None or isinstance(rows, tuple):
        start, stop = _checked_range(cast("tuple[int, int] | None", rows), count)
    else:
        ids = _checked_ids(rows, count)
        start, stop = 0, len(ids)
    if ids is not None and damaged == "skip":
        raise InvalidInputError("damaged rows of a list of ids cannot be skipped: leave them out")
    if isinstance(keys, str | os.PathLike):
        keys = read_keys(os.fspath(keys), memory=memory)
    known = own if settled is None else settled
    keys = known if keys is None else typed(keys)
    keys = ids if keys is None else _keys_of(keys, count, start, stop, ids)
    columns = [
        _OutColumn(table, name, wanted, skips=_checked_choice(damaged) == "skip") for name in fields
    ]
    named = _named(fields, names or {})
    done, dim = 0, sum(named.values())

    with open_sink(
        target,
        rows=stop - start,
        dim=dim,
        dtype=wanted,
        field=named,
        key=(names or {}).get("key"),
        keys=keys,
        first_row=start,
        header=header,
        scaled=scaled,
        force=force,
    ) as sink:
        size = block_rows_for(sum(item.nbytes for item in fields.values()))
        blocks = [each.blocks(start, stop, ids, size) for each in columns]
        for parts in zip(*blocks, strict=True):
            if settled is not None:
                settled.check_settled()
            sink.write(parts[0] if len(parts) == 1 else np.hstack(parts))
            done += len(parts[0])
            if progress is not None:
                progress(done, stop - start)
        if start == stop:
            report_nothing(progress)

    for each in columns:
        each.converter.warn(f"field {each.name!r}")
    width = dim * ELEMENT_TYPES[sink.dtype].stored.itemsize
    return ExportResult(
        path,
        stop - start,
        dim,
        sink.dtype,
        (stop - start) * width if elsewhere else _size(path),
        sum(each.converter.overflowed for each in columns),
        sorted({row for each in columns for row in each.skipped}),
        _notes(path, next(iter(named)) if scaled else None, keyed=keys is not None),
    )


def _checked_fields(table: Table, field: str | Sequence[str] | None) -> dict[str, Field]:
    """Return the fields to write by name; raises UnknownNameError."""
    if field is None:
        field = next(iter(table.fields))
    names = [field] if isinstance(field, str) else list(field)
    for name in names:
        if name not in table.fields:
            raise UnknownNameError(
                f"table {table.name!r} has no field {name!r}, only {', '.join(table.fields)}"
            )
    if not names or len(set(names)) < len(names):
        raise InvalidInputError(f"name each field once, and at least one, not {names}")
    return {name: table.fields[name] for name in names}


def _named(fields: Mapping[str, Field], names: Mapping[str, str]) -> dict[str, int]:
    """Return the names of fields in the file, and their dims; raises for names of no field."""
    for name in names:
        if name != "key" and name not in fields:
            raise UnknownNameError(f"no field {name!r} is written, only {', '.join(fields)}")
    dims = {names.get(name, name): item.dim for name, item in fields.items()}
    if len(dims) < len(fields) or not all(names.values()):
        raise InvalidInputError(f"give each field a name of its own, not {dict(names)}")
    return dims


def _common_dtype(fields: Mapping[str, Field]) -> str:
    """Return the narrowest element type that holds the values of all fields exactly."""
    able = [
        each
        for each in ELEMENT_TYPES.values()
        if all(each.accepts(_read_as(item)) for item in fields.values())
    ]
    return min(able, key=lambda each: each.stored.itemsize).name


def _read_as(item: Field) -> str:
    """Return the element type of the values of a field: of a scaled one, float32."""
    return item.dtype if item.scaled is None else DEFAULT_DTYPE


def _needs_scales(fields: Mapping[str, Field], dtype: str) -> bool:
    """Whether fields of floats would be rounded to whole numbers but for scales."""
    whole = all(item.scaled is None and item.element.integer for item in fields.values())
    return ELEMENT_TYPES[dtype].integer and not whole


class _OutColumn:
    """A field that is written, converted block by block.

    Attributes:
        name: of the field.
        converter: counts the values that are too large for the type in the file.
        skipped: ids of damaged rows, written as NaN; empty unless they are to be skipped.
    """

    def __init__(self, table: Table, name: str, dtype: str, *, skips: bool) -> None:
        self.name = name
        self.converter = Converter(table.fields[name].element, ELEMENT_TYPES[dtype])
        self.skipped: list[int] = []
        self._table = table
        self._skips = skips

    def blocks(
        self, start: int, stop: int, ids: npt.NDArray[np.int64] | None, size: int
    ) -> Iterator[npt.NDArray[Any]]:
        """Yield rows start..stop-1, or those of `ids`, in blocks of `size`."""
        if ids is not None:
            yield from map(self.converter, _chosen(self._table, self.name, ids, size))
            return
        damaged = self.skipped if self._skips else None
        scanned = self._table.scan(
            self.name, start=start, stop=stop, block_rows=size, raw=True, damaged=damaged
        )
        for block in scanned:
            _blank(block, self._table.fields[self.name].element, start, self.skipped)
            start += len(block)
            yield self.converter(block)


def _notes(path: Path, scaled: str | None, *, keyed: bool) -> tuple[str, ...]:
    """Return what is not in the file, or beside the field `scaled`, a sentence each."""
    notes = []
    if scaled is not None:
        notes.append(
            f"a value is its element times the scale of its row, which {scaled}_scale holds"
        )
    if keyed and format_of(path, write=True).keys == "never":
        beside = keys_beside(path).name
        notes.append(f"the keys are in {beside}, as {path.suffix} files hold none")
    return tuple(notes)


def _checked_choice(damaged: str) -> str:
    if damaged not in ("raise", "skip"):
        raise InvalidInputError(f"damaged must be 'raise' or 'skip', not {damaged!r}")
    return damaged


def _blank(block: Any, element: ElementType, first: int, skipped: list[int]) -> None:
    """Set the skipped rows of a block that starts at row `first` to NaN."""
    nan = element.nan()
    if skipped and nan is None:
        raise InvalidInputError(
            f"{counted(len(skipped), 'row is', 'rows are')} damaged, the first is row "
            f"{skipped[0]}, and {element.name} has no NaN to mark them: repair the store first "
            "(tierstore repair)"
        )
    for row in reversed(skipped):
        if row < first:
            break
        block[row - first] = nan


def _checked_range(rows: tuple[int, int] | None, count: int) -> tuple[int, int]:
    if rows is None:
        return 0, count
    start, stop = rows
    if not (0 <= start <= count and 0 <= stop <= count):
        raise RowIndexError(f"rows {start}:{stop} are outside the table's 0:{count}")
    if start > stop:
        raise InvalidInputError(f"rows {start}:{stop} end before they start")
    return start, stop


def _checked_ids(rows: Any, count: int) -> npt.NDArray[np.int64]:
    ids = np.asarray(rows)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InvalidTypeError("rows is a tuple (start, stop), or a list of whole numbers")
    wrong = (ids < 0) | (ids >= count)
    if wrong.any():
        raise RowIndexError(f"row {ids[wrong][0]} is outside the table's 0:{count}")
    return ids.astype(np.int64)


def _chosen(
    table: Table, field: str, ids: npt.NDArray[np.int64], size: int
) -> Iterator[npt.NDArray[Any]]:
    """Yield a field of some rows as it is stored, in blocks."""
    for start in range(0, len(ids), size):
        records = read_records(table, ids[start : start + size])
        yield np.ascontiguousarray(table.spec.layout.view(records, field))


def _keys_of(keys: Any, rows: int, start: int, stop: int, ids: npt.NDArray[np.int64] | None) -> Any:
    """Return the keys of rows start..stop-1 of so many, or of `ids`."""
    if ids is not None and len(keys) == rows:
        if hasattr(keys, "lookup") or isinstance(keys, np.ndarray):
            return keys[ids]
        return [keys[row] for row in ids.tolist()]
    if len(keys) not in (rows, stop - start):
        raise InvalidInputError(
            f"{counted(len(keys), 'key was', 'keys were')} given; give one for each of the "
            f"{counted(rows, 'row')} of the table"
            + (f" or of the {stop - start} rows to write" if stop - start != rows else "")
            + "; to choose rows by key, name their ids (rows=, --keys-from)"
        )
    return keys if len(keys) == stop - start else keys[start:stop]


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)
