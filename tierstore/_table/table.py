"""A table: rows by id. Ids are checked and fields become byte ranges here, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from tierstore._counters import Occupancy, TierStats
from tierstore._disk.base import Progress
from tierstore._disk.delta import Delta
from tierstore._disk.generation import Generation
from tierstore._disk.keys import Keys
from tierstore._disk.manifest import TableInfo
from tierstore._door import INTERNAL, Door, internal_error
from tierstore._info import TableInformation
from tierstore._table.address import Ids, on_host
from tierstore._table.gpu import DeviceAccess
from tierstore._table.host import Access, HostAccess, Lease, assembled
from tierstore._table.prefetch import Prefetcher
from tierstore._table.tiers import Tiers
from tierstore._table.trace import Recording
from tierstore._table.warming import rows_to_warm
from tierstore.errors import CorruptStoreError, InvalidInputError, InvalidTypeError
from tierstore.spec import Field, TableSpec

if TYPE_CHECKING:
    from tierstore._store.store import Store

__all__ = ["Owner", "Table"]

_SCAN_BYTES = 8 << 20


class Owner(Protocol):
    """What the tables of a store share; `store` is None for a table in memory alone."""

    guard: Door
    prefetcher: Prefetcher
    sync_checks: bool

    @property
    def store(self) -> Store | None:
        """Return the store."""


class Table:
    """Rows of a store, read and written by id; where a row lies at the moment never shows.

    NumPy ids (or lists) give and take NumPy rows, torch ids torch rows, CuPy ids CuPy rows. Ids are
    integers of any width and shape; floats and booleans are a TypeError, ids outside the table an
    IndexError that names the first. Tables come from a store: `store["item"]`.
    """

    def __init__(self, owner: Owner, name: str, generation: Generation, tiers: Tiers) -> None:
        """Bind the tiers of a table, which are over the generation's."""
        self.name = name
        self._owner = owner
        self._recording: Recording | None = None
        self.attach(generation, tiers)

    def attach(self, generation: Generation, tiers: Tiers) -> None:
        """Use these tiers from now on: the table grew, or has other fields."""
        self.generation = generation
        self.tiers = tiers
        self.disk = generation.tier
        self.host = tiers.host
        self._layout = generation.info.spec.layout
        self._access = self._make_access()
        self._keys: Keys | None = None
        self.scalars: dict[str, Any] = dict(generation.info.scalars)
        """Values that belong to the whole table; committed and rolled back with its rows."""

    def _make_access(self) -> Access:
        guard, gpu = self._owner.guard, self.tiers.gpu
        if gpu is None:
            return HostAccess(self.tiers, self._layout, guard)
        checks = self._owner.sync_checks
        return DeviceAccess(gpu, self._layout, guard, self.name, sync_checks=checks)

    @property
    def spec(self) -> TableSpec:
        """What the table is made of."""
        return self.generation.info.spec

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.spec.rows

    @property
    def fields(self) -> dict[str, Field]:
        """The fields of a record, in order; the first is the one meant when none is named."""
        return dict(self._layout.fields)

    @property
    def dim(self) -> int:
        """Elements of the first field."""
        return self._layout.fields[0][1].dim

    @property
    def dtype(self) -> str:
        """Element type of the first field."""
        return self._layout.fields[0][1].dtype

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.rows

    def __repr__(self) -> str:
        """Name the table and its shape."""
        fields = ", ".join(f"{name} {f.dim} {f.dtype}" for name, f in self._layout.fields)
        return f"Table({self.name!r}, rows={self.rows}, {fields})"

    def _named(self, name: str | None) -> str:
        """Return a field's name, the first field's for None; raises UnknownNameError."""
        if name is None:
            return self._layout.fields[0][0]
        self._layout.field(name)
        return name

    def read(
        self,
        ids: object,
        field: str | None = None,
        fields: Sequence[str] | None = None,
        *,
        transient: bool = False,
        tensors: bool = False,
    ) -> Any:
        """Return the rows of `ids` as a fresh array of shape `ids.shape + (dim,)`.

        Args:
            ids: row ids of any shape; duplicates are fine.
            field: the field to read; the first if None.
            fields: several fields, returned as a dict from name to array.
            transient: the rows are not to be kept in memory for this: for rows that are read once.
            tensors: torch tensors for NumPy ids too, where the table is: nothing waits for a GPU.

        bfloat16 fields come as float32 where ids are NumPy, as bfloat16 otherwise. Raises
        RowIndexError, InvalidTypeError, UnknownNameError, and CorruptRowError rather than return
        damaged rows. On a GPU, ids that are there are checked there: rows of bad ids come out NaN,
        and the next call that waits raises.
        """
        try:
            if field is not None and fields is not None:
                raise InvalidInputError("give field= or fields=, not both")
            if fields is None:
                name = self._named(field)
                lo, hi = self._layout.span(name)
                batch = self._to_read(ids, transient=transient, tensors=tensors)
                data = self._access.read(batch, lo, hi, admit=not transient)
                return self._access.to_array(data, self._layout.field(name), batch)
            names = [self._named(name) for name in fields]
            if not names:
                self._access.ids(ids)
                return {}
            batch = self._to_read(ids, transient=transient, tensors=tensors)
            spans = [self._layout.span(name) for name in names]
            lo, hi = min(begin for begin, _ in spans), max(end for _, end in spans)
            data = self._access.read(batch, lo, hi, admit=not transient)
            return {
                name: self._access.to_array(
                    data[:, begin - lo : end - lo], self._layout.field(name), batch
                )
                for name, (begin, end) in zip(names, spans, strict=True)
            }
        except INTERNAL as error:
            raise internal_error(error) from error

    def __getitem__(self, ids: object) -> Any:
        """Return `read(ids)`."""
        return self.read(ids)

    def write(self, ids: object, rows: Any, field: str | None = None) -> None:
        """Write rows over those of `ids`; where an id repeats, its last row stays.

        Args:
            ids: row ids of any shape.
            rows: an array `ids.shape + (dim,)` for one field, or a dict from field to array; other
                fields of the records are kept.
            field: the field that an array is for; the first if None.

        What is written is seen by every read at once and is durable after `store.commit()`. Raises
        RowIndexError, InvalidTypeError or InvalidInputError before anything has changed.
        """
        self._owner.guard.check(write=True)
        if isinstance(rows, Mapping) and field is not None:
            raise InvalidInputError("give a dict of fields or field=, not both")
        try:
            given = rows if isinstance(rows, Mapping) else {self._named(field): rows}
            batch = self._batch(ids)
            pieces = [
                (
                    *self._layout.span(name),
                    self._access.to_bytes(values, self._layout.field(name), batch, name),
                )
                for name, values in given.items()
            ]
            if len(pieces) == len(self._layout.fields):
                pieces = [assembled(self._access, pieces, self._layout.record_bytes)]
            self._access.write(batch, pieces)
        except INTERNAL as error:
            raise internal_error(error) from error

    def __setitem__(self, ids: object, rows: Any) -> None:
        """Do `write(ids, rows)`."""
        self.write(ids, rows)

    def lease(self, ids: object) -> Lease:
        """Pin the distinct rows of a batch for a step; use it as a context manager.

        Promotes the rows that are missing. Raises what `read` raises.
        """
        try:
            return self._access.lease(self._batch(ids))
        except INTERNAL as error:
            raise internal_error(error) from error

    def _to_read(self, ids: object, *, transient: bool, tensors: bool) -> Ids:
        """Return ids for a read, which may still have to check them; see `Ids`."""
        later = transient or self._recording is None
        batch = self._access.ids(ids, later=True) if later else self._batch(ids)
        return batch.for_tensors() if tensors else batch

    def _batch(self, ids: object) -> Ids:
        """Check the ids of a batch, and record them where somebody asked for that."""
        batch = self._access.ids(ids)
        if self._recording is not None:
            self._recording.add(on_host(batch.rows))
        return batch

    def record(self, path: str | Path) -> Recording:
        """Record the ids of every batch to a new file, until the recording is closed.

        For `tierstore simulate` and `plan`. A batch is what one call of `read`, `write` or `lease`
        is given; reads with `transient=True` are left out. On a GPU this waits for the ids of each
        batch. Raises ExistsError, and InvalidInputError while another recording is open.

        >>> with table.record("run.trace"):
        ...     train(table)
        """
        if self._recording is not None and not self._recording.closed:
            raise InvalidInputError(
                f"table {self.name!r} is being recorded to {self._recording.path}; close that first"
            )
        self._recording = Recording(path, self.rows)
        return self._recording

    def warm(
        self, ids: object = None, *, counts: Any = None, progress: Progress | None = None
    ) -> int:
        """Load rows into the host tier before they are asked for; return how many are there.

        Args:
            ids: the rows to load, as many distinct ones as fit, the first of them.
            counts: or else how often each row of the table was used before, one number a row: the
                most used are loaded, and a policy that goes by frequency starts from there.
            progress: called with rows done and in all.

        With neither, the first rows of the table. Only speed changes; without a host tier, nothing.
        """
        if self.host is None:
            return 0
        rows, keys = rows_to_warm(self.host, ids, counts)
        with self._owner.guard.use() as use:

            def report(done: int, total: int) -> None:
                if progress is not None:
                    with use.interruptible():
                        progress(done, total)

            if keys is not None:
                self.host.map.prime(keys)
            return self.host.warm(rows, report)

    def prefetch(self, ids: object, window: int = 16) -> None:
        """Start bringing the rows of a coming batch into memory; returns at once.

        They stay until they are used, or until `window` newer batches were prefetched; on a GPU at
        most 62. Never changes a result, and may be dropped where too many are waiting.
        """
        self._owner.guard.check()
        self._access.prefetch(ids, window, self._owner.prefetcher)

    def scan(
        self,
        start: int = 0,
        stop: int | None = None,
        field: str | None = None,
        block_rows: int | None = None,
        *,
        damaged: list[int] | None = None,
    ) -> Iterator[npt.NDArray[Any]]:
        """Yield rows `start:stop` in order, in blocks `(n, dim)` of the stored type.

        bfloat16 comes as uint16 bits. Uncommitted rows are seen; the caches keep what they hold.
        Rows that are damaged raise CorruptRowError, or are zeros and added to a list `damaged`.
        """
        name = self._named(field)
        stop = self.rows if stop is None else stop
        if not 0 <= start <= stop <= self.rows:
            raise InvalidInputError(f"rows {start}:{stop} are not within 0:{self.rows}")
        lo, hi = self._layout.span(name)
        step = block_rows or max(1, _SCAN_BYTES // self._layout.record_bytes)
        for begin in range(start, stop, step):
            yield self._block(begin, min(begin + step, stop), lo, hi, damaged).view(
                self._layout.field(name).storage
            )

    def records(self, damaged: list[int] | None = None) -> Iterator[npt.NDArray[np.uint8]]:
        """Yield all records in order, in blocks `(n, record_bytes)`; `scan` says of `damaged`."""
        step, width = max(1, _SCAN_BYTES // self._layout.record_bytes), self._layout.record_bytes
        for begin in range(0, self.rows, step):
            yield self._block(begin, min(begin + step, self.rows), 0, width, damaged)

    def _block(
        self, begin: int, end: int, lo: int, hi: int, damaged: list[int] | None
    ) -> npt.NDArray[np.uint8]:
        rows = np.arange(begin, end, dtype=np.int64)
        out = np.empty((rows.size, hi - lo), np.uint8)
        with self._owner.guard.use():
            self.tiers.settle()
            if damaged is None:
                self.tiers.below.read(rows, out, lo, hi, admit=False)
            else:
                damaged += self._read_sound(rows, out, lo, hi)
        return out

    def _read_sound(
        self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8], lo: int, hi: int
    ) -> list[int]:
        """Read the rows that are whole, zero the others in `out` and return them."""
        try:
            self.tiers.below.read(rows, out, lo, hi, admit=False)
        except CorruptStoreError:
            if rows.size == 1:
                out[:] = 0
                return [int(rows[0])]
            half = rows.size // 2
            return [
                *self._read_sound(rows[:half], out[:half], lo, hi),
                *self._read_sound(rows[half:], out[half:], lo, hi),
            ]
        return []

    @property
    def keys(self) -> Keys | None:
        """The external keys of the rows, or None: `keys[5]`, `keys[0:10]`, `keys[array_of_ids]`."""
        if self._keys is None:
            self._keys = self.generation.keys()
        return self._keys

    def forget_keys(self) -> None:
        """Open the keys anew when they are next asked for: there are others."""
        self._keys = None

    def lookup(self, keys: object) -> npt.NDArray[np.int64]:
        """Return the ids of external keys, in their shape; UnknownNameError names a missing one."""
        if self.keys is None:
            raise InvalidInputError(f"table {self.name!r} has no keys; see Store.set_keys")
        return self.keys.lookup(keys)

    @property
    def store(self) -> Store:
        """The store of the table; raises InvalidInputError for a table in memory alone."""
        if self._owner.store is None:
            raise InvalidInputError(
                f"table {self.name!r} lives in memory alone and has no store; tierstore.create "
                "makes a store, whose tables can be committed, grown and found again"
            )
        return self._owner.store

    @property
    def device(self) -> str:
        """Where the nearest tier is, and torch rows come to: "cpu", "cuda:0", …"""
        return "cpu" if self.tiers.gpu is None else self.tiers.gpu.device.torch_name

    def pointer(self) -> dict[str, Any]:
        """Return a pointer to the table for a `state_dict`: path, uuid, version, table."""
        return {**self.store.state_dict(), "table": self.name}

    def check_pointer(self, state: Mapping[str, Any]) -> None:
        """Check a pointer against this table's store, which must be the one it is to, or a copy.

        Warns if the store is at another version. Raises InvalidInputError.
        """
        self.store.load_state_dict(state)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled."""
        raise InvalidTypeError(
            f"a table cannot be pickled; pass the store's path, or a store opened for reading, and "
            f"take store[{self.name!r}] from that"
        )

    def stats(self) -> dict[str, TierStats]:
        """Return copies of the counters of each tier, the nearest first."""
        with self._owner.guard.use():
            return self.tiers.stats()

    def occupancy(self) -> dict[str, Occupancy]:
        """Return how full the host tier is, under "host"; empty where there is none."""
        with self._owner.guard.use():
            return self.tiers.occupancy()

    def information(self) -> TableInformation:
        """Return the table's part of `store.info()`."""
        deltas = self.disk.deltas
        return TableInformation(
            name=self.name,
            rows=self.rows,
            dim=self.dim,
            dtype=self.dtype,
            fields=tuple(
                {"name": name, "dim": item.dim, "dtype": item.dtype}
                for name, item in self._layout.fields
            ),
            backend=self.spec.backend,
            record_bytes=self._layout.record_bytes,
            disk_bytes=self.generation.disk_bytes,
            delta_rows=sum(delta.info.rows for delta in deltas),
            delta_bytes=sum(delta.info.size for delta in deltas),
            base=self.generation.base_path,
            index_bytes=self.disk.index_bytes,
            tiers=self.tiers.information(),
        )

    def can_follow(self, info: TableInfo) -> bool:
        """Whether a reader's table need not be opened anew for what a later manifest says of it.

        A GPU tier always is.
        """
        return self.tiers.gpu is None and self.generation.is_of(info)

    def follow(self, info: TableInfo, deltas: Sequence[Delta], folded: int) -> None:
        """Show, for a reader, what a later manifest says, whose deltas were opened; ends leases."""
        self.tiers.forget(self.generation.follow(info, deltas, folded))
        self.scalars = dict(info.scalars)

    def discard(self) -> None:
        """Drop what was not committed; for the store, within its guard."""
        self._owner.prefetcher.settle()
        self.tiers.discard()
        self.scalars = dict(self.generation.info.scalars)

    def close(self) -> None:
        """End leases, give back memory and files; the next writer sweeps up what is uncommitted."""
        self._owner.prefetcher.settle()
        self.tiers.close()
        self.generation.close()
