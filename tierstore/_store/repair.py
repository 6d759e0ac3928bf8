"""Repair: copies every intact row of a damaged store to a new one, and lists the other rows."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from tierstore import _io
from tierstore._disk import generation as generations
from tierstore._disk.generation import of_partition
from tierstore._disk.images import LOST, OLDER, WHOLE, Found, Images
from tierstore._disk.key_log import read_keys_of, write_keys_of
from tierstore._disk.keys import as_stored
from tierstore._disk.manifest import (
    KeysInfo,
    Manifest,
    PayloadInfo,
    TableInfo,
    manifest_name,
    unique_name,
)
from tierstore._disk.partitioning import PARTITIONS, Shard, partition_name
from tierstore._html import brief
from tierstore._keys.growing import KeyMap
from tierstore._progress import Overall, Shown, shown
from tierstore._store.copy import write_copy
from tierstore._store.lineage import descends
from tierstore._store.locking import folds_kept_away, writer_of
from tierstore._store.newer import adopted
from tierstore._store.partitions import partition_directory
from tierstore._store.payload import Payload, copy_payload
from tierstore._store.row_list import FILLED, RowList
from tierstore._store.state import State
from tierstore._store.verify import VerifyReport
from tierstore._store.versions import (
    Survey,
    check_free,
    check_readable,
    marks_of,
    number_in_part,
    open_directory,
    survey,
)
from tierstore._table.backing import Backing
from tierstore.errors import (
    ExistsError,
    FilledRowsWarning,
    InvalidInputError,
    LockedError,
    StoreIOError,
    TierStoreError,
    counted,
    warn,
)
from tierstore.initializers import BLOCK_ROWS, Initializer
from tierstore.spec import TableSpec

Fill = str | Initializer
"""The replacement of a damaged row: "version", "zeros", "nan", or an initializer."""

_DEFAULT_FILL = ("version", "zeros")

Rows = npt.NDArray[np.int64]
Records = npt.NDArray[np.uint8]


@dataclass
class TableRepair:
    """The outcome for a table.

    Attributes:
        rows: total number of rows; of a table by key, those that have a key.
        older: rows with an older image than the damaged one, or, where a partition lacks the
            version, with one of the nearest version that it has.
        filled: rows with zeros, NaN or the values of an initializer.
        unknown: upper bound of further rows that are older but cannot be identified, because a
            delta is missing or its ids are damaged.
    """

    rows: int
    older: int = 0
    filled: int = 0
    unknown: int = 0


@dataclass
class RepairReport:
    """The result of a repair.

    Attributes:
        version: the version that was copied.
        tables: the outcome for each table.
        left_out: damaged keys, payload and manifests, and newer files that were not adopted.
        adopted: the versions that no manifest names, which were taken with `adopt`, ascending.
        listed: the CSV file of the rows without their newest image.
    """

    __repr__ = brief

    version: int
    listed: Path
    tables: dict[str, TableRepair] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    adopted: list[int] = field(default_factory=list)

    @property
    def filled(self) -> int:
        """The number of rows, of all tables, that have no value of their own any more."""
        return sum(each.filled for each in self.tables.values())

    @property
    def complete(self) -> bool:
        """Whether the copy contains everything of the newest version."""
        counts = self.tables.values()
        return not self.left_out and not any(t.older + t.filled + t.unknown for t in counts)


def repair(
    src: Any,
    dest: str | os.PathLike[str],
    *,
    version: int | str | None = None,
    fill: Fill | Sequence[Fill] | None = None,
    listed: str | os.PathLike[str] | None = None,
    adopt: bool = False,
    progress: Shown = None,
) -> RepairReport:
    """Copy every intact row of a damaged store to a new store, and list the other rows.

    A row is intact if its checksum matches, wherever its image is: in a delta with a damaged footer
    or damaged ids, in the base, or in a delta that a kept version still names. `src` is only read
    and need not be openable: STORE.json, the newest manifest, tables and deltas may be damaged or
    missing, and a writer may have it open. The new store is folded, has one version, and appears
    complete or not at all.

    Args:
        src: the store; a path, a URL for fsspec, or a zarr store.
        dest: the path of the new store, which must not exist.
        version: a kept version to copy, by number or name; None copies the newest with an intact
            manifest.
        fill: replacements for rows whose newest image is damaged, tried in order: "version" is the
            newest intact older image; then "zeros", "nan", or an initializer such as
            `tierstore.normal(std=0.01)`, which applies to the first field while others become zero.
            None is "version", then "zeros", and a FilledRowsWarning counts the rows that became
            zero. The initializers of the original table are not stored.
        listed: path of the list, a CSV file with the columns table, first, last (rows), rows (their
            number), outcome ("older", "filled" or "unknown") and version (of an older image). Of a
            table by key, first and last are one key. None appends ".rows.csv" to `dest`.
        adopt: copy also what is newer than the newest manifest, as `verify` lists it: a version
            whose commit did not end, or whose manifest was removed. Taken is only what the files
            prove to be a whole version, with every checksum intact: one that a temporary manifest
            names, or deltas of every table where a version has no step, payload, scalars and tables
            by key.
        progress: called with the number of rows done and the total; True shows a bar.

    Keys and payload are copied if they are intact, and otherwise named in the report.

    Raises NotAStoreError, FormatError, VersionError, ExistsError, InvalidInputError, StoreFullError
    and StoreIOError; AccessError for a file that this process may not read, which may be intact.
    With `adopt`, VersionError for newer files that may not be a whole version, CorruptStoreError
    for damaged ones, and LockedError for a store that is open for writing.
    """
    if adopt and version is not None:
        raise InvalidInputError(
            f"adopt takes what is newer than every version that is kept; leave version={version!r} "
            "or adopt out"
        )
    fills = _checked(_DEFAULT_FILL if fill is None else fill)
    source, where = _io.locate(src), _on_disk(dest)
    to = _on_disk(where.with_name(where.name + ".rows.csv") if listed is None else listed)
    for path in (where, to):
        if isinstance(source, Path) and path.resolve().is_relative_to(source.resolve()):
            raise InvalidInputError(f"{path} is inside {source}, which must not be modified")
    with open_directory(source) as directory, folds_kept_away(directory):
        if isinstance(source, Path):  # objects cannot all be tried
            check_readable(directory)
        found = survey(directory)
        report = RepairReport(0, to, left_out=list(found.damage))
        chosen = _adopt(source, directory, found, report) if adopt else found.choose(version)
        report.version = chosen.version
        total = sum(info.spec.rows for info in chosen.tables.values())
        kind = _PartitionedRepair if chosen.partitions else _Repair
        overall = Overall(shown(progress), total)
        kind(directory, found, chosen, fills, overall, report).run(where)
        overall.finish()
    if fill is None and report.filled:
        warn(
            f"{counted(report.filled, 'row')} of {source} had no intact value and became zero in "
            f"{where}; {to} lists them: give fill= to choose what they become",
            FilledRowsWarning,
        )
    return report


def _adopt(source: Any, directory: _io.Directory, found: Survey, report: RepairReport) -> Manifest:
    """Return a manifest of the newest version that newer files prove, and record it."""
    writer = writer_of(source) if isinstance(source, Path) else None
    if writer is not None:
        raise LockedError(
            f"{source} is open for writing by {writer}, whose commit may be under way; close it "
            "to adopt what a commit left"
        )
    made, left = adopted(directory, found)
    report.adopted = [each.version for each in made]
    report.left_out += left
    return made[-1]


def _on_disk(path: str | os.PathLike[str]) -> Path:
    where = _io.locate(path)
    if not isinstance(where, Path):
        raise InvalidInputError(f"{where} is not on a disk; repair to a disk, then save a copy")
    return where


def _checked(fill: Fill | Sequence[Fill]) -> list[Fill]:
    fills: list[Fill] = [fill] if isinstance(fill, str | Initializer) else list(fill)
    for each in fills:
        if each not in ("version", "zeros", "nan") and not isinstance(each, Initializer):
            raise InvalidInputError(
                f"not a fill value: {each!r}; give 'version', 'zeros', 'nan' or an initializer"
            )
    return fills


class _Repair:
    """A repair in progress, of a store or of a partition of one."""

    def __init__(
        self,
        directory: _io.Directory | None,
        found: Survey | None,
        manifest: Manifest,
        fills: list[Fill],
        progress: Overall,
        report: RepairReport,
    ) -> None:
        """Copy what a manifest names; nothing without a directory and its contents."""
        self._directory = directory
        self._floor = 0 if found is None else found.history.floor()
        self._manifest = manifest
        known = () if found is None else found.history.manifests()
        self._older = [
            each
            for each in sorted(known, key=lambda each: each.seq, reverse=True)
            if each.seq < manifest.seq and descends(manifest.version, manifest.forks, each.version)
        ]
        self._fills = fills
        self._progress = progress
        self._report = report
        self._keys_before: dict[str, int] = {}
        """Keys of the partitions before, by table."""

    def run(self, where: Path) -> None:
        """Write the list and the store; remove the list if the store cannot be published."""
        check_free(where)
        with (
            contextlib.ExitStack() as end,
            _io.publish_directory(where) as directory,
        ):
            end.callback(self._remove_list_without, where)  # an interrupt may come at any time
            try:
                with (
                    _io.publish(self._report.listed) as file,
                    contextlib.closing(RowList(file)) as rows,
                ):
                    self._write(directory, rows)
            except ExistsError:
                end.pop_all()  # the list of another repair
                raise
            self._check_still_there()

    def _remove_list_without(self, where: Path) -> None:
        """Remove the list unless the store exists."""
        if not os.path.lexists(where):
            self._report.listed.unlink(missing_ok=True)

    def _write(self, directory: _io.Directory, rows: RowList) -> None:
        """Write a copy to an empty directory, and list the rows that are not intact."""
        manifest = self._manifest
        tables: dict[str, TableInfo] = {}
        for name, info in manifest.tables.items():
            tables[name] = self._copy_table(directory, name, info, rows)
            self._progress.passed(info.spec.rows)
        write_copy(directory, manifest, tables, self._copy_payload(directory))

    def _copy_payload(self, directory: _io.Directory) -> dict[str, PayloadInfo]:
        payload: dict[str, PayloadInfo] = {}
        for name, value in self._manifest.payload.items():
            try:
                committed = Payload(cast(_io.Directory, self._directory), value)
                committed.verify()
            except TierStoreError as error:
                self._report.left_out.append(f"payload {name}: {error}")
            else:
                payload[name] = copy_payload(committed, directory, unique_name("payload-", 1))
        return payload

    def _copy_table(
        self, directory: _io.Directory, name: str, info: TableInfo, rows: RowList
    ) -> TableInfo:
        by_key = info.spec.keys is not None
        outcome = self._report.tables.setdefault(name, TableRepair(0 if by_key else info.spec.rows))
        outcome.rows += _known(info) if by_key else 0
        with (
            contextlib.closing(
                _Sources(self._directory, name, self._manifest, self._older, self._floor)
            ) as sources,
            directory.make_directory(name) as target,
        ):
            outcome.unknown += sources.unknown
            rows.unknown(name, sources.unknown)
            found, damage = _read_keys(sources.table, info)
            called = found.keys_of if isinstance(found, KeyMap) else None
            blocks = self._blocks(name, sources, rows, outcome, called)
            created = generations.create(target, info.spec, 1, blocks, self._progress)
            keys = _write_keys(found, info.spec, target, created.generation)
        if damage:
            self._report.left_out.append(f"keys of table {name}: {damage}")
        return dataclasses.replace(created, scalars=dict(info.scalars), keys=keys)

    def _blocks(
        self,
        name: str,
        sources: _Sources,
        rows: RowList,
        outcome: TableRepair,
        called: Callable[[Rows], Iterable[Any]] | None,
    ) -> Iterator[Records]:
        """Yield the records of the new table, and record which are not the newest image."""
        filler = _filler(self._fills, self._manifest.tables[name].spec)
        takes_older = "version" in self._fills
        for found in sources.blocks():
            self._see(found)
            older = (found.state == OLDER) & takes_older
            filled = (found.state == LOST) | ((found.state == OLDER) & ~older)
            if filled.any():
                found.records[filled] = filler(found.rows[filled])
            ids = self._ids_of(name, found.rows)
            is_row = ids >= 0
            outcome.older += int((older & is_row).sum())
            outcome.filled += int((filled & is_row).sum())
            which = np.flatnonzero((older | filled) & is_row)
            images = np.where(filled[which], FILLED, found.versions[which])
            if called is None:
                rows.add(name, ids[which], images)
            elif which.size:
                rows.add_keys(name, called(found.rows[which]), images)
            yield found.records

    def _see(self, found: Found) -> None:
        """Change the state of images that differs for the store as a whole."""

    def _ids_of(self, name: str, rows: Rows) -> Rows:
        """Return the ids of rows, ascending; -1 for rows without an id, or without a key."""
        info = self._manifest.tables[name]
        if info.spec.keys is None:
            return rows
        return np.where(rows < _known(info), rows + self._keys_before.get(name, 0), -1)

    def _check_still_there(self) -> None:
        """Raise if a writer removed the version meanwhile, so missing files may not be damage."""
        directory = cast(_io.Directory, self._directory)
        is_there = self._report.adopted or directory.exists(manifest_name(self._manifest.seq))
        if not self._report.complete and not is_there:
            raise StoreIOError(
                f"{directory.path} was changed by its writer while version "
                f"{self._manifest.version} was copied; close the writer and repair again"
            )


class _PartitionedRepair(_Repair):
    """The repair of a store with partitions, each of which is copied as a store."""

    def _write(self, directory: _io.Directory, rows: RowList) -> None:
        manifest = self._manifest
        for name, info in manifest.tables.items():
            rows_by_id = info.spec.rows if info.spec.keys is None else 0
            self._report.tables[name] = TableRepair(rows_by_id)
        self._keys_before = dict.fromkeys(manifest.tables, 0)
        with directory.make_directory(PARTITIONS) as place:
            for number in range(len(manifest.partitions)):
                with place.make_directory(partition_name(number)) as target:
                    self._copy_partition(number, target, rows)
        tables = {
            name: self._copy_whole(directory, name, info) for name, info in manifest.tables.items()
        }
        payload = self._copy_payload(directory)
        write_copy(directory, manifest, tables, payload, partitions=manifest.partitions)

    def _copy_whole(self, directory: _io.Directory, name: str, info: TableInfo) -> TableInfo:
        """Return the entry of a table in the root of the copy, including its external keys."""
        copied = TableInfo(info.spec, "", scalars=dict(info.scalars))
        if info.keys is None:
            return copied
        source, generation = cast(_io.Directory, self._directory), unique_name("g", 1)
        table: _io.Directory | None = None
        with contextlib.ExitStack() as held, directory.make_directory(name) as target:
            with contextlib.suppress(FileNotFoundError, TierStoreError):
                table = held.enter_context(source.directory(name))
            target.make_directory(generation).close()
            found, damage = _read_keys(table, info)
            keys = _write_keys(found, info.spec, target, generation)
            target.sync()
        if damage:
            self._report.left_out.append(f"keys of table {name}: {damage}")
            return copied
        return dataclasses.replace(copied, generation=generation, keys=keys)

    def _copy_partition(self, number: int, target: _io.Directory, rows: RowList) -> None:
        """Copy a partition, or write filler rows for a missing one."""
        source = cast(_io.Directory, self._directory)
        with contextlib.ExitStack() as held:
            part: _io.Directory | None = None
            found: Survey | None = None
            try:
                part = held.enter_context(partition_directory(source, number))
                held.enter_context(folds_kept_away(part))
                found = survey(part)
                self._report.left_out += [f"{part.path}: {each}" for each in found.damage]
            except (TierStoreError, FileNotFoundError) as error:
                self._report.left_out.append(str(error))
            common = self._fills, self._progress, self._report
            job = _PartRepair(number, self._manifest, part, found, *common)
            job._keys_before = self._keys_before
            job._write(target, rows)
            for name, info in job._manifest.tables.items():
                self._keys_before[name] += _known(info)


class _PartRepair(_Repair):
    """The repair of a partition at the version that the store's manifest names."""

    def __init__(
        self,
        number: int,
        whole: Manifest,
        directory: _io.Directory | None,
        found: Survey | None,
        fills: list[Fill],
        progress: Overall,
        report: RepairReport,
    ) -> None:
        """Copy what it names, or the newest version before, or the next one, or filler rows."""
        self._number = number
        self._whole = whole
        version, mark = whole.partitions[number]
        shapes = _in_partitions(whole)
        versions = {} if found is None else found.versions
        there = number_in_part(marks_of(versions), version, mark)
        if there not in versions:
            newer = min(versions, default=0)
            there = max((each for each in versions if each <= version), default=newer)
        manifest = versions.get(there) or Manifest(whole.uuid, 1, version, {})
        self._is_newest = manifest.mark == mark
        tables = {name: _fitting(manifest.tables.get(name), each) for name, each in shapes.items()}
        if directory is not None and versions:
            report.left_out += [
                f"{directory.path}: table {name!r} has other fields, rows or keys there than in "
                "the manifest of the store"
                for name, info in tables.items()
                if info is shapes[name]  # of one by key no row would tell
            ]
        manifest = dataclasses.replace(
            manifest, version=version, mark=mark, tables=tables, payload={}
        )
        super().__init__(directory, found, manifest, fills, progress, report)

    def _see(self, found: Found) -> None:
        if not self._is_newest:
            found.state[found.state == WHOLE] = OLDER

    def _ids_of(self, name: str, rows: Rows) -> Rows:
        if self._manifest.tables[name].spec.keys is not None:
            return super()._ids_of(name, rows)
        total, count = self._whole.tables[name].spec.rows, len(self._whole.partitions)
        ids: Rows = Shard(total, count, 0, count).rows_in(self._number, rows)
        return np.where(ids < total, ids, -1)


