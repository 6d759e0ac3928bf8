"""Base of all SpeedTorch classes: a table that is created, saved and loaded by method calls."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import importlib.util
import weakref
import zipfile
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tierstore._closing import Closing
from tierstore._io import publish
from tierstore._memory_table import MemoryTable
from tierstore._store.opening import create
from tierstore._store.opening import open as open_store
from tierstore._store.store import Store
from tierstore._table.address import is_cupy
from tierstore._table.table import Table
from tierstore._tiers.gpu.device import Device
from tierstore.budget import Budget
from tierstore.errors import CapacityError, ClosedError, ExistsError, InvalidInputError
from tierstore.spec import DeviceName, Field, TableSpec

TABLE = "rows"

_GPU_CACHE = 256 << 20
_DISK_CACHE = 512 << 20
_STAGING = 64 << 20


@dataclass(frozen=True)
class Where:
    """The location of a table.

    Attributes:
        device: "cpu", "cuda", "cuda:1", a device, or None for the GPU if there is one.
        pinned: whether it is in host memory with a cache on the GPU, instead of entirely on the
            GPU.
        path: the path of a store on disk; None for memory only.
        budget: memory for the tiers; None for the defaults below.
    """

    device: DeviceName | Device | None = None
    pinned: bool = False
    path: Path | None = None
    budget: Budget | None = None

    def near(self, parameter: Tensor | None) -> Where:
        """Return this location with its device: the parameter's GPU, or torch's current one.

        Without CuPy or a GPU that torch can use, the device is the CPU.
        """
        device = self.device
        if device is None or device == "cuda":
            if not torch.cuda.is_available() or importlib.util.find_spec("cupy") is None:
                device = "cpu"
            elif parameter is not None and parameter.is_cuda:
                device = str(parameter.device)
            else:
                device = f"cuda:{torch.cuda.current_device()}"
        return dataclasses.replace(self, device=device)

    @property
    def torch_device(self) -> torch.device:
        """The device of returned rows, once it is determined."""
        name = self.device if isinstance(self.device, str) else self._given.torch_name
        return torch.device(name)

    @property
    def _given(self) -> Any:
        return self.device

    @property
    def resident(self) -> bool:
        """Whether the table is entirely on the GPU."""
        return self.device != "cpu" and not self.pinned and self.path is None

    def budget_for(self, spec: TableSpec) -> Budget:
        """Return the given or default memory of the tiers.

        By default, a cache on the GPU has 256 MiB of rows, and a store on disk 512 MiB in host
        memory. A table in memory has all its rows either on the host or on the GPU.
        """
        rows, width = spec.rows, spec.layout.record_bytes

        def within(nbytes: int) -> int:
            return max(1, min(rows, nbytes // width))

        if self.path is not None:
            default = Budget(host_rows=within(_DISK_CACHE), gpu_rows=within(_GPU_CACHE))
            return self.budget or default
        if self.resident:
            return self.budget or Budget(host_rows=within(_STAGING), gpu_rows=rows)
        if self.budget is None:
            return Budget(host_rows=rows, gpu_rows=within(_GPU_CACHE))
        if self.budget.host is None and self.budget.host_rows is None:
            return dataclasses.replace(self.budget, host_rows=rows)
        return self.budget

    def make(self, spec: TableSpec) -> MemoryTable | Store:
        """Create a table with its fields' initializers; raises ExistsError if the store exists."""
        try:
            if self.path is None:
                return MemoryTable(spec, budget=self.budget_for(spec), device=self._given)
            if self.path.exists():
                raise ExistsError(
                    f"{self.path} exists; call reopen() to open it, or give another diskname"
                )
            tables = {TABLE: spec}
            return create(self.path, tables, budget=self.budget_for(spec), device=self._given)
        except CapacityError as error:
            error.add_note(
                "CPUPinn=True keeps a table in host memory, the classes ending in MM on disk"
            )
            raise

    def open(self) -> Store:
        """Open the store of an earlier run."""
        if self.path is None:
            raise RuntimeError("a table in memory cannot be opened")
        with open_store(self.path, budget=Budget(host=0)) as store:
            budget = self.budget_for(store[TABLE].spec)
        return open_store(self.path, "r+", budget=budget, device=self._given)


