"""A table by key: its rows are read, written and trained by keys, which get rows as they arrive."""

from __future__ import annotations

import dataclasses
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import EllipsisType
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, cast

import numpy as np
import numpy.typing as npt

from tierstore._disk.generation import Generation, first_records
from tierstore._keys.admission import Candidates
from tierstore._keys.given import unknown_keys
from tierstore._keys.growing import Asked, KeyMap
from tierstore._keys.numbers import RowNumbers
from tierstore._progress import Progress, Shown, shown
from tierstore._table import expiry, merging
from tierstore._table.access import Lease
from tierstore._table.address import Ids, as_dense, as_written, host_ids, is_cupy, is_torch, on_host
from tierstore._table.backing import Backing
from tierstore._table.gpu import DeviceAccess
from tierstore._table.home import KeyedHome
from tierstore._table.missing import Missing, check_fits, checked
from tierstore._table.table import Naming, Table
from tierstore._tiers.gpu.keys import DeviceKeys, Guess
from tierstore._tiers.space import Extent, Space
from tierstore.errors import (
    ClosedError,
    InvalidInputError,
    InvalidTypeError,
    RowIndexError,
    UnknownNameError,
)
from tierstore.spec import EXTENT_ROWS, USES, TableSpec
from tierstore.stats import TableInformation, TierInformation

_BLOCK_ROWS = 1 << 16
_GROWTH = 8
"""A table without a capacity grows by one part in so many."""
OTHERWISE = "; missing='init' reads first rows of such keys, and missing=0.0 zeros"


Rows = npt.NDArray[np.int64]
_T = TypeVar("_T")


class Resolved(NamedTuple):
    """The rows of a batch of keys.

    Attributes:
        rows: flat int64, -1 for a key without a row; on the device if the keys are there.
        shape, kind: of the keys.
        unknown: the positions of keys without a row, ascending.
        asked: those keys.
    """

    rows: Any
    shape: tuple[int, ...]
    kind: str
    unknown: npt.NDArray[np.intp]
    asked: Asked

    def known_or_first(self) -> Any:
        """Return the rows in the shape of the keys, row 0 for keys without one."""
        if self.unknown.size:
            self.rows[self.rows < 0] = 0
        return self.rows.reshape(self.shape)


class RowKeys(Sequence[Any]):
    """The keys of a table by key, in the order of its rows."""

    def __init__(self, table: KeyedTable) -> None:
        """Show the keys of a table, including later ones."""
        self._table = table
        self.kind: str = "str" if table.spec.keys == "text" else "int64"

    def settled(self) -> SettledKeys:
        """Return the present keys, without later ones, while rows keep them; see SettledKeys."""
        return SettledKeys(self._table)

    def __repr__(self) -> str:
        return f"RowKeys({len(self)} of {self.kind})"

    def __len__(self) -> int:
        """Return the number of keys."""
        return self._table.rows

    def __contains__(self, key: object) -> bool:
        """Whether a row has the key."""
        return key in self._table

    def lookup(self, keys: object, *, missing: int | None = None) -> npt.NDArray[np.int64]:
        """Return the row of each key; see `KeyedTable.lookup`."""
        return self._table.lookup(keys, missing=missing)

    def __getitem__(self, index: Any) -> Any:
        """Return the key of a row, or an array of keys for a slice or an array of rows."""
        rows = range(len(self))
        if isinstance(index, slice):
            return self._table.keys_of(np.arange(*index.indices(len(rows))))
        if np.ndim(index):
            return self._table.keys_of(index)
        return self._table.keys_of(rows[operator.index(index)]).item()


class SettledKeys(RowKeys):
    """The keys that a table by key has now; reading them raises ClosedError once rows have others.

    That is after a removal, a rollback or a refresh, in whatever thread: what was read of the rows
    before belongs to keys that are not there any more.
    """

    def __init__(self, table: KeyedTable) -> None:
        """Show the keys of the rows that a table has now."""
        super().__init__(table)
        with table._map.lock:  # which a removal holds from before its epoch until after its end
            self._naming = Naming(table)
            self._count = table.rows

    def __len__(self) -> int:
        """Return the number of keys."""
        return self._count

    def __getitem__(self, index: Any) -> Any:
        """Return the key of a row, or an array of keys for a slice or an array of rows."""
        try:
            return super().__getitem__(index)
        finally:  # rows that are gone are errors of another kind
            self.check_settled()

    def check_settled(self) -> None:
        """Raise ClosedError if rows may have other keys by now."""
        if why := self._naming.lost():
            raise ClosedError(
                f"{why} while this call read the keys of table {self._table.name!r}; repeat it"
            )


