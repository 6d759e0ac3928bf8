"""Folding a partitioned store: the root drops older versions first, then each partition folds.

A rank that is killed in between leaves the newest version, whole: a fold changes where rows are,
and not what they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.errors import InvalidInputError

if TYPE_CHECKING:
    from tierstore._progress import Progress
    from tierstore.distributed.store import DistributedStore


def fold(store: DistributedStore, progress: Progress | None) -> list[int]:
    """Merge all deltas, and return the versions that were dropped; see `DistributedStore.fold`."""
    store._agree("fold", {})
    manifest, ranks = store._root.manifest, store._ranks

    def check() -> set[int]:
        store._check_clean("fold")
        for name, version in manifest.names.items():
            if version != manifest.version:
                raise InvalidInputError(
                    f"version {version} is kept as {name!r}, and a fold drops all but the newest: "
                    f"call store.release({name!r}) or 'tierstore release' first"
                )
        return set(store._root.versions())

    with store._door.use(write=True), store._closed_when_broken():
        before = set.union(*ranks.together("check that it can fold", check))
        store._root.fold()
        store._settle()
        ranks.together("fold its partitions", lambda: store._parts.fold(progress))
    return sorted(before - {manifest.version})
