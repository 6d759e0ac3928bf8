"""Between the bytes of a field and the arrays users read and write."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import _bfloat16
from tierstore._table.address import Ids, is_cupy, is_torch
from tierstore.errors import InvalidInputError, InvalidTypeError
from tierstore.spec import Field

__all__ = ["check_out", "from_bytes", "read_dtype", "to_bytes", "writable_bytes"]


def read_dtype(item: Field) -> np.dtype[Any]:
    """Return the type in which NumPy reads a field."""
    return np.dtype(np.float32) if item.dtype == "bfloat16" else item.storage


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
    if item.dtype == "bfloat16" or not out.size:
        return None
    return out.reshape(-1, item.dim).view(np.uint8)


def from_bytes(data: npt.NDArray[np.uint8], item: Field, shape: tuple[int, ...], kind: str) -> Any:
    """Return field bytes `(n, nbytes)` as an array `shape + (dim,)` of the asked kind.

    Nothing is copied but for NumPy and bfloat16, which becomes float32, and for CuPy.
    """
    stored = data.view(item.storage).reshape(*shape, item.dim)
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
