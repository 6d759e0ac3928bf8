"""Row ids as users pass them, checked only here, and the kind of array to return for them."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tierstore._dtypes import check_unmasked
from tierstore.errors import InvalidInputError, InvalidTypeError, RowIndexError
from tierstore.policy.frequency import count_keys, most_used


class Ids(NamedTuple):
    """A batch of ids, checked.

    Attributes:
        rows: flat int64.
        shape: of the ids as they were given.
        kind: of the array to return for them.
        keys: those on the host whose rows are still to be found; `rows` are their bits then.
        naming: what `rows` that were found for keys meant before; None if they are ids.
    """

    rows: npt.NDArray[np.int64]
    shape: tuple[int, ...]
    kind: str
    keys: Any = None
    naming: Any = None

    @property
    def moved(self) -> bool:
        """Whether the rows may now belong to other keys, as after a rollback."""
        return self.naming is not None and bool(self.naming.lost())

    def for_tensors(self) -> Ids:
        """Return the same ids, for torch tensors as results; raises InvalidInputError for CuPy."""
        if self.kind == "torch":
            return self
        if self.kind == "cupy":
            raise InvalidInputError("CuPy ids give CuPy rows; give NumPy or torch ids for tensors")
        return Ids(self.rows, self.shape, "torch")


def is_torch(value: object) -> bool:
    """Whether a value is a torch tensor; does not import torch."""
    # As imported_class does, without its call: steps ask often.
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def is_cupy(value: object) -> bool:
    """Whether a value is a CuPy array; does not import CuPy."""
    return isinstance(value, getattr(sys.modules.get("cupy"), "ndarray", ()))


def on_host(rows: Any) -> Any:
    """Return checked rows of any library as a NumPy array; waits for those on a device."""
    if is_torch(rows):
        return rows.cpu().numpy()
    return rows.get() if is_cupy(rows) else rows


def host_ids(ids: Any, rows: int) -> Ids:
    """Check ids on any device against 0..rows-1 and return them on the host as int64.

    Takes integer NumPy arrays, torch tensors, CuPy arrays, ints and nested lists of any shape,
    strides and width, and copies no contiguous int64. Raises InvalidTypeError for floats and
    booleans, and RowIndexError, naming the first bad id and its position, before any read.
    """
    torch: Any = sys.modules.get("torch")
    if type(ids) is np.ndarray:  # the common case skips the look-ups of torch and CuPy
        kind, array = "numpy", ids
    elif (  # and this one what `as_dense` asks; steps and lookups of few rows are short
        type(ids) is getattr(torch, "Tensor", None)
        and ids.is_cpu
        and ids.dtype is torch.int64
        and ids.layout is torch.strided
        and not (ids.is_nested or torch._C._are_functorch_transforms_active())
    ):
        kind, array = "torch", ids.numpy()
    elif is_torch(ids):
        kind, array = "torch", as_dense(ids, "the ids").numpy(force=True)
    elif is_cupy(ids):
        kind, array = "cupy", ids.get()
    else:
        kind, array = "numpy", _as_array(ids)
    if array.dtype.kind not in "iu":
        raise InvalidTypeError(
            f"row ids are whole numbers, not {array.dtype}: {_shown(array)}"
            f"{_cure(array.dtype.kind)}"
        )
    flat = array.ravel()
    if flat.dtype == np.int64 and flat.size and np.maximum.reduce(flat.view(np.uint64)) < rows:
        return Ids(flat, array.shape, kind)  # as unsigned, a negative id is huge
    _check_range(flat, rows)
    return Ids(np.ascontiguousarray(flat, np.int64), array.shape, kind)


def is_transformed(values: Any) -> bool:
    """Whether a torch tensor is a wrapper within `torch.vmap` or a transform like `grad`."""
    torch = sys.modules["torch"]
    if not torch._C._are_functorch_transforms_active():
        return False
    functorch = torch._C._functorch
    return bool(functorch.is_batchedtensor(values) or functorch.is_gradtrackingtensor(values))


def as_dense(values: Any, what: str) -> Any:
    """Return a torch tensor whose numbers are stored one by one, or raise InvalidTypeError."""
    if values.is_meta:
        raise InvalidTypeError(f"{what} are on meta, where there are none; give them on a device")
    if values.is_nested:
        raise InvalidTypeError(f"{what} are a nested tensor; give its values()")
    if str(values.layout) != "torch.strided":
        raise InvalidTypeError(f"{what} are {values.layout}; give them dense, by to_dense()")
    if is_transformed(values):
        raise InvalidTypeError(
            f"{what} are within torch.func, where a table has no way to take their numbers; read "
            "and write outside of it, or look rows up by tierstore.nn.TieredEmbedding"
        )
    if values.is_quantized:
        raise InvalidTypeError(f"{what} are {values.dtype}; give them as floats, by dequantize()")
    return values


def _as_array(ids: object) -> npt.NDArray[Any]:
    check_unmasked(ids, "the ids")
    try:
        array = np.asarray(ids)
    except ValueError as error:
        raise InvalidInputError(f"row ids are not one array of numbers: {error}") from None
    if array.size == 0 and not isinstance(ids, np.ndarray):
        return array.astype(np.int64)
    return array


def _check_range(flat: npt.NDArray[Any], rows: int) -> None:
    if not flat.size:
        return
    if flat.min() >= 0 and flat.max() < rows:
        return
    position = int(np.flatnonzero((flat < 0) | (flat >= rows))[0])
    cure = "; only slices count from the end: table[-1:]" if flat[position] < 0 else ""
    raise RowIndexError(
        f"row id {flat[position]} at position {position} is outside the table's 0..{rows - 1}{cure}"
    )


def _cure(kind: str) -> str:
    """Return advice about ids of this kind of element, as the end of a message."""
    if kind == "b":
        return "; give the rows that a mask chooses: np.flatnonzero(mask)"
    if kind in "UT":
        return (
            "; table.lookup(keys) returns the ids of external keys, in a table that has them: "
            "store.set_keys(name, keys) sets them, TableSpec(keys=...) makes a table by key"
        )
    return ""


def as_written(index: object) -> str:
    """Return an index as written between brackets: `":10, 0"` for `[:10, 0]`."""
    if isinstance(index, tuple):
        return ", ".join(map(as_written, index))
    if index is ...:
        return "..."
    if not isinstance(index, slice):
        return f"{index!r:.80}"
    bounds = ["" if each is None else repr(each) for each in (index.start, index.stop, index.step)]
    return ":".join(bounds if bounds[2] else bounds[:2])


def _shown(array: npt.NDArray[Any]) -> str:
    return np.array2string(array, threshold=4, edgeitems=2)[:80]


def rows_to_warm(
    rows: int, slots: int, ids: object, counts: Any
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32] | None]:
    """Return the rows to load, by id, or the most used by `counts`, or the first; see `Table.warm`.

    With `counts`, also return these for the policy.
    """
    if ids is not None and counts is not None:
        raise InvalidInputError("give ids or counts=, not both")
    if ids is not None:
        return host_ids(ids, rows).rows, None
    if counts is None:
        return np.arange(min(rows, slots)), None
    keys = count_keys(counts, rows)
    return most_used(keys, slots), keys


def last_of_each(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.intp] | None:
    """Return the position of the last occurrence of each row, or None where no row repeats."""
    if rows.size < 2 or (np.diff(rows) > 0).all():
        return None
    unique, first = np.unique(rows[::-1], return_index=True)
    return None if unique.size == rows.size else rows.size - 1 - first
