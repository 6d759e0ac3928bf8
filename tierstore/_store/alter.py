"""Schema changes: rewrite tables in a new shape, and switch to them in one commit.

The records are streamed into new generations beside the old ones, which remain as long as a kept
version names them. No fold may be in progress, since it writes to the old generations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import _io
from tierstore._disk import generation as generations
from tierstore._disk.key_log import write_keys_of
from tierstore._disk.keys import as_stored, write_keys
from tierstore._disk.manifest import KeysInfo, TableInfo
from tierstore._door import Use
from tierstore._keys.given import given, joined
from tierstore._progress import Overall, Progress, report_nothing
from tierstore._store.commit import CommitDraft, commit, settle
from tierstore._store.compaction import Folder
from tierstore._store.state import State
from tierstore._strictjson import json_values
from tierstore._table.keyed import KeyedTable, codes_of
from tierstore._table.table import Table, records_in
from tierstore._table.values import to_bytes
from tierstore.errors import (
    ExistsError,
    InvalidInputError,
    InvalidTypeError,
    UnknownNameError,
    counted,
)
from tierstore.initializers import Initializer
from tierstore.spec import USES, Field, TableSpec

_BLOCK_ROWS = 1 << 14

Records = npt.NDArray[np.uint8]
Blocks = Iterator[Records]


@dataclass(frozen=True)
class Rewrite:
    """A table to write; if `blocks` is None, the initializers produce the records.

    One that was `made` already, in a generation that no manifest names yet, is taken as it is.
    `keeps_rows`: it is in place of a table of this name, and each of its rows means the same there.
    `changed` is how many rows are new or others than before; None if all may be.
    In a store in partitions `spec` and `keys` are those of the whole table, and `blocks` the
    records of the rows of this rank.
    """

    name: str
    spec: TableSpec
    blocks: Iterable[Records] | None = None
    scalars: Mapping[str, Any] = field(default_factory=dict)
    keys: Sequence[Any] | None = None
    made: TableInfo | None = None
    keeps_rows: bool = False
    changed: int | None = None


def alone_to(change: str, state: State, folder: Folder, work: Callable[[Use], None]) -> None:
    """Exclusive use of the store, without a fold in progress, for a separate commit.

    This is not a generator-based context manager, because an interrupt on exit could leave that
    unfinished.
    """
    with state.door.use(write=True) as use, state.alone(change), state.interruptible(use):
        settle(state, folder)
        work(use)


def commit_alone(
    change: str,
    state: State,
    folder: Folder,
    write: Callable[[CommitDraft], None],
    undo: Callable[[CommitDraft], None],
) -> None:
    """Commit what `write` puts into a draft, as a version that is otherwise unchanged.

    Everything else must be committed. `undo` removes what no version will name.
    """

    def work(use: Use) -> None:
        draft = CommitDraft(state, None, None, confirm=True)
        with state.unless_published(lambda: undo(draft)):
            commit(draft, folder, use, write)

    alone_to(change, state, folder, work)


def rewrite(
    change: str,
    state: State,
    folder: Folder,
    tables: Callable[[State], Sequence[Rewrite]],
    *,
    drop: Collection[str] = (),
    progress: Progress | None = None,
) -> None:
    """Write new or existing tables, remove those in `drop`, and commit all as one version.

    `change` says in errors what it is. `tables` is called when no other thread uses the store.
    Table objects stay valid.
    """

    def write(draft: CommitDraft) -> None:
        found = tables(state)
        state.check_clean(change)
        if found:
            state.check_fit({each.name: each.spec for each in found})
        draft.dropped = [name for name in drop if name in state.manifest.tables]
        draft.kept = [each.name for each in found if each.keeps_rows]
        draft.rewritten = {each.name: each.changed for each in found if each.changed is not None}
        report = Overall(progress, sum(each.spec.rows for each in found))
        for each in found:
            write_table(state, each, draft.written, report)
            report.passed(each.spec.rows)
        report.finish()

    commit_alone(change, state, folder, write, lambda draft: remove_written(state, draft.written))


def write_table(
    state: State, table: Rewrite, written: dict[str, TableInfo], report: Progress
) -> None:
    """Write a new, durable generation of a table and record it in `written`."""
    scalars = json_values(table.scalars)
    if table.made is not None:
        written[table.name] = dataclasses.replace(table.made, scalars=scalars)
        return
    if not state.directory.exists(table.name):
        state.directory.make_directory(table.name).close()
    with state.directory.directory(table.name) as directory:
        seq = state.ledger.next_number()
        info = generations.create(directory, table.spec, seq, table.blocks, report)
        written[table.name] = info = dataclasses.replace(info, scalars=scalars)
        if table.keys is not None:
            with directory.directory(info.generation) as generation:
                keys = write_keys_of(generation, table.spec, table.keys)
            written[table.name] = dataclasses.replace(info, keys=keys)


def remove_written(state: State, written: Mapping[str, TableInfo]) -> None:
    """Remove generations that no version will name."""
    for name, info in written.items():
        with state.directory.directory(name) as directory:
            generations.remove_generation(directory, info.generation)


def replaced(
    state: State,
    name: str,
    spec: TableSpec,
    blocks: Iterable[Records] | None,
    keys: Sequence[Any] | None,
    changed: int | None = None,
) -> Rewrite:
    """Return a new or existing table with these records; keys stay if the row count does."""
    if not isinstance(spec, TableSpec):
        raise InvalidTypeError(f"table {name!r} needs a tierstore.TableSpec, not {spec!r}")
    old, known = state.tables.get(name), state.manifest.tables.get(name)
    if blocks is not None:
        state.check_given(name, spec)
    if known is not None and known.spec.keys != spec.keys:
        raise InvalidInputError(
            f"table {name!r} has {known.spec.keys or 'no'} keys and the new one "
            f"{spec.keys or 'none'}: drop it, then make one of that name"
        )
    if spec.keys is not None and (blocks is None) != (keys is None):
        raise InvalidInputError(f"table {name!r} is by key: give blocks= and keys=, or neither")
    if spec.keys is not None and known is not None and blocks is not None:
        raise InvalidInputError(
            f"table {name!r} is by key, and has others too: write these rows, "
            f"store[{name!r}].write(keys, rows)"
        )
    if old is not None:
        if keys is None and spec.keys is None and state.whole(name).rows == spec.rows:
            keys = state.keys_of(name)
        return Rewrite(name, spec, blocks, old.scalars, keys, changed=changed)
    scalars = {} if known is None else known.scalars
    return Rewrite(name, spec, blocks, scalars, keys, changed=changed)


def rewritten(table: Table) -> Rewrite:
    """Return a table as it is, of this or another store."""
    return Rewrite(table.name, table.spec, records_in(table), table.scalars, as_stored(table.keys))


def _continued(
    table: Table, spec: TableSpec, blocks: Iterable[Records], keys: Any, changed: int | None = None
) -> Rewrite:
    """Return a table in another shape, whose rows are those that it has, and more after them."""
    return Rewrite(table.name, spec, blocks, table.scalars, keys, keeps_rows=True, changed=changed)


def renamed(state: State, name: str, new: str) -> Rewrite:
    """Return a table under another name, which is also the name of its directory."""
    spec, keys = dataclasses.replace(state.whole(name), sparse=False), state.keys_of(name)
    return Rewrite(new, spec, state.records(name), state.tables[name].scalars, keys, changed=0)


def altered(
    state: State,
    name: str,
    *,
    add: Mapping[str, Field] | None = None,
    drop: Collection[str] = (),
    dtype: Any = None,
    backend: str | None = None,
    compression: str | None = "keep",
    chunk_rows: int | None = None,
) -> Rewrite:
    """Return a table with other fields, element types or another backend; values are converted."""
    table, whole = state.tables[name], state.whole(name)
    fields = _altered_fields(table, whole.rows, add or {}, drop, dtype)
    state.check_added(name, add or {})
    backend = whole.backend if backend is None else backend
    if compression == "keep":
        compression = whole.compression if backend == whole.backend else None
    spec = TableSpec(
        whole.rows,
        fields=fields,
        backend=backend,
        compression=compression,
        chunk_rows=chunk_rows,
        keys=whole.keys,
        grows=whole.grows and backend == whole.backend,
        track_uses=whole.track_uses and USES in fields,
        admit_after=whole.admit_after,
    )
    return _continued(table, spec, _converted(state, table, spec), state.keys_of(name))


def _altered_fields(
    table: Table, rows: int, add: Mapping[str, Field], drop: Collection[str], dtype: Any
) -> dict[str, Field]:
    old = table.fields
    if not isinstance(add, Mapping) or not all(isinstance(each, Field) for each in add.values()):
        raise InvalidTypeError(f"fields are a dict from name to tierstore.Field, not {add!r}")
    for name in add:
        if name in old:
            raise ExistsError(f"table {table.name!r} already has a field {name!r}")
    dtypes = (
        dtype if isinstance(dtype, Mapping) else {} if dtype is None else {next(iter(old)): dtype}
    )
    drop = [drop] if isinstance(drop, str) else drop
    for name in (*drop, *dtypes):
        if name not in old:
            raise UnknownNameError(
                f"table {table.name!r} has no field {name!r}; it has {', '.join(old)}"
            )
    if not add and set(old) <= set(drop):
        raise InvalidInputError(f"table {table.name!r} needs at least one field; drop the table")
    kept = {
        name: item.of_dtype(dtypes[name]) if name in dtypes else item
        for name, item in old.items()
        if name not in drop
    }
    new = {
        name: dataclasses.replace(
            item, init=item.init and item.init.bound(table.name, (rows, item.dim))
        )
        for name, item in add.items()
    }
    return {**kept, **new}


def grown(state: State, name: str, rows: int, init: Initializer | None, keys: Any) -> Rewrite:
    """Return a table with more rows, initialized by `init` or the table's own initializers."""
    table, whole = state.tables[name], state.whole(name)
    if rows < whole.rows:
        raise InvalidInputError(
            f"a table cannot shrink: {counted(whole.rows, 'row')} to {rows}; `rows` is how many "
            "there are to be in all"
        )
    spec = _with_rows(whole, rows)
    if init is not None:
        first, item = next(iter(spec.fields.items()))
        fields = {**spec.fields, first: dataclasses.replace(item, init=init)}
        spec = dataclasses.replace(spec, fields=fields, init=None)
    if spec.keys is not None:
        state.check_given(name, spec)
        if keys is not None:
            raise InvalidInputError(f"table {name!r} is by key: write the rows of new keys")
        return _continued(table, spec, state.records(name), state.keys_of(name), 0)
    every = more_keys(state, name, rows - whole.rows, keys)
    new = generations.initial_records(spec, whole.rows)
    return _continued(table, spec, _and_more(state, name, new), every, rows - whole.rows)


