"""What the state of a layer holds in place of rows: a pointer to a field of a version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tierstore._store.pointer import from_bytes, to_bytes
from tierstore._table.table import Table
from tierstore.errors import InvalidInputError

__all__ = ["checked", "restore", "to_tensor"]


def to_tensor(table: Table, field: str, **more: str) -> Tensor:
    """Return a pointer to a field of a table as it is committed, as a uint8 tensor.

    `more` is compared when it is loaded. Raises InvalidInputError where rows of the store are not
    committed.
    """
    pointer = {**table.store.state_dict(), "table": table.name, "field": field, **more}
    return torch.from_numpy(np.frombuffer(to_bytes(pointer), np.uint8).copy())


def restore(table: Table, field: str, state: Any) -> None:
    """Bring the table's store to the version that a pointer names.

    Raises InvalidInputError for a pointer to another table or field, to another store, or to a
    version that is not kept.
    """
    table.store.load_state_dict(checked(table, field, state))


def checked(table: Table, field: str, state: Any, **more: str) -> Mapping[str, Any]:
    """Return what a pointer says, for `Store.load_state_dict`.

    Raises InvalidInputError for a pointer to another table or field, and where `more` differs.
    """
    if isinstance(state, Tensor):
        state = from_bytes(state.detach().cpu().to(torch.uint8).numpy().tobytes())
    if not isinstance(state, Mapping):
        raise InvalidInputError(f"not the state of a layer over a table: {state!r}")
    found = state.get("table"), state.get("field")
    if found != (table.name, field):
        raise InvalidInputError(
            f"this state is of field {found[1]!r} of table {found[0]!r}, the layer is over field "
            f"{field!r} of table {table.name!r}: load it into a layer over that"
        )
    for key, value in more.items():
        if state.get(key) != value:
            raise InvalidInputError(
                f"this state is of the {key} {state.get(key)}, and not of {value}, to which it is "
                "loaded"
            )
    return state
