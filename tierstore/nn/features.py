"""Ids as users give them, as the tensors that layers take: outside of graphs and within.

    given = given_as(features)             # a dict, or what torchrec's KeyedJaggedTensor has
    joined = given.of(group)               # those of the features that one layer looks up

A layer over one table takes `Bags.of(ids, offsets, weights)`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from tierstore._table.joint import Features
from tierstore.distributed.owners import uploaded
from tierstore.errors import InvalidInputError, InvalidTypeError

Tensors: TypeAlias = tuple[Tensor, ...] | list[Tensor]

_REMEMBERED = 64
"""Shapes of features whose offsets are kept; training has one or two."""


class Group(NamedTuple):
    """The features of a call that one layer looks up.

    Attributes:
        layer: the layer.
        features: its features, in order.
        places: where they are among all features of the call; None if they are all of them.
    """

    layer: Any
    features: Features
    places: tuple[int, ...] | None


class Joined(NamedTuple):
    """The ids of the features of a group, one feature after another.

    Attributes:
        ids: int64 `(n,)`, contiguous.
        lengths: how many each feature has.
        offsets: int64 `(bags + 1,)`, where bags begin and the last one ends; None for rows.
        weights: a factor for each id, or None.
    """

    ids: Tensor
    lengths: Sequence[int]
    offsets: Tensor | None = None
    weights: Tensor | None = None

    @property
    def bags(self) -> int:
        """How many bags there are."""
        return 0 if self.offsets is None else self.offsets.shape[0] - 1


def given_as(features: Any, ends: bool | None = None) -> Given:
    """Take features; for bags, `ends` tells whether offsets end with the number of ids."""
    if not isinstance(features, dict) and is_jagged(features):
        return _Jagged(features, bags=ends is not None)
    return _Named(features) if ends is None else _Bagged(features, ends)


class _Jagged:
    """Features as torchrec's KeyedJaggedTensor has them: their values are taken as they are.

    Attributes:
        names: of the features, in the order in which they were given.
        weighted: those that have weights, as far as `of` has looked.
    """

    def __init__(self, features: Any, *, bags: bool) -> None:
        self.names: tuple[str, ...] = tuple(features.keys())
        self._values: Tensor = features.values()
        self._lengths = lengths_of(features, len(self.names))
        self._offsets = _offsets_of(features) if bags else None
        if self._offsets is not None and (self._offsets.shape[0] - 1) % len(self.names):
            raise InvalidInputError(
                f"{len(self._offsets) - 1} bags are not equally many for {len(self.names)} keys"
            )
        has_any = bags and hasattr(features, "weights_or_none")
        self._weights: Tensor | None = features.weights_or_none() if has_any else None
        self.weighted: Iterable[str] = () if self._weights is None else self.names

    def replace(self, names: Iterable[str], found: Callable[[str, Any], Any]) -> None:
        """Have what `found` returns for names and their ids in place of those ids."""
        pieces = list(self._values.split(list(self._lengths)))
        for name in names:
            if name in self.names:
                at = self.names.index(name)
                pieces[at] = found(name, pieces[at])
        self._values = torch.cat(pieces)

    def of(self, group: Group) -> Joined:
        """Return the ids of a group."""
        values, lengths = self._values.contiguous(), self._lengths
        if values.dtype is not torch.int64:
            values = whole_numbers(values, "values")
        offsets, weights, places = self._offsets, self._weights, group.places
        if not torch.compiler.is_compiling() and sum(lengths) != values.numel():
            raise InvalidInputError(
                f"the keys have {sum(lengths)} ids by their lengths, and there are {len(values)}"
            )
        if places is None:
            return Joined(values, lengths, offsets, weights)
        own = [lengths[place] for place in places]
        if offsets is not None:
            befores = [0, *itertools.accumulate(lengths)]
            starts = offsets[:-1].reshape(len(self.names), -1)
            begins = itertools.accumulate(own[:-1], initial=0)
            moved = [to - befores[at] for to, at in zip(begins, places, strict=True)]
            of = starts[list(places)] + torch.tensor(moved, device=starts.device)[:, None]
            offsets = torch.cat([of.reshape(-1), of.new_full((1,), sum(own))])

        def picked(of: Tensor) -> Tensor:
            pieces = of.split(list(lengths))
            return torch.cat([pieces[place] for place in places])

        return Joined(picked(values), own, offsets, None if weights is None else picked(weights))

    def announced(self, group: Group, window: int) -> Joined:
        """Return the ids of a group; nothing tells them apart from others that come."""
        return self.of(group)

    def check_equal(self, bags: Sequence[int]) -> None:
        """Raise nothing: that is so by form."""

    def shaped(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows as they are, `(ids, dim)`."""
        return found