def appended(state: State, name: str, rows: Any, keys: Sequence[Any] | None) -> Rewrite:
    """Return a table with these rows appended; omitted fields are zero."""
    table, whole = state.tables[name], state.whole(name)
    if isinstance(table, KeyedTable):
        raise InvalidInputError(f"table {name!r} is by key: write the rows of new keys")
    new = records_of(table, rows)
    spec = _with_rows(whole, whole.rows + len(new))
    every = more_keys(state, name, len(new), keys)
    return _continued(table, spec, _and_more(state, name, iter([new])), every, len(new))


def _and_more(state: State, name: str, new: Blocks) -> Blocks:
    """Yield the records of a table, and those of the rows after them."""
    yield from state.records(name)
    yield from state.own(state.whole(name).rows, new)


def records_of(table: Table, rows: Any) -> Records:
    """Return rows to append, of the first field or by field, as records of a table."""
    given = rows if isinstance(rows, Mapping) else {next(iter(table.fields)): rows}
    values = {name: _field_bytes(table, name, each) for name, each in given.items()}
    counts = {name: len(each) for name, each in values.items()}
    if len(set(counts.values())) != 1:
        raise InvalidInputError(f"give the same number of rows for all fields: {counts or 'none'}")
    layout = table.spec.layout
    new = np.zeros((next(iter(counts.values())), layout.record_bytes), np.uint8)
    for name, each in values.items():
        lo, hi = layout.span(name)
        new[:, lo:hi] = each
    return new


