"""A table: the rows of a store by id."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import EllipsisType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Literal,
    NoReturn,
    ParamSpec,
    Self,
    TypeAlias,
    TypeVar,
    cast,
    overload,
)

import numpy as np
import numpy.typing as npt

from tierstore import _html
from tierstore._disk.generation import Generation
from tierstore._door import INTERNAL, Door, internal_error, internal_errors
from tierstore._dtypes import DTypeName, check_unmasked
from tierstore._progress import Shown, report_nothing, shown
from tierstore._table.access import Access, Lease
from tierstore._table.address import Ids, as_dense, as_written, is_torch, on_host, rows_to_warm
from tierstore._table.backing import Backing
from tierstore._table.home import Home
from tierstore._table.named import NamedRows
from tierstore._table.topk import Best, excluded_pairs
from tierstore._table.trace import Recording
from tierstore._table.values import from_bytes, read_dtype, spread
from tierstore._tiers.space import Extent, Nearest
from tierstore.errors import ClosedError, CorruptStoreError, InvalidInputError, InvalidTypeError
from tierstore.spec import Field, TableSpec
from tierstore.stats import Counters, Occupancy, TierStats

if TYPE_CHECKING:
    import torch
    from torch import Tensor

IntegerArrayLike: TypeAlias = (
    npt.NDArray[np.integer[Any]]
    | np.integer[Any]
    | int
    | range
    | Sequence[int]
    | Sequence[Sequence[int]]
    | Sequence[npt.NDArray[np.integer[Any]]]
)
"""Row ids on the host: integers, lists and ranges of them, integer arrays."""

_SCAN_BYTES = 8 << 20
_MUCH = 64 << 20
"""Bytes that a read for each id takes at most; see `reads_each`."""
_NAME = (type(None), str)
_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T", bound="Table")


def in_present_tiers(
    call: Callable[Concatenate[_T, _P], _R],
) -> Callable[Concatenate[_T, _P], _R]:
    """Return a method that begins anew where another thread gave its table new tiers meanwhile.

    Where the table still has those that the call began in, its ClosedError is raised.
    """

    @functools.wraps(call)
    def repeated(table: _T, /, *args: _P.args, **options: _P.kwargs) -> _R:
        while True:
            access = table._backing.access
            try:
                return call(table, *args, **options)
            except ClosedError:
                if table._backing.access is access:
                    raise

    return repeated


class Table(NamedRows):
    """Rows of a store, read and written by id, in any tier.

    NumPy ids (or lists) give and take NumPy rows, torch ids torch rows, CuPy ids CuPy rows. Ids are
    integers of any width and shape; floats and booleans are a TypeError, ids outside the table an
    IndexError that names the first. Tables come from a store: `store["item"]`.
    """

    _backing: Backing
    any_recorded: ClassVar[bool] = False
    """Whether any table was ever recorded; else a batch on many tables need not check each."""

    def __init__(self, backing: Backing) -> None:
        """Show what the home of the table has opened."""
        self.name: str = backing.name
        self._backing = backing

    def _together(self) -> AbstractContextManager[Any]:
        """Enter the store once for several calls of this thread; see `Access.together`."""
        return self._backing.access.together()

    @property
    def scalars(self) -> dict[str, Any]:
        """Values that belong to the whole table; committed and rolled back with its rows."""
        self._backing.home.touched.scalars[self.name] = None
        return self._backing.scalars

    @property
    def spec(self) -> TableSpec:
        """The spec of the table."""
        return self._backing.generation.info.spec

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.spec.rows

    @property
    def by_row(self) -> Table:
        """The table itself; that of a table by key is one whose ids are row numbers."""
        return self

    @property
    def fields(self) -> dict[str, Field]:
        """The fields of a record, in order; the first is the default."""
        return dict(self._backing.layout.fields)

    @property
    def dim(self) -> int:
        """Elements of the first field."""
        return self._backing.layout.fields[0][1].dim

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type in which NumPy reads the first field; float32 for bfloat16, see `fields`."""
        return read_dtype(self._backing.layout.fields[0][1])

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the first field, `(rows, dim)`."""
        return self.rows, self.dim

    @property
    def ndim(self) -> int:
        """Number of dimensions of the first field, which is 2."""
        return 2

    @property
    def nbytes(self) -> int:
        """Bytes of all records, with every field and without compression."""
        return self.spec.nbytes

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> NoReturn:
        """Refuse: iterating would read row by row; `scan` yields blocks of rows."""
        raise InvalidTypeError(
            f"table {self.name!r} is not iterated over, row by row: table[:] returns all rows, "
            "table.scan() yields blocks of them"
        )

    __contains__ = None
    """Whether an id is in the table is `0 <= id < table.rows`."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Copy all rows of the first field into an array `(rows, dim)`; see `scan`."""
        if copy is False:
            raise InvalidInputError(
                f"the rows of table {self.name!r} cannot become an array without a copy"
            )
        out = np.empty(self.shape, self.dtype if dtype is None else dtype)
        begin = 0
        for block in self.scan():
            out[begin : begin + len(block)] = block
            begin += len(block)
        return out

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return where `__dlpack__` copies to, the memory of the host."""
        return (1, 0)

    def __dlpack__(self, **options: Any) -> Any:
        """Copy all rows of the first field, as `__array__` does, for `torch.as_tensor(table)`."""
        return np.asarray(self).__dlpack__(**options)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name} {f.dim} {f.dtype}" for name, f in self._backing.layout.fields)
        return f"Table({self.name!r}, rows={self.rows}, {fields})"

    def _repr_html_(self) -> str:
        """Return the HTML for notebooks: the fields of a record."""
        fields = self._backing.layout.fields
        rows = [
            (name, f.dim, f.dtype, str(f.init) if f.init is not None else "") for name, f in fields
        ]
        caption = f"{self.name}: {self.rows:,} rows, {self._backing.layout.record_bytes} B each"
        return _html.table(caption, ("field", "elements", "type", "first values"), rows)

    def _named(self, name: str | None) -> str:
        """Check a field's name, the first field's for None; raises UnknownNameError."""
        if name is None:
            return self._backing.layout.fields[0][0]
        if not isinstance(name, str):
            raise InvalidTypeError(f"a field is a name, not {name!r}")
        if name not in self._backing.spans:
            self._backing.layout.field(name)
        return name

    @overload
    def read(
        self,
        ids: IntegerArrayLike,
        field: str | None = None,
        *,
        cache: bool = True,
        as_tensor: Literal[False] = False,
        dtype: DTypeName | np.dtype[Any] | type | None = None,
        raw: bool = False,
        out: npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[np.floating[Any]]: ...
    @overload
    def read(
        self,
        ids: IntegerArrayLike,
        field: list[str] | tuple[str, ...],
        *,
        cache: bool = True,
        as_tensor: Literal[False] = False,
        dtype: DTypeName | np.dtype[Any] | type | None = None,
        raw: bool = False,
        out: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> dict[str, npt.NDArray[np.floating[Any]]]: ...
    @overload
    def read(
        self,
        ids: IntegerArrayLike,
        field: str | None = None,
        *,
        cache: bool = True,
        as_tensor: Literal[True],
        dtype: DTypeName | np.dtype[Any] | type | torch.dtype | None = None,
        raw: bool = False,
        out: Tensor | None = None,
    ) -> Tensor: ...
    @overload
    def read(
        self,
        ids: IntegerArrayLike,
        field: list[str] | tuple[str, ...],
        *,
        cache: bool = True,
        as_tensor: Literal[True],
        dtype: DTypeName | np.dtype[Any] | type | torch.dtype | None = None,
        raw: bool = False,
        out: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]: ...
    @overload
    def read(
        self,
        ids: Tensor,
        field: str | None = None,
        *,
        cache: bool = True,
        as_tensor: bool = False,
        dtype: DTypeName | np.dtype[Any] | type | torch.dtype | None = None,
        raw: bool = False,
        out: Tensor | None = None,
    ) -> Tensor: ...
    @overload
    def read(
        self,
        ids: Tensor,
        field: list[str] | tuple[str, ...],
        *,
        cache: bool = True,
        as_tensor: bool = False,
        dtype: DTypeName | np.dtype[Any] | type | torch.dtype | None = None,
        raw: bool = False,
        out: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]: ...
    def read(
        self,
        ids: Any,
        field: str | list[str] | tuple[str, ...] | None = None,
        *,
        cache: bool = True,
        as_tensor: bool = False,
        dtype: Any = None,
        raw: bool = False,
        out: Any = None,
    ) -> Any:
        """Read the rows of `ids` as a fresh array of shape `ids.shape + (dim,)`.

        Args:
            ids: row ids of any shape; duplicates are fine.
            field: the field to read, the first if None; or a list of fields, for a dict from name
                to array.
            cache: False reads rows without keeping them in memory: for rows that are read once.
            as_tensor: return torch tensors on the table's device for NumPy ids too, which avoids
                the wait for a GPU.
            dtype: the floats to convert to, such as torch.bfloat16 or "float32"; rows of a field
                with scales are multiplied in float32 and rounded once.
            raw: return the bytes as they are stored, uint8 `ids.shape + (nbytes,)`: of a field with
                scales its elements, then its scales.
            out: the array or tensor to read into and return, of the shape, dtype and device of the
                result, contiguous; of a field with scales of any type of floats; for a list of
                fields a dict of them. After an error its contents are undefined.

        Give one of `dtype`, `raw` and `out` at most. bfloat16 fields are returned as float32 for
        NumPy ids, as bfloat16 otherwise. Raises RowIndexError, InvalidTypeError, UnknownNameError,
        and CorruptRowError rather than return damaged rows. Ids on a GPU are checked there: rows of
        bad ids read NaN, and the next call that waits raises.
        """
        on = self._backing
        access = on.access  # before the fields; see `Backing.attach`
        try:
            plain = dtype is None and out is None and not raw
            if type(ids) is np.ndarray and plain and cache and not as_tensor:
                on_host = on.on_host
                if on_host is not None and on.recording is None and type(field) in _NAME:
                    found = on_host.read_resident(ids, field)  # type: ignore[arg-type]
                    if found is not None:
                        return found
            if (dtype is not None) + bool(raw) + (out is not None) > 1:
                raise InvalidInputError("give one of dtype=, raw= and out=")
            several = isinstance(field, (list, tuple))  # a union type would be made each time
            names = (
                tuple(map(self._named, field))  # type: ignore[arg-type]
                if several
                else (self._named(field),)  # type: ignore[arg-type]
            )
            batch = self._batch(ids, record=cache and bool(names))
            if as_tensor:
                batch = batch.for_tensors()
            if plain and not several:
                item, lo, hi = on.spans[names[0]]
                if item.scale is None:  # in as few calls as there can be
                    return access.decoded(access.read(batch, lo, hi, admit=cache), item, batch)
            into = out
            if out is not None:
                into = _each(out, names) if several else {names[0]: out}
            if not names:
                return {}
            values = access.values(
                batch, access.columns[names], admit=cache, dtype=dtype, raw=raw, out=into
            )
            return values if several else values[names[0]]
        except INTERNAL as error:
            raise internal_error(error) from error
        except ClosedError:
            if on.access is access:
                raise
        return self.read(  # as `in_present_tiers`, whose call costs a tenth of reading a few rows
            ids, field, cache=cache, as_tensor=as_tensor, dtype=dtype, raw=raw, out=out
        )

    def read_into(self, ids: Any, out: Any, field: str | None = None) -> None:
        """Read the rows of `ids` into `out`; on a GPU a CUDA graph may capture this.

        Args:
            ids: row ids of any shape; in a graph int64 on the table's device, contiguous.
            out: an array or tensor `ids.shape + (dim,)`, contiguous, of the type of the field. For
                a field with scales any type of floats, to which values are rounded once; in a graph
                float32, bfloat16 or float16, at a multiple of 16 bytes.
            field: the field to read, the first if None.

        Outside of a capture this is `read(ids, field, out=out)`; call it so once before a capture,
        which reserves what a graph needs. A replay runs no host code and allocates nothing: it
        reads the present contents of `ids`, from the GPU's slots or over the link from host memory,
        never from the disk. Rows in neither and ids outside the table read as bytes 0xff, which is
        NaN, -1 in int8 and 255 in uint8; the next call that waits, such as `adapt()`, raises
        NotPrefetchedError or RowIndexError, once. `prefetch` before the replay brings its rows.
        Replay in the stream of the table's other calls, and capture again after the table was
        closed or has other rows or fields.
        """
        if out is None:
            raise InvalidTypeError("read_into writes to out, which is None; read() returns rows")
        try:
            if not self._backing.access.capture(ids, out, self._named(field)):
                self.read(ids, field, out=out)
        except INTERNAL as error:
            raise internal_error(error) from error

    def adapt(self) -> None:
        """Admit rows that CUDA graphs have read to the GPU's slots, as the policy ranks them.

        Call it between replays, which admit no rows themselves: the latest rows read since the last
        call count, up to 65,536. Waits for the device, and raises the errors of replays; see
        `read_into`. Does nothing without a GPU.
        """
        with internal_errors():
            self._backing.home.door.check()
            self._backing.access.adapt()

    @overload
    def __getitem__(
        self, ids: IntegerArrayLike | slice | EllipsisType
    ) -> npt.NDArray[np.floating[Any]]: ...
    @overload
    def __getitem__(self, ids: Tensor) -> Tensor: ...
    def __getitem__(self, ids: Any) -> Any:
        """Read the first field of some rows, `table[3]`, `table[[3, 5]]`, `table[3:10]`.

        As `read(ids)`. Slices are NumPy's, so negative bounds count from the end, and their rows
        are not kept in memory; `table[...]` is `table[:]`. A single negative id is refused, and so
        are boolean masks. `table[3, 5]` would be one element in NumPy and is refused.
        """
        if isinstance(ids, slice | EllipsisType):
            return self.read(self._sliced(ids), cache=False)
        if isinstance(ids, tuple):
            raise InvalidTypeError(
                f"table[{as_written(ids)}] is no choice of rows: {_instead(ids)}"
            )
        return self.read(ids)

    def _sliced(self, rows: slice | EllipsisType) -> npt.NDArray[np.int64]:
        if rows is ...:
            rows = slice(None)
        try:
            return np.arange(*rows.indices(self.rows), dtype=np.int64)
        except (TypeError, ValueError) as error:
            raise InvalidTypeError(f"not a slice of rows: {rows!r} ({error})") from None

    @in_present_tiers
    def write(self, ids: object, rows: Any, field: str | None = None) -> None:
        """Write rows over those of `ids`; where an id repeats, its last row stays.

        Args:
            ids: row ids of any shape.
            rows: an array `ids.shape + (dim,)` for one field, or a dict from field to array; other
                fields of the records are kept.
            field: the field that an array is for; the first if None.

        Every read sees written rows at once; they are durable after `store.commit()`. Raises
        RowIndexError, InvalidTypeError or InvalidInputError before any change.
        """
        self._backing.home.door.check(write=True)
        if isinstance(rows, Mapping) and field is not None:
            raise InvalidInputError("give a dict of fields or field=, not both")
        try:
            if isinstance(field, list | tuple):
                raise InvalidTypeError(
                    f"write takes one field, not {field!r}; for several give a dict, "
                    "write(ids, {'weight': rows, 'age': ages})"
                )
            given = rows if isinstance(rows, Mapping) else {self._named(field): rows}
            on, access = self._backing, self._backing.access
            batch = self._batch(ids)
            columns = access.columns[tuple(given)] if given else None
            pieces = columns.pieces(given, batch, access.encoded, whole=True) if columns else []
            written = False
            while not written:
                placed = self._placed(batch)
                if placed is not batch and on.layout is access.layout:
                    access = on.access  # the table may have grown
                written = access.write(placed, pieces)
        except INTERNAL as error:
            raise internal_error(error) from error

    def __setitem__(self, ids: IntegerArrayLike | Tensor | slice, rows: Any) -> None:
        """Write the first field of some rows, or a dict of fields; see `write`, `__getitem__`.

        As in NumPy, one row is written to all of them, and so is one number.
        """
        if isinstance(ids, tuple):
            raise InvalidTypeError(
                f"table[{as_written(ids)}] is no choice of rows, which are written whole: give a "
                "list of ids; to change columns read rows, change them and write them back"
            )
        chosen = self._sliced(ids) if isinstance(ids, slice | EllipsisType) else ids
        given = rows if isinstance(rows, Mapping) else {self._named(None): rows}
        field = self._backing.layout.field
        self.write(chosen, {n: spread(values, field(n), chosen, n) for n, values in given.items()})

    @in_present_tiers
    def lease(self, ids: object) -> Lease:
        """Pin the distinct rows of a batch for a step; use it as a context manager.

        Promotes the rows that are missing. Raises what `read` raises.
        """
        try:
            access = self._backing.access
            return access.lease(self._batch(ids))
        except INTERNAL as error:
            raise internal_error(error) from error

    @in_present_tiers
    def _lease_and_read(self, ids: object, field: str) -> tuple[Lease, Any]:
        """Lease a batch, and return one field of the row of each id, as `expand` does."""
        try:
            access = self._backing.access
            return access.lease_and_read(self._batch(ids), field)
        except INTERNAL as error:
            raise internal_error(error) from error

    def _batch(self, ids: object, *, record: bool = True) -> Ids:
        """Check the ids of a batch, and add them to an open recording."""
        batch = self._backing.access.ids(ids)
        if record and self._backing.recording is not None:
            self._record(on_host(batch.rows))
        return batch

    def _record(self, rows: npt.NDArray[np.int64]) -> None:
        """Add a batch to the recording, or forget one that was closed: it costs waits on a GPU."""
        on = self._backing
        if on.recording is not None and not on.recording.add(rows):
            on.recording = None

    def _placed(self, batch: Ids) -> Ids:
        """Return a batch for a write; a table by key gives new keys rows."""
        return batch

    def record(self, path: str | os.PathLike[str]) -> Recording:
        """Record the ids of every batch to a new file, until the recording is closed.

        For `tierstore simulate` and `plan`. A batch is the ids of one call of `read`, `write` or
        `lease`; reads with `cache=False` are left out. On a GPU this waits for the ids of each
        batch. Raises ExistsError, and InvalidInputError while another recording is open.

        >>> with table.record("run.trace"):
        ...     train(table)
        """
        on = self._backing
        if on.recording is not None and not on.recording.closed:
            raise InvalidInputError(
                f"table {self.name!r} is being recorded to {on.recording.path}; close that first"
            )
        Table.any_recorded = True
        on.recording = Recording(path, self.spec.rows)  # a table by key has its capacity here
        return on.recording

    def warm(self, ids: object = None, *, counts: Any = None, progress: Shown = None) -> int:
        """Load rows into the host tier before their use; return how many are there.

        Args:
            ids: the rows to load, as many distinct ones as fit, the first of them.
            counts: instead, earlier uses of each row of the table, one number a row: the most used
                rows are loaded, and a policy by frequency starts from these counts.
            progress: called with rows done and in all; True shows a bar.

        Without either, loads the first rows of the table. Only speed changes; without a host tier,
        the call does nothing.
        """
        progress = shown(progress)
        host, extent = self._backing.space.host, self._backing.extent
        if host is None:
            report_nothing(progress)
            return 0
        rows, keys = rows_to_warm(self.rows, host.slots, ids, counts)
        with self._backing.home.door.use() as use:
            extent.epoch.check_open()

            def report(done: int, total: int) -> None:
                if progress is not None:
                    with use.interruptible():
                        progress(done, total)
                    extent.epoch.check_open()  # the callback may have ended it

            if keys is not None:
                host.map.prime(keys, extent.start)
            if not rows.size:
                report_nothing(report)
            return host.warm(extent.in_space(rows), report)

    def prefetch(self, ids: IntegerArrayLike | Tensor, *, window: int = 16) -> None:
        """Start bringing the rows of a coming batch into memory; returns at once.

        They stay until they are used, or until `window` newer batches were prefetched; on a GPU at
        most 62. Never changes a result, and may be dropped if too many are waiting.
        """
        with internal_errors():
            self._backing.home.door.check()
            self._backing.access.prefetch(ids, window, self._backing.home.prefetcher)

    @overload
    def scan(
        self,
        field: str | None = None,
        start: int | None = None,
        stop: int | None = None,
        *,
        block_rows: int | None = None,
        raw: bool = False,
        damaged: list[int] | None = None,
    ) -> Iterator[npt.NDArray[Any]]: ...

    @overload
    def scan(
        self,
        start: int,
        stop: int,
        /,
        *,
        block_rows: int | None = None,
        raw: bool = False,
        damaged: list[int] | None = None,
    ) -> Iterator[npt.NDArray[Any]]: ...

    def scan(
        self,
        field: str | int | None = None,
        start: int | None = None,
        stop: int | None = None,
        *,
        block_rows: int | None = None,
        raw: bool = False,
        damaged: list[int] | None = None,
    ) -> Iterator[npt.NDArray[Any]]:
        """Yield rows `start:stop` of a field in order, in blocks `(n, dim)` as `read` returns them.

        Args:
            field: the field; the first if None, or if the call is `scan(start, stop)`.
            start: the first row; None begins with row 0.
            stop: the row after the last; None includes the last row.
            block_rows: rows of a block; None chooses.
            raw: yield values as they are stored: bfloat16 as its bits, uint16.
            damaged: a list to which damaged rows are added; they are zeros in the blocks. Without
                the list they raise CorruptRowError.

        Uncommitted rows are included; the caches keep their contents. Arguments are checked at
        once. If the table gets other fields or rows meanwhile, or rows of a table by key get other
        keys, the next block raises ClosedError.
        """
        if field is not None and not isinstance(field, str):
            if start is None or stop is not None:
                raise InvalidTypeError(
                    f"a field is given by name, not {field!r}; for rows give both ends as in "
                    "scan(start, stop), or scan(start=...) or scan(stop=...)"
                )
            field, start, stop = None, field, start
        name = self._named(field)
        start = _whole(0 if start is None else start, "start")
        stop = _whole(self.rows if stop is None else stop, "stop")
        if not 0 <= start <= stop <= self.rows:
            raise InvalidInputError(f"rows {start}:{stop} are not within 0:{self.rows}")
        if block_rows is None:
            block_rows = max(1, _SCAN_BYTES // self._backing.layout.record_bytes)
        elif _whole(block_rows, "block_rows") < 1:
            raise InvalidInputError(f"a block has at least one row, not {block_rows}")
        if damaged is not None and not isinstance(damaged, list):
            raise InvalidTypeError(f"damaged is a list to add rows to, not {damaged!r}")
        extent, blocks = self._backing.extent, range(start, stop, block_rows)
        return self._scan(extent, extent.epoch.names, name, blocks, stop, damaged, raw=raw)

    def _scan(
        self,
        extent: Extent,
        names: int,
        name: str,
        starts: range,
        stop: int,
        damaged: list[int] | None,
        *,
        raw: bool,
    ) -> Iterator[npt.NDArray[Any]]:
        item, lo, hi = self._backing.spans[name]
        for begin in starts:
            end = min(begin + starts.step, stop)
            data = self._block(extent, names, begin, end, lo, hi, damaged)
            rows = np.arange(begin, end, dtype=np.int64)
            yield (
                data.view(item.storage)
                if raw
                else from_bytes(data, item, Ids(rows, rows.shape, "numpy"))
            )

    def topk(
        self,
        queries: Any,
        k: int,
        field: str | None = None,
        *,
        exclude: Sequence[Any] | None = None,
        metric: Literal["dot", "cosine"] = "dot",
    ) -> tuple[Any, Any]:
        """Return the rows with the largest dot products or cosines, exactly, reading each row once.

        Args:
            queries: `(n, dim)`, an array or a tensor.
            k: how many rows for each.
            field: the field they are multiplied with; the first if None.
            exclude: for each query the rows to leave out of its result, such as known likes: arrays
                or lists of row ids; negative ids are ignored.
            metric: "dot", or "cosine", which is 0 for a vector of zeros.

        Returns scores `(n, k)`, float32, and row ids `(n, k)`, int64, the best first and of equal
        ones the lowest row first: tensors for tensors. If fewer rows than `k` are left, the rest is
        -inf and -1. Uncommitted rows count. Products are float32, computed on the GPU if the store
        was opened with one.
        """
        name, k = self._named(field), _whole(k, "k")
        dim = self._backing.layout.field(name).dim
        given = queries
        if is_torch(queries):
            given = as_dense(queries, "queries").detach().cpu()
            given = (given if given.is_complex() else given.float()).resolve_conj().numpy()
        check_unmasked(given, "queries")
        try:
            numbers = np.asarray(given)
            wanted = np.asarray(numbers.real, np.float32)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(f"queries are no array of numbers: {error}") from None
        if numbers.dtype.kind == "c":
            raise InvalidTypeError("queries are complex; give real numbers")
        if wanted.ndim != 2 or wanted.shape[1] != dim:
            raise InvalidInputError(
                f"queries are (n, {dim}), not {wanted.shape}; give a single one as query[None]"
            )
        if k < 1:
            raise InvalidInputError(f"k is at least 1, not {k}")
        if metric not in ("dot", "cosine"):
            raise InvalidInputError(f"metric must be 'dot' or 'cosine', not {metric!r}")
        cosine = metric == "cosine"
        excluded = excluded_pairs(exclude, len(wanted), self.rows)
        gpu = self._backing.space.gpu
        with nullcontext() if gpu is None else gpu.device.current():
            arrays = np if gpu is None else gpu.device.arrays
            best = Best(wanted, k, excluded, cosine=cosine, arrays=arrays)
            rows = min(best.block_rows, max(1, _SCAN_BYTES // self._backing.layout.record_bytes))
            for number, block in enumerate(self.scan(name, block_rows=rows)):
                best.add(number * rows, np.asarray(block, np.float32))
            scores, ids = best.scores, best.ids
            if gpu is not None:
                scores, ids = gpu.device.download(scores), gpu.device.download(ids)
        if not is_torch(queries):
            return scores, ids
        import torch

        return (
            torch.from_numpy(scores).to(queries.device),
            torch.from_numpy(ids).to(queries.device),
        )

    def _block(
        self,
        extent: Extent,
        names: int,
        begin: int,
        end: int,
        lo: int,
        hi: int,
        damaged: list[int] | None,
    ) -> npt.NDArray[np.uint8]:
        """Return bytes `lo:hi` of some records.

        Raises ClosedError if the table has other tiers, or the rows of a table by key other keys
        than at the number of names.
        """
        rows = np.arange(begin, end, dtype=np.int64)
        out = np.empty((rows.size, hi - lo), np.uint8)
        on = self._backing
        with on.access.using():
            extent.epoch.check_open()
            if self.spec.keys is not None and (why := on.renamed_since(names)):
                raise ClosedError(
                    f"{why} while this call read the rows of table {self.name!r}; repeat it"
                )
            space, held = on.space, extent.in_space(rows)
            space.flush_gpu()
            records = space.records(extent)
            if damaged is None:
                records.read(held, out, lo, hi, admit=False)
            else:
                bad = _read_sound(records, held, out, lo, hi)
                damaged += [row - extent.start for row in bad]
            extent.tier.let_go(rows)
        return out

    @property
    def device(self) -> str:
        """The device of the nearest tier and of torch rows, such as "cpu" or "cuda:0"."""
        return self._backing.access.place

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the table itself."""
        return self

    def __reduce__(self) -> tuple[Callable[..., Table], tuple[object, str]]:
        """Pickle a table that is only read as what it was opened from, and its name.

        Each process that unpickles it opens that again, a store at the same version.
        """
        home = self._backing.home
        return operator.getitem, (home if home.store is None else home.store, self.name)

    def stats(self) -> dict[str, TierStats]:
        """Return copies of the counters of each tier, the nearest first."""
        on = self._backing
        with on.access.using():
            on.extent.epoch.check_open()
            return Counters(on.space.stats(on.extent))

    def occupancy(self) -> dict[str, Occupancy]:
        """Return how full the host tier is, under "host"; empty where there is none.

        Tables whose records are equally long share the tier, unless a budget keeps one apart: the
        numbers are those of all of them.
        """
        on = self._backing
        with on.access.using():
            on.extent.epoch.check_open()
            return on.space.occupancy()


