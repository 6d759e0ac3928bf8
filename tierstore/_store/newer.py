"""Sealed files that are newer than the newest manifest, and what they can be proven to be.

A commit writes its payload, then the keys and the delta of each table that changed, then a
temporary manifest that names all of it, which gets its final name last. Files that are newer than
every manifest are of a commit that did not end, or of one whose manifest was removed.

A temporary manifest that is complete names a whole version. Without it only the footers of deltas
speak. They prove which rows a version changed in a table and that every record is intact, but not
what else it changed. So a version is taken only if every table has a delta of it that begins where
the manifest ends, and if there is nothing that a manifest alone could say: a step, a payload,
scalars, other tables, or the keys of a table by key.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tierstore import _io
from tierstore._disk import footer
from tierstore._disk.delta import Delta
from tierstore._disk.key_log import read_keys_of
from tierstore._disk.manifest import (
    DELTA_NAME,
    GENERATION_NAME,
    KEYS_NAME,
    MAX_BYTES,
    PAYLOAD_NAME,
    TEMPORARY_NAME,
    DeltaInfo,
    Manifest,
    TableInfo,
    Written,
    new_mark,
)
from tierstore._store.payload import Payload
from tierstore._store.versions import Survey
from tierstore.errors import (
    CorruptStoreError,
    InvalidInputError,
    NewerVersionError,
    TierStoreError,
    VersionError,
    counted,
    named,
)
from tierstore.spec import TABLE_NAME

_NUMBER = slice(-20 - 9, -9)
"""Where a name such as delta-<20 digits>-<8 hex> has its number, counted from its end."""


@dataclass(frozen=True)
class NewDelta:
    """A delta that no manifest names, of a version after the newest one.

    Attributes:
        table: the name of its table.
        path: its path in the store.
        number: that of the manifest that was to name it, or of one before.
        info: as its footer states.
    """

    table: str
    path: str
    number: int
    info: DeltaInfo

    def __str__(self) -> str:
        rows = counted(self.info.rows, "record")
        return f"{self.path}: {rows} of version {self.info.version}"


@dataclass(frozen=True)
class Newer:
    """What is newer than the newest manifest.

    Attributes:
        deltas: complete deltas of later versions.
        others: paths of other files and generations that a later manifest was to name.
        manifests: the complete temporary manifests of later versions, ascending.
    """

    deltas: tuple[NewDelta, ...]
    others: tuple[str, ...]
    manifests: tuple[Manifest, ...]

    def lines(self) -> list[str]:
        """Describe each, for people."""
        return [*map(str, self.deltas), *self.others]


def find_newer(directory: _io.Directory, found: Survey) -> Newer:
    """Return the sealed files that are newer than the newest manifest, in a store without a writer.

    What cannot be read is passed over: `verify` finds damage.
    """
    newest = _newest(found)
    known = {path for each in found.history.manifests() for path in each.paths()}
    deltas: list[NewDelta] = []
    others: list[str] = []
    manifests: list[Manifest] = []
    for name in sorted(directory.names()):
        if TEMPORARY_NAME.fullmatch(name):
            try:
                each = Manifest.decode(directory.read_file(name, MAX_BYTES), directory.join(name))
            except NewerVersionError:
                raise
            except (TierStoreError, FileNotFoundError):
                continue
            if each.uuid == newest.uuid and each.version > newest.last_version:
                manifests.append(each)
        elif PAYLOAD_NAME.fullmatch(name) and name not in known:
            others += [name] if int(name[_NUMBER]) > newest.seq else []
        elif TABLE_NAME.fullmatch(name):
            with contextlib.suppress(TierStoreError, OSError), directory.directory(name) as table:
                for generation in sorted(filter(GENERATION_NAME.fullmatch, table.names())):
                    path = f"{name}/{generation}"
                    if path in known:
                        deltas += _new_deltas(table, name, generation, newest, known)
                    elif int(generation[_NUMBER]) > newest.seq:
                        others.append(path)
    manifests.sort(key=lambda each: each.seq)
    return Newer(tuple(deltas), tuple(others), tuple(manifests))


def _newest(found: Survey) -> Manifest:
    return max(found.history.manifests(), key=lambda each: each.seq)


def _new_deltas(
    table: _io.Directory, name: str, generation: str, newest: Manifest, known: set[str]
) -> Iterator[NewDelta]:
    """Yield the complete deltas of a generation that no manifest names and a later one was to."""
    with table.directory(generation) as directory:
        for entry in sorted(filter(DELTA_NAME.fullmatch, directory.names())):
            path = f"{name}/{generation}/{entry}"
            if path in known:
                continue
            with contextlib.suppress(TierStoreError, FileNotFoundError):
                info = _stated(directory, entry, bytes.fromhex(newest.uuid))
                if info is not None and info.version > newest.last_version:
                    number = int(entry.removesuffix(".bin")[_NUMBER])
                    yield NewDelta(name, path, number, info)


def _stated(directory: _io.Directory, name: str, store: bytes) -> DeltaInfo | None:
    """Return what the footer of a delta states; None for one that was never sealed."""
    with directory.open_file(name) as file:
        size = file.size
        end = file.read(footer.FOOTER_BYTES, max(0, size - footer.FOOTER_BYTES))
    stated = footer.stated(end)
    if stated is None or stated.store != store:
        return None
    if size != footer.file_bytes(stated.records, stated.record_bytes):
        return None
    return DeltaInfo(name, size, stated.records, stated.version, footer.checksum(end))


def adopted(directory: _io.Directory, found: Survey) -> tuple[list[Manifest], list[str]]:
    """Return manifests of the versions that the newer files prove, ascending, and what is left.

    Every file that they name beyond the newest manifest is intact. Raises InvalidInputError if
    there are no newer files, VersionError if they cannot be proven to be a whole version, and
    CorruptStoreError if one is damaged.
    """
    newest, newer = _newest(found), find_newer(directory, found)
    if newest.partitions:
        raise InvalidInputError(
            f"{directory.path} has partitions, whose newer files are of versions that it never "
            "had; only a store without partitions can adopt files"
        )
    if not (newer.deltas or newer.others or newer.manifests):
        raise InvalidInputError(
            f"{directory.path} has no files that are newer than version {newest.version}: leave "
            "adopt out (--adopt)"
        )
    if newer.manifests:
        whole = newer.manifests[-1]
        _check_named(directory, whole, newest)
        return [whole], []
    return _by_footers(directory, newest, newer)


def _check_named(directory: _io.Directory, whole: Manifest, newest: Manifest) -> None:
    """Check all files of a version that `newest` does not name."""
    version = whole.version
    if whole.seq != newest.seq + 1 or whole.previous != newest.version:
        raise _unproven(version, f"it was to follow another manifest than {newest.seq}")
    moved = [
        name
        for name, info in whole.tables.items()
        if name not in newest.tables or info.generation != newest.tables[name].generation
    ]
    if moved or whole.tables.keys() != newest.tables.keys():
        raise _unproven(version, f"it was to make or change {named('table', moved)}; do it again")
    for name, info in whole.tables.items():
        before = newest.tables[name]
        for delta in info.deltas:
            if delta not in before.deltas:
                _check_delta(directory, name, info, delta, newest.uuid)
        if info.keys != before.keys:
            _check_keys(directory, name, info)
    for payload in whole.payload.values():
        if payload not in newest.payload.values():
            Payload(directory, payload).verify()


def _check_keys(directory: _io.Directory, name: str, info: TableInfo) -> None:
    if info.keys is None:
        return
    with (
        _explained(f"the keys of table {name!r}"),
        directory.directory(name) as table,
        table.directory(info.generation) as generation,
    ):
        read_keys_of(generation, info, info.keys)


def _check_delta(
    directory: _io.Directory, name: str, info: TableInfo, delta: DeltaInfo, store: str
) -> None:
    """Raise CorruptStoreError unless every record of a delta is intact and of a row there is."""
    with (
        _explained(delta.name),
        directory.directory(name) as table,
        table.directory(info.generation) as generation,
    ):
        width = info.spec.layout.record_bytes
        opened = Delta.open(generation, delta, store=bytes.fromhex(store), record_bytes=width)
        opened.check()
        bad = opened.damaged()
        if bad:
            raise CorruptStoreError(f"row {bad[0]} does not match its checksum")
        ids = np.asarray(opened.ids)
        if ids.size and not 0 <= ids.min() <= ids.max() < info.spec.rows:
            raise CorruptStoreError(f"it has rows beyond the {info.spec.rows:,} of table {name!r}")


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Raise CorruptStoreError, which says that `what` is not adopted, for damage in the body."""
    try:
        yield
    except (TierStoreError, FileNotFoundError) as error:
        raise CorruptStoreError(
            f"{what} is damaged, so that its version is not adopted: {error}; without adopt, "
            "repair copies the version before it"
        ) from error


