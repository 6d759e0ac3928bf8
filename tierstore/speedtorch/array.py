"""Arrays with rows in the tiers, the base of data gadgets and COM classes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tierstore._dtypes import ELEMENT_TYPES
from tierstore._store.store import Store
from tierstore._table.table import Table
from tierstore.errors import (
    FormatError,
    InvalidInputError,
    InvalidTypeError,
    RowIndexError,
    counted,
)
from tierstore.initializers import BLOCK_ROWS, Initializer
from tierstore.spec import Field
from tierstore.speedtorch.base import Streamed, TableRows, Where, save_npy, to_tensor


@dataclass(frozen=True)
class ArrayLayout:
    """The shape and type of an array, and how a table stores its rows.

    Floats are stored unchanged. Other types are stored as float16 with the same bits, padded to
    whole elements; tiers move these without interpreting them.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __post_init__(self) -> None:
        """Reject arrays without rows, and types that torch lacks."""
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
        element = ELEMENT_TYPES.get(self.dtype.name)
        return element is not None and element.trainable and not element.as_bits

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
class InitialArray(Initializer):
    """An initializer: rows of any array-like object, read while the table is created."""

    source: Any
    layout: ArrayLayout

    def block(self, block: int, count: int, shape: tuple[int, int], field: int) -> npt.NDArray[Any]:
        """Return rows `block * BLOCK_ROWS …` as floats `(count, dim)`."""
        start = block * BLOCK_ROWS
        rows = self.source[start : start + count]
        if isinstance(rows, Tensor):
            rows = rows.detach().cpu().numpy()
        elif hasattr(rows, "get"):  # CuPy
            rows = rows.get()
        return self.layout.to_floats(np.asarray(rows))


@dataclass(frozen=True)
class Indexed:
    """The part of an array that an index selects.

    Attributes:
        ids: the rows it takes, flat int64, distinct where `rest` is not None.
        shape: what the array that comes back has in place of the first axis, for whole rows.
        rest: what to index the rows of `ids` with; None for all of them, whole.
    """

    ids: Tensor
    shape: tuple[int, ...]
    rest: tuple[Any, ...] | None = None

    def of(self, rows: Tensor) -> Tensor:
        """Return the selected part of the rows of `ids`, `(len(ids), …)`."""
        if self.rest is None:
            return rows.reshape(*self.shape, *rows.shape[1:])
        return rows[self._beside(rows)]

    def put(self, values: Tensor, rows: Tensor) -> None:
        """Write values to the selected part of the rows of `ids`."""
        rows[self._beside(rows)] = values.to(rows.device)

    def _beside(self, rows: Tensor) -> tuple[Any, ...]:
        """Return `rest` with its tensors where the rows are."""
        rest = self.rest or ()
        return tuple(each.to(rows.device) if isinstance(each, Tensor) else each for each in rest)


