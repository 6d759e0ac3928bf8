"""What the rows of a table are like: norms, and how many are zero, NaN or infinite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import Table
from tierstore_cli.text import BLOCKS

SAMPLE_ROWS = 100_000
NORMS_KEPT = 1_000_000
BINS = 16

Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class RowStats:
    """What the rows of one field are like.

    Attributes:
        rows_read: how many were looked at.
        zero_rows, nan_rows, inf_rows: those that are all zero, hold a NaN, or else an infinity.
        norm: Euclidean norms of finite rows: min, p1, p50, p99, max; None where there are none.
        histogram: finite rows in equal bins of norm from p1 to p99, outliers in the outer bins.
    """

    field: str
    rows_read: int
    zero_rows: int
    nan_rows: int
    inf_rows: int
    norm: dict[str, float | None]
    histogram: list[int]

    def sparkline(self) -> str:
        """Return the histogram in block characters; a bin with no row is blank."""
        top = max(self.histogram, default=0)
        steps = [-(-count * len(BLOCKS) // top) if top else 0 for count in self.histogram]
        return "".join(BLOCKS[step - 1] if step else " " for step in steps)


def row_stats(
    table: Table, field: str, full: bool, progress: Callable[[int, int], None]
) -> RowStats:
    """Read every row if `full`, else at most SAMPLE_ROWS chosen at random, and describe them.

    Memory does not depend on the number of rows: of more than NORMS_KEPT norms, every k-th is kept.
    """
    total = table.rows if full else min(table.rows, SAMPLE_ROWS)
    blocks = table.scan(field) if total == table.rows else _sample(table, field, total)
    stride = -(-total // NORMS_KEPT)
    kept: list[npt.NDArray[np.float64]] = []
    done = zero = nan = inf = 0
    for values in blocks:
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


def _sample(table: Table, field: str, count: int) -> Iterator[Floats]:
    """Read `count` distinct rows in ascending order; the same ones every time."""
    ids = np.sort(np.random.default_rng(0).choice(table.rows, count, replace=False, shuffle=False))
    for start in range(0, count, 8192):
        yield table.read(ids[start : start + 8192], field=field, cache=False)


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
