"""Patches: files with the rows that changed between two versions, applied to copies of a store.

    head       one line of JSON with its crc32c, see `_Head`
    tables     for each in the head: n ids int64, n records, n checksums uint32, crc32c of both
    payload    the bytes of each value in the head

A patch follows one version, identified by its mark, and makes another with the mark of the
original, so that patches apply in order and pointers to the original are valid in the copy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import _checksum, _io
from tierstore._disk.manifest import UUID, Manifest, Origin
from tierstore._rowcopy import ascends
from tierstore._store.changes import changed_rows, same_fields
from tierstore._store.commit import CommitDraft, commit, flush
from tierstore._store.compaction import Folder
from tierstore._store.payload import Encoded, Payload
from tierstore._store.state import State
from tierstore._strictjson import Section, canonical, seal, unseal
from tierstore._table.table import Table, read_records, write_records
from tierstore.errors import (
    FormatError,
    InvalidInputError,
    MissingFileError,
    VersionError,
    counted,
)
from tierstore.spec import TableSpec

_FORMAT = 1
_MAX_HEAD = 16 << 20
_BLOCK_BYTES = 4 << 20
_INSTEAD = "bring the copy up to date with update_copy, 'tierstore save --incremental'"
_MADE = "a patch is a file that write_patch or 'tierstore diff --out' made"

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PatchInfo:
    """What a patch contains.

    Attributes:
        path: the file.
        store: uuid of the store it was made from.
        from_version: the version that it follows.
        to_version: the version that it leads to.
        rows: how many rows it changes, by table.
        bytes: size of the file.
    """

    path: Path
    store: str
    from_version: int
    to_version: int
    rows: dict[str, int]
    bytes: int


@dataclass(frozen=True)
class Source:
    """A version to make a patch from or to."""

    manifest: Manifest
    tables: Mapping[str, Table]
    payload: Mapping[str, Payload]


def write_patch(
    path: str | os.PathLike[str], old: Source, new: Source, *, force: bool
) -> PatchInfo:
    """Write the rows, scalars and payload in which `new` differs from `old` to a file.

    Raises InvalidInputError if anything else differs.
    """
    _check_alike(old, new)
    before, after = old.manifest, new.manifest
    rows = changed_rows(old.tables, new.tables)
    for name in rows if after.partitions else ():
        if after.tables[name].spec.keys is not None:
            raise InvalidInputError(
                f"rows of table {name!r}, which is by key, differ between versions "
                f"{before.version} and {after.version}, and in a store with partitions they have "
                "no numbers of their own; save a new copy instead"
            )
    told = {name: info.scalars for name, info in before.tables.items()}
    tables = {
        name: _described(table, rows.get(name, np.empty(0, np.int64)))
        for name, table in new.tables.items()
        if name in rows or table.scalars != told[name]
    }
    payload = {} if after.payload == before.payload else dict(after.payload)
    head = {
        "format": _FORMAT,
        "store": after.uuid,
        "from": {"version": before.version, "mark": before.mark},
        "to": {
            "version": after.version,
            "mark": after.mark,
            "payload_mark": after.payload_mark,
            "commits": after.commits,
        },
        "step": after.step,
        "tables": tables,
        "payload": None
        if after.payload == before.payload
        else {
            name: {"kind": info.kind, "size": info.size, "crc32c": info.crc32c}
            for name, info in payload.items()
        },
    }
    target = Path(path)
    with _io.publish(target, force=force) as temporary, temporary.open("wb") as file:
        file.write(seal(canonical(head)))
        for name in tables:
            for chunk in _body(new.tables[name], rows.get(name, np.empty(0, np.int64))):
                file.write(chunk)
        for name in payload:
            file.writelines(new.payload[name].chunks())
    counts = {name: each.size for name, each in rows.items()}
    size = target.stat().st_size
    return PatchInfo(target, after.uuid, before.version, after.version, counts, size)


def _check_alike(old: Source, new: Source) -> None:
    """Raise InvalidInputError unless only rows, scalars, step and payload differ."""
    between = f"versions {old.manifest.version} and {new.manifest.version}"
    if not (old.manifest.mark and new.manifest.mark):
        raise InvalidInputError(
            f"{between} are of an older format, in which versions cannot be told apart in copies; "
            "commit twice and make a patch between these commits"
        )
    if only := sorted(set(old.tables) ^ set(new.tables)):
        raise InvalidInputError(
            f"{between} have different tables, as only one has {only[0]!r}; {_INSTEAD}"
        )
    for name, table in new.tables.items():
        other = old.tables[name]
        if table.rows != other.rows or not same_fields(other, table):
            raise InvalidInputError(
                f"table {name!r} has other rows or fields in {between}, and a patch changes values "
                f"only; {_INSTEAD}"
            )
        if keys_of(new.manifest, name) != keys_of(old.manifest, name):
            raise InvalidInputError(
                f"table {name!r} has other keys in {between}, and a patch changes values only; "
                f"{_INSTEAD}"
            )


def keys_of(manifest: Manifest, name: str) -> object:
    """Return what identifies the contents of a table's keys, in any generation."""
    keys = manifest.tables[name].keys
    return None if keys is None else (keys.kind, sorted(keys.files.values()))