def _in_partitions(whole: Manifest) -> dict[str, TableInfo]:
    """Return the tables of a partition, with generations that do not exist."""
    count, generation = len(whole.partitions), unique_name("g", 1)
    return {
        name: TableInfo(of_partition(info.spec, Shard(info.spec.rows, count, 0, 1)), generation)
        for name, info in whole.tables.items()
    }


def _fitting(info: TableInfo | None, needed: TableInfo) -> TableInfo:
    """Return the entry of a table in a manifest, or the required entry if its shape differs."""
    if info is None or info.spec.layout != needed.spec.layout:
        return needed
    is_fitting = info.spec.rows == needed.spec.rows or needed.spec.keys is not None
    return info if is_fitting and info.spec.keys == needed.spec.keys else needed


class _Sources:
    """The images of a table in all its generations."""

    def __init__(
        self,
        store: _io.Directory | None,
        name: str,
        manifest: Manifest,
        older: Sequence[Manifest],
        floor: int,
    ) -> None:
        self.table: _io.Directory | None = None
        with contextlib.suppress(FileNotFoundError, TierStoreError):
            self.table = None if store is None else store.directory(name)
        self._newest = Images(self.table, name, manifest, older, floor=floor)
        self.unknown = self._newest.unknown
        self._before: list[Images] = []
        layout, seen = manifest.tables[name].spec.layout, {manifest.tables[name].generation}
        for each in older:
            info = each.tables.get(name)
            if info is not None and info.generation not in seen and info.spec.layout == layout:
                seen.add(info.generation)
                self._before.append(Images(self.table, name, each, floor=floor))

    def blocks(self) -> Iterator[Found]:
        """Yield all rows in order, in blocks, each from an intact image."""
        for found in self._newest.blocks():
            for images in self._before:
                self._look_in(images, found)
            yield found

    @staticmethod
    def _look_in(images: Images, found: Found) -> None:
        """Use the images of lost rows in an older generation."""
        lost = np.flatnonzero((found.state == LOST) & (found.rows < images.info.spec.rows))
        if not lost.size:
            return
        before = images.find(found.rows[lost])
        here = np.flatnonzero(before.state != LOST)
        found.records[lost[here]] = before.records[here]
        found.versions[lost[here]] = before.versions[here]
        found.state[lost[here]] = OLDER

    def close(self) -> None:
        """Close all files."""
        for images in [self._newest, *self._before]:
            images.close()
        if self.table is not None:
            self.table.close()


