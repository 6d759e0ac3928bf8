"""Brings a copy of a store to another version of it, by writing only what the copy lacks.

The rows that may differ come from the deltas between both versions, if the store still keeps the
version of the copy; otherwise every row of both is compared. All of it is one commit of the copy,
so that the copy is at its old version or at the new one at every moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tierstore._disk.keys import as_stored
from tierstore._disk.manifest import Manifest, Origin, PayloadInfo
from tierstore._door import Use
from tierstore._html import brief
from tierstore._progress import Overall, Progress
from tierstore._store.alter import alone_to, remove_written, rewritten, take_keys, write_table
from tierstore._store.changes import candidates, same_fields
from tierstore._store.commit import CommitDraft, commit, flush
from tierstore._store.compaction import Folder
from tierstore._store.patching import Source, keys_of
from tierstore._store.payload import Encoded
from tierstore._store.state import State
from tierstore._table.keyed import KeyedTable
from tierstore._table.table import Table, files_of, read_records, write_records
from tierstore.errors import InvalidInputError, VersionError

_BLOCK_BYTES = 4 << 20

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class CopyUpdate:
    """What a copy of a store lacked.

    Attributes:
        path: the copy.
        from_version: the version of the store that the copy was equal to; None for a new copy.
        to_version: the version of the store that it is brought to.
        rows: how many rows are written, by table; tables that lack none are left out.
        whole: tables of which all rows are written: new ones, and those with another shape.
        dropped: tables that the version no longer has.
        payload: whether the payload is another one.
        bytes: bytes of these rows and of the payload.
    """

    __repr__ = brief

    path: Path
    from_version: int | None
    to_version: int
    rows: dict[str, int] = field(default_factory=dict)
    whole: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    payload: bool = False
    bytes: int = 0


def whole_copy(path: Path, source: Source) -> CopyUpdate:
    """Return the update that creates a copy."""
    manifest = source.manifest
    return CopyUpdate(
        path,
        None,
        manifest.version,
        rows={name: table.rows for name, table in source.tables.items()},
        whole=list(source.tables),
        payload=bool(manifest.payload),
        bytes=sum(_nbytes(table, table.rows) for table in source.tables.values())
        + sum(info.size for info in manifest.payload.values()),
    )


def check_copy(where: Path, copy: State, source: Manifest) -> bool:
    """Whether a copy lacks a version; raises unless it is an unchanged copy of an older one."""
    if copy.identity.uuid == source.uuid:
        raise InvalidInputError(f"{where} is the store itself; choose another place for the copy")
    origin, parent = copy.manifest.origin, copy.identity.parent
    uuid = origin.uuid if origin else parent.uuid if parent else None
    if uuid != source.uuid:
        of = f"a copy of the store {uuid}" if uuid else "a store of its own"
        raise InvalidInputError(
            f"{where} is {of}, not a copy of the store {source.uuid}; save a new copy elsewhere"
        )
    if copy.manifest.partitions:
        raise InvalidInputError(
            f"{where} has partitions, which only a new copy gets: save it to another place"
        )
    if origin is None:
        raise VersionError(
            f"{where} was changed after it was copied, or is not a whole copy: its version "
            f"{copy.manifest.version} is its own and would be lost; save a new copy elsewhere, or "
            "restore a version before that"
        )
    if not source.mark:
        raise InvalidInputError(
            f"version {source.version} is of an older format, in which versions cannot be told "
            "apart in copies; commit first"
        )
    if copy.manifest.mark == source.mark:
        return False
    if origin.version > source.version:
        raise VersionError(
            f"{where} is at version {origin.version} of the store already, which is newer than "
            f"{source.version}; save that to another place"
        )
    return True


def lacking(
    copy: State, source: Source, base: Mapping[str, Table], progress: Progress | None = None
) -> CopyUpdate:
    """Return what a copy lacks, without writing it; `base` is as for `update`."""
    plan = _CopyPlan.of(copy, source, base)
    report = Overall(progress, sum(table.rows for table in source.tables.values()))
    rows = {name: table.rows for name, table in plan.whole.items()}
    for name, table in plan.alike.items():
        rows[name] = sum(each.size for each, _ in _differing(copy, base, table))
        rows[name] += table.rows - copy.tables[name].rows
        report.passed(table.rows)
        report(0, 0)
    report.finish()
    return plan.result(copy, source, rows)


def update(
    copy: State,
    folder: Folder,
    source: Source,
    base: Mapping[str, Table],
    progress: Progress | None = None,
) -> CopyUpdate:
    """Write what a copy lacks, as one version; after an error the copy is as before.

    `base` are the tables of the store in the version that the copy has, or none if that version is
    no longer kept.
    """
    done: list[CopyUpdate] = []

    def work(use: Use) -> None:
        plan = _CopyPlan.of(copy, source, base)
        with copy.unless_published(copy.discard):
            draft = _draft(copy, source, plan)
            with copy.unless_published(lambda: remove_written(copy, draft.written)):
                rows = _write(copy, source, base, plan, draft, progress)
                done.append(plan.result(copy, source, rows))
                commit(draft, folder, use, flush)

    alone_to("bring a copy up to date", copy, folder, work)
    return done[0]


@dataclass(frozen=True)
class _CopyPlan:
    """The changes that bring the tables of a copy to a version.

    Attributes:
        alike: tables of the version that the copy has in the same shape: rows are compared.
        whole: those that are written from the first row to the last.
        dropped: tables of the copy that the version lacks.
        payload: whether the payload differs.
    """

    alike: dict[str, Table]
    whole: dict[str, Table]
    dropped: list[str]
    payload: bool

    @classmethod
    def of(cls, copy: State, source: Source, base: Mapping[str, Table]) -> _CopyPlan:
        for error in copy.damaged.values():
            raise error
        alike = {
            name: table
            for name, table in source.tables.items()
            if name in copy.tables and _is_alike(copy.tables[name], table, base.get(name))
        }
        return cls(
            alike,
            {name: table for name, table in source.tables.items() if name not in alike},
            [name for name in copy.tables if name not in source.tables],
            _contents(copy.manifest.payload) != _contents(source.manifest.payload),
        )

    def result(self, copy: State, source: Source, rows: Mapping[str, int]) -> CopyUpdate:
        origin, manifest = copy.manifest.origin, source.manifest
        nbytes = sum(_nbytes(source.tables[name], count) for name, count in rows.items())
        if self.payload:
            nbytes += sum(info.size for info in manifest.payload.values())
        return CopyUpdate(
            Path(copy.directory.path),
            None if origin is None else origin.version,
            manifest.version,
            {name: count for name, count in rows.items() if count},
            list(self.whole),
            self.dropped,
            self.payload,
            nbytes,
        )


def _is_alike(old: Table, new: Table, base: Table | None) -> bool:
    """Whether a table differs from that of a copy in values of rows, scalars and new keys only.

    `base` is as for `update`.
    """
    shapes = [
        (each.spec.backend, each.spec.compression, each.spec.keys, each.spec.grows)
        for each in (old, new)
    ]
    if shapes[0] != shapes[1] or not same_fields(old, new):
        return False
    if old.spec.rows != new.spec.rows and not new.spec.grows:
        return False
    if isinstance(old, KeyedTable) and isinstance(new, KeyedTable):
        return _continues(new, base) or _begins_with_keys_of(new, old)
    return True


def _continues(new: KeyedTable, base: Table | None) -> bool:
    """Whether the manifests say that keys were added since a version, and none removed."""
    if not isinstance(base, KeyedTable) or not files_of(base).moves_rows:
        return False  # in partitions, rows have other numbers in each version
    return files_of(new).continues_keys_of(files_of(base))


def _begins_with_keys_of(new: KeyedTable, old: KeyedTable) -> bool:
    """Whether the first rows have the keys of another table: keys were added, and none removed."""
    if old.rows > new.rows:
        return False
    return all(
        _stored_keys(old, rows) == _stored_keys(new, rows) for rows in _blocks(new, 0, old.rows)
    )


def _stored_keys(table: KeyedTable, rows: Rows) -> dict[str, bytes]:
    """Return the keys of rows as files have them, by ending."""
    parts = files_of(table).key_map.parts_of(rows)
    return {ending: part.tobytes() for ending, part in parts.items()}


def _contents(payload: Mapping[str, PayloadInfo]) -> dict[str, tuple[str, int, int]]:
    return {name: (info.kind, info.size, info.crc32c) for name, info in payload.items()}


def _nbytes(table: Table, rows: int) -> int:
    return rows * table.spec.layout.record_bytes


def _blocks(table: Table, start: int, stop: int) -> Iterator[Rows]:
    step = max(1, _BLOCK_BYTES // table.spec.layout.record_bytes)
    for first in range(start, stop, step):
        yield np.arange(first, min(first + step, stop), dtype=np.int64)


def _differing(
    copy: State, base: Mapping[str, Table], new: Table
) -> Iterator[tuple[Rows, npt.NDArray[np.uint8]]]:
    """Yield, in blocks, the rows of both tables that differ, with their records in the new one."""
    own, old = copy.tables[new.name], base.get(new.name)
    if old is not None and same_fields(old, new):
        every = candidates(old, new)
    else:
        every = _blocks(new, 0, min(own.rows, new.rows))
    for rows in every:
        records = read_records(new, rows)
        differ = (read_records(own, rows) != records).any(axis=1)
        yield rows[differ], records[differ]


def _draft(copy: State, source: Source, plan: _CopyPlan) -> CommitDraft:
    """Write the payload, and return the commit of a version equal to that of the source."""
    manifest = source.manifest
    values = {
        name: Encoded(info.kind, source.payload[name].chunks())
        for name, info in manifest.payload.items()
        if plan.payload
    }
    draft = CommitDraft(copy, manifest.step, values, confirm=True)
    if not plan.payload:
        draft.payload = copy.manifest.payload
    draft.step = manifest.step
    draft.dropped = plan.dropped
    draft.numbers |= {
        "mark": manifest.mark,
        "payload_mark": manifest.payload_mark,
        "origin": Origin(manifest.uuid, manifest.version),
        "commits": manifest.commits,  # by which the records of uses are dated
    }
    return draft


def _write(
    copy: State,
    source: Source,
    base: Mapping[str, Table],
    plan: _CopyPlan,
    draft: CommitDraft,
    progress: Progress | None,
) -> dict[str, int]:
    """Write what differs; return how many rows were written, by table."""
    counts = {name: table.rows for name, table in plan.whole.items()}
    report = Overall(progress, sum(table.rows for table in source.tables.values()))
    if plan.whole:
        copy.check_fit({name: table.spec for name, table in plan.whole.items()})
    for table in plan.whole.values():
        write_table(copy, rewritten(table), draft.written, report)
        report.passed(table.rows)
    for name, table in plan.alike.items():
        own = copy.tables[name]
        counts[name] = _write_rows(copy, base, own, table)
        if own.scalars != table.scalars:
            own.scalars.clear()
            own.scalars.update(table.scalars)
        if isinstance(own, KeyedTable) and isinstance(table, KeyedTable):
            counts[name] += _add_keys(own, table)
        elif keys_of(copy.manifest, name) != keys_of(source.manifest, name):
            take_keys(copy, own, as_stored(table.keys))
        report.passed(table.rows)
        report(0, 0)
    report.finish()
    return counts


def _write_rows(copy: State, base: Mapping[str, Table], own: Table, new: Table) -> int:
    """Write the rows that differ; return their number."""
    count = 0
    for rows, records in _differing(copy, base, new):
        write_records(own, rows, records)
        count += rows.size
    return count


def _add_keys(own: KeyedTable, new: KeyedTable) -> int:
    """Add the keys that the copy lacks, with their rows."""
    first = own.rows
    for rows in _blocks(new, first, new.rows):
        own.get_or_add(new.keys_of(rows))
        write_records(own, rows, read_records(new, rows))
    return new.rows - first
