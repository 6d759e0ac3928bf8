"""A table whose rows several ranks have: each reads all of them, and has its own shard."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tierstore._disk.keys import Keys
from tierstore._disk.partitioning import Shard
from tierstore._door import interrupts_deferred
from tierstore._table.address import host_ids
from tierstore._table.home import StoreOfTable
from tierstore._table.joint import JointTable
from tierstore._table.named import NamedRows, without_row
from tierstore._table.table import Table, access_of, files_of
from tierstore._tiers.base import GONE
from tierstore.distributed.exchange import Answer, Exchange, Serve
from tierstore.distributed.lacking import Lacking
from tierstore.distributed.owners import Owners, Place, owners_over
from tierstore.distributed.ranks import Ranks
from tierstore.distributed.request import Call, Request, Wanted
from tierstore.errors import ClosedError, InvalidInputError, InvalidTypeError
from tierstore.spec import Field, TableSpec


class OfRanks:
    """Tables of which each rank has a shard, looked up as one or each by itself.

    Attributes:
        shard: what this rank has of them.
        average: whether gradients are divided by the number of ranks.
    """

    shard: Table | JointTable
    average: bool
    _ranks: Ranks

    @property
    def name(self) -> str:
        """The name, in messages too."""
        return self.shard.name

    @property
    def ranks(self) -> int:
        """How many ranks have a shard."""
        return self._ranks.count

    @property
    def spec(self) -> TableSpec:
        """What the shard on this rank is made of; all have the same fields."""
        return self.shard.spec

    @property
    def device(self) -> str:
        """Where the nearest tier is, and rows come to."""
        return self.shard.device

    @property
    def store(self) -> StoreOfTable:
        """The store of the table."""
        return self.shard.store

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the table itself."""
        return self


class RowsOfRanks(OfRanks):
    """Tables of ranks by numbers that every rank gives to their rows alike, such as ids.

    Attributes:
        exchange: what their rows go through.
    """

    exchange: Exchange

    def _wanted(
        self, ids: Any, call: Call | None = None, check: Callable[[], object] = lambda: None
    ) -> Wanted:
        """Return what to request, by a call or ahead of it; `check` raises other errors."""
        raise NotImplementedError

    def look_up(
        self,
        ids: Any,
        call: Call,
        like: Tensor,
        serve: Serve,
        before: Callable[[], object] = lambda: None,
    ) -> tuple[Request, Tensor]:
        """Request the rows of ids of any shape from their owners; see `Exchange.look_up`.

        Collective. `before` is called first; its errors are raised as those of `serve` are.
        """
        return self.exchange.look_up(self._wanted(ids, call, before), like, serve)

    def read_with(
        self,
        ids: Any,
        call: Call,
        like: Tensor,
        read: Callable[[Tensor], Tensor],
        before: Callable[[], object] = lambda: None,
    ) -> Tensor:
        """Return what `read` makes of rows of a shard, as `like`, for each id. Collective."""

        def serve(request: Request) -> Answer:
            return Answer(read(request.asked))

        request, rows = self.look_up(ids, call, like, serve, before)
        return request.expand(rows)

    def prefetch(self, ids: Any, *, window: int = 16) -> None:
        """Announce the ids of a coming batch, and start bringing their rows nearer. Collective.

        Ranks exchange which rows they request from each other in parallel with other work. A lookup
        of the same ids among the next `window` then does not wait for it; on a GPU those are the
        same tensor, not written since. Raises what a lookup does, for an earlier batch.
        """
        with interrupts_deferred():
            self.exchange.announce(
                self._wanted(ids), window, lambda rows: self.shard.prefetch(rows, window=window)
            )


