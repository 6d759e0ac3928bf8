"""Between the bytes of a field and the arrays users read and write."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import _bfloat16
from tierstore._table.address import Ids, is_cupy, is_torch
from tierstore.errors import InvalidInputError, InvalidTypeError
from tierstore.spec import Field

__all__ = ["from_bytes", "to_bytes"]


def from_bytes(data: npt.NDArray[np.uint8], item: Field, ids: Ids) -> Any:
    """Return field bytes `(n, nbytes)` as the array `ids.shape + (dim,)` that answers these ids.

    Copies bytes that are not contiguous, bfloat16 for NumPy, which becomes float32, and for CuPy.
    """
    stored = np.ascontiguousarray(data).view(item.storage).reshape(*ids.shape, item.dim)
    kind = ids.kind
    if kind == "torch":
        import torch

        tensor = torch.from_numpy(stored)
        return tensor.view(torch.bfloat16) if item.dtype == "bfloat16" else tensor
    if kind == "cupy":
        import cupy

        array = cupy.asarray(stored)
        return array.view(cupy.dtype("bfloat16")) if item.dtype == "bfloat16" else array
    return _bfloat16.to_float32(stored) if item.dtype == "bfloat16" else stored


def to_bytes(values: Any, item: Field, shape: tuple[int, ...], name: str) -> npt.NDArray[np.uint8]:
    """Return values for rows of `shape` as field bytes `(n, nbytes)`, contiguous.

    Takes the field's own type and narrower floats; NumPy writes float32 to a bfloat16 field, which
    rounds to nearest even. Lists of numbers are taken too. Raises InvalidTypeError for a type that
    would lose digits, InvalidInputError for another shape: nothing is cast or broadcast silently.
    """
    stored = _stored(values, item, name)
    expected = (*shape, item.dim)
    if stored.shape != expected:
        raise InvalidInputError(f"{name} for these ids is {expected}, not {stored.shape}")
    return np.ascontiguousarray(stored).reshape(-1, item.dim).view(np.uint8)


def _stored(values: Any, item: Field, name: str) -> npt.NDArray[Any]:
    if is_torch(values):
        import torch

        values = values.detach().cpu().resolve_conj().resolve_neg()
        if values.dtype == torch.bfloat16:
            values = values.contiguous()
            if item.dtype == "bfloat16":
                bits: npt.NDArray[Any] = values.view(torch.uint16).numpy()
                return bits
            values = values.float()
        array: npt.NDArray[Any] = values.numpy()
    elif is_cupy(values):
        array = values.get()
        if array.dtype.name == "bfloat16":
            array = array.view(np.uint16)
            if item.dtype == "bfloat16":
                return array
            array = _bfloat16.to_float32(array)
    else:
        try:
            array = np.asarray(values)
        except ValueError as error:
            raise InvalidInputError(f"{name}: not one array of numbers: {error}") from None
        if not isinstance(values, np.ndarray | np.generic) and array.dtype.kind in "if":
            array = array.astype(np.float32 if item.dtype == "bfloat16" else item.storage)
    target = np.dtype(np.float32) if item.dtype == "bfloat16" else item.storage
    if array.dtype.kind != "f" or not np.can_cast(array.dtype, target, "safe"):
        raise InvalidTypeError(
            f"{name} holds {item.dtype}, these values are {array.dtype}; "
            f"convert them first: values.astype({target.name!r})"
        )
    if item.dtype == "bfloat16":
        return _bfloat16.from_float32(array)
    stored: npt.NDArray[Any] = array.astype(target, copy=False)
    return stored
