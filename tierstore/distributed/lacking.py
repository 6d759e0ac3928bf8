"""What a table of ranks lacks: it is refused here, with the way on.

These calls go by rows of one process. Over those of several ranks each would be an exchange of all
ranks, and of the shard alone it would be another table's rows in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from tierstore.errors import InvalidInputError


def lacks(table: Any, what: str) -> InvalidInputError:
    """Return the error for a call that a table of ranks lacks."""
    return InvalidInputError(
        f"{what} is not for table {table.name!r}, whose rows are on {table.ranks} ranks: its "
        f"shard has it, for the rows that are on this rank, and "
        f"tierstore.open({str(table.store.path)!r}) reads all rows, in any process, as of the "
        "last commit"
    )


def _refused(what: str) -> Any:
    def refuse(table: Any, *_: object, **__: object) -> NoReturn:
        raise lacks(table, what)

    refuse.__doc__ = f"Refuse {what}, with the way on."
    return refuse


class Lacking:
    """The calls of a `Table` that one of ranks refuses; see `Table` for what they are."""

    adapt: Any = _refused("adapt()")
    items: Any = _refused("items()")
    keys_of: Any = _refused("keys_of()")
    lease: Any = _refused("lease()")
    occupancy: Any = _refused("occupancy()")
    read_into: Any = _refused("read_into()")
    record: Any = _refused("record()")
    scan: Any = _refused("scan()")
    stats: Any = _refused("stats()")
    topk: Any = _refused("topk()")
    warm: Any = _refused("warm()")
    __array__: Any = _refused("an array of all rows")
    __getitem__: Any = _refused("table[...]")
    __setitem__: Any = _refused("table[...] = rows")

    def refuse_options(self, field: object, given: Mapping[str, object]) -> None:
        """Raise InvalidInputError for fields, or options of a read, which one of ranks lacks."""
        if field is not None and not isinstance(field, str):
            raise lacks(self, "a read of several fields at once")
        for name in given:
            raise lacks(self, f"{name}= of read()")
