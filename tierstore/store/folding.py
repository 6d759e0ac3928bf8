"""Folding: merging deltas into the base they lie over.

Every record a fold writes is a whole image that a delta still holds, so a fold that is cut short is
simply done again, and readers of the folded versions never see its traces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tierstore.manifest import TableInfo
from tierstore.store.history import FOLD
from tierstore.table import Table

if TYPE_CHECKING:
    from tierstore.store.session import Session

__all__ = ["fold", "fold_if_quick", "wants_fold"]

_MOST_DELTAS = 64
_MOST_BYTES = 1 << 30
_QUICK_BYTES = 64 << 20


def wants_fold(table: Table, upto: int) -> bool:
    """Whether deltas up to a version exceed 64, or both 1 GiB and a quarter of the base."""
    deltas = [delta.info for delta in table.disk.deltas if delta.info.version <= upto]
    nbytes = sum(delta.size for delta in deltas)
    return len(deltas) > _MOST_DELTAS or nbytes > max(_MOST_BYTES, table.spec.nbytes // 4)


def _fold_tables(tables: Iterable[Table], upto: int) -> dict[str, TableInfo]:
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


def fold(session: Session, upto: int) -> bool:
    """Fold the deltas of versions up to `upto`; return False where readers prevent it."""
    newest = upto == session.manifest.version
    keep = 1 if newest else session.keep
    with session.directory.open_file(FOLD, write=True) as lock:
        if not lock.lock(exclusive=True):
            return False
        session.publish(floor=upto, confirmed=upto if newest else session.manifest.confirmed)
        session.sweep(keep, unread=True)
        infos = _fold_tables(session.tables.values(), upto)
        session.publish(tables=infos)
        session.sweep(keep, unread=True)
    return True


def fold_if_quick(session: Session) -> None:
    """Fold to the oldest kept version, if there is something and it takes but a moment."""
    deltas = [delta.info for table in session.tables.values() for delta in table.disk.deltas]
    if not deltas or sum(delta.size for delta in deltas) > _QUICK_BYTES:
        return
    oldest = min(session.history.versions())
    if any(delta.version <= oldest for delta in deltas):
        fold(session, oldest)
