"""Folding: merging deltas into the base they lie over.

Every record a fold writes is a whole image that a delta still holds, so a fold that is cut short is
simply done again, and readers of the folded versions never see its traces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from tierstore.manifest import TableInfo
from tierstore.table import Table

__all__ = ["fold_tables", "wants_fold"]

_MOST_DELTAS = 64
_MOST_BYTES = 1 << 30


def wants_fold(table: Table, upto: int) -> bool:
    """Whether deltas up to a version exceed 64, or both 1 GiB and a quarter of the base."""
    deltas = [delta.info for delta in table.disk.deltas if delta.info.version <= upto]
    nbytes = sum(delta.size for delta in deltas)
    return len(deltas) > _MOST_DELTAS or nbytes > max(_MOST_BYTES, table.spec.nbytes // 4)


def fold_tables(tables: Iterable[Table], upto: int) -> dict[str, TableInfo]:
    """Write the deltas of versions up to `upto` into the bases, durably.

    Returns what a manifest then says of the tables: the same without those deltas.
    """
    infos = {}
    for table in tables:
        table.disk.fold(*table.disk.newest(upto))
        info = table.generation.info
        kept = tuple(delta for delta in info.deltas if delta.version > upto)
        infos[table.name] = dataclasses.replace(info, deltas=kept)
    return infos
