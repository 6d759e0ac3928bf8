"""The records of a table as another spec wants them: with more fields, or with more rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tierstore.disk.generation import initial_records
from tierstore.spec import TableSpec
from tierstore.table import Table

__all__ = ["lengthened", "widened"]

Blocks = Iterator[npt.NDArray[np.uint8]]


def widened(table: Table, spec: TableSpec) -> Blocks:
    """Yield the records of a table with the fields that `spec` adds, in the new layout."""
    new = initial_records(spec)
    fresh = np.empty((0, spec.layout.record_bytes), np.uint8)
    for block in table.records():
        while len(fresh) < len(block):
            fresh = np.concatenate([fresh, next(new)])
        records, fresh = fresh[: len(block)], fresh[len(block) :]
        for name in table.fields:
            lo, hi = table.spec.layout.span(name)
            begin, end = spec.layout.span(name)
            records[:, begin:end] = block[:, lo:hi]
        yield records


def lengthened(table: Table, spec: TableSpec) -> Blocks:
    """Yield the records of a table, then the first records of the rows that `spec` adds."""
    yield from table.records()
    yield from initial_records(spec, table.rows)
