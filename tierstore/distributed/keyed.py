"""A table by key whose rows several ranks have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from tierstore._keys.growing import Asked
from tierstore._progress import Shown, shown
from tierstore._table import expiry, merging
from tierstore._table.keyed import OTHERWISE, ByKey, KeyedTable, ShardByKey, without_row
from tierstore._table.missing import Missing
from tierstore._table.table import check_open
from tierstore.distributed.key_exchange import KeyExchange, Numbers
from tierstore.distributed.ranks import Ranks
from tierstore.distributed.table import DistributedTable, TableOfRanks
from tierstore.errors import InvalidInputError, InvalidTypeError

Rows = npt.NDArray[np.int64]


class DistributedKeyedTable(ByKey, TableOfRanks):
    """Rows of a table by key, wherever they are among the ranks; see `KeyedTable`.

    The owner of a key is found from its hash, and draws the first row from the key: the row of a
    key does not depend on the number of ranks. `read`, `write`, `lookup`, `contains`, `get_or_add`,
    `remove` and `prefetch` are collective: every rank calls them, with keys of its own or none. So
    is `merge`, to which every rank gives the same table. `expire` removes keys of the rank that
    calls it, and is collective with `keep_at_most` alone.

    Attributes:
        shard: the keys and rows of this rank, a KeyedTable.
        by_row: the rows of all ranks by numbers that owners give to keys.
        average: whether gradients are divided by the number of ranks.
        rows: keys of all ranks that have a row, as of the last open, commit or rollback.
    """

    shard: KeyedTable

    def __init__(self, shard: KeyedTable, partitions: int, ranks: Ranks, *, average: bool) -> None:
        """Put a table of all ranks over the shard of one."""
        self.shard = shard
        self.average = average
        self.rows: int = 0
        self._served = ShardByKey(shard)
        self._exchange = KeyExchange(shard.name, self._served, partitions, ranks)
        self._ranks = ranks
        self._partitions = partitions
        numbers = Numbers(ranks.rank, ranks.count)
        self.by_row: DistributedTable = DistributedTable(
            shard.by_row, numbers, ranks, average=average
        )

    def end(self) -> None:
        """Refuse all calls from now on."""
        self.by_row.end()

    # -- keys

    def _rows_of(self, keys: object, *, add: bool = False) -> tuple[Asked, Rows]:
        """Return the number of each key; see `ByKey`. Collective.

        Numbers are for `by_row`, until the next commit or rollback. UnknownNameError for keys
        without a row is raised on the rank that gave them.
        """
        return self._exchange.ask(keys, "add" if add else "look up")

    def is_here(self, keys: object) -> npt.NDArray[np.bool_]:
        """Return for each key whether this rank owns it, in their shape."""
        asked = self._served.asked(keys)
        here: npt.NDArray[np.bool_] = self._exchange.owners_of(asked.codes) == self._ranks.rank
        return here.reshape(asked.shape)

    # -- rows

    def read(
        self,
        keys: Any,
        field: str | None = None,
        *,
        as_tensor: bool = False,
        missing: Literal["raise", "init"] | float | None = None,
        **options: Any,
    ) -> Any:
        """Read the rows of `keys`, `keys.shape + (dim,)`. Collective; no key is added.

        `missing` is what keys without a row read as: "init", which is the default here, their
        first row, a number that value. With "raise" the rank that gave such keys raises
        UnknownNameError, a KeyError, which names the first three; the others get their rows. It
        has no other `options` of `KeyedTable.read`: raises InvalidInputError, with the way on.
        """
        self.refuse_options(field, options)
        name = next(iter(self.fields)) if field is None else field
        numbers, unknown, first = self._known_or_first(keys, name, train=False, missing=missing)
        rows = self.by_row.read(torch.from_numpy(numbers), name)
        if unknown.size and missing == "raise":  # only now: the owners' answers were on their way
            raise without_row(keys, unknown, OTHERWISE)
        rows.view(-1, rows.shape[-1])[torch.from_numpy(unknown).to(rows.device)] = first.to(rows)
        if as_tensor or isinstance(keys, torch.Tensor):
            return rows
        return (rows.float() if rows.dtype == torch.bfloat16 else rows).cpu().numpy()

    def write(self, keys: Any, rows: Any, field: str | None = None) -> None:
        """Write rows `keys.shape + (dim,)` over those of `keys`, which get one. Collective.

        Where a key repeats, its last row stays; where several ranks write it, that of the highest.
        """
        name = next(iter(self.fields)) if field is None else field
        asked, numbers = self._exchange.ask(
            keys, "write", lambda: self.by_row.check_rows(keys, rows, name)
        )
        self.by_row.write(numbers.reshape(asked.shape), rows, name)

    def prefetch(self, keys: Any, *, window: int = 16) -> None:
        """Have the owners of coming keys bring their rows nearer. Collective."""
        find = self._served.serving("announce")

        def prefetched(asked: Asked) -> Rows:
            rows = find(asked)
            self.shard.by_row.prefetch(rows[rows >= 0], window=window)
            return rows

        self._exchange.ask(keys, "announce", serve=prefetched)

    def remove(self, keys: object) -> int:
        """Remove keys with their rows, whichever rank has them. Collective.

        Returns how many keys that the ranks gave, together, had a row: the same on every rank. See
        `KeyedTable.remove`; a commit of all ranks makes it final. After an error that a rank meets
        while it removes keys, all of them refuse to go on until `store.rollback()`.
        """
        gone = 0

        def removed(asked: Asked) -> Rows:
            nonlocal gone
            try:
                gone = self._served.remove(asked)
            except Exception as error:
                self._ranks.fail(f"remove keys of table {self.name!r}", error)
                raise
            return np.full(asked.codes.size, -1, np.int64)

        self._exchange.ask(keys, "remove", lambda: check_open(self.shard, write=True), removed)
        return sum(self._ranks.together("count the keys that were removed", lambda: gone))

    def expire(
        self,
        *,
        unused_for: int | None = None,
        fewer_than: int | None = None,
        keep_at_most: int | None = None,
    ) -> Iterator[tuple[npt.NDArray[Any], dict[str, npt.NDArray[Any]]]]:
        """Yield keys of this rank that expire with their rows, then remove them.

        As `KeyedTable.expire` does, on each rank for its own keys; a commit of all ranks makes it
        final. With `keep_at_most`, which counts the keys of all ranks, the call is collective.
        Among keys with equal uses, those of the lower ranks stay.
        """
        if keep_at_most is None:
            return self.shard.expire(unused_for=unused_for, fewer_than=fewer_than)
        told = {"unused_for": unused_for, "fewer_than": fewer_than, "keep_at_most": keep_at_most}
        expiry.check(**told)
        self._ranks.agree("expire keys", {"table": self.name, **told})
        tallies = self._ranks.together(
            "count the uses of keys",
            lambda: expiry.tally(self._served.uses(unused_for=unused_for, fewer_than=fewer_than)),
        )
        told["keep_at_most"] = expiry.shares(tallies, keep_at_most)[self._ranks.rank]
        return self.shard.expire(**told)

    def merge(
        self,
        other: KeyedTable | DistributedKeyedTable,
        *,
        on_conflict: merging.Conflict = "newest",
        progress: Shown = None,
    ) -> int:
        """Take the rows of another table by key; return how many keys of all ranks are new.

        Collective: each rank takes the keys that it owns, and no row goes from rank to rank.
        See `KeyedTable.merge` for the arguments. Another store is opened for reading on every rank,
        by `tierstore.open`, whether it is in partitions or not; a table that the same ranks train
        is taken as it is, if it has as many partitions.

        Errors are raised on every rank. After one that a rank meets while it merges, all of them
        refuse to go on until `store.rollback()`.
        """
        self._ranks.together("merge tables", lambda: self._check_mergeable(other, on_conflict))
        shared = isinstance(other, DistributedKeyedTable)
        told = {"table": self.name, "on_conflict": on_conflict, "other": other.name}
        self._ranks.agree("merge tables", told | {"rows": other.rows, "shared": shared})
        shard = other.shard if isinstance(other, DistributedKeyedTable) else other

        def merged() -> int:
            try:
                wanted = None if shared else self.is_here
                return self._served.merge(shard, on_conflict, shown(progress), wanted)
            except Exception as error:
                self._ranks.fail(f"merge table {self.name!r}", error)
                raise

        return sum(self._ranks.together(f"merge table {self.name!r}", merged))

    def _check_mergeable(self, other: object, on_conflict: str) -> None:
        if isinstance(other, DistributedKeyedTable):
            if other._partitions != self._partitions:
                raise InvalidInputError(
                    f"table {other.name!r} is in {other._partitions} partitions, and {self.name!r} "
                    f"in {self._partitions}: commit it, and give the table of a store that every "
                    "rank opens by tierstore.open"
                )
            other = other.shard
        if not isinstance(other, KeyedTable):
            raise InvalidTypeError(f"merge takes a table by key, not {other!r}")
        merging.check(self.shard, other, on_conflict)

    # -- what layers call

    def _rows_for(self, keys: object) -> Any:
        """Return numbers for training, in the shape of keys, a tensor; adds new keys."""
        asked, numbers = self._exchange.ask(keys, "train")
        return torch.from_numpy(numbers.reshape(asked.shape)).to(self.device)

    def _known_or_first(
        self,
        keys: object,
        field: str,
        *,
        train: bool,
        missing: Literal["raise", "init"] | float | None = None,
    ) -> tuple[Rows, npt.NDArray[np.intp], Any]:
        """Return numbers in the shape of keys, which have none, and what those read as."""
        chosen: Missing = "init"

        def check() -> None:
            nonlocal chosen
            chosen = self._served.missing(missing, field)

        asked, numbers = self._exchange.ask(keys, "train" if train else "read", check)
        unknown = np.flatnonzero(numbers < 0)
        numbers[unknown] = 0
        return (
            numbers.reshape(asked.shape),
            unknown,
            self._served.first(asked, unknown, field, chosen),
        )
