"""Keys of a batch as row numbers, for layers that go by row.

    numbers, first = numbered(table, "weight", keys, add=trained)

In training every key gets a row, once it is admitted. Those without one read as their first rows,
which are put in place of what a layer reads for them, and get no gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from tierstore._table import keyed
from tierstore._table.keyed import KeyedTable
from tierstore.distributed.keyed import DistributedKeyedTable
from tierstore.errors import ClosedError
from tierstore.nn.features import jagged

T = TypeVar("T")
ByKey: TypeAlias = KeyedTable | DistributedKeyedTable
"""A table by key, of one process or of several ranks."""


class FirstRows(NamedTuple):
    """The first rows of keys of a batch that have no row.

    Attributes:
        at: where the keys are in the batch, flat, int64 `(n,)`.
        rows: `(n, dim)`.
    """

    at: Tensor
    rows: Tensor

    @classmethod
    def joined(
        cls, names: Sequence[str], lengths: Sequence[int], first: Mapping[str, FirstRows]
    ) -> FirstRows | None:
        """Return those of some features, whose keys follow one another; None if there are none."""
        begins = itertools.accumulate(lengths[:-1], initial=0)
        found = [
            cls(first[name].at + begin, first[name].rows)
            for name, begin in zip(names, begins, strict=True)
            if name in first
        ]
        if not found:
            return None
        return cls(torch.cat([each.at for each in found]), torch.cat([each.rows for each in found]))

    def without(self, ids: int) -> Tensor:
        """Return for each of so many ids whether its key has a row, bool `(ids,)`."""
        known = torch.ones(ids, dtype=torch.bool)
        known[self.at] = False
        return known

    def put(self, found: Tensor) -> None:
        """Put the rows in place of those that were read for the batch, `(ids, dim)`."""
        found[self.at.to(found.device)] = self.rows.to(found)


def numbered(table: ByKey, field: str, keys: Any, *, add: bool) -> tuple[Tensor, FirstRows | None]:
    """Return the row numbers of keys, in their shape.

    Keys without a row get one if they are to be added and the table admits them; else their number
    is 0, and their first values of the field are returned too, if there are any; where several
    ranks add keys, they may be empty.
    """
    if isinstance(keys, Tensor) and keys.is_nested:
        bags = jagged(keys)
        flat, first = numbered(table, field, bags.values(), add=add)
        return torch.nested.nested_tensor_from_jagged(flat, bags.offsets()), first
    device = keys.device if isinstance(keys, Tensor) else torch.device("cpu")
    if add and table.spec.admit_after is None:
        return keyed.rows_for(table, keys).to(device), None
    rows, unknown, values = keyed.known_or_first(table, keys, field, train=add)
    numbers = torch.as_tensor(rows, device=device)
    # Either all of several ranks state which of their ids are trained, or none does.
    if not unknown.size and not (add and isinstance(table, DistributedKeyedTable)):
        return numbers, None
    return numbers, FirstRows(torch.from_numpy(unknown), torch.as_tensor(values))


def while_named(tables: Iterable[ByKey], call: Callable[[], T]) -> T:
    """Return what `call` makes of keys of tables; again if their rows got other keys meanwhile.

    It finds rows and leases or reads them, and another thread may remove keys in between. Ranks
    cannot look up again each by itself: there, raises ClosedError.
    """
    asked = tuple(tables)
    is_first = True

    def found() -> T:
        nonlocal is_first
        for table in () if is_first else asked:
            if isinstance(table, DistributedKeyedTable):
                raise ClosedError(
                    f"rows of table {table.name!r} got other keys while they were looked up; "
                    "remove keys between passes, and run this one again"
                )
        is_first = False
        return call()

    return keyed.while_named([_shard(table) for table in asked], found)


def _shard(table: ByKey) -> KeyedTable:
    return table if isinstance(table, KeyedTable) else table.shard