class KeyedBacking(Backing):
    """What a table by key stands on."""

    by_key = True
    home: KeyedHome

    def attach(
        self, generation: Generation, space: Space, extent: Extent, renamed: str = ""
    ) -> None:
        """Use these files from now on, and the map of keys on the device."""
        super().attach(generation, space, extent, renamed)
        if space.gpu is not None and self.spec.keys == "int64":
            with space.on_device():  # now: a budget beyond the device's memory fails at once
                space.gpu.keys(self.name, self.spec.rows)
        generation.fill_ahead()

    @property
    def rows(self) -> int:
        """Number of keys that have a row."""
        return self.generation.keys_in_use

    def information(self, tiers: tuple[TierInformation, ...]) -> TableInformation:
        """Return the table's part of `store.info()`, with its keys."""
        before = self.home.keys_before(self.name)
        return dataclasses.replace(
            super().information(tiers),
            # Known also without keys, and where partitions have their files.
            keys="int64" if self.spec.keys == "int64" else "str",
            capacity=self.spec.rows,
            added=None if before is None else self.rows - before,
        )


class RowsByNumber(Table):
    """The rows of a table by key, by their numbers."""

    @property
    def spec(self) -> TableSpec:
        """The spec of the table, with the rows that it has grown to."""
        return self._backing.generation.spec


class ByKey:
    """What every table by key says of keys, whichever rank has their rows."""

    def _rows_of(self, keys: object, *, add: bool = False) -> tuple[Asked, Rows]:
        """Check keys; return them with the number of the row of each, flat, -1 for none.

        With `add`, keys without a row get one.
        """
        raise NotImplementedError

    def _rows_for(self, keys: object) -> Any:
        """See `rows_for`."""
        raise NotImplementedError

    def _known_or_first(self, keys: object, field: str, *, train: bool) -> Any:
        """See `known_or_first`."""
        raise NotImplementedError

    def lookup(self, keys: object, *, missing: int | None = None) -> Rows:
        """Return the row number of each of `keys`: int64, of their shape.

        Keys without a row get `missing`; without it, UnknownNameError names the
        first three and how many there are.
        """
        asked, found = self._rows_of(keys)
        if missing is None and (found < 0).any():
            raise without_row(keys, found < 0)
        if missing is not None:
            found[found < 0] = missing
        return found.reshape(asked.shape)

    def contains(self, keys: object) -> npt.NDArray[np.bool_]:
        """Return for each of `keys` whether it has a row: bool, of their shape."""
        return self.lookup(keys, missing=-1) >= 0

    def get_or_add(self, keys: object) -> Rows:
        """Return the row number of each of `keys`, in their shape; adds those that have none.

        They get their first rows, as with `write`. Durable after `store.commit()`;
        `store.rollback()` removes them.
        """
        asked, found = self._rows_of(keys, add=True)
        return found.reshape(asked.shape)


