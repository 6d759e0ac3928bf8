"""An embedding layer over a table of a store."""

from __future__ import annotations

import contextlib
import copy
import warnings
import weakref
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from tierstore import initializers
from tierstore._store.store import Store
from tierstore._table.table import Table
from tierstore.distributed.table import DistributedTable
from tierstore.errors import InvalidInputError, InvalidTypeError, TierStoreError, ZeroRowsWarning
from tierstore.nn import autograd, pointers
from tierstore.nn.autograd import Abandoned, Batch
from tierstore.nn.average import Average
from tierstore.nn.remote import RemoteBatch
from tierstore.nn.rows import RowsParameter
from tierstore.spec import TableSpec

__all__ = ["TieredEmbedding", "TieredEmbeddingBag", "jagged"]


class TieredEmbedding(torch.nn.Module):
    """Looks up rows of a table, as `torch.nn.Embedding` does those of its weight.

    Rows arrive in the type and on the device of the module, at first the table's own; `.to(...)`
    changes that and not the table. With gradients enabled a forward pass keeps the rows in place
    until the step of the `TieredOptimizer` they are trained by; under `torch.no_grad()`, and where
    `requires_grad_(False)` froze the layer, it only reads. Ids are read once: their buffer may be
    used again before the backward pass.

    The rows are no tensor: there is no `weight`, and `state_dict()` holds a pointer to the store.
    The layer's parameter, `rows`, is empty but from a backward pass to its step, where it is the
    distinct rows that got a gradient, with that gradient. Layers over the same field share it, as
    tied weights: freezing one freezes the others. A `deepcopy` shares the table and has a parameter
    of its own.

    >>> emb = TieredEmbedding(store["item"])
    >>> emb(torch.tensor([[1, 2], [3, 1]])).shape
    torch.Size([2, 2, 16])
    """

    rows: RowsParameter
    _own: RowsParameter

    def __init__(
        self,
        table: Table | DistributedTable,
        field: str | None = None,
        padding_idx: int | None = None,
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> None:
        """Put a layer over a table; nothing is written.

        Warns once of a table whose first field is still all zeros, as far as a look at some rows
        tells: a model of products of such rows never trains.

        Args:
            table: a table of an open store; several layers may share it. One that ranks share
                makes forward and backward passes collective: every rank takes part in each, if
                with no ids.
            field: the field to look up and train; the first if None.
            padding_idx: a row that takes no part in training, from the end if negative. It is
                looked up like any other: write zeros there if padding should be zero.
            max_norm: refused, as scale_grad_by_freq is, with InvalidInputError.
            norm_type: ignored.
            scale_grad_by_freq: refused.
            sparse: ignored; gradients are always of the touched rows alone.
        """
        super().__init__()
        if not isinstance(table, Table | DistributedTable):
            raise InvalidTypeError(
                f"an embedding needs a table such as store['item'], not {table!r}"
            )
        if max_norm is not None:
            raise InvalidInputError(
                "max_norm would write rows in a forward pass; renormalize them with table.write"
            )
        if scale_grad_by_freq:
            raise InvalidInputError("scale_grad_by_freq is not supported: gradients are summed")
        self.table = table
        self.field: str = next(iter(table.fields)) if field is None else field
        item = table.spec.layout.field(self.field)
        if not item.element.trainable:
            raise InvalidTypeError(
                f"field {self.field!r} of table {table.name!r} is {item.dtype}, and torch trains "
                "floats alone; read it with table.read"
            )
        self.padding_idx: int | None = _from_start(padding_idx, table.rows)
        self.embedding_dim: int = item.dim
        self._average: Average | None = None
        self._dtype = item.element.torch_dtype()
        empty = torch.empty(0, item.dim, dtype=self._dtype, device=table.device)
        self._begin(empty, _parameter_over(self._shard, self.field, empty))
        _warn_of_zeros(self._shard, self.field)

    def _begin(self, empty: Tensor, rows: RowsParameter) -> None:
        """Take a parameter, and be of the type and on the device of an empty tensor."""
        self.rows = rows
        self.__dict__["_own"] = rows  # also where something replaces what is registered
        rows.layers.add(self)
        self._trained: bool = rows.requires_grad
        """Whether the parameter requires a gradient; graphs are compiled for one answer."""
        self._abandoned = Abandoned()
        self._number = autograd.register(self, self._shard, self.field)
        self._follow(empty)

    def _follow(self, empty: Tensor) -> None:
        """Be of the type and on the device of an empty tensor, `(0, dim)`."""
        self._anchor = empty.detach().requires_grad_()
        """What compiled graphs hang rows on: unlike the parameter, it is always empty."""
        self._node = torch.autograd.graph.get_gradient_edge(self._anchor).node
        self._own.rest(self._anchor)

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor | torch.nn.Embedding | torch.nn.EmbeddingBag,
        store: Store,
        name: str,
        *,
        freeze: bool = True,
        **options: Any,
    ) -> Self:
        """Make a table of a weight `(rows, dim)`, a commit of its own, and a layer over it.

        Args:
            embeddings: the weight, or the layer that has it; its type is that of the table.
            store: where the table goes.
            name: of the table.
            freeze: whether the layer only reads, as in torch; `requires_grad_(True)` trains it.
            options: what the layer takes besides a table: padding_idx, mode, …

        >>> plain = torch.nn.Embedding(1000, 16)
        >>> emb = TieredEmbedding.from_pretrained(plain, store, "word", freeze=False)
        """
        weight = embeddings if isinstance(embeddings, Tensor) else embeddings.weight
        dtype = str(weight.dtype).removeprefix("torch.")
        rows, dim = weight.shape
        spec = TableSpec(rows, dim, dtype, init=initializers.from_array(weight))
        layer = cls(store.create_table(name, spec), **options)
        layer.requires_grad_(not freeze)
        return layer

    def averaged(self) -> Self:
        """Return a frozen copy of the layer whose rows are their moving averages.

        Those of the last step, at every lookup. Raises InvalidInputError where none are kept;
        `TieredOptimizer(..., ema=0.999)` keeps them.
        """
        average = Average(self._shard, self.field)
        if isinstance(self.table, DistributedTable):
            raise InvalidInputError("averages of a table of several ranks cannot be looked up yet")
        if not average.kept:
            raise InvalidInputError(
                f"no average of field {self.field!r} of table {self.table.name!r} is kept: make "
                "the TieredOptimizer with ema=0.999, and train"
            )
        layer = copy.deepcopy(self)
        layer._average = average
        layer.requires_grad_(False)
        return layer

    @property
    def _shard(self) -> Table:
        """The rows of the table that are on this rank."""
        return self.table.shard if isinstance(self.table, DistributedTable) else self.table

    @property
    def num_embeddings(self) -> int:
        """Number of rows of the table."""
        return self.table.rows

    def forward(self, input: Tensor) -> Tensor:
        """Return the row of each id, `input.shape + (embedding_dim,)`.

        Nested ids of layout `torch.jagged` give nested rows.
        """
        if isinstance(input, Tensor) and input.is_nested:
            ids = jagged(input)
            rows = self._look_up(ids.values())
            return torch.nested.nested_tensor_from_jagged(rows, ids.offsets())
        return self._look_up(input)

    def _look_up(self, ids: Tensor) -> Tensor:
        if not isinstance(ids, Tensor):
            raise InvalidTypeError(f"a layer takes ids as a tensor, not {type(ids).__name__}")
        if torch.jit.is_tracing():
            raise InvalidInputError(
                "torch.jit.trace would bake the rows of this batch into the program; use "
                "torch.export.export, whose programs look rows up"
            )
        trained = self._trained and torch.is_grad_enabled()
        if torch.compiler.is_compiling():
            if trained:
                return autograd.lookup(ids, self._anchor, self._number)[0]
            return autograd.read(ids, self._anchor.detach(), self._number)
        parameter = self._parameters["rows"]
        if parameter is not self._own:
            self._check_untrained(parameter)
            trained = False
        if not torch._C._are_functorch_transforms_active():
            if trained:
                return autograd.Lookup.apply(parameter, ids, self)
            return self._read_rows(ids)
        if trained:
            return autograd.Transformed.apply(parameter, ids, self)[0]
        return autograd.read(ids, self._anchor.detach(), self._number)

    def _check_untrained(self, parameter: Any) -> None:
        """Raise InvalidInputError if what replaced the parameter of the layer wants a gradient."""
        if (parameter.requires_grad and torch.is_grad_enabled()) or _is_differentiated(parameter):
            raise InvalidInputError(
                f"a {type(parameter).__name__} replaced the parameter of the layer over table "
                f"{self.table.name!r}; its gradient would not be that of the rows. Give "
                "fully_shard ignored_params=set(emb.parameters()), and torch.func.functional_call "
                "the parameters of other layers only"
            )

    def prefetch(self, ids: Any, *, window: int = 16) -> None:
        """Start bringing the rows of a coming batch nearer; see `Table.prefetch`."""
        self.table.prefetch(ids, window=window)

    # -- what the operators call

    def _lease_rows(self, ids: Tensor) -> Batch | RemoteBatch:
        """Lease the rows of ids whose gradient may come."""
        if self._average is not None:
            raise InvalidInputError("averages are not trained: freeze them, requires_grad_(False)")
        self._abandoned.release()
        self._own.settle()
        if isinstance(self.table, DistributedTable):
            return RemoteBatch(self.table, ids, self.padding_idx, self._abandoned)
        return Batch(self.table, ids, self.padding_idx, self._abandoned)

    def _rows_of(self, batch: Batch | RemoteBatch) -> Tensor:
        """Return the row of each id of a batch."""
        return batch.rows(self.field).to(self._anchor)

    def _read_rows(self, ids: Tensor) -> Tensor:
        """Return the rows of ids that take no part in training."""
        self._abandoned.release()
        self._own.settle()
        if self._average is not None:
            return self._average.read(ids).to(self._anchor)
        rows: Tensor = self.table.read(ids, self.field)
        return rows.to(self._anchor)

    def _take_gradient(self, batch: Batch | RemoteBatch, gradient: Tensor) -> None:
        """Keep the gradient of each id's row, summed by row, for the optimizer."""
        if not self._own.optimizers:
            raise InvalidInputError(
                f"the gradient of table {self.table.name!r} has nowhere to go: make a "
                "tierstore.optim.TieredOptimizer over this layer before training, or freeze it "
                "with requires_grad_(False)"
            )
        if batch.size:
            own = gradient.to(self.table.device, self._dtype)
            self._own.add(batch.gradient(own))

    # -- as a module

    def extra_repr(self) -> str:
        """Name the table and what is special."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.table.name!r}, {self.num_embeddings}, {self.embedding_dim}{padding}"

    def __getattr__(self, name: str) -> Any:
        """Explain what became of `weight`."""
        if name == "weight":
            raise AttributeError(
                "the rows of a TieredEmbedding are not one tensor: read them with "
                "emb.table.read(ids), write them with emb.table.write(ids, rows)"
            )
        return super().__getattr__(name)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Convert the layer; the rows stay in the type and on the device of the table."""
        rows = self._parameters.pop("rows")
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters["rows"] = rows
        with torch.no_grad():
            empty = fn(self._anchor)
        self._follow(empty)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TieredEmbedding:
        """Return another layer over the same table, not trained yet; rows are not copied."""
        other = self.__class__.__new__(self.__class__)
        memo[id(self)] = other
        other.__dict__.update(self.__dict__)
        other._parameters = {}
        rows = memo.get(id(self._own))  # that of another layer over the field, copied with this one
        if type(rows) is not RowsParameter:
            rows = memo[id(self._own)] = RowsParameter(self._shard, self.field, self._anchor)
            rows.requires_grad = self._own.requires_grad
        other._begin(self._anchor, rows)
        return other

    def get_extra_state(self) -> Tensor:
        """Return the pointer that `state_dict()` holds: store, version, table and field, as bytes.

        Raises InvalidInputError where rows are not committed.
        """
        return pointers.to_tensor(self._shard, self.field)

    def set_extra_state(self, state: Any) -> None:
        """Bring the store to the version that a pointer names; see `Store.restore`.

        Raises InvalidInputError for a pointer to another store, table or field, or to a version
        that is not kept.
        """
        pointers.restore(self._shard, self.field, state)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}rows"] = self._anchor.detach()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        rows, empty = self._parameters["rows"], self._anchor.detach()
        self._parameters["rows"] = torch.nn.Parameter(empty.clone())
        try:
            super()._load_from_state_dict({**state_dict, f"{prefix}rows": empty}, prefix, *rest)
        finally:
            self._parameters["rows"] = rows


