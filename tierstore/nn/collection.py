"""Embedding layers over many tables as one module, whose cost does not grow with their number."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor

from tierstore._store.store import Store
from tierstore._table.joint import Features, JointTable
from tierstore._table.table import Table, alike, is_of
from tierstore.distributed.joint import DistributedJointTable
from tierstore.distributed.keyed import DistributedKeyedTable
from tierstore.distributed.table import DistributedTable
from tierstore.errors import InvalidInputError, InvalidTypeError, UnknownNameError
from tierstore.nn import compiling, pointers
from tierstore.nn.compiling import Asked
from tierstore.nn.embedding import from_start, warn_of_zeros
from tierstore.nn.features import Given, Group, given_as, no_padding
from tierstore.nn.joint import JointLayer
from tierstore.nn.keyed import ByKey, FirstRows, numbered, while_named
from tierstore.nn.layer import AVERAGED, copied
from tierstore.nn.rows import TableRows

AnyTable: TypeAlias = Table | DistributedTable | DistributedKeyedTable
"""A table, of one process or of several ranks."""
Source: TypeAlias = str | AnyTable | tuple[str | AnyTable, str | None]
"""A table of a store, or a table and a field of it."""

_PLANS = 64
"""Orders of features that are remembered; training has one."""


class TieredEmbeddingCollection(torch.nn.Module):
    """Looks up rows of many tables at once, as one `TieredEmbedding` a table does one by one.

    Tables that share tiers and have equal records are looked up, and trained, as one: the work of a
    step is that of one table, however many there are. Tables of several dims, with other state, or
    kept apart by a budget make more groups, each at the cost of a table. Values are those of one
    layer per table. What `TieredEmbedding` states holds here too: gradients go to a
    `TieredOptimizer`, `state_dict()` holds a pointer to the store, and a `deepcopy` shares the
    tables.

    There is a parameter for each group. `rows_of` names a feature's part of it for an optimizer,
    to give that table options of its own.

    >>> emb = TieredEmbeddingCollection(store, {"user": "user", "item": "item", "bought": "item"})
    >>> rows = emb({"user": torch.tensor([1, 2]), "bought": torch.tensor([[3, 4, 3], [5, 6, 7]])})
    >>> rows["bought"].shape
    torch.Size([2, 3, 16])
    """

    groups: torch.nn.ModuleList
    include_last_offset: bool | None = None
    """For bags, whether offsets end with the number of ids."""

    def __init__(
        self,
        store: Store,
        tables: Mapping[str, Source] | Sequence[str],
        *,
        padding_idx: int | Mapping[str, int] | None = None,
    ) -> None:
        """Put a collection over tables of a store; nothing is written.

        Args:
            store: an open store.
            tables: from the name of a feature to its table, by name or as it is, or to a table and
                the field to look up; the first field if none is named. Features may share a table.
                A list of tables makes a feature of each, of the same name.
            padding_idx: a row that takes no part in training, of every feature or of those that are
                named; see `TieredEmbedding`.

        Raises UnknownNameError for a table or field that is not there, InvalidInputError for a
        table of another store and for padding of a table by key, InvalidTypeError for what is no
        dict and no list of names. Warns as `TieredEmbedding` does of tables that are still zeros.
        """
        super().__init__()
        sources = _by_feature(tables)
        self._sources = {name: _source(store, name, given) for name, given in sources.items()}
        joined: dict[tuple[object, ...], dict[Any, int]] = {}
        for table, field in self._sources.values():
            members = joined.setdefault(_group_of(table, field), {})
            members.setdefault(table, len(members))
        self.groups = torch.nn.ModuleList(
            _layer_over(list(members), str(key[-1])) for key, members in joined.items()
        )
        numbers = {key: number for number, key in enumerate(joined)}
        self._places: dict[str, tuple[int, int]] = {}
        for name, (table, field) in self._sources.items():
            key = _group_of(table, field)
            self._places[name] = numbers[key], joined[key][table]
            if not isinstance(table, ByKey):
                warn_of_zeros(table, field)
        self._by_key: dict[str, ByKey] = {
            name: table for name, (table, _) in self._sources.items() if isinstance(table, ByKey)
        }
        self._plans: dict[tuple[str, ...], list[Group]] = {}
        given = padding_idx if isinstance(padding_idx, Mapping) else {}
        if isinstance(padding_idx, int):
            given = dict.fromkeys(self.features, padding_idx)
        self.padding: dict[str, int] = {}
        for name, row in given.items():
            self._place(name)
            if name in self._by_key:
                raise InvalidInputError(
                    f"feature {name!r} is by key; padding_idx is a row of tables by id: leave out "
                    "the keys of padding, or name the features that have it"
                )
            self.padding[name] = from_start(row, self.features[name].rows) or 0

    @property
    def features(self) -> dict[str, AnyTable]:
        """The table of each feature."""
        return {name: table for name, (table, _) in self._sources.items()}

    def rows_of(self, feature: str) -> TableRows:
        """Return what stands for the table of a feature among the parameters of an optimizer.

        >>> emb = TieredEmbeddingCollection(store, {"user": "user", "bought": "item"})
        >>> groups = [{"params": [emb]}, {"params": [emb.rows_of("bought")], "lr": 1e-4}]
        >>> opt = tierstore.optim.TieredOptimizer(torch.optim.Adam, groups, lr=1e-3)
        """
        group, number = self._place(feature)
        return self._layer(group).own.part(number)

    def averaged(self) -> Self:
        """Return a frozen copy of the collection whose rows are their moving averages.

        See `TieredEmbedding.averaged`.
        """
        other = copy.deepcopy(self, {AVERAGED: True})
        for group in range(len(other.groups)):
            other._layer(group).look_up_averages()
        return other

    def forward(self, features: Any) -> dict[str, Tensor]:
        """Return the row of each id of each feature, `ids.shape + (dim,)`.

        Args:
            features: from feature to ids, integers of any shape, or nested of layout
                `torch.jagged`, which give nested rows. A feature that is left out is left out of
                the result. Or what has the methods of torchrec's `KeyedJaggedTensor` (`keys`,
                `values`, `offsets` or `lengths`): its values are taken as they are, and each of its
                keys gets the rows of its ids, `(ids, dim)`. Tables by key take keys as ids, which
                may be texts in lists or arrays; in training, keys that are new get a row.

        The rows of features are parts of one tensor. Raises UnknownNameError for another feature,
        and RowIndexError for an id outside its table, naming feature, table and position; on a GPU
        as `Table.read` does, in the next call that waits.
        """
        if not self._by_key:
            return self._look_up(features)
        return while_named(self._by_key.values(), partial(self._look_up, features))

    def _look_up(self, features: Any) -> dict[str, Tensor]:
        """Do what `forward` does; keys are looked up and leased in turn."""
        given, first = self._given(features)
        found: dict[str, Tensor] = {}
        groups = self._plan(given.names)
        for group in groups:
            found.update(zip(group.features.names, self._rows(group, given, first), strict=True))
        for name, each in first.items():
            each.put(found[name])
        if len(groups) > 1:
            found = {name: found[name] for name in given.names}
        return given.shaped(found)

    def _rows(
        self, group: Group, given: Given, first: Mapping[str, FirstRows], *, apart: bool = True
    ) -> Any:
        """Return the rows of each feature of a group, or all in one tensor unless `apart`."""
        (layer, features, _), joined = group, given.of(group)
        if torch.compiler.is_compiling():
            asked = Asked(features, joined.lengths, self._padding_of(features.names))
            rows = compiling.look_up(joined.ids, layer, asked)
            return rows.split(joined.lengths) if apart else rows
        counted = None
        if self.padding or first:
            counted = self._trained(features.names, joined.ids, joined.lengths, first)
        return layer.look_up(joined.ids, features, joined.lengths, counted, apart=apart)

    def cat(self, features: Any) -> Tensor:
        """Return the rows of all features as one tensor, `(ids, dim)`; takes what `forward` takes.

        The rows of the features follow one another in the order of the features: with equally many
        ids each, `.view(len(features), -1, dim)` has an entry per feature. The result is what
        `forward` returns, concatenated, with no work for single features: all of them are trained.
        Raises InvalidInputError for features of several dims, and where there are none.
        """
        if not self._by_key:
            given, _ = self._given(features)
            groups = self._plan(given.names)
            if len(groups) == 1:
                rows: Tensor = self._rows(groups[0], given, {}, apart=False)
                return rows
        found = [_flat(rows) for rows in self.forward(features).values()]
        dims = {rows.shape[1] for rows in found}
        if len(dims) != 1:
            raise InvalidInputError(
                f"rows of dims {', '.join(map(str, sorted(dims)))} are not one tensor: take those "
                "of each dim with a call of its own"
                if dims
                else "a call needs the ids of at least one feature"
            )
        return torch.cat(found)

    def _given(self, features: Any, *, add: bool = True) -> tuple[Given, dict[str, FirstRows]]:
        """Return features with row numbers in place of keys, and the first rows of keys without.

        With `add`, keys of layers that are trained get a row once they are admitted.
        """
        first: dict[str, FirstRows] = {}
        given = given_as(features, self.include_last_offset)
        if not self._by_key:
            return given, first
        if torch.compiler.is_compiling():
            name = next(iter(self._by_key))
            raise InvalidInputError(
                f"feature {name!r} is by key: keys are looked up outside of torch.compile, so "
                "keep this collection out of it"
            )

        def number(name: str, keys: Any) -> Tensor:
            table, field = self._by_key[name], self._sources[name][1]
            layer = self._layer(self._places[name][0])
            trained = add and layer.own.trains(layer)
            numbers, unknown = numbered(table, field, keys, add=trained)
            if unknown is not None:
                first[name] = unknown
            return numbers

        given.replace(self._by_key, number)  # in the same order on every rank
        return given, first

    def _padding_of(self, names: Sequence[str]) -> list[int]:
        """Return the row of padding of each feature, -1 for none."""
        return [self.padding.get(name, -1) for name in names]

    def _counted(self, names: Sequence[str], ids: Tensor, lengths: Sequence[int]) -> Tensor | None:
        """Return for each id of some features whether it is no padding; None if all are none."""
        if not self.padding or self.padding.keys().isdisjoint(names):
            return None
        return no_padding(ids, lengths, self._padding_of(names))

    def _trained(
        self,
        names: Sequence[str],
        ids: Tensor,
        lengths: Sequence[int],
        first: Mapping[str, FirstRows],
    ) -> Tensor | None:
        """Return for each id of some features whether its row is trained; None if all are."""
        without_row = FirstRows.joined(names, lengths, first) if first else None
        if without_row is not None:  # rows of keys, which have no padding
            return without_row.without(len(ids))
        return self._counted(names, ids, lengths)

    def _plan(self, names: tuple[str, ...]) -> list[Group]:
        """Return which layer looks which features up."""
        is_graph = torch.compiler.is_compiling()  # which would be compiled anew for what is kept
        plan = None if is_graph else self._plans.get(names)
        if plan is None:
            by_group: dict[int, list[int]] = {}
            for place, name in enumerate(names):
                by_group.setdefault(self._place(name)[0], []).append(place)
            plan = []
            for group, places in by_group.items():
                own = tuple([names[place] for place in places])
                features = Features(own, tuple([self._places[name][1] for name in own]))
                whole = len(places) == len(names)
                plan.append(Group(self._layer(group), features, None if whole else tuple(places)))
            if not is_graph:
                if len(self._plans) >= _PLANS:
                    self._plans.clear()
                self._plans[names] = plan
        return plan

    def _place(self, feature: str) -> tuple[int, int]:
        """Return the group of a feature, and its table there; raises UnknownNameError."""
        found = self._places.get(feature)
        if found is None:
            raise UnknownNameError(
                f"there is no feature {feature!r}; the collection has {', '.join(self._places)}"
            )
        return found

    def _layer(self, group: int) -> JointLayer:
        layer = self._modules["groups"]._modules[str(group)]  # `self.groups[group]` is ten calls
        if not isinstance(layer, JointLayer):
            raise InvalidTypeError(f"the groups of a collection are its own, not {layer!r}")
        return layer

    def prefetch(self, features: Any, *, window: int = 16) -> None:
        """Start bringing the rows of a coming batch nearer; see `Table.prefetch`.

        Takes what `forward` takes.
        """
        given, _ = self._given(features, add=False)
        for group in self._plan(given.names):
            joined = given.announced(group, window)
            asked, counts = self._asked_for(group.features.names, joined.ids, joined.lengths)
            rows = group.layer.in_space(asked, group.features, counts)
            group.layer.table.prefetch(rows, window=window)

    def _asked_for(
        self, names: Sequence[str], ids: Tensor, lengths: Sequence[int]
    ) -> tuple[Tensor, Sequence[int]]:
        """Return which of the ids of some features a lookup requests, and how many of each."""
        return ids, lengths

    # -- as a module

    def extra_repr(self) -> str:
        """Name the features and their tables."""
        return ", ".join(f"{name}: {table.name}" for name, table in self.features.items())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return another collection over the same tables, not trained yet; rows are not copied."""
        other = copied(self, memo)
        other._plans = {}
        return other

    def get_extra_state(self) -> Tensor:
        """Return the pointer that `state_dict()` holds: store, version, and the tables of features.

        Raises InvalidInputError where rows are not committed.
        """
        first = next(iter(self.features.values()))
        return pointers.to_tensor(first.store, **self._named())

    def set_extra_state(self, state: Any) -> None:
        """Bring the store to the version that a pointer names; see `Store.restore`.

        Raises InvalidInputError for a pointer to another store, other tables, or a version that is
        not kept.
        """
        first = next(iter(self.features.values()))
        pointers.restore(first.store, state, **self._named())

    def _named(self) -> dict[str, str]:
        """Return the tables and fields of the features, as a pointer holds them."""
        features = sorted((name, each.name, field) for name, (each, field) in self._sources.items())
        return {"features": " ".join(f"{name}={table}.{field}" for name, table, field in features)}