def select(index: Any, shape: tuple[int, ...]) -> Indexed:
    """Return what `array[index]` selects in an array of this shape.

    Negative ids count from the end. Raises RowIndexError for ids outside the first axis; torch
    checks the indexes of other axes.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is None for part in parts):
        raise InvalidInputError("new axes are not supported; add them to the result: rows[:, None]")
    first, *others = [_as_index(part) for part in _spread(parts, len(shape))] or [slice(None)]
    whole = all(isinstance(part, slice) and part == slice(None) for part in others)
    if isinstance(first, slice):
        rows = range(shape[0])[first]
        ids = torch.arange(len(rows)) * rows.step + rows.start
        return Indexed(ids, (len(rows),), None if whole else (slice(None), *others))
    if isinstance(first, int):
        ids = _from_end(torch.tensor([first]), shape[0])
        return Indexed(ids, (), None if whole else (0, *others))
    if first.dtype == torch.bool:
        return _masked(first, shape, others, whole=whole)
    ids = _from_end(first.reshape(-1), shape[0])
    if whole:
        return Indexed(ids, tuple(first.shape))
    ids, places = torch.unique(ids, return_inverse=True)
    return Indexed(ids, (), (places.reshape(first.shape), *others))


def _masked(mask: Tensor, shape: tuple[int, ...], others: list[Any], *, whole: bool) -> Indexed:
    """Return what a mask over the first axes selects."""
    if tuple(mask.shape) != shape[: mask.ndim]:
        raise InvalidInputError(f"a mask of {tuple(mask.shape)} does not match an array of {shape}")
    ids = mask.reshape(len(mask), -1).any(1).nonzero()[:, 0]
    if mask.ndim > 1:
        return Indexed(ids, (), (mask[ids], *others))
    places = torch.arange(len(ids), device=ids.device)
    return Indexed(ids, (len(ids),), None if whole else (places, *others))


def _spread(parts: list[Any], axes: int) -> list[Any]:
    """Expand an ellipsis to slices."""
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
            f"ids {int(ids.min())} to {int(ids.max())} exceed the array's {counted(rows, 'row')}"
        )
    return torch.where(ids < 0, ids + rows, ids)


class Arrival:
    """An asynchronous copy of a tensor to host memory.

    The copy is queued in the current stream, into pinned memory that torch reuses; the program
    continues meanwhile.
    """

    def __init__(self, tensor: Tensor) -> None:
        """Start the copy; a tensor in host memory is already complete."""
        tensor = tensor.detach()
        self._event: torch.cuda.Event | None = None
        if not tensor.is_cuda:
            self._copy = tensor
            return
        self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._copy.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def done(self) -> bool:
        """Return, without waiting, whether the copy is complete."""
        return self._event is None or bool(self._event.query())

    def result(self) -> npt.NDArray[Any]:
        """Wait for the copy, and return it as a NumPy array."""
        if self._event is not None:
            self._event.synchronize()
        array: npt.NDArray[Any] = self._copy.numpy()
        return array


DATA = "data"


class ArrayRows(TableRows):
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

    def _hold(self, layout: ArrayLayout, initializer: Initializer | None) -> None:
        """Create the table of an array, with an initializer for its rows as floats."""
        self._known = layout
        self.total_classes: int = layout.shape[0]
        item = layout.field
        self._make({DATA: Field(item.dim, item.dtype, initializer)})
        self.table.scalars[_SHAPE] = [*layout.shape]
        self.table.scalars[_DTYPE] = layout.dtype.str
        if isinstance(self._owner, Store):
            self._owner.commit()  # so that reopen() always finds shape and type

    def _accept(self, table: Table) -> None:
        if not {_SHAPE, _DTYPE} <= set(table.scalars):
            raise InvalidInputError(f"{table} does not hold an array")
        shape, dtype = table.scalars[_SHAPE], table.scalars[_DTYPE]
        self._known = ArrayLayout(tuple(shape), np.dtype(dtype))
        self.total_classes = int(shape[0])

    def getData(self, indexes: Any) -> Tensor:
        """Return `array[indexes]` as a new tensor, on the GPU if there is one.

        Indexes are those of NumPy: ids, slices, masks, and tuples of them.
        """
        chosen = select(indexes, self.shape)
        return chosen.of(self._rows(chosen))

    def _rows(self, chosen: Indexed) -> Tensor:
        return self._layout.from_float_tensor(self.table.read(chosen.ids))

    def insertData(self, dataObject: Any, indexes: Any) -> None:
        """Assign `array[indexes] = dataObject`, a tensor on any device, an array or a number.

        If an id repeats, its last row is stored. Raises InvalidInputError for values of the wrong
        shape.
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
        """Start copying `array[indexes]` to the host without waiting; see `Arrival`."""
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
        """Replace the array by that of a `.npy` file, of any shape and type."""
        self._hold_source(loadFileName)

    def saveTorch(self, saveFileName: str) -> None:
        """Write the array as a tensor, with torch.save."""
        torch.save(torch.tensor(self.getNumpyVersion()), saveFileName)

    def loadTorch(self, loadFileName: str) -> None:
        """Replace the array by the tensor of a file that `saveTorch` or torch.save wrote."""
        self._hold_source(torch.load(loadFileName, map_location="cpu", weights_only=True))

    def _hold_source(self, source: Any) -> None:
        """Create the table from a mapped `.npy` file, or from any array-like object."""
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
        self._hold(layout, InitialArray(source, layout))


_SHAPE = "shape"
_DTYPE = "dtype"


def _expanded(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return values repeated to a shape, as assigning them in NumPy would."""
    while values.ndim > len(shape) and values.shape[0] == 1:
        values = values[0]
    sizes = zip(reversed(values.shape), reversed(shape), strict=False)
    if values.ndim > len(shape) or any(each not in (1, size) for each, size in sizes):
        raise InvalidInputError(
            f"values of shape {tuple(values.shape)} do not match an index that selects {shape}"
        )
    return values.expand(shape)


_BLOCK_BYTES = 64 << 20


class CountRows(ArrayRows):
    """Counts of pairs, `(total_classes, total_classes)`, all zero at first.

    On disk and in ordinary memory, only rows with counts take space.
    """

    _first_calls = "comInit()"

    def __init__(self, total_classes: int, datatype: Any, where: Where) -> None:
        super().__init__(where.near(None))
        self.total_classes = total_classes
        self.datatype = datatype
        name = str(datatype).removeprefix("torch.")
        dtype = np.dtype(name if "torch" in str(datatype) else datatype)
        self._known = ArrayLayout((total_classes, total_classes), dtype)

    def _accept(self, table: Table) -> None:
        own = self._layout
        super()._accept(table)
        if self._known != own:
            self._known = own
            raise InvalidInputError(f"{table} does not hold counts {own.shape} of {own.dtype}")

    def comInit(self, CPUPinn: bool = False) -> None:
        """Set all counts to zero. `CPUPinn` is ignored, as in SpeedTorch."""
        self._hold(self._layout, None)

    def addCounts(self, rows: Any, columns: Any, counts: Any = 1) -> None:
        """Add to the counts of pairs; repeated pairs count repeatedly.

        Args:
            rows: one class of each pair.
            columns: the other, as many.
            counts: what to add to each, or one number for all.
        """
        rows, columns = np.ravel(rows), np.ravel(columns)
        counts = np.broadcast_to(np.ravel(np.asarray(counts, self.dtype)), rows.shape)
        if rows.shape != columns.shape:
            raise InvalidInputError(f"{rows.size} rows do not match {columns.size} columns")
        for classes in (rows, columns):
            if classes.size and not 0 <= classes.min() <= classes.max() < self.total_classes:
                raise RowIndexError(f"classes must be within 0..{self.total_classes - 1}")
        ids, places = np.unique(rows, return_inverse=True)
        step = max(1, _BLOCK_BYTES // (self.total_classes * self.dtype.itemsize))
        for start in range(0, ids.size, step):
            part = ids[start : start + step]
            here = (places >= start) & (places < start + step)
            block = self.to_numpy(part)
            np.add.at(block, (places[here] - start, columns[here]), counts[here])
            self.insertData(block, part)