def _described(table: Table, rows: Rows) -> dict[str, Any]:
    return {
        "rows": table.rows,
        "record_bytes": table.spec.layout.record_bytes,
        "fields": [[name, item.dim, item.form] for name, item in table.fields.items()],
        "changed": rows.size,
        "scalars": dict(table.scalars),
    }


def _blocks(count: int, record_bytes: int) -> Iterator[slice]:
    step = max(1, _BLOCK_BYTES // record_bytes)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _body(table: Table, rows: Rows) -> Iterator[bytes]:
    """Yield the ids, records and checksums of rows."""
    ids = rows.astype("<i8").tobytes()
    yield ids
    sums = b""
    for part in _blocks(rows.size, table.spec.layout.record_bytes):
        records = read_records(table, rows[part])
        yield records.tobytes()
        sums += _checksum.row_checksums(rows[part], records).astype("<u4").tobytes()
    yield sums
    yield _checksum.crc32c(sums, _checksum.crc32c(ids)).to_bytes(4, "little")


@dataclass(frozen=True)
class Change:
    """The rows of one table in a patch, which start at `offset` of the file."""

    name: str
    rows: int
    record_bytes: int
    fields: list[Any]
    changed: int
    scalars: dict[str, Any]
    offset: int

    @property
    def size(self) -> int:
        """Its size in the file: ids, records, checksums and the checksum of these."""
        return self.changed * (self.record_bytes + 12) + 4


class Patch:
    """A patch, open for reading, whose head and size are checked."""

    def __init__(self, file: BufferedReader, name: str) -> None:
        self.name = name
        self._file = file
        line = file.readline(_MAX_HEAD)
        if not (line.startswith(b"{") and line.endswith(b"\n")):
            raise FormatError(f"{name} does not begin with a line of JSON; {_MADE}")
        head = unseal(line, name, _FORMAT)
        head.only({"format", "store", "from", "to", "step", "tables", "payload"})
        self.store: str = head.text("store")
        self.old: Section = head.section("from")
        self.new: Section = head.section("to")
        self.origin: Origin = Origin(head.matching("store", UUID), self.new.natural("version"))
        self.step: int | None = None if head.value("step") is None else head.integer("step")
        self.changes: list[Change] = []
        end = file.tell()
        tables = head.section("tables")
        for key in tables:
            self.changes.append(_change(key, tables.section(key), end))
            end += self.changes[-1].size
        self.payload: dict[str, Section] | None = None
        self._values: dict[str, int] = {}
        if head.value("payload") is not None:
            values = head.section("payload")
            self.payload = {key: values.section(key) for key in values}
            for key, value in self.payload.items():
                self._values[key] = end
                end += value.natural("size")
        size = os.fstat(file.fileno()).st_size
        if size != end:
            raise FormatError(f"{name} has {size} bytes instead of {end}; copy it again")

    def read(self, change: Change) -> Iterator[tuple[Rows, npt.NDArray[np.uint8]]]:
        """Yield the ids and verified records of a table, in blocks; raises FormatError."""
        count, width = change.changed, change.record_bytes
        ids = self._bytes(change.offset, 8 * count)
        sums = self._bytes(change.offset + count * (8 + width), 4 * count)
        stored = self._bytes(change.offset + count * (12 + width), 4)
        if _checksum.crc32c(sums, _checksum.crc32c(ids)) != int.from_bytes(stored, "little"):
            raise self._damaged(change.name)
        rows, expected = np.frombuffer(ids, "<i8"), np.frombuffer(sums, "<u4")
        if count and (rows[0] < 0 or rows[-1] >= change.rows or not ascends(rows, strictly=True)):
            raise self._damaged(change.name)
        for part in _blocks(count, width):
            size = part.stop - part.start
            data = self._bytes(change.offset + 8 * count + part.start * width, size * width)
            records = np.frombuffer(data, np.uint8).reshape(size, width)
            if _checksum.mismatches(rows[part], records, expected[part]).size:
                raise self._damaged(change.name)
            yield rows[part], records

    def check_order(self, manifest: Manifest, where: str) -> None:
        """Raise VersionError unless the open version of a store is the one this is based on.

        A version and one that restores it have one mark: a patch between them changes nothing.
        """
        old, new = (each.natural("version") for each in (self.old, self.new))
        if manifest.mark == self.new.text("mark") != self.old.text("mark"):
            raise VersionError(f"{where} already has version {new}, to which {self.name} leads")
        if manifest.mark != self.old.text("mark"):
            raise VersionError(
                f"{self.name} leads from version {old} to {new} of the store {self.store}, but "
                f"version {manifest.version} of {where} is not that version {old}: apply patches "
                "in order, to a copy that nothing else has changed, or save a new copy"
            )

    def check_table(self, change: Change, spec: TableSpec, rows: int) -> None:
        """Raise FormatError unless a change is for a table like this one."""
        fields = [[name, item.dim, item.form] for name, item in spec.fields.items()]
        shape = (rows, spec.layout.record_bytes, fields)
        if shape != (change.rows, change.record_bytes, change.fields):
            raise FormatError(
                f"{self.name} is for {counted(change.rows, 'row')} of {change.fields} in table "
                f"{change.name!r}, which has {counted(rows, 'row')} of {fields}"
            )

    def draft(self, state: State) -> CommitDraft:
        """Begin the version that this produces, with its payload, step and marks."""
        values = {
            name: Encoded(entry.text("kind"), self.value(name, entry.natural("size")))
            for name, entry in (self.payload or {}).items()
        }
        draft = CommitDraft(state, self.step, values, confirm=True)
        for name, info in draft.payload.items():
            if info.crc32c != (self.payload or {})[name].integer("crc32c"):
                draft.drop()
                raise FormatError(f"{self.name}: {name} does not match its checksum; copy it again")
        if self.payload is None:
            draft.payload = state.manifest.payload
        draft.step = self.step
        draft.numbers["mark"] = self.new.text("mark")
        draft.numbers["payload_mark"] = self.new.text("payload_mark")
        draft.numbers["origin"] = self.origin
        if "commits" in self.new:  # by which the records of uses are dated
            draft.numbers["commits"] = self.new.natural("commits")
        return draft

    def info(self) -> PatchInfo:
        """Return what it contains."""
        counts = {change.name: change.changed for change in self.changes if change.changed}
        numbers = self.old.natural("version"), self.new.natural("version")
        size = os.fstat(self._file.fileno()).st_size
        return PatchInfo(Path(self.name), self.store, *numbers, counts, size)

    def value(self, name: str, size: int) -> Iterator[bytes]:
        """Yield the bytes of a payload value."""
        for start in range(0, size, _BLOCK_BYTES):
            yield self._bytes(self._values[name] + start, min(_BLOCK_BYTES, size - start))

    def _bytes(self, offset: int, size: int) -> bytes:
        self._file.seek(offset)
        data = self._file.read(size)
        if len(data) != size:
            raise FormatError(f"{self.name} became shorter while it was read; copy it again")
        return data

    def _damaged(self, what: str) -> FormatError:
        return FormatError(f"{self.name}: {what} does not match its checksum; copy it again")


def _change(name: str, entry: Section, offset: int) -> Change:
    entry.only({"rows", "record_bytes", "fields", "changed", "scalars"})
    return Change(
        name,
        entry.natural("rows"),
        entry.natural("record_bytes"),
        entry.items("fields"),
        entry.natural("changed"),
        entry.section("scalars").content,
        offset,
    )


@contextlib.contextmanager
def open_patch(path: str | os.PathLike[str]) -> Iterator[Patch]:
    """Open a patch; raises MissingFileError or, where it is damaged, FormatError."""
    name = os.fspath(path)
    if os.path.isdir(name):
        raise FormatError(f"{name} is a directory; {_MADE}")
    with contextlib.ExitStack() as opened:
        try:
            with _io.explained("open", name):
                file = opened.enter_context(open(path, "rb"))
        except FileNotFoundError:
            raise MissingFileError(f"{name}: no such file", filename=name) from None
        yield Patch(file, name)


def apply_patch(state: State, folder: Folder, path: str | os.PathLike[str]) -> PatchInfo:
    """Apply a patch to the version it is based on, and commit; an error changes nothing.

    Every rank reads the file, and writes what is on it. Raises InvalidInputError for rows of a
    table by key in partitions, which a patch names by numbers of another store.
    """
    with (
        contextlib.ExitStack() as opened,
        state.door.use(write=True) as use,
        state.alone("apply a patch"),
    ):
        patch: Patch

        def check() -> str:
            nonlocal patch
            patch = opened.enter_context(open_patch(path))
            state.check_clean("apply a patch")
            patch.check_order(state.manifest, state.directory.path)
            for change in patch.changes:
                _check_change(state, patch, change)
            return repr(dataclasses.replace(patch.info(), path=Path()))

        def write() -> None:
            for change in patch.changes:
                table = state.tables[change.name]
                for ids, records in patch.read(change):
                    own, rows = state.own_rows(change.name, ids)
                    write_records(table, rows, records[own])
                table.scalars.clear()
                table.scalars.update(change.scalars)

        state.ranks.check_same("read the patch", f"the patch at {path}", check)
        with state.or_discard("apply a patch"):
            state.ranks.together("write the rows", write)
            state.commit_all(
                use, lambda: patch.draft(state), lambda draft: commit(draft, folder, use, flush)
            )
        return patch.info()


def _check_change(state: State, patch: Patch, change: Change) -> None:
    """Raise unless the change of a table can be made here."""
    info = state.manifest.tables.get(change.name)
    if info is None or change.name in state.damaged:
        raise state.damaged.get(change.name) or FormatError(
            f"{patch.name} changes table {change.name!r}, which {state.directory.path} lacks"
        )
    if info.spec.keys is not None and state.is_root:
        if change.changed:
            raise InvalidInputError(
                f"{patch.name} changes rows of table {change.name!r}, which is by key: in a store "
                "with partitions they have other numbers; save a new copy instead"
            )
        return
    patch.check_table(change, info.spec, info.rows)
