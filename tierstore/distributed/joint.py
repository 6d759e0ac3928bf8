"""Tables of several ranks as one: a call over all of them is one exchange."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from tierstore._table.joint import Features, JointTable, Location
from tierstore.distributed.exchange import Exchange
from tierstore.distributed.owners import Owners, owners_over
from tierstore.distributed.request import Call, Wanted
from tierstore.distributed.table import DistributedTable, RowsOfRanks
from tierstore.errors import RowIndexError


class DistributedJointTable(RowsOfRanks):
    """Tables of several ranks as one, by ids of features.

    A request is for the ids that `in_space` got last.

    Attributes:
        tables: in the order of their numbers.
        shard: the rows that are on this rank.
        average: whether gradients are divided by the number of ranks.
    """

    shard: JointTable

    def __init__(self, tables: Sequence[DistributedTable]) -> None:
        """Join tables whose shards are alike."""
        self.tables: tuple[DistributedTable, ...] = tuple(tables)
        self.shard = JointTable([table.shard for table in tables])
        first = tables[0]
        self.average: bool = first.average
        self._place = first.place
        self._ranks = first.exchange.ranks
        self.exchange: Exchange = Exchange(self._ranks, self.shard.name, self._owners_now)
        self._seen: Location | None = None
        self._rows: list[int] = []
        self._tags: dict[Features, int] = {}
        self._coming: Wanted | None = None

    def _owners_now(self) -> Owners:
        """Return which rank has which rows; new owners where tables were moved or grew."""
        location = self.shard.location
        if location is not self._seen:
            for table in self.tables:
                table.check_open()
            rows = [table.rows for table in self.tables]
            starts, place = location.starts.tolist(), self._place
            self._owners = owners_over(place, self.ranks, rows, starts, location.access)
            if rows != self._rows:  # on all ranks alike; some may have moved tables on one alone
                self.exchange.announced.clear()  # they request other numbers
            self._seen, self._rows = location, rows
        return self._owners

    def in_space(self, ids: Tensor, features: Features, lengths: Sequence[int]) -> Tensor:
        """Return the ids of some features on the device; see `JointTable.in_space`.

        The request for them, which must follow, raises for one that is not in its table.
        """
        self._owners_now()
        tag, tables = self._tag(features), features.tables
        known = self.exchange.known(Wanted(ids, ids, tag, tables, list(lengths)))
        if known is not None:
            self._coming = known.wanted
            return known.wanted.ids
        own = ids.to(self.device)

        def refuse() -> None:
            pairs = zip(*features, own.split(list(lengths)), strict=True)
            for name, number, of_feature in pairs:
                rows = self.tables[number].rows
                bad = ((of_feature < 0) | (of_feature >= rows)).nonzero().flatten().tolist()
                if bad:
                    raise RowIndexError(
                        f"id {int(of_feature[bad[0]])} at position {bad[0]} of feature {name!r} is "
                        f"outside table {self.tables[number].name!r}, which has rows 0 to "
                        f"{rows - 1}"
                    )

        self._coming = Wanted(own, ids, tag, tables, list(lengths), refuse)
        return own

    def _tag(self, features: Features) -> int:
        tag = self._tags.get(features)
        if tag is None:
            named = [
                (name, self.tables[number].name) for name, number in zip(*features, strict=True)
            ]
            tag = self._tags[features] = zlib.crc32(repr(named).encode())
        return tag

    def _wanted(
        self, ids: Tensor, call: Call | None = None, check: Callable[[], object] = lambda: None
    ) -> Wanted:
        """Return what `in_space` got last, which `ids` are; see `RowsOfRanks`."""
        wanted, self._coming = self._coming, None
        if wanted is None or wanted.ids is not ids:
            raise RuntimeError("a request is for what in_space returned last")
        if call is not None:
            wanted = replace(wanted, call=call.number(self.shard.fields))
        try:
            check()
        except Exception as error:
            return wanted.failed(error)
        return wanted
