"""What the state of a layer holds in place of rows: a pointer to a field of a version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tierstore._store.pointer import from_bytes, to_bytes
from tierstore._store.store import Store
from tierstore.errors import InvalidInputError

__all__ = ["checked", "restore", "to_tensor"]

_WAYS = {
    "optimizer": ": make it as it was; or leave it out, as in Checkpoint(store, model=model)"
    ".resume(), and make another after that, with reset=True"
}
"""What to do where something else is compared."""


def to_tensor(store: Store, **what: str) -> Tensor:
    """Return a pointer to a store as it is committed, as a uint8 tensor.

    `what` is compared when it is loaded: `table` and `field`, and more. Raises InvalidInputError
    where rows of the store are not committed.
    """
    pointer = {**store.state_dict(), **what}
    return torch.from_numpy(np.frombuffer(to_bytes(pointer), np.uint8).copy())


def restore(store: Store, state: Any, **what: str) -> None:
    """Bring a store to the version that a pointer names.

    Raises InvalidInputError for a pointer to something else than `what`, to another store, or to a
    version that is not kept.
    """
    store.load_state_dict(checked(state, **what))


def checked(state: Any, **what: str) -> Mapping[str, Any]:
    """Return the contents of a pointer, for `Store.load_state_dict`.

    Raises InvalidInputError for a pointer to something else than `what`.
    """
    if isinstance(state, Tensor):
        state = from_bytes(state.detach().cpu().to(torch.uint8).numpy().tobytes())
    if not isinstance(state, Mapping):
        raise InvalidInputError(f"not the state of a layer over a table: {state!r}")
    if "table" in what:
        found, wanted = ((of.get("table"), of.get("field")) for of in (state, what))
        if found != wanted:
            raise InvalidInputError(
                f"this state is of field {found[1]!r} of table {found[0]!r}, the layer is over "
                f"field {wanted[1]!r} of table {wanted[0]!r}: load it into a layer over that"
            )
    for key, value in what.items():
        if state.get(key) != value:
            raise InvalidInputError(
                f"this state is of the {key} {state.get(key)}, and not of {value}, to which it is "
                f"loaded{_WAYS.get(key, '')}"
            )
    return state
