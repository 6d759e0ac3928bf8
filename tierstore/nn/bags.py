"""Bags of rows of many tables as one module, whose cost does not grow with their number."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from tierstore._store.store import Store
from tierstore.distributed.known import on_host
from tierstore.distributed.owners import uploaded
from tierstore.errors import InvalidInputError, InvalidTypeError, UnknownNameError
from tierstore.nn import graphs
from tierstore.nn.collection import (
    Source,
    TieredEmbeddingCollection,
    concatenated,
    end_to_end,
    is_keyed,
    lengths_of,
    plain,
)
from tierstore.nn.graphs import Given
from tierstore.nn.jagged import Bags, jagged, joined_weights
from tierstore.nn.keyed import FirstRows, while_named
from tierstore.nn.part import Columns, Part
from tierstore.nn.pooled import MODES
from tierstore.nn.pooling import pool

_Tensors: TypeAlias = tuple[Tensor, ...] | list[Tensor]
Mode: TypeAlias = Literal["sum", "mean", "max"]

_REMEMBERED = 64
"""Shapes of features whose offsets are kept; training has one or two."""


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


class _Plan(NamedTuple):
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


class _Ids(NamedTuple):
    """The bags of one feature.

    Attributes:
        values: the ids, flat.
        starts: where each bag begins; None where all have `each` ids.
        batch: how many bags.
        each: how many ids a bag has, if all have as many.
        weights: a factor for each id, or None.
    """

    values: Tensor
    starts: Tensor | None
    batch: int
    each: int
    weights: Tensor | None


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
        self.include_last_offset = include_last_offset
        self._arranged: dict[tuple[str, ...], _Plan] = {}
        self._offsets: dict[tuple[int, tuple[int, ...], torch.device], Tensor] = {}
        self._begins: dict[tuple[int | torch.device, ...], tuple[Tensor, Tensor]] = {}

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
        if torch.compiler.is_compiling():
            found = self._in_graph(features)
            return FeatureBags(list(found), list(found.values()), None)
        plan, (whole, *each) = self._pool(features, apart=True)
        return FeatureBags(plan.order, each, whole)

    def cat(self, features: Any) -> Tensor:
        """Return `(batch, Σ dim)` of the features of a batch; takes what `forward` takes.

        It is `self(features).cat()`, with no work for single features: all of them are trained.
        """
        if torch.compiler.is_compiling():
            return torch.cat(list(self._in_graph(features).values()), 1)
        return self._pool(features, apart=False)[1][0]

    def _in_graph(self, features: Any) -> dict[str, Tensor]:
        """Do what `forward` does within a graph, in the collection's order."""
        given = self._given(features)
        order = [name for name in self._sources if name in given]
        found = graphs.pool(self._by_layer(order), given, self.padding, self.modes)
        return {name: found[name] for name in order}

    def _pool(self, features: Any, *, apart: bool) -> tuple[_Plan, Sequence[Tensor]]:
        """Return the plan of the columns, all columns, and those of each feature if `apart`."""
        if not self._by_key:
            return self._pool_numbered(features, apart=apart)
        pooled = partial(self._pool_numbered, features, apart=apart)
        return while_named(self._by_key.values(), pooled)

    def _pool_numbered(self, features: Any, *, apart: bool) -> tuple[_Plan, Sequence[Tensor]]:
        """Do what `_pool` does; keys are looked up and leased one after the other."""
        layer = self._layer(0)
        layer.refuse_transforms()
        features, first = self._numbered(features)
        with layer.together():
            names, parts = self._parts(features, first)
            plan = self._arrange(names)
            return plan, pool(parts, plan.split if apart else None)

    def prefetch(self, features: Any, *, window: int = 16) -> None:
        """Start bringing the rows of a coming batch nearer; takes what `forward` takes."""
        if not is_keyed(features):
            features, _ = self._numbered(features, add=False)
            features = {name: self._bags_of(name, each).values for name, each in features.items()}
            self._prefetch_numbers(features, window)
            return
        super().prefetch(features, window=window)

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

    def _given(self, features: Any) -> dict[str, Given]:
        """Return the bags of each feature, for a graph."""
        found = {}
        if is_keyed(features):
            names, offsets = tuple(features.keys()), _offsets_of(features)
            lengths = lengths_of(features, len(names))
            begins = itertools.accumulate(lengths, initial=0)
            weights = self._weights_of(features, names)
            every = [None] * len(names) if weights is None else weights.split(lengths)
            starts = offsets[:-1].view(len(names), -1)
            ids = features.values().split(lengths)
            for place, (name, begin) in enumerate(zip(names, begins, strict=False)):
                found[name] = Given(ids[place], starts[place] - begin, every[place])
            return found
        batch = None
        for name, given in features.items():
            plain(name, given[0] if isinstance(given, tuple | list) else given)
            ids, starts, count, each, weights = self._bags_of(name, given)
            batch = count if batch is None else batch
            if count != batch:
                raise _unequal(name, count, next(iter(features)), batch)
            if starts is None:
                starts = torch.arange(count, device=ids.device) * each
            found[name] = Given(ids, starts, weights)
        return found

    # -- from features to bags by layer

    def _parts(
        self, features: Any, first: Mapping[str, FirstRows]
    ) -> tuple[tuple[str, ...], list[Part]]:
        """Return the features of a call, and their bags by layer; see `_numbered`."""
        if is_keyed(features):
            names = tuple(features.keys())
            return names, self._keyed_parts(names, features, first)
        names, parts = tuple(features), []
        plan = self._arrange(names)
        plain = _plain_of(tuple(features.values()))
        if plain is not None and not any([part.layer.coming for part in self._plan(names)]):  # noqa: C419
            joined = self._plain_parts(names, *plain, first)
            if joined is not None:
                return names, joined
        given = {name: self._bags_of(name, ids) for name, ids in features.items()}
        batch = next(iter(given.values())).batch
        for name, one in given.items():
            if one.batch != batch:
                raise _unequal(name, one.batch, names[0], batch)
        for number, part in enumerate(self._plan(names)):
            own = [given[name] for name in part.features.names]
            flat = [each.values for each in own]
            found = part.layer.coming.find(flat)
            ids, lengths = found or concatenated(part.features.names, flat)
            offsets = self._joined_offsets(own, lengths, ids.device)
            weights = joined_weights(flat, [each.weights for each in own])
            parts.append(self._part(plan, number, part, ids, lengths, offsets, weights, first))
        return names, parts

    def _plain_parts(
        self,
        names: tuple[str, ...],
        every: _Tensors,
        offsets: _Tensors | None,
        first: Mapping[str, FirstRows],
    ) -> list[Part] | None:
        """Return the bags of features in one form, with no operator for each; see `_plain_of`.

        None where they differ in a way that takes a closer look, or has a message of its own.
        """
        plan, joined = self._arrange(names), []
        for part in self._plan(names):
            places = part.places
            own = every if places is None else [every[place] for place in places]
            if offsets is None:
                found = self._evenly_joined(own)
            else:
                at = offsets if places is None else [offsets[place] for place in places]
                found = self._raggedly_joined(own, at)
            if found is None:
                return None
            joined.append((part, *found))
        if len({(len(of) - 1) // len(lengths) for _, _, lengths, of in joined}) > 1:
            return None
        return [self._part(plan, number, *each, None, first) for number, each in enumerate(joined)]

    def _evenly_joined(self, own: _Tensors) -> tuple[Tensor, list[int], Tensor] | None:
        """Return 2-D ids as one tensor, how many each feature has, and where their bags begin."""
        bags = _stacked(own)
        if bags is None:
            return None
        count, batch, each = bags.shape
        of = self._even_offsets(batch, (each,) * count, bags.device)
        return bags.reshape(-1), [batch * each] * count, of

    def _raggedly_joined(
        self, own: _Tensors, offsets: _Tensors
    ) -> tuple[Tensor, list[int], Tensor] | None:
        """Return flat ids as one tensor, how many each feature has, and where their bags begin."""
        ids = end_to_end(own)
        if ids is None or len(set(map(Tensor.numel, offsets))) > 1:
            return None
        lengths = list(map(Tensor.numel, own))
        if self.include_last_offset:
            offsets = [torch.stack(offsets)[:, :-1].reshape(-1)]
        of = self._moved(offsets, lengths)
        return None if of is None else (ids, lengths, of)

    def _keyed_parts(
        self, names: tuple[str, ...], features: Any, first: Mapping[str, FirstRows]
    ) -> list[Part]:
        """Return the bags of a KeyedJaggedTensor by layer."""
        lengths, plan, parts = lengths_of(features, len(names)), self._arrange(names), []
        offsets = _offsets_of(features)
        if (offsets.shape[0] - 1) % len(names):
            raise InvalidInputError(
                f"{len(offsets) - 1} bags are not equally many for {len(names)} keys"
            )
        weights = self._weights_of(features, names)
        pieces = None if weights is None else weights.split(list(lengths))
        found = self._parted(self._plan(names), features.values(), lengths)
        for number, (part, ids, own) in enumerate(found):
            of, own_weights = offsets, weights
            if part.places is not None:
                befores = [0, *itertools.accumulate(lengths)]
                starts = offsets[:-1].reshape(len(names), -1)
                begins = itertools.accumulate(own[:-1], initial=0)
                moved = [to - befores[at] for to, at in zip(begins, part.places, strict=True)]
                of = starts[list(part.places)] + torch.tensor(moved, device=starts.device)[:, None]
                of = pad(of.reshape(-1), (0, 1), value=len(ids))
                if pieces is not None:
                    own_weights = torch.cat([pieces[place] for place in part.places])
            parts.append(self._part(plan, number, part, ids, own, of, own_weights, first))
        return parts

    def _part(
        self,
        plan: _Plan,
        number: int,
        part: Any,
        ids: Tensor,
        lengths: Sequence[int],
        offsets: Tensor,
        weights: Tensor | None,
        first: Mapping[str, FirstRows],
    ) -> Part:
        """Return the bags of the features that one layer pools."""
        names = part.features.names
        without_row = FirstRows.joined(names, lengths, first) if first else None
        bags, counted = Bags(ids, offsets, weights), None
        if self.padding:
            counted = self._counted(names, ids, lengths)
        columns, places = plan.columns[number], plan.places[number]
        return Part.of(
            part.layer,
            columns,
            bags,
            part.features,
            lengths,
            places,
            without_row,
            counted,
            trains=part.layer.own.trains(part.layer),
        )

    def _arrange(self, names: tuple[str, ...]) -> _Plan:
        """Return which columns the features of a call become."""
        plan = self._arranged.get(names)
        if plan is None:
            parts = self._plan(names)
            if not parts:
                raise InvalidInputError("a call needs the bags of at least one feature")
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
            plan = _Plan(order, split, tuple(columns), tuple(places))
            if len(self._arranged) >= _REMEMBERED:
                self._arranged.clear()
            self._arranged[names] = plan
        return plan

    def _bags_of(self, name: str, given: Any) -> _Ids:
        """Return the bags of a feature, as users give them."""
        ids, offsets, weights = given, None, None
        if isinstance(given, tuple | list):
            if len(given) not in (2, 3):
                raise InvalidInputError(
                    f"feature {name!r} is ids, (ids, offsets) or (ids, offsets, weights), not "
                    f"{len(given)} tensors"
                )
            ids, offsets, weights = (*given, None)[:3]
        for each, what in ((ids, "ids"), (offsets, "offsets"), (weights, "weights")):
            if not isinstance(each, Tensor) and (each is not None or what == "ids"):
                raise InvalidTypeError(
                    f"the {what} of feature {name!r} are a tensor, not a {type(each).__name__}"
                )
        if ids.is_nested:
            bags = jagged(ids)
            ids, offsets, ends = bags.values(), bags.offsets(), True
            weights = jagged(weights).values() if weights is not None else None
        else:
            ends = self.include_last_offset
        if weights is not None:
            if weights.shape != ids.shape:
                raise InvalidInputError(
                    f"the weights of feature {name!r} are {tuple(weights.shape)}, its ids "
                    f"{tuple(ids.shape)}"
                )
            self._check_weighted([name])
            weights = weights.reshape(-1)
        if ids.ndim == 2 and offsets is None:
            return _Ids(ids.reshape(-1), None, ids.shape[0], ids.shape[1], weights)
        if ids.ndim != 1 or offsets is None or offsets.ndim != 1:
            raise InvalidInputError(
                f"the bags of feature {name!r} are 2-D ids, or 1-D ids with 1-D offsets; these are "
                f"{ids.ndim}-D ids with {'no' if offsets is None else f'{offsets.ndim}-D'} offsets"
            )
        starts = offsets[:-1] if ends else offsets
        return _Ids(ids, starts, starts.shape[0], 0, weights)

    def _weights_of(self, features: Any, names: Sequence[str]) -> Tensor | None:
        """Return the weights of a KeyedJaggedTensor, or None, as `_check_weighted` lets them."""
        has_any = hasattr(features, "weights_or_none")
        weights: Tensor | None = features.weights_or_none() if has_any else None
        if weights is not None:
            self._check_weighted(names)
        return weights

    def _check_weighted(self, names: Iterable[str]) -> None:
        """Raise InvalidInputError for weights of a feature that is not summed."""
        for name in names:
            if self.modes[name] != "sum":
                raise InvalidInputError(
                    f"weights are for mode 'sum'; the mode of feature {name!r} is "
                    f"{self.modes[name]!r}"
                )

    def _joined_offsets(
        self, own: Sequence[_Ids], lengths: Sequence[int], device: torch.device
    ) -> Tensor:
        """Return where the bags of features begin among the ids of all of them."""
        batch = own[0].batch
        if all([each.starts is None for each in own]):  # noqa: C419 - one call, not one for each
            return self._even_offsets(batch, tuple([each.each for each in own]), device)
        every = [
            torch.arange(batch, device=device) * each.each if each.starts is None else each.starts
            for each in own
        ]
        if len({each.dtype for each in every}) > 1:
            every = [each.to(torch.int64) for each in every]
        moved = self._moved(every, lengths)
        if moved is None:
            raise InvalidInputError("offsets are whole numbers, those of all features on a device")
        return moved

    def _moved(self, starts: _Tensors, lengths: Sequence[int]) -> Tensor | None:
        """Return where bags begin among the ids of all features, and where the last one ends.

        `starts` are those of each feature alone, equally many, in one tensor or more. None if they
        are no whole numbers, not 1-D, or not on one device.
        """
        key = *lengths, starts[0].device
        found = self._begins.get(key)
        if found is None:
            if len(self._begins) >= _REMEMBERED:
                self._begins.clear()
            ends = uploaded([*itertools.accumulate(lengths, initial=0)], starts[0].device)
            found = self._begins[key] = ends[:-1, None], ends[-1:]
        begins, end = found
        try:
            moved = torch.cat([*starts, end])
        except RuntimeError:
            return None
        if moved.ndim != 1 or moved.dtype is not torch.int64:
            return None
        features = len(lengths)
        batch = (moved.shape[0] - 1) // features
        moved.as_strided((features, batch), (batch, 1)).add_(begins)  # all but the last, one view
        return moved

    def _even_offsets(self, batch: int, each: tuple[int, ...], device: torch.device) -> Tensor:
        """Return where bags begin whose features have so many ids in each."""
        key = batch, each, device
        if key not in self._offsets:
            if len(self._offsets) >= _REMEMBERED:
                self._offsets.clear()
            sizes = torch.tensor(each).repeat_interleave(batch)
            self._offsets[key] = pad(sizes.cumsum(0), (1, 0)).to(device)
        return self._offsets[key]

    # -- as a module

    def extra_repr(self) -> str:
        """Name the features, their tables and modes."""
        return ", ".join(
            f"{name}: {table.name} {self.modes[name]}" for name, table in self.features.items()
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return another collection over the same tables, not trained yet; rows are not copied."""
        other = super().__deepcopy__(memo)
        other._arranged, other._offsets, other._begins = {}, {}, {}
        return other


def _plain_of(given: Sequence[Any]) -> tuple[_Tensors, _Tensors | None] | None:
    """Return the ids of all features, and their offsets if they come with some.

    None where they are not plain int64 tensors, all with offsets and no weights, or all without.
    What one joined tensor tells of all of them is not checked here.
    """
    every, offsets = tuple(given), None
    if set(map(type, every)) == {tuple}:
        if set(map(len, every)) != {2}:
            return None
        every, offsets = zip(*every, strict=True)
        if set(map(type, offsets)) != {Tensor}:
            return None
    if set(map(type, every)) != {Tensor} or set(map(_dtype, every)) != {torch.int64}:
        return None
    return every, offsets


_dtype = attrgetter("dtype")


def _stacked(every: _Tensors) -> Tensor | None:
    """Return 2-D tensors of one shape as one, 3-D; None if they are not such."""
    try:
        stacked = every[0][None] if len(every) == 1 else torch.stack(every)
    except RuntimeError:
        return None
    return stacked if stacked.ndim == 3 else None


def _offsets_of(features: Any) -> Tensor:
    """Return where the bags of a KeyedJaggedTensor begin, and where the last one ends."""
    if hasattr(features, "offsets"):
        return features.offsets()
    return pad(features.lengths().reshape(-1).cumsum(0), (1, 0))


def _unequal(name: str, count: int, first: str, batch: int) -> InvalidInputError:
    """Return the error for a feature with another number of bags than the first one."""
    return InvalidInputError(
        f"feature {name!r} has {count} bags, {first!r} has {batch}: all features of a call have as "
        "many"
    )


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
