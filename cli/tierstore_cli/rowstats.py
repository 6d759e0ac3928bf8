"""Statistics of the rows of a table: norms, and counts of zero, NaN and infinite rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import Table
from tierstore_cli.printing import sparkline

SAMPLE_ROWS = 100_000
BLOCK_ROWS = 8192
NORMS_KEPT = 1_000_000
BINS = 16

Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class RowStats:
    """Statistics of the rows of one field.

    Attributes:
        rows_read: rows examined.
        zero_rows, nan_rows, inf_rows: rows of zeros, rows with a NaN, other rows with an infinity.
        norm: Euclidean norms of finite rows: min, p1, p50, p99, max; None if there are none.
        histogram: finite rows in equal bins of norm from p1 to p99, outliers in the outer bins.
    """

    field: str
    rows_read: int
    zero_rows: int
    nan_rows: int
    inf_rows: int
    norm: dict[str, float | None]
    histogram: list[int]

    def lines(self, table: Table) -> list[str]:
        """Return three lines for people."""
        of = "all" if self.rows_read == table.rows else f"{self.rows_read:,} of"
        norms = "  ".join(
            f"{name} {'–' if norm is None else f'{norm:.4g}'}" for name, norm in self.norm.items()
        )
        curve = sparkline(self.histogram, top=max(self.histogram, default=0))
        counts = f"zero {self.zero_rows:,}  nan {self.nan_rows:,}  inf {self.inf_rows:,}"
        return [
            f"{table.name} {self.field}, {of} {table.rows:,} rows",
            f"  norm   {norms}   {curve}",
            f"  rows   {counts}",
        ]


def row_stats(
    table: Table, field: str, full: bool, progress: Callable[[int, int], None]
) -> RowStats:
    """Read all rows if `full`, else a random sample of at most SAMPLE_ROWS, and describe them.

    Memory does not depend on the number of rows: of more than NORMS_KEPT norms, every k-th is kept.
    """
    total = table.rows if full else min(table.rows, SAMPLE_ROWS)
    stride = -(-total // NORMS_KEPT)
    kept: list[npt.NDArray[np.float64]] = [np.empty(0)]  # a table by key may have no rows
    done = zero = nan = inf = 0
    for values in _blocks(table, field, total):
        is_nan = np.isnan(values).any(axis=1)
        is_inf = np.isinf(values).any(axis=1)
        finite = values[~(is_nan | is_inf)]
        norms = np.sqrt(np.einsum("nd,nd->n", finite, finite, dtype=np.float64))
        kept.append(np.nan_to_num(norms[::stride]))  # a norm may overflow where no element does
        nan += int(is_nan.sum())
        inf += int((is_inf & ~is_nan).sum())
        zero += int((~values.any(axis=1)).sum())
        done += len(values)
        progress(done, total)
    return _described(field, done, (zero, nan, inf), np.concatenate(kept))


def _blocks(table: Table, field: str, count: int) -> Iterator[Floats]:
    """Yield all rows in order, or `count` distinct rows of a fixed random sample, ascending."""
    if count == table.rows:
        yield from table.scan(field)
        return
    ids = np.sort(np.random.default_rng(0).choice(table.rows, count, replace=False, shuffle=False))
    for start in range(0, count, BLOCK_ROWS):
        yield table.by_row.read(ids[start : start + BLOCK_ROWS], field, cache=False)


def _described(
    field: str, rows: int, counts: tuple[int, int, int], norms: npt.NDArray[np.float64]
) -> RowStats:
    names, points = ("min", "p1", "p50", "p99", "max"), (0, 1, 50, 99, 100)
    if not norms.size:
        return RowStats(field, rows, *counts, dict.fromkeys(names), [])
    marks = np.percentile(norms, points)
    low, high = float(marks[1]), float(marks[3])
    histogram, _ = np.histogram(norms.clip(low, high), BINS, (low, high))
    percentiles: dict[str, float | None] = {
        name: float(mark) for name, mark in zip(names, marks, strict=True)
    }
    return RowStats(field, rows, *counts, percentiles, histogram.tolist())