def _read_sound(
    tier: Nearest,
    rows: npt.NDArray[np.int64],
    out: npt.NDArray[np.uint8],
    lo: int,
    hi: int,
) -> list[int]:
    """Read the undamaged rows of a space, zero the others in `out` and return those."""
    try:
        tier.read(rows, out, lo, hi, admit=False)
    except CorruptStoreError:
        if rows.size == 1:
            out[:] = 0
            return [int(rows[0])]
        half = rows.size // 2
        return [
            *_read_sound(tier, rows[:half], out[:half], lo, hi),
            *_read_sound(tier, rows[half:], out[half:], lo, hi),
        ]
    return []


def _each(out: Any, names: Sequence[str]) -> Mapping[str, Any]:
    """Return what `out` has for each of some fields; it must have nothing else."""
    if not isinstance(out, Mapping):
        raise InvalidTypeError("out is a dict from field to array where `field` is a list")
    if set(out) != set(names):
        raise InvalidInputError(
            f"out holds {', '.join(map(repr, out)) or 'no field'}, but the fields read are "
            f"{', '.join(map(repr, names)) or 'none'}"
        )
    return out


def _whole(number: object, what: str) -> int:
    if isinstance(number, bool) or not isinstance(number, int | np.integer):
        raise InvalidTypeError(f"{what} is a whole number, not {number!r}")
    return int(number)