def table_of(owner: MemoryTable | Store) -> Table:
    """Return the table of what `Where.make` or `Where.open` returned."""
    return owner.table if isinstance(owner, MemoryTable) else owner[TABLE]


@dataclass(frozen=True)
class Streamed:
    """A C-ordered array, given in blocks of its first axis."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    blocks: Iterable[npt.NDArray[Any]]

    def write(self, file: IO[bytes]) -> None:
        """Write the array as `numpy.save` does."""
        header = {
            "descr": np.lib.format.dtype_to_descr(self.dtype),
            "fortran_order": False,
            "shape": self.shape,
        }
        np.lib.format.write_array_header_1_0(file, header)
        for block in self.blocks:
            file.write(np.ascontiguousarray(block).data)


def save_npy(path: str | Path, array: Streamed) -> None:
    """Write a `.npy` file; add a missing suffix, like `numpy.save`."""
    with publish(_with_suffix(path, ".npy"), force=True) as partial, partial.open("xb") as file:
        array.write(file)


def save_npz(path: str | Path, arrays: Mapping[str, Streamed], numbers: Mapping[str, Any]) -> None:
    """Write a `.npz` file of arrays and numbers, like `numpy.savez`."""
    with (
        publish(_with_suffix(path, ".npz"), force=True) as partial,
        zipfile.ZipFile(partial, "x") as archive,
    ):
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                array.write(member)
        for name, value in numbers.items():
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, np.asarray(value), allow_pickle=False)


def load_npz(path: str | Path) -> dict[str, npt.NDArray[Any]]:
    """Read all arrays of a `.npz` file, whose suffix may be omitted."""
    path = Path(path)
    with np.load(path if path.exists() else _with_suffix(path, ".npz")) as archive:
        return dict(archive)


def _with_suffix(path: str | Path, suffix: str) -> Path:
    path = Path(path)
    return path if path.name.endswith(suffix) else path.with_name(path.name + suffix)


def flat_ids(*parts: Any) -> Tensor | npt.NDArray[np.int64]:
    """Concatenate ids into one flat tensor; parts that are None are skipped.

    NumPy and CuPy arrays, tensors and lists are accepted. If any part is on a GPU, all are moved
    there. The common case, a single flat int64 array, is returned unchanged for speed. The table
    rejects invalid row ids.
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
    """Return values as a tensor, without a copy if possible; integers become int64."""
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
    """Return whether values are an int64 array that torch accepts unchanged."""
    return type(values) is np.ndarray and values.dtype == np.int64 and values.flags.carray


def _goes_up(array: npt.NDArray[Any]) -> bool:
    return all(stride >= 0 for stride in array.strides)


_BLOCK_BYTES = 4 << 20

_open: weakref.WeakSet[TableRows] = weakref.WeakSet()


