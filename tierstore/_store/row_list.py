"""The list of rows that a repair could not copy unchanged."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["RowList"]

Rows = npt.NDArray[np.int64]


class RowList:
    """The CSV list of rows without their newest image, one run of rows per line."""

    def __init__(self, path: Path) -> None:
        """Begin a file, which must not exist."""
        self._file = path.open("x", newline="", encoding="utf-8")
        self._out = csv.writer(self._file, lineterminator="\n")
        self._out.writerow(("table", "first", "last", "rows", "outcome", "version"))
        self._run: tuple[str, int, int, str, int | str] | None = None

    def unknown(self, table: str, count: int) -> None:
        """Record how many rows of a table may be older."""
        if count:
            self._out.writerow((table, "", "", count, "unknown", ""))

    def add(
        self,
        table: str,
        rows: Rows,
        older: npt.NDArray[np.bool_],
        filled: npt.NDArray[np.bool_],
        versions: npt.NDArray[np.int64],
    ) -> None:
        """List the rows that are older, with their versions, and those that are filled."""
        which = np.flatnonzero(older | filled)
        kinds = np.where(filled[which], -1, versions[which])
        ids = rows[which]
        cuts = np.flatnonzero((np.diff(ids) != 1) | (np.diff(kinds) != 0)) + 1
        for part in np.split(np.arange(ids.size), cuts) if ids.size else ():
            kind = int(kinds[part[0]])
            self._add_run(table, int(ids[part[0]]), int(ids[part[-1]]), kind)

    def _add_run(self, table: str, first: int, last: int, kind: int) -> None:
        """Extend the previous run if this one continues it, or write it."""
        outcome: tuple[str, int | str] = ("filled", "") if kind < 0 else ("older", kind)
        run = self._run
        if run is not None and (run[0], run[2] + 1, *run[3:]) == (table, first, *outcome):
            self._run = (table, run[1], last, *outcome)
            return
        self._flush()
        self._run = (table, first, last, *outcome)

    def _flush(self) -> None:
        if self._run is not None:
            table, first, last, outcome, version = self._run
            self._out.writerow((table, first, last, last + 1 - first, outcome, version))
        self._run = None

    def close(self) -> None:
        """Write the last line and close the file."""
        with self._file:
            self._flush()
