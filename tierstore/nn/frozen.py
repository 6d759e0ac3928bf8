"""A layer over a table that is only read: for inference, in CUDA graphs and compiled programs."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from tierstore._table.table import Table
from tierstore.errors import InvalidInputError, InvalidTypeError
from tierstore.nn import compiling, naming
from tierstore.nn.layer import copied


class FrozenEmbedding(torch.nn.Module):
    """Looks up rows of a table without a gradient.

    A CUDA graph may capture it on a GPU, after one call outside of the capture, and `torch.compile`
    takes it whole; see `Table.read_into` for what replays read. It has no parameters and no state:
    what it looks up is the table, such as one of `tierstore.attach`.

    >>> layer = FrozenEmbedding(store["item"])
    >>> layer(torch.tensor([[1, 2], [3, 1]])).shape
    torch.Size([2, 2, 16])
    """

    _trained = False

    def __init__(self, table: Table, field: str | None = None) -> None:
        """Put a layer over a field of a table, the first if None; nothing is written.

        Raises InvalidInputError for a table by key: graphs read by row.
        """
        super().__init__()
        if not isinstance(table, Table):
            raise InvalidTypeError(f"a layer needs a table such as store['item'], not {table!r}")
        if table.by_row is not table:
            raise InvalidInputError(
                f"table {table.name!r} is by key, and graphs read by row: look keys up before, and "
                "give the layer store[name].by_row"
            )
        self.table = table
        self.field: str = next(iter(table.fields)) if field is None else field
        item = table.spec.layout.field(self.field)
        self._dim: int = item.dim
        self._scaled: bool = item.scaled is not None
        self._dtype: torch.dtype = torch.float32 if self._scaled else item.element.torch_dtype()
        empty = torch.empty(0, item.dim, dtype=self._dtype, device=table.device)
        self.register_buffer("anchor", empty, persistent=False)
        self._number = naming.register(self, table, self.field)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the row of each id, `ids.shape + (dim,)`, in the type of the module."""
        if torch.compiler.is_compiling():
            return compiling.look_up(ids, self)
        if not isinstance(ids, Tensor):
            raise InvalidTypeError(
                f"a layer takes ids as a tensor, not a {type(ids).__name__}: torch.as_tensor(ids)"
            )
        return self.read_rows(ids)

    def prefetch(self, ids: Any, *, window: int = 16) -> None:
        """Bring the rows of a coming replay or batch nearer; see `Table.prefetch`."""
        self.table.prefetch(ids, window=window)

    def adapt(self) -> None:
        """Admit rows that replays have read to the GPU's slots; see `Table.adapt`."""
        self.table.adapt()

    # -- what the operators call

    def read_rows(self, ids: Tensor) -> Tensor:
        """Return the rows of ids."""
        # Scales are multiplied in the type of the module; other rows are converted after.
        dtype = self.anchor.dtype if self._scaled else self._dtype
        out = torch.empty((*ids.shape, self._dim), dtype=dtype, device=self.table.device)
        self.table.read_into(ids, out, self.field)
        return out.to(self.anchor)

    def extra_repr(self) -> str:
        """Name the table."""
        return f"{self.table.name!r}, {self.table.rows}, {self._dim}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return another layer over the same table; rows are not copied."""
        other = copied(self, memo)
        other._number = naming.register(other, self.table, self.field)
        return other
