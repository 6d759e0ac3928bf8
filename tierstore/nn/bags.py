"""Bags of rows of many tables as one module, whose cost does not grow with their number."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor

from tierstore._store.store import Store
from tierstore.distributed.known import on_host
from tierstore.errors import InvalidInputError, UnknownNameError
from tierstore.nn import compiling
from tierstore.nn.collection import Source, TieredEmbeddingCollection
from tierstore.nn.compiling import Asked
from tierstore.nn.features import Bags, Given, Group, Joined
from tierstore.nn.keyed import FirstRows, while_named
from tierstore.nn.part import Columns, Part
from tierstore.nn.pooled import MODES
from tierstore.nn.pooling import pool

Mode: TypeAlias = Literal["sum", "mean", "max"]

_REMEMBERED = 64
"""Orders of features whose columns are kept; training has one or two."""


class FeatureBags(dict[str, Tensor]):
    """The pooled row of each bag, by feature: `(batch, dim)`, views into one tensor."""

    def __init__(self, names: Sequence[str], each: Iterable[Tensor], whole: Tensor | None) -> None:
        """Take the columns of each feature, and the tensor that they are columns of, if known."""
        super().__init__(zip(names, each, strict=True))
        self._whole = whole
        self._versions = self._seen()

    def cat(self, features: Iterable[str] | None = None) -> Tensor:
        """Return the columns of features side by side, of all in order if None.

        Neighbours are not copied. Raises UnknownNameError for a feature that is not there.
        """
        wanted = list(self) if features is None else list(features)
        for name in wanted:
            if name not in self:
                raise UnknownNameError(f"there is no feature {name!r} in this batch: {list(self)}")
        if self._whole is not None and self._seen() == self._versions:
            order = list(self)
            first = order.index(wanted[0]) if wanted else 0
            if wanted == order[first : first + len(wanted)]:
                start = sum(self[name].shape[1] for name in order[:first])
                width = sum(self[name].shape[1] for name in wanted)
                return (
                    self._whole
                    if len(wanted) == len(order)
                    else self._whole.narrow(1, start, width)
                )
        return torch.cat([self[name] for name in wanted], 1)

    def _seen(self) -> list[int]:
        """Return what changes when something is written into the columns of a feature."""
        if self._whole is None or self._whole.is_inference():
            return []
        return [each._version for each in self.values()]


class _ColumnPlan(NamedTuple):
    """How the features of a call become columns.

    Attributes:
        order: the features, in the order of the collection.
        split: how many columns each has.
        columns: those of each part of the call.
        places: for each part, where its features are in `order`.
    """

    order: tuple[str, ...]
    split: tuple[int, ...]
    columns: tuple[Columns, ...]
    places: tuple[tuple[int, ...], ...]


class TieredEmbeddingBagCollection(TieredEmbeddingCollection):
    """Sums, means or maxima over bags of rows of many tables; see `TieredEmbeddingCollection`.

    Rows are pooled where they are, as `TieredEmbeddingBag` does, all features at once. A feature
    that gets no gradient is not trained.

    >>> bags = TieredEmbeddingBagCollection(store, {"user": "user", "seen": "item"}, mode="mean")
    >>> seen, offsets = torch.tensor([3, 1, 4]), torch.tensor([0, 2])
    >>> pooled = bags({"user": torch.tensor([[7], [2]]), "seen": (seen, offsets)})
    >>> pooled["seen"].shape, pooled.cat().shape
    (torch.Size([2, 16]), torch.Size([2, 32]))
    """

    def __init__(
        self,
        store: Store,
        tables: Mapping[str, Source] | Sequence[str],
        mode: Mode | Mapping[str, Mode] = "sum",
        *,
        padding_idx: int | Mapping[str, int] | None = None,
        include_last_offset: bool = False,
    ) -> None:
        """Put a collection over tables of a store; nothing is written.

        Args:
            store: an open store.
            tables: from the name of a feature to its table; see `TieredEmbeddingCollection`.
            mode: "sum", "mean" or "max", of all features or of each.
            padding_idx: a row that is left out of the bags of every feature, or of those that are
                named. On a GPU a call waits for how many ids are left.
            include_last_offset: whether offsets end with the number of ids.
        """
        super().__init__(store, tables, padding_idx=padding_idx)
        self.modes: dict[str, str] = _modes(mode, list(self.features))
        self.include_last_offset: bool = include_last_offset
        self._arranged: dict[tuple[str, ...], _ColumnPlan] = {}

    def forward(self, features: Any) -> FeatureBags:
        """Return the pooled row of each bag, by feature, `(batch, dim)`, in the collection's order.

        They are the columns of one tensor, of the type that takes all their rows: `cat` returns it.

        Args:
            features: from feature to its bags, equally many of each: 2-D ids `(batch, n)`, nested
                ids of layout `torch.jagged`, `(ids, offsets)` or `(ids, offsets, weights)` with
                1-D ids and offsets as `torch.nn.EmbeddingBag` takes them. Weights are for mode
                "sum". Or what has the methods of torchrec's `KeyedJaggedTensor`, as it is.

        Raises InvalidInputError for other numbers of bags, naming the feature, and what
        `TieredEmbeddingCollection` raises.
        """
        return FeatureBags(*self._pool(features, apart=True))

    def cat(self, features: Any) -> Tensor:
        """Return `(batch, Σ dim)` of the features of a batch; takes what `forward` takes.

        It is `self(features).cat()`, with no work for single features: all of them are trained.
        """
        _, each, whole = self._pool(features, apart=False)
        return torch.cat(each, 1) if whole is None else whole

    def _pool(
        self, features: Any, *, apart: bool
    ) -> tuple[Sequence[str], list[Tensor], Tensor | None]:
        """Return the features in order, the columns of each if `apart`, and all columns.

        A graph has those of each feature alone.
        """
        if not self._by_key:
            return self._pool_numbered(features, apart=apart)
        pooled = partial(self._pool_numbered, features, apart=apart)
        return while_named(self._by_key.values(), pooled)

    def _pool_numbered(
        self, features: Any, *, apart: bool
    ) -> tuple[Sequence[str], list[Tensor], Tensor | None]:
        """Do what `_pool` does; keys are looked up and leased one after the other."""
        is_graph = torch.compiler.is_compiling()
        if not is_graph:
            self._layer(0).refuse_transforms()
        given, first = self._given(features)
        groups = self._plan(given.names)
        if not groups:
            raise InvalidInputError("a call needs the bags of at least one feature")
        if is_graph:
            return self._in_graph(groups, self._joined(given, groups))
        plan, joined, parts = self._arrange(given.names), self._joined(given, groups), list[Part]()
        for number, group in enumerate(groups):
            parts.append(self._part(plan, number, group, joined[number], first))
        whole, *each = pool(parts, plan.split if apart else None)
        return plan.order, each, whole

    def _in_graph(
        self, groups: Sequence[Group], joined: Sequence[Joined]
    ) -> tuple[Sequence[str], list[Tensor], None]:
        """Do what `_pool` does within a graph, where each layer pools its own."""
        found: dict[str, Tensor] = {}
        dtype = groups[0].layer.anchor.dtype
        for group in groups:
            dtype = torch.promote_types(dtype, group.layer.anchor.dtype)
        for (layer, own, _), (ids, lengths, offsets, weights) in zip(groups, joined, strict=True):
            modes = tuple([self.modes[name] for name in own.names])
            asked = Asked(own, lengths, self._padding_of(own.names), modes)
            columns = compiling.look_up(ids, layer, asked, offsets, weights, dtype)
            found.update(zip(own.names, columns.split(layer.embedding_dim, 1), strict=True))
        order = [name for name in self._sources if name in found]
        return order, [found[name] for name in order], None

    def _joined(self, given: Given, groups: Sequence[Group]) -> list[Joined]:
        """Return the bags of each group; raises InvalidInputError for weights that are not used."""
        joined = list(map(given.of, groups))
        if len(joined) > 1:
            given.check_equal([each.bags // len(each.lengths) for each in joined])
        for name in given.weighted:
            if self.modes[name] != "sum":
                raise InvalidInputError(
                    f"weights are for mode 'sum'; the mode of feature {name!r} is "
                    f"{self.modes[name]!r}"
                )
        return joined

    def _asked_for(
        self, names: Sequence[str], ids: Tensor, lengths: Sequence[int]
    ) -> tuple[Tensor, Sequence[int]]:
        """Return the ids without those of padding; on a GPU, where this would wait, all ids."""
        counted = self._counted(names, ids, lengths) if on_host(ids) else None
        if counted is None:
            return ids, lengths
        none = Bags(ids, torch.zeros(1, dtype=torch.int64))
        bags, left = none.without(counted, lengths)
        return bags.ids, left

    def _part(
        self,
        plan: _ColumnPlan,
        number: int,
        group: Group,
        joined: Joined,
        first: Mapping[str, FirstRows],
    ) -> Part:
        """Return the bags of the features that one layer pools."""
        (layer, features, _), (ids, lengths, offsets, weights) = group, joined
        bags, counted = Bags(ids, offsets, weights), None
        if self.padding:
            counted = self._counted(features.names, ids, lengths)
        if counted is not None:  # as if those of padding had not been given
            bags, lengths = bags.without(counted, lengths)
        without_row = FirstRows.joined(features.names, lengths, first) if first else None
        columns, places = plan.columns[number], plan.places[number]
        trains = layer.own.trains(layer)
        return Part(layer, columns, bags, features, lengths, places, without_row, trains=trains)

    def _arrange(self, names: tuple[str, ...]) -> _ColumnPlan:
        """Return which columns the features of a call become."""
        plan = self._arranged.get(names)
        if plan is None:
            parts = self._plan(names)
            dims = {
                name: part.layer.embedding_dim for part in parts for name in part.features.names
            }
            order = tuple(name for name in self.features if name in dims)
            split = tuple(dims[name] for name in order)
            first = dict(zip(order, itertools.accumulate(split, initial=0), strict=False))
            place = {name: number for number, name in enumerate(order)}
            columns, places = [], []
            for part in parts:
                own = part.features.names
                modes = tuple(self.modes[name] for name in own)
                starts = tuple(first[name] for name in own)
                columns.append(Columns(modes, starts, part.layer.embedding_dim, sum(split)))
                places.append(tuple(place[name] for name in own))
            plan = _ColumnPlan(order, split, tuple(columns), tuple(places))
            if len(self._arranged) >= _REMEMBERED:
                self._arranged.clear()
            self._arranged[names] = plan
        return plan

    # -- as a module

    def extra_repr(self) -> str:
        """Name the features, their tables and modes."""
        return ", ".join(
            f"{name}: {table.name} {self.modes[name]}" for name, table in self.features.items()
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return another collection over the same tables, not trained yet; rows are not copied."""
        other = super().__deepcopy__(memo)
        other._arranged = {}
        return other


def _modes(mode: Any, features: Sequence[str]) -> dict[str, str]:
    """Return the mode of each feature."""
    modes = dict(mode) if isinstance(mode, Mapping) else dict.fromkeys(features, mode)
    for name in modes:
        if name not in features:
            raise UnknownNameError(f"mode names feature {name!r}, which the collection lacks")
    for name in features:
        if modes.get(name) not in MODES:
            raise InvalidInputError(
                f"the mode of feature {name!r} is 'sum', 'mean' or 'max', not {modes.get(name)!r}"
            )
    return modes
