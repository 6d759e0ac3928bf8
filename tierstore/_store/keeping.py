"""Named versions, and restoring an open store to a kept version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tierstore._disk.manifest import Manifest, Written, is_version_name
from tierstore._door import Use
from tierstore._progress import Progress
from tierstore._store.alter import alone_to
from tierstore._store.commit import clean_up
from tierstore._store.compaction import Folder
from tierstore._store.lineage import pruned
from tierstore._store.state import State
from tierstore.errors import InvalidInputError, InvalidTypeError, LockedError, UnknownNameError


def check_version_name(name: object) -> str:
    """Return `name` if it is a valid version name; raises InvalidTypeError, InvalidInputError."""
    if not isinstance(name, str):
        raise InvalidTypeError(f"the name of a version must be a str such as 'best', not {name!r}")
    if not is_version_name(name):
        raise InvalidInputError(
            f"not a version's name: {name!r}; 1 to 1024 printable characters are"
        )
    if name.isdecimal():
        raise InvalidInputError(
            f"not a version's name: {name!r}, which would be taken for version {int(name)}; add a "
            f"letter, such as 'v{name}'"
        )
    return name


def give(state: State, version: int | str, name: str) -> None:
    """Give a version a name, by which it is kept; any other version loses it."""
    number = state.history.version(version).version
    if state.ledger.names.get(name) != number:
        state.change(names={**state.ledger.names, name: number})


def check_foldable(names: Mapping[str, int], newest: int) -> None:
    """Raise InvalidInputError if a version that a fold would drop is kept under a name."""
    for name, version in names.items():
        if version != newest:
            raise InvalidInputError(
                f"version {version} is kept as {name!r}, and a fold drops all but the newest: "
                f"call store.release({name!r}) or 'tierstore release' first"
            )


def fold(state: State, folder: Folder, progress: Progress | None = None) -> list[int]:
    """Drop all versions but the newest, whose deltas are merged into the bases; return those.

    Raises LockedError while an older one is read. What is folded when an error is raised stays
    readable.
    """

    def check() -> set[int]:
        state.check_clean("fold")
        check_foldable(state.manifest.names, state.manifest.version)
        return set(state.ledger.versions) if state.ranks.leads else set()

    def fold_now(progress: Progress | None) -> None:
        if not folder.fold(state.manifest.version, progress):
            raise LockedError(
                f"{state.oldest_reader()} is open for reading from {state.directory.path}; fold "
                "once that reader is closed or has called refresh()"
            )

    with state.door.use(write=True) as use, state.alone("fold"), state.interruptible(use):
        before = set[int]().union(*state.ranks.together("check that it can fold", check))
        state.fold_all(fold_now, progress)
        return sorted(before - {state.manifest.version})


def take(state: State, name: str) -> None:
    """Take a name from its version, which may be removed unless it is kept otherwise."""
    names = dict(state.ledger.names)
    if name not in names:
        listed = ", ".join(map(repr, names)) or "none"
        raise UnknownNameError(f"no version is kept as {name!r}; there are: {listed}")
    del names[name]
    state.change(names=names)


def restore(state: State, folder: Folder, version: int | str) -> None:
    """Restore an open writer to a kept version, as a new version; drop uncommitted rows.

    Raises VersionError for a version that is not kept, CorruptStoreError for one that is damaged;
    the store is then unchanged.
    """
    before = older = state.manifest

    def find() -> bool:
        """Choose what is to be restored, which can be opened; tell whether it is open already."""
        nonlocal older
        if version not in (before.version, before.restored):
            older = state.history.version(version)
        if older is before or older.mark == before.mark != "":
            return True
        state.check_restorable(older)
        return False

    def work(_: Use) -> None:
        if state.ranks.each("find the version", find):
            state.roll_back()
        else:
            state.restore_all(older, lambda number: as_restored(older, before, number))
        if state.ranks.leads:
            clean_up(state, folder)

    alone_to("restore a version", state, folder, work)


def as_restored(older: Manifest, before: Manifest, version: int) -> dict[str, Any]:
    """Return the manifest changes, but for its contents, of a version that restores an older one.

    `before` is the version that is open.
    """
    return {
        "version": version,
        "previous": older.version,
        "mark": older.mark,
        "payload_mark": older.payload_mark,
        # A model elsewhere may need unconfirmed versions.
        "confirmed": version if before.confirmed >= before.version else before.confirmed,
        "origin": older.origin,
        "commits": older.commits + 1,
        "written": Written(),
        "forks": pruned((*older.forks, (version, older.version)), before.floor),
    }
