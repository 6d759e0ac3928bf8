"""A layer of bags of rows over a table of a store."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tierstore._table.table import Table
from tierstore.errors import InvalidInputError, InvalidTypeError
from tierstore.nn.embedding import TieredEmbedding, jagged

__all__ = ["TieredEmbeddingBag"]


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
