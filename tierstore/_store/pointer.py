"""A pointer to the rows of a store, for the `state_dict` of a store or a module: never the rows."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from tierstore._disk.manifest import Identity, Manifest
from tierstore.errors import InvalidInputError, OtherVersionWarning

__all__ = ["check_pointer", "make_pointer"]


def make_pointer(path: str, manifest: Manifest) -> dict[str, Any]:
    """Return a pointer to a version of a store, made of JSON values."""
    version = {"version": manifest.version, "mark": manifest.mark}
    return {"path": path, "uuid": manifest.uuid, **version}


def check_pointer(
    state: Mapping[str, Any], path: str, identity: Identity, manifest: Manifest
) -> None:
    """Compare a pointer to the store that is open; nothing is loaded, the rows are there.

    Another store than the pointer's, or a copy of it, is an InvalidInputError; another version a
    warning. A pointer that was committed as payload names the version that its own was made from.
    """
    try:
        uuid, wanted, mark = state["uuid"], int(state["version"]), state.get("mark", manifest.mark)
    except (KeyError, TypeError, ValueError):
        raise InvalidInputError(
            f"not a pointer to a store: {state!r}; state_dict() of a store or module gives one"
        ) from None
    if uuid == manifest.uuid:
        version = manifest.version
        is_same = wanted == manifest.previous or (wanted == version and mark == manifest.mark)
    elif identity.parent is not None and uuid == identity.parent.uuid:
        version = identity.parent.version
        is_same = wanted in (version, identity.parent.previous)
    else:
        raise InvalidInputError(
            f"this state belongs to the store {uuid} that was at {state.get('path')}; "
            f"{path} is {identity.uuid}. Open the store it was saved with, or a copy of it"
        )
    if not is_same:
        another = f"another version {wanted}" if wanted == version else f"version {wanted}"
        warnings.warn(
            f"this state was saved with {another} of {path}, which is at version {version}: "
            "the rows are others than then; open the store with version=... to go back",
            OtherVersionWarning,
            stacklevel=4,
        )
