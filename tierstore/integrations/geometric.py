"""PyTorch Geometric: tables as node features, read only for the nodes of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tierstore._table.table import Table
from tierstore.errors import InvalidInputError, MissingExtraError

try:
    from torch_geometric.data import FeatureStore, TensorAttr
except ModuleNotFoundError as _error:
    raise MissingExtraError("this needs PyG: pip install torch_geometric") from _error

__all__ = ["TableFeatures"]


class TableFeatures(FeatureStore):  # type: ignore[misc]
    """A FeatureStore whose tensors are fields of tables.

    A NeighborLoader reads only the rows of sampled nodes. Its workers may read tables of a store
    that is open for reading.

        features = TableFeatures({(None, "x"): store["node"]})
        loader = NeighborLoader((features, graph), [10, 5], input_nodes=nodes)
    """

    def __init__(self, tables: Mapping[tuple[Any, str], Table | tuple[Table, str]]) -> None:
        """Give tables, or pairs of a table and a field, by group (of nodes) and attribute."""
        super().__init__()
        self._fields: dict[tuple[Any, str], tuple[Table, str]] = {}
        for key, given in tables.items():
            if isinstance(given, Table):
                given = given, next(iter(given.fields))
            self._fields[key] = given

    def _ids(self, table: Table, index: Any) -> Tensor:
        if index is None:
            return torch.arange(table.rows)
        if isinstance(index, slice):
            return torch.arange(*index.indices(table.rows))
        return torch.as_tensor(index)

    def _field(self, attr: TensorAttr) -> tuple[Table, str] | None:
        return self._fields.get((attr.group_name, attr.attr_name))

    def _get_tensor(self, attr: TensorAttr) -> Tensor | None:
        found = self._field(attr)
        if found is None:
            return None
        table, field = found
        rows: Tensor = table.read(self._ids(table, attr.index), field)
        return rows

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        found = self._field(attr)
        if found is None:
            return False
        table, field = found
        table.write(self._ids(table, attr.index), torch.as_tensor(tensor), field)
        return True

    def update_tensor(self, tensor: Any, *args: Any, **options: Any) -> bool:
        """Write rows of a field; nothing is removed before."""
        done: bool = self.put_tensor(tensor, *args, **options)
        return done

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        raise InvalidInputError(
            f"the rows of {attr.attr_name!r} are in a table: remove it with store.drop(name)"
        )

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...] | None:
        found = self._field(attr)
        if found is None:
            return None
        table, field = found
        rows = table.rows if attr.index is None else len(self._ids(table, attr.index))
        return rows, table.fields[field].dim

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """Return every group and attribute."""
        return [TensorAttr(group, name) for group, name in self._fields]
