"""Between the bytes of a field and the arrays users read and write."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._dtypes import ELEMENT_TYPES, ElementType
from tierstore._table.address import Ids, is_cupy, is_torch
from tierstore.errors import InvalidInputError, InvalidTypeError
from tierstore.spec import Field

__all__ = ["check_out", "from_bytes", "read_dtype", "to_bytes", "writable_bytes"]


def read_dtype(item: Field) -> np.dtype[Any]:
    """Return the type in which NumPy reads a field."""
    return item.element.numpy


def check_out(out: Any, item: Field, ids: Ids, device: str, name: str) -> None:
    """Check that a read of a field can be written to `out`; raises as `to_bytes` does."""
    if ids.kind == "torch":
        if not is_torch(out):
            raise InvalidTypeError(f"{name} is read as a tensor; out is a {type(out).__name__}")
        dtype, wanted = str(out.dtype).removeprefix("torch."), item.dtype
        fits = out.is_contiguous() and not out.requires_grad and str(out.device) == device
    elif ids.kind == "numpy":
        if not isinstance(out, np.ndarray):
            raise InvalidTypeError(f"{name} is read as an array; out is a {type(out).__name__}")
        dtype, wanted = out.dtype.str, read_dtype(item).str
        fits = out.flags.c_contiguous and out.flags.writeable
    else:
        raise InvalidInputError("out= takes NumPy or torch rows; CuPy ids give a fresh array")
    expected = (*ids.shape, item.dim)
    if dtype != wanted or tuple(out.shape) != expected:
        raise InvalidInputError(
            f"{name} for these ids is {wanted} {expected}, out is {dtype} {tuple(out.shape)}"
        )
    if not fits:
        raise InvalidInputError(
            f"out for {name} must be contiguous, writable, without requires_grad and on {device}"
        )


def writable_bytes(out: Any, item: Field) -> Any:
    """Return a checked `out` as bytes `(n, nbytes)` of its own memory, None if they differ."""
    if not isinstance(out, np.ndarray):
        import torch

        return out.view(-1, item.dim).view(torch.uint8) if out.numel() else None
    if read_dtype(item) != item.storage or not out.size:
        return None
    return out.reshape(-1, item.dim).view(np.uint8)


def from_bytes(data: npt.NDArray[np.uint8], item: Field, ids: Ids) -> Any:
    """Return field bytes `(n, nbytes)` as the array `ids.shape + (dim,)` that answers these ids.

    Copies bytes that are not contiguous, bfloat16 for NumPy, which becomes float32, and for CuPy.
    """
    stored = np.ascontiguousarray(data).view(item.storage).reshape(*ids.shape, item.dim)
    kind, element = ids.kind, item.element
    if kind == "torch":
        if element.as_bits:
            return element.to_torch(stored)
        import torch

        return torch.from_numpy(stored)
    if kind == "cupy":
        import cupy

        return element.to_cupy(cupy.asarray(stored))
    return element.decode(stored) if element.as_bits else stored


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
    element = item.element
    if is_torch(values):
        values = values.detach().cpu().resolve_conj().resolve_neg()
        given = ELEMENT_TYPES.get(str(values.dtype).removeprefix("torch."))
        array = given.from_torch(values) if given and given.as_bits else values.numpy()
    elif is_cupy(values):
        array = values.get()
        given = ELEMENT_TYPES.get(array.dtype.name)
        array = array if given is None else given.from_cupy(array)
    else:
        array, given = _array(values, element, name), None
    if given is element:
        return array
    if given is not None:
        array = given.decode(array)
    if not element.accepts_array(array.dtype):
        raise InvalidTypeError(
            f"{name} holds {item.dtype}, these values are {array.dtype}; "
            f"convert them first: values.astype({element.numpy.name!r})"
        )
    return element.encode(array)


def _array(values: Any, element: ElementType, name: str) -> npt.NDArray[Any]:
    """Return anything NumPy takes as an array; Python numbers in the type that the field reads."""
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise InvalidInputError(f"{name}: not one array of numbers: {error}") from None
    if isinstance(values, np.ndarray | np.generic):
        return array
    return element.from_numbers(array)
