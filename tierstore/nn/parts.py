"""Gradients of several features as one tensor, without a copy where they are parts of one.

Those that are tensors of their own are summed where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tierstore._rowcopy import Groups
from tierstore._table.recycled import Recycled

_MUCH = {"cpu": 1 << 20, "cuda": 32 << 20}
"""Bytes of gradients, about, above which finding out where they are is cheaper than a copy."""


class Apart:
    """Gradients of features, float32 on the host, of which each is a tensor of its own."""

    def __init__(self, parts: Sequence[Tensor], memory: Recycled) -> None:
        """Take the gradients, and memory for a copy of them."""
        self._parts = parts
        self._memory = memory

    def in_order(self) -> Tensor:
        """Return the gradient of each id, `(n, dim)`, copied."""
        return _copied(self._parts, self._memory)

    def summed(self, groups: Groups) -> Tensor:
        """Return the sum of the gradients of each distinct row, those of ids in their order."""
        given = [each if each.stride(1) == 1 else each.contiguous() for each in self._parts]
        return torch.from_numpy(groups.sums([each.numpy(force=True) for each in given]))


@dataclass
class SideBySide:
    """Where in one tensor the gradients of features are that a model put side by side.

    That of the k-th id of a feature is row `k * step + place`.

    Attributes:
        places: of each feature.
        ids: how many each feature has.
        step: rows of the tensor from one id to the next.
    """

    places: list[int]
    ids: int
    step: int

    def rows(self, device: torch.device) -> Tensor:
        """Return the row of each id, one feature after another, int64 `(n,)`."""
        starts = torch.tensor(self.places, device=device)
        each = torch.arange(0, self.ids * self.step, self.step, device=device)
        return (starts[:, None] + each).view(-1)

    def in_order(self, gradient: Tensor) -> Tensor:
        """Return the gradient of each id, `(n, dim)`, copied."""
        return gradient.index_select(0, self.rows(gradient.device))

    def spread(self, positions: Tensor, rows: int) -> Tensor:
        """Return for each of so many rows the entry of its id in `positions` `(n,)`, else -1."""
        found = positions.new_full((self.ids, self.step), -1)
        first, features = self.places[0], len(self.places)
        if self.places == list(range(first, first + features)):
            found[:, first : first + features] = positions.view(features, self.ids).t()
        else:
            found[:, self.places] = positions.view(features, self.ids).t()
        return found.view(-1)[:rows]


def as_one(
    parts: Sequence[Tensor], memory: Recycled | None = None, *, apart: bool = False
) -> tuple[Tensor | Apart, SideBySide | None]:
    """Return gradients `(ids, dim)` as one tensor, and where they are in it; None: in order.

    Gradients of what a model concatenates are parts of one tensor, and are not copied. Other large
    ones on the host are copied to `memory` if that is given, or stay `apart` if they may.
    """
    first = parts[0]
    if len(parts) == 1:
        return first, None
    if first.nbytes * len(parts) < _MUCH.get(first.device.type, 0):
        return torch.cat(list(parts)), None
    whole = _one_behind_the_other(parts)
    if whole is not None:
        return whole, None
    joined = _side_by_side(parts)
    if joined is not None:
        return joined
    memory = memory or Recycled()
    if apart and _are_plain(parts):
        return Apart(parts, memory), None
    return _copied(parts, memory), None


def _are_plain(parts: Sequence[Tensor]) -> bool:
    """Whether gradients are floats of 32 bits on the host."""
    return parts[0].device.type == "cpu" and {each.dtype for each in parts} == {torch.float32}


def _one_behind_the_other(parts: Sequence[Tensor]) -> Tensor | None:
    """Return parts that follow one another in memory as one tensor."""
    first = parts[0]
    at = first.data_ptr()
    for each in parts:
        if not each.nbytes:
            continue
        if each.data_ptr() != at or each.dtype != first.dtype or not each.is_contiguous():
            return None
        at += each.nbytes
    rows = sum([each.shape[0] for each in parts])
    if first.untyped_storage().data_ptr() + first.untyped_storage().nbytes() < at:
        return None  # neighbours by chance
    return first.as_strided((rows, first.shape[1]), (first.shape[1], 1))


def _side_by_side(parts: Sequence[Tensor]) -> tuple[Tensor, SideBySide] | None:
    """Return parts that are columns of one tensor as the rows that it is made of."""
    first = parts[0]
    (ids, dim), strides = first.shape, first.stride()
    if not ids or strides[0] % dim or strides[1] != 1:
        return None
    storage, start = first.untyped_storage().data_ptr(), first.data_ptr()
    width, begins = dim * first.element_size(), []
    for each in parts:
        begin = each.data_ptr() - start
        if (
            each.shape != first.shape
            or each.stride() != strides
            or each.dtype != first.dtype
            or begin % width
            or each.untyped_storage().data_ptr() != storage
        ):
            return None
        begins.append(begin // width)
    lowest, step = min(begins), strides[0] // dim
    if max(begins) - lowest >= step or len(set(begins)) < len(begins):
        return None
    places = [begin - lowest for begin in begins]
    rows = (ids - 1) * step + max(places) + 1
    whole = parts[begins.index(lowest)].as_strided((rows, dim), (dim, 1))
    return whole, SideBySide(places, ids, step)


def _copied(parts: Sequence[Tensor], memory: Recycled) -> Tensor:
    """Return a copy of parts, one after another.

    On the host it is in memory of NumPy, which requests huge pages: the first touch of as many
    small pages takes longer than the copy.
    """
    if not _are_plain(parts):
        return torch.cat(list(parts))
    rows = sum([each.shape[0] for each in parts])
    whole = torch.from_numpy(memory.take(rows, parts[0].shape[1] * 4).view(np.float32))
    return torch.cat(list(parts), out=whole)
