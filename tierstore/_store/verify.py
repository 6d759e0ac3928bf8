"""Verification of an open or closed store: checks all rows and files, continuing after damage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tierstore import _io
from tierstore._disk import base as bases
from tierstore._disk.base import CHECKSUMS, Base
from tierstore._disk.delta import Delta
from tierstore._disk.generation import Generation
from tierstore._disk.key_log import read_keys_of
from tierstore._disk.keys import indexed_keys
from tierstore._disk.manifest import KeysInfo, Manifest, TableInfo
from tierstore._disk.partitioning import PARTITIONS, Shard, partition_name
from tierstore._html import brief
from tierstore._progress import Progress, Shown, report_nothing, shown
from tierstore._store.locking import folds_kept_away, writer_of
from tierstore._store.newer import find_newer
from tierstore._store.partitions import partition_directory, renumbered
from tierstore._store.payload import Payload
from tierstore._store.state import State
from tierstore._store.versions import (
    Survey,
    check_readable,
    marks_of,
    number_in_part,
    open_directory,
    survey,
)
from tierstore._tiers import memory
from tierstore._tiers.uncached import pieces_of
from tierstore.errors import CorruptStoreError, TierStoreError, counted

Rows = npt.NDArray[np.int64]

_BLOCK_BYTES = 1 << 20
"""Records checked at a time, few enough to stay in the CPU cache between copy and checksum."""
_ATTEMPTS = 8
_NAMED = 3
"""Tables and files that an error names."""
_NOTHING = np.empty(0, np.int64)


@dataclass
class VerifyReport:
    """The result of a verification.

    Attributes:
        version: the verified version; of other versions, only additional files were checked.
        rows_checked: number of checked rows in its bases.
        bad_rows: ascending rows that are damaged in the base or in a delta, by table; tables
            without such rows are left out.
        bad_files: other damage: manifests, files of tables, keys and payload, each with a reason.
        whole: the checked versions in which every row, key and payload can be read; empty if only a
            sample was checked.
        mended: rows of `bad_rows` that were rewritten, by table; see `Store.verify`.
        newer: sealed files that are newer than the newest manifest, each with what it holds: those
            of a commit that did not end, or whose manifest was removed. They are no damage of a
            version, and `repair(adopt=True)` takes them. A next writer removes them.
        notes: what is no damage, and is worth knowing.
    """

    __repr__ = brief

    version: int = 0
    rows_checked: int = 0
    bad_rows: dict[str, list[int]] = field(default_factory=dict)
    bad_files: list[str] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    mended: dict[str, list[int]] = field(default_factory=dict)
    newer: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""
        return not self.bad_files and not self.bad_rows

    def __bool__(self) -> bool:
        """Return `ok`: a report that lists damage is falsy."""
        return self.ok

    def raise_if_damaged(self) -> None:
        """Raise CorruptStoreError that names the damaged tables and files, if there are any."""
        if self.ok:
            return
        rows = [
            f"{counted(len(bad), 'row')} of table {name!r}, such as row {bad[0]}"
            for name, bad in self.bad_rows.items()
        ]
        found = rows + self.bad_files
        more = f"; and {len(found) - _NAMED:,} more" if len(found) > _NAMED else ""
        raise CorruptStoreError(
            f"version {self.version} is damaged: {'; '.join(found[:_NAMED])}{more}; "
            "Store.verify(mend=True) rewrites rows that are intact elsewhere, and "
            "tierstore.repair copies the intact ones"
        )


def verify(
    path: Any,
    *,
    version: int | str | None = None,
    sample: int | None = None,
    progress: Shown = None,
) -> VerifyReport:
    """Check every manifest, table and file of a store, which need not be openable.

    Args:
        path: the store; a path, a URL for fsspec, or a zarr store.
        version: the only version to check, by number or name; None checks the newest and the
            additional files of older ones.
        sample: check this many random rows of each base, and only one version.
        progress: called with the number of rows done and the total; True shows a bar.

    Returns the damage and the intact versions. A writer may continue meanwhile. Raises
    NotAStoreError; FormatError if no manifest can be read; VersionError; AccessError for a file
    that this process may not read, which is no damage.
    """
    place = _io.locate(path)
    with open_directory(place) as directory, folds_kept_away(directory):
        if isinstance(place, Path):  # objects cannot all be tried
            check_readable(directory)
        for _ in range(_ATTEMPTS):
            found = survey(directory)
            report = verify_store(
                directory, found, version=version, sample=sample, progress=shown(progress)
            )
            now = survey(directory)
            if report.ok or {m.seq for m in found.versions.values()} <= {
                m.seq for m in now.versions.values()
            }:
                break  # otherwise a writer removed files during the check
        if not (isinstance(place, Path) and writer_of(place)):  # whose commit may be under way
            report.newer = find_newer(directory, survey(directory)).lines()
    return report


def verify_store(
    directory: _io.Directory,
    found: Survey,
    *,
    opened: Mapping[str, Generation] | None = None,
    manifest: Manifest | None = None,
    payload: Mapping[str, Payload] | None = None,
    version: int | str | None = None,
    sample: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check a version and, unless it is named or sampled, the additional files of older ones.

    For an open store, `opened`, `manifest` and `payload` are those of the open version, whose files
    a writer may have removed from the directory.
    """
    chosen = found.choose(version) if manifest is None else manifest
    check = _Check(directory, found, sample, progress)
    report = check.report
    report.version = chosen.version
    report.bad_files += found.damage
    if manifest is None:
        report.bad_files += [
            f"version {number}, which is kept as {name!r}, is missing"
            for name, number in found.choose(None).names.items()
            if number not in found.versions
        ]
    check.total(chosen)
    if chosen.partitions:
        _verify_partitions(check, found, chosen, version, payload)
        check.finish()
        return report
    with contextlib.closing(check):
        whole = check.version(chosen, opened or {}, payload, newest=True)
        if sample is None:
            report.whole = [chosen.version] if whole else []
        if sample is None and version is None:
            for older in reversed(found.versions.values()):
                if older.version != chosen.version and check.version(older, {}, None):
                    report.whole.append(older.version)
    report.whole.sort()
    check.finish()
    memory.give_back()
    return report