def _instead(index: tuple[Any, ...]) -> str:
    """Return the replacement for several indices."""
    ways = []
    if index and all(isinstance(each, int | np.integer) for each in index):
        ways.append(f"give rows as a list, table[{list(map(int, index))}]")
    if len(index) == 2:
        rows, columns = map(as_written, index)
        ways.append(f"take columns of what is read, table[{rows}][..., {columns}]")
    return " or ".join(ways) or "give a list of ids, or a slice"


# -- what layers, optimizers and lookups of several tables ask of tables, and have them do; what a
# step asks is of C


class Naming:
    """What the rows of a table mean when this is made: asked later, it says whether they still do.

    That is not so after a removal of keys or a rollback, for example; see `Epoch`.
    """

    __slots__ = ("_epoch", "_names", "_table")

    def __init__(self, table: Table) -> None:
        """Note what the rows mean now."""
        self._table = table
        self._epoch = table._backing.extent.epoch
        self._names = self._epoch.names

    def lost(self) -> str:
        """Return why rows may mean something else by now; empty if they do not."""
        return self._table._backing.extent.epoch.renamed_since(self._names)

    def replaced(self) -> bool:
        """Whether rows have got another meaning, by a change that is over."""
        now = self._table._backing.extent.epoch
        return now is not self._epoch and not now.names_hold(self._names)


