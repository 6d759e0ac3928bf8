"""The bags of a call that one layer pools, and the columns that they become."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tierstore._table.joint import Features, touched_by
from tierstore.nn.autograd import Batch
from tierstore.nn.features import Bags
from tierstore.nn.keyed import FirstRows
from tierstore.nn.layer import RowsLayer
from tierstore.nn.remote import RemoteBatch
from tierstore.spec import Field

_REMEMBERED = 64
"""Modes of features whose columns are kept."""


class Columns:
    """The columns that the bags of some features of one dim become, and how they are pooled.

    The bags of a feature follow one another, equally many of each.

    Attributes:
        modes: "sum", "mean" or "max" of each feature.
        first: the first column of each.
        dim: how many each has.
        width: of the output, columns of other features included.
        aligned: what every first column is a multiple of.
        form: the last one that a kernel pooled them in.
    """

    def __init__(
        self, modes: tuple[str, ...], first: tuple[int, ...], dim: int, width: int
    ) -> None:
        """Describe the columns."""
        self.modes = modes
        self.first = first
        self.dim = dim
        self.width = width
        self.aligned: int = math.gcd(width, *first)
        self.form: Any = None

    def batch(self, bags: Bags) -> int:
        """Return the number of bags of each feature."""
        return len(bags) // len(self.modes)

    @functools.cached_property
    def runs(self) -> list[tuple[int, int]]:
        """The first feature and the end of each run of one mode and neighbouring columns."""
        runs, first = [], 0
        for k in range(1, len(self.modes) + 1):
            if (
                k == len(self.modes)
                or self.modes[k] != self.modes[first]
                or self.first[k] != self.first[k - 1] + self.dim
            ):
                runs.append((first, k))
                first = k
        return runs

    def part(self, of: Tensor, run: tuple[int, int]) -> Tensor:
        """Return a run's columns of `(batch, width)`, `(features, batch, dim)`, as a view."""
        first, end = run
        start = self.first[first]
        columns = of[:, start : start + (end - first) * self.dim]
        return columns.unflatten(1, (end - first, self.dim)).transpose(0, 1)


@functools.lru_cache(_REMEMBERED)
def side_by_side(modes: tuple[str, ...], dim: int) -> Columns:
    """Return the columns of features that one layer pools alone."""
    first = tuple(dim * place for place in range(len(modes)))
    return Columns(modes, first, dim, dim * len(modes))


@dataclass(slots=True)
class Part:
    """The bags of a call that one layer pools.

    Attributes:
        layer: the layer.
        columns: where the bags go.
        bags: all of them, by feature.
        features: those that the bags have ids of; None for a layer over one table.
        lengths: how many ids each feature has.
        places: which of the call's features they are.
        first: the rows of keys that have none, in place of those of their ids and not trained.
        counted: bool, of all ids that were given those that the bags have; None means all.
        trains: whether the rows are trained; if not, a layer by key neither adds keys.
    """

    layer: RowsLayer
    columns: Columns
    bags: Bags
    features: Features | None
    lengths: Sequence[int]
    places: tuple[int, ...]
    first: FirstRows | None = None
    counted: Tensor | None = None
    trains: bool = True

    @property
    def reads(self) -> bool:
        """Whether rows of keys are only read."""
        return self.layer.by_key and not self.trains

    @property
    def rows(self) -> Tensor:
        """The row of the table, or of the space, of each id."""
        return self.layer.in_space(self.bags.ids, self.features, self.lengths)

    def lease(self) -> Batch | RemoteBatch:
        """Lease the rows of the ids, whose gradient may come."""
        return self.layer.lease_rows(self.bags.ids, self.features, self.lengths)

    @property
    def item(self) -> Field:
        """The field that is pooled."""
        item: Field = self.layer.table.spec.layout.field(self.layer.field)
        return item

    def touched(
        self, given: Sequence[bool] | None = None, batch: Batch | RemoteBatch | None = None
    ) -> frozenset[int]:
        """Return the numbers of the tables that have ids, of the features `given`; all if None.

        A `batch` also counts the ids of other ranks.
        """
        counts = self.lengths if batch is None else batch.counts(self.lengths)
        tables = (0,) if self.features is None else self.features.tables
        return touched_by(tables, counts if given is None else self._of_given(counts, given))

    def trained_positions(self, batch: Any, given: Sequence[bool] | None) -> Tensor | None:
        """Return the position of each id's row, -1 for the ids of other features than `given`.

        The ids of first rows get -1 too. None where all ids of the batch are trained.
        """
        is_whole = given is None or all(given[place] for place in self.places)
        if is_whole and self.first is None:
            return batch.trained_positions
        lengths = self._of_given(self.lengths, given)
        positions = batch.positions.reshape(-1).clone()
        for piece, length in zip(positions.split(list(self.lengths)), lengths, strict=True):
            if not length:
                piece.fill_(-1)
        if self.first is not None:
            positions[self.first.at.to(positions.device)] = -1
        return positions

    def _of_given(self, counts: Sequence[int], given: Sequence[bool] | None) -> Sequence[int]:
        """Return the count of each feature, 0 where it is not given."""
        if given is None:
            return counts
        pairs = zip(counts, self.places, strict=True)
        return [count if given[place] else 0 for count, place in pairs]

    def of_all(self, of_weights: Tensor) -> Tensor:
        """Return the gradient of the weights of all ids that were given, where those are."""
        weights, counted = self.bags.weights, self.counted
        of_weights = of_weights if weights is None else of_weights.to(weights.device)
        if counted is None:
            return of_weights
        every = of_weights.new_zeros(len(counted))
        every[counted.to(every.device)] = of_weights
        return every
