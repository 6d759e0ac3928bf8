"""The seams between a table and the side of its nearest tier: accesses, and leases on rows.

An access turns ids into rows, and moves the bytes of records; `Columns` makes values of them. There
is one of the host, and one of a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

from tierstore._door import Door
from tierstore._dtypes import DTypeName
from tierstore._rowcopy import Groups
from tierstore._table.address import Ids
from tierstore._table.prefetch import Prefetcher
from tierstore._table.values import Columns, Piece, to_bytes
from tierstore._tiers.gpu.abi import Structure
from tierstore._tiers.gpu.device import Device
from tierstore._tiers.gpu.launcher import Kernel
from tierstore._tiers.host import Change
from tierstore._tiers.space import Extent, WholeSpace
from tierstore.errors import DeviceError, UnknownNameError
from tierstore.spec import Field, RecordLayout


class Lease(ABC):
    """The distinct records of a batch, kept in place during a computation.

    Every computation on rows uses a lease: `read` the fields it needs as compact arrays, `write`
    the changed ones, `release`. Rows that find no room in the nearest tier are read and written in
    the tier below, with the same results: every later read and commit contains the writes of a
    lease, and a lease reads what others wrote meanwhile. It locks nothing: threads that compute
    new rows from the old ones of each other share a lock of their own.

    A lease ends at `release`, at `store.rollback()`, and when its table gets other fields or rows,
    or another version. From then on `trim`, reads and writes raise ClosedError; `release` does
    nothing more.

    Attributes:
        names: the number of names with which it began; see `Epoch.names_hold`.
        groups: the ids grouped by row; None on a GPU.
        device: the device with the records, for kernels; None on the host.
    """

    names: int
    groups: Groups | None = None
    device: Device | None = None
    _access: Access

    def __repr__(self) -> str:
        """Say how many rows a compact array has."""
        return f"{type(self).__name__}({self.bound} rows)"

    @property
    @abstractmethod
    def bound(self) -> int:
        """The rows of a compact array; on a GPU more than the distinct rows before `trim`.

        Rows after the distinct ones are undefined, and are not written.
        """

    @property
    @abstractmethod
    def rows(self) -> Any:
        """The id of each distinct row, int64 `(bound,)`: ascending on the host; of the ids' kind.

        The array is the lease's own: the given ids may change.
        """

    @property
    @abstractmethod
    def count(self) -> Any:
        """The number of distinct rows: a number on the host, int32 `(1,)` on a GPU."""

    @property
    @abstractmethod
    def positions(self) -> Any:
        """For each id of the batch, in its shape, the index of its row in compact arrays.

        On a GPU int32, of the ids' kind, and -1 for ids outside the table.
        """

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether the lease was released, or its epoch has ended."""

    @abstractmethod
    def trim(self, *, wait: bool) -> bool:
        """Lower `bound` to the number of distinct rows if that is known by now, or wait for it.

        The first call requests the number from a GPU. Returns whether `bound` is the number.
        """

    def read(self, field: str) -> Any:
        """Return one field of the distinct rows, a fresh `(bound, dim)` array of the ids' kind."""
        return self.read_columns(self._access.columns[field,])[field]

    @abstractmethod
    def expand(self, field: str) -> Any:
        """Return one field of the row of each id, a fresh array `ids.shape + (dim,)`."""

    def write(self, field: str, values: Any) -> None:
        """Write `(bound, dim)` values over one field of the distinct rows."""
        self.write_columns(self._access.columns[field,], {field: values})

    @abstractmethod
    def read_columns(self, columns: Columns) -> dict[str, Any]:
        """Return several fields of the distinct rows as `read` does, by name."""

    @abstractmethod
    def write_columns(self, columns: Columns, values: Mapping[str, Any]) -> None:
        """Write `(bound, dim)` values over several fields of the distinct rows."""

    def update(self, lo: int, hi: int, change: Change) -> bool:
        """Change bytes `lo:hi` of the distinct rows in place on the host, part by part.

        Returns False and changes nothing if rows are in a lower tier.
        """
        return False

    def launch(
        self,
        kernel: Kernel,
        work: Structure,
        items: int,
        *,
        writes: Sequence[tuple[int, int]] = (),
        positions: tuple[int, int] | None = None,
        ends: bool = False,
    ) -> None:
        """Launch a kernel on the records in place, if there is a `device`.

        Args:
            kernel: of a source that extends `abi.RECORDS`.
            work: its second structure, copied by the launch.
            items: the amount of work, which determines the kernel's grid.
            writes: the byte ranges of records that it writes.
            positions: address and number of positions other than those of the lease's ids.
            ends: whether the lease ends with it; it calls `unpin` for each record.
        """
        raise DeviceError("this lease is on the host, where no kernel can reach its rows")

    @abstractmethod
    def release(self) -> None:
        """End the lease; harmless when repeated."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class _Found(dict[tuple[str, ...], Columns]):
    """Columns by the names of their fields, of which C finds those that were asked for before.

    They do not refer to the access that has them: it goes, with the files, when it is dropped.
    """

    def __init__(self, extent: Extent | WholeSpace, layout: RecordLayout) -> None:
        """Have none."""
        self._extent, self._layout = extent, layout

    def __missing__(self, names: tuple[str, ...]) -> Columns:
        try:
            columns = self[names] = Columns(self._layout, names)
        except UnknownNameError:
            self._extent.epoch.check_open()  # the table may have got the field meanwhile
            raise
        return columns


class Access(ABC):
    """The rows of a table, or of all tables of a space, as the side of the nearest tier has them.

    A call that had to wait until its table got other tiers raises ClosedError.

    Attributes:
        extent: the rows.
        layout: of their records.
        door: who may use the store.
        place: where results are, such as "cpu" or "cuda:0".
        columns: of each tuple of names the fields, the same object each time; UnknownNameError for
            a name that no field has.
    """

    place: str = "cpu"

    def __init__(self, extent: Extent | WholeSpace, layout: RecordLayout, door: Door) -> None:
        """Refer to rows."""
        self.extent = extent
        self.layout = layout
        self.door = door
        self.columns: Mapping[tuple[str, ...], Columns] = _Found(extent, layout)

    @abstractmethod
    def ids(self, ids: object) -> Ids:
        """Check ids and bring them to this side, as flat int64."""

    @abstractmethod
    def using(self, *, write: bool = False) -> AbstractContextManager[Any]:
        """Enter the store as a read of this side does, beside the calls of other threads."""

    @abstractmethod
    def together(self) -> AbstractContextManager[Any]:
        """Defer interrupts for several calls of this thread; on a GPU enter the store once."""

    @abstractmethod
    def read(self, ids: Ids, lo: int, hi: int, *, admit: bool, into: Any = None) -> Any:
        """Return bytes `lo:hi` of the records of `ids`, `(n, hi - lo)`, contiguous.

        They are fresh, or `into`, bytes of that shape, where it can be filled without a copy. On a
        GPU they are there, but on the host for NumPy ids.
        """

    def values(
        self,
        ids: Ids,
        columns: Columns,
        *,
        admit: bool,
        dtype: DTypeName | None = None,
        raw: bool = False,
        out: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return fields of the rows of `ids`, an array `ids.shape + (dim,)` of each.

        Args:
            ids: checked ones.
            columns: the fields; they are read in one pass over the bytes that span them.
            admit: whether rows that are missing come into memory, and count as used.
            dtype: the floats to convert to.
            raw: return the bytes of each field as they are stored.
            out: an array for each field; what is not of the shape, type and place of the result is
                refused, with InvalidTypeError or InvalidInputError, before any is read.
        """
        if out is not None:
            return self._filled(out, ids, columns, admit=admit)
        data = self._bytes(ids, columns, admit=admit, raw=raw)
        return columns.values(data, ids, self.decoded, dtype, raw=raw)

    def _bytes(self, ids: Ids, columns: Columns, *, admit: bool, raw: bool) -> Any:
        """Return the bytes that fields span, in a form that `decoded` takes."""
        return self.read(ids, columns.lo, columns.hi, admit=admit)

    def _filled(
        self, out: Mapping[str, Any], ids: Ids, columns: Columns, *, admit: bool
    ) -> dict[str, Any]:
        """Read into `out`: directly to its memory for one field, if that has the stored type."""
        kinds, into = columns.checked(out, ids, self.place)
        if into is None:
            data = self._bytes(ids, columns, admit=admit, raw=False)
        else:
            data = self.read(ids, columns.lo, columns.hi, admit=admit, into=into)
        if into is None or data is not into:
            columns.fill(out, data, ids, self.decoded, kinds)
        return {name: out[name] for name in columns.names}

    @abstractmethod
    def decoded(
        self, data: Any, item: Field, ids: Ids, dtype: DTypeName | None = None, out: Any = None
    ) -> Any:
        """Return the bytes of a field as the array for these ids, of `dtype` if given.

        It may be in `out`, which is of that shape and `dtype`.
        """

    def encoded(self, values: Any, item: Field, shape: tuple[int, ...], name: str) -> Any:
        """Return values for ids of a shape as bytes of a field, on this side, checked."""
        return to_bytes(values, item, shape, name)

    @abstractmethod
    def write(self, ids: Ids, pieces: Sequence[Piece]) -> bool:
        """Write pieces over the records of `ids`; where an id repeats, its last record stays.

        Returns whether that was done: not where the ids have `moved` since.
        """

    def capture(self, ids: Any, out: Any, name: str) -> bool:
        """Make the CUDA graph under capture read a field into `out`; False if there is none."""
        return False

    @abstractmethod
    def adapt(self) -> None:
        """Admit the rows that replays of CUDA graphs have read to the GPU tier, if there is one."""

    @abstractmethod
    def lease(self, ids: Ids) -> Lease:
        """Pin the distinct rows of a batch."""

    @abstractmethod
    def lease_and_read(self, ids: Ids, field: str) -> tuple[Lease, Any]:
        """Pin the distinct rows, and return the result of the lease's `expand`; in one call."""

    @abstractmethod
    def prefetch(self, ids: object, window: int, prefetcher: Prefetcher) -> None:
        """Check ids, and start bringing their rows nearer.

        They stay until they are used, or `window` newer batches came. A prefetch is dropped if the
        epoch ends first.
        """
