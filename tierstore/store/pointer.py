"""A pointer to the rows of a store, for the `state_dict` of a store or a module: never the rows."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from tierstore.errors import InvalidInputError
from tierstore.manifest import Identity

__all__ = ["check_pointer", "make_pointer"]


def make_pointer(path: str, identity: Identity, version: int) -> dict[str, Any]:
    """Return a pointer to a version of a store, made of JSON values."""
    return {"path": path, "uuid": identity.uuid, "version": version}


def check_pointer(state: Mapping[str, Any], path: str, identity: Identity, version: int) -> None:
    """Compare a pointer to the store that is open; nothing is loaded, the rows are there.

    Another store than the pointer's, or a copy of it, is an InvalidInputError; another version a
    warning. A pointer that was committed as payload names the version before its own.
    """
    try:
        uuid, wanted = state["uuid"], int(state["version"])
    except (KeyError, TypeError, ValueError):
        raise InvalidInputError(
            f"not a pointer to a store: {state!r}; state_dict() of a store or module gives one"
        ) from None
    versions = {identity.uuid: version}
    if identity.parent is not None:
        versions.setdefault(*identity.parent)
    if uuid not in versions:
        raise InvalidInputError(
            f"this state belongs to the store {uuid} that was at {state.get('path')}; "
            f"{path} is {identity.uuid}. Open the store it was saved with, or a copy of it"
        )
    if versions[uuid] - wanted not in (0, 1):
        warnings.warn(
            f"this state was saved with version {wanted} of {path}, which is at version {version}: "
            "the rows are others than then; open the store with version=... to go back",
            stacklevel=4,
        )