def shape_of(table: Table) -> tuple[object, ...]:
    """Return a key that is equal for tables whose records have the same fields, at one place."""
    layout = table._backing.layout
    return tuple((name, item.dim, item.form, layout.span(name)) for name, item in layout.fields)


def alike(table: Table, field: str) -> tuple[object, ...]:
    """Return a key that is equal for tables that one lookup and one step can serve.

    They share tiers, and their records have the same fields in the same places.
    """
    return table._backing.space, shape_of(table), field


class Scalars:
    """The scalars of some tables, which all change in the same way; see `Table.scalars`.

    Looking at them notes no change, as `Table.scalars` does. Each call takes as long for many
    tables as C code takes, since a step of an optimizer makes it.

    Attributes:
        get: returns one scalar of the first table, or what is given for it; as `dict.get`.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        """Look at tables, at least one."""
        self._tables = tables
        self._names = dict.fromkeys([table.name for table in tables])
        self._each = [table._backing.scalars for table in tables]
        self.get: Callable[..., Any] = self._each[0].get

    def of(self, numbers: Sequence[int]) -> Scalars:
        """Return those of some of the tables."""
        return Scalars([self._tables[number] for number in numbers])

    def of_table(self, number: int, keys: Iterable[str]) -> tuple[Any, ...]:
        """Return scalars of one table, None for each that it does not have."""
        return tuple(map(self._each[number].get, keys))

    def of_each(self, key: str) -> Callable[[], Iterator[Any]]:
        """Return a call for a scalar of each table; KeyError where a table does not have it."""
        return functools.partial(map, operator.itemgetter(key), self._each)

    def agree(self, keys: Iterable[str]) -> bool:
        """Whether some scalars are equal in all of the tables."""
        for key in keys:
            try:
                found = list(map(operator.itemgetter(key), self._each))
            except KeyError:  # before the first step
                found = [each.get(key) for each in self._each]
            if found.count(found[0]) < len(found):
                return False
        return True

    def update(self, numbers: Mapping[str, Any]) -> None:
        """Set scalars of every table."""
        for each in self._each:
            each.update(numbers)
        self._tables[0]._backing.home.touched.scalars.update(self._names)


def scalar(table: Table, name: str, default: Any = None) -> Any:
    """Return one scalar of a table; noting no change, as `Table.scalars` does."""
    return table._backing.scalars.get(name, default)


home_of: Callable[[Any], Home] = operator.attrgetter("_backing.home")
"""Return what a table belongs to, or several that are looked up as one."""

door_of: Callable[[Any], Door] = operator.attrgetter("_backing.home.door")
"""Return the door of what a table belongs to."""

files_of: Callable[[Table], Generation] = operator.attrgetter("_backing.generation")
"""Return the files of the open version of a table."""

access_of: Callable[[Table], Access] = operator.attrgetter("_backing.access")
"""Return the present access to the rows of a table."""

extent_of: Callable[[Table], Extent] = operator.attrgetter("_backing.extent")
"""Return the present rows of a table in its space."""


renamed_since: Callable[[Any], Callable[..., str]] = operator.attrgetter("_backing.renamed_since")
"""Return what says why rows of a table, or of several, may mean something else; see `Backing`."""

together: Callable[[Any], AbstractContextManager[Any]] = Table._together
"""Enter the store of a table once for several calls of this thread; see `Access.together`."""

lease_and_read: Callable[[Any, object, str], tuple[Lease, Any]] = Table._lease_and_read
"""Lease a batch, and return one field of the row of each id, as `Lease.expand` does."""


def check_open(table: Any, *, write: bool = False) -> None:
    """Raise ClosedError if what a table belongs to was closed, ReadOnlyError if it is only read.

    The latter with `write` alone. The table may be several that are looked up as one.
    """
    table._backing.home.door.check(write=write)


def unmoving(table: Any) -> AbstractContextManager[Any]:
    """Return a context for writes, in which no row of a table moves or gets another meaning."""
    context: AbstractContextManager[Any] = table._backing.home.door.use(write=True)
    return context


def is_of(table: Table, store: object) -> bool:
    """Whether a table is of this store."""
    return table._backing.home.store is store


def where_from(table: Table) -> str:
    """Return what distinguishes a table from others of its name, in every process."""
    on = table._backing
    store = on.home.store
    if store is None:
        place: str = cast(Any, on.generation).place  # see `Unversioned`
        return place
    return f"the store {store.uuid}"


def reads_each(table: Table, nbytes: int) -> bool:
    """Whether reading a row for each id, so many bytes, is faster than finding the distinct rows.

    It is on the host, if it needs little memory.
    """
    return table._backing.space.gpu is None and nbytes <= _MUCH


# -- whole records, as what copies, changes or carries tables takes them


def records_in(table: Table, damaged: list[int] | None = None) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield all records of a table in order, in blocks `(n, record_bytes)`.

    `damaged` is as in `Table.scan`.
    """
    on = table._backing
    extent, width = on.extent, on.layout.record_bytes
    names, step = extent.epoch.names, max(1, _SCAN_BYTES // width)
    for begin in range(0, table.rows, step):
        stop = min(begin + step, table.rows)
        yield table._block(extent, names, begin, stop, 0, width, damaged)


def read_records(table: Table, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Return the records of rows `(n, record_bytes)` of a table on the host."""
    on = table._backing
    access, width = on.access, on.layout.record_bytes
    found: npt.NDArray[np.uint8] = access.read(access.ids(ids), 0, width, admit=False)
    return found


def write_records(table: Table, ids: npt.NDArray[np.int64], records: npt.NDArray[np.uint8]) -> None:
    """Write records `(n, record_bytes)` over those of rows of a table on the host."""
    on = table._backing
    if on.space.gpu is not None:
        raise InvalidInputError("open the store without a device to write whole records")
    on.access.write(on.access.ids(ids), [(0, on.layout.record_bytes, records)])
