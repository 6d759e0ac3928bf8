"""The state of ordinary parameters, where rows of tables have theirs in their records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor

from tierstore.errors import InvalidInputError
from tierstore.nn import RowsParameter
from tierstore.nn.rows import TableRows

__all__ = ["OrdinaryState"]


class OrdinaryState(defaultdict[Tensor, Any]):
    """The `state` of an optimizer, as torch has it, but for rows.

    Raises InvalidInputError for what would change the state of rows and could not: where it is
    dropped, or replaced, as to start anew. What is read of rows raises too.
    """

    def __init__(self, rows: Mapping[RowsParameter, Any], state: Mapping[Tensor, Any]) -> None:
        """Have a state; `rows` are those that are trained, at any time."""
        super().__init__(dict, state)
        self._rows = rows

    def __missing__(self, key: Tensor) -> Any:
        """Return an empty state, and for rows one that says where theirs is."""
        if isinstance(key, RowsParameter | TableRows):
            state = _InRecords(key)
            super().__setitem__(key, state)
            return state
        return super().__missing__(key)

    def __setitem__(self, key: Tensor, value: Any) -> None:
        """Set the state of a parameter."""
        self._check(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: Tensor) -> None:
        """Drop the state of a parameter."""
        self._check(key)
        super().__delitem__(key)

    def pop(self, key: Tensor, *default: Any) -> Any:
        """Drop and return the state of a parameter."""
        self._check(key)
        return super().pop(key, *default)

    def clear(self) -> None:
        """Drop every state."""
        if self._rows:
            raise _kept_in_records("clear()")
        super().clear()

    def _check(self, key: Tensor) -> None:
        if isinstance(key, RowsParameter | TableRows):
            raise _kept_in_records("a change of the optimizer's `state`")

    def __reduce__(self) -> Any:
        """Pickle the state of ordinary parameters as torch would."""
        return defaultdict, (dict, dict(self))


class _InRecords(dict[str, Any]):
    """What is kept for rows here: what a program puts here itself."""

    def __init__(self, rows: RowsParameter | TableRows) -> None:
        super().__init__()
        self._name = rows.table.name

    def __missing__(self, key: str) -> NoReturn:
        raise InvalidInputError(
            f"the optimizer keeps the state of rows in their records: read {key!r} of table "
            f"{self._name!r} with emb.table.read(ids, {key!r}), numbers that all rows share with "
            "emb.table.scalars"
        )

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _kept_in_records(what: str) -> InvalidInputError:
    return InvalidInputError(
        f"{what} would not reach the state of rows, which is kept in their records: call "
        "reset_state() of the optimizer, for rows and all other parameters, or make it anew"
    )
