"""What each class of SpeedTorch is here: a table, made by one call, saved and loaded by others."""

from __future__ import annotations

import atexit
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from tierstore.errors import InvalidInputError
from tierstore.scratch import Scratch
from tierstore.spec import Field, TableSpec
from tierstore.speedtorch.files import Streamed
from tierstore.speedtorch.where import Where, table_of
from tierstore.store import Store
from tierstore.table import Table
from tierstore.table.ids import is_cupy

__all__ = ["Held", "as_numpy", "check_table", "each", "legacy"]

_BLOCK_BYTES = 4 << 20

_open: weakref.WeakSet[Held] = weakref.WeakSet()


class Held(ABC):
    """Rows in a table of the library, wherever its tiers keep them.

    A context manager; `close` gives the memory back, as dropping the object or the end of the
    process do. What is on disk is committed then, and stays.
    """

    total_classes: int
    _owner: Scratch | Store | None = None
    _end: Callable[[], object] | None = None

    def __init__(self, where: Where) -> None:
        self._where = where

    @property
    def table(self) -> Table:
        """The table, for everything that the rest of the library can do with one."""
        if self._owner is None:
            raise self._not_yet()
        return table_of(self._owner)

    def _not_yet(self) -> InvalidInputError:
        return InvalidInputError(
            f"this {type(self).__name__} has no rows yet; call {self._first_calls} first"
        )

    _first_calls = "zerosInit(), another of its init methods, or loadCupy(file)"

    def _make(self, fields: Mapping[str, Field]) -> None:
        """Make the table, in place of one that there may be."""
        for item in fields.values():
            if item.init is not None:
                item.init.block(0, 0, (self.total_classes, item.dim), 0)  # raises if it cannot fit
        zero = all(item.init is None or item.init.is_zero for item in fields.values())
        spec = TableSpec(self.total_classes, fields=fields, sparse=zero)
        if isinstance(self._owner, Store):
            self._owner.rollback()
            self._owner.replace_table(self.table.name, spec)
            return
        self.close()
        self._take(self._where.make(spec))

    def _take(self, owner: Scratch | Store) -> None:
        self._owner = owner
        self._end = weakref.finalize(self, _finish, owner, self._before_commit())
        self._end.atexit = False
        _open.add(self)

    @abstractmethod
    def _accept(self, table: Table) -> None:
        """Take up a table that was opened; raise InvalidInputError if it is not one of these."""

    def _before_commit(self) -> Callable[[], None] | None:
        """Return what is to be done before a commit; it must not refer to this object."""
        return None

    def close(self) -> None:
        """Give the memory back; what is on disk is committed before. Harmless when repeated."""
        if self._end is not None:
            self._end()
        self._owner = self._end = None

    def __enter__(self) -> Self:
        """Return the object itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    # -- the rows as arrays

    def _blocks(self, field: str) -> Iterator[npt.NDArray[Any]]:
        """Yield all rows of a field in order, leaving the caches as they are."""
        table = self.table
        step = max(1, _BLOCK_BYTES // table.fields[field].nbytes)
        for start in range(0, table.rows, step):
            ids = np.arange(start, min(start + step, table.rows))
            yield table.read(ids, field, transient=True)

    def _streamed(self, field: str) -> Streamed:
        item = self.table.fields[field]
        dtype = np.dtype(np.float32) if item.dtype == "bfloat16" else item.storage
        return Streamed((self.table.rows, item.dim), dtype, self._blocks(field))

    def _array(self, streamed: Streamed) -> npt.NDArray[Any]:
        """Return an array of all blocks, read-only: writing to it would change nothing else."""
        out = np.empty(streamed.shape, streamed.dtype)
        start = 0
        for block in streamed.blocks:
            out[start : start + len(block)] = block
            start += len(block)
        out.flags.writeable = False
        return out

    @abstractmethod
    def getNumpyVersion(self) -> Any:
        """Return a copy of all rows in NumPy, read-only."""

    def getCupyVar(self) -> Any:
        """Return a copy of all rows in CuPy, on the GPU; in NumPy where there is no CuPy."""
        return each(self.getNumpyVersion(), _to_cupy)

    def getTorchVar(self) -> Any:
        """Return a copy of all rows as a tensor: on the GPU if the table is, else on the CPU."""
        device = self._where.torch_device if self._where.resident else torch.device("cpu")
        return each(self.getNumpyVersion(), lambda array: torch.tensor(array, device=device))


def _finish(owner: Scratch | Store, before_commit: Callable[[], None] | None) -> None:
    if isinstance(owner, Store) and not owner.closed:
        if before_commit is not None:
            before_commit()
        owner.commit()
    owner.close()


@atexit.register
def _close_all() -> None:
    """Commit and close what is open; stores that are still open later drop what is new."""
    for held in list(_open):
        held.close()


def check_table(table: Table, rows: int, fields: Mapping[str, Field]) -> None:
    """Raise InvalidInputError unless a table has so many rows, of these fields."""
    if table.rows != rows or table.fields != dict(fields):
        wanted = ", ".join(f"{name} {item.dim} {item.dtype}" for name, item in fields.items())
        raise InvalidInputError(f"{table} was made by other code: expected {rows} rows, {wanted}")


def each(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to a value, or to every item of a list."""
    return [function(item) for item in value] if isinstance(value, list) else function(value)


def legacy(method: str, name: str) -> Any:
    """Return a property for an attribute that held the rows themselves in SpeedTorch."""

    def read(held: Held) -> Any:
        return getattr(held, method)()

    return property(read, doc=f"A copy of all rows, `{method}()`; {name} to write them.")


def as_numpy(values: Any) -> npt.NDArray[Any]:
    """Return a NumPy or CuPy array, or a tensor from anywhere, as a NumPy array of plain floats."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return np.asarray(values.get() if is_cupy(values) else values)


def _to_cupy(array: npt.NDArray[Any]) -> Any:
    try:
        import cupy
    except ImportError:
        return array
    return cupy.asarray(array)
