"""What NumPy takes between brackets, as row ids and what is left for the rows themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tierstore.errors import InvalidInputError, RowIndexError
from tierstore.speedtorch.ids import to_tensor

__all__ = ["Selection", "select"]


@dataclass(frozen=True)
class Selection:
    """The part of an array that an index means.

    Attributes:
        ids: the rows it takes, flat int64, distinct where `rest` is not None.
        shape: what the array that comes back has in place of the first axis, for whole rows.
        rest: what to index the rows of `ids` with; None for all of them, whole.
    """

    ids: Tensor
    shape: tuple[int, ...]
    rest: tuple[Any, ...] | None = None

    def of(self, rows: Tensor) -> Tensor:
        """Return what is meant of the rows of `ids`, `(len(ids), …)`."""
        if self.rest is None:
            return rows.reshape(*self.shape, *rows.shape[1:])
        return rows[self._beside(rows)]

    def put(self, values: Tensor, rows: Tensor) -> None:
        """Write values over what is meant of the rows of `ids`."""
        rows[self._beside(rows)] = values.to(rows.device)

    def _beside(self, rows: Tensor) -> tuple[Any, ...]:
        """Return `rest` with its tensors where the rows are."""
        rest = self.rest or ()
        return tuple(each.to(rows.device) if isinstance(each, Tensor) else each for each in rest)


def select(index: Any, shape: tuple[int, ...]) -> Selection:
    """Return what `array[index]` means for an array of this shape.

    Ids may count from the end. Raises RowIndexError for those outside the first axis; what indexes
    other axes is torch's to check.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is None for part in parts):
        raise InvalidInputError("new axes are for the array that comes back: rows[:, None]")
    first, *others = [_as_index(part) for part in _spread(parts, len(shape))] or [slice(None)]
    whole = all(isinstance(part, slice) and part == slice(None) for part in others)
    if isinstance(first, slice):
        rows = range(shape[0])[first]
        ids = torch.arange(len(rows)) * rows.step + rows.start
        return Selection(ids, (len(rows),), None if whole else (slice(None), *others))
    if isinstance(first, int):
        ids = _from_end(torch.tensor([first]), shape[0])
        return Selection(ids, (), None if whole else (0, *others))
    if first.dtype == torch.bool:
        return _masked(first, shape, others, whole=whole)
    ids = _from_end(first.reshape(-1), shape[0])
    if whole:
        return Selection(ids, tuple(first.shape))
    ids, places = torch.unique(ids, return_inverse=True)
    return Selection(ids, (), (places.reshape(first.shape), *others))


def _masked(mask: Tensor, shape: tuple[int, ...], others: list[Any], *, whole: bool) -> Selection:
    """Return what a mask over the first axes means."""
    if tuple(mask.shape) != shape[: mask.ndim]:
        raise InvalidInputError(f"a mask of {tuple(mask.shape)} is not for an array of {shape}")
    ids = mask.reshape(len(mask), -1).any(1).nonzero()[:, 0]
    if mask.ndim > 1:
        return Selection(ids, (), (mask[ids], *others))
    places = torch.arange(len(ids), device=ids.device)
    return Selection(ids, (len(ids),), None if whole else (places, *others))


def _spread(parts: list[Any], axes: int) -> list[Any]:
    """Write an ellipsis out as slices."""
    for at, part in enumerate(parts):
        if part is Ellipsis:
            taken = sum(_axes_of(each) for each in parts if each is not Ellipsis)
            return [*parts[:at], *[slice(None)] * (axes - taken), *parts[at + 1 :]]
    return parts


def _axes_of(part: Any) -> int:
    index = _as_index(part)
    return index.ndim if isinstance(index, Tensor) and index.dtype == torch.bool else 1


def _as_index(part: Any) -> Any:
    """Return a slice or an int as it is, and any array as a tensor."""
    if isinstance(part, slice) or part is Ellipsis:
        return part
    if isinstance(part, int | np.integer) and not isinstance(part, bool):
        return int(part)
    return to_tensor(part)


def _from_end(ids: Tensor, rows: int) -> Tensor:
    """Count negative ids from the end, and check those that are on the host."""
    if ids.is_floating_point() or not ids.numel():
        return ids
    if not ids.is_cuda and not -rows <= int(ids.min()) <= int(ids.max()) < rows:
        raise RowIndexError(
            f"ids {int(ids.min())} to {int(ids.max())} are not all within the array's {rows} rows"
        )
    return torch.where(ids < 0, ids + rows, ids)
