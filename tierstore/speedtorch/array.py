"""An array whose rows are in the tiers: what all data gadgets are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tierstore.errors import FormatError, InvalidInputError
from tierstore.laws import Law
from tierstore.spec import Field
from tierstore.speedtorch.arrival import Arrival
from tierstore.speedtorch.files import Streamed, save_npy
from tierstore.speedtorch.held import Held
from tierstore.speedtorch.index import Selection, select
from tierstore.speedtorch.layout import ArrayLayout, FirstRows
from tierstore.store import Store
from tierstore.table import Table

__all__ = ["ArrayRows"]

DATA = "data"


class ArrayRows(Held):
    """An array of any type and number of axes, indexed as NumPy does; the first axis is its rows.

    Attributes:
        shape, dtype: of the array, as NumPy names them.
    """

    _known: ArrayLayout | None = None

    @property
    def _layout(self) -> ArrayLayout:
        if self._known is None:
            raise self._not_yet()
        return self._known

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self._layout.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the array's elements."""
        return self._layout.dtype

    def _hold(self, layout: ArrayLayout, law: Law | None) -> None:
        """Make the table of an array, by a law for its rows as floats."""
        self._known = layout
        self.total_classes = layout.shape[0]
        item = layout.field
        self._make({DATA: Field(item.dim, item.dtype, law)})
        self.table.scalars[_SHAPE] = [*layout.shape]
        self.table.scalars[_DTYPE] = layout.dtype.str
        if isinstance(self._owner, Store):
            self._owner.commit()  # so that reopen() finds shape and type, whatever happens

    def _accept(self, table: Table) -> None:
        if not {_SHAPE, _DTYPE} <= set(table.scalars):
            raise InvalidInputError(f"{table} does not hold an array")
        shape, dtype = table.scalars[_SHAPE], table.scalars[_DTYPE]
        self._known = ArrayLayout(tuple(shape), np.dtype(dtype))
        self.total_classes = self.shape[0]

    def getData(self, indexes: Any) -> Tensor:
        """Return `array[indexes]`, a fresh tensor on the GPU, or where there is none on the CPU.

        Indexes are whatever NumPy takes: ids, slices, masks, and tuples of them.
        """
        chosen = select(indexes, self.shape)
        return chosen.of(self._rows(chosen))

    def _rows(self, chosen: Selection) -> Tensor:
        return self._layout.from_float_tensor(self.table.read(chosen.ids))

    def insertData(self, dataObject: Any, indexes: Any) -> None:
        """Do `array[indexes] = dataObject`, a tensor from anywhere, an array or a number.

        Where an id repeats, its last row stays. Raises InvalidInputError for values of a shape that
        does not fit.
        """
        chosen = select(indexes, self.shape)
        values = torch.as_tensor(dataObject).detach().to(self._layout.torch_dtype)
        if chosen.rest is None:
            row = self.shape[1:]
            rows = _expanded(values, (*chosen.shape, *row)).reshape(len(chosen.ids), *row)
        else:
            rows = self._rows(chosen)
            chosen.put(_expanded(values, tuple(chosen.of(rows).shape)), rows)
        self.table.write(chosen.ids, self._layout.to_float_tensor(rows))

    # -- to the host

    def to_numpy(self, indexes: Any = slice(None)) -> npt.NDArray[Any]:
        """Return `array[indexes]` as a fresh NumPy array."""
        return self.to_numpy_async(indexes).result()

    def to_numpy_async(self, indexes: Any = slice(None)) -> Arrival:
        """Start copying `array[indexes]` to the host, and go on meanwhile; see `Arrival`."""
        return Arrival(self.getData(indexes))

    def getNumpyVersion(self) -> npt.NDArray[Any]:
        """Return a copy of the array in NumPy, read-only."""
        return self._array(self._whole())

    def _whole(self) -> Streamed:
        return Streamed(self.shape, self.dtype, self._decoded())

    def _decoded(self) -> Iterator[npt.NDArray[Any]]:
        for block in self._blocks(DATA):
            yield self._layout.from_floats(block)

    # -- files

    def saveCupy(self, saveFileName: str) -> None:
        """Write the array to a `.npy` file, block by block."""
        save_npy(saveFileName, self._whole())

    def loadCupy(self, loadFileName: str) -> None:
        """Let the array be that of a `.npy` file, whatever its shape and type."""
        self._hold_source(loadFileName)

    def saveTorch(self, saveFileName: str) -> None:
        """Write the array as a tensor, with torch.save."""
        torch.save(torch.tensor(self.getNumpyVersion()), saveFileName)

    def loadTorch(self, loadFileName: str) -> None:
        """Let the array be the tensor of a file that `saveTorch` or torch.save wrote."""
        self._hold_source(torch.load(loadFileName, map_location="cpu", weights_only=True))

    def _hold_source(self, source: Any) -> None:
        """Make the table of a `.npy` file's array, mapped, or of anything sliced like an array."""
        if isinstance(source, str | Path):
            try:
                source = np.load(source, mmap_mode="r", allow_pickle=False)
            except ValueError as error:
                raise FormatError(
                    f"{source} is not a .npy file of plain numbers: {error}"
                ) from None
        if not hasattr(source, "shape") or not hasattr(source, "dtype"):
            source = np.asarray(source)
        dtype = str(source.dtype).removeprefix("torch.")
        layout = ArrayLayout(tuple(source.shape), np.dtype(dtype).newbyteorder("="))
        self._hold(layout, FirstRows(source, layout))


_SHAPE = "shape"
_DTYPE = "dtype"


def _expanded(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return values repeated to a shape, as assigning them in NumPy would."""
    while values.ndim > len(shape) and values.shape[0] == 1:
        values = values[0]
    sizes = zip(reversed(values.shape), reversed(shape), strict=False)
    if values.ndim > len(shape) or any(each not in (1, size) for each, size in sizes):
        raise InvalidInputError(
            f"values of shape {tuple(values.shape)} do not fit an index that means {shape}"
        )
    return values.expand(shape)
