"""Which rows differ between two versions, found from the deltas that only one of them has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tierstore._disk.generation import Generation
from tierstore._disk.partitioned_keys import KeyedPartitionedGeneration
from tierstore._keys.numbers import RowNumbers
from tierstore._rowcopy import unique
from tierstore._table.keyed import KeyedTable
from tierstore._table.table import Table, files_of, read_records

Rows = npt.NDArray[np.int64]

_BLOCK_BYTES = 4 << 20
_KEY_ROWS = 1 << 16


def changed_rows(old: Mapping[str, Table], new: Mapping[str, Table]) -> dict[str, Rows]:
    """Return the ascending ids of the rows of each new table that differ from the old one.

    They have other records or other keys; those of a table by key are `RowNumbers`. Tables without
    such rows are left out, but for those that have fewer rows than before. Every row of a table
    with other fields has changed.
    """
    changed = {}
    for name, table in new.items():
        before = old.get(name)
        rows = _changed(before, table)
        if rows.size or (before is not None and table.rows < before.rows):
            changed[name] = rows.view(RowNumbers) if isinstance(table, KeyedTable) else rows
    return changed


def same_fields(old: Table, new: Table) -> bool:
    """Whether the records of two tables consist of the same fields."""
    return [(name, item.dim, item.form) for name, item in old.fields.items()] == [
        (name, item.dim, item.form) for name, item in new.fields.items()
    ]


def _changed(old: Table | None, new: Table) -> Rows:
    if old is None or not same_fields(old, new):
        return np.arange(new.rows, dtype=np.int64)
    found = [np.empty(0, np.int64)]
    for pair in _pairs(old, new):
        for rows in pair.candidates(_step(new)):
            before, after = pair.in_old(rows), pair.in_new(rows)
            differ = (read_records(old, before) != read_records(new, after)).any(axis=1)
            found.append(after[differ])
        found.append(pair.in_new(np.arange(*pair.counts, dtype=np.int64)))
    return np.unique(np.concatenate([*found, *_with_other_keys(old, new)]))


def _with_other_keys(old: Table, new: Table) -> Iterator[Rows]:
    """Yield, in blocks, the rows that both tables have, with different keys."""
    if isinstance(old, KeyedTable) and isinstance(new, KeyedTable):
        for pair in _pairs(old, new):
            if not pair.new.continues_keys_of(pair.old):
                yield from pair.differing(old.keys_of, new.keys_of)
    elif (before := files_of(old)).info.keys != (after := files_of(new)).info.keys:
        whole = _Pair(before, after, (old.rows, new.rows))
        yield from whole.differing(_external(old.keys), _external(new.keys))


def _external(keys: Any) -> Callable[[Rows], Any]:
    """Return a function from rows to their external keys, or to zeros if there are none."""
    return lambda rows: np.zeros(rows.size, object) if keys is None else keys[rows]


def candidates(old: Table, new: Table) -> Iterator[Rows]:
    """Yield, in blocks, the rows of `new` that may differ from those of `old`.

    Both have the same fields; rows that only one of them has are left out.
    """
    for pair in _pairs(old, new):
        for rows in pair.candidates(_step(new)):
            yield pair.in_new(rows)


def _step(table: Table) -> int:
    return max(1, _BLOCK_BYTES // table.spec.layout.record_bytes)


def _as_they_are(rows: Rows) -> Rows:
    return rows


class _Pair(NamedTuple):
    """Two versions of the files of a table, or of a partition of it.

    Attributes:
        old, new: the generations.
        counts: their rows.
        in_old, in_new: return the rows of the whole table that rows of them are.
    """

    old: Generation
    new: Generation
    counts: tuple[int, int]
    in_old: Callable[[Rows], Rows] = _as_they_are
    in_new: Callable[[Rows], Rows] = _as_they_are

    def candidates(self, step: int) -> Iterator[Rows]:
        """Yield, in blocks, the rows of both versions that may differ, ascending.

        Two versions with the same base have the same image of a row unless a delta that only one of
        them has contains the row.
        """
        count = min(self.counts)
        if self.old.bases != self.new.bases:
            for start in range(0, count, step):
                yield np.arange(start, min(start + step, count), dtype=np.int64)
            return
        before, after = self.old.delta_rows(), self.new.delta_rows()
        ids = [{**before, **after}[name] for name in before.keys() ^ after.keys()]
        every = unique(np.concatenate([np.empty(0, np.int64), *ids]))
        every = every[every < count]  # a table by key has more rows by now
        for start in range(0, every.size, step):
            yield every[start : start + step]

    def differing(
        self, old_keys: Callable[[Rows], Any], new_keys: Callable[[Rows], Any]
    ) -> Iterator[Rows]:
        """Yield, in blocks, the rows of the new table that have other keys than in the old one."""
        for start in range(0, min(self.counts), _KEY_ROWS):
            rows = np.arange(start, min(start + _KEY_ROWS, *self.counts), dtype=np.int64)
            after = self.in_new(rows)
            before = np.asarray(old_keys(self.in_old(rows)), object)
            yield after[before != np.asarray(new_keys(after), object)]


def _pairs(old: Table, new: Table) -> Iterator[_Pair]:
    """Yield the parts of two versions of a table that have the same rows in the same places."""
    before: object = files_of(old)
    after: object = files_of(new)
    if not isinstance(before, KeyedPartitionedGeneration) or not isinstance(
        after, KeyedPartitionedGeneration
    ):
        yield _Pair(files_of(old), files_of(new), (old.rows, new.rows))
        return
    for number, parts in enumerate(zip(before.parts, after.parts, strict=True)):
        yield _Pair(
            *parts,
            (parts[0].key_count, parts[1].key_count),
            functools.partial(before.rows_in, number),
            functools.partial(after.rows_in, number),
        )
