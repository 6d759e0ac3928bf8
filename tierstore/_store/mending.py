"""Mending: rows that are damaged on disk are written again from a copy that is whole."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tierstore import _io
from tierstore._disk.images import WHOLE, Images
from tierstore._disk.manifest import Manifest
from tierstore._table.table import Table

__all__ = ["mend_rows"]

Rows = npt.NDArray[np.int64]


def mend_rows(
    directory: _io.Directory,
    table: Table,
    bad: Sequence[int],
    manifest: Manifest,
    kept: Sequence[Manifest],
) -> list[int]:
    """Write damaged rows of a writer's table again, those whose newest image is whole elsewhere.

    It is in the host tier, which checked it as it was read; or on disk, in a delta that only one of
    the `kept` manifests, no newer, still names, with the checksum that the damaged image has. What
    is written goes into the next commit. Returns the rows that a commit will make whole.
    """
    table._tiers.settle()
    rows = np.array(bad, np.int64)
    live = table._disk.live
    done = rows[:0] if live is None else np.intersect1d(rows, live.ids)
    if table._host is not None:
        done = np.union1d(done, table._host.mark_changed(np.setdiff1d(rows, done)))
    rest = np.setdiff1d(rows, done)
    if rest.size:
        done = np.union1d(done, _from_disk(directory, table, rest, manifest, kept))
    return list(map(int, done))


def _from_disk(
    directory: _io.Directory,
    table: Table,
    rows: Rows,
    manifest: Manifest,
    kept: Sequence[Manifest],
) -> Rows:
    with directory.directory(table.name) as parent:
        images = Images(parent, table.name, manifest, kept)
    try:
        found = images.find(rows)
    finally:
        images.close()
    which = np.flatnonzero(found.state == WHOLE)
    table._disk.write(rows[which], found.records[which])
    return rows[which]