def _verify_partitions(
    check: _Check,
    found: Survey,
    chosen: Manifest,
    version: int | str | None,
    payload: Mapping[str, Payload] | None,
) -> None:
    """Check every partition of a store as a store, and the payload of the root."""
    report, several = check.report, check.sample is None and version is None
    wanted = [each for each in found.versions.values() if several or each.version == chosen.version]
    roots = {each.version: each for each in wanted} | {chosen.version: chosen}
    whole = {
        number
        for number, each in roots.items()
        if check.payload_of(each, payload if each is chosen else None) & check.keys_of_whole(each)
    }
    keys_before, there = dict.fromkeys(chosen.tables, 0), dict[int, int]()
    for number in range(len(chosen.partitions)):
        part, keys, marks = _verify_partition(check, number, chosen, several=several)
        there[number] = number_in_part(marks, *chosen.partitions[number])
        report.rows_checked += part.rows_checked
        where = f"{PARTITIONS}/{partition_name(number)}"
        report.bad_files += [f"{where}: {each}" for each in part.bad_files]
        for name, rows in part.bad_rows.items():
            ids = _ids(chosen, name, number, rows, keys_before.get(name, 0))
            if ids:
                report.bad_rows.setdefault(name, []).extend(ids)
        for name, count in keys.items():
            keys_before[name] += count
        whole -= {
            version
            for version, root in roots.items()
            if number_in_part(marks, *root.partitions[number]) not in part.whole
        }
    report.notes += filter(None, [renumbered(chosen, there)])
    for rows in report.bad_rows.values():
        rows.sort()
    if check.sample is None:
        report.whole = sorted(whole)


def _verify_partition(
    check: _Check, number: int, chosen: Manifest, *, several: bool
) -> tuple[VerifyReport, dict[str, int], dict[int, str]]:
    """Check a partition; also return its keys by table, and the marks of its versions."""
    version, mark = chosen.partitions[number]
    try:
        with (
            partition_directory(check.directory, number) as directory,
            folds_kept_away(directory),
        ):
            found = survey(directory)
            marks = marks_of(found.versions)
            there = number_in_part(marks, version, mark)
            manifest = found.choose(there)
            report = verify_store(
                directory,
                found,
                manifest=manifest if several else None,
                version=None if several else there,
                sample=check.sample,
                progress=check.progress_of_part(),
            )
        if manifest.mark != mark:
            report.bad_files.append(f"version {version} is of another moment than the store")
            report.whole = []
        tables = {name: info for name, info in manifest.tables.items() if name in chosen.tables}
        return report, {name: each.keys.count for name, each in tables.items() if each.keys}, marks
    except (TierStoreError, FileNotFoundError) as error:
        return VerifyReport(bad_files=[str(error)]), {}, {}