def _field_bytes(table: Table, name: str, values: Any) -> Records:
    shape = getattr(values, "shape", None)
    count = len(values) if shape is None else shape[0] if len(shape) else 0
    return to_bytes(values, table.spec.layout.field(name), (count,), name)


def _with_rows(spec: TableSpec, rows: int) -> TableSpec:
    return dataclasses.replace(spec, rows=rows, chunk_rows=None)


def more_keys(state: State, name: str, count: int, keys: Sequence[Any] | None) -> Any:
    """Return the external keys of a table and those of `count` new rows; None if it has none."""
    own = state.keys_of(name)
    if own is None:
        if keys is not None:
            raise InvalidInputError(f"table {name!r} has no keys; set_keys first")
        return None
    if keys is None or len(keys) != count:
        raise InvalidInputError(
            f"the rows of table {name!r} have keys: give keys= for the {count} new rows"
        )
    own = given(as_stored(own))
    return joined(own, given(keys)) if count else own


def set_keys(
    state: State,
    folder: Folder,
    table: Table,
    keys: Sequence[Any] | None,
    *,
    commit: bool,
    progress: Progress | None = None,
) -> None:
    """Set or remove the external keys of a table's rows, and commit or leave that to the next."""
    _check_numbered(table)

    def write(draft: CommitDraft) -> None:
        state.check_clean(f"set keys of table {table.name!r}")
        take_keys(state, table, keys, progress)

    def undo(draft: CommitDraft) -> None:
        state.drop_coming_keys(table.name)

    if commit:
        commit_alone("set keys", state, folder, write, undo)
        return
    with state.door.use(write=True) as use, state.alone("set keys"):

        def report(done: int, total: int) -> None:
            if progress is not None:
                with use.interruptible():
                    progress(done, total)

        take_keys(state, table, keys, report)