def _shard(table: AnyTable) -> Table:
    """Return the rows of a table that are on this rank."""
    return table if isinstance(table, Table) else table.shard


def _group_of(table: AnyTable, field: str) -> tuple[object, ...]:
    """Return what is equal of tables that one layer looks up."""
    return isinstance(table, ByKey), *alike(_shard(table), field)


def _layer_over(tables: Sequence[Any], field: str) -> JointLayer:
    """Return a layer over tables that are alike."""
    if isinstance(tables[0], ByKey):
        return JointLayer(_joined([table.by_row for table in tables]), field, by_key=True)
    return JointLayer(_joined(tables), field)


def _joined(tables: Sequence[Any]) -> JointTable | DistributedJointTable:
    """Return tables that are alike as one."""
    shared = isinstance(tables[0], DistributedTable)
    return DistributedJointTable(tables) if shared else JointTable(tables)


def _by_feature(tables: object) -> Mapping[str, Source]:
    """Return the source of each feature; each of a list of tables is a feature of its name."""
    if isinstance(tables, Mapping):
        found = tables
    elif isinstance(tables, Sequence) and not isinstance(tables, str):
        found = {name: name for name in tables if isinstance(name, str)}
        if len(found) < len(tables):
            raise InvalidTypeError(f"a list of tables is of different names, not {tables!r}")
    else:
        raise InvalidTypeError(f"features are a dict or a list of tables, not {tables!r}")
    if not found:
        raise InvalidInputError("a collection needs at least one feature")
    return found


def _source(store: Store, feature: str, given: Any) -> tuple[AnyTable, str]:
    """Return the table and the field that a feature names."""
    if not isinstance(feature, str):
        raise InvalidTypeError(f"a feature has a name, not {feature!r}")
    table, field = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    if isinstance(table, str):
        table = store[table]
    elif isinstance(table, AnyTable) and not is_of(_shard(table), store):
        raise InvalidInputError(
            f"table {table.name!r} of feature {feature!r} is of another store; a collection is "
            "over tables of one"
        )
    if not isinstance(table, AnyTable):
        raise InvalidTypeError(
            f"feature {feature!r} needs a table, its name, or a table and a field, not {given!r}"
        )
    layout = table.spec.layout
    field = layout.fields[0][0] if field is None else field
    layout.field(field)
    return table, field


def _flat(rows: Tensor) -> Tensor:
    """Return rows of any shape, or nested, as `(ids, dim)`."""
    rows = rows.values() if rows.is_nested else rows
    return rows.reshape(-1, rows.shape[-1])