class KeyedTable(ByKey, RowsByNumber):
    """A table whose rows belong to keys; `store["user"]` of `TableSpec(keys="int64")`.

    Keys are integers of 64 bits (uint64 by their bits) or texts, in arrays, tensors or lists of any
    shape. A key that was never written or trained reads as its first row, which is drawn from the
    seed and the key, and takes no row. Keys that are added are committed, rolled back and kept
    in versions with the rows. Rows are numbered in the order in which keys arrive, from 0 on;
    `scan`, `topk` and `by_row` go by these numbers.

    >>> user = store.create_table("hashes", tierstore.TableSpec(1000, 16, keys="int64"))
    >>> user.write([7, -5], np.ones((2, 16), np.float32))
    >>> user.rows, user.capacity
    (2, 1000)
    """

    _backing: KeyedBacking
    _lacked = True
    """Whether the device's map lacked keys of the last batch; true before the first."""

    @property
    def rows(self) -> int:
        """Number of keys that have a row."""
        return self._backing.rows

    @property
    def capacity(self) -> int:
        """Number of keys that the table can hold; `store.grow` changes it, or it grows itself."""
        return self.spec.rows

    @property
    def by_row(self) -> Table:
        """The same table by row numbers; those from `rows` on belong to no key yet."""
        if "_by_row" not in self.__dict__:
            self._by_row = RowsByNumber(self._backing)
        return self._by_row

    @property
    def _map(self) -> KeyMap:
        self._backing.home.door.check()  # before waiting for a thread that a forked child lacks
        keys = self._backing.generation.key_map
        if keys.half_removed:
            keys.check_whole()
        return keys

    # -- keys and rows

    @property
    def keys(self) -> RowKeys:  # type: ignore[override]
        """The keys by row, as `keys[5]`, `keys[0:10]` or `keys[array_of_rows]`."""
        return RowKeys(self)

    def __contains__(self, key: object) -> bool:  # type: ignore[override]
        """Whether a key has a row."""
        try:
            found = self.contains(key)
        except (InvalidInputError, InvalidTypeError):
            return False
        return found.ndim == 0 and bool(found)

    def _rows_of(self, keys: object, *, add: bool = False) -> tuple[Asked, Rows]:
        asked, _ = self._asked(keys)
        return asked, self._still_added(asked) if add else self._map.find(asked)

    def _still_added(self, asked: Asked) -> Rows:
        """Return the rows of keys, which is no use of them; keys without a row get one."""
        with self._still():
            return self._add(asked)

    def keys_of(self, rows: object) -> npt.NDArray[Any]:
        """Return the keys of rows, int64 or str objects, in the shape of `rows`.

        Raises RowIndexError for a row that belongs to no key.
        """
        keys = self._map
        with keys.lock:  # or another thread could remove some of these rows
            batch = host_ids(rows, len(keys))
            return keys.keys_of(batch.rows).reshape(batch.shape)

    def items(
        self, field: str | None = None, *, block_rows: int = _BLOCK_ROWS
    ) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        """Yield all keys with their rows of a field, `(n,)` and `(n, dim)`, in blocks.

        Keys that are added meanwhile are left out. Raises ClosedError once rows have other keys:
        after a removal, a rollback or a refresh, in whatever thread.
        """
        keys = self.keys.settled()
        return self._items(keys, self.scan(field, block_rows=block_rows))

    @staticmethod
    def _items(
        keys: SettledKeys, blocks: Iterator[npt.NDArray[Any]]
    ) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        """Yield keys with their rows, given blocks of all rows, which may be more by now, or fewer.

        So the keys are compared with what they were, not their number with that of rows.
        """
        begin = 0
        for block in blocks:
            end = min(begin + len(block), len(keys))
            if begin < end:
                yield keys[begin:end], block[: end - begin]
            begin = end
        keys.check_settled()

    def _asked(self, keys: object) -> tuple[Asked, str]:
        """Check a batch of keys; also return the kind of the resulting array."""
        kind = "numpy"
        if is_torch(keys):
            kind, keys = "torch", as_dense(keys, "the keys").numpy(force=True)
        elif is_cupy(keys):
            kind, keys = "cupy", keys.get()  # type: ignore[attr-defined]
        return self._map.asked(keys), kind

    def merge(
        self,
        other: KeyedTable,
        *,
        on_conflict: merging.Conflict = "newest",
        progress: Shown = None,
    ) -> int:
        """Take the rows of another table by key; return how many keys are new.

        Args:
            other: a table with keys of the same kind and the same fields, of this or another store;
                it is only read.
            on_conflict: how to treat a key that both tables have: "newest" takes the row of
                `other`, "keep" keeps the own one, "mean" the mean of both, of every field. Of
                tracked uses, "newest" and "mean" take the larger number and the later last one.
            progress: called with rows done and in all; True shows a bar.

        The last use of a key is as many commits ago as it is in `other`. Merged rows are durable
        after `store.commit()`. Raises InvalidInputError for tables that do not fit, before any
        change, and if there is no room for all keys; then some blocks of rows are merged and
        uncommitted.
        """
        if not isinstance(other, KeyedTable):
            raise InvalidTypeError(f"merge takes a table by key, not {other!r}")
        merging.check(self, other, on_conflict)
        return self._merged(other, on_conflict, shown(progress))

    def _merged(
        self,
        other: KeyedTable,
        on_conflict: str,
        progress: Progress | None,
        is_wanted: Callable[[Rows], npt.NDArray[np.bool_]] | None = None,
    ) -> int:
        """Take rows of a table that was checked; see `merging.merge`."""
        later = self._commits - other._commits
        others = other.keys.settled()
        return merging.merge(self, other, others, on_conflict, later, progress, is_wanted)

    @property
    def _commits(self) -> int:
        """How many versions the history of the table has."""
        return self._backing.home.commits

    # -- reading and writing

    def read(
        self,
        keys: Any,
        field: str | list[str] | tuple[str, ...] | None = None,
        *,
        cache: bool = True,
        as_tensor: bool = False,
        dtype: Any = None,
        raw: bool = False,
        out: Any = None,
        missing: Literal["raise", "init"] | float | None = None,
    ) -> Any:
        """Read the rows of `keys`, `keys.shape + (dim,)`; see `Table.read`. No key is added.

        `missing` says what keys without a row read as: "init" their first row, a number that value
        in each element, and "raise" is an UnknownNameError, a KeyError, which names the first
        three; then nothing is written into `out`. None is what `tierstore.open` was given: for a
        reader "raise", for a writer, which trains, "init".

        Raises InvalidTypeError for keys of another kind than the table's, and InvalidInputError for
        a number that a field cannot hold.
        """
        chosen = self._chosen(missing, field, raw=raw)
        given = self._batch(keys)

        def read() -> tuple[Resolved, Any]:
            found = self._resolved(given, self._map.find)
            if chosen == "raise" and found.unknown.size:
                raise without_row(keys, found.unknown, OTHERWISE)
            ids = self._like(found.known_or_first(), found.kind)
            return found, self.by_row.read(
                ids, field, cache=cache, as_tensor=as_tensor, dtype=dtype, raw=raw, out=out
            )

        resolved, found = while_named([self], read)
        if resolved.unknown.size:
            parts = found if isinstance(found, dict) else {self._named(_one(field)): found}
            self._fill(parts, resolved, chosen, raw=raw)
        return found

    def _chosen(
        self, missing: object, field: str | list[str] | tuple[str, ...] | None, *, raw: bool = False
    ) -> Missing:
        """Check what a read of some fields is to do about keys without a row."""
        owner = self._backing.home
        chosen = owner.missing
        if missing is not None:
            chosen = checked(missing, writable=owner.door.writable)
        if isinstance(chosen, float):
            names = field if isinstance(field, (list, tuple)) else [field]
            named = map(self._named, names)
            check_fits(chosen, [(name, self._backing.spans[name][0]) for name in named], raw=raw)
        return chosen

    def _fill(
        self, parts: Mapping[str, Any], found: Resolved, missing: Missing, *, raw: bool
    ) -> None:
        """Put what keys without a row read as at their positions of each field of a result."""
        if not parts:
            return
        some = next(iter(parts.values()))
        kind = "torch" if is_torch(some) else "cupy" if is_cupy(some) else "numpy"
        there: Any = self._like(found.unknown, kind)
        first: Mapping[str, Any] = {}
        if kind == "torch":
            there = there.to(some.device)
        if not isinstance(missing, float):
            first = self._first(found.asked, tuple(parts), kind, raw=raw)
        for name, values in parts.items():
            each = first.get(name, missing)
            each = each.to(values) if is_torch(each) else each
            values.reshape(-1, values.shape[-1])[there] = each

    def _first(
        self, asked: Asked, names: tuple[str, ...], kind: str, *, raw: bool = False
    ) -> dict[str, Any]:
        """Return the first rows of keys, an array `(n, dim)` of each field."""
        columns, count = self._backing.access.columns[names], asked.codes.size
        records = first_records(self.spec, asked.codes, list(names))
        ids = Ids(np.arange(count), (count,), kind)
        return columns.values(records[:, columns.lo : columns.hi], ids, raw=raw)

    def _like(self, rows: Any, kind: str) -> Any:
        """Return row numbers as an array of the library of the keys."""
        if kind == "cupy":
            import cupy

            access = self._backing.access
            with access.using() if isinstance(access, DeviceAccess) else nullcontext():
                if not is_torch(rows):
                    return cupy.asarray(rows)
                found = cupy.from_dlpack(rows).copy()
                cupy.cuda.get_current_stream().synchronize()  # before torch uses its memory again
                return found
        if kind != "torch" or is_torch(rows):
            return rows
        import torch

        return torch.from_numpy(rows).to(self.device)

    def _batch(self, ids: Any, *, record: bool = True) -> Ids:
        """Check a batch of keys, whose rows are still to be found; `rows` are the bits of keys.

        They stay on the device if it has a map of them, without `keys` then.
        """
        there = self._there(ids)
        if there is not None:
            return there
        asked, kind = self._asked(ids)
        return Ids(asked.codes.view(np.int64), asked.shape, kind, keys=asked)

    def _there(self, keys: Any) -> Ids | None:
        """Return a batch of keys on the device; None if they are to be looked up on the host."""
        if self.spec.keys != "int64" or not isinstance(self._backing.access, DeviceAccess):
            return None
        if is_cupy(keys) and keys.dtype.kind in "iu" and "torch" in sys.modules:
            import torch

            with self._backing.access.using():
                bits = torch.from_dlpack(keys.astype(np.int64).ravel())
            if bits.device == self._backing.access.torch_device:
                return Ids(bits, keys.shape, "cupy")
        if is_torch(keys):
            kind = str(keys.dtype).removeprefix("torch.")
            if keys.device.type == self._backing.access.torch_device.type and "int" in kind:
                import torch

                flat = as_dense(keys, "the keys").detach().reshape(-1)
                bits = flat.view(torch.int64) if kind == "uint64" else flat.to(torch.int64)
                return Ids(bits.contiguous(), tuple(keys.shape), "torch")
        return None

    def _resolved(self, given: Ids, ask: Callable[[Asked], Rows]) -> Resolved:
        """Return the rows of keys; `ask` returns those that the device does not know."""
        if given.keys is None:
            return self._resolved_there(given, ask)
        rows = ask(given.keys)
        unknown = np.flatnonzero(rows < 0)
        return Resolved(rows, given.shape, given.kind, unknown, given.keys.take(unknown))

    def _resolved_there(self, given: Ids, ask: Callable[[Asked], Rows]) -> Resolved:
        bits: Any = given.rows
        rows = bits.new_empty(bits.shape)
        with self._keys_there() as (known, stream):
            missing = known.find(bits, rows, stream)
        unknown = np.empty(0, np.intp)
        asked = Asked(np.empty(0, np.uint64), (0,))
        self._lacked = missing is not None
        if missing is not None:
            at, codes = missing.on_host()
            asked = Asked(codes, codes.shape)
            found = ask(asked)
            with self._keys_there() as (known, stream):  # others, if the table has grown
                known.fill(missing, found, stream)
            lacking = np.flatnonzero(found < 0)
            unknown, asked = at[lacking], asked.take(lacking)
        return Resolved(rows, given.shape, given.kind, unknown, asked)

    @contextmanager
    def _keys_there(self) -> Iterator[tuple[DeviceKeys, int]]:
        """Use the device's map of keys, in a stream; clear it first if its rows have changed."""
        access = cast(DeviceAccess, self._backing.access)
        with access.using():  # in which no key gets another row
            stream, names = access.stream("torch"), self._backing.extent.epoch.names
            known = access.gpu.keys(self.name, self.capacity)
            if known.source != names:
                known.clear(stream)
                known.source = names
            yield known, stream

    def _placed(self, batch: Ids) -> Ids:
        """Give rows to keys that have none, before the write."""
        naming = Naming(self)
        rows = self._used_by(batch, self._add)
        found = self.by_row._batch(self._like(rows.known_or_first(), batch.kind))
        return Ids(found.rows, found.shape, found.kind, naming=naming)

    def _add(self, asked: Asked) -> Rows:
        """Return the rows of keys; those that have none get one, with their first values."""
        found = self._map.find(asked)
        missing = np.flatnonzero(found < 0)
        if not missing.size:
            return found
        with self._backing.home.door.use(write=True), self._map.lock:
            before = len(self._map)
            found[missing] = self._map.add(asked.take(missing))
            try:
                self._write_first(np.arange(before, len(self._map)))
            except BaseException:
                with suppress(ClosedError):  # by the error, which closed the store
                    self._map.truncate(before)
                raise
        return found

    def _write_first(self, rows: npt.NDArray[np.int64]) -> None:
        """Write the first records of keys that were just added."""
        if len(self._map) > self.capacity:
            self._grow(len(self._map))
        for start in range(0, rows.size, _BLOCK_ROWS):
            block = rows[start : start + _BLOCK_ROWS]
            records = first_records(self.spec, self._map.codes_of(block))
            values = {
                name: item.element.decode(self._backing.layout.view(records, name))
                for name, item in self._backing.layout.fields
            }
            self.by_row.write(block, values)

    def _grow(self, keys: int) -> None:
        """Provide room for so many keys, by an eighth more rows or as many as needed."""
        if not self.spec.grows:
            raise InvalidInputError(
                f"table {self.name!r} holds {self.capacity} keys, and these would be {keys}: "
                f"commit, then store.grow({self.name!r}, rows)"
            )
        parts = _GROWTH if self._backing.space.can_grow else 1  # else its tiers are rebuilt
        more = max(self.capacity // parts, EXTENT_ROWS)
        spec = self.spec.with_rows(max(keys, self.capacity + more))
        self._backing.home.grow_rows(self.name, spec.rows)

    def _known_or_first(
        self, keys: object, field: str, *, train: bool
    ) -> tuple[Any, npt.NDArray[np.intp], Any]:
        given = self._batch(keys)
        if train:
            found = self._used_by(given, self._admitted)
        else:
            found = self._resolved(given, self._map.find)
        chosen = "init" if train else self._chosen(None, field)
        if chosen == "raise" and found.unknown.size:
            raise without_row(keys, found.unknown, OTHERWISE)
        first = self._first_values(found.asked, np.arange(found.unknown.size), field, chosen)
        return found.known_or_first(), found.unknown, first

    def _first_values(
        self, asked: Asked, at: npt.NDArray[np.intp], field: str, missing: Missing = "init"
    ) -> Any:
        """Return what keys at some positions of a batch read as, a tensor `(n, dim)`."""
        first = self._first(asked.take(at), (field,), "torch")[field]
        return first.fill_(missing) if isinstance(missing, float) else first

    def _guessed(self, keys: object) -> tuple[Any, Guess] | None:
        if self._lacked or self.spec.track_uses or self.spec.admit_after is not None:
            return None
        given = self._there(keys)
        bits: Any = None if given is None else given.rows
        if given is None or not bits.numel():
            return None
        rows = bits.new_empty(bits.shape)
        with self._keys_there() as (known, stream):
            guess = known.guess(bits, rows, stream)
        return rows.reshape(given.shape), guess

    def _rows_for(self, keys: object) -> Any:
        found = self._used_by(self._batch(keys), self._add)
        return self._like(found.known_or_first(), "torch")

    def _trained(self, asked: Asked) -> Rows:
        """Return the rows of keys of a training batch; -1 for those that are not admitted yet."""
        with self._still():
            rows = self._admitted(asked)
            self._note_uses(rows)
        return rows

    def _admitted(self, asked: Asked) -> Rows:
        """Return the rows of keys; keys that were used often enough get one, others have -1."""
        if self.spec.admit_after is None:
            return self._add(asked)
        rows = self._map.find(asked)
        unknown = np.flatnonzero(rows < 0)
        if unknown.size:
            with self._map.lock:
                uses = self._candidates.use(asked.codes[unknown])
            admitted = unknown[uses >= self.spec.admit_after]
            if admitted.size:
                rows[admitted] = self._add(asked.take(admitted))
                with self._map.lock:  # a removed key is admitted as one that never had a row
                    self._candidates.forget(asked.codes[admitted])
        return rows

    def _used(self, asked: Asked) -> Rows:
        """Return the rows of used keys; keys without a row get one."""
        with self._still():
            rows = self._add(asked)
            self._note_uses(rows)
        return rows

    def _used_by(self, given: Ids, ask: Callable[[Asked], Rows]) -> Resolved:
        """Return the rows of used keys; `ask` decides which keys get one."""
        with self._still():
            found = self._resolved(given, ask)
            self._note_uses(found.rows)
        return found

    def _note_uses(self, rows: Any) -> None:
        """Count a use of each row if the table tracks uses, in `_still`; -1 means no row."""
        if not (self.spec.track_uses and self._backing.home.door.writable):
            return
        used = rows.unique() if is_torch(rows) else np.unique(rows)
        used = used[used >= 0]
        if len(used):
            uses = self.by_row.read(used, USES)
            uses[:, 0] += 1
            uses[:, 1] = self._commits + 1
            self.by_row.write(used, uses, USES)

    def remove(self, keys: object) -> int:
        """Remove keys with their rows, such as those of users who left; return how many had one.

        Keys without a row are ignored, and a removed one reads as its first row again. As after
        `expire`, every lease of the table ends and other rows take the numbers of the removed ones,
        so call it between steps. Final after `store.commit()`; `store.rollback()` brings them back.
        After an error halfway, such as of a full disk, nothing is read or committed until then.
        Older versions have the rows until they are dropped.

        Raises InvalidTypeError for keys of another kind than the table's.

        >>> user = store.create_table("members", tierstore.TableSpec(dim=16, keys="int64"))
        >>> user.write([7, -5], np.ones((2, 16), np.float32))
        >>> user.remove([7, 11])
        1
        >>> store.rollback()
        """
        return self._removed(self._asked(keys)[0])

    def _removed(self, asked: Asked) -> int:
        """Remove checked keys; return how many had a row."""
        with self._backing.home.door.use(write=True), self._map.lock:
            rows = np.unique(self._map.find(asked))
            rows = rows[rows >= 0]
            if rows.size:
                self._remove(rows)
        return int(rows.size)

    def expire(
        self,
        *,
        unused_for: int | None = None,
        fewer_than: int | None = None,
        keep_at_most: int | None = None,
    ) -> Iterator[tuple[npt.NDArray[Any], dict[str, npt.NDArray[Any]]]]:
        """Yield keys that expire with their rows, `(n,)` and a dict of fields, then remove them.

        Args:
            unused_for: a key expires that was last used so many commits ago, or more.
            fewer_than: a key expires that was used fewer times.
            keep_at_most: the keys with the fewest uses expire, of these the longest unused first,
                until no more are left than this.

        Call it between steps: no other thread may train the table meanwhile. Keys are removed when
        the last block has been taken. Then every lease of the table ends, and other rows take the
        numbers of the removed ones, so that new keys use their places before the table grows. Final
        after `store.commit()`; `store.rollback()` brings them back. After an error halfway, such as
        of a full disk, nothing is read or committed until then. A loop that ends earlier removes
        nothing; nor does a call without a loop, which issues a NotExpiredWarning.

        >>> spec = tierstore.TableSpec(dim=16, keys="int64", track_uses=True)
        >>> store.rollback()
        >>> user = store.create_table("users", spec)
        >>> user.write([7, -5], np.ones((2, 16), np.float32))
        >>> [keys.tolist() for keys, rows in user.expire(keep_at_most=0)]
        [[7, -5]]
        >>> store.rollback()

        Raises InvalidInputError for a table that does not track uses.
        """
        conditions = {
            "unused_for": unused_for,
            "fewer_than": fewer_than,
            "keep_at_most": keep_at_most,
        }
        expiry.check(**conditions)
        self._check_tracked()
        return expiry.Blocks(self.name, self._expired(conditions))

    def _check_tracked(self) -> None:
        self._backing.home.door.check(write=True)
        if not self.spec.track_uses:
            raise InvalidInputError(
                f"table {self.name!r} keeps no uses: make it with TableSpec(track_uses=True)"
            )

    def _uses(self, **conditions: int | None) -> npt.NDArray[np.float64]:
        """Return the uses `(rows, 2)` of rows that do not expire by the conditions."""
        self._check_tracked()
        uses = self._all_uses()
        gone = expiry.expired(uses, self._commits, keep_at_most=None, **conditions)
        return np.delete(uses, gone, 0)

    def _all_uses(self) -> npt.NDArray[np.float64]:
        return np.concatenate([np.empty((0, 2)), *self.scan(USES)])

    def _expired(self, conditions: dict[str, int | None]) -> Iterator[expiry.Block]:
        epoch = self._backing.extent.epoch
        uses = self._all_uses()
        rows = expiry.expired(uses, self._commits, **conditions)
        for start in range(0, rows.size, _BLOCK_ROWS):
            part = rows[start : start + _BLOCK_ROWS]
            epoch.check_open()
            yield self.keys_of(part), self.by_row.read(part, list(self.fields), cache=False)
        if rows.size:
            with self._backing.home.door.use(write=True), self._map.lock:
                epoch.check_open()  # after a rollback or another expiry the rows differ
                self._remove(rows)

    def _remove(self, rows: npt.NDArray[np.int64]) -> None:
        """Remove keys by their ascending rows; the last rows take their places.

        The places of the last rows become zeros, like other rows that are written: once older
        versions are folded, no file holds what was removed.
        """
        self._backing.home.end_leases(self.name)
        self._backing.home.touched.rows.setdefault(self.name)
        keys = self._map
        count = len(keys)
        moved, to = expiry.moves(count, rows)
        order, freed = np.arange(count - rows.size), np.arange(count - rows.size, count)
        own_rows = self._backing.generation.moves_rows
        order[to] = moved
        self._backing.generation.note_moved_keys()
        begun = False
        try:
            for start in range(0, moved.size if own_rows else 0, _BLOCK_ROWS):
                part = slice(start, start + _BLOCK_ROWS)
                values = self.by_row.read(moved[part], list(self.fields), cache=False)
                begun = True
                self.by_row.write(to[part], values)
            begun = True
            for start in range(0, freed.size if own_rows else 0, _BLOCK_ROWS):
                block = freed[start : start + _BLOCK_ROWS]
                self.by_row.write(block, self._zeros(block.size))
            self._backing.generation.keep_keys(order)
        except BaseException:
            keys.half_removed = begun
            raise

    def _zeros(self, rows: int) -> dict[str, npt.NDArray[Any]]:
        """Return rows of zeros, by field."""
        none = self.by_row.read(np.empty(0, np.int64), list(self.fields))
        return {name: np.zeros((rows, *each.shape[1:]), each.dtype) for name, each in none.items()}

    @property
    def _candidates(self) -> Candidates:
        """The keys that were used and have no row yet."""
        if "_counted" not in self.__dict__:
            self._counted = Candidates()
        return self._counted

    def topk(
        self,
        queries: Any,
        k: int,
        field: str | None = None,
        *,
        exclude: Sequence[Any] | None = None,
        metric: Literal["dot", "cosine"] = "dot",
    ) -> tuple[Any, Any]:
        """Return scores and row numbers as `Table.topk`; `exclude` has row numbers as well.

        `keys_of(rows[rows >= 0])` are their keys: -1 stands where fewer rows than `k` are left.
        """
        scores, rows = super().topk(queries, k, field, exclude=exclude, metric=metric)
        return scores, rows.view(RowNumbers) if isinstance(rows, np.ndarray) else rows

    def read_into(self, ids: Any, out: Any, field: str | None = None) -> None:
        """Read the rows of keys into `out`; not in a CUDA graph: the host looks keys up."""
        self.read(ids, field, out=out)

    def lease(self, ids: object) -> Lease:
        """Pin the rows of a batch of keys, `ids`, for a step; adds those that are new."""
        given = self._batch(ids)

        def leased() -> Lease:
            found = self._used_by(given, self._add)
            return self.by_row.lease(self._like(found.known_or_first(), found.kind))

        with self._still():  # of which the rows may be those of other keys, after a rollback
            return while_named([self], leased, Lease.release)

    def write(self, ids: object, rows: Any, field: str | None = None) -> None:
        """Write `ids.shape + (dim,)` rows over those of keys, `ids`; see `Table.write`.

        Keys that are new are added; raises InvalidInputError for more than `rows=` of the table.
        """
        with self._still():  # or a repeated attempt would count their uses twice
            super().write(ids, rows, field)

    def _still(self) -> AbstractContextManager[object]:
        """Keep other threads out until the uses of keys are counted, if they are.

        They might remove keys, or lose a use that they count at the same time.
        """
        if not (self.spec.track_uses and self._backing.home.door.writable):
            return nullcontext()
        return self._backing.home.door.use(write=True)

    def prefetch(self, ids: Any, *, window: int = 16) -> None:
        """Start bringing the rows of coming keys, `ids`, into memory; see `Table.prefetch`."""
        rows = self.lookup(ids, missing=-1).ravel()
        self.by_row.prefetch(rows[rows >= 0], window=window)

    def warm(self, ids: object = None, *, counts: Any = None, progress: Shown = None) -> int:
        """Load rows of keys into the host tier, or the first ones; see `Table.warm`."""
        if ids is not None:
            rows = self.lookup(ids, missing=-1).ravel()
            ids = rows[rows >= 0]
        return self.by_row.warm(ids, counts=counts, progress=progress)

    def _sliced(self, rows: slice | EllipsisType) -> NoReturn:
        raise InvalidTypeError(
            f"keys have no order: table[{as_written(rows)}] is no choice of them; scan yields rows "
            "by number"
        )

    def __iter__(self) -> NoReturn:
        """Refuse, as `Table` does."""
        raise InvalidTypeError(
            f"table {self.name!r} is not iterated over: table.scan() yields blocks of rows, "
            "table.keys has their keys"
        )


def table_on(
    home: Any, name: str, generation: Generation, space: Space, extent: Extent
) -> tuple[Table, Backing]:
    """Return a table of the kind that its spec says, over files, and what it stands on."""
    if generation.info.spec.keys is None:
        on = Backing(home, name, generation, space, extent)
        return Table(on), on
    keyed = KeyedBacking(home, name, generation, space, extent)
    return KeyedTable(keyed), keyed


def codes_of(table: KeyedTable, rows: Rows) -> npt.NDArray[np.uint64]:
    """Return the codes of the keys of rows, by which their first values and partitions go."""
    return table._map.codes_of(rows)


# -- what layers ask of tables by key


def rows_for(table: ByKey, keys: object) -> Any:
    """Return row numbers for training, in the shape of keys, as a tensor; add new keys.

    For tables that admit every key; see `known_or_first`.
    """
    return table._rows_for(keys)


def known_or_first(table: ByKey, keys: object, field: str, *, train: bool) -> Any:
    """Return row numbers in the shape of keys, which keys have none, and their first values.

    Keys without a row have the number 0; what they read as is a tensor `(n, dim)`, see `read`. With
    `train`, admitted keys get a row first, and the others read as theirs.
    """
    return table._known_or_first(keys, field, train=train)


def guessed(table: ByKey, keys: object) -> tuple[Any, Guess] | None:
    """Return rows of keys on a device as `rows_for` does, before all are known to have one.

    The number of a key without a row is 0. Returns None if the previous batch lacked keys, or if
    other work depends on the result.
    """
    return table._guessed(keys) if isinstance(table, KeyedTable) else None


# -- what ranks that share a table ask of their shards


class ShardByKey:
    """A shard as the ranks that share its table ask it: by keys that their owner gets checked."""

    def __init__(self, table: KeyedTable) -> None:
        """Ask a table, which is this rank's shard."""
        self._table = table

    def asked(self, keys: object) -> Asked:
        """Return keys as the table looks them up, flat; raises as its calls do."""
        return self._table._asked(keys)[0]

    def serving(self, what: str) -> Callable[[Asked], Rows]:
        """Return what finds the rows of keys, -1 for none, that ranks ask for in a call of theirs.

        For `what` "add" and "write" keys without a row get one, for "train" those that are
        admitted; the latter two count as uses.
        """
        table = self._table
        ways = {"add": table._still_added, "write": table._used, "train": table._trained}
        return ways.get(what) or table._map.find

    def remove(self, asked: Asked) -> int:
        """Remove keys; return how many had a row."""
        return self._table._removed(asked)

    def merge(self, other: KeyedTable, *given: Any) -> int:
        """Take rows of a table that was checked; see `merging.merge`."""
        return self._table._merged(other, *given)

    def uses(self, **conditions: int | None) -> npt.NDArray[np.float64]:
        """Return the uses `(rows, 2)` of rows that do not expire by the conditions."""
        return self._table._uses(**conditions)

    def missing(self, missing: object, field: str) -> Missing:
        """Check the name of a field, and what keys without a row are to read as."""
        self._table.spec.layout.field(field)
        return self._table._chosen(missing, field)

    def first(self, asked: Asked, at: npt.NDArray[np.intp], field: str, missing: Missing) -> Any:
        """Return what keys at some positions, without a row, read as, a tensor `(n, dim)`."""
        return self._table._first_values(asked, at, field, missing)


def while_named(
    tables: Sequence[Table], call: Callable[[], _T], again: Callable[[_T], object] = lambda _: None
) -> _T:
    """Return what `call` makes of rows of keys of tables; again if they got other keys meanwhile.

    Another thread may remove keys, or roll back, after the rows were found. `again` is called with
    what was made of them then.
    """
    while True:
        names = list(map(Naming, tables))  # before the rows are found
        try:
            found = call()
        except (ClosedError, RowIndexError):
            if not any(map(Naming.replaced, names)):
                raise
        else:
            if not any(map(Naming.replaced, names)):
                return found
            again(found)


def without_row(keys: object, at: Any, otherwise: str = "") -> UnknownNameError:
    """Return the error about keys at some positions, or of a mask, which have no row."""
    given = np.asarray(on_host(keys), object).ravel()
    return UnknownNameError(unknown_keys(given[at]) + otherwise)


def _one(field: Any) -> str | None:
    return field if field is None or isinstance(field, str) else None
