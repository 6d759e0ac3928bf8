"""An embedding layer over a table of a store."""

from __future__ import annotations

import contextlib
import copy
import inspect
import weakref
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from tierstore import initializers
from tierstore._kinds import check_store
from tierstore._store.store import Store
from tierstore._table.keyed import guessed, rows_for
from tierstore._table.table import Table
from tierstore.distributed.keyed import DistributedKeyedTable
from tierstore.distributed.table import DistributedTable
from tierstore.errors import (
    InvalidInputError,
    InvalidTypeError,
    TierStoreError,
    TierStoreWarning,
    ZeroRowsWarning,
    warn,
)
from tierstore.nn import compiling, pointers
from tierstore.nn.autograd import Lookup, Rows, look_up
from tierstore.nn.features import jagged
from tierstore.nn.keyed import ByKey, numbered, while_named
from tierstore.nn.layer import AVERAGED, RowsLayer
from tierstore.nn.pretrained import taken_over
from tierstore.spec import TableSpec


class TieredEmbedding(RowsLayer):
    """Looks up rows of a table, as `torch.nn.Embedding` does those of its weight.

    Rows arrive in the type and on the device of the module, at first the table's own; `.to(...)`
    changes that and not the table. With gradients enabled a forward pass keeps the rows in place
    until the step of the `TieredOptimizer` that trains them; under `torch.no_grad()`, and where
    `requires_grad_(False)` froze the layer, it only reads. Ids are read once: their buffer may be
    used again before the backward pass.

    The rows are no tensor: there is no `weight`, and `state_dict()` holds a pointer to the store.
    The layer's parameter, `rows`, is empty except between a backward pass and its step, where it is
    the distinct rows that got a gradient, with that gradient. Layers over the same field share it,
    as tied weights: freezing one freezes the others. A `deepcopy` shares the table and has a
    parameter of its own.

    >>> emb = TieredEmbedding(store["item"])
    >>> emb(torch.tensor([[1, 2], [3, 1]])).shape
    torch.Size([2, 2, 16])
    """

    table: Table
    _stands_for: type[torch.nn.Module] = torch.nn.Embedding

    def __init__(
        self,
        table: Table | DistributedTable | DistributedKeyedTable,
        field: str | None = None,
        padding_idx: int | None = None,
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> None:
        """Put a layer over a table; nothing is written.

        Warns once of a table whose first field is still all zeros, as far as a sample of rows
        shows: a model of products of such rows never trains.

        Args:
            table: a table of an open store; several layers may share it. One that ranks share
                makes forward and backward passes collective: every rank takes part in each, if
                with no ids. For a table by key, a forward pass takes keys, which may be texts in
                lists; while it trains, new ones get a row, and in `eval()` or without gradients
                nothing is added.
            field: the field to look up and train; the first if None.
            padding_idx: a row that takes no part in training, from the end if negative. It is
                looked up like any other: write zeros there if padding should be zero.
            max_norm: refused, as scale_grad_by_freq is, with InvalidInputError.
            norm_type: ignored.
            scale_grad_by_freq: refused.
            sparse: ignored; gradients are always of the touched rows alone.
        """
        if not isinstance(table, Table | DistributedTable | DistributedKeyedTable):
            raise InvalidTypeError(
                f"an embedding needs a table such as store['item'], not {table!r}"
            )
        keyed = table if isinstance(table, ByKey) else None
        if keyed is not None and padding_idx is not None:
            raise InvalidInputError(
                f"table {table.name!r} is by key, and padding_idx goes by row: leave it out"
            )
        self._check_options(
            table.rows,
            padding_idx=padding_idx,
            max_norm=max_norm,
            scale_grad_by_freq=scale_grad_by_freq,
        )
        super().__init__(
            table if not isinstance(table, ByKey) else table.by_row,
            next(iter(table.fields)) if field is None else field,
            by_key=keyed is not None,
        )
        self._keyed: ByKey | None = keyed
        self.padding_idx: int | None = from_start(padding_idx, table.rows)
        if not isinstance(table, ByKey):
            warn_of_zeros(table, self.field)

    @classmethod
    def _check_options(
        cls,
        rows: int,
        *,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        scale_grad_by_freq: bool = False,
        **_: Any,
    ) -> None:
        """Raise InvalidInputError for options that a layer over so many rows cannot have."""
        if max_norm is not None:
            raise InvalidInputError(
                f"max_norm={max_norm} would write rows in a forward pass: leave it out, and "
                "renormalize rows with table.write, or with project= of the TieredOptimizer"
            )
        if scale_grad_by_freq:
            raise InvalidInputError(
                "scale_grad_by_freq=True is not supported, gradients are summed: leave it out, and "
                "divide the loss of each id by how often it is in the batch"
            )
        from_start(padding_idx, rows)

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

        A layer of torch is taken over whole: `padding_idx`, and for bags `mode` and
        `include_last_offset`, are those that it has, unless `options` name others; so is whether it
        is in training mode. The weight is copied.

        Args:
            embeddings: the weight, or the layer that has it; its type is that of the table.
            store: where the table goes.
            name: of the table.
            freeze: whether the layer only reads, as in torch; `requires_grad_(True)` trains it.
            options: what the layer takes besides a table: padding_idx, mode, …

        Raises InvalidInputError, before anything is written, for a layer that does more than this
        one can: with `max_norm` or `scale_grad_by_freq`, with hooks, a parametrization or a
        `forward` of its own, and for one that pools where this one does not, or the reverse.
        InvalidTypeError for what is neither a matrix nor such a layer.

        >>> plain = torch.nn.Embedding(1000, 16)
        >>> emb = TieredEmbedding.from_pretrained(plain, store, "word", freeze=False)
        """
        check_store(store, "from_pretrained")
        weight, taken = taken_over(embeddings, cls._stands_for, cls)
        options = {**taken, **options}
        inspect.signature(cls).bind(None, **options)
        rows, dim = weight.shape
        cls._check_options(rows, **options)
        dtype = str(weight.dtype).removeprefix("torch.")
        spec = TableSpec(rows, dim, dtype, init=initializers.from_array(weight))
        layer = cls(store.create_table(name, spec), **options)
        layer.requires_grad_(not freeze)
        layer.train(getattr(embeddings, "training", True))
        return layer

    def averaged(self) -> Self:
        """Return a frozen copy of the layer whose rows are their moving averages.

        Each lookup reads the averages of the last step. Raises InvalidInputError where none are
        kept; `TieredOptimizer(..., ema=0.999)` keeps them.
        """
        layer = copy.deepcopy(self, {AVERAGED: True})
        layer.look_up_averages()
        return layer

    @property
    def num_embeddings(self) -> int:
        """Number of rows of the table; of a table by key, those that have a key."""
        return self.table.rows if self._keyed is None else self._keyed.rows

    def forward(self, input: Tensor) -> Tensor:
        """Return the row of each id, `input.shape + (embedding_dim,)`.

        Nested ids of layout `torch.jagged` give nested rows.
        """
        if isinstance(input, Tensor) and input.is_nested:
            ids = jagged(input)
            rows = TieredEmbedding.forward(self, ids.values())
            return torch.nested.nested_tensor_from_jagged(rows, ids.offsets())
        if self._keyed is not None:
            return self._look_up_keys(input, self._keyed)
        if not isinstance(input, Tensor):
            raise InvalidTypeError(
                f"a layer takes ids as a tensor, not {type(input).__name__}; for torch.fx give its "
                "Tracer an is_leaf_module that is true for the layer"
            )
        if torch.compiler.is_compiling():
            return compiling.look_up(input, self)
        if self.own.trains(self):
            is_transformed = torch._C._are_functorch_transforms_active()
            call = Lookup.apply if is_transformed else look_up
            found: Tensor = call(Rows(self), self.own, input)
            return found
        if torch._C._are_functorch_transforms_active():
            return compiling.look_up(input, self, reads=True)
        return self.read_rows(input)

    def _look_up_keys(self, keys: Any, table: ByKey) -> Tensor:
        """Return the row of each key; those that are new get one where they are trained."""
        self._check_eager(table)
        if self.own.trains(self):
            return while_named([table], partial(self._look_up_trained, keys, table))
        self.own.settle()
        rows: Tensor = table.read(keys, self.field, as_tensor=True)
        return rows.to(self.anchor)

    def _look_up_trained(self, keys: Any, table: ByKey) -> Tensor:
        """Return the row of each key; those that are new get one, if the table admits them.

        If the device is likely to know all, rows are looked up before it has answered, so that it
        is not idle meanwhile; if the guess was wrong, the batch is dropped and looked up again.
        """
        rows: Tensor
        if table.spec.admit_after is not None:
            ids, first = numbered(table, self.field, keys, add=True)
            known = None if first is None else first.without(ids.numel())
            rows = look_up(Rows(self, counted=known), self.own, ids)
            if first is not None:
                first.put(rows.view(-1, self.embedding_dim))
            return rows
        known = guessed(table, keys)
        if known is not None:
            numbers, guess = known
            found: Tensor = look_up(Rows(self), self.own, numbers)
            if guess.is_right():
                return found
            del found
        rows = look_up(Rows(self), self.own, rows_for(table, keys))
        return rows

    def _check_eager(self, table: ByKey) -> None:
        """Raise InvalidInputError where a graph is being made, which cannot look keys up."""
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            raise InvalidInputError(
                f"table {table.name!r} is by key: keys are looked up outside of torch.compile and "
                "torch.func, so keep this layer out of them"
            )

    def prefetch(self, ids: Any, *, window: int = 16) -> None:
        """Start bringing the rows of a coming batch nearer; see `Table.prefetch`."""
        table = self.table if self._keyed is None else self._keyed
        table.prefetch(ids, window=window)

    # -- as a module

    def extra_repr(self) -> str:
        """Name the table and what is special."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.table.name!r}, {self.num_embeddings}, {self.embedding_dim}{padding}"

    def __getattr__(self, name: str) -> Any:
        """Explain what became of `weight`."""
        if name == "weight":
            raise AttributeError(
                f"the rows of a {type(self).__name__} are not one tensor, so it has no weight: for "
                "all rows with gradients call emb(torch.arange(emb.num_embeddings)); without, "
                "emb.table.read(ids) reads and emb.table.write(ids, rows) writes them; the "
                "gradient of a step is emb.rows.grad, of the rows emb.rows.ids; for more rows, as "
                "of resize_token_embeddings, call store.grow(name, rows)"
            )
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse what would be accepted by a module and do nothing: a weight, other rows."""
        if name == "weight":
            raise self._no_weight()
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Add a parameter; raises AttributeError for a weight, which would not be used."""
        if name == "weight":
            raise self._no_weight()
        super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Add a buffer; raises AttributeError for a weight, which would not be used."""
        if name == "weight":
            raise self._no_weight()
        super().register_buffer(name, tensor, persistent)

    def _no_weight(self) -> AttributeError:
        return AttributeError(
            f"the rows of a {type(self).__name__} lie in a table, and a weight that is set would "
            "not be used: write values with emb.table.write(ids, rows); tie an output layer by "
            "F.linear(x, emb(torch.arange(emb.num_embeddings))), and a model of transformers by "
            "tierstore.integrations.transformers.set_embedding(model, emb)"
        )

    def get_extra_state(self) -> Tensor:
        """Return the pointer that `state_dict()` holds: store, version, table and field, as bytes.

        Raises InvalidInputError where rows are not committed.
        """
        return pointers.to_tensor(self.table.store, table=self.table.name, field=self.field)

    def set_extra_state(self, state: Any) -> None:
        """Bring the store to the version that a pointer names; see `Store.restore`.

        Raises InvalidInputError for a pointer to another store, table or field, or to a version
        that is not kept.
        """
        pointers.restore(self.table.store, state, table=self.table.name, field=self.field)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}rows"] = self.anchor.detach()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        rows, empty = self._parameters["rows"], self.anchor.detach()
        self._parameters["rows"] = torch.nn.Parameter(empty.clone())
        try:
            super()._load_from_state_dict({**state_dict, f"{prefix}rows": empty}, prefix, *rest)
        finally:
            self._parameters["rows"] = rows
        found = state_dict.get(f"{prefix}rows")
        for name in ("weight", *(["rows"] if isinstance(found, Tensor) and len(found) else [])):
            if f"{prefix}{name}" not in state_dict:
                continue
            warn(
                f"{prefix}{name} has values of rows and is not loaded: the rows of a "
                f"{type(self).__name__} lie in a table; make one with from_pretrained(weight, "
                "store, name) or 'tierstore load', or write them: emb.table.write(ids, weight)",
                TierStoreWarning,
            )


_looked_at: weakref.WeakSet[Table] = weakref.WeakSet()


def warn_of_zeros(table: Table | DistributedTable, field: str) -> None:
    """Warn of a table that was never filled; biases, of one element, start from zeros.

    Each rank looks at its own rows of a table of several ranks.
    """
    if isinstance(table, DistributedTable):
        if not table.place.ids:
            return
        table = table.shard
    if table in _looked_at or table.dim == 1 or field != next(iter(table.fields)):
        return
    _looked_at.add(table)
    ids = np.arange(0, table.rows, max(1, table.rows // 64))
    with contextlib.suppress(TierStoreError):  # damaged rows are no zeros, and raise later
        for part in (ids[:1], ids[1:]):
            if table.read(part, field, cache=False).any():
                return
        warn(
            f"the rows of table {table.name!r} are zeros, as they were made: products of such rows "
            "have no gradient; give TableSpec an init such as tierstore.normal(std=0.1), or write "
            "the rows",
            ZeroRowsWarning,
        )


def from_start(padding_idx: int | None, rows: int) -> int | None:
    """Return a row of padding, which counts from the end if negative, as one from the start."""
    if padding_idx is None:
        return None
    if not -rows <= padding_idx < rows:
        raise InvalidInputError(f"padding_idx {padding_idx} is not a row of 0..{rows - 1}")
    return padding_idx % rows
