"""GraphBolt of DGL: a field of a table as a Feature."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tierstore._table.table import Table

try:
    from dgl.graphbolt import Feature
except (ImportError, OSError):  # its wheels exist only for some versions of torch
    Feature = object

__all__ = ["TableFeature"]


class TableFeature(Feature):  # type: ignore[misc]
    """A field of a table with the interface of `dgl.graphbolt.Feature`.

    It is a subclass of that if GraphBolt can be imported.

        features = gb.BasicFeatureStore({("node", None, "feat"): TableFeature(store["node"])})
    """

    def __init__(self, table: Table, field: str | None = None) -> None:
        """Take a field, the first if None."""
        super().__init__()
        self._table = table
        self._field = next(iter(table.fields)) if field is None else field
        table.spec.layout.field(self._field)

    def read(self, ids: Tensor | None = None) -> Tensor:
        """Return the rows of ids, or of all nodes."""
        wanted = torch.arange(self._table.rows) if ids is None else ids
        rows: Tensor = self._table.read(wanted, self._field)
        return rows

    def size(self) -> torch.Size:
        """Return the shape of the feature of one node."""
        return torch.Size([self._table.fields[self._field].dim])

    def count(self) -> int:
        """Return the number of nodes."""
        return self._table.rows

    def update(self, value: Tensor, ids: Tensor | None = None) -> None:
        """Write the rows of ids, or of all nodes."""
        wanted = torch.arange(self._table.rows) if ids is None else ids
        self._table.write(wanted, value, self._field)

    def metadata(self) -> dict[str, Any]:
        """Return the table and field."""
        return {"table": self._table.name, "field": self._field}