def _known(info: TableInfo) -> int:
    """Return the number of rows of a table by key that have a key; 0 of another."""
    return 0 if info.spec.keys is None or info.keys is None else info.keys.count


def _read_keys(table: _io.Directory | None, info: TableInfo) -> tuple[Any, str]:
    """Return the keys of a table, of one by key as a map, or None; and the damage."""
    if info.keys is None:
        return None, ""
    try:
        if table is None:
            return None, "the table's directory is missing"
        with table.directory(info.generation) as directory:
            return read_keys_of(directory, info, info.keys), ""
    except FileNotFoundError as error:
        return None, f"{error.filename} is missing"
    except TierStoreError as error:
        return None, str(error)


def _write_keys(
    keys: Any, spec: TableSpec, target: _io.Directory, generation: str
) -> KeysInfo | None:
    """Write what `_read_keys` returned to a generation; return its description."""
    every = keys.keys_of(np.arange(len(keys))) if isinstance(keys, KeyMap) else as_stored(keys)
    with target.directory(generation) as directory:
        return write_keys_of(directory, spec, every)


def _filler(fills: Sequence[Fill], spec: TableSpec) -> Callable[[Rows], Records]:
    """Return a function that produces records for rows without an image."""
    fill = next((each for each in fills if each != "version"), "zeros")
    layout = spec.layout
    if isinstance(fill, Initializer):
        return _by_initializer(spec, fill)
    record = np.zeros((1, layout.record_bytes), np.uint8)
    if fill == "nan":
        for name, item in layout.fields:
            nan = item.element.nan()
            if nan is None:
                raise InvalidInputError(f"field {name!r} is {item.dtype}, which has no NaN")
            layout.view(record, name)[:] = nan
    return lambda rows: np.repeat(record, rows.size, axis=0)


