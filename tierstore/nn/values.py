"""What operators see of rows: their values while they have a gradient, else an error.

A parameter of rows has no values at rest, and an operator that took it for an empty matrix would do
nothing, where torch would shrink, initialize, average or compare a weight. torch hands every
operator that meets one to `OfRows.__torch_dispatch__`: one that needs values gets those, and where
there are none the error says how to get them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tierstore.errors import InvalidInputError

FREE = frozenset(
    (
        "",
        "empty_like",
        "full_like",
        "is_same_size",
        "ones_like",
        "rand_like",
        "randint_like",
        "randn_like",
        "zeros_like",
        "new_empty",
        "new_empty_strided",
        "new_full",
        "new_ones",
        "new_zeros",
        "_has_compatible_shallow_copy_type",
        "_has_same_storage_numel",
        "_new_zeros_with_same_feature_meta",
    )
)
"""Operators that need a shape and a type alone; "" stands for those of collectives."""
_SAME = frozenset(("alias", "detach", "lift_fresh"))


def refused(what: str, table: Any) -> InvalidInputError:
    """Return the error for a use of values that are not there."""
    return InvalidInputError(
        f"{what} needs the values of table {table.name!r}, and the parameter of a layer has rows "
        "only from a backward pass to its step: for those of a batch, with gradients, call "
        "emb(ids), for all rows emb(torch.arange(emb.num_embeddings)); write values with "
        "emb.table.write(ids, rows) or TableSpec(init=...); norms and clipping of a step go "
        "between backward() and step(); averages are emb.averaged() with ema= of the optimizer, a "
        "model with rows of its own is one over a store.save(path); what shards every parameter is "
        "to ignore it, as fully_shard with ignored_params=set(emb.parameters())"
    )


class OfRows:
    """A tensor whose operators see rows, or raise InvalidInputError where there are none."""

    def _values_for(self, operator: str) -> Tensor:
        """Return the rows as a tensor of torch's own, or raise InvalidInputError without any."""
        raise NotImplementedError

    def _table(self) -> Any:
        """Return what an error names."""
        raise NotImplementedError

    def _alias(self) -> Tensor:
        """Return the rows without their history, or what stands for none."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(
        cls,
        operator: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call an operator with the rows in place of what stands for them."""
        found: dict[int, tuple[Tensor, Any]] = {}
        name = operator.overloadpacket.__name__
        if operator.namespace == "c10d":
            name = ""  # what is sent to other ranks is as empty there

        def values(value: Any) -> Any:
            if not isinstance(value, OfRows):
                return value
            plain = value._values_for(name)
            found[id(plain)] = plain, value
            return plain

        if name in _SAME and isinstance(args[0], OfRows):
            return args[0]._alias()
        if torch.Tag.inplace_view in operator.tags:  # it would have other rows, or columns
            raise refused(name, args[0]._table())
        args, given = tree_map(values, (tuple(args), dict(kwargs or {})))
        result = operator(*args, **given)
        if operator._schema.is_mutable:  # not every one raises the version of what it writes
            for _, each in found.values():
                each._note_write()
        return tree_map(lambda each: found[id(each)][1] if id(each) in found else each, result)

    row_dim = 0

    @property
    def row_order(self) -> Any:
        """Of which rows this is, an `Order`; None where that is not known."""
        return None

    def _note_write(self) -> None:
        """Take note that an operator may have written into the rows."""

    # What torch decides by the shape, before an operator.

    def __getitem__(self, index: Any) -> Any:
        """Return some rows, as torch does."""
        self._values_for("indexing")
        return super().__getitem__(index)  # type: ignore[misc]

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write some rows, as torch does."""
        self._values_for("indexing")
        super().__setitem__(index, value)  # type: ignore[misc]

    # What reads memory without an operator.

    def numpy(self, *, force: bool = False) -> Any:
        """Return the rows as an array, as torch does."""
        if not force and self.requires_grad:  # type: ignore[attr-defined]
            torch.empty(0, requires_grad=True).numpy()  # raises torch's own error
        return self._values_for("numpy").numpy(force=force)

    def tolist(self) -> Any:
        """Return the rows as lists."""
        return self._values_for("tolist").tolist()

    def __array__(self, *args: Any, **options: Any) -> Any:
        """Return the rows as an array, as torch does."""
        return self.numpy().__array__(*args, **options)

    def __dlpack__(self, **options: Any) -> Any:
        """Return the rows for another library."""
        return self._values_for("__dlpack__").__dlpack__(**options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a tensor of the rows."""
        return self._values_for("pickle").__reduce_ex__(protocol)


class NoRows(OfRows, torch.Tensor):
    """What `data` and `detach()` of a parameter are where it has no rows: a shape and a type."""

    _of: Any
    _empty: Tensor

    @staticmethod
    def of(rows: Any, empty: Tensor) -> NoRows:
        """Stand for a parameter whose value is `empty`."""
        made: NoRows = torch.Tensor._make_subclass(NoRows, empty)
        made._of, made._empty = rows, empty
        return made

    def _values_for(self, operator: str) -> Tensor:
        if operator in FREE:
            return self._empty
        raise refused(operator, self._of.table)

    def _table(self) -> Any:
        return self._of.table

    def _alias(self) -> Tensor:
        return NoRows.of(self._of, self._empty)

    def numel(self) -> int:
        """Return the number of elements of all rows; see `RowsParameter.numel`."""
        count: int = self._of.numel()
        return count

    nelement = numel

    def __repr__(self, **_: Any) -> str:
        """Say that there are no rows."""
        return f"NoRows(of table {self._of.table.name!r}, {tuple(self.shape)}, {self.dtype})"