class TableRows(Closing):
    """Rows in a table of this library.

    A context manager: `close` frees the memory, as do garbage collection and process exit. A store
    on disk is committed then, and remains.
    """

    total_classes: int
    _owner: MemoryTable | Store | None = None
    _end: Callable[[], object] | None = None

    def __init__(self, where: Where) -> None:
        self._where = where

    @property
    def table(self) -> Table:
        """The table, for use with the rest of the library."""
        if self._owner is None:
            raise self._not_yet()
        return table_of(self._owner)

    def _not_yet(self) -> InvalidInputError:
        return InvalidInputError(
            f"this {type(self).__name__} has no rows yet; call {self._first_calls} first"
        )

    _first_calls = "zerosInit(), another of its init methods, or loadCupy(file)"

    def _make(self, fields: Mapping[str, Field]) -> None:
        """Create the table, replacing an existing one."""
        for item in fields.values():
            if item.init is not None:
                item.init.seeded().block(
                    0, 0, (self.total_classes, item.dim), 0
                )  # raises if it does not fit
        zero = all(item.init is None or item.init.is_zero for item in fields.values())
        spec = TableSpec(self.total_classes, fields=fields, sparse=zero)
        if isinstance(self._owner, Store):
            self._owner.rollback()
            self._owner.replace_table(self.table.name, spec, reinitialize=True)
            return
        self.close()
        self._take(self._where.make(spec))

    def _take(self, owner: MemoryTable | Store) -> None:
        self._owner = owner
        self._end = weakref.finalize(self, _finish, owner, self._before_commit())
        self._end.atexit = False
        _open.add(self)

    @abstractmethod
    def _accept(self, table: Table) -> None:
        """Use an opened table; raise InvalidInputError if it does not match."""

    def _before_commit(self) -> Callable[[], None] | None:
        """Return a function to call before a commit, which must not refer to this object."""
        return None

    def close(self) -> None:
        """Commit a store on disk and free the memory; may be called again."""
        if self._end is not None:
            self._end()
        self._owner = self._end = None

    # -- the rows as arrays

    def _blocks(self, field: str) -> Iterator[npt.NDArray[Any]]:
        """Yield all rows of a field in order, without changing the caches."""
        table = self.table
        step = max(1, _BLOCK_BYTES // table.fields[field].nbytes)
        for start in range(0, table.rows, step):
            ids = np.arange(start, min(start + step, table.rows))
            yield table.read(ids, field, cache=False)

    def _streamed(self, field: str) -> Streamed:
        item = self.table.fields[field]
        return Streamed((self.table.rows, item.dim), item.element.numpy, self._blocks(field))

    def _array(self, streamed: Streamed) -> npt.NDArray[Any]:
        """Return a read-only array of all blocks, which is a copy of the rows."""
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
        """Return a copy of all rows in CuPy, on the GPU; in NumPy without CuPy."""
        return each(self.getNumpyVersion(), _to_cupy)

    def getTorchVar(self) -> Any:
        """Return a copy of all rows as a tensor: on the GPU if the table is, else on the CPU."""
        device = self._where.torch_device if self._where.resident else torch.device("cpu")
        return each(self.getNumpyVersion(), lambda array: torch.tensor(array, device=device))


def _finish(owner: MemoryTable | Store, before_commit: Callable[[], None] | None) -> None:
    if isinstance(owner, Store) and not owner.closed:
        with contextlib.suppress(ClosedError):  # a failure that was raised has ended it
            if before_commit is not None:
                before_commit()
            owner.commit()
    owner.close()


@atexit.register
def _close_all() -> None:
    """Commit and close all open objects; stores closed later would drop uncommitted rows."""
    for held in list(_open):
        held.close()


def check_table(table: Table, rows: int, fields: Mapping[str, Field]) -> None:
    """Raise InvalidInputError unless a table has this number of rows and these fields."""
    if table.rows != rows or table.fields != dict(fields):
        wanted = ", ".join(f"{name} {item.dim} {item.dtype}" for name, item in fields.items())
        raise InvalidInputError(f"{table} was made by other code: expected {rows} rows, {wanted}")


def each(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to a value, or to every item of a list."""
    return [function(item) for item in value] if isinstance(value, list) else function(value)


def legacy(method: str, name: str) -> Any:
    """Return a property for an attribute that contained the rows in SpeedTorch."""

    def read(held: TableRows) -> Any:
        return getattr(held, method)()

    return property(read, doc=f"A copy of all rows, `{method}()`; {name} to write them.")


def as_numpy(values: Any) -> npt.NDArray[Any]:
    """Return a NumPy or CuPy array, or a tensor on any device, as a NumPy array of plain floats."""
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