class _Named:
    """Ids of features in a dict, of any shape, or nested."""

    weighted: Iterable[str] = ()

    def __init__(self, features: Mapping[str, Any]) -> None:
        self._features = features
        self.names: tuple[str, ...] = tuple(features.keys())

    def replace(self, names: Iterable[str], found: Callable[[str, Any], Any]) -> None:
        """Have what `found` returns for names and their ids in place of those ids."""
        self._features = given = dict(self._features)
        for name in names:
            if name in given:
                ids = given[name]
                is_alone = not isinstance(ids, tuple)
                given[name] = found(name, ids) if is_alone else (found(name, ids[0]), *ids[1:])

    def of(self, group: Group) -> Joined:
        """Return the ids of a group."""
        return Joined(*_concatenated(group, self._flat(group.features.names)))

    def announced(self, group: Group, window: int) -> Joined:
        """Return the ids of a group, which the layer may be asked for in the next batches."""
        given = [torch.as_tensor(each) for each in self._flat(group.features.names)]
        found = _concatenated(group, given, announced=False)
        if group.layer.is_shared:
            group.layer.coming.keep(given, found, window)
        return Joined(*found)

    def _flat(self, names: Sequence[str]) -> list[Any]:
        return list(map(self._features.__getitem__, names))

    def check_equal(self, bags: Sequence[int]) -> None:
        """Raise nothing: there are no bags."""

    def shaped(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows in the shapes of their ids, nested as these are."""
        if {ids.ndim for ids in self._features.values()} == {1}:
            return found
        return {name: _as_ids(rows, self._features[name]) for name, rows in found.items()}


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


class _Bagged(_Named):
    """Bags of features in a dict; those in one form are joined with no operator for each."""

    def __init__(self, features: Mapping[str, Any], ends: bool) -> None:
        self._features = features
        self.names = tuple(features)
        self._ends = ends
        self._found: dict[str, _Ids] = {}

    def of(self, group: Group) -> Joined:
        """Return the ids of a group."""
        names = group.features.names
        is_announced = group.layer.is_shared and bool(group.layer.coming)
        if not (self._found or torch.compiler.is_compiling() or is_announced):
            plain = _plain_of(super()._flat(names))
            joined = None if plain is None else self._plainly(*plain)
            if joined is not None:
                return joined
        self._look_at_each()
        own = [self._found[name] for name in names]
        flat = [each.values for each in own]
        ids, lengths = _concatenated(group, flat)
        weights = _joined_weights(flat, [each.weights for each in own])
        return Joined(ids, lengths, _joined_offsets(own, lengths, ids.device), weights)

    def check_equal(self, bags: Sequence[int]) -> None:
        """Raise InvalidInputError unless all features have as many bags, given those of groups."""
        if len(set(bags)) > 1:
            self._look_at_each()

    def _look_at_each(self) -> None:
        """Take features one by one; raises InvalidInputError for other numbers of bags."""
        if not self._found:
            for name in self.names:
                self._found[name] = one = _bags_of(name, self._each(name), ends=self._ends)
                first = next(iter(self._found))
                if one.batch != self._found[first].batch:
                    raise InvalidInputError(
                        f"feature {name!r} has {one.batch} bags, {first!r} has "
                        f"{self._found[first].batch}: all features of a call have as many"
                    )
            self.weighted = [name for name, one in self._found.items() if one.weights is not None]

    def _flat(self, names: Sequence[str]) -> list[Tensor]:
        return [_bags_of(name, self._each(name), ends=self._ends).values for name in names]

    def _each(self, name: str) -> Sequence[Any]:
        given = self._features[name]
        if not isinstance(given, tuple | list):
            return (given,)
        if len(given) not in (2, 3):
            raise InvalidInputError(
                f"feature {name!r} is ids, (ids, offsets) or (ids, offsets, weights), not "
                f"{len(given)} tensors"
            )
        return given

    def _plainly(self, every: Tensors, offsets: Tensors | None) -> Joined | None:
        """Return plain ids as one tensor, and where bags begin in it; see `_plain_of`.

        None where they differ in a way that takes a closer look, or has a message of its own.
        """
        if offsets is None:
            bags = _stacked(every)
            if bags is None:
                return None
            count, batch, each = bags.shape
            of = _even_offsets(batch, (each,) * count, bags.device)
            return Joined(bags.reshape(-1), [batch * each] * count, of)
        ids = _end_to_end(every)
        if ids is None or len(set(map(Tensor.numel, offsets))) > 1:
            return None
        lengths = list(map(Tensor.numel, every))
        if self._ends:
            offsets = [torch.stack(offsets)[:, :-1].reshape(-1)]
        moved = _moved(offsets, lengths)
        return None if moved is None else Joined(ids, lengths, moved)


Given: TypeAlias = _Jagged | _Named
"""The features of a call."""


def _bags_of(name: str, given: Sequence[Any], *, ends: bool) -> _Ids:
    """Return the bags of a feature: ids, (ids, offsets) or (ids, offsets, weights).

    See `TieredEmbeddingBagCollection.forward`; a layer over one table has no `name`.
    """
    of = f" of feature {name!r}" if name else ""
    ids, offsets, weights = (*given, None, None)[:3]
    for each, what in ((ids, "ids"), (offsets, "offsets"), (weights, "weights")):
        if not isinstance(each, Tensor) and (each is not None or what == "ids"):
            kind = type(each).__name__
            raise InvalidTypeError(
                f"the {what}{of} are a tensor, not a {kind}"
                if name
                else f"a layer takes {what} as a tensor, not {kind}"
            )
    if ids.is_nested:
        nested = _not_in_graph(name, ids)
        ids, offsets, ends = nested.values(), nested.offsets(), True
        weights = None if weights is None else jagged(weights).values()
    if weights is not None:
        if weights.shape != ids.shape:
            raise InvalidInputError(
                f"the weights{of} are {tuple(weights.shape)}, its ids {tuple(ids.shape)}"
            )
        weights = weights.reshape(-1)
    if ids.ndim == 2 and offsets is None:
        return _Ids(ids.reshape(-1), None, ids.shape[0], ids.shape[1], weights)
    if ids.ndim != 1 or offsets is None or offsets.ndim != 1:
        raise InvalidInputError(
            f"the bags{of} are 2-D ids, or 1-D ids with 1-D offsets; these are {ids.ndim}-D ids "
            f"with {'no' if offsets is None else f'{offsets.ndim}-D'} offsets"
        )
    starts = offsets[:-1] if ends else offsets
    return _Ids(ids, starts, starts.shape[0], 0, weights)


@dataclass(slots=True)
class Bags:
    """Ids in bags, one bag after another.

    Attributes:
        ids: `(n,)`.
        offsets: int64 `(bags + 1,)`: where each bag begins, and where the last one ends.
        weights: a factor for each id in a bag; None for 1.
        ends_in_padding: whether the last id is in no bag, and its row counts in none.
    """

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None = None
    ends_in_padding: bool = False

    def __len__(self) -> int:
        """Return the number of bags."""
        return int(self.offsets.shape[0]) - 1

    @classmethod
    def of(
        cls, ids: Tensor, offsets: Tensor | None, weights: Tensor | None, *, ends: bool = False
    ) -> Bags:
        """Take bags as `torch.nn.EmbeddingBag` does, or nested ones.

        Args:
            ids: 2-D `(bags, n)`, nested of layout `torch.jagged`, or 1-D with `offsets`.
            offsets: where each bag begins in 1-D ids.
            weights: in the shape of the ids.
            ends: whether offsets end with the number of ids.
        """
        one = _bags_of("", (ids, offsets, weights), ends=ends)
        if one.starts is None:
            of = torch.arange(one.batch + 1, device=ids.device) * one.each
        elif ends and offsets is not None:
            of = offsets
        else:
            of = pad(one.starts, (0, 1), value=one.values.shape[0])
        return cls(one.values, of, one.weights)

    def padded(self, padding_idx: int) -> Bags:
        """Return the bags with the id of padding after them; its row does not count in bags."""
        ids = torch.cat([self.ids, self.ids.new_full((1,), padding_idx)])
        return replace(self, ids=ids, ends_in_padding=True)

    def without(self, counted: Tensor, lengths: Sequence[int]) -> tuple[Bags, list[int]]:
        """Return the bags with the ids that are `counted` alone, and how many each feature has.

        `lengths` are those of the features before. On a GPU this waits.
        """
        before = pad(counted.cumsum(0), (1, 0))
        ends = uploaded([0, *itertools.accumulate(lengths)], counted.device)
        left: list[int] = before[ends].diff().tolist()
        weights = self.weights
        kept = None if weights is None else weights[counted.to(weights.device)]
        starts = before.to(self.offsets.device)[self.offsets]
        return Bags(self.ids[counted], starts, kept), left

    def split(self, of_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Split what stands for all ids into that of the ids in bags and that of padding."""
        return (of_ids[:-1], of_ids[-1:]) if self.ends_in_padding else (of_ids, None)

    def places(self, of_ids: Tensor) -> tuple[Tensor, int | None]:
        """Return the index of the row of each id in a bag, where each id has one, and of padding.

        The index is the position of the id, except for ids equal to padding; `of_ids` stands for
        all ids.
        """
        inside, padding = self.split(of_ids)
        places = torch.arange(inside.shape[0], device=of_ids.device)
        if padding is None:
            return places, None
        return torch.where(inside == padding, inside.shape[0], places), inside.shape[0]


def jagged(ids: Tensor) -> Any:
    """Return nested ids without gaps; raises InvalidTypeError for another layout than jagged."""
    if ids.layout != torch.jagged:
        raise InvalidTypeError(f"nested ids are of layout torch.jagged, not {ids.layout}")
    return ids.contiguous()


def no_padding(ids: Tensor, lengths: Sequence[int], padding: Sequence[int]) -> Tensor | None:
    """Return for each id of some features whether it is no padding; None where none has any.

    Args:
        ids: `(n,)`, one feature after another.
        lengths: how many each feature has.
        padding: the row of padding of each, -1 for none.
    """
    if max(padding, default=-1) < 0:
        return None
    rows, counts = uploaded(padding, ids.device), uploaded(lengths, ids.device)
    counted: Tensor = ids != rows.repeat_interleave(counts, output_size=len(ids))
    return counted


def is_jagged(features: Any) -> bool:
    """Whether features come as torchrec's KeyedJaggedTensor has them."""
    if isinstance(features, dict):  # most are, and a test for a Mapping takes several calls
        return False
    return (
        hasattr(features, "keys")
        and hasattr(features, "values")
        and (hasattr(features, "offsets") or hasattr(features, "lengths"))
        and not isinstance(features, Mapping)
    )


def lengths_of(features: Any, keys: int) -> list[int]:
    """Return how many ids each key has; on a GPU this may wait."""
    if hasattr(features, "length_per_key"):
        return list(features.length_per_key())
    if hasattr(features, "offsets"):
        offsets = features.offsets()
        ends = offsets[:: max(1, (len(offsets) - 1) // max(1, keys))].tolist()
        return [end - begin for begin, end in itertools.pairwise(ends)]
    found: list[int] = features.lengths().reshape(keys, -1).sum(1).tolist()
    return found


def _offsets_of(features: Any) -> Tensor:
    """Return where the bags of a KeyedJaggedTensor begin, and where the last one ends."""
    if hasattr(features, "offsets"):
        return features.offsets()
    return pad(features.lengths().reshape(-1).cumsum(0), (1, 0))


def _concatenated(
    group: Group, given: list[Tensor], *, announced: bool = True
) -> tuple[Tensor, list[int]]:
    """Return the ids of a group as one tensor, int64 `(n,)`, and how many each feature has.

    The tensor is that of an `announced` batch, if they are of one.
    """
    names = group.features.names
    if not torch.compiler.is_compiling():
        known: tuple[Tensor, list[int]] | None = None
        if announced and group.layer.is_shared:
            known = group.layer.coming.find(given)
        if known is not None:
            return known
        if set(map(type, given)) == {Tensor} and set(map(_dtype, given)) == {torch.int64}:
            joined = _end_to_end(given)
            if joined is not None:
                return joined, list(map(Tensor.numel, given))
    for name, each in zip(names, given, strict=True):
        if not isinstance(each, Tensor):
            raise InvalidTypeError(
                f"a layer takes ids as tensors; those of feature {name!r} are a "
                f"{type(each).__name__}"
            )
    flat = [
        whole_numbers(_flat(name, each), f"those of feature {name!r}")
        for name, each in zip(names, given, strict=True)
    ]
    return flat[0] if len(flat) == 1 else torch.cat(flat), [each.shape[0] for each in flat]


def _flat(name: str, ids: Tensor) -> Tensor:
    """Return the ids of a feature in one dimension."""
    return (_not_in_graph(name, ids).values() if ids.is_nested else ids).reshape(-1)


def _not_in_graph(name: str, ids: Tensor) -> Any:
    """Return nested ids as `jagged` does; raises InvalidTypeError for a feature within a graph."""
    if name and torch.compiler.is_compiling():
        raise InvalidTypeError(
            f"the ids of feature {name!r} are nested, which graphs do not take: give "
            "ids.values(), and ids.offsets() to bags"
        )
    return jagged(ids)


_dtype = attrgetter("dtype")


def _end_to_end(every: Tensors) -> Tensor | None:
    """Return 1-D tensors as one; None if they are not all 1-D, and on one device.

    The joined tensor tells whether they are: nothing is looked up for each.
    """
    if every[0].ndim != 1:
        return None
    try:
        joined = every[0].contiguous() if len(every) == 1 else torch.cat(every)
    except RuntimeError:
        return None
    return joined if joined.ndim == 1 else None


def whole_numbers(ids: Tensor, what: str) -> Tensor:
    """Return ids as int64, contiguous; raises InvalidTypeError for those that are no numbers."""
    if ids.dtype is not torch.int64:
        if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
            raise InvalidTypeError(f"row ids are whole numbers; {what} are {ids.dtype}")
        ids = ids.to(torch.int64)
    return ids.contiguous()


def _as_ids(rows: Tensor, ids: Tensor) -> Tensor:
    """Return rows in the shape of their ids, nested as these are."""
    if ids.is_nested:
        nested: Tensor = torch.nested.nested_tensor_from_jagged(rows, jagged(ids).offsets())
        return nested
    return rows if ids.ndim == 1 else rows.reshape(*ids.shape, rows.shape[1])


def _plain_of(given: Sequence[Any]) -> tuple[Tensors, Tensors | None] | None:
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


def _stacked(every: Tensors) -> Tensor | None:
    """Return 2-D tensors of one shape as one, 3-D; None if they are not such."""
    try:
        stacked = every[0][None] if len(every) == 1 else torch.stack(every)
    except RuntimeError:
        return None
    return stacked if stacked.ndim == 3 else None


def _joined_weights(ids: Sequence[Tensor], weights: Sequence[Tensor | None]) -> Tensor | None:
    """Return the weights of the ids of features, 1 where one has none; None if none has any."""
    given = [each for each in weights if each is not None]
    if not given:
        return None
    pairs = zip(ids, weights, strict=True)
    return torch.cat([given[0].new_ones(of.shape[0]) if w is None else w for of, w in pairs])


def _joined_offsets(own: Sequence[_Ids], lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return where the bags of features begin among the ids of all of them."""
    batch, is_graph = own[0].batch, torch.compiler.is_compiling()
    if not is_graph and all([each.starts is None for each in own]):  # noqa: C419 - one call
        return _even_offsets(batch, tuple([each.each for each in own]), device)
    every = [
        torch.arange(batch, device=device) * each.each if each.starts is None else each.starts
        for each in own
    ]
    if len({each.dtype for each in every}) > 1 or is_graph:
        every = [each.to(torch.int64) for each in every]
    if is_graph:
        begins = [0, *itertools.accumulate(lengths)]
        moved = [each + begin for each, begin in zip(every, begins, strict=False)]
        return torch.cat([*moved, moved[0].new_full((1,), begins[-1])])
    found = _moved(every, lengths)
    if found is None:
        raise InvalidInputError("offsets are whole numbers, those of all features on a device")
    return found


def _moved(starts: Tensors, lengths: Sequence[int]) -> Tensor | None:
    """Return where bags begin among the ids of all features, and where the last one ends.

    `starts` are those of each feature alone, equally many, in one tensor or more. None if they are
    no whole numbers, not 1-D, or not on one device.
    """
    begins, end = _begins_of(tuple(lengths), starts[0].device)
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


@functools.lru_cache(_REMEMBERED)
def _begins_of(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return where the ids of each feature begin among those of all, and where the last end."""
    ends = uploaded([*itertools.accumulate(lengths, initial=0)], device)
    return ends[:-1, None], ends[-1:]


@functools.lru_cache(_REMEMBERED)
def _even_offsets(batch: int, each: tuple[int, ...], device: torch.device) -> Tensor:
    """Return where bags begin whose features have so many ids in each."""
    sizes = torch.tensor(each).repeat_interleave(batch)
    return pad(sizes.cumsum(0), (1, 0)).to(device)
