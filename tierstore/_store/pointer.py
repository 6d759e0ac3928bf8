"""Pointers: references to a version, stored in states of layers or optimizers instead of rows.

Loading a pointer restores the store to that version. Versions are identified by their marks, so a
pointer is also valid for copies, and for a version that restores the one it names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from tierstore._disk.manifest import Identity, Manifest
from tierstore._store.pointed import StatePointer, claim
from tierstore._store.state import State
from tierstore.errors import InvalidInputError, counted

Pointer = Mapping[str, Any]


_MULTIPLE = 1024


def to_bytes(pointer: Pointer) -> bytes:
    """Return a pointer as bytes, for states that consist of tensors.

    The length is the same for any version: loaders such as torch.distributed.checkpoint load in
    place.
    """
    data = json.dumps(pointer, separators=(",", ":")).encode()
    return data.ljust(-(-len(data) // _MULTIPLE) * _MULTIPLE)


def from_bytes(data: bytes) -> dict[str, Any]:
    """Return the pointer that `to_bytes` wrote; raises InvalidInputError for anything else."""
    try:
        pointer = json.loads(data)
    except ValueError:
        pointer = None
    if not isinstance(pointer, dict):
        raise _not_a_pointer(data[:80])
    return pointer


def make_pointer(state: State) -> dict[str, Any]:
    """Return a pointer to the open version, made of JSON values.

    The version is kept as `pointer_to` says. In the payload of a running commit, the pointer is to
    the version being written, with which it is kept. Raises
    InvalidInputError if there are uncommitted rows or keys, which no version contains.
    """
    manifest, coming = state.manifest, state.coming
    where = {"path": str(state.directory.path), "uuid": manifest.uuid}
    if coming is not None:
        coming.is_named = True
        return {**where, "version": coming.version, "mark": coming.mark, "payload": True}
    rows = 0 if state.door.closed else state.uncommitted_rows()
    tables = [] if state.door.closed else list(state.touched.keys)
    if rows or tables:
        what = (
            counted(rows, "row is", "rows are") if rows else f"the keys of table {tables[0]!r} are"
        )
        raise InvalidInputError(
            f"{what} not committed in {state.directory.path}, and a state taken now would "
            "point to a version without them: call store.commit() before state_dict(), or "
            "store.commit(keep='best') if the state is to outlive this process; or commit the "
            "module itself, store.commit(payload={'model': model}); store.rollback() drops them"
        )
    return pointer_to(manifest, state.directory.path)


def pointer_to(manifest: Manifest, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a pointer to a version, which is kept while the pointer or a copy of it lives."""
    where = {"path": str(path), "uuid": manifest.uuid}
    pointer = {**where, "version": manifest.version, "mark": manifest.mark}
    return StatePointer(pointer, claim(manifest))


def wanted_version(
    pointer: Pointer,
    manifest: Manifest,
    versions: Callable[[], dict[int, Manifest]],
    identity: Identity,
    path: str | os.PathLike[str],
) -> int | None:
    """Return the kept version that a pointer names, or None if it is that of the open `manifest`.

    `versions` are those that are kept, of a store with this identity at this path. Raises
    InvalidInputError for a pointer to another store or to a version that is not kept.
    """
    if not isinstance(pointer, Mapping):
        raise _not_a_pointer(pointer)
    try:
        uuid, number, mark = pointer["uuid"], int(pointer["version"]), str(pointer["mark"])
    except (KeyError, TypeError, ValueError):
        raise _not_a_pointer(pointer) from None
    if _is(manifest, uuid, number, mark):
        return None
    if mark and pointer.get("payload") and mark == manifest.payload_mark:
        return None
    kept = versions()
    for version, manifest in reversed(kept.items()):
        if _is(manifest, uuid, number, mark):
            return version
    raise InvalidInputError(_why_not(pointer, kept, identity, path))


def _is(manifest: Manifest, uuid: str, number: int, mark: str) -> bool:
    if mark:
        return manifest.mark == mark
    return (manifest.uuid, manifest.version, manifest.mark) == (uuid, number, "")


def _why_not(
    pointer: Pointer,
    kept: Mapping[int, Manifest],
    identity: Identity,
    path: str | os.PathLike[str],
) -> str:
    """Return why no version matches a pointer, and the remedy."""
    number = int(pointer["version"])
    listed = ", ".join(map(str, kept))
    parent = identity.parent
    if pointer["uuid"] == identity.uuid:
        if number in kept:
            return (
                f"this state is of a version {number} of another copy of {path}, whose own version "
                f"{number} has different rows; open the copy with which the state was saved"
            )
        return (
            f"this state is of version {number} of {path}, which is no longer kept; kept are: "
            f"{listed}. Keep the versions that states point to, with "
            'store.commit(keep="best") or a larger keep='
        )
    if parent is not None and pointer["uuid"] == parent.uuid:
        return (
            f"this state is of version {number} of the store that {path} was copied from, and "
            f"the copy does not have that version: it started with version {parent.version} and "
            f"keeps {listed}"
        )
    return (
        f"this state belongs to the store {pointer['uuid']}, formerly at {pointer.get('path')}; "
        f"{path} is {identity.uuid}. Open the store with which it was saved, or a copy"
    )


def _not_a_pointer(found: object) -> InvalidInputError:
    return InvalidInputError(
        f"not a pointer to a store: {found!r}; state_dict() of a store or module returns one"
    )
