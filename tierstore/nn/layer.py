"""What every layer over rows has: a parameter, a type, a device, and lookups that train it."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn, Self, TypeVar

import torch
from torch import Tensor

from tierstore._door import interrupts_deferred
from tierstore._table.host import Lease
from tierstore._table.joint import Features, JointTable
from tierstore._table.recycled import Recycled
from tierstore._table.table import Table, reads_each, together
from tierstore.distributed.request import Call
from tierstore.errors import InvalidInputError, InvalidTypeError, TierStoreWarning, warn
from tierstore.nn import naming
from tierstore.nn.autograd import Batch
from tierstore.nn.average import Average
from tierstore.nn.remote import RemoteBatch, RemoteLease, Shared
from tierstore.nn.rows import RowsParameter

AVERAGED: int = id(RowsParameter)
"""In the memo of `copy.deepcopy`: the copy is to look up averages, and needs no warning."""
_OF_MODULES = tuple(vars(torch.nn.Module()))
"""The attributes of every module: hooks, buffers, other modules, and whether it trains."""
Module = TypeVar("Module", bound=torch.nn.Module)


class RowsLayer(torch.nn.Module):
    """A layer over a field of a table, or of tables that are looked up as one.

    Each rank trains its own rows of a table that several ranks share.

    Attributes:
        table: the table, or the tables.
        field: the field that is looked up and trained.
        embedding_dim: elements of a row.
        rows: the parameter.
        own: the same, also where something replaces what is registered.
        anchor: what compiled graphs attach rows to: unlike the parameter, it is always empty.
        as_stored: whether rows are returned in the type and on the device of the table.
        is_shared: whether ranks share the table.
        by_key: whether ids are of keys: then it trains in training mode alone.
        padding_idx: a row that takes no part in training, or None.
        memory: for gradients of features that are stored apart, as one tensor.
        is_single: whether gradients are floats of 32 bits on the host.
    """

    rows: RowsParameter
    padding_idx: int | None = None
    own: RowsParameter

    def __init__(
        self, table: Table | JointTable | Shared, field: str, *, by_key: bool = False
    ) -> None:
        """Put a layer over a field. Raises InvalidTypeError for a type that torch cannot train."""
        super().__init__()
        item = table.spec.layout.field(field)
        if not item.element.trainable:
            raise InvalidTypeError(
                f"field {field!r} of table {table.name!r} is {item.dtype}, which is only read: "
                "weights that train are float32 or bfloat16; read it with table.read"
            )
        self._dtype = item.element.torch_dtype()
        self._device: str = table.device
        empty = self._like = torch.empty(0, item.dim, dtype=self._dtype, device=self._device)
        self.is_shared: bool = isinstance(table, Shared)
        shard = table.shard if isinstance(table, Shared) else table
        rows = _parameter_over(shard, field, empty)
        self.table: Any = rows.table if shard is table else table
        self._shard: Any = rows.table
        """The rows of this rank."""
        self.together: Callable[[], AbstractContextManager[Any]] = (
            interrupts_deferred
            if self.is_shared or self._device == "cpu"
            else partial(together, self._shard)
        )
        """Enters the store once for a pass; on the host, and for ranks, only defers interrupts."""
        self.field: str = field
        self.by_key: bool = by_key
        self.embedding_dim: int = item.dim
        self.memory: Recycled = Recycled()
        self.is_single: bool = self._dtype == torch.float32 and self._device == "cpu"
        self._averages: list[Average] = []
        """What is looked up in place of rows, of each table; none where these are."""
        self._begin(empty, rows)

    def _begin(self, empty: Tensor, rows: RowsParameter) -> None:
        """Take a parameter, the type and device of an empty tensor, and a name for operators."""
        self.rows = rows
        self.__dict__["own"] = rows  # also where something replaces what is registered
        rows.layers.add(self)
        self.let_train(rows.requires_grad)
        self._follow(empty)
        self._number: str = naming.register(self, rows.table, self.field)

    def _follow(self, empty: Tensor) -> None:
        """Take the type and device of an empty tensor, `(0, dim)`."""
        self.as_stored: bool = empty.dtype == self._dtype and str(empty.device) == self._device
        self.anchor: Tensor = empty.detach().requires_grad_()
        self._node = torch.autograd.graph.get_gradient_edge(self.anchor).node
        self.own.rest(self.anchor)

    # -- what lookups call

    def in_space(self, ids: Tensor, features: Features | None, lengths: Sequence[int]) -> Tensor:
        """Return the rows that the ids of features stand for; see `JointTable.in_space`."""
        if features is None:
            return ids
        found: Tensor = self.table.in_space(ids, features, lengths)
        return found

    def lease_rows(
        self,
        ids: Tensor,
        features: Features | None = None,
        lengths: Sequence[int] = (),
        counted: Tensor | None = None,
    ) -> Batch | RemoteBatch:
        """Lease the rows of ids whose gradient may come, wherever they are.

        Args:
            ids: of the table; or of `features`, int64 `(n,)`, one feature after another.
            features: which; None for a layer over one table.
            lengths: how many ids each has.
            counted: bool `(n,)`, the ids that take part in training; None means all but padding.
        """
        own = self.own
        if features is None and counted is None and self.padding_idx is not None:
            counted = ids.reshape(-1) != self.padding_idx
        if self.is_shared:
            rows = ids if features is None else self.table.in_space(ids, features, lengths)
            return RemoteBatch(self.table, rows, self.field, self._like, counted, own)
        own.settle()
        lease = None
        if features is not None:
            lease = self.table.lease_features(ids, features, lengths)
        return Batch(self.table, ids, counted, own.abandoned, lease=lease, zeros=own.zeros)

    def let_train(self, trained: bool) -> None:
        """Note whether the rows are trained; raises InvalidInputError for averages."""
        if trained and self._averages:
            raise InvalidInputError("averages are not trained: freeze them, requires_grad_(False)")
        self._trained: bool = trained
        """Whether the parameter requires a gradient; graphs are compiled for one answer."""

    def read_lease(self, rows: Tensor) -> Lease | RemoteLease:
        """Lease rows that take no part in training, wherever they are."""
        settle = self.own.settle
        if self.is_shared:
            return RemoteLease.of(self.table, rows, self.field, self._like, settle)
        settle()
        lease: Lease = self.table.lease(rows)
        return lease

    def expands(self, nbytes: int) -> bool:
        """Tell whether to read a row for each id, so many bytes, that takes no part in training.

        Averages always do, and layers by key.
        """
        if self._averages or self.by_key:
            return True
        return not self.is_shared and reads_each(_first_of(self.table), nbytes)

    def read_rows(self, ids: Tensor) -> Tensor:
        """Return the rows of ids that take no part in training, or their averages."""
        settle = self.own.settle
        if self.is_shared:
            call, like, read = Call("look up", self.field), self._like, self._read_shard
            if self._averages:
                call, like = Call("average", self.field), self._averages[0].like()
                read = self._averaged
            of_ranks: Tensor = self.table.read_with(ids, call, like, read, settle)
            return of_ranks.view(*ids.shape, self.embedding_dim).to(self.anchor)
        settle()
        if self._averages:
            return self._averaged(ids).to(self.anchor)
        rows: Tensor = self.table.read(ids, self.field)
        return rows.to(self.anchor)

    def _read_shard(self, rows: Tensor, *_: object) -> Tensor:
        """Return rows of this rank, `(n, dim)`."""
        found: Tensor = self._shard.read(rows, self.field)
        return found

    def _averaged(self, rows: Tensor, *_: object) -> Tensor:
        """Return the averages of rows of this rank, `rows.shape + (dim,)`."""
        first = self._averages[0]
        return first.after(self._steps(rows), self._shard.read(rows, first.names))

    def _steps(self, rows: Tensor) -> int | Tensor:
        """Return the number of steps that were averaged, of all rows or of each, `(n, 1)`."""
        if not isinstance(self._shard, JointTable):
            return self._averages[0].steps
        steps = torch.tensor([each.steps for each in self._averages], device=rows.device)
        return steps[self._shard.location.tables_of(rows)][:, None]

    def look_up_averages(self) -> None:
        """Look averages up from now on, frozen; raises InvalidInputError where none are kept."""
        if self.by_key:
            raise InvalidInputError(f"table {self.table.name!r} is by key; averages go by row")
        averages = [Average(table, self.field) for table in self.own.tables]
        for each in averages:
            each.check_kept()
        self._averages = averages
        self.requires_grad_(False)

    # -- as a module

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Convert the layer; the rows stay in the type and on the device of the table.

        Raises InvalidInputError for the device "meta", where there are no rows to look up.
        """
        with torch.no_grad():
            empty = fn(self.anchor)
        if empty.is_meta:
            raise InvalidInputError(
                f"the rows of table {self.table.name!r} are not on the device meta: convert the "
                "other modules of the model, or make a torch.nn.Embedding of the same shape there"
            )
        rows = self._parameters.pop("rows")
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters["rows"] = rows
        self._follow(empty)
        return self

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse torch.jit.script, which calls this."""
        raise InvalidInputError(
            "torch.jit.script takes no layer over a table: use torch.export.export, whose programs "
            "look rows up"
        )

    def reset_parameters(self) -> NoReturn:
        """Refuse what would draw every row of a table anew; code that finds it calls it."""
        raise InvalidInputError(
            f"reset_parameters() would draw every row of table {self.table.name!r} anew: write "
            "them, block by block, with table.write(ids, rows); for the same start again, "
            "store.keep(store.version, 'start') before and store.restore('start')"
        )

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled: what trains lies in the store, of which there is one writer."""
        raise InvalidTypeError(
            "a layer that trains rows cannot be pickled: save its state_dict(); in a worker use "
            "FrozenEmbedding(table) with a table of a store that is open for reading"
        )

    def __deepcopy__(self, memo: dict[Any, Any]) -> Self:
        """Return another layer over the same table, not trained yet; rows are not copied.

        Warns of that, once a table, since a copy of a model would have rows of its own in torch.
        """
        first = _first_of(self._shard)
        if AVERAGED not in memo and first not in _copied:
            _copied.add(first)
            name = self.table.name
            warn(
                f"a copy of a layer shares the rows of table {name!r}, which change as either "
                "trains. For averages of them give the optimizer ema= and call emb.averaged(); "
                "for rows that stay as they are open a version that is kept, FrozenEmbedding("
                f"tierstore.open(path, version=...)[{name!r}]); for rows of its own call "
                "store.save(path) and make a model over that",
                TierStoreWarning,
            )
        rows = memo.get(id(self.own))  # that of another layer over the field, copied with this one
        if type(rows) is not RowsParameter:
            rows = memo[id(self.own)] = RowsParameter(self._shard, self.field, self.anchor)
            rows.requires_grad = self.own.requires_grad
        other = copied(self, memo)
        other._begin(self.anchor, rows)
        return other