def _ids(chosen: Manifest, name: str, number: int, rows: list[int], keys_before: int) -> list[int]:
    """Return the ids of rows of a partition; rows without an id are omitted.

    Rows of a table by key are numbered after those of the preceding partitions.
    """
    if name not in chosen.tables:
        return []
    if chosen.tables[name].spec.keys is not None:
        return [keys_before + row for row in rows]
    total, partitions = chosen.tables[name].spec.rows, len(chosen.partitions)
    ids = Shard(total, partitions, 0, partitions).rows_in(number, np.array(rows, np.int64))
    return [each for each in ids.tolist() if each < total]


def verify_open(state: State, sample: int | None, progress: Progress | None) -> VerifyReport:
    """Check an open store and the additional files of older versions."""
    history = state.history
    return verify_store(
        state.directory,
        Survey(state.identity.uuid, history, history.versions(), history.damaged()),
        opened={name: on.generation for name, on in state.backings.items()},
        manifest=state.manifest,
        payload=state.payload,
        sample=sample,
        progress=progress,
    )


class _Checked(Protocol):
    """A base, or the tier above it."""

    rows: int
    record_bytes: int

    def damaged(self, rows: Rows) -> list[int]:
        """Return those of `rows` that are damaged in the base."""

    def damaged_files(self) -> list[str]:
        """Return the names of files with damage outside the rows."""

    def computed_checksums(self, rows: Rows) -> npt.NDArray[np.uint32]:
        """Compute the checksums of `rows` of the base from their records."""


