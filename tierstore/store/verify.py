"""Checking a store: every row and file against its checksum, going on after damage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tierstore import io, memory
from tierstore.disk.base import Progress
from tierstore.disk.generation import Generation
from tierstore.disk.tier import DiskTier
from tierstore.errors import TierStoreError
from tierstore.manifest import Manifest, TableInfo
from tierstore.store.history import History
from tierstore.store.payload import Payload
from tierstore.table import Table

__all__ = ["VerifyReport", "verify_store"]

Rows = npt.NDArray[np.int64]

_BLOCK_BYTES = 1 << 20
"""Records checked at a time: they stay in a core's cache from the copy to the checksum."""


@dataclass
class VerifyReport:
    """What was checked, and what is damaged.

    `bad_rows` are row ids by table, `bad_files` names of files, or what is wrong with an older
    version that is kept.
    """

    rows_checked: int = 0
    bad_rows: dict[str, list[int]] = field(default_factory=dict)
    bad_files: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""
        return not self.bad_files and not any(self.bad_rows.values())


def verify_store(
    tables: Iterable[Table],
    payload: Mapping[str, Payload],
    manifest: Manifest,
    history: History,
    directory: io.Directory,
    *,
    sample: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check the tables, keys and payload of an open version, and what older ones add to it.

    With `sample`, that many random rows of each table, and no older version. The manifest, headers,
    ids and footers of the open version were checked when it was opened.
    """
    report = VerifyReport()
    tables = list(tables)
    total = sum(table.rows if sample is None else min(sample, table.rows) for table in tables)
    for table in tables:
        bad: set[int] = set()
        for rows in _blocks(table, sample):
            bad.update(table.disk.damaged(rows))
            report.rows_checked += rows.size
            if progress is not None:
                progress(report.rows_checked, total)
        bad = _not_folding(table.disk, bad, history)
        if sample is None:
            bad.update(row for delta in table.disk.deltas for row in delta.damaged())
        report.bad_rows[table.name] = sorted(bad)
        report.bad_files += _damaged_files(table.generation, history)
    report.bad_files += _damaged_payloads(manifest, payload, set())
    report.bad_files += history.damaged()
    if sample is None:
        seen = _files(manifest)
        for older in history.versions().values():
            report.bad_files += _damaged_in_kept(older, directory, history, seen)
            seen |= _files(older)
    memory.give_back()
    return report


def _blocks(table: Table, sample: int | None) -> Iterable[Rows]:
    if sample is not None and sample < table.rows:
        rows = np.sort(np.random.default_rng().choice(table.rows, sample, replace=False))
        yield from np.array_split(rows, max(1, -(-sample // _block_rows(table.disk))))
        return
    yield from _all_rows(table.disk)


def _block_rows(tier: DiskTier) -> int:
    return max(1, _BLOCK_BYTES // tier.record_bytes)


def _all_rows(tier: DiskTier) -> Iterable[Rows]:
    step = _block_rows(tier)
    for start in range(0, tier.rows, step):
        yield np.arange(start, min(start + step, tier.rows), dtype=np.int64)


def _not_folding(tier: DiskTier, bad: set[int], history: History) -> set[int]:
    """Return those of rows that are damaged in the base that count.

    A row that deltas up to the floor hold does not: a fold may be at work, or have been cut short,
    and the row is not read there. The floor is that of now, after the row was looked at.
    """
    return bad and bad - set(tier.rows_upto(history.floor()).tolist())


def _damaged_files(generation: Generation, history: History) -> list[str]:
    """Return what is damaged of a generation's files, by a floor that did not rise meanwhile."""
    floor = history.floor()
    while bad := generation.damaged_files(floor):
        before, floor = floor, history.floor()
        if floor == before:
            break
    return bad


def _damaged_payloads(
    manifest: Manifest, payload: Mapping[str, Payload], seen: set[str]
) -> list[str]:
    bad = []
    for name, info in manifest.payload.items():
        if info.name not in seen:
            try:
                payload[name].verify()
            except TierStoreError:
                bad.append(f"payload {name} of version {manifest.version}: {info.name}")
    return bad


def _files(manifest: Manifest) -> set[str]:
    """Return the names of all files and generations a version needs, which are unique."""
    names = {info.name for info in manifest.payload.values()}
    for info in manifest.tables.values():
        names |= {info.generation, *(delta.name for delta in info.deltas)}
        names |= set(info.keys.files) if info.keys else set()
    return names


def _damaged_in_kept(
    manifest: Manifest, directory: io.Directory, history: History, seen: set[str]
) -> list[str]:
    """Return what is wrong with a version, unless a writer removed it or its files meanwhile."""
    while True:
        found = _damaged_in_version(manifest, directory, history, seen)
        now = history.versions().get(manifest.version) if found else None
        if now is None:
            return []
        if now.seq == manifest.seq:
            return found
        manifest = now  # its files are others than before


def _damaged_in_version(
    manifest: Manifest, directory: io.Directory, history: History, seen: set[str]
) -> list[str]:
    """Return what is wrong with the files of a version that were not checked before."""
    payload = {name: Payload(directory, info) for name, info in manifest.payload.items()}
    bad = _damaged_payloads(manifest, payload, seen)
    for name, info in manifest.tables.items():
        where = f"table {name} of version {manifest.version}"
        try:
            with directory.directory(name) as table:
                generation = Generation(table, info, store=manifest.uuid, seq=None)
        except (TierStoreError, FileNotFoundError) as error:
            bad.append(f"{where}: {error}")
            continue
        try:
            rows = _damaged_rows(generation.tier, info, history, seen)
            if rows:
                bad.append(f"{where}: {len(rows)} rows, the first is row {min(rows)}")
            if info.generation not in seen:
                bad += [f"{where}: {file}" for file in _damaged_files(generation, history)]
        finally:
            generation.close()
    return bad


def _damaged_rows(tier: DiskTier, info: TableInfo, history: History, seen: set[str]) -> set[int]:
    bad = {row for delta in tier.deltas if delta.info.name not in seen for row in delta.damaged()}
    if info.generation not in seen:
        base = {row for rows in _all_rows(tier) for row in tier.damaged(rows)}
        bad |= _not_folding(tier, base, history)
    return bad
