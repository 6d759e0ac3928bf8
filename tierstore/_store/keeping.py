"""Named versions, and restoring an open store to a kept version."""

from __future__ import annotations

from tierstore._disk.manifest import is_version_name
from tierstore._store.alter import alone_to
from tierstore._store.compaction import Folder
from tierstore._store.lineage import pruned
from tierstore._store.state import State
from tierstore.errors import InvalidInputError, InvalidTypeError, UnknownNameError

__all__ = ["check_version_name", "keep", "release", "restore"]


def check_version_name(name: object) -> str:
    """Return `name` if it is a valid version name; raises InvalidTypeError, InvalidInputError."""
    if not isinstance(name, str):
        raise InvalidTypeError(f"the name of a version must be a str such as 'best', not {name!r}")
    if not is_version_name(name):
        raise InvalidInputError(
            f"not a version's name: {name!r}; 1 to 1024 printable characters are"
        )
    return name


def keep(state: State, folder: Folder, version: int | str, name: str) -> int:
    """Keep a version under a name, which any other version loses; return its number."""
    check_version_name(name)

    def work() -> None:
        number = state.history.version(version).version
        if state.ledger.names.get(name) != number:
            state.change(names={**state.ledger.names, name: number})

    alone_to("keep a version", state, folder, work)
    return state.ledger.names[name]


def release(state: State, folder: Folder, name: str) -> None:
    """Remove a name from its version, which may be removed unless it is kept otherwise."""

    def work() -> None:
        names = dict(state.ledger.names)
        if name not in names:
            listed = ", ".join(map(repr, names)) or "none"
            raise UnknownNameError(f"no version is kept as {name!r}; there are: {listed}")
        del names[name]
        state.change(names=names)

    alone_to("release a version", state, folder, work)


def restore(state: State, folder: Folder, version: int | str) -> None:
    """Restore an open writer to a kept version, as a new version; drop uncommitted rows."""

    def work() -> None:
        if version in (state.manifest.version, state.restored):
            state.discard()
            return
        older = state.history.version(version)
        if older.mark == state.manifest.mark != "":
            state.discard()
            return
        state.check_whole(older)
        before, changes = state.manifest, state.next_version()
        forks = pruned((*older.forks, (changes["version"], older.version)), before.floor)
        if before.confirmed < before.version:  # a model elsewhere may need unconfirmed versions
            changes["confirmed"] = before.confirmed
        changes |= {"previous": older.version, "mark": older.mark, "forks": forks}
        changes |= {"payload_mark": older.payload_mark, "origin": older.origin}
        state.change_all(older, **changes)

    alone_to("restore a version", state, folder, work)