class TableOfRanks(Lacking, OfRanks):
    """A table of which each rank has a shard, by id or by key.

    Attributes:
        shard: the rows that are on this rank, a table of their own.
        rows: how many rows all ranks have together.
    """

    shard: Table
    rows: Any

    @property
    def fields(self) -> dict[str, Field]:
        """The fields of a record, in order."""
        return self.shard.fields

    @property
    def dim(self) -> int:
        """Elements of the first field."""
        return self.shard.dim

    @property
    def scalars(self) -> dict[str, Any]:
        """Values that belong to the whole table; every rank must have the same at a commit."""
        return self.shard.scalars

    def __len__(self) -> int:
        return int(self.rows)

    __iter__ = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, rows={self.rows}, shard={self.shard.rows})"

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled."""
        raise InvalidTypeError("a table cannot be pickled; open the store for reading instead")


class DistributedTable(TableOfRanks, RowsOfRanks, NamedRows):  # type: ignore[override]
    """Rows of a table by id, wherever they are among the ranks.

    `read` and `write` are collective: every rank calls them, with ids of its own or none. `lookup`
    and `contains` are not: each rank has all external keys at hand. Only
    tensors and arrays in host memory, and tensors on the table's device, are taken.

    Attributes:
        shard: the rows that are on this rank, a table of their own; its row i is `ids_of([i])`.
        average: whether gradients are divided by the number of ranks.
        place: which rows the shard has.
        exchange: what its rows go through.
    """

    def __init__(self, shard: Table, place: Place, ranks: Ranks, *, average: bool) -> None:
        """Put a table of all ranks over the shard of one."""
        self.shard = shard
        self.average = average
        self.place: Place = place
        self._ranks = ranks
        self._owners: tuple[tuple[object, ...], Owners] | None = None
        self.exchange: Exchange = Exchange(ranks, shard.name, self.owners)
        self._tag = zlib.crc32(shard.name.encode())
        self._ended = False

    @property
    def rows(self) -> int:
        """Number of rows on all ranks together."""
        return self.place.rows

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the first field, `(rows, dim)`, of all ranks together."""
        return self.rows, self.dim

    @property
    def keys(self) -> Keys | None:
        """The external keys of all rows by id, or None; each rank has all of them at hand."""
        generation: Any = files_of(self.shard)
        keys: Keys | None = generation.keys_of_whole()
        return keys

    def get_or_add(self, keys: object) -> npt.NDArray[np.int64]:
        """Return the ids of external keys, in their shape; new ones get a new row. Collective.

        See `Table.get_or_add`. Each rank gives keys of its own, or none; a key that several ranks
        give gets one row. New rows are in the order of the ranks, and of the keys of each, so that
        keys that are dealt to ranks in order get the ids that one process would give them. If any
        rank has new keys, it is a commit of its own, as of `DistributedStore.grow`.

        What a rank finds wrong with its keys is raised on all ranks, and no row is added.
        """
        self.check_open()
        new = self._ranks.together(
            f"look up keys of table {self.name!r}",
            lambda: without_row(keys, self.lookup(keys, missing=-1)),
        )
        added = list(dict.fromkeys(itertools.chain.from_iterable(new)))
        if added:
            self.store.grow(self.name, self.rows + len(added), keys=added)
        return self.lookup(keys)

    def resize(self, place: Shard) -> None:
        """Take the number of rows from a shard of the table, which grew."""
        self.place = place

    def end(self) -> None:
        """Refuse all calls from now on."""
        self._ended = True

    def check_open(self) -> None:
        """Raise ClosedError for a table that the store has no more."""
        if self._ended:
            raise ClosedError(f"{GONE}; take a table that the store has, such as store['name']")

    def owners(self) -> Owners:
        """Return which rank has which rows; new owners once the table grows.

        Raises ClosedError where the table is gone: on all ranks alike, before any sends anything.
        """
        self.check_open()
        access = access_of(self.shard)
        known = self._owners
        if known is None or known[0] != (access, self.rows):
            owners = owners_over(self.place, self.ranks, [self.rows], [0], access)
            known = self._owners = (access, self.rows), owners
        return known[1]

    def _wanted(
        self, ids: Any, call: Call | None = None, check: Callable[[], object] = lambda: None
    ) -> Wanted:
        """Return what to request, by a call or ahead of it; `check` raises other errors."""
        error: Exception | None = None
        try:
            own = self._flat(ids)
            check()
        except Exception as found:
            error, own = found, torch.empty(0, dtype=torch.int64, device=self.device)
        return Wanted(
            own,
            ids if isinstance(ids, Tensor) else own,
            self._tag,
            lengths=[len(own)],
            refuse=lambda: host_ids(ids, self.rows),
            error=error,
            call=0 if call is None else call.number(self.fields),
        )

    def _flat(self, ids: Any) -> Tensor:
        """Return ids on the device, flat int64; those that come from there are not checked yet.

        Raises RowIndexError and InvalidTypeError.
        """
        if isinstance(ids, Tensor) and ids.device.type != "cpu":
            if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
                raise InvalidTypeError(f"row ids are whole numbers, not {ids.dtype}")
            return ids.reshape(-1).to(self.device, torch.int64).contiguous()
        return torch.from_numpy(host_ids(ids, self.rows).rows).to(self.device)

    def read(self, ids: Any, field: str | None = None, **options: Any) -> Any:
        """Read the rows of `ids`, `ids.shape + (dim,)`, as `Table.read` does. Collective.

        It has none of the `options` of `Table.read`: raises InvalidInputError, with the way on.
        """
        self.refuse_options(field, options)
        name = next(iter(self.fields)) if field is None else field

        def read(rows: Any) -> Tensor:
            return self.shard.read(rows, name, as_tensor=True)

        with interrupts_deferred():
            call, like = Call("read", name), self._like(name)
            found = self.read_with(ids, call, like, read, lambda: read([]))
        if isinstance(ids, Tensor):
            return found.reshape(*ids.shape, found.shape[1])
        own = found.cpu()
        values = (own.float() if own.dtype == torch.bfloat16 else own).numpy()
        return values.reshape(*np.shape(ids), values.shape[-1])

    def _like(self, field: str) -> Tensor:
        """Return no rows of a field, `(0, dim)`, as the shard reads them.

        Of the first field for a name that no field has: in its place a rank sends rows, too, which
        others may have been announced.
        """
        every = self.spec.layout.fields
        item = next((each for name, each in every if name == field), every[0][1])
        return torch.empty(0, item.dim, dtype=item.element.torch_dtype(), device=self.device)

    def write(self, ids: Any, rows: Any, field: str | None = None) -> None:
        """Write rows `ids.shape + (dim,)` over those of `ids`. Collective.

        Where an id repeats, its last row stays; where several ranks write it, that of the highest.
        """
        name, given = next(iter(self.fields)) if field is None else field, torch.empty(0, 0)

        def check() -> None:
            nonlocal given
            given = self.check_rows(ids, rows, name)

        with interrupts_deferred():
            request = self.exchange.ask(self._wanted(ids, Call("write", name), check))
            with self._ranks.midway(f"write rows of table {self.name!r}"):
                request.find()
                count = int(np.prod(np.shape(ids)))
                last = np.full(request.size, -1)
                last[request.positions.cpu().numpy()] = np.arange(count)
                own, flat = torch.from_numpy(last), given.reshape(count, given.shape[-1])
                values = flat.new_zeros(len(own), flat.shape[1])
                values[own >= 0] = flat[own[own >= 0]]
                arrived = request.deliver(values.to(self.device))
            self._ranks.together(
                f"write rows of table {self.name!r}",
                lambda: self._written(request, arrived, name),
            )

    def _written(self, request: Request, rows: Tensor, name: str) -> None:
        """Write the rows of this rank; the other ranks write theirs."""
        try:
            self.shard.write(request.asked, rows, name)
        except Exception as error:
            self._ranks.fail(f"write rows of table {self.name!r}", error)
            raise

    def check_rows(self, ids: Any, rows: Any, name: str) -> Tensor:
        """Return rows of a field to write as a tensor.

        Raises InvalidTypeError, InvalidInputError and UnknownNameError.
        """
        item = self.shard.spec.layout.field(name)
        try:
            given = torch.as_tensor(rows)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidTypeError(f"rows are an array or a tensor: {error}") from None
        if given.dtype != item.element.torch_dtype():
            raise InvalidTypeError(f"{name} holds {item.dtype}, these values are {given.dtype}")
        if tuple(given.shape) != (*np.shape(ids), item.dim):
            raise InvalidInputError(
                f"{name} for these ids is {(*np.shape(ids), item.dim)}, not {tuple(given.shape)}"
            )
        return given

    def ids_of(self, rows: Any) -> Any:
        """Return the ids of rows of the shard, an int64 array or tensor."""
        return self.place.ids_of(rows)
