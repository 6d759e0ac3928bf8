"""The list of rows that a repair could not copy unchanged."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]


FILLED = -1
"""Stands for the version of the image of a row that has none."""


def _outcome(kind: int) -> tuple[str, int | str]:
    return ("filled", "") if kind == FILLED else ("older", kind)


class RowList:
    """The CSV list of rows without their newest image, one run of rows, or one key, per line."""

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

    def add(self, table: str, ids: Rows, images: Rows) -> None:
        """List rows, each with the version of the image that it has, or FILLED."""
        cuts = np.flatnonzero((np.diff(ids) != 1) | (np.diff(images) != 0)) + 1
        for part in np.split(np.arange(ids.size), cuts) if ids.size else ():
            kind = int(images[part[0]])
            self._add_run(table, int(ids[part[0]]), int(ids[part[-1]]), kind)

    def add_keys(self, table: str, keys: Iterable[Any], images: Rows) -> None:
        """List rows of a table by key, a line each; see `add`."""
        self._flush()
        for key, kind in zip(keys, images.tolist(), strict=True):
            self._out.writerow((table, key, key, 1, *_outcome(kind)))

    def _add_run(self, table: str, first: int, last: int, kind: int) -> None:
        """Extend the previous run if this one continues it, or write it."""
        outcome = _outcome(kind)
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