_over: weakref.WeakKeyDictionary[Table, weakref.WeakValueDictionary[str, RowsParameter]]
_over = weakref.WeakKeyDictionary()


def _parameter_over(table: Table, field: str, empty: Tensor) -> RowsParameter:
    """Return the parameter of the layers over a field: theirs, or a new one."""
    fields = _over.setdefault(table, weakref.WeakValueDictionary())
    if field not in fields:
        made = fields[field] = RowsParameter(table, field, empty)
        return made
    return fields[field]


_looked_at: weakref.WeakSet[Table] = weakref.WeakSet()


def _warn_of_zeros(table: Table, field: str) -> None:
    """Warn of a table that was never filled; biases, of one element, start from zeros."""
    if table in _looked_at or table.dim == 1 or field != next(iter(table.fields)):
        return
    _looked_at.add(table)
    ids = np.arange(0, table.rows, max(1, table.rows // 64))
    with contextlib.suppress(TierStoreError):  # what is damaged is no zeros, and a later error
        for part in (ids[:1], ids[1:]):
            if table.read(part, field, cache=False).any():
                return
        warnings.warn(
            f"the rows of table {table.name!r} are zeros, as they were made: products of such rows "
            "have no gradient; give TableSpec an init such as tierstore.normal(std=0.1), or write "
            "the rows",
            ZeroRowsWarning,
            stacklevel=3,
        )


def jagged(ids: Tensor) -> Any:
    """Return nested ids without gaps; raises InvalidTypeError for another layout than jagged."""
    if ids.layout != torch.jagged:
        raise InvalidTypeError(f"nested ids are of layout torch.jagged, not {ids.layout}")
    return ids.contiguous()


def _is_differentiated(parameter: Any) -> bool:
    """Tell whether a transform of torch.func differentiates with respect to a tensor."""
    functorch: Any = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(parameter):
        if functorch.is_gradtrackingtensor(parameter):
            return True
        parameter = functorch.get_unwrapped(parameter)
    return False


def _from_start(padding_idx: int | None, rows: int) -> int | None:
    if padding_idx is None:
        return None
    if not -rows <= padding_idx < rows:
        raise InvalidInputError(f"padding_idx {padding_idx} is not a row of 0..{rows - 1}")
    return padding_idx % rows


class TieredEmbeddingBag(TieredEmbedding):
    """Sums, means or maxima over bags of rows, as `torch.nn.EmbeddingBag`; see `TieredEmbedding`.

    Rows of `padding_idx` are left out of their bags.
    """

    def __init__(
        self,
        table: Table,
        field: str | None = None,
        padding_idx: int | None = None,
        *,
        mode: Literal["sum", "mean", "max"] = "mean",
        include_last_offset: bool = False,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> None:
        """Put a layer over a table.

        Args:
            table: a table of an open store.
            field: the field to look up and train; the first if None.
            padding_idx: a row that is left out.
            mode: "sum", "mean" or "max".
            include_last_offset: whether offsets end with the number of ids.
            max_norm: refused, as scale_grad_by_freq is, with InvalidInputError.
            norm_type: ignored.
            scale_grad_by_freq: refused.
            sparse: ignored.
        """
        super().__init__(
            table,
            field,
            padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
        )
        if mode not in ("sum", "mean", "max"):
            raise InvalidInputError(f"mode is 'sum', 'mean' or 'max', not {mode!r}")
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Return one row a bag, `(bags, embedding_dim)`.

        Args:
            input: ids, 2-D `(bags, n)`, nested of layout `torch.jagged`, or 1-D with `offsets`.
            offsets: where each bag starts in a 1-D input.
            per_sample_weights: a factor for each id, in the shape of `input`; only with mode "sum".
        """
        include_last_offset = self.include_last_offset
        if isinstance(input, Tensor) and input.is_nested:
            bags = jagged(input)
            input, offsets, include_last_offset = bags.values(), bags.offsets(), True
            if per_sample_weights is not None:
                per_sample_weights = jagged(per_sample_weights).values()
        if not isinstance(input, Tensor):
            raise InvalidTypeError(f"a layer takes ids as a tensor, not {type(input).__name__}")
        ids = input.reshape(-1)
        places = torch.arange(ids.shape[0], device=self._anchor.device)
        padding = None
        if self.padding_idx is not None:
            ids = torch.cat([ids, ids.new_full((1,), self.padding_idx)])
            padding = places.shape[0]
            places = torch.where(ids[:-1].to(places.device) == self.padding_idx, padding, places)
        return torch.nn.functional.embedding_bag(
            places.reshape(input.shape),
            self._look_up(ids),
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=include_last_offset,
            padding_idx=padding,
        )
