"""A layer over tables that share a space and a layout: one lookup for several features.

`ids` are those of all features, one feature after another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tierstore._table.joint import Features
from tierstore.distributed.known import Known, on_host
from tierstore.errors import InvalidInputError
from tierstore.nn.autograd import Rows, look_up
from tierstore.nn.layer import RowsLayer
from tierstore.nn.rows import RowsParameter, tracing_refused


class Coming:
    """Ids of coming batches on a device, with one tensor of those of all features.

    A lookup of ids that were announced gets that tensor, by which the request for them is found.
    """

    def __init__(self) -> None:
        """Keep none."""
        self._kept: deque[tuple[Known, tuple[Tensor, list[int]]]] = deque()

    def __bool__(self) -> bool:
        """Whether any are kept."""
        return bool(self._kept)

    def keep(self, given: list[Tensor], joined: tuple[Tensor, list[int]], window: int) -> None:
        """Keep the ids of features, as given and as one tensor with their lengths."""
        if on_host(joined[0]):
            return  # those are known by their values
        while len(self._kept) >= max(window, 1):
            self._kept.popleft()
        self._kept.append((Known(*given), joined))

    def find(self, given: list[Tensor]) -> tuple[Tensor, list[int]] | None:
        """Return these ids as one tensor, and their lengths, if they are kept; forget them then."""
        if self._kept and not all(isinstance(each, Tensor) for each in given):
            return None
        for place, (known, joined) in enumerate(self._kept):
            if known.is_as(*given):
                del self._kept[place]
                return joined
        return None


class JointLayer(RowsLayer):
    """A layer over a field of tables that are looked up and trained as one.

    Attributes:
        table: the tables, by rows of their space.
        coming: ids that were announced to tables which ranks share.
    """

    def _begin(self, empty: Tensor, rows: RowsParameter) -> None:
        """Take a parameter; no ids are announced to it yet."""
        super()._begin(empty, rows)
        self.coming: Coming = Coming()

    def look_up(
        self,
        ids: Tensor,
        features: Features,
        lengths: Sequence[int],
        counted: Tensor | None = None,
        *,
        apart: bool = True,
    ) -> Any:
        """Return the rows of each feature, `(length, dim)`, or all in one tensor unless `apart`.

        The other arguments are those of `Rows`, with `ids` as `RowsLayer.lease_rows` takes them.
        """
        if torch._C._are_functorch_transforms_active() or torch._C._is_tracing():
            self.refuse_transforms()
        rows = Rows(self, features, lengths, counted, apart=apart)
        if self.own.trains(self):
            return look_up(rows, self.own, ids)
        with self.together():
            return rows.read(ids)

    def refuse_transforms(self) -> None:
        """Raise InvalidInputError in `torch.jit.trace` and within `torch.func`."""
        if torch._C._is_tracing():
            raise tracing_refused()
        if torch._C._are_functorch_transforms_active():
            raise InvalidInputError(
                "a collection cannot be looked up within torch.func; TieredEmbedding can"
            )

    def extra_repr(self) -> str:
        """Name the tables."""
        return f"{self.table.name}, {self.embedding_dim}"

    # What state dicts hold is up to the collection: which tables are looked up together depends on
    # the budget that the store was opened with.

    def _save_to_state_dict(self, *_: Any) -> None:
        """Add nothing."""

    def _load_from_state_dict(self, *_: Any) -> None:
        """Take nothing."""