def _unproven(version: int, why: str) -> VersionError:
    return VersionError(
        f"version {version} cannot be adopted, as nothing proves that its files are all of it: "
        f"{why}; without adopt, repair copies the version before it"
    )


def _by_footers(
    directory: _io.Directory, newest: Manifest, newer: Newer
) -> tuple[list[Manifest], list[str]]:
    """Return the versions that deltas alone prove, and why what comes after them is left."""
    last = newest
    made: list[Manifest] = []
    try:
        _check_silent(directory, newest, newer)
        while later := [each for each in newer.deltas if each.info.version > last.last_version]:
            last = _next(directory, last, later, is_first=not made)
            made.append(last)
    except TierStoreError as error:
        if not made:
            raise
        return made, [str(error)]
    return made, []


def _check_silent(directory: _io.Directory, newest: Manifest, newer: Newer) -> None:
    """Raise VersionError if a later version has, or may have, what its manifest alone can say."""
    version = newest.last_version + 1
    if newer.others:
        raise _unproven(version, f"only its manifest says what {newer.others[0]} is")
    if newest.step is not None or newest.payload:
        raise _unproven(version, "only its manifest has its step and payload")
    for name, info in newest.tables.items():
        if info.scalars:
            raise _unproven(version, f"only its manifest has the scalars of table {name!r}")
        if info.spec.keys is not None:
            raise _unproven(version, f"only its manifest has the keys of table {name!r}")
        with (
            directory.directory(name) as table,
            table.directory(info.generation) as generation,
        ):
            keys = {each for each in generation.names() if KEYS_NAME.fullmatch(each)}
        known = set() if info.keys is None else {*info.keys.files, info.keys.index}
        if keys - known:
            raise _unproven(version, f"only its manifest has the keys of table {name!r}")