def copied(module: Module, memo: dict[int, Any]) -> Module:
    """Return a module that shares attributes with another, but has copies of its hooks and buffers.

    So it is with modules and parameters in it, as where torch copies one.
    """
    other: Module = module.__class__.__new__(module.__class__)
    memo[id(module)] = other
    other.__dict__.update(module.__getstate__())
    for name in _OF_MODULES:
        other.__dict__[name] = copy.deepcopy(module.__dict__[name], memo)
    return other


def _first_of(table: Table | JointTable) -> Table:
    return table.tables[0] if isinstance(table, JointTable) else table


_copied: weakref.WeakSet[Table] = weakref.WeakSet()
"""Tables of which a copy of a layer was told."""
_over: weakref.WeakKeyDictionary[Table, weakref.WeakValueDictionary[Any, RowsParameter]]
_over = weakref.WeakKeyDictionary()


def _parameter_over(table: Table | JointTable, field: str, empty: Tensor) -> RowsParameter:
    """Return the parameter of the layers over a field: theirs, or a new one."""
    first, key = (
        (table.tables[0], (table.tables, field))
        if isinstance(table, JointTable)
        else (table, field)
    )
    fields = _over.setdefault(first, weakref.WeakValueDictionary())
    if key not in fields:
        made = fields[key] = RowsParameter(table, field, empty)
        return made
    return fields[key]
