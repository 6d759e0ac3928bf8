"""Checking a store: every row and file against its checksum, going on after damage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tierstore.disk.base import Progress
from tierstore.errors import TierStoreError
from tierstore.payload import Payload
from tierstore.table import Table

__all__ = ["VerifyReport", "verify_store"]


@dataclass
class VerifyReport:
    """What was checked, and what is damaged: row ids by table, and names of files."""

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
    *,
    sample: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check the committed rows of tables, or `sample` random ones of each, and the payload.

    Manifest, headers, ids and footers were checked when the store was opened.
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
        if sample is None:
            bad.update(table.disk.damaged_deltas())
        report.bad_rows[table.name] = sorted(bad)
        report.bad_files += table.generation.damaged_files()
    for name, value in payload.items():
        try:
            value.verify()
        except TierStoreError:
            report.bad_files.append(f"payload {name}")
    return report


def _blocks(table: Table, sample: int | None) -> Iterable[npt.NDArray[np.int64]]:
    step = max(1, (8 << 20) // table.spec.layout.record_bytes)
    if sample is not None and sample < table.rows:
        rows = np.sort(np.random.default_rng().choice(table.rows, sample, replace=False))
        yield from np.array_split(rows, max(1, -(-sample // step)))
        return
    for start in range(0, table.rows, step):
        yield np.arange(start, min(start + step, table.rows), dtype=np.int64)
