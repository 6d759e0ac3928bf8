"""A layer that pools bags of rows of a table."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from tierstore._table.table import Table
from tierstore.errors import InvalidInputError
from tierstore.nn.embedding import TieredEmbedding
from tierstore.nn.features import Bags, jagged
from tierstore.nn.keyed import numbered, while_named
from tierstore.nn.part import Columns, Part
from tierstore.nn.pooling import pool


class TieredEmbeddingBag(TieredEmbedding):
    """Sums, means or maxima over bags of rows, as `torch.nn.EmbeddingBag`; see `TieredEmbedding`.

    Rows of `padding_idx` are left out of their bags. Rows are pooled where they are, and the
    gradient of a bag is added to those of its rows: neither needs memory for a row per id, except
    in compiled graphs and under `torch.func`.
    """

    _stands_for = torch.nn.EmbeddingBag

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
        self._check_options(table.rows, mode=mode)
        self.mode = mode
        self.include_last_offset = include_last_offset
        columns = Columns((mode,), (0,), self.embedding_dim, self.embedding_dim)
        self._columns = columns

    @classmethod
    def _check_options(cls, rows: int, *, mode: str = "mean", **others: Any) -> None:
        """Raise InvalidInputError for options that a layer over so many rows cannot have."""
        super()._check_options(rows, **others)
        if mode not in ("sum", "mean", "max"):
            raise InvalidInputError(f"mode is 'sum', 'mean' or 'max', not {mode!r}")

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Return one row a bag, `(bags, embedding_dim)`.

        Args:
            input: ids, 2-D `(bags, n)`, nested of layout `torch.jagged`, or 1-D with `offsets`; of
                a table by key the keys, which may be texts in lists or arrays of these shapes.
            offsets: where each bag starts in a 1-D input.
            per_sample_weights: a factor for each id, in the shape of `input`; only with mode "sum".
        """
        if self._keyed is None:
            return self._pooled(input, offsets, per_sample_weights)
        pooled = partial(self._pooled, input, offsets, per_sample_weights)
        return while_named([self._keyed], pooled)

    def _pooled(
        self, input: Any, offsets: Tensor | None, per_sample_weights: Tensor | None
    ) -> Tensor:
        """Do what `forward` does; keys are looked up and leased one after the other."""
        first = None
        if self._keyed is not None:
            self._check_eager(self._keyed)
            input, first = numbered(self._keyed, self.field, input, add=self.own.trains(self))
        bags = Bags.of(input, offsets, per_sample_weights, ends=self.include_last_offset)
        if bags.weights is not None and self.mode != "sum":
            raise InvalidInputError(f"per_sample_weights are for mode 'sum', not {self.mode!r}")
        if self.padding_idx is not None:
            bags = bags.padded(self.padding_idx)
        if (
            torch.compiler.is_compiling()
            or torch._C._are_functorch_transforms_active()
            or self._averages
        ):
            return self._expanded(bags)
        every, trains = (len(bags.ids),), self.own.trains(self)
        return pool([Part(self, self._columns, bags, None, every, (0,), first, trains=trains)])[0]

    def _expanded(self, bags: Bags) -> Tensor:
        """Return one row a bag from a row for each id, which graphs and transforms know."""
        rows = super().forward(bags.ids)
        places, padding = bags.places(bags.ids.to(rows.device))
        return torch.nn.functional.embedding_bag(
            places,
            rows,
            bags.offsets.to(rows.device, torch.int64),
            mode=self.mode,
            per_sample_weights=bags.weights,
            include_last_offset=True,
            padding_idx=padding,
        )

    def prefetch(self, ids: Any, *, window: int = 16) -> None:
        """Start bringing the rows of a coming batch, `ids`, nearer; see `Table.prefetch`."""
        if self.is_shared and self._keyed is None and isinstance(ids, Tensor):
            ids = jagged(ids).values() if ids.is_nested else ids.reshape(-1)
            if self.padding_idx is not None:  # as a lookup requests them
                ids = torch.cat([ids, ids.new_full((1,), self.padding_idx)])
        super().prefetch(ids, window=window)