def _next(
    directory: _io.Directory, last: Manifest, later: list[NewDelta], *, is_first: bool
) -> Manifest:
    """Return the version after `last`, if its deltas prove it."""
    version, seq = last.last_version + 1, last.seq + 1
    own = {each.table: each for each in later if each.info.version == version}
    if len(own) != sum(each.info.version == version for each in later):
        raise _unproven(version, "a table has several deltas of it")
    lacking = [name for name in last.tables if name not in own]
    if lacking:
        raise _unproven(
            max(version, later[0].info.version),
            f"only its manifest says whether it changed {named('table', lacking)}",
        )
    for each in own.values():
        # A number up to this one was given while `last` was the newest version.
        if each.number > seq or (each.number < seq and not is_first):
            raise _unproven(version, f"it may not follow version {last.version}")
    tables = dict(last.tables)
    for name, each in own.items():
        _check_delta(directory, name, tables[name], each.info, last.uuid)
        deltas = (*tables[name].deltas, each.info)
        tables[name] = dataclasses.replace(tables[name], deltas=deltas)
    return dataclasses.replace(
        last,
        seq=seq,
        version=version,
        last_version=version,
        previous=last.version,
        confirmed=version,
        skipped=version - last.commits - 1,
        mark=new_mark(),
        origin=None,
        tables=tables,
        written=Written.between(last.tables, tables, own),
    )
