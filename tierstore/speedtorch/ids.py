"""Row ids as SpeedTorch's methods take them: positive and negative samples, of any shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tierstore.table.ids import is_cupy

__all__ = ["flat_ids", "to_tensor"]


def flat_ids(*parts: Any) -> Tensor | npt.NDArray[np.int64]:
    """Return ids as one flat tensor, part after part; a part that is None is left out.

    NumPy and CuPy arrays, tensors and lists are taken. If any part is on a GPU, all go there. A
    flat array of int64 alone comes back as it is, as most are: every microsecond counts before a
    batch is on its way. What is no row id is left for the table to refuse.
    """
    given = [part for part in parts if part is not None]
    if len(given) == 1 and _is_plain(given[0]) and given[0].ndim == 1:
        only: npt.NDArray[np.int64] = given[0]
        return only
    tensors = [to_tensor(part).reshape(-1) for part in given]
    if len(tensors) == 1:
        return tensors[0]
    device = next((each.device for each in tensors if each.is_cuda), None)
    return torch.cat([each if device is None else each.to(device) for each in tensors])


def to_tensor(values: Any) -> Tensor:
    """Return values as a tensor, without a copy where that can be; whole numbers as int64."""
    if _is_plain(values):
        return torch.from_numpy(values)
    if not isinstance(values, Tensor):
        if is_cupy(values):
            values = torch.as_tensor(values)
        else:
            array = np.asarray(values)
            if not array.size:
                return torch.empty(array.shape, dtype=torch.int64)
            plain = array.flags.writeable and array.dtype.isnative and _goes_up(array)
            native = array.dtype.newbyteorder("=")
            values = torch.from_numpy(array if plain else np.array(array, native))
    whole = not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)
    return values.to(torch.int64) if whole else values


def _is_plain(values: Any) -> bool:
    """Tell whether values are an array that torch takes as it is, of int64."""
    return type(values) is np.ndarray and values.dtype == np.int64 and values.flags.carray


def _goes_up(array: npt.NDArray[Any]) -> bool:
    return all(stride >= 0 for stride in array.strides)
