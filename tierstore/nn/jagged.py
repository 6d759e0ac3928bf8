"""Ids in bags, in the forms that users give them, as ids and offsets."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tierstore.distributed.owners import uploaded
from tierstore.errors import InvalidInputError, InvalidTypeError


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
        if not isinstance(ids, Tensor):
            raise InvalidTypeError(f"a layer takes ids as a tensor, not {type(ids).__name__}")
        if ids.is_nested:
            bags = jagged(ids)
            factors = None if weights is None else jagged(weights).values()
            return cls(bags.values(), bags.offsets(), factors)
        if weights is not None:
            if weights.shape != ids.shape:
                raise InvalidInputError(
                    f"per_sample_weights are of the shape of the ids, {tuple(ids.shape)}, not "
                    f"{tuple(weights.shape)}"
                )
            weights = weights.reshape(-1)
        if ids.ndim == 2 and offsets is None:
            bags, each = ids.shape
            return cls(ids.reshape(-1), torch.arange(bags + 1, device=ids.device) * each, weights)
        if ids.ndim != 1 or offsets is None or offsets.ndim != 1:
            with_offsets = "no" if offsets is None else f"{offsets.ndim}-D"
            raise InvalidInputError(
                "bags are 2-D ids, or 1-D ids with 1-D offsets; these are "
                f"{ids.ndim}-D ids with {with_offsets} offsets"
            )
        starts = offsets if ends else pad(offsets, (0, 1), value=ids.shape[0])
        return cls(ids, starts, weights)

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


def joined_weights(ids: Sequence[Tensor], weights: Sequence[Tensor | None]) -> Tensor | None:
    """Return the weights of the ids of features, 1 where one has none; None if none has any."""
    given = [each for each in weights if each is not None]
    if not given:
        return None
    pairs = zip(ids, weights, strict=True)
    return torch.cat([given[0].new_ones(of.shape[0]) if w is None else w for of, w in pairs])


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