class _Check:
    """A running verification, which checks each file once, even if several versions name it."""

    def __init__(
        self,
        directory: _io.Directory,
        found: Survey,
        sample: int | None,
        progress: Progress | None,
    ) -> None:
        self.report = VerifyReport()
        self.directory = directory
        self._found = found
        self.sample = sample
        self._progress, self._shown = progress, 0
        self._total = 0
        self._bases: dict[str, Rows | None] = {}  # None: cannot be read at all
        self._deltas: dict[str, tuple[Delta | None, Rows]] = {}
        self._files: dict[str, bool] = {}  # payload and keys: whether they are intact

    def total(self, manifest: Manifest) -> None:
        """Record the number of rows to check."""
        rows = [info.spec.rows for info in manifest.tables.values()]
        self._total = sum(rows if self.sample is None else (min(self.sample, n) for n in rows))

    def progress_of_part(self) -> Progress | None:
        """Return a function that reports the rows of a partition after those of earlier ones."""
        before = self.report.rows_checked
        if self._progress is None:
            return None

        def report(done: int, total: int) -> None:
            if total > 1:  # a part without rows reports 1 of 1
                self._show(before + done)

        return report

    def _show(self, done: int) -> None:
        """Report the rows that are checked, which are more than those of one version."""
        self._shown = done
        if self._progress is not None:
            self._progress(done, max(done, self._total))

    def finish(self) -> None:
        """Report the end, if rows could not be read or there are none."""
        if not self._shown and not self._total:
            report_nothing(self._progress)
        elif self._shown < self._total:
            self._show(self._total)

    def payload_of(self, manifest: Manifest, payload: Mapping[str, Payload] | None) -> bool:
        """Check the payload of a version; return whether it is whole."""
        if payload is None:
            payload = {
                name: Payload(self.directory, info) for name, info in manifest.payload.items()
            }
        return self._payload(manifest, payload)

    def keys_of_whole(self, root: Manifest) -> bool:
        """Check the external keys of tables in partitions; return whether they are intact."""
        named = {name: info for name, info in root.tables.items() if info.keys is not None}
        found = [self._keys_of_whole(name, info) for name, info in named.items()]
        return all(found)

    def _keys_of_whole(self, name: str, info: TableInfo) -> bool:
        with contextlib.ExitStack() as held:
            directory: _io.Directory | None = None
            try:
                table = held.enter_context(self.directory.directory(name))
                directory = held.enter_context(table.directory(info.generation))
            except FileNotFoundError:
                self.report.bad_files.append(f"{name}/{info.generation}: missing")
                return False
            return self._check_keys(name, info, None, directory)

    def close(self) -> None:
        """Release all mappings."""
        self._deltas.clear()

    def version(
        self,
        manifest: Manifest,
        opened: Mapping[str, Generation],
        payload: Mapping[str, Payload] | None,
        *,
        newest: bool = False,
    ) -> bool:
        """Check files not checked for other versions; return whether everything is readable."""
        before = len(self.report.bad_files)
        whole = self.payload_of(manifest, payload)
        for name, info in manifest.tables.items():
            whole &= self._table(manifest, name, info, opened.get(name), newest=newest)
        found = len(self.report.bad_files) > before
        if found and not newest and not self._is_kept(manifest):
            del self.report.bad_files[before:]  # a writer removed it or its files meanwhile
            return False
        return whole

    def _is_kept(self, manifest: Manifest) -> bool:
        """Whether the version is still kept, with this manifest."""
        now = self._found.history.versions().get(manifest.version)
        return now is not None and now.seq == manifest.seq

    def _payload(self, manifest: Manifest, payload: Mapping[str, Payload]) -> bool:
        for name, info in manifest.payload.items():
            if info.name not in self._files:
                self._files[info.name] = True
                try:
                    payload[name].verify()
                except TierStoreError as error:
                    self._files[info.name] = False
                    self.report.bad_files.append(
                        f"payload {name} of version {manifest.version}: {error}"
                    )
        return all(self._files[info.name] for info in manifest.payload.values())

    def _table(
        self,
        manifest: Manifest,
        name: str,
        info: TableInfo,
        opened: Generation | None,
        *,
        newest: bool,
    ) -> bool:
        """Check a table; return whether a reader of this version can read all its rows."""
        where = f"table {name} of version {manifest.version}"
        with contextlib.ExitStack() as files:
            directory: _io.Directory | None = None
            try:
                if opened is None:
                    table = files.enter_context(self.directory.directory(name))
                    directory = files.enter_context(table.directory(info.generation))
            except (TierStoreError, FileNotFoundError) as error:
                if info.generation not in self._bases:
                    self._bases[info.generation] = None
                    self.report.bad_files.append(f"{where}: {error}")
                return False
            deltas = self._check_deltas(where, info, manifest.uuid, opened, directory)
            whole = [delta for delta, _ in deltas if delta is not None]
            base = self._check_base(where, info, whole, opened, directory)
            keys = self._check_keys(where, info, opened, directory)
        bad = np.concatenate([_NOTHING if base is None else base, *(rows for _, rows in deltas)])
        if newest and bad.size:
            self.report.bad_rows[name] = np.unique(bad).tolist()
        if base is None or not keys or any(delta is None for delta, _ in deltas):
            return False
        return not _shown(base, [(delta, rows) for delta, rows in deltas if delta is not None])

    def _check_base(
        self,
        where: str,
        info: TableInfo,
        deltas: list[Delta],
        opened: Generation | None,
        directory: _io.Directory | None,
    ) -> Rows | None:
        """Return the damaged rows of a base; None if it cannot be opened."""
        if info.generation in self._bases:
            return self._bases[info.generation]
        self._bases[info.generation] = None
        base: _Checked
        try:
            if directory is None and opened is not None:
                base = opened.tier
            elif directory is not None:
                base = mapped = Base.open(directory, info.spec)
        except TierStoreError as error:
            self.report.bad_files.append(f"{where}: {error}")
            return None
        try:
            self.report.bad_files += [f"{where}: {file}" for file in base.damaged_files()]
            self._check_binding(where, info, base, deltas, opened, directory)
            bad = self._damaged_base(base, deltas)
        finally:
            if directory is not None:
                mapped.close()
        self._bases[info.generation] = bad
        return bad

    def _check_binding(
        self,
        where: str,
        info: TableInfo,
        base: _Checked,
        deltas: list[Delta],
        opened: Generation | None,
        directory: _io.Directory | None,
    ) -> None:
        """Compare the version's digest with the row checksums of the base.

        The damage that counts is found while no fold begins.
        """

        def find(floor: int) -> list[str]:
            if directory is not None:
                return _damaged_binding(info, base, _rows_up_to(floor, deltas), directory)
            return [] if opened is None else opened.damaged_binding(floor)

        floor = self._found.history.floor()
        while found := find(floor):
            before, floor = floor, self._found.history.floor()
            if floor == before:
                break
        self.report.bad_files += [f"{where}: {each}" for each in found]

    def _damaged_base(self, base: _Checked, deltas: list[Delta]) -> Rows:
        """Return the damaged rows of a base, reporting progress.

        Rows in deltas up to the floor do not count: a fold that runs, also one that began within
        this call, or was interrupted may have torn them, and they are not read from the base.
        """
        bad: list[int] = []
        held = _rows_up_to(self._found.history.floor(), deltas)
        for rows in self._blocks(base):
            bad += base.damaged(rows[~np.isin(rows, held)] if held.size else rows)
            self.report.rows_checked += rows.size
            self._show(self.report.rows_checked)
        damaged = np.array(bad, np.int64)
        if damaged.size:
            damaged = damaged[~np.isin(damaged, _rows_up_to(self._found.history.floor(), deltas))]
        return damaged

    def _blocks(self, base: _Checked) -> Iterator[Rows]:
        step = max(1, _BLOCK_BYTES // base.record_bytes)
        if self.sample is not None and self.sample < base.rows:
            rows = np.random.default_rng().choice(base.rows, self.sample, replace=False)
            rows.sort()
            for part in pieces_of(rows, base.record_bytes):
                some = rows[part]
                yield from np.array_split(some, -(-some.size // step) or 1)
            return
        for start in range(0, base.rows, step):
            yield np.arange(start, min(start + step, base.rows), dtype=np.int64)

    def _check_deltas(
        self,
        where: str,
        info: TableInfo,
        store: str,
        opened: Generation | None,
        directory: _io.Directory | None,
    ) -> list[tuple[Delta | None, Rows]]:
        """Return the deltas of a table, oldest first, and the damaged rows of each."""
        known = {} if opened is None else {each.info.name: each for each in opened.tier.deltas}
        checked = []
        for each in info.deltas:
            if each.name not in self._deltas:
                delta, bad = known.get(each.name), _NOTHING
                try:
                    if delta is None and directory is not None:
                        width = info.spec.layout.record_bytes
                        secret = bytes.fromhex(store)
                        delta = Delta.open(directory, each, store=secret, record_bytes=width)
                    if delta is not None:
                        delta.check()
                    if delta is not None and self.sample is None:
                        bad = np.array(delta.damaged(), np.int64)
                except TierStoreError as error:
                    self.report.bad_files.append(f"{where}: {error}")
                if bad.size and opened is None:
                    self.report.bad_files.append(
                        f"{where}: {each.name}: {counted(bad.size, 'row')}, the first is row "
                        f"{bad[0]}"
                    )
                self._deltas[each.name] = delta, bad
            checked.append(self._deltas[each.name])
        return checked

    def _check_keys(
        self,
        where: str,
        info: TableInfo,
        opened: Generation | None,
        directory: _io.Directory | None,
    ) -> bool:
        """Return whether the keys of a table are intact."""
        if info.keys is None:
            return True
        name, keys = min(info.keys.files), None
        if name not in self._files:
            try:
                if info.spec.keys is not None:
                    _check_log(info, info.keys, opened, directory)
                elif directory is not None:
                    keys = indexed_keys(directory, info.keys, info.spec.rows)
                elif opened is not None:
                    keys = opened.keys(info.keys)
                self._files[name] = True
            except TierStoreError as error:
                self._files[name] = False
                self.report.bad_files.append(f"{where}: keys: {error}")
            if keys is not None and (damage := keys.index_damage()):
                self.report.bad_files.append(f"{where}: {info.keys.index}: {damage}")
        return self._files[name]


def _check_log(
    info: TableInfo, keys: KeysInfo, opened: Generation | None, directory: _io.Directory | None
) -> None:
    """Raise CorruptStoreError if the keys of a table by key are damaged."""
    if directory is not None:
        read_keys_of(directory, info, keys)
    elif opened is not None:
        opened.key_map  # noqa: B018 - this loads them


def _rows_up_to(floor: int, deltas: list[Delta]) -> Rows:
    """Return the rows of deltas up to a version, which a fold may be merging into the base."""
    return np.concatenate([_NOTHING, *(each.ids for each in deltas if each.info.version <= floor)])


def _damaged_binding(
    info: TableInfo, base: _Checked, merging: Rows, directory: _io.Directory
) -> list[str]:
    """Return the damage to the digest of a version, and mismatches with the base."""
    if info.digest is None:
        return []
    try:
        digest = bases.read_digest(directory, info.digest, info.spec)
    except TierStoreError as error:
        return [str(error)]
    if digest is None:
        return [info.digest.name]
    touched = np.unique(merging // bases.DIGEST_ROWS)
    return [
        f"{CHECKSUMS}: rows from {block * bases.DIGEST_ROWS} on are from a different time"
        for block in bases.foreign_blocks(directory, base, info.spec.rows, digest, touched)
    ]


def _shown(base: Rows, deltas: list[tuple[Delta, Rows]]) -> bool:
    """Whether a reader gets any damaged row, because no later delta contains the row."""
    hidden = base
    for delta, bad in deltas:
        if hidden.size:
            hidden = hidden[~np.isin(hidden, delta.ids)]
        hidden = np.concatenate([hidden, bad])
    return bool(hidden.size)