def _by_initializer(spec: TableSpec, initializer: Initializer) -> Callable[[Rows], Records]:
    """Return a function that produces records with the first field set by an initializer."""
    fields = {name: dataclasses.replace(item, init=None) for name, item in spec.fields.items()}
    made = dataclasses.replace(spec, fields=fields, init=initializer, sparse=False).seeded()

    def records(rows: Rows) -> Records:
        parts = []
        for block in np.unique(rows // BLOCK_ROWS).tolist():
            here = rows[rows // BLOCK_ROWS == block] - block * BLOCK_ROWS
            parts.append(next(generations.initial_records(made, block * BLOCK_ROWS))[here])
        return np.concatenate(parts)

    return records


def mend_rows(state: State, report: VerifyReport) -> None:
    """Rewrite damaged rows of a writer's tables, and record them in the report.

    These are rows whose newest image is intact elsewhere: in the host tier, which verified it when
    it was read; or in a delta that only an older manifest still names, with the checksum of the
    damaged image. The next commit contains the rewritten rows.
    """
    newest = state.manifest
    kept = [
        each
        for each in state.history.manifests()
        if each.seq < newest.seq and each.version <= newest.version
    ]
    for name, bad in report.bad_rows.items():
        if name in state.backings:
            report.mended[name] = _mend(state, state.backings[name], bad, kept)


def _mend(state: State, table: Backing, bad: Sequence[int], kept: Sequence[Manifest]) -> list[int]:
    space = table.space
    space.flush_gpu()
    rows = np.array(bad, np.int64)
    live = table.disk.live
    done = rows[:0] if live is None else np.intersect1d(rows, live.ids)
    if space.host is not None:
        there = space.host.mark_changed(table.extent.in_space(np.setdiff1d(rows, done)))
        done = np.union1d(done, table.extent.own(there))
    rest = np.setdiff1d(rows, done)
    if rest.size:
        done = np.union1d(done, _mend_from_disk(state, table, rest, kept))
    return list(map(int, done))


def _mend_from_disk(state: State, table: Backing, rows: Rows, kept: Sequence[Manifest]) -> Rows:
    with state.directory.directory(table.name) as parent:
        images = Images(parent, table.name, state.manifest, kept)
    try:
        found = images.find(rows)
    finally:
        images.close()
    which = np.flatnonzero(found.state == WHOLE)
    table.disk.write(rows[which], found.records[which])
    return rows[which]
