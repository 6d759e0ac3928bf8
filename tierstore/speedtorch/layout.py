"""Arrays of any type and shape, as rows of floats that a table can hold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tierstore.errors import InvalidInputError, InvalidTypeError
from tierstore.laws import BLOCK_ROWS
from tierstore.spec import Field

__all__ = ["ArrayLayout", "FirstRows"]

_FLOATS = ("float16", "float32", "float64")


@dataclass(frozen=True)
class ArrayLayout:
    """An array's shape and type, and how its rows lie in a table.

    Floats lie there as they are. Other types lie as float16 of the same bits, which tiers move and
    never look at, padded to whole elements.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __post_init__(self) -> None:
        """Refuse what has no rows, or no type of torch."""
        if not self.shape or not all(self.shape):
            raise InvalidInputError(f"an array of shape {self.shape} has no rows to hold")
        try:
            torch.from_numpy(np.empty(0, self.dtype))
        except TypeError:
            raise InvalidTypeError(f"torch has no type for arrays of {self.dtype}") from None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of torch."""
        return torch.from_numpy(np.empty(0, self.dtype)).dtype

    @property
    def _plain(self) -> bool:
        return self.dtype.name in _FLOATS

    @property
    def _row_elements(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def _row_bytes(self) -> int:
        return self._row_elements * self.dtype.itemsize

    @property
    def field(self) -> Field:
        """The field of a table that holds a row."""
        if self._plain:
            return Field(self._row_elements, self.dtype.name)
        return Field(-(-self._row_bytes // 2), "float16")

    def to_floats(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return rows `(n, *shape[1:])` of the array as those of the field `(n, dim)`."""
        rows = np.ascontiguousarray(rows, self.dtype)
        flat = rows.reshape(len(rows), self._row_elements)
        if self._plain:
            return flat
        out = np.zeros((len(rows), self.field.dim * 2), np.uint8)
        out[:, : self._row_bytes] = flat.view(np.uint8)
        return out.view(np.float16)

    def from_floats(self, floats: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return rows of the field as those of the array."""
        if not self._plain:
            data = floats.view(np.uint8)[:, : self._row_bytes]
            floats = np.ascontiguousarray(data).view(self.dtype)
        return floats.reshape(len(floats), *self.shape[1:])

    def to_float_tensor(self, rows: Tensor) -> Tensor:
        """Do `to_floats` with tensors, wherever they are."""
        flat = rows.to(self.torch_dtype).contiguous().reshape(len(rows), self._row_elements)
        if self._plain:
            return flat
        data = flat.view(torch.uint8)
        padding = self.field.dim * 2 - self._row_bytes
        return torch.nn.functional.pad(data, (0, padding)).view(torch.float16)

    def from_float_tensor(self, floats: Tensor) -> Tensor:
        """Do `from_floats` with tensors, wherever they are."""
        if not self._plain:
            data = floats.contiguous().view(torch.uint8)[:, : self._row_bytes]
            floats = data.contiguous().view(self.torch_dtype)
        return floats.reshape(len(floats), *self.shape[1:])


@dataclass(frozen=True, eq=False)
class FirstRows:
    """A law: the rows of anything that is sliced like an array; read while a table is made."""

    source: Any
    layout: ArrayLayout
    is_zero = False

    def block(self, block: int, count: int, shape: tuple[int, int], field: int) -> npt.NDArray[Any]:
        """Return rows `block * BLOCK_ROWS …` as floats `(count, dim)`."""
        start = block * BLOCK_ROWS
        rows = self.source[start : start + count]
        if isinstance(rows, Tensor):
            rows = rows.detach().cpu().numpy()
        elif hasattr(rows, "get"):  # CuPy
            rows = rows.get()
        return self.layout.to_floats(np.asarray(rows))