def take_keys(
    state: State, table: Table, keys: Sequence[Any] | None, progress: Progress | None = None
) -> None:
    """Set or remove the keys of a table's rows; they are part of the next commit."""
    on = state.backings[table.name]
    with on.generation.directory.use() as directory:
        written = _written_keys(directory, keys, table.rows, progress)
    state.drop_coming_keys(table.name)
    state.touched.keys[table.name] = written
    on.forget_keys()


def _written_keys(
    directory: _io.Directory, keys: Sequence[Any] | None, rows: int, progress: Progress | None
) -> KeysInfo | None:
    if keys is None:
        report_nothing(progress)
        return None
    return write_keys(directory, keys, rows, progress=progress)


def _check_numbered(table: Table) -> None:
    if isinstance(table, KeyedTable):
        raise InvalidInputError(f"table {table.name!r} is by key: its keys come with their rows")


def _converted(state: State, table: Table, spec: TableSpec) -> Blocks:
    """Yield the records of a table in the layout of `spec`; initialize new fields."""
    old, new = table.spec.layout, spec.layout
    drawn = {
        name: dataclasses.replace(item, init=None if name in table.fields else item.init)
        for name, item in spec.fields.items()
    }
    drawing = dataclasses.replace(spec, fields=drawn, init=None)
    if isinstance(table, KeyedTable):
        initial = _first_records(table, drawing)
    else:
        initial = state.first_records(table, drawing)
    fresh = np.empty((0, new.record_bytes), np.uint8)
    for block in state.records(table.name):
        while len(fresh) < len(block):
            fresh = np.concatenate([fresh, next(initial)])
        records, fresh = fresh[: len(block)], fresh[len(block) :]
        for name, item in spec.fields.items():
            if name not in table.fields:
                continue
            if item.form == table.fields[name].form:
                (lo, hi), (begin, end) = old.span(name), new.span(name)
                records[:, begin:end] = block[:, lo:hi]
            else:
                values = table.fields[name].element.decode(old.view(block, name))
                new.view(records, name)[:] = _encoded(values, item, table.name, name)
        yield records


def _first_records(table: KeyedTable, spec: TableSpec) -> Blocks:
    """Yield the first records of the keys of a table, in the order of its rows."""
    for start in range(0, table.rows, _BLOCK_ROWS):
        rows = np.arange(start, min(start + _BLOCK_ROWS, table.rows))
        yield generations.first_records(spec, codes_of(table, rows))


def _encoded(values: npt.NDArray[Any], item: Field, table: str, name: str) -> npt.NDArray[Any]:
    """Convert values to stored elements; raise InvalidInputError if one is out of range."""
    stored = item.element.encode(values)
    lost = item.element.overflowed(values, stored)
    if lost:
        largest = np.max(np.abs(values), where=np.isfinite(values), initial=0)
        raise InvalidInputError(
            f"table {table!r}, field {name!r}: {counted(lost, 'value does', 'values do')} not fit "
            f"in {item.dtype}, the largest is {largest:g}; scale them first, or choose a wider type"
        )
    return stored
